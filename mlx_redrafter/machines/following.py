"""The other ranks: they do what rank 0 says, and decide nothing."""

import signal
import time
from collections import defaultdict
from collections.abc import Sequence
from functools import partial
from typing import NoReturn

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.generate import generation_stream

from mlx_redrafter.errors import CheckpointError, first_line
from mlx_redrafter.generation_options import Quantisation
from mlx_redrafter.machines.agreement import load_when_asked
from mlx_redrafter.machines.leader import num_values, rebuild, share
from mlx_redrafter.machines.leading import dispatch_chunk
from mlx_redrafter.machines.line import BEAT, Do, Frame
from mlx_redrafter.machines.meeting import Machines
from mlx_redrafter.target.caches.batch_cache import BatchCache
from mlx_redrafter.target.caches.prompt_cache import num_tokens
from mlx_redrafter.target.caches.stored_cache import Arrays
from mlx_redrafter.target.caches.tree_cache import TreeCache
from mlx_redrafter.target.compiled_pass import CompiledPasses
from mlx_redrafter.target.target import Target
from mlx_redrafter.trees.tree import TokenTree, TreeBatch


def follow(
    machines: Machines, own_name: str | None = None, own_adapter: str | None = None
) -> NoReturn:
    """Load this rank's part of the model and obey rank 0 until it ends; then end this process.

    The names are those of the model and of a LoRA adapter on this machine; rank 0's by default.
    """
    # A terminal sends Ctrl-C to all local ranks; rank 0 decides what it means.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    (line,) = machines.lines
    try:
        model = load_when_asked(machines, own_name, own_adapter)
        follower = None if model is None else Follower(model, machines)
        with mx.stream(generation_stream):
            while follower is not None and (frame := line.receive()).do is not Do.END:
                follower.obey(frame)
    except Exception as error:
        time.sleep(BEAT)  # if the reason is a lost rank, rank 0 ends this one with its name
        machines.fail(f"{type(error).__name__}: {first_line(error)}")
    machines.leave(0)


class Follower:
    """The target and the caches of a rank that follows, with a method for each verb of `Do`."""

    def __init__(self, model: nn.Module, machines: Machines):
        self._target = Target(model, CompiledPasses(are_used=False))  # as on rank 0
        self._group = machines.group
        # A number that rank 0 has not named yet is that of a new cache.
        self._caches = defaultdict[int, TreeCache](self._target.caches.new)
        self._batches = defaultdict[int, BatchCache](self._target.caches.of_batch)
        self._copies: dict[int, Arrays] = {}

    def obey(self, frame: Frame) -> None:
        """Do what rank 0 has done or does now, by the method of the verb's name."""
        getattr(self, frame.do)(*frame.values)

    def advance(self, cache: int) -> None:
        mx.async_eval(self._target.advance(self._shared(1), self._caches[cache]).logits)

    def chunk(self, number: int, size: int, is_whole: bool) -> None:
        cache = self._caches[number]
        outputs = self._target.process_chunk(self._shared(size), cache, ())
        dispatch_chunk(outputs, cache, is_whole)
        mx.eval([layer.state for layer in cache.stock])
        mx.clear_cache()

    def verify(self, cache: int, *facts: int) -> None:
        tree = rebuild(facts, self._shared(num_values(facts)))
        assert isinstance(tree, TokenTree)
        mx.async_eval(self._target.verify(tree, self._caches[cache]).logits)

    def batch(self, number: int, size: int, *slots: Sequence[int]) -> None:
        drafts, batch = [facts for *facts, _ in slots], self._batches[number]
        for slot, (*_, floor) in zip(batch.slots, slots, strict=True):
            slot.floor = partial(int, floor)
        values, trees, start = self._shared(sum(map(num_values, drafts))), [], 0
        for facts in drafts:
            end = start + num_values(facts)
            trees.append(rebuild(facts, values[start:end]))
            start = end
        mx.async_eval(self._target.verify_batch(TreeBatch(trees, size), batch).logits)

    def call(self, cache: int, size: int) -> None:
        mx.async_eval(self._target.model(self._shared(size)[None], cache=self._caches[cache].stock))

    def open(self, number: int, length: int, *quantisation: int) -> None:
        """Continue a cache in another text, at the length that it has on rank 0, or begin one."""
        cache = self._caches[number]
        cache.trim_to(length)
        how = Quantisation(*quantisation) if quantisation else None
        self._caches[number] = self._target.caches.new(cache.stock, how)
        if self._caches[number].length != length:
            raise CheckpointError(
                f"expected a cache of {length} tokens, as on rank 0, found "
                f"{num_tokens(cache.stock)}; start again with a new cache"
            )

    def commit(self, cache: int, *path: int) -> None:
        self._caches[cache].commit(path)

    def trim_to(self, cache: int, length: int) -> None:
        self._caches[cache].trim_to(length)

    def reserve(self, cache: int, num_rows: int) -> None:
        self._target.caches.reserve(self._caches[cache], num_rows)

    def copy_entries(self, copy: int, cache: int, start: int, end: int) -> None:
        self._copies[copy] = self._target.caches.copy_entries(self._caches[cache].stock, start, end)

    def copy_states(self, copy: int, cache: int) -> None:
        self._copies[copy] = self._target.caches.copy_states(self._caches[cache].stock)

    def fill(
        self,
        cache: int,
        length: int,
        quantisation: Sequence[int],
        pieces: Sequence[tuple[int, int]],
        states: int,
    ) -> None:
        """Fill a new cache with the first tokens of an earlier text."""
        stock, copies = self._target.caches.stock(), self._copies
        how = Quantisation(*quantisation) if quantisation else None
        entries = [(copies[number], count) for number, count in pieces]
        self._target.caches.fill(stock, entries, copies[states] if states else {}, length, how)
        self._caches[cache] = self._target.caches.new(stock)

    def drop(self, number: int) -> None:
        for kept in (self._caches, self._batches, self._copies):
            kept.pop(number, None)

    def keep(self, batch: int, slot: int, *path: int) -> None:
        self._batches[batch].commit(slot, path)

    def insert(self, batch: int, slot: int, cache: int) -> None:
        self._batches[batch].insert(slot, self._caches[cache], int)

    def leave(self, batch: int, slot: int, cache: int) -> None:
        self._batches[batch].leave(slot, self._caches[cache] if cache else None)

    def resize(self, batch: int, num_slots: int, num_rows: int, *slots: int) -> None:
        self._batches[batch].resize(slots, num_slots, num_rows)

    def _shared(self, count: int) -> mx.array:
        """Return the values that rank 0 gives for a pass, int32, shape (count,)."""
        values = share(mx.zeros((count,), dtype=mx.int32), self._group)
        mx.async_eval(values)
        return values
