"""Parsing and validation of request bodies.

Unsupported arguments are rejected by name. An argument with a neutral value, such as a
frequency_penalty of 0, is accepted; otherwise only `user`, which names the client, is ignored.
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from jrl.rollout.sampling import LEAST_TEMPERATURE, LEAST_TOP_P
from jrl.serving.refusal import Refused, wrong
from jrl.tasks.data.conversations import checked_arguments
from jrl.tasks.data.fields import short

MOST_CHOICES = 128
"""Limit of choices over all prompts of a request."""
MOST_TOKENS = 2**31 - 1
"""Limit of a completion's tokens, as counts are 32-bit integers."""
MOST_STOPS = 4
MOST_LIKELIEST = 20
"""Limit of top log-probabilities per position."""
MOST_PROMPTS = 128

Message = tuple[str, str]
"""Role and content."""


@dataclass(frozen=True)
class Asked:
    """A valid request.

    Attributes:
      model: its name as clients know it.
      prompts: texts or token ids to complete; None for a conversation.
      messages: the conversation.
      max_tokens: of a choice; None takes the server's default.
      n: choices of each prompt.
      temperature, top_p: of sampling.
      seed: of sampling; None takes a random one.
      stops: stop strings; a choice ends before the first.
      stream: true if the response is streamed.
      include_usage: true if a stream ends with its usage.
      logprobs: true if log-probabilities are returned.
      likeliest: number of top log-probabilities per position.
      echo: true if the prompt precedes the completion.
      template_arguments: variables passed to the chat template.
    """

    model: str
    prompts: tuple[str | tuple[int, ...], ...] | None
    messages: tuple[Message, ...]
    max_tokens: int | None
    n: int
    temperature: float
    top_p: float
    seed: int | None
    stops: tuple[str, ...]
    stream: bool
    include_usage: bool
    logprobs: bool
    likeliest: int
    echo: bool
    template_arguments: Mapping[str, Any] = field(default_factory=dict)

    @property
    def chat(self) -> bool:
        """True if it is a chat request."""
        return self.prompts is None


def completion_of(body: Mapping[str, Any]) -> Asked:
    """Parses the body of ``/v1/completions``.

    Raises:
      Refused: for invalid or unsupported arguments.
    """
    _check_names(body, (*COMMON, "prompt", "max_tokens", "logprobs", "echo"), NEUTRAL_COMPLETION)
    likeliest = _whole(body, "logprobs", 0, MOST_LIKELIEST)
    echo = _boolean(body, "echo")
    if echo and likeliest is not None:
        raise wrong(
            "echo",
            "echo=true with logprobs would need the log-probabilities of the prompt, which are not "
            "served: leave out one of the two.",
        )
    common, prompts = _common(body), _prompts(body)
    if len(prompts) * common["n"] > MOST_CHOICES:
        raise wrong(
            "n",
            f"n={common['n']} of {len(prompts)} prompts are {len(prompts) * common['n']} choices: "
            f"ask for {MOST_CHOICES} at most at a time.",
        )
    return Asked(
        **common,
        prompts=prompts,
        messages=(),
        max_tokens=_whole(body, "max_tokens", 1, None),
        logprobs=likeliest is not None,
        likeliest=likeliest or 0,
        echo=echo,
    )


def chat_of(body: Mapping[str, Any]) -> Asked:
    """Parses the body of ``/v1/chat/completions``.

    Raises:
      Refused: for invalid or unsupported arguments.
    """
    own = ("messages", "max_tokens", "max_completion_tokens", "logprobs", "top_logprobs")
    _check_names(body, (*COMMON, *own, TEMPLATE_ARGUMENTS), NEUTRAL_CHAT)
    logprobs = _boolean(body, "logprobs")
    likeliest = _whole(body, "top_logprobs", 0, MOST_LIKELIEST)
    if likeliest is not None and not logprobs:
        raise wrong("top_logprobs", f"top_logprobs={likeliest} needs logprobs=true.")
    limits = {
        name: value
        for name in ("max_completion_tokens", "max_tokens")
        if (value := _whole(body, name, 1, None)) is not None
    }
    if len(set(limits.values())) > 1:
        raise wrong(
            "max_tokens",
            f"max_tokens={limits['max_tokens']} and max_completion_tokens="
            f"{limits['max_completion_tokens']} differ: give one of them.",
        )
    return Asked(
        **_common(body),
        prompts=None,
        messages=_messages(body),
        max_tokens=next(iter(limits.values()), None),
        logprobs=logprobs,
        likeliest=likeliest or 0,
        echo=False,
        template_arguments=_template_arguments(body),
    )


TEMPLATE_ARGUMENTS = "chat_template_kwargs"
COMMON = ("model", "n", "temperature", "top_p", "seed", "stop", "stream", "stream_options", "user")
"""Arguments of both; `user` names the client and has no effect."""


def _is(*values: Any) -> Callable[[Any], bool]:
    return lambda given: any(given == value and type(given) is type(value) for value in values)


_ZERO = _is(0, 0.0)
NEUTRAL: Mapping[str, Callable[[Any], bool]] = {
    "frequency_penalty": _ZERO,
    "presence_penalty": _ZERO,
    "logit_bias": _is({}),
}
"""Unsupported arguments, each with a predicate that is true for its neutral values."""
NEUTRAL_COMPLETION = {**NEUTRAL, "best_of": _is(1), "suffix": _is("")}
NEUTRAL_CHAT = {
    **NEUTRAL,
    "response_format": _is({"type": "text"}),
    "tools": _is([]),
    "tool_choice": _is("none"),
    "functions": _is([]),
    "function_call": _is("none"),
    "modalities": _is(["text"]),
    "store": _is(False),
    "metadata": _is({}),
    "service_tier": _is("auto", "default"),
    "parallel_tool_calls": _is(True, False),
}


def _check_names(
    body: Mapping[str, Any], known: tuple[str, ...], neutral: Mapping[str, Callable[[Any], bool]]
) -> None:
    for name, value in body.items():
        if name in known or value is None or (name in neutral and neutral[name](value)):
            continue
        raise wrong(
            name,
            f"{name}={short(value)} is not served here: leave it out.",
            "unsupported_parameter" if name in neutral else "unknown_parameter",
        )


def _common(body: Mapping[str, Any]) -> dict[str, Any]:
    stream = _boolean(body, "stream")
    options = body.get("stream_options")
    if options is not None:
        if not stream:
            raise wrong("stream_options", "stream_options needs stream=true.")
        if not isinstance(options, dict) or set(options) - {"include_usage"}:
            raise wrong(
                "stream_options",
                f'stream_options={short(options)} must be {{"include_usage": true or false}}.',
            )
    n = _whole(body, "n", 1, MOST_CHOICES)
    temperature, top_p = _number(body, "temperature", 0.0, 2.0), _number(body, "top_p", 0.0, 1.0)
    greedy = "use temperature=0 for the likeliest token"
    if temperature is not None and 0 < temperature < LEAST_TEMPERATURE:
        least = f"less than {LEAST_TEMPERATURE:g}, by which logits are no number in float32"
        raise wrong("temperature", f"temperature={temperature:g} is {least}: {greedy}.")
    if top_p is not None and top_p < LEAST_TOP_P:
        raise wrong("top_p", f"top_p={top_p:g} leaves no token in float32: {greedy}.")
    return {
        "model": _model(body),
        "n": 1 if n is None else n,
        "temperature": 1.0 if temperature is None else temperature,
        "top_p": 1.0 if top_p is None else top_p,
        "seed": _whole(body, "seed", -(2**63), 2**63 - 1),
        "stops": _stops(body),
        "stream": stream,
        "include_usage": bool(options) and _boolean(options, "include_usage"),
    }


def _model(body: Mapping[str, Any]) -> str:
    model = body.get("model")
    if not isinstance(model, str) or not model:
        raise wrong("model", "model must be the name of one, as GET /v1/models lists it.")
    return model


def _prompts(body: Mapping[str, Any]) -> tuple[str | tuple[int, ...], ...]:
    prompt: Any = body.get("prompt")
    several: list[Any] = prompt if isinstance(prompt, list) and not _is_ids(prompt) else [prompt]
    if not several or not all(isinstance(each, str) or _is_ids(each) for each in several):
        raise wrong(
            "prompt",
            f"prompt={short(prompt)} must be a text, a list of token ids, or a list of several of "
            "one of these.",
        )
    if len(several) > MOST_PROMPTS:
        raise wrong(
            "prompt", f"prompt has {len(several)} prompts: send {MOST_PROMPTS} at most at a time."
        )
    return tuple(tuple(each) if isinstance(each, list) else each for each in several)


def _template_arguments(body: Mapping[str, Any]) -> dict[str, Any]:
    value = body.get(TEMPLATE_ARGUMENTS)
    try:
        return {} if value is None else checked_arguments(value, TEMPLATE_ARGUMENTS)
    except ValueError as error:
        raise wrong(TEMPLATE_ARGUMENTS, f"{error}.") from error


def _is_ids(value: Any) -> bool:
    return isinstance(value, list) and bool(value) and all(type(each) is int for each in value)


def _messages(body: Mapping[str, Any]) -> tuple[Message, ...]:
    messages = body.get("messages")
    if not isinstance(messages, list) or not messages:
        raise wrong(
            "messages",
            f'messages={short(messages)} must be a list of {{"role": ..., "content": ...}}.',
        )
    return tuple(_message(f"messages[{index}]", each) for index, each in enumerate(messages))


def _message(where: str, message: Any) -> Message:
    if not isinstance(message, dict) or not isinstance(message.get("role"), str):
        raise wrong(where, f'{where}={short(message)} must be {{"role": ..., "content": ...}}.')
    for name, value in message.items():
        if name not in ("role", "content") and value not in (None, []):
            raise wrong(
                f"{where}.{name}",
                f"{where}.{name}={short(value)} is not served here: leave it out.",
                "unsupported_parameter",
            )
    content = message.get("content")
    if isinstance(content, list):
        content = "".join(_part(f"{where}.content[{i}]", part) for i, part in enumerate(content))
    if not isinstance(content, str):
        raise wrong(
            f"{where}.content",
            f"{where}.content={short(content)} must be a text, or a list of parts that are.",
        )
    return message["role"], content


def _part(where: str, part: Any) -> str:
    if not isinstance(part, dict) or part.get("type") != "text":
        kind = part.get("type") if isinstance(part, dict) else part
        raise wrong(
            where,
            f'{where} is of type {short(kind)}: only {{"type": "text", "text": ...}} is served.',
            "unsupported_parameter",
        )
    if not isinstance(part.get("text"), str):
        raise wrong(where, f"{where}.text={short(part.get('text'))} must be a text.")
    return part["text"]


def _stops(body: Mapping[str, Any]) -> tuple[str, ...]:
    given = body.get("stop")
    several = [] if given is None else given if isinstance(given, list) else [given]
    if not all(isinstance(each, str) and each for each in several) or len(several) > MOST_STOPS:
        raise wrong(
            "stop",
            f"stop={short(given)} must be a text that is not empty, or a list of {MOST_STOPS} at "
            "most.",
        )
    return tuple(several)


def _boolean(body: Mapping[str, Any], name: str) -> bool:
    value = body.get(name)
    if value is not None and type(value) is not bool:
        raise wrong(name, f"{name}={short(value)} must be true or false.")
    return bool(value)


def _whole(body: Mapping[str, Any], name: str, least: int, most: int | None) -> int | None:
    value = body.get(name)
    if value is None:
        return None
    if type(value) is not int or not least <= value <= (MOST_TOKENS if most is None else most):
        span = f"from {least} to {MOST_TOKENS}" if most is None else f"in {least}..{most}"
        raise wrong(name, f"{name}={short(value)} must be a whole number {span}.")
    return value


def _number(body: Mapping[str, Any], name: str, least: float, most: float) -> float | None:
    value = body.get(name)
    if value is None:
        return None
    if type(value) not in (int, float) or not least <= value <= most or not math.isfinite(value):
        raise wrong(name, f"{name}={short(value)} must be a number in {least:g}..{most:g}.")
    return float(value)


def check_model(asked: Asked, name: str) -> None:
    """Raises Refused if another model is requested."""
    if asked.model != name:
        raise Refused(
            404,
            f"model={short(asked.model)} is not served here: ask for {name!r}.",
            "model",
            "model_not_found",
        )
