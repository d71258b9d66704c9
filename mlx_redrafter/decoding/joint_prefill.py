"""Prompts of several new sequences, which share their forward passes.

A pass ends where the shortest prompt does, and the others go on without that one. So no prompt is
padded, and every kind of cache holds what it holds after each prompt alone. The ends of prompts of
similar lengths are left to the first step of the batch, as trees of one branch.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence

import mlx.core as mx
from mlx_lm.generate import generation_stream

from mlx_redrafter.decoding.joint_step import Progress
from mlx_redrafter.decoding.sequence import SequenceDecoder
from mlx_redrafter.device_read import wait_for
from mlx_redrafter.target.caches.cache_kinds import copy_rows
from mlx_redrafter.target.target import Target

# Maximum number of tokens at the end of a prompt that the first step of a batch processes: as many
# as a usual tree has nodes, because texts with fewer tokens are padded there.
MAX_END = 16


def prefill_together(
    target: Target, sequences: Sequence[SequenceDecoder], step_size: Callable[[], int]
) -> Iterator[list[Progress]]:
    """Process the prompts of sequences that share their prefill, one chunk at a time.

    Ends when at most one sequence has more than `MAX_END` tokens left. Blocks until MLX has
    computed each chunk.

    Args:
        target: The model that decodes them.
        sequences: The sequences, which have one proposer or none.
        step_size: Function that returns the maximum number of tokens of the next chunk, all
            sequences together.

    Yields:
        After each chunk, the sequences that have no more tokens left, are cancelled or in error.
    """
    group = sorted(sequences, key=lambda one: len(one.request.prompt), reverse=True)
    layers = next((one.layers for one in group if one.layers), ())
    caches, done = target.stock_cache(), 0
    errors: dict[SequenceDecoder, Exception] = {}
    while len(group) > 1:
        for one in group:
            try:
                one.request.on_progress(done, len(one.request.prompt))
            except Exception as error:
                errors[one] = error
        end = min(len(group[-1].request.prompt) - 1, done + max(1, step_size() // len(group)))
        tokens = mx.array([one.request.prompt[done:end] for one in group])
        with mx.stream(generation_stream):
            outputs = target.compute(tokens, caches, layers)
            for row, one in enumerate(group):
                one.read_states(None if outputs.states is None else outputs.states[row])
            wait_for([layer.state for layer in caches])
            mx.clear_cache()
        done = end
        before, group = group, _without_finished(group, caches, done, errors)
        if len(group) == 1:
            _give_row(group[0], caches, 0, done)
        yield [Progress(one, [], errors.get(one)) for one in before if one not in group]


def _without_finished(
    group: Sequence[SequenceDecoder],
    caches: Sequence[object],
    done: int,
    errors: Collection[SequenceDecoder],
) -> list[SequenceDecoder]:
    """Give the sequences that have ended or are near the end of their prompts their rows.

    Returns:
        The other sequences, whose rows the caches keep.
    """
    staying = []
    for row, one in enumerate(group):
        has_ended = one.is_cancelled or one.is_closed or one in errors
        if has_ended or len(one.request.prompt) - done <= MAX_END:
            _give_row(one, caches, row, done)
        else:
            staying.append(row)
    if 0 < len(staying) < len(group):
        copy_rows(caches, staying, caches)
    return [group[row] for row in staying]


def _give_row(
    sequence: SequenceDecoder, caches: Sequence[object], row: int, num_tokens: int
) -> None:
    """Let a sequence have its row of the caches, unless it has left."""
    if not sequence.is_closed:
        copy_rows(caches, [row], sequence.own_cache.stock)
        sequence.own_cache.grow(num_tokens)
