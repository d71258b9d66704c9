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
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from functools import partial
from itertools import chain

import mlx.core as mx
from mlx_lm.generate import generation_stream

from mlx_redrafter.decoding.joint_prefill import prefill_together
from mlx_redrafter.decoding.joint_step import JointStep, Progress
from mlx_redrafter.decoding.protocols import JointPolicy, OwnPolicies
from mlx_redrafter.decoding.records import Token
from mlx_redrafter.decoding.sequence import SequenceDecoder
from mlx_redrafter.errors import ConfigError, NonFiniteError
from mlx_redrafter.target.caches.batch_cache import Slot
from mlx_redrafter.target.target import Target

# Steps with half of the slots idle before those are given up. A sequence that comes before then
# finds a free slot, so that nobody's K/V entries are moved.
PATIENCE = 4
# Maximum number of prompt tokens between two steps of other sequences: about 0.3 s of a model of
# 8 billion weights on a laptop.
SHARED_CHUNK = 256


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
        # Sequences that have not begun, in groups that begin together.
        self._arrivals: list[list[SequenceDecoder]] = []
        # Those of them whose prompts are not processed yet, and the chunks of some of them.
        self._unread: list[SequenceDecoder] = []
        self._chunks: Iterator[list[Progress]] = iter(())
        # Time until which the others go on.
        self._next_chunk = 0.0
        # Whether sequences of other schedulers wait for their next tokens.
        self._others_wait = False
        # Steps in a row with half of the slots idle.
        self._num_spare = 0

    @property
    def num_slots(self) -> int:
        """Slots of a forward pass, B; idle ones cost time, too."""
        return self._cache.num_slots

    @property
    def is_decoding(self) -> bool:
        """Whether any sequence has begun."""
        return len(self._begun) > 0

    def begin(self, sequences: Sequence[SequenceDecoder]) -> None:
        """Let steps process all but the last tokens of prompts; then these join the others.

        Prompts of new sequences share their passes if their turn comes at the same time.
        """
        self._arrivals.append(list(sequences))
        self._unread += sequences

    def step(self, sequence: SequenceDecoder) -> list[Token]:
        """Return the next tokens of a sequence, from a step of its own or of the whole batch.

        Raises:
            NonFiniteError: The logits after the tokens so far are NaN.
        """
        if sequence not in chain(self._ready, self._begun, *self._arrivals):
            self.begin([sequence])
        while sequence not in self._ready:
            self.advance()
        progress = self._ready.pop(sequence)
        if progress.error is not None:
            raise progress.error
        return progress.tokens

    def advance(self, others_wait: bool = False) -> None:
        """Do what `step_all` does, and keep the results for `step`.

        Args:
            others_wait: Whether sequences of other schedulers wait for their next tokens.
        """
        self._others_wait = others_wait
        try:
            results = self.step_all()
        except Exception as error:  # no single sequence has caused it
            results = [Progress(one, [], error) for one in self._active]
        for one in results:
            has_ended = one.sequence.is_finished or one.sequence.is_cancelled
            if one.tokens or one.error is not None or has_ended:
                self._ready[one.sequence] = one

    def step_all(self) -> list[Progress]:
        """Return the results of the next forward pass, or of the next step if only one has begun.

        There are none after a chunk of a prompt, if no other sequence waits for a step.
        """
        ended = self._process_chunk()
        for group in list(self._arrivals):
            if not any(one in self._unread for one in group):
                self._arrivals.remove(group)
                self._begun += group
        return ended or self._step_begun()

    def is_ready(self, sequence: SequenceDecoder) -> bool:
        """Whether the next tokens of a sequence are there without another step."""
        return sequence in self._ready

    def leave(self, sequence: SequenceDecoder) -> None:
        """Let a sequence go, for whatever reason; its caches are its own again."""
        if sequence in self._begun:
            self._begun.remove(sequence)
        for waiting in (self._unread, *self._arrivals):
            if sequence in waiting:
                waiting.remove(sequence)
        self._ready.pop(sequence, None)
        if sequence in self._slots:
            self._free(sequence)

    @property
    def _active(self) -> list[SequenceDecoder]:
        """Sequences that wait for a step."""
        return [one for one in self._resting if not (one.is_finished or one.is_cancelled)]

    @property
    def _resting(self) -> list[SequenceDecoder]:
        """Sequences that have begun and have no result that waits to be taken."""
        return [one for one in self._begun if one not in self._ready]

    def _process_chunk(self) -> list[Progress]:
        """Process a chunk of prompts, unless others wait; return sequences that have ended.

        Others get as much time as the chunk before has taken, so that prompts halve their speed.
        """
        if not self._unread:
            return []
        start = time.perf_counter()
        if (self._others_wait or self._active) and start < self._next_chunk:
            return []
        read = next(self._chunks, None)
        if read is None:
            self._chunks = self._process_prompts()
            read = next(self._chunks)
        end = time.perf_counter()
        self._next_chunk = end + (end - start)
        done = {one.sequence for one in read}
        self._unread = [one for one in self._unread if one not in done]
        ended = [one for one in read if one.error is not None or one.sequence.is_finished]
        for sequence, *_ in ended:
            self.leave(sequence)
        return ended

    def _process_prompts(self) -> Iterator[list[Progress]]:
        """Process the first prompt that waits, and those that may share its passes.

        Yields:
            After each chunk, the sequences whose prompts end there.
        """
        first = self._unread[0]
        sharing = [one for one in self._unread if one.shares_prefill]
        group = sharing if first in sharing else [first]
        try:
            limit = partial(self._chunk_limit, first.request.prefill_step_size)
            yield from prefill_together(self.target, group, limit)
            for one in group:
                while one in self._unread:
                    one.process_chunk(limit())
                    yield [Progress(one, [])] if one.has_begun else []
        except Exception as error:
            yield [Progress(one, [], error) for one in group if one in self._unread]

    def _chunk_limit(self, most: int) -> int:
        """Return the maximum size of a chunk: smaller while others wait for their next tokens."""
        return min(most, SHARED_CHUNK) if self._others_wait or self._active else most

    def _step_begun(self) -> list[Progress]:
        """Run the next step of all sequences that have begun but those with a result."""
        # A cancelled one has left the batch, and must not move in again while its reader takes the
        # tokens that it has: its own caches lack the entries of its pass in flight.
        ended = [Progress(one, []) for one in self._resting if one.is_cancelled]
        active = self._active
        if len(self._begun) == 1 == len(active):
            (one,) = active
            return [_progress(self._move_out if one in self._slots else SequenceDecoder.step, one)]
        moved = [_progress(self._move_in, one) for one in active if one not in self._slots]
        results = [one for one in moved if one.tokens or one.error or one.sequence.is_finished]
        # A sequence that brings tokens waits until they are taken.
        if not any(one.sequence in self._slots for one in results):
            results += self._step_batch([one for one in active if one in self._slots])
        return ended + results

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
                # Without a token to go on with, its own next step raises the error again.
                with suppress(NonFiniteError, ConfigError):
                    progress.tokens.extend(sequence.finish_pass())
        results = JointStep(self.target, self._cache, self._slots, self.policy).run(active)
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
