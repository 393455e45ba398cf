"""Requests of the API: parsing and validation of their bodies, and the errors that reject them.

Unsupported arguments are rejected by name. An argument with a neutral value, such as a
frequency_penalty of 0, is accepted; otherwise only `user`, which names the client, is ignored.
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from jrl.rollout.sampling import LEAST_TEMPERATURE, LEAST_TOP_P
from jrl.tasks.data.conversations import checked_arguments
from jrl.tasks.data.fields import short

MAX_MESSAGE_LENGTH = 300
"""Most characters of an exception's message that a client receives."""
MAX_CHOICES = 128
"""Limit of choices over all prompts of a request."""
MAX_TOKENS = 2**31 - 1
"""Limit of a completion's tokens, as counts are 32-bit integers."""
MAX_STOPS = 4
MAX_TOP_LOGPROBS = 20
"""Limit of top log-probabilities per position."""
MAX_PROMPTS = 128

Message = tuple[str, str]
"""Role and content."""
KINDS = {
    400: "invalid_request_error",
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    405: "invalid_request_error",
    408: "invalid_request_error",
    413: "invalid_request_error",
    429: "rate_limit_error",
}
"""The type of an error by its status."""


@dataclass(frozen=True)
class ApiRequest:
    """A valid request.

    Attributes:
      model: its name as clients know it.
      prompts: texts or token ids to complete; None for a conversation.
      messages: the conversation.
      max_tokens: of a choice, 0 generates nothing; None takes the server's default.
      n: choices of each prompt.
      temperature, top_p: of sampling.
      seed: of sampling; None takes a random one.
      stops: stop strings; a choice ends before the first.
      stream: true if the response is streamed.
      include_usage: true if a stream ends with its usage.
      logprobs: true if log-probabilities are returned.
      top_logprobs: number of top log-probabilities per position.
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
    top_logprobs: int
    echo: bool
    template_arguments: Mapping[str, Any] = field(default_factory=dict)

    @property
    def chat(self) -> bool:
        """True if it is a chat request."""
        return self.prompts is None

    @property
    def scores_prompts(self) -> bool:
        """True if the log-probabilities of the prompts are returned."""
        return self.echo and self.logprobs


def parse_completion(body: Mapping[str, Any]) -> ApiRequest:
    """Parses the body of ``/v1/completions``.

    Raises:
      ApiError: for invalid or unsupported arguments.
    """
    _check_names(
        body, (*COMMON_ARGUMENTS, "prompt", "max_tokens", "logprobs", "echo"), NEUTRAL_COMPLETION
    )
    top_logprobs = _integer(body, "logprobs", 0, MAX_TOP_LOGPROBS)
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
        max_tokens=_integer(body, "max_tokens", 0, None),
        logprobs=top_logprobs is not None,
        top_logprobs=top_logprobs or 0,
        echo=_boolean(body, "echo"),
    )


def parse_chat(body: Mapping[str, Any]) -> ApiRequest:
    """Parses the body of ``/v1/chat/completions``.

    Raises:
      ApiError: for invalid or unsupported arguments.
    """
    chat_arguments = ("messages", "max_tokens", "max_completion_tokens", "logprobs", "top_logprobs")
    _check_names(body, (*COMMON_ARGUMENTS, *chat_arguments, TEMPLATE_ARGUMENTS), NEUTRAL_CHAT)
    logprobs = _boolean(body, "logprobs")
    top_logprobs = _integer(body, "top_logprobs", 0, MAX_TOP_LOGPROBS)
    if top_logprobs is not None and not logprobs:
        raise invalid_argument("top_logprobs", f"top_logprobs={top_logprobs} needs logprobs=true.")
    limits = {
        name: value
        for name in ("max_completion_tokens", "max_tokens")
        if (value := _integer(body, name, 1, None)) is not None
    }
    if len(set(limits.values())) > 1:
        raise invalid_argument(
            "max_tokens",
            f"max_tokens={limits['max_tokens']} and max_completion_tokens="
            f"{limits['max_completion_tokens']} differ: give one of them.",
        )
    return ApiRequest(
        **_common(body),
        prompts=None,
        messages=_messages(body),
        max_tokens=next(iter(limits.values()), None),
        logprobs=logprobs,
        top_logprobs=top_logprobs or 0,
        echo=False,
        template_arguments=_template_arguments(body),
    )


TEMPLATE_ARGUMENTS = "chat_template_kwargs"
COMMON_ARGUMENTS = (
    "model",
    "n",
    "temperature",
    "top_p",
    "seed",
    "stop",
    "stream",
    "stream_options",
    "user",
)
"""Arguments of both; `user` names the client and has no effect."""


def _is(*values: Any) -> Callable[[Any], bool]:
    return lambda argument: any(
        argument == value and type(argument) is type(value) for value in values
    )


_ZERO = _is(0, 0.0)
NEUTRAL_VALUES: Mapping[str, Callable[[Any], bool]] = {
    "frequency_penalty": _ZERO,
    "presence_penalty": _ZERO,
    "logit_bias": _is({}),
}
"""Unsupported arguments, each with a predicate that is true for its neutral values."""
NEUTRAL_COMPLETION = {**NEUTRAL_VALUES, "best_of": _is(1), "suffix": _is("")}
NEUTRAL_CHAT = {
    **NEUTRAL_VALUES,
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
    body: Mapping[str, Any],
    supported: tuple[str, ...],
    neutral: Mapping[str, Callable[[Any], bool]],
) -> None:
    for name, value in body.items():
        if name in supported or value is None or (name in neutral and neutral[name](value)):
            continue
        raise invalid_argument(
            name,
            f"{name}={short(value)} is not supported: leave it out.",
            "unsupported_parameter" if name in neutral else "unknown_parameter",
        )


def _common(body: Mapping[str, Any]) -> dict[str, Any]:
    stream = _boolean(body, "stream")
    options = body.get("stream_options")
    if options is not None:
        if not stream:
            raise invalid_argument("stream_options", "stream_options needs stream=true.")
        if not isinstance(options, dict) or set(options) - {"include_usage"}:
            raise invalid_argument(
                "stream_options",
                f'stream_options={short(options)} must be {{"include_usage": true or false}}.',
            )
    n = _integer(body, "n", 1, MAX_CHOICES)
    temperature, top_p = _number(body, "temperature", 0.0, 2.0), _number(body, "top_p", 0.0, 1.0)
    greedy = "use temperature=0 for greedy decoding"
    if temperature is not None and 0 < temperature < LEAST_TEMPERATURE:
        too_low = f"less than {LEAST_TEMPERATURE:g}, and logits divided by it overflow in float32"
        raise invalid_argument(
            "temperature", f"temperature={temperature:g} is {too_low}: {greedy}."
        )
    if top_p is not None and top_p < LEAST_TOP_P:
        raise invalid_argument("top_p", f"top_p={top_p:g} leaves no token in float32: {greedy}.")
    return {
        "model": _model(body),
        "n": 1 if n is None else n,
        "temperature": 1.0 if temperature is None else temperature,
        "top_p": 1.0 if top_p is None else top_p,
        "seed": _integer(body, "seed", -(2**63), 2**63 - 1),
        "stops": _stops(body),
        "stream": stream,
        "include_usage": bool(options) and _boolean(options, "include_usage"),
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
        raise invalid_argument(
            "prompt",
            f"prompt={short(prompt)} must be a text, a list of token ids, or a list of either.",
        )
    if len(prompts) > MAX_PROMPTS:
        raise invalid_argument(
            "prompt", f"prompt has {len(prompts)} prompts: send {MAX_PROMPTS} at most at a time."
        )
    return tuple(tuple(item) if isinstance(item, list) else item for item in prompts)


def _template_arguments(body: Mapping[str, Any]) -> dict[str, Any]:
    value = body.get(TEMPLATE_ARGUMENTS)
    try:
        return {} if value is None else checked_arguments(value, TEMPLATE_ARGUMENTS)
    except ValueError as error:
        raise invalid_argument(TEMPLATE_ARGUMENTS, f"{error}.") from error


def _is_ids(value: Any) -> bool:
    return isinstance(value, list) and bool(value) and all(type(each) is int for each in value)


def _messages(body: Mapping[str, Any]) -> tuple[Message, ...]:
    messages = body.get("messages")
    if not isinstance(messages, list) or not messages:
        raise invalid_argument(
            "messages",
            f'messages={short(messages)} must be a list of {{"role": ..., "content": ...}}.',
        )
    return tuple(_message(f"messages[{index}]", each) for index, each in enumerate(messages))


def _message(path: str, message: Any) -> Message:
    if not isinstance(message, dict) or not isinstance(message.get("role"), str):
        raise invalid_argument(
            path, f'{path}={short(message)} must be {{"role": ..., "content": ...}}.'
        )
    for name, value in message.items():
        if name not in ("role", "content") and value not in (None, []):
            raise invalid_argument(
                f"{path}.{name}",
                f"{path}.{name}={short(value)} is not supported: leave it out.",
                "unsupported_parameter",
            )
    content = message.get("content")
    if isinstance(content, list):
        content = "".join(_part(f"{path}.content[{i}]", part) for i, part in enumerate(content))
    if not isinstance(content, str):
        raise invalid_argument(
            f"{path}.content",
            f"{path}.content={short(content)} must be a text, or a list of parts that are.",
        )
    return message["role"], content


def _part(path: str, part: Any) -> str:
    if not isinstance(part, dict) or part.get("type") != "text":
        kind = part.get("type") if isinstance(part, dict) else part
        raise invalid_argument(
            path,
            f'{path} is of type {short(kind)}: only {{"type": "text", "text": ...}} is supported.',
            "unsupported_parameter",
        )
    if not isinstance(part.get("text"), str):
        raise invalid_argument(path, f"{path}.text={short(part.get('text'))} must be a text.")
    return part["text"]


def _stops(body: Mapping[str, Any]) -> tuple[str, ...]:
    stop = body.get("stop")
    stops = [] if stop is None else stop if isinstance(stop, list) else [stop]
    if not all(isinstance(text, str) and text for text in stops) or len(stops) > MAX_STOPS:
        raise invalid_argument(
            "stop",
            f"stop={short(stop)} must be a text that is not empty, or a list of {MAX_STOPS} at "
            "most.",
        )
    return tuple(stops)


def _boolean(body: Mapping[str, Any], name: str) -> bool:
    value = body.get(name)
    if value is not None and type(value) is not bool:
        raise invalid_argument(name, f"{name}={short(value)} must be true or false.")
    return bool(value)


def _integer(body: Mapping[str, Any], name: str, minimum: int, maximum: int | None) -> int | None:
    value = body.get(name)
    if value is None:
        return None
    if type(value) is not int or not minimum <= value <= (
        MAX_TOKENS if maximum is None else maximum
    ):
        span = f"from {minimum} to {MAX_TOKENS}" if maximum is None else f"in {minimum}..{maximum}"
        raise invalid_argument(name, f"{name}={short(value)} must be a whole number {span}.")
    return value


def _number(body: Mapping[str, Any], name: str, minimum: float, maximum: float) -> float | None:
    value = body.get(name)
    if value is None:
        return None
    if (
        type(value) not in (int, float)
        or not minimum <= value <= maximum
        or not math.isfinite(value)
    ):
        raise invalid_argument(
            name, f"{name}={short(value)} must be a number in {minimum:g}..{maximum:g}."
        )
    return float(value)


def check_model(request: ApiRequest, name: str) -> None:
    """Raises ApiError if another model is requested."""
    if request.model != name:
        raise ApiError(
            404,
            f"model={short(request.model)} is not served here: use {name!r}.",
            "model",
            "model_not_found",
        )


class ApiError(Exception):
    """A rejected request, with the error that its client receives.

    Args:
      status: HTTP status.
      message: the argument, its value, the rule and the usual fix.
      param: the argument; None where no single one is wrong.
      code: machine-readable code, such as "model_not_found"; None without one.
      retry_after: seconds after which to retry; None sends no such header.
    """

    def __init__(
        self,
        status: int,
        message: str,
        param: str | None = None,
        code: str | None = None,
        retry_after: int | None = None,
    ):
        super().__init__(message)
        self.status, self.message, self.param, self.code = status, message, param, code
        self.retry_after = retry_after

    @property
    def body(self) -> dict[str, Any]:
        """JSON body, from which OpenAI's clients raise an exception."""
        kind = KINDS.get(self.status, "server_error")
        error = {"message": self.message, "type": kind, "param": self.param, "code": self.code}
        return {"error": error}

    @property
    def headers(self) -> dict[str, str]:
        # After 408 the rest of a body would be taken for the next request.
        headers = {401: {"WWW-Authenticate": "Bearer"}, 408: {"Connection": "close"}}
        headers = headers.get(self.status, {})
        if self.retry_after is not None:
            headers = {**headers, "Retry-After": str(self.retry_after)}
        return headers


def one_line(error: BaseException) -> str:
    """Message of an exception in one line of limited length.

    The exception's class precedes it, unless the message is written for the caller (ValueError,
    OSError, ApiError).
    """
    text = " ".join(str(error).split())
    text = text if len(text) <= MAX_MESSAGE_LENGTH else text[: MAX_MESSAGE_LENGTH - 3] + "..."
    is_plain = isinstance(error, ValueError | OSError | ApiError)
    return text if is_plain else f"{type(error).__name__}: {text}"


def invalid_argument(param: str, message: str, code: str | None = None) -> ApiError:
    """Error 400 for an invalid argument."""
    return ApiError(400, message, param, code)
