"""The protocols that clients speak: each is a reader and a writer of the same record.

The readers raise `Refusal` for a value that does not fit, and for a field that is not supported.
"""

from mlx_redrafter.server.protocols import (
    anthropic,
    ollama,
    openai_chat,
    openai_completions,
    responses,
)

# Modules with ``ROUTES``, endpoints by method and path, and ``to_error``, their error object.
PROTOCOLS = (openai_chat, openai_completions, responses, anthropic, ollama)
