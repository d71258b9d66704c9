"""The protocols that clients speak: each is a reader and a writer of the same record.

The readers raise `Refusal` for a value that does not fit, and for a field that is not supported.
"""

from collections.abc import Callable
from typing import Any

from starlette.datastructures import Headers
from starlette.types import Scope

from mlx_redrafter.server.protocols import (
    anthropic,
    ollama,
    openai_chat,
    openai_completions,
    responses,
)
from mlx_redrafter.server.refusals import Refusal

# Modules with ``ROUTES``, endpoints by method and path.
PROTOCOLS = (openai_chat, openai_completions, responses, anthropic, ollama)


def error_format(scope: Scope) -> Callable[[Refusal], dict[str, Any]]:
    """Return the function that makes the error object of the protocol that a request speaks."""
    path = scope["path"].removeprefix("/v1")
    if path.startswith("/api/"):
        return ollama.to_error
    is_anthropic = path.startswith("/messages") or "anthropic-version" in Headers(scope=scope)
    return anthropic.to_error if is_anthropic else Refusal.to_json
