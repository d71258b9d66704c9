"""Errors of requests, in the form of OpenAI's error object."""

from __future__ import annotations

from typing import Any

# Kind of an error by its HTTP status; clients tell errors apart by it. All others are bad requests.
_KINDS = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    429: "rate_limit_error",
    500: "server_error",
    503: "server_error",
}


class Refusal(Exception):
    """A request that cannot be served.

    Args:
        message: The expected value, the value found, and what to do.
        param: Field of the request that the error is about.
        status: HTTP status.
        code: Word that identifies the error for programs.
    """

    def __init__(
        self, message: str, param: str | None = None, status: int = 400, code: str | None = None
    ):
        super().__init__(message)
        self.status = status
        self._param = param
        self._code = code

    def to_json(self) -> dict[str, Any]:
        """Return OpenAI's error object."""
        kind = _KINDS.get(self.status, "invalid_request_error")
        error = {"message": str(self), "type": kind, "param": self._param, "code": self._code}
        return {"error": error}


class ContextRefusal(Refusal):
    """A prompt that is longer than the context.

    Args:
        param: Field of the prompt.
        num_tokens: Number of its tokens, or of those counted before giving up.
        context: Maximum number of tokens of a prompt and its text.
        is_counted: Whether ``num_tokens`` is the number of all tokens.
    """

    def __init__(self, param: str, num_tokens: int, context: int, is_counted: bool = True):
        counted = f"{'' if is_counted else 'more than '}{num_tokens} tokens"
        super().__init__(
            f"this model's maximum context length is {context} tokens, and {param} has {counted}; "
            "shorten it",
            param,
            code="context_length_exceeded",
        )
        self.num_tokens = num_tokens
        self.context = context
