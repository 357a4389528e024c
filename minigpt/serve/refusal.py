"""Error objects of OpenAI's API."""

from typing import Any

from starlette.responses import JSONResponse

KINDS = {401: "authentication_error", 403: "permission_error", 404: "not_found_error", 429: "rate_limit_error"}


class RefusalError(Exception):
    """The error that a client gets as the answer to its request.

    Args:
        status: the HTTP status.
        message: one sentence: what is wrong and what would be right.
        param: the field that is wrong.
        code: a word that programs can test for.
    """

    def __init__(self, status: int, message: str, param: str | None = None, code: str | None = None) -> None:
        super().__init__(message)
        self.status, self.message, self.param, self.code = status, message, param, code

    def to_dict(self) -> dict[str, Any]:
        """Return the error object."""
        kind = KINDS.get(self.status, "invalid_request_error" if self.status < 500 else "server_error")
        return {"error": {"message": self.message, "type": kind, "param": self.param, "code": self.code}}

    def response(self) -> JSONResponse:
        headers = {401: {"WWW-Authenticate": "Bearer"}, 429: {"Retry-After": "1"}}.get(self.status)
        return JSONResponse(self.to_dict(), self.status, headers)
