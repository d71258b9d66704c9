"""The other ranks: they do what rank 0 says, and decide nothing."""

from __future__ import annotations

import signal
from collections.abc import Callable
from typing import NoReturn

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.generate import generation_stream

from mlx_redrafter.errors import CheckpointError, RedrafterError, first_line
from mlx_redrafter.generation_options import Quantisation
from mlx_redrafter.kernels.selection import use_kernels
from mlx_redrafter.machines.drafts import NUM_FACTS, num_values, rebuild
from mlx_redrafter.machines.frames import Do, Frame
from mlx_redrafter.machines.leading import dispatch_chunk, share
from mlx_redrafter.machines.meeting import Machines
from mlx_redrafter.machines.splitting import config_digest, load_part
from mlx_redrafter.target.caches.batch_cache import BatchCache
from mlx_redrafter.target.caches.prompt_cache import num_tokens
from mlx_redrafter.target.caches.tree_cache import TreeCache
from mlx_redrafter.target.target import Target
from mlx_redrafter.trees.tree import TokenTree
from mlx_redrafter.trees.tree_batch import TreeBatch


def follow(machines: Machines, own_name: str | None = None) -> NoReturn:
    """Load this rank's part of the model and obey rank 0 until it ends; then end this process.

    Args:
        machines: All ranks.
        own_name: Folder or repository of the model on this machine; rank 0's by default.
    """
    # A terminal sends Ctrl-C to all local ranks; rank 0 decides what it means.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    (line,) = machines.lines
    try:
        model = _load_when_asked(machines, own_name)
        if model is not None:
            obey(machines, model)
    except Exception as error:
        line.fail(f"{type(error).__name__}: {first_line(error)}")
    machines.leave(0)


def obey(machines: Machines, model: nn.Module) -> None:
    """Do what rank 0 says until it ends, with this rank's part of the model."""
    (line,), follower = machines.lines, Follower(model, machines)
    with mx.stream(generation_stream):
        while (frame := line.receive()).do is not Do.END:
            follower.obey(frame)


def _load_when_asked(machines: Machines, own_name: str | None) -> nn.Module | None:
    """Answer what rank 0 asks, and load this rank's part; None if rank 0 ends first."""
    (line,), name = machines.lines, own_name or ""
    while (frame := line.receive()).do is not Do.END:
        try:
            if frame.do is Do.CHECK:
                name = own_name or frame.text
                line.say(Do.YES, config_digest(name))
            else:
                model, _ = load_part(name, machines.group)
                use_kernels(model)
                line.say(Do.YES)
                return model
        except RedrafterError as error:
            line.say(Do.NO, str(error))
    return None


class Follower:
    """The target and the caches of a rank that follows."""

    def __init__(self, model: nn.Module, machines: Machines):
        self._target = Target(model)
        self._target.compiled = None  # as on rank 0
        self._group = machines.group
        self._caches: dict[int, TreeCache] = {}
        self._batches: dict[int, BatchCache] = {}
        # Number of tokens that the sequences of batches keep whatever happens, by cache.
        self._kept: dict[int, int] = {}
        self._verbs: dict[Do, Callable[..., None]] = {
            Do.ADVANCE: self._advance,
            Do.CHUNK: self._process_chunk,
            Do.VERIFY: self._verify,
            Do.BATCH: self._verify_batch,
            Do.BARE: self._call,
            Do.STOCK: self._call_stock,
            Do.OPEN: self._open,
            Do.COMMIT: lambda cache, *path: self._cache(cache).commit(path),
            Do.SETTLE: lambda cache, length: self._cache(cache).settle(length),
            Do.RESERVE: lambda cache, rows: self._target.reserve(self._cache(cache), rows),
            Do.DROP: self._drop,
            Do.NEW_BATCH: self._add_batch,
            Do.KEEP: lambda batch, slot, *path: self._batches[batch].commit(slot, path),
            Do.INSERT: self._insert,
            Do.LEAVE: self._leave,
            Do.RESIZE: lambda batch, count, rows, *slots: self._batches[batch].resize(
                slots, count, rows
            ),
        }

    def obey(self, frame: Frame) -> None:
        """Do what rank 0 has done or does now."""
        self._verbs[frame.do](*frame.numbers)

    def _advance(self, cache: int) -> None:
        mx.async_eval(self._target.advance(self._shared(1), self._cache(cache)).logits)

    def _process_chunk(self, number: int, size: int, is_whole: int) -> None:
        cache = self._cache(number)
        outputs = self._target.process_chunk(self._shared(size), cache, ())
        dispatch_chunk(outputs, cache, bool(is_whole))
        mx.eval([layer.state for layer in cache.stock])
        mx.clear_cache()

    def _verify(self, cache: int, *facts: int) -> None:
        tree = rebuild(facts, self._shared(num_values(facts)))
        assert isinstance(tree, TokenTree)
        mx.async_eval(self._target.verify(tree, self._cache(cache)).logits)

    def _verify_batch(self, batch: int, size: int, *numbers: int) -> None:
        slots = [numbers[i : i + NUM_FACTS + 2] for i in range(0, len(numbers), NUM_FACTS + 2)]
        drafts = [slot[:NUM_FACTS] for slot in slots]
        self._kept |= {slot[-2]: slot[-1] for slot in slots}
        values, trees, start = self._shared(sum(map(num_values, drafts))), [], 0
        for facts in drafts:
            end = start + num_values(facts)
            trees.append(rebuild(facts, values[start:end]))
            start = end
        outputs = self._target.verify_batch(TreeBatch(trees, size), self._batches[batch])
        mx.async_eval(outputs.logits)

    def _call(self, size: int) -> None:
        mx.async_eval(self._target.call(self._shared(size)[None], None))

    def _call_stock(self, cache: int, size: int) -> None:
        mx.async_eval(self._target.model(self._shared(size)[None], cache=self._cache(cache).stock))

    def _open(self, number: int, length: int, *quantisation: int) -> None:
        """Continue a cache in another text, at the length that it has on rank 0, or begin one."""
        cache = self._cache(number)
        cache.settle(length)
        how = Quantisation(*quantisation) if quantisation else None
        self._caches[number] = self._target.new_cache(cache.stock, how)
        if self._caches[number].length != length:
            raise CheckpointError(
                f"expected a cache of {length} tokens, as on rank 0, found "
                f"{num_tokens(cache.stock)}; start again with a new cache"
            )

    def _drop(self, number: int) -> None:
        self._caches.pop(number, None)
        self._kept.pop(number, None)
        self._batches.pop(number, None)

    def _add_batch(self, number: int) -> None:
        self._batches[number] = self._target.new_batch_cache()

    def _insert(self, batch: int, slot: int, cache: int) -> None:
        self._batches[batch].insert(slot, self._cache(cache), lambda: self._kept[cache])

    def _leave(self, batch: int, slot: int, cache: int) -> None:
        self._batches[batch].leave(slot, self._cache(cache) if cache else None)

    def _cache(self, number: int) -> TreeCache:
        """Return the cache of this number, which is new if rank 0 has not named it yet."""
        if number not in self._caches:
            self._caches[number] = self._target.new_cache()
        return self._caches[number]

    def _shared(self, count: int) -> mx.array:
        """Return the values that rank 0 gives for a pass, int32, shape (count,)."""
        values = share(mx.zeros((count,), dtype=mx.int32), self._group)
        mx.async_eval(values)
        return values
