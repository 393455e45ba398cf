"""Requests of the API: parsing and validation of their bodies.

Unsupported arguments are rejected by name. An argument with a neutral value, such as a
length_penalty of 1, is accepted; otherwise only labels, such as `user`, are ignored.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from jrl.rollout.adjustments import Adjustments
from jrl.serving.api.fields import (
    ApiError,
    boolean,
    integer,
    invalid_argument,
    invalid_value,
    is_value,
)
from jrl.serving.api.messages import messages_of
from jrl.serving.api.output import MAX_TOP_LOGPROBS, OUTPUT_ARGUMENTS, Output, output_of
from jrl.serving.api.response_request import chat_of, repeated_arguments
from jrl.serving.api.sampling import SAMPLING_ARGUMENTS, sampling_parameters
from jrl.serving.api.structured import STRUCTURED_ARGUMENTS, TextRule, text_rule
from jrl.serving.api.tokens import completion_of
from jrl.serving.api.tools import TOOL_ARGUMENTS, ToolUse, tools_of
from jrl.tasks.data.conversations import Turn, checked_arguments
from jrl.tasks.data.fields import short

MAX_CHOICES = 128
"""Limit of choices over all prompts of a request."""
MAX_PROMPTS = 128


@dataclass(frozen=True)
class ApiRequest:
    """A valid request.

    Attributes:
      prompts: texts or token ids to complete; None for a conversation.
      messages: the conversation, with all fields of its messages.
      max_tokens: of a choice, 0 generates nothing; None takes the server's default.
      n: choices of each prompt.
      seed: of sampling; None takes a random one.
      output: the ends of a choice, for example stop strings, and what is returned of it.
      include_usage: true if a stream ends with its usage.
      continuous_usage: true if each chunk of such a stream has the usage so far.
      top_logprobs: number of top log-probabilities per position.
      echo: true if the prompt precedes the completion.
      adjustments: of the logits before sampling; None changes none.
      template_arguments: variables passed to the chat template.
      tools: that may be called; None without.
      rule: of the response's text; None is any text.
      ending: of the conversation in the prompt: the assistant's next turn is opened, the last
        message ends, or the last message is continued.
      shows_reasoning: false if reasoning is left out of the response.
      tokens_only: true if the response has token ids and no text.
      experts_start: first token of the prompt whose expert ids are returned, if the server records
        them, with the token ids.
      repeated: arguments that a response of ``/v1/responses`` repeats; None for other responses.
    """

    model: str
    prompts: tuple[str | tuple[int, ...], ...] | None
    messages: tuple[Turn, ...]
    max_tokens: int | None
    n: int
    temperature: float
    top_p: float
    seed: int | None
    output: Output
    stream: bool
    include_usage: bool
    logprobs: bool
    top_logprobs: int
    echo: bool
    adjustments: Adjustments | None = None
    template_arguments: Mapping[str, Any] = field(default_factory=dict)
    tools: ToolUse | None = None
    rule: TextRule | None = None
    ending: Literal["opened", "closed", "continued"] = "opened"
    shows_reasoning: bool = True
    continuous_usage: bool = False
    tokens_only: bool = False
    experts_start: int = 0
    repeated: Mapping[str, Any] | None = None

    @property
    def chat(self) -> bool:
        """True if it is a chat request."""
        return self.prompts is None

    @property
    def scores_prompts(self) -> bool:
        """True if the log-probabilities of the prompts are returned."""
        return (self.echo and self.logprobs) or self.output.prompt_logprobs is not None

    @property
    def num_prompt_top(self) -> int:
        """Number of top log-probabilities per position of the prompts."""
        echoed = self.top_logprobs if self.echo else 0
        return max(echoed, self.output.prompt_logprobs or 0)

    @property
    def needs_grammar(self) -> bool:
        """True if only some texts are allowed as responses."""
        must_call = self.tools is not None and self.tools.choice == "required"
        return self.rule is not None or must_call


def parse_completion(body: Mapping[str, Any]) -> ApiRequest:
    """Parses the body of ``/v1/completions``; invalid or unsupported arguments raise ApiError."""
    arguments = (*COMMON_ARGUMENTS, "prompt", "max_tokens", "logprobs", "echo")
    _check_names(body, arguments, NEUTRAL_COMPLETION)
    top_logprobs = integer(body, "logprobs", 0, MAX_TOP_LOGPROBS)
    common, prompts = _common(body), _prompts(body)
    if len(prompts) * common["n"] > MAX_CHOICES:
        raise invalid_argument(
            "n",
            f"n={common['n']} of {len(prompts)} prompts are {len(prompts) * common['n']} choices: "
            f"request at most {MAX_CHOICES} at a time.",
        )
    return ApiRequest(
        **common,
        prompts=prompts,
        messages=(),
        max_tokens=integer(body, "max_tokens", 0, None),
        logprobs=top_logprobs is not None,
        top_logprobs=top_logprobs or 0,
        echo=boolean(body, "echo"),
    )


def parse_chat(body: Mapping[str, Any]) -> ApiRequest:
    """Parses the body of ``/v1/chat/completions``, with errors as of `parse_completion`."""
    chat_arguments = ("messages", "max_tokens", "max_completion_tokens", "logprobs", "top_logprobs")
    arguments = (*COMMON_ARGUMENTS, *chat_arguments, *TOOL_ARGUMENTS, *TEMPLATE_ARGUMENTS)
    _check_names(body, arguments, NEUTRAL_CHAT)
    logprobs = boolean(body, "logprobs")
    top_logprobs = integer(body, "top_logprobs", 0, MAX_TOP_LOGPROBS)
    if top_logprobs and not logprobs:
        raise invalid_argument("top_logprobs", f"top_logprobs={top_logprobs} needs logprobs=true.")
    limits = {
        name: value
        for name in ("max_completion_tokens", "max_tokens")
        if (value := integer(body, name, 1, None)) is not None
    }
    if len(set(limits.values())) > 1:
        raise invalid_argument(
            "max_tokens",
            f"max_tokens={limits['max_tokens']} and max_completion_tokens="
            f"{limits['max_completion_tokens']} differ: give one of them.",
        )
    messages = messages_of(body)
    return ApiRequest(
        **_common(body),
        prompts=None,
        messages=messages,
        max_tokens=next(iter(limits.values()), None),
        logprobs=logprobs,
        top_logprobs=top_logprobs or 0,
        echo=False,
        template_arguments=_template_arguments(body),
        tools=tools_of(body),
        ending=_ending(body, messages),
        shows_reasoning=body.get("include_reasoning") is None or boolean(body, "include_reasoning"),
    )


def parse_response(body: Mapping[str, Any]) -> ApiRequest:
    """Parses the body of ``/v1/responses``, with errors as of `parse_completion`."""
    request = parse_chat(chat_of(body))
    rule = request.rule
    if rule is not None and rule.param == "response_format":
        rule = replace(rule, param="text.format")
    return replace(request, rule=rule, repeated=repeated_arguments(body))


def parse_generate(body: Mapping[str, Any]) -> ApiRequest:
    """Parses the body of ``/inference/v1/generate``, with errors as of `parse_completion`."""
    completion, experts_start = completion_of(body)
    request = parse_completion(completion)
    output = replace(request.output, returns_ids=True, names_ids=True)
    return replace(request, output=output, tokens_only=True, experts_start=experts_start)


TEMPLATE_ARGUMENTS = (
    *("chat_template_kwargs", "reasoning_effort", "include_reasoning"),
    *("add_generation_prompt", "continue_final_message"),
)
EFFORTS = ("none", "minimal", "low", "medium", "high", "xhigh", "max")
"""Values of `reasoning_effort`."""
LABELS = ("user", "safety_identifier", "metadata", "prompt_cache_key", "prompt_cache_retention")
"""Arguments without effect on responses, which are ignored."""
COMMON_ARGUMENTS = (
    *("model", "n", *SAMPLING_ARGUMENTS, "seed", *OUTPUT_ARGUMENTS),
    *("stream", "stream_options", *STRUCTURED_ARGUMENTS, *LABELS),
)
"""Arguments of both endpoints."""


_ZERO, _ONE = is_value(0, 0.0), is_value(1, 1.0)
_TRUE, _FALSE = is_value(True), is_value(False)
NEUTRAL_VALUES: Mapping[str, Callable[[Any], bool]] = {
    "best_of": _ONE,
    "bad_words": is_value([]),
    "spaces_between_special_tokens": is_value(True, False),
    "use_beam_search": _FALSE,
    "length_penalty": _ONE,
    "early_stopping": _FALSE,
    "priority": _ZERO,
}
"""Unsupported arguments, each with a predicate that is true for its neutral values."""
NEUTRAL_STREAM_OPTIONS = {"include_obfuscation": _FALSE}
USAGE_OPTIONS = ("include_usage", "continuous_usage_stats")
"""Supported members of `stream_options`."""
NEUTRAL_COMPLETION = {**NEUTRAL_VALUES, "suffix": is_value(""), "add_special_tokens": _TRUE}
NEUTRAL_CHAT = {
    **NEUTRAL_VALUES,
    "functions": is_value([]),
    "function_call": is_value("none"),
    "modalities": is_value(["text"]),
    "store": _FALSE,
    "service_tier": is_value("auto", "default"),
    "echo": _FALSE,
    "documents": is_value([]),
    "add_special_tokens": _FALSE,
}


def _check_names(
    body: Mapping[str, Any],
    supported: tuple[str, ...],
    neutral: Mapping[str, Callable[[Any], bool]],
) -> None:
    for name, value in body.items():
        if name in supported or _is_neutral(name, value, neutral):
            continue
        raise invalid_argument(
            name,
            f"{name}={short(value)} is not supported: leave it out.",
            "unsupported_parameter" if name in neutral else "unknown_parameter",
        )


def _is_neutral(name: str, value: Any, neutral: Mapping[str, Callable[[Any], bool]]) -> bool:
    return value is None or (name in neutral and neutral[name](value))


def _common(body: Mapping[str, Any]) -> dict[str, Any]:
    stream = boolean(body, "stream")
    options = body.get("stream_options")
    if options is not None:
        if not stream:
            raise invalid_argument("stream_options", "stream_options needs stream=true.")
        if not isinstance(options, dict) or any(
            name not in USAGE_OPTIONS and not _is_neutral(name, value, NEUTRAL_STREAM_OPTIONS)
            for name, value in options.items()
        ):
            rule = '{"include_usage": true or false, "continuous_usage_stats": true or false}'
            raise invalid_value("stream_options", options, rule)
    includes, continues = (bool(options) and boolean(options, name) for name in USAGE_OPTIONS)
    if continues and not includes:
        raise invalid_argument(
            "stream_options", "stream_options.continuous_usage_stats=true needs include_usage=true."
        )
    n = integer(body, "n", 1, MAX_CHOICES)
    return {
        "model": _model(body),
        "n": 1 if n is None else n,
        **sampling_parameters(body),
        "seed": integer(body, "seed", -(2**63), 2**63 - 1),
        "output": output_of(body, stream=stream),
        "stream": stream,
        "rule": text_rule(body),
        "include_usage": includes,
        "continuous_usage": continues,
    }


def _model(body: Mapping[str, Any]) -> str:
    model = body.get("model")
    if not isinstance(model, str) or not model:
        raise invalid_argument(
            "model", "model must be the name of a model, as GET /v1/models lists it."
        )
    return model


def _prompts(body: Mapping[str, Any]) -> tuple[str | tuple[int, ...], ...]:
    prompt: Any = body.get("prompt")
    prompts: list[Any] = prompt if isinstance(prompt, list) and not _is_ids(prompt) else [prompt]
    if not prompts or not all(isinstance(item, str) or _is_ids(item) for item in prompts):
        rule = "a text, a list of token ids, or a list of either"
        raise invalid_value("prompt", prompt, rule)
    if len(prompts) > MAX_PROMPTS:
        raise invalid_argument(
            "prompt", f"prompt has {len(prompts)} prompts: send {MAX_PROMPTS} at most at a time."
        )
    return tuple(tuple(item) if isinstance(item, list) else item for item in prompts)


def _template_arguments(body: Mapping[str, Any]) -> dict[str, Any]:
    name = "chat_template_kwargs"
    value = body.get(name)
    try:
        arguments = {} if value is None else checked_arguments(value, name)
    except ValueError as error:
        raise invalid_argument(name, f"{error}.") from error
    effort = body.get("reasoning_effort")
    if effort is None:
        return arguments
    if effort not in EFFORTS:
        raise invalid_value("reasoning_effort", effort, f"one of {', '.join(EFFORTS)}")
    if arguments.setdefault("reasoning_effort", effort) != effort:
        raise invalid_argument(
            "reasoning_effort",
            f"reasoning_effort={effort!r} and that of {name} differ: give one of them.",
        )
    return arguments


def _ending(
    body: Mapping[str, Any], messages: Sequence[Turn]
) -> Literal["opened", "closed", "continued"]:
    """State of the assistant's turn at the end of a conversation's prompt."""
    opens = boolean(body, "add_generation_prompt")
    if not boolean(body, "continue_final_message"):
        return "opened" if opens or body.get("add_generation_prompt") is None else "closed"
    name = "continue_final_message"
    if opens:
        raise invalid_argument(
            name, f"{name}=true needs add_generation_prompt=false: leave out one of them."
        )
    if messages[-1]["role"] != "assistant" or messages[-1].get("tool_calls"):
        raise invalid_argument(
            name, f"{name}=true needs a last message of the assistant without tool_calls."
        )
    return "continued"


def _is_ids(value: Any) -> bool:
    return isinstance(value, list) and bool(value) and all(type(each) is int for each in value)


def check_model(requested: str, name: str) -> None:
    """Raises ApiError if another model is requested."""
    if requested != name:
        raise ApiError(
            404,
            f"model={short(requested)} is not served here: use {name!r}.",
            "model",
            "model_not_found",
        )
