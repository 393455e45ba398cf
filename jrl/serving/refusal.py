"""What a server says no with, in OpenAI's form."""

from typing import Any

MOST_SAID = 300
"""Characters of an error that others raised, as a client is told of it."""


class Refused(Exception):
    """A request that is not served, for a reason that its client is told.

    Args:
      status: of HTTP.
      message: which argument, its value, the rule and the usual fix.
      param: the argument; None where it is none in particular.
      code: for programs, such as "model_not_found"; None without one.
      retry_after: seconds after which it may be tried again; None says nothing of it.
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
        """The JSON that OpenAI's clients make an exception of."""
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
    """What an exception says, without line breaks and not at any length; of which kind it is,
    unless it speaks to the caller."""
    text = " ".join(str(error).split())
    text = text if len(text) <= MOST_SAID else text[: MOST_SAID - 3] + "..."
    spoken = isinstance(error, ValueError | OSError | Refused)
    return text if spoken else f"{type(error).__name__}: {text}"


def wrong(param: str, message: str, code: str | None = None) -> Refused:
    """An argument that cannot be."""
    return Refused(400, message, param, code)
