"""The tokens of a sequence, step by step, alone or in a batch."""

from __future__ import annotations

from collections.abc import Iterator

import mlx.core as mx

from mlx_redrafter.decoding.lone_lane import step_alone
from mlx_redrafter.decoding.records import Token
from mlx_redrafter.decoding.scheduler import Scheduler
from mlx_redrafter.decoding.sequence import SequenceDecoder

# Tokens between two calls that return unused memory of MLX to the system, as in mlx-lm.
CLEAR_CACHE_EVERY = 256


def decode(sequence: SequenceDecoder, scheduler: Scheduler | None = None) -> Iterator[Token]:
    """Yield the tokens of a sequence, and close it however decoding ends.

    Args:
        sequence: The sequence.
        scheduler: Scheduler of several sequences; None to decode this one alone.

    Raises:
        NonFiniteError: The logits after the tokens so far are NaN.
    """
    try:
        while not sequence.is_cancelled and (
            not sequence.is_finished or not sequence.outbox.is_empty
        ):
            if scheduler is None:
                step_alone(sequence)
            else:
                scheduler.step(sequence)
            for token in sequence.delivery.deliver(sequence.take()):
                if sequence.delivery.stats.num_tokens % CLEAR_CACHE_EVERY == 0:
                    mx.clear_cache()
                yield token
    except GeneratorExit:
        raise
    except BaseException:
        sequence.fail()
        raise
    finally:
        if scheduler is not None:
            scheduler.leave(sequence)
        sequence.close()
