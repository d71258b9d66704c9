"""Prefill: prompts without their last token, one or several in the same forward passes.

A shared pass ends where the shortest prompt does, and the others go on without that one. So no
prompt is padded, and every kind of cache holds what it holds after each prompt alone. The ends of
prompts of similar lengths are left to the first step of the batch, as trees of one branch.
"""

from collections.abc import Callable, Iterator, Sequence
from functools import partial

import mlx.core as mx
from mlx_lm.generate import generation_stream

from mlx_redrafter.checks import check_int
from mlx_redrafter.decoding.sequence import SequenceDecoder, Status, attempt
from mlx_redrafter.device_read import wait_for
from mlx_redrafter.target.caches.cache_kinds import copy_rows

# Maximum number of tokens at the end of a prompt that the first step of a batch processes: as many
# as a usual tree has nodes, because texts with fewer tokens are padded there.
MAX_END = 16


def num_unread(sequence: SequenceDecoder) -> int:
    """Return the number of tokens of the prompt that are not processed, before the first pass."""
    return sequence.outbox.end_of_prompt - sequence.cache.length


def read_states(sequence: SequenceDecoder, states: mx.array | None) -> None:
    """Let the drafting read the states of the next tokens of the prompt, if it reads any."""
    reader = None if sequence.drafting is None else sequence.drafting.reader
    if states is not None and reader is not None:
        reader.read(states)


def may_share(sequence: SequenceDecoder) -> bool:
    """Whether a sequence may share the passes over its prompt with others.

    A prompt of several chunks would need as many passes with others.
    """
    request, cache = sequence.request, sequence.own_cache
    has_one_chunk = 1 < len(request.prompt) <= request.prefill_step_size
    is_new = cache.length == 0 and not cache.needs_notice
    return is_new and has_one_chunk and request.chunk_size is None


def process_chunk(sequence: SequenceDecoder, most: int | None = None) -> None:
    """Process a chunk of the prompt without its last token; after the last chunk the text begins.

    Tokens that the cache holds, such as those of a shared prefill, are left out. A sequence that is
    cancelled meanwhile is finished. ``most`` is the maximum number of tokens, if less than the
    request allows. A cache that is yet to quantise its entries has the chunks of a sequence alone.
    """
    request, cache, total = sequence.request, sequence.own_cache, len(sequence.request.prompt)
    done = total - num_unread(sequence)
    if done == 0:
        request.on_progress(done, total)
    left = total - 1 - done
    if left > 0 and not sequence.is_cancelled:
        size = min(left, request.prefill_step_size)
        if request.chunk_size is not None:
            given = request.chunk_size(done)
            check_int("the result of prompt_chunk_size", given, 1)
            size = min(size, given)
        if most is not None and cache.may_split:
            size = min(size, most)
        chunk = mx.array(request.prompt[done : done + size], dtype=mx.int32)
        with mx.stream(generation_stream):
            outputs = sequence.target.process_chunk(chunk, cache, sequence.layers)
            read_states(sequence, outputs.states)
            wait_for([layer.state for layer in cache.stock])
            mx.clear_cache()
        request.on_progress(done + size, total)
        left -= size
    if left <= 0 or sequence.is_cancelled:
        sequence.enter(Status.FINISHED if sequence.is_cancelled else Status.RUNNING)


def prefill(
    sequences: Sequence[SequenceDecoder], limit: Callable[[], int | None] = lambda: None
) -> Iterator[list[SequenceDecoder]]:
    """Process the prompts of sequences that begin together, one chunk at a time.

    They are one, or several that `may_share` and have one proposer or none. Those that share passes
    may keep up to `MAX_END` tokens for the first step of a batch; they wait still. ``limit``
    returns the maximum number of tokens of the next chunk, all sequences together. An error of one
    goes to its outbox. Blocks until MLX has computed each chunk, and yields those that are done.
    """
    waiting = list(sequences)
    for done in _prefill_together(sequences, limit):
        waiting = [one for one in waiting if one not in done]
        yield done
    for one in waiting:
        while one.status is Status.WAITING and one.outbox.error is None:
            attempt(partial(process_chunk, most=limit()), one)
            is_done = one.status is not Status.WAITING or one.outbox.error is not None
            yield [one] if is_done else []


def _prefill_together(
    sequences: Sequence[SequenceDecoder], limit: Callable[[], int | None]
) -> Iterator[list[SequenceDecoder]]:
    """Process prompts until at most one sequence has more than `MAX_END` tokens left."""
    group = sorted(sequences, key=lambda one: len(one.request.prompt), reverse=True)
    layers = next((one.layers for one in group if one.layers), ())
    target, done = group[0].target, 0
    caches = target.caches.stock() if len(group) > 1 else []
    while len(group) > 1:
        for one in group:
            try:
                one.request.on_progress(done, len(one.request.prompt))
            except Exception as error:
                one.outbox.fail(error)
        most = limit() or group[0].request.prefill_step_size
        end = min(len(group[-1].request.prompt) - 1, done + max(1, most // len(group)))
        tokens = mx.array([one.request.prompt[done:end] for one in group])
        with mx.stream(generation_stream):
            outputs = target.compute(tokens, caches, layers)
            for row, one in enumerate(group):
                read_states(one, None if outputs.states is None else outputs.states[row])
            wait_for([layer.state for layer in caches])
            mx.clear_cache()
        done = end
        before, group = group, _without_finished(group, caches, done)
        if len(group) == 1:
            _give_row(group[0], caches, 0, done)
        yield [one for one in before if one not in group]


def _without_finished(
    group: Sequence[SequenceDecoder], caches: Sequence[object], done: int
) -> list[SequenceDecoder]:
    """Give the sequences that have ended or are near the end of their prompts their rows.

    Return the other sequences, whose rows the caches keep.
    """
    staying = []
    for row, one in enumerate(group):
        has_ended = one.is_cancelled or one.is_closed or one.outbox.error is not None
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
