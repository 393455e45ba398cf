"""Errors of the API, in OpenAI's format."""

from typing import Any

MOST_SAID = 300
"""Most characters of an exception's message that a client receives."""


class Refused(Exception):
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
        own = {401: {"WWW-Authenticate": "Bearer"}, 408: {"Connection": "close"}}
        own = own.get(self.status, {})
        if self.retry_after is not None:
            own = {**own, "Retry-After": str(self.retry_after)}
        return own


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


def one_line(error: BaseException) -> str:
    """Message of an exception in one line of limited length.

    The exception's class precedes it, unless the message is written for the caller (ValueError,
    OSError, Refused).
    """
    text = " ".join(str(error).split())
    text = text if len(text) <= MOST_SAID else text[: MOST_SAID - 3] + "..."
    spoken = isinstance(error, ValueError | OSError | Refused)
    return text if spoken else f"{type(error).__name__}: {text}"


def wrong(param: str, message: str, code: str | None = None) -> Refused:
    """Error 400 for an invalid argument."""
    return Refused(400, message, param, code)
