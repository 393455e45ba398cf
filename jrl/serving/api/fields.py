"""Values of arguments: checks of their types and ranges, and the errors that reject requests, in
OpenAI's format."""

from collections.abc import Callable, Mapping
from typing import Any

from jrl.tasks.data.fields import short

MAX_MESSAGE_LENGTH = 300
"""Most characters of an exception's message that a client receives."""
KINDS = {
    **dict.fromkeys((400, 405, 408, 413), "invalid_request_error"),
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    429: "rate_limit_error",
}
"""The type of an error by its status."""

MAX_TOKENS = 2**31 - 1
"""Limit of a completion's tokens, as counts are 32-bit integers."""
MAX_STOPS = 4


class ApiError(Exception):
    """A rejected request, with the error that its client receives.

    Args:
      status: HTTP status.
      message: the argument, its value, the rule and the usual fix.
      param: the argument, for example "max_tokens"; None if no single one is wrong.
      code: machine-readable code, such as "model_not_found"; None if there is none.
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


def invalid_value(param: str, value: Any, rule: str) -> ApiError:
    """Error 400 for an argument whose value must be another."""
    return invalid_argument(param, f"{param}={short(value)} must be {rule}.")


def is_value(*values: Any) -> Callable[[Any], bool]:
    """Predicate that is true for these values, of the same type."""
    return lambda argument: any(
        argument == value and type(argument) is type(value) for value in values
    )


def token_ids(body: Mapping[str, Any], name: str, maximum: int) -> tuple[int, ...]:
    value = body.get(name)
    ids = [] if value is None else value
    is_list = isinstance(ids, list) and all(type(each) is int and each >= 0 for each in ids)
    if not is_list or len(ids) > maximum:
        raise invalid_value(name, value, f"a list of at most {maximum} token ids")
    return tuple(ids)


def stops(body: Mapping[str, Any]) -> tuple[str, ...]:
    stop = body.get("stop")
    stops = [] if stop is None else stop if isinstance(stop, list) else [stop]
    if not all(isinstance(text, str) and text for text in stops) or len(stops) > MAX_STOPS:
        rule = f"a text that is not empty, or a list of {MAX_STOPS} at most"
        raise invalid_value("stop", stop, rule)
    return tuple(stops)


def boolean(body: Mapping[str, Any], name: str) -> bool:
    value = body.get(name)
    if value is not None and type(value) is not bool:
        raise invalid_value(name, value, "true or false")
    return bool(value)


def integer_of(value: Any) -> int | None:
    """A whole number, also one that a client writes with a point, such as 20.0; None for another
    value."""
    if type(value) is float and value.is_integer():
        return int(value)
    return value if type(value) is int else None


def integer(body: Mapping[str, Any], name: str, minimum: int, maximum: int | None) -> int | None:
    value, limit = body.get(name), MAX_TOKENS if maximum is None else maximum
    if value is None:
        return None
    number = integer_of(value)
    if number is None or not minimum <= number <= limit:
        span = f"from {minimum} to {MAX_TOKENS}" if maximum is None else f"in {minimum}..{maximum}"
        raise invalid_value(name, value, f"a whole number {span}")
    return number


def as_number(value: Any) -> float | None:
    """A finite number, also one that a client writes as a text, such as "1"; None for another
    value."""
    if isinstance(value, str):
        try:
            value = float(value)
        except ValueError:
            return None
    if type(value) not in (int, float) or not -MAX_TOKENS <= value <= MAX_TOKENS:
        return None
    return float(value)


def number(body: Mapping[str, Any], name: str, minimum: float, maximum: float) -> float | None:
    value = body.get(name)
    if value is None:
        return None
    if type(value) not in (int, float) or not minimum <= value <= maximum:
        raise invalid_value(name, value, f"a number in {minimum:g}..{maximum:g}")
    return float(value)
