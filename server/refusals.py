"""What a request gets that is not served: OpenAI's error object."""

from __future__ import annotations

from typing import Any

# What clients tell errors apart by, where it is not a bad request.
_KINDS = {
    401: "authentication_error",
    404: "not_found_error",
    429: "rate_limit_error",
    500: "server_error",
    503: "server_error",
}


class Refusal(Exception):
    """A request that is not served.

    Args:
        message: Description of what was expected and found, and what to do.
        param: Field of the request that it is about.
        status: HTTP status.
        code: Word that programs tell the error by.
    """

    def __init__(
        self, message: str, param: str | None = None, status: int = 400, code: str | None = None
    ):
        super().__init__(message)
        self.status = status
        self._param = param
        self._code = code

    def to_json(self) -> dict[str, Any]:
        """OpenAI's error object."""
        kind = _KINDS.get(self.status, "invalid_request_error")
        error = {"message": str(self), "type": kind, "param": self._param, "code": self._code}
        return {"error": error}
