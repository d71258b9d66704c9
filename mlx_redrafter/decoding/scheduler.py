"""Sequences of one thread, which share their forward passes while there are several of them.

A sequence is decoded alone until another one has begun, too. Then both finish their passes in
flight and move into a batch, each into a slot of its own; the last one that is left moves out
again. A sequence moves with its K/V entries, and its tokens are the same wherever it is decoded.

Sequences come and go between any two steps. Prompts are processed in chunks between the steps of
the sequences that have begun. `JointStep` decodes those of the batch. As weights are read once for
all sequences, several of them together cost less time than one after the other.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from functools import partial
from typing import NamedTuple

import mlx.core as mx
from mlx_lm.generate import generation_stream

from mlx_redrafter.decoding.joint_prefill import prefill_together
from mlx_redrafter.decoding.joint_step import JointStep, Progress
from mlx_redrafter.decoding.protocols import JointPolicy, OwnPolicies
from mlx_redrafter.decoding.records import Token
from mlx_redrafter.decoding.sequence import SequenceDecoder
from mlx_redrafter.errors import NonFiniteError
from mlx_redrafter.target.caches.batch_cache import Slot
from mlx_redrafter.target.target import Target

# Steps with half of the slots idle before those are given up. A sequence that comes before then
# finds a free slot, so that nobody's K/V entries are moved.
PATIENCE = 4
# Maximum number of prompt tokens between two steps of other sequences: about 0.3 s of a model of
# 8 billion weights on a laptop.
SHARED_CHUNK = 256


class Arrivals(NamedTuple):
    """Sequences that have begun together, and the chunks of their prompts.

    Attributes:
        sequences: The sequences.
        chunks: Iterator that processes one chunk at a time.
    """

    sequences: list[SequenceDecoder]
    chunks: Iterator[None]


class Scheduler:
    """Decodes the sequences of one thread: one of them at a call, or all.

    Slots come in powers of two, and grow and shrink with the number of sequences.

    Args:
        target: The model that decodes them.

    Attributes:
        policy: Decides how much the sequences of the batch draft.
    """

    def __init__(self, target: Target):
        self.target = target
        self.policy: JointPolicy = OwnPolicies()
        self._begun: list[SequenceDecoder] = []
        self._cache = target.new_batch_cache()
        # Slots of the sequences in the batch.
        self._slots: dict[SequenceDecoder, Slot] = {}
        # Results that nobody has asked for yet; those sequences rest meanwhile.
        self._ready: dict[SequenceDecoder, Progress] = {}
        # Sequences whose prompts are not processed yet, and the time until which the others go on.
        self._arrivals: deque[Arrivals] = deque()
        self._next_chunk = 0.0
        # Steps in a row with half of the slots idle.
        self._num_spare = 0

    @property
    def num_slots(self) -> int:
        """Slots of a forward pass, B; idle ones cost time, too."""
        return self._cache.num_slots

    def begin(self, sequences: Sequence[SequenceDecoder]) -> None:
        """Let `step_all` process all but the last tokens of prompts; then these join the others."""
        self._arrivals.append(Arrivals(list(sequences), self._process_prompts(sequences)))

    def step(self, sequence: SequenceDecoder) -> list[Token]:
        """Return the next tokens of a sequence, from a step of its own or of the whole batch.

        Raises:
            NonFiniteError: The logits after the tokens so far are NaN.
        """
        if sequence not in self._begun:
            # Alone: between the chunks of its prompt, the caller may step the other sequences.
            tokens = sequence.step()
            self._begun.append(sequence)
            return tokens
        while sequence not in self._ready:
            self._ready |= {one.sequence: one for one in self._step_begun()}
        progress = self._ready.pop(sequence)
        if progress.error is not None:
            raise progress.error
        return progress.tokens

    def step_all(self) -> list[Progress]:
        """Return the results of the next forward pass, or of the next step if only one has begun.

        There are none after a chunk of a prompt, if no other sequence waits for a step.
        """
        return self._process_chunk() or self._step_begun()

    def is_ready(self, sequence: SequenceDecoder) -> bool:
        """Whether the next tokens of a sequence are there without another step."""
        return sequence in self._ready

    def leave(self, sequence: SequenceDecoder) -> None:
        """Let a sequence go, for whatever reason; its caches are its own again."""
        if sequence in self._begun:
            self._begun.remove(sequence)
        for arrivals in self._arrivals:
            if sequence in arrivals.sequences:
                arrivals.sequences.remove(sequence)
        self._ready.pop(sequence, None)
        if sequence in self._slots:
            self._free(sequence)

    def _process_chunk(self) -> list[Progress]:
        """Process a chunk of a prompt, unless others wait; return sequences that have ended.

        Others get as much time as the chunk before has taken, so that prompts halve their speed.
        """
        if not self._arrivals or (self._begun and time.perf_counter() < self._next_chunk):
            return []
        sequences, chunks = self._arrivals[0]
        start = time.perf_counter()
        is_done = next(chunks, chunks) is chunks
        end = time.perf_counter()
        self._next_chunk = end + (end - start)
        if not is_done:
            return []
        self._arrivals.popleft()
        self._begun += [one for one in sequences if not one.is_finished]
        return [Progress(one, []) for one in sequences if one.is_finished]

    def _process_prompts(self, sequences: Sequence[SequenceDecoder]) -> Iterator[None]:
        """Process all but the last tokens of prompts, as far as possible in shared passes."""
        sharing = [one for one in sequences if one.shares_prefill]
        if len(sharing) > 1:
            most = sharing[0].request.prefill_step_size
            limit = partial(self._chunk_limit, most)
            left = yield from prefill_together(self.target, sharing, limit)
            sequences = [one for one in sequences if one not in sharing or one in left]
        for sequence in sequences:
            while not (sequence.has_begun or sequence.is_closed):
                sequence.process_chunk(self._chunk_limit(len(sequence.request.prompt)))
                yield

    def _chunk_limit(self, most: int) -> int:
        """Return the maximum size of a chunk: smaller while others wait for their next tokens."""
        return min(most, SHARED_CHUNK) if self._begun else most

    def _step_begun(self) -> list[Progress]:
        """Run the next step of all sequences that have begun but those with a result."""
        if len(self._begun) == 1:
            (one,) = self._begun
            return [_progress(self._move_out if one in self._slots else SequenceDecoder.step, one)]
        active = [one for one in self._begun if not (one in self._ready or one.is_finished)]
        moved = [_progress(self._move_in, one) for one in active if one not in self._slots]
        results = [one for one in moved if one.tokens or one.error or one.sequence.is_finished]
        # A sequence that brings tokens waits until they are taken.
        if not any(one.sequence in self._slots for one in results):
            results += self._step_batch([one for one in active if one in self._slots])
        return results

    def _move_in(self, sequence: SequenceDecoder) -> list[Token]:
        """Move a sequence into the batch, and return the tokens of its pass in flight.

        One that the batch cannot take, at least not yet, makes a step of its own instead.
        """
        if not self._cache.takes(sequence.own_cache):
            return sequence.step()
        tokens = sequence.finish_pass()
        if sequence.is_finished:
            return tokens
        cache, own = self._cache, sequence.own_cache
        with mx.stream(generation_stream):
            number = cache.idle_slot()
            cache.insert(number, own, sequence.num_kept)
        self._slots[sequence] = cache.slots[number]
        sequence.move(cache.slots[number], self.policy.join(sequence.policy))
        return tokens

    def _move_out(self, sequence: SequenceDecoder) -> list[Token]:
        """Move a sequence out of the batch, and return the tokens of its pass in flight."""
        tokens = sequence.finish_pass()
        self._free(sequence)
        return tokens

    def _free(self, sequence: SequenceDecoder) -> None:
        """Free a sequence's slot; its own caches get its K/V entries if they may be needed."""
        slot = self._slots.pop(sequence)
        is_over = sequence.is_finished or sequence.is_cancelled
        is_needed = sequence.request.leave_as_stock or not is_over
        with mx.stream(generation_stream):
            self._cache.leave(slot.number, slot.own if is_needed else None)
        assert slot.own is not None
        sequence.move(slot.own)
        if not self._slots:
            self._shrink()

    def _step_batch(self, active: Sequence[SequenceDecoder]) -> list[Progress]:
        """Run one forward pass for some sequences of the batch; the others rest."""
        if not active:
            return []
        for sequence, progress in self._ready.items():
            # The next pass overwrites the K/V entries of the tree in flight of one that rests.
            if sequence in self._slots:
                with suppress(NonFiniteError):  # its own next step raises it again
                    progress.tokens.extend(sequence.finish_pass())
        try:
            results = JointStep(self.target, self._cache, self._slots, self.policy).run(active)
        except Exception as error:  # no single sequence has caused it
            results = [Progress(one, [], error) for one in active]
        for sequence, _, reason in results:
            if sequence.is_finished or sequence.is_cancelled or reason is not None:
                self._free(sequence)
        self._num_spare = self._num_spare + 1 if 2 * len(self._slots) <= self.num_slots else 0
        if self._num_spare > PATIENCE:
            self._shrink()
        return [one for one in results if one.tokens or one.sequence not in self._slots]

    def _shrink(self) -> None:
        with mx.stream(generation_stream):
            self._cache.shrink()
        self._num_spare = 0


def _progress(
    step: Callable[[SequenceDecoder], list[Token]], sequence: SequenceDecoder
) -> Progress:
    """Return the result of a step of one sequence."""
    try:
        return Progress(sequence, step(sequence))
    except Exception as error:
        return Progress(sequence, [], error)
