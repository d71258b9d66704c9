"""Records of one sequence: the request and the tokens; V is the size of the vocabulary."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import NamedTuple

import mlx.core as mx

ProgressCallback = Callable[[int, int], None]

# Stands for the token after logits that are NaN. Padding nodes have another number, `NO_TOKEN`.
NOT_A_NUMBER = -2
# Stands for a token id of the user's sampler that is not in the vocabulary.
NOT_A_TOKEN = -3


@dataclass(frozen=True)
class Request:
    """One sequence to decode.

    Attributes:
        prompt: Token ids, at least one.
        stop_tokens: Token ids that end the sequence.
        max_tokens: Maximum number of tokens to yield, -1 for no limit.
        ends_with_context: Whether that is the room in the target's context, rather than a number
            that somebody asked for.
        prefill_step_size: Maximum number of prompt tokens per forward pass.
        chunk_size: Function that returns a smaller number, or not, for the prompt tokens
            processed so far; such a prompt shares no passes. None for none.
        on_progress: Callback for the prompt tokens processed and their number.
        keeps_cache: Whether to leave the K/V cache and the random state as mlx-lm does, with
            the last token processed as well, which costs one more forward pass.
    """

    prompt: list[int]
    stop_tokens: frozenset[int] = frozenset()
    max_tokens: int = -1
    ends_with_context: bool = False
    prefill_step_size: int = 2048
    chunk_size: Callable[[int], int] | None = None
    on_progress: ProgressCallback = field(default=lambda done, total: None)
    keeps_cache: bool = False


class Token(NamedTuple):
    """One token of the sequence.

    Attributes:
        id: Token id.
        is_draft: Whether it is an accepted draft, rather than the target's own addition.
        log_probs: Function that takes natural log-probabilities after logits processors, shape
            (V,), out of those of the pass.
        finish_reason: "stop" or "length" on the last token, else None.
    """

    id: int
    is_draft: bool
    log_probs: Callable[[], mx.array]
    finish_reason: str | None
