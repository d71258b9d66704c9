"""From the steps of a text to its tokens, alone or among others."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Protocol

import mlx.core as mx

from mlx_redrafter.decoding.records import Token
from mlx_redrafter.decoding.sequence import SequenceDecoder

# Tokens after which memory that MLX keeps for reuse is given back, as in mlx-lm.
CLEAR_CACHE_EVERY = 256


class Scheduler(Protocol):
    """Decodes several texts, step by step."""

    def step(self, text: SequenceDecoder) -> list[Token]:
        """The tokens of a text's next step."""
        ...

    def has_news(self, text: SequenceDecoder) -> bool:
        """Whether the tokens of its next step are there already."""
        ...

    def leave(self, text: SequenceDecoder) -> None:
        """Let a text go, however it ended; its caches are its own again."""
        ...


def decode(text: SequenceDecoder, scheduler: Scheduler | None = None) -> Iterator[Token]:
    """Yield a text token by token.

    However decoding ends, `SequenceDecoder.close` is told how many tokens were taken.

    Args:
        text: The text.
        scheduler: Decoder of several texts; None to decode it alone.
    """
    stats = text.stats
    try:
        while not text.is_cancelled and (
            not text.is_finished or (scheduler is not None and scheduler.has_news(text))
        ):
            tokens = text.step() if scheduler is None else scheduler.step(text)
            for text.num_ready, token in zip(reversed(range(len(tokens))), tokens, strict=True):
                stats.num_tokens += 1
                if stats.num_tokens % CLEAR_CACHE_EVERY == 0:
                    mx.clear_cache()
                with text.clock.absence:
                    yield token
    except GeneratorExit:
        raise
    except BaseException:
        text.drafting = None  # its caches may be half-way, and are not continued
        raise
    finally:
        if scheduler is not None:
            scheduler.leave(text)
        text.close(stats.num_tokens)
