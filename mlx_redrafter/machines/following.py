"""The other ranks: they do what rank 0 says, and decide nothing."""

from __future__ import annotations

import signal
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from functools import partial
from typing import NoReturn

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.generate import generation_stream

from mlx_redrafter.errors import CheckpointError, RedrafterError, first_line
from mlx_redrafter.generation_options import Quantisation
from mlx_redrafter.kernels.selection import use_kernels
from mlx_redrafter.machines.drafts import num_values, rebuild
from mlx_redrafter.machines.frames import Do, Frame
from mlx_redrafter.machines.leading import dispatch_chunk, share
from mlx_redrafter.machines.line import BEAT
from mlx_redrafter.machines.meeting import Machines
from mlx_redrafter.machines.splitting import digest, load_part
from mlx_redrafter.target.caches.batch_cache import BatchCache
from mlx_redrafter.target.caches.prompt_cache import num_tokens
from mlx_redrafter.target.caches.stored_cache import Arrays
from mlx_redrafter.target.caches.tree_cache import TreeCache
from mlx_redrafter.target.target import Target
from mlx_redrafter.trees.tree import TokenTree
from mlx_redrafter.trees.tree_batch import TreeBatch


def follow(
    machines: Machines, own_name: str | None = None, own_adapter: str | None = None
) -> NoReturn:
    """Load this rank's part of the model and obey rank 0 until it ends; then end this process.

    Args:
        machines: All ranks.
        own_name: Folder or repository of the model on this machine; rank 0's by default.
        own_adapter: Folder of a LoRA adapter, likewise.
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


def load_when_asked(
    machines: Machines, own_name: str | None = None, own_adapter: str | None = None
) -> nn.Module | None:
    """Answer what rank 0 asks, and load this rank's part; None if rank 0 ends first."""
    (line,), model = machines.lines, None
    while model is None and (frame := line.receive()).do is not Do.END:
        try:
            if frame.do is Do.CHECK:
                expected, name, adapter = frame.values
                name, adapter = own_name or name, own_adapter or adapter
                if digest(name, adapter) != expected:
                    files, found = "config.json", name
                    if adapter is not None:
                        files, found = "config.json and adapter", f"{name} and {adapter}"
                    raise CheckpointError(
                        f"expected the {files} that rank 0 has, found another in {found}"
                    )
            else:
                model, _ = load_part(name, machines.group, adapter=adapter)
                use_kernels(model)
            line.say(Do.YES)
        except RedrafterError as error:
            line.say(Do.NO, str(error))
    return model


class FollowingBatch(BatchCache):
    """The cache of a batch on a rank that follows."""

    def keep(self, numbers: Sequence[int]) -> None:
        """Take over the number of tokens that each slot's sequence keeps on rank 0."""
        for slot, number in zip(self.slots, numbers, strict=True):
            slot.floor = partial(int, number)


class Follower:
    """The target and the caches of a rank that follows."""

    def __init__(self, model: nn.Module, machines: Machines):
        self._target = Target(model)
        self._target.compiled = None  # as on rank 0
        self._group = machines.group
        # A number that rank 0 has not named yet is that of a new cache.
        self._caches = defaultdict[int, TreeCache](self._target.new_cache)
        self._batches = defaultdict[int, FollowingBatch](
            lambda: FollowingBatch(self._target.has_buckets)
        )
        self._copies: dict[int, Arrays] = {}
        self._verbs: dict[Do, Callable[..., None]] = {
            Do.ADVANCE: self._advance,
            Do.CHUNK: self._process_chunk,
            Do.VERIFY: self._verify,
            Do.BATCH: self._verify_batch,
            Do.CALL: self._call,
            Do.OPEN: self._open,
            Do.COPY_ENTRIES: self._copy_entries,
            Do.COPY_STATES: self._copy_states,
            Do.FILL: self._fill,
            Do.COMMIT: lambda cache, *path: self._caches[cache].commit(path),
            Do.SETTLE: lambda cache, length: self._caches[cache].settle(length),
            Do.RESERVE: lambda cache, rows: self._target.reserve(self._caches[cache], rows),
            Do.DROP: self._drop,
            Do.KEEP: lambda batch, slot, *path: self._batches[batch].commit(slot, path),
            Do.INSERT: lambda batch, slot, cache: self._batches[batch].insert(
                slot, self._caches[cache], int
            ),
            Do.LEAVE: lambda batch, slot, cache: self._batches[batch].leave(
                slot, self._caches[cache] if cache else None
            ),
            Do.RESIZE: lambda batch, count, rows, *slots: self._batches[batch].resize(
                slots, count, rows
            ),
        }

    def obey(self, frame: Frame) -> None:
        """Do what rank 0 has done or does now."""
        self._verbs[frame.do](*frame.values)

    def _advance(self, cache: int) -> None:
        mx.async_eval(self._target.advance(self._shared(1), self._caches[cache]).logits)

    def _process_chunk(self, number: int, size: int, is_whole: int) -> None:
        cache = self._caches[number]
        outputs = self._target.process_chunk(self._shared(size), cache, ())
        dispatch_chunk(outputs, cache, bool(is_whole))
        mx.eval([layer.state for layer in cache.stock])
        mx.clear_cache()

    def _verify(self, cache: int, *facts: int) -> None:
        tree = rebuild(facts, self._shared(num_values(facts)))
        assert isinstance(tree, TokenTree)
        mx.async_eval(self._target.verify(tree, self._caches[cache]).logits)

    def _verify_batch(self, number: int, size: int, *slots: Sequence[int]) -> None:
        drafts, batch = [facts for *facts, _ in slots], self._batches[number]
        batch.keep([floor for *_, floor in slots])
        values, trees, start = self._shared(sum(map(num_values, drafts))), [], 0
        for facts in drafts:
            end = start + num_values(facts)
            trees.append(rebuild(facts, values[start:end]))
            start = end
        mx.async_eval(self._target.verify_batch(TreeBatch(trees, size), batch).logits)

    def _call(self, cache: int, size: int) -> None:
        caches = self._caches[cache].stock if cache else None
        mx.async_eval(self._target.call(self._shared(size)[None], caches))

    def _open(self, number: int, length: int, *quantisation: int) -> None:
        """Continue a cache in another text, at the length that it has on rank 0, or begin one."""
        cache = self._caches[number]
        cache.settle(length)
        how = Quantisation(*quantisation) if quantisation else None
        self._caches[number] = self._target.new_cache(cache.stock, how)
        if self._caches[number].length != length:
            raise CheckpointError(
                f"expected a cache of {length} tokens, as on rank 0, found "
                f"{num_tokens(cache.stock)}; start again with a new cache"
            )

    def _copy_entries(self, number: int, cache: int, start: int, end: int) -> None:
        self._copies[number] = self._target.copy_entries(self._caches[cache].stock, start, end)

    def _copy_states(self, number: int, cache: int) -> None:
        self._copies[number] = self._target.copy_states(self._caches[cache].stock)

    def _fill(
        self,
        cache: int,
        states: int,
        length: int,
        quantisation: Sequence[int],
        pieces: Sequence[tuple[int, int]],
    ) -> None:
        """Fill a new cache with the first tokens of a text before."""
        stock, copies = self._target.stock_cache(), self._copies
        how = Quantisation(*quantisation) if quantisation else None
        entries = [(copies[number], count) for number, count in pieces]
        self._target.fill(stock, entries, copies[states] if states else {}, length, how)
        self._caches[cache] = self._target.new_cache(stock)

    def _drop(self, number: int) -> None:
        self._copies.pop(number, None)
        self._caches.pop(number, None)
        self._batches.pop(number, None)

    def _shared(self, count: int) -> mx.array:
        """Return the values that rank 0 gives for a pass, int32, shape (count,)."""
        values = share(mx.zeros((count,), dtype=mx.int32), self._group)
        mx.async_eval(values)
        return values
