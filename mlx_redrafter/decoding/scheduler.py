"""Sequences of one thread, which share their forward passes while there are several of them.

A sequence is decoded alone until another one has begun, too. Then both finish their passes in
flight and move into a batch, each into a slot of its own; the last one that is left moves out
again. A sequence moves with its K/V entries, and its tokens are the same wherever it is decoded.
Prompts are processed in chunks between the steps of the sequences that have begun.
"""

import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from itertools import chain

from mlx_redrafter.decoding.batch import Batch
from mlx_redrafter.decoding.prefill import may_share, prefill
from mlx_redrafter.decoding.sequence import SequenceDecoder, attempt, fail
from mlx_redrafter.decoding.step import step_alone
from mlx_redrafter.errors import ConfigError
from mlx_redrafter.target.target import Target

# Maximum number of prompt tokens between two steps of other sequences: about 0.3 s of a model of
# 8 billion weights on a laptop.
SHARED_CHUNK = 256


class Scheduler:
    """Decodes the sequences of one thread on a target: one of them at a call, or all."""

    def __init__(self, target: Target):
        self.target = target
        self.batch = Batch(target)
        self._begun: list[SequenceDecoder] = []
        # Sequences that have not begun, in groups that begin together.
        self._arrivals: list[list[SequenceDecoder]] = []
        # Those of them whose prompts are not processed yet, and the chunks of some of them.
        self._unread: list[SequenceDecoder] = []
        self._chunks: Iterator[list[SequenceDecoder]] = iter(())
        # Sequences to close before the next pass. The garbage collector may end a stream amid a
        # pass of others, or in another thread.
        self._gone: list[SequenceDecoder] = []
        self._owner: threading.Thread | None = None
        self._is_busy = False
        # Time until which the others go on.
        self._next_chunk = 0.0
        self._others_wait = False

    @property
    def is_decoding(self) -> bool:
        return len(self._begun) > 0

    def begin(self, sequences: Sequence[SequenceDecoder]) -> None:
        """Let steps process all but the last tokens of prompts; then these join the others.

        Prompts of new sequences share their passes if their turn comes at the same time.
        """
        self._arrivals.append(list(sequences))
        self._unread += sequences

    def step(self, sequence: SequenceDecoder) -> None:
        """Decode until a sequence is ready, in steps of its own or of the whole batch."""
        if sequence not in chain(self._begun, *self._arrivals):
            self.begin([sequence])
        while not sequence.is_ready:
            self.advance()

    def step_all(self) -> list[SequenceDecoder]:
        """Run the next forward pass, or step if only one has begun; return the ready sequences.

        There may be none after a chunk of a prompt. Those that have ended have left the batch.
        """
        self.advance()
        return [one for one in chain(*self._arrivals, self._begun) if one.is_ready]

    def advance(self, others_wait: bool = False) -> None:
        """Run the next forward pass of the sequences that are not ready; those that are rest.

        If ``others_wait``, sequences of other schedulers wait for their next tokens.
        """
        self._others_wait, self._owner = others_wait, threading.current_thread()
        with self._busy():
            while self._gone:
                attempt(self._close, self._gone.pop())
            self._advance()

    def _advance(self) -> None:
        ended = self._process_chunk()
        for group in list(self._arrivals):
            if not any(one in self._unread for one in group):
                self._arrivals.remove(group)
                self._begun += group
        if not ended:
            active = self._active
            try:
                self._step_begun(active)
            except BaseException as error:  # no single sequence has caused it
                fail(active, error)

    def leave(self, sequence: SequenceDecoder) -> None:
        """Let a sequence go, for whatever reason, and close it; its caches are its own again."""
        owner, here = self._owner, threading.current_thread()
        if self._is_busy or (owner is not None and owner is not here and owner.is_alive()):
            sequence.cancel()
            self._gone.append(sequence)
            return
        with self._busy():
            self._close(sequence)

    @contextmanager
    def _busy(self) -> Iterator[None]:
        """Let nothing else change the batch meanwhile."""
        if self._is_busy:
            raise ConfigError(
                "texts with one scheduler of engine.share() are read one after the other, found "
                "two at once; read them in one thread, or give each thread a scheduler of its own"
            )
        self._is_busy = True
        try:
            yield
        finally:
            self._is_busy = False

    def _close(self, sequence: SequenceDecoder) -> None:
        for group in (self._begun, self._unread, *self._arrivals):
            if sequence in group:
                group.remove(sequence)
        try:
            if sequence in self.batch:
                self.batch.leave(sequence)
        finally:
            sequence.close()

    @property
    def _active(self) -> list[SequenceDecoder]:
        """The sequences that go on, alone only once the caller has all tokens of the pass before.

        A cache of its own does not know how far a sequence may still have to go back.
        """
        return [
            one
            for one in self._begun
            if not one.is_ready and (one in self.batch or not one.delivery.num_ready)
        ]

    def _process_chunk(self) -> bool:
        """Process a chunk of prompts, unless others wait; return whether a sequence has ended.

        Others get as much time as the chunk before has taken, so that prompts halve their speed.
        """
        if not self._unread:
            return False
        start = time.perf_counter()
        if (self._others_wait or self._active) and start < self._next_chunk:
            return False
        done = next(self._chunks, None)
        if done is None:
            self._chunks = self._next_prompts()
            done = next(self._chunks)
        end = time.perf_counter()
        self._next_chunk = end + (end - start)
        self._unread = [one for one in self._unread if one not in done]
        return any(one.is_ready for one in done)

    def _next_prompts(self) -> Iterator[list[SequenceDecoder]]:
        """Process the first prompt that waits, and those that may share its passes."""
        first = self._unread[0]
        sharing = [one for one in self._unread if may_share(one)]
        group = sharing if first in sharing else [first]
        limit = partial(self._chunk_limit, first.request.prefill_step_size)
        try:
            yield from prefill(group, limit)
        except BaseException as error:  # no single sequence has caused it
            failed = [one for one in group if one in self._unread]
            self._unread = [one for one in self._unread if one not in failed]
            fail(failed, error)
            yield failed

    def _chunk_limit(self, most: int) -> int:
        """Return the maximum size of a chunk: smaller while others wait for their next tokens."""
        return min(most, SHARED_CHUNK) if self._others_wait or self._active else most

    def _step_begun(self, active: Sequence[SequenceDecoder]) -> None:
        batch = self.batch
        for one in batch:
            if one.is_cancelled:  # its reader may never come back
                attempt(batch.leave, one)
        if sum(not one.is_cancelled for one in self._begun) == 1 == len(active):
            (one,) = active
            if one in batch:
                attempt(self._move_out, one)
            else:
                step_alone(one)
            return
        arriving = [one for one in active if one not in batch]
        if arriving:
            batch.make_room(sum(batch.cache.takes(one.own_cache) for one in arriving))
        for one in arriving:
            attempt(self._move_in, one)
        # A sequence that has brought tokens on its way waits until they are taken.
        moving = [one for one in active if one in batch]
        if moving and not any(one.is_ready for one in arriving if one in batch):
            batch.step(moving)

    def _move_in(self, sequence: SequenceDecoder) -> None:
        """Move a sequence into the batch, once its pass in flight is read.

        One that the batch cannot take, at least not yet, makes a step of its own instead.
        """
        if not self.batch.cache.takes(sequence.own_cache):
            step_alone(sequence)
            return
        sequence.commit()
        if not sequence.is_finished:
            self.batch.join(sequence)

    def _move_out(self, sequence: SequenceDecoder) -> None:
        sequence.commit()
        self.batch.leave(sequence)
