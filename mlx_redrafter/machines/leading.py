"""Rank 0: a target whose passes run on all ranks, and its caches."""

from collections.abc import Sequence
from dataclasses import astuple
from typing import Any

import mlx.core as mx
import mlx.nn as nn

from mlx_redrafter.errors import ConfigError, UnsupportedTargetError
from mlx_redrafter.generation_options import Quantisation
from mlx_redrafter.machines.leader import Handle, Leader, describe
from mlx_redrafter.machines.line import Do
from mlx_redrafter.machines.meeting import Machines
from mlx_redrafter.machines.splitting import has_split_head
from mlx_redrafter.target.caches.batch_cache import BatchCache, Floor
from mlx_redrafter.target.caches.model_caches import ModelCaches
from mlx_redrafter.target.caches.quantised import QuantisingCache
from mlx_redrafter.target.caches.stored_cache import Arrays
from mlx_redrafter.target.caches.tree_cache import TreeCache
from mlx_redrafter.target.compiled_pass import CompiledPasses
from mlx_redrafter.target.modules import TargetModules
from mlx_redrafter.target.target import Target, TargetOutputs
from mlx_redrafter.trees.tree import TokenTree, TreeBatch

# Attribute of a model that is split, on rank 0, with its `Leader`.
LEADER = "redrafter_leader"

# Layers whose inputs a pass returns, too.
Layers = Sequence[int]


class LedCache(TreeCache):
    """A sequence's cache on rank 0, which tells the other ranks what becomes of theirs."""

    needs_notice = True

    def __init__(self, leader: Leader, handle: Handle, *given: Any):
        super().__init__(*given)
        self._leader = leader
        self.handle = handle

    def commit(self, path: Sequence[int]) -> None:
        with self._leader.together(Do.COMMIT, self.handle.number, *path):
            super().commit(path)

    def trim_to(self, length: int) -> None:
        with self._leader.together(Do.TRIM_TO, self.handle.number, length):
            super().trim_to(length)


class LedQuantisingCache(LedCache, QuantisingCache):
    """The same for a cache that quantises its entries, which replaces mlx-lm's caches."""

    def grow(self, num_tokens: int) -> None:
        super().grow(num_tokens)
        self._leader.handles[self.stock[0]] = self.handle


class LedBatchCache(BatchCache):
    """The cache of a batch on rank 0, which tells the other ranks what becomes of theirs."""

    def __init__(self, leader: Leader, has_buckets: bool):
        super().__init__(has_buckets)
        self._leader = leader
        self.handle = Handle(leader)

    def commit(self, slot: int, path: Sequence[int]) -> None:
        with self._leader.together(Do.KEEP, self.handle.number, slot, *path):
            super().commit(slot, path)

    def insert(self, slot: int, own: TreeCache, floor: Floor) -> None:
        with self._leader.together(Do.INSERT, self.handle.number, slot, _number(own)):
            super().insert(slot, own, floor)

    def leave(self, slot: int, own: TreeCache | None) -> None:
        number = 0 if own is None else _number(own)
        with self._leader.together(Do.LEAVE, self.handle.number, slot, number):
            super().leave(slot, own)

    def resize(self, slots: Sequence[int], num_slots: int, num_rows: int) -> None:
        with self._leader.together(Do.RESIZE, self.handle.number, num_slots, num_rows, *slots):
            super().resize(slots, num_slots, num_rows)


class LedArrays(dict[str, mx.array]):
    """A copy of parts of a cache on rank 0; the other ranks have copies of their own parts."""

    def __init__(self, leader: Leader):
        super().__init__()
        self.handle = Handle(leader)


class LedCaches(ModelCaches):
    """Maker of caches on rank 0, which tells the other ranks what becomes of theirs."""

    def __init__(self, leader: Leader, *given: Any):
        super().__init__(*given)
        self.leader = leader

    def new(
        self,
        prompt_cache: Sequence[Any] | None = None,
        quantisation: Quantisation | None = None,
        given: list[Any] | None = None,
    ) -> TreeCache:
        cache = super().new(prompt_cache, quantisation, given)
        handle = self.handle_of(cache.stock, cache.length, _fields(quantisation))
        facts = self.leader, handle, cache.layers, cache.length
        if quantisation is None:
            return LedCache(*facts, cache.has_buckets)
        return LedQuantisingCache(*facts, quantisation, given, cache.has_buckets)

    def handle_of(self, stock: Sequence[Any], length: int, quantisation: Sequence[int]) -> Handle:
        """Open mlx-lm's caches of ``length`` tokens for a text, with fields of a `Quantisation`."""
        handle = self.leader.handles.get(stock[0])
        if handle is None and any(not layer.empty() for layer in stock):
            raise ConfigError(
                "prompt_cache must be empty or of a text of this process on several machines, "
                "found one with other tokens, which the other machines lack; give the whole prompt"
            )
        handle = self.leader.handles[stock[0]] = handle or Handle(self.leader)
        with self.leader.together(Do.OPEN, handle.number, length, *quantisation):
            return handle

    def reserve(self, cache: TreeCache, num_rows: int) -> None:
        with self.leader.together(Do.RESERVE, _number(cache), num_rows):
            super().reserve(cache, num_rows)

    def of_batch(self) -> BatchCache:
        return LedBatchCache(self.leader, self.has_buckets)

    def copy_entries(self, layers: Sequence[Any], start: int, end: int) -> Arrays:
        copy, cache = LedArrays(self.leader), self.leader.handles[layers[0]]
        with self.leader.together(Do.COPY_ENTRIES, _number(copy), cache.number, start, end):
            copy.update(super().copy_entries(layers, start, end))
        return copy

    def copy_states(self, layers: Sequence[Any]) -> Arrays:
        copy, cache = LedArrays(self.leader), self.leader.handles[layers[0]]
        with self.leader.together(Do.COPY_STATES, _number(copy), cache.number):
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
        handle = self.leader.handles[layers[0]] = Handle(self.leader)
        copies = [(_number(one), count) for one, count in pieces], _number(states) if states else 0
        with self.leader.together(Do.FILL, handle.number, length, _fields(quantisation), *copies):
            pass


class LedModules(TargetModules):
    def __init__(self, caches: LedCaches, *given: Any):
        super().__init__(*given)
        self._caches = caches

    def call(self, tokens: mx.array) -> mx.array:
        return LedModel(self._model, self._caches)(tokens, self._caches.stock())

    def logits(self, hidden_states: mx.array) -> mx.array:
        if has_split_head(self._model):
            raise UnsupportedTargetError(
                "expected a drafter with a head of its own, as mlx-lm splits the head of this "
                "model over the machines, found one that drafts with the model's head; use a "
                "recurrent drafter, a smaller model or lookup"
            )
        return super().logits(hidden_states)


class LeadingTarget(Target):
    """A target whose passes run on all ranks; drafters, samplers and policies are on rank 0."""

    def __init__(self, model: nn.Module, leader: Leader):
        # Each rank would compare bits, and compile, for itself.
        super().__init__(model, CompiledPasses(are_used=False))
        self.leader = leader
        self.devices = tuple(rank.device for rank in leader.machines.ranks)
        self.caches: LedCaches = LedCaches(leader, model, self.caches.has_buckets)
        self.modules = LedModules(self.caches, model, self.modules.parts)

    @property
    def stock_model(self) -> Any:
        return LedModel(self.model, self.caches)

    def advance(self, token: mx.array, cache: TreeCache, layers: Layers = ()) -> TargetOutputs:
        with self.leader.passing(Do.ADVANCE, [_number(cache)], [token]):
            return _dispatched(super().advance(token, cache, layers))

    def verify(self, tree: TokenTree, cache: TreeCache, layers: Layers = ()) -> TargetOutputs:
        facts, values = describe(tree)
        with self.leader.passing(Do.VERIFY, [_number(cache), *facts], values):
            return _dispatched(super().verify(tree, cache, layers))

    def verify_batch(
        self, trees: TreeBatch, cache: BatchCache, layers: Layers = ()
    ) -> TargetOutputs:
        assert isinstance(cache, LedBatchCache)
        slots, tokens = [], list[mx.array]()
        for one, slot in zip(trees.drafts, cache.slots, strict=True):
            facts, arrays = describe(one)
            slots.append((*facts, slot.floor()))
            tokens += arrays
        with self.leader.passing(Do.BATCH, [cache.handle.number, trees.size, *slots], tokens):
            return _dispatched(super().verify_batch(trees, cache, layers))

    def process_chunk(self, chunk: mx.array, cache: TreeCache, layers: Layers) -> TargetOutputs:
        numbers = [_number(cache), chunk.shape[0], bool(layers)]
        with self.leader.passing(Do.CHUNK, numbers, [chunk]):
            outputs = super().process_chunk(chunk, cache, layers)
            dispatch_chunk(outputs, cache, bool(layers))
        return outputs


class LedModel:
    """The model for loops that call it themselves, as mlx-lm's do, and compute each call."""

    def __init__(self, model: nn.Module, caches: LedCaches):
        self._model, self._caches = model, caches
        self.layers, self.make_cache = model.layers, caches.stock

    def __call__(self, tokens: mx.array, cache: Sequence[Any]) -> mx.array:
        """Return the logits of one sequence's next tokens, shape (1, n) to (1, n, V)."""
        leader = self._caches.leader
        handle = leader.handles.get(cache[0]) or self._caches.handle_of(cache, 0, ())
        with leader.passing(Do.CALL, [handle.number, tokens.shape[1]], [tokens[0]]):
            logits: mx.array = self._model(tokens, cache=cache)
            mx.async_eval(logits)
        return logits


def lead(machines: Machines, model: nn.Module) -> None:
    """Make a model's part on rank 0 one that leads the others."""
    setattr(model, LEADER, Leader(machines))


def target_of(model: nn.Module) -> Target:
    """Return the target of a model, over all machines for one that `load` has split."""
    leader = getattr(model, LEADER, None)
    return Target(model) if leader is None else LeadingTarget(model, leader)


def dispatch_chunk(outputs: TargetOutputs, cache: TreeCache, is_whole: bool) -> None:
    """Dispatch a chunk of a prompt: its entries, or the last layer's output as well."""
    hidden = [outputs.hidden_states] if is_whole else []
    mx.async_eval([layer.state for layer in cache.stock], hidden)


def _dispatched(outputs: TargetOutputs) -> TargetOutputs:
    mx.async_eval(outputs.logits)
    return outputs


def _number(one: TreeCache | Arrays) -> int:
    assert isinstance(one, LedCache | LedArrays)
    return one.handle.number


def _fields(quantisation: Quantisation | None) -> tuple[int, ...]:
    return () if quantisation is None else astuple(quantisation)
