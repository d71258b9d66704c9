"""Rank 0: a target whose passes run on all ranks.

Before each pass, rank 0 sends what the others are to do: integers that the host knows. What it may
not know yet, the tokens, goes over the group, as one gather. Operations on caches wait for the next
pass and go with it.
"""

from __future__ import annotations

import itertools
import signal
import threading
import time
import weakref
from collections import Counter, deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import astuple
from typing import Any

import mlx.core as mx
import mlx.nn as nn

from mlx_redrafter.device_read import longest_wait, waiting
from mlx_redrafter.errors import ConfigError, UnsupportedTargetError, first_line
from mlx_redrafter.generation_options import Quantisation
from mlx_redrafter.machines.drafts import describe
from mlx_redrafter.machines.frames import Do, pack
from mlx_redrafter.machines.line import BEAT
from mlx_redrafter.machines.meeting import Machines
from mlx_redrafter.machines.splitting import has_split_head
from mlx_redrafter.target.caches.batch_cache import BatchCache, Floor
from mlx_redrafter.target.caches.quantised import QuantisingCache
from mlx_redrafter.target.caches.stored_cache import Arrays
from mlx_redrafter.target.caches.tree_cache import TreeCache
from mlx_redrafter.target.target import Target, TargetOutputs
from mlx_redrafter.trees.tree import TokenTree
from mlx_redrafter.trees.tree_batch import TreeBatch

# Seconds that a pass may take at least, far above the longest chunk of a prompt.
PASS_SECONDS = 120.0
# The same in longest waits so far: a machine may become slower, but not by that much.
PASS_WAITS = 10.0
# Attribute of a model that is split, on rank 0, with its `Leader`.
LEADER = "redrafter_leader"


class Leader:
    """Tells the other ranks what rank 0 does.

    Attributes:
        machines: All ranks.
        numbers: Numbers of caches by their first layer, mlx-lm's object, which outlives a text.
    """

    def __init__(self, machines: Machines):
        self.machines = machines
        self._lock = threading.RLock()
        # Whether an operation runs, all parts of which the others do by themselves.
        self._is_within = False
        self._waiting: list[bytes] = []
        self._count = itertools.count(1)
        self.numbers: weakref.WeakKeyDictionary[Any, int] = weakref.WeakKeyDictionary()
        self._num_owners: Counter[int] = Counter()
        self._dropped: deque[int] = deque()
        # Stream of the thread that ran the newest pass.
        self._stream = mx.default_stream(mx.cpu)
        threading.Thread(target=self._watch, name="pass limit", daemon=True).start()

    def add(self, owner: Any, number: int | None = None) -> int:
        """Give a number to a batch or a copy, until no owner is left.

        Args:
            owner: The batch or the copy.
            number: The number that other owners have already; a new one by default.
        """
        number = next(self._count) if number is None else number
        self._num_owners[number] += 1
        weakref.finalize(owner, self._drop, number)
        return number

    def add_cache(self, first: Any, number: int | None = None) -> int:
        """Give a number to a cache by its first layer; arguments are those of `add`."""
        self.numbers[first] = self.add(first, number)
        return self.numbers[first]

    def _drop(self, number: int) -> None:
        self._num_owners[number] -= 1
        if not self._num_owners[number]:
            del self._num_owners[number]
            self._dropped.append(number)

    @contextmanager
    def together(self, do: Do, *values: Any) -> Iterator[None]:
        """Do something on rank 0 that the others do as well, without an interruption by Ctrl-C.

        Args:
            do: Operation on a cache, announced with the next pass unless it is part of another.
            *values: Its values.
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

        Args:
            do: The verb.
            values: Its values.
            tokens: Arrays of int32 that the other ranks need, each of shape (n,).
        """
        with self._undisturbed(), waiting():
            stream = mx.default_stream(mx.cpu)
            if stream != self._stream:  # each thread has its own: let the other one's passes end
                mx.synchronize(self._stream)
                self._stream = stream
            drops = [pack(Do.DROP, self._dropped.popleft()) for _ in range(len(self._dropped))]
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


class LedCache(TreeCache):
    """A sequence's cache on rank 0, which tells the other ranks what becomes of theirs.

    Args:
        leader: Connection to them.
        number: The cache's number.
        *given: Arguments of `TreeCache`, or of the class that is mixed in.
    """

    def __init__(self, leader: Leader, number: int, *given: Any):
        super().__init__(*given)
        self._leader = leader
        self.number = number

    def commit(self, path: Sequence[int]) -> None:
        with self._leader.together(Do.COMMIT, self.number, *path):
            super().commit(path)

    def settle(self, length: int) -> None:
        with self._leader.together(Do.SETTLE, self.number, length):
            super().settle(length)


class LedQuantisingCache(LedCache, QuantisingCache):
    """The same for a cache that quantises its entries, which replaces mlx-lm's caches."""

    def grow(self, num_tokens: int) -> None:
        before = self.stock[0]  # lives until the number has its new owner
        super().grow(num_tokens)
        if self.stock[0] is not before:
            self._leader.add_cache(self.stock[0], self.number)


class LedBatchCache(BatchCache):
    """The cache of a batch on rank 0, which tells the other ranks what becomes of theirs."""

    def __init__(self, leader: Leader, has_buckets: bool):
        super().__init__(has_buckets)
        self._leader = leader
        self.number = leader.add(self)

    def floors(self) -> list[int]:
        """Return the number of tokens that each slot keeps whatever happens; 0 for an idle one."""
        return [one.floor() for one in self.slots]

    def commit(self, slot: int, path: Sequence[int]) -> None:
        with self._leader.together(Do.KEEP, self.number, slot, *path):
            super().commit(slot, path)

    def insert(self, slot: int, own: TreeCache, floor: Floor) -> None:
        with self._leader.together(Do.INSERT, self.number, slot, _number(own)):
            super().insert(slot, own, floor)

    def leave(self, slot: int, own: TreeCache | None) -> None:
        number = 0 if own is None else _number(own)
        with self._leader.together(Do.LEAVE, self.number, slot, number):
            super().leave(slot, own)

    def resize(self, slots: Sequence[int], num_slots: int, num_rows: int) -> None:
        with self._leader.together(Do.RESIZE, self.number, num_slots, num_rows, *slots):
            super().resize(slots, num_slots, num_rows)


class LedArrays(dict[str, mx.array]):
    """A copy of parts of a cache on rank 0; the other ranks have copies of their own parts."""

    def __init__(self, leader: Leader):
        super().__init__()
        self.number = leader.add(self)


class LeadingTarget(Target):
    """A target whose passes run on all ranks.

    Drafters, samplers and policies are on rank 0 alone.

    Args:
        model: The part of the model on rank 0.
        leader: Its connection to the others.
    """

    def __init__(self, model: nn.Module, leader: Leader):
        self.leader = leader
        self.devices = tuple(rank.device for rank in leader.machines.ranks)
        super().__init__(model)
        self.compiled = None  # each rank would compare bits, and compile, for itself

    @property
    def stock_model(self) -> Any:
        return LedModel(self)

    def new_cache(
        self,
        prompt_cache: Sequence[Any] | None = None,
        quantisation: Quantisation | None = None,
        given: list[Any] | None = None,
    ) -> TreeCache:
        cache = super().new_cache(prompt_cache, quantisation, given)
        number = self.number_of(cache.stock, cache.length, _fields(quantisation))
        facts = self.leader, number, cache.layers, cache.length
        if quantisation is None:
            return LedCache(*facts, cache.has_buckets)
        return LedQuantisingCache(*facts, quantisation, given, cache.has_buckets)

    def number_of(self, stock: Sequence[Any], length: int, quantisation: Sequence[int] = ()) -> int:
        """Return the number of mlx-lm's caches, which are new or hold what these ranks computed.

        Args:
            stock: The caches.
            length: Number of tokens that they hold.
            quantisation: The fields of their `Quantisation`, if they have one.

        Raises:
            ConfigError: They hold other tokens.
        """
        number = self.leader.numbers.get(stock[0])
        if number is None and any(not layer.empty() for layer in stock):
            raise ConfigError(
                "prompt_cache must be empty or of a text of this process on several machines, "
                "found one with other tokens, which the other machines lack; give the whole prompt"
            )
        if number is None:
            number = self.leader.add_cache(stock[0])
        with self.leader.together(Do.OPEN, number, length, *quantisation):
            return number

    def reserve(self, cache: TreeCache, num_rows: int) -> None:
        with self.leader.together(Do.RESERVE, _number(cache), num_rows):
            super().reserve(cache, num_rows)

    def new_batch_cache(self) -> BatchCache:
        return LedBatchCache(self.leader, self.has_buckets)

    def copy_entries(self, layers: Sequence[Any], start: int, end: int) -> Arrays:
        copy, number = LedArrays(self.leader), self.leader.numbers[layers[0]]
        with self.leader.together(Do.COPY_ENTRIES, copy.number, number, start, end):
            copy.update(super().copy_entries(layers, start, end))
        return copy

    def copy_states(self, layers: Sequence[Any]) -> Arrays:
        copy, number = LedArrays(self.leader), self.leader.numbers[layers[0]]
        with self.leader.together(Do.COPY_STATES, copy.number, number):
            copy.update(super().copy_states(layers))
        return copy

    def fill(
        self,
        layers: list[Any],
        pieces: Sequence[tuple[Arrays, int]],
        states: Arrays,
        length: int,
        quantisation: Quantisation | None,
    ) -> None:
        super().fill(layers, pieces, states, length, quantisation)
        number, copies = self.leader.add_cache(layers[0]), [(_number(one), n) for one, n in pieces]
        given = number, _number(states) if states else 0, length, _fields(quantisation), copies
        with self.leader.together(Do.FILL, *given):
            pass

    def logits(self, hidden_states: mx.array) -> mx.array:
        if has_split_head(self.model):
            raise UnsupportedTargetError(
                "expected a drafter with a head of its own, as mlx-lm splits the head of this "
                "model over the machines, found one that drafts with the model's head; use a "
                "recurrent drafter, a smaller model or lookup"
            )
        return super().logits(hidden_states)

    def advance(
        self, token: mx.array, cache: TreeCache, layers: Sequence[int] = ()
    ) -> TargetOutputs:
        with self.leader.passing(Do.ADVANCE, [_number(cache)], [token]):
            return _dispatched(super().advance(token, cache, layers))

    def verify(
        self, tree: TokenTree, cache: TreeCache, layers: Sequence[int] = ()
    ) -> TargetOutputs:
        facts, values = describe(tree)
        with self.leader.passing(Do.VERIFY, [_number(cache), *facts], values):
            return _dispatched(super().verify(tree, cache, layers))

    def verify_batch(
        self, trees: TreeBatch, cache: BatchCache, layers: Sequence[int] = ()
    ) -> TargetOutputs:
        assert isinstance(cache, LedBatchCache)
        slots, tokens = [], list[mx.array]()
        for one, floor in zip(trees.drafts, cache.floors(), strict=True):
            facts, arrays = describe(one)
            slots.append((*facts, floor))
            tokens += arrays
        with self.leader.passing(Do.BATCH, [cache.number, trees.size, *slots], tokens):
            return _dispatched(super().verify_batch(trees, cache, layers))

    def process_chunk(
        self, chunk: mx.array, cache: TreeCache, layers: Sequence[int]
    ) -> TargetOutputs:
        numbers = [_number(cache), chunk.shape[0], bool(layers)]
        with self.leader.passing(Do.CHUNK, numbers, [chunk]):
            outputs = super().process_chunk(chunk, cache, layers)
            dispatch_chunk(outputs, cache, bool(layers))
        return outputs

    def call(self, tokens: mx.array, caches: list[Any] | None) -> mx.array:
        if caches is not None:  # inside of a pass that is announced
            return super().call(tokens, caches)
        with self.leader.passing(Do.CALL, [0, tokens.size], [tokens.reshape(-1)]):
            logits = super().call(tokens, None)
            mx.async_eval(logits)
        return logits


class LedModel:
    """The model for loops that call it themselves, as mlx-lm's do, and compute each call."""

    def __init__(self, target: LeadingTarget):
        self._target = target
        self.layers = target.model.layers
        self.make_cache = getattr(target.model, "make_cache", None)

    def __call__(self, tokens: mx.array, cache: Sequence[Any]) -> mx.array:
        """Return the logits of one sequence's next tokens, shape (1, n) to (1, n, V)."""
        target, number = self._target, self._target.leader.numbers.get(cache[0])
        if number is None:
            number = target.number_of(cache, 0)
        with target.leader.passing(Do.CALL, [number, tokens.shape[1]], [tokens[0]]):
            logits: mx.array = target.model(tokens, cache=cache)
            mx.async_eval(logits)
        return logits


def lead(machines: Machines, model: nn.Module) -> None:
    """Make a model's part on rank 0 one that leads the others."""
    setattr(model, LEADER, Leader(machines))


def target_of(model: nn.Module) -> Target:
    """Return the target of a model, over all machines for one that `load` has split."""
    leader = getattr(model, LEADER, None)
    return Target(model) if leader is None else LeadingTarget(model, leader)


def share(values: mx.array, group: Any) -> mx.array:
    """Return rank 0's values on every rank, int32, shape (n,)."""
    everyone = mx.distributed.all_gather(values.astype(mx.int32)[None], group=group)
    return everyone[0]


def dispatch_chunk(outputs: TargetOutputs, cache: TreeCache, is_whole: bool) -> None:
    """Dispatch a chunk of a prompt: its entries, or the last layer's output as well."""
    hidden = [outputs.hidden_states] if is_whole else []
    mx.async_eval([layer.state for layer in cache.stock], hidden)


def _dispatched(outputs: TargetOutputs) -> TargetOutputs:
    mx.async_eval(outputs.logits)
    return outputs


def _number(one: TreeCache | Arrays) -> int:
    assert isinstance(one, LedCache | LedArrays)
    return one.number


def _fields(quantisation: Quantisation | None) -> tuple[int, ...]:
    return () if quantisation is None else astuple(quantisation)


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
