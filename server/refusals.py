"""Errors of requests; each protocol formats them as its own error object."""

from typing import Any

# Kind of an error by its HTTP status; clients tell errors apart by it. All others are bad requests.
KINDS = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    429: "rate_limit_error",
    500: "server_error",
    503: "server_error",
}


class Refusal(Exception):
    """A request that cannot be served: the field that is wrong, and a word for programs (``code``).

    The message has the expected value, the value found, and what to do.
    """

    def __init__(
        self, message: str, param: str | None = None, status: int = 400, code: str | None = None
    ):
        super().__init__(message)
        self.param = param
        self.status = status
        self.code = code

    def to_json(self) -> dict[str, Any]:
        kind = KINDS.get(self.status, "invalid_request_error")
        error = {"message": str(self), "type": kind, "param": self.param, "code": self.code}
        return {"error": error}


class ContextExceeded(Refusal):
    """A prompt that is longer than the context.

    Its message begins as OpenAI's does, because client libraries look for those words. ``context``
    is the maximum number of tokens of a prompt of ``length`` and its text.
    """

    def __init__(self, param: str, length: int, context: int, max_tokens: int):
        asked = f" and {max_tokens} more are asked for" if max_tokens > 0 else ""
        super().__init__(
            f"This model's maximum context length is {context} tokens, prompt included, but "
            f"{param} has {length}{asked}; shorten {param}",
            param,
            code="context_length_exceeded",
        )
        self.length = length
        self.context = context
