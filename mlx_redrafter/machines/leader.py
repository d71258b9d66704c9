"""Rank 0's connection to the other ranks: what they are to do, pass by pass.

Before each pass, rank 0 sends what the others are to do: values that the host knows. What it may
not know yet, the tokens, goes over the group, as one gather. Operations on caches go with a pass.

Axes: N nodes of a tree with padding.
"""

import itertools
import signal
import threading
import time
import weakref
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import mlx.core as mx

from mlx_redrafter.device_read import longest_wait, waiting
from mlx_redrafter.errors import first_line
from mlx_redrafter.machines.line import BEAT, Do, pack
from mlx_redrafter.machines.meeting import Machines
from mlx_redrafter.trees.tree import TokenTree, ancestor_mask

# Seconds that a pass may take at least, far above the longest chunk of a prompt.
PASS_SECONDS = 120.0
# The same in longest waits so far: a machine may become slower, but not by that much.
PASS_WAITS = 10.0

# A root alone, or a tree.
Draft = mx.array | TokenTree


class Leader:
    """Tells the other ranks what rank 0 does."""

    def __init__(self, machines: Machines):
        self.machines = machines
        self._lock = threading.RLock()
        # Whether an operation runs, all parts of which the others do by themselves.
        self._is_within = False
        self._waiting: list[bytes] = []
        # Numbers of the next handles, and of those that are gone.
        self.count, self.dropped = itertools.count(1), deque[int]()
        # Handles of caches by their first layer, mlx-lm's object, which outlives a text.
        self.handles = weakref.WeakKeyDictionary[Any, Handle]()
        # Stream of the thread that ran the newest pass.
        self._stream = mx.default_stream(mx.cpu)
        threading.Thread(target=self._watch, name="pass limit", daemon=True).start()

    @contextmanager
    def together(self, do: Do, *values: Any) -> Iterator[None]:
        """Do something on rank 0 that the others do as well, without an interruption by Ctrl-C.

        The next pass announces it, unless it is part of another operation.
        """
        with self._undisturbed() as is_part:
            if not is_part:
                self._waiting.append(pack(do, *values))
            yield

    @contextmanager
    def _undisturbed(self) -> Iterator[bool]:
        """Hold off other threads and Ctrl-C; yields whether this is part of another operation."""
        with self._lock, _without_interruption():
            is_part, self._is_within = self._is_within, True
            try:
                yield is_part
            finally:
                self._is_within = is_part

    @contextmanager
    def passing(self, do: Do, values: Sequence[Any], tokens: Sequence[mx.array]) -> Iterator[None]:
        """Run a pass on all ranks: build and dispatch it inside.

        The other ranks get the tokens, int32 arrays of shape (n,).
        """
        with self._undisturbed(), waiting():
            stream = mx.default_stream(mx.cpu)
            if stream != self._stream:  # each thread has its own: let the other one's passes end
                mx.synchronize(self._stream)
                self._stream = stream
            drops = [pack(Do.DROP, self.dropped.popleft()) for _ in range(len(self.dropped))]
            data = b"".join([*self._waiting, *drops, pack(do, *values)])
            self._waiting = []
            for line in self.machines.lines:
                line.send(data)
            try:
                mx.async_eval(share(mx.concatenate(list(tokens)), self.machines.group))
                yield
            except BaseException as error:
                # If the reason is a lost rank, its connection ends this process with its name.
                time.sleep(BEAT)
                # The others wait in the middle of this pass for sums that will never come.
                self.machines.fail(f"{type(error).__name__}: {first_line(error)}")

    def _watch(self) -> None:
        """End all ranks if a pass takes too long, as nothing can interrupt it."""
        longest = last = 0.0
        while True:
            time.sleep(1)
            waited = longest_wait()
            if waited < last:
                longest = max(longest, last)
            last = waited
            if waited > max(PASS_SECONDS, PASS_WAITS * longest):
                names = ", ".join(line.other for line in self.machines.lines)
                self.machines.fail(
                    f"expected a pass to end within {PASS_SECONDS:g} s, found none from rank 0, "
                    f"{names} though all of them live; start them again"
                )


class Handle:
    """A cache, batch or copy on the other ranks, which drop it when nothing here has the handle."""

    def __init__(self, leader: Leader):
        self.number = next(leader.count)
        weakref.finalize(self, leader.dropped.append, self.number)


def describe(draft: Draft) -> tuple[tuple[int, ...], list[mx.array]]:
    """Separate what the host knows of a draft from what it may not know yet.

    Return N, the number of nodes without padding, 0 for a root alone, the maximum depth, and the
    number of arrays; and these arrays, each of shape (N,): the tokens, and the parents and depths
    of a tree that is no chain.
    """
    if not isinstance(draft, TokenTree):
        return (1, 0, 0, 1), [draft]
    arrays = [draft.tokens] if draft.is_chain else [draft.tokens, draft.parents, draft.depths]
    return (draft.size, draft.num_nodes, draft.max_depth, len(arrays)), arrays


def num_values(facts: Sequence[int]) -> int:
    return facts[0] * facts[3]


def rebuild(facts: Sequence[int], values: mx.array) -> Draft:
    """Make a draft of its description and its arrays one after the other, int32."""
    size, num_nodes, depth, num_arrays = facts
    if num_nodes == 0:
        return values
    if num_arrays == 1:
        return TokenTree.chain(values)
    tokens, parents, depths = values[:size], values[size : 2 * size], values[2 * size :]
    mask = ancestor_mask(parents, depth)
    return TokenTree(tokens, parents, depths, mask, num_nodes, depth)


def share(values: mx.array, group: Any) -> mx.array:
    """Return rank 0's values on every rank, int32, shape (n,)."""
    everyone = mx.distributed.all_gather(values.astype(mx.int32)[None], group=group)
    return everyone[0]


@contextmanager
def _without_interruption() -> Iterator[None]:
    """Hold back Ctrl-C, which would leave the ranks with different caches."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    seen: list[tuple[Any, ...]] = []
    before = signal.signal(signal.SIGINT, lambda *given: seen.append(given))
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)
        if seen and callable(before):
            before(*seen[0])
