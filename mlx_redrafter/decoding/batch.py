"""Several texts whose forward passes are one.

Axes: B slots, N nodes of each slot's tree.

Every text drafts, chooses and accepts as it would alone, and asks for what the target is to
process; a step of the batch answers all of them with one forward pass. Where they ask for trees of
different sizes, all are padded to the largest. Weights are read once for all texts, so that several
texts together take less time than one after the other, with drafts or without.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import mlx.core as mx
from mlx_lm.generate import generation_stream

from mlx_redrafter.decoding.records import Token
from mlx_redrafter.decoding.text import Processing, Text
from mlx_redrafter.target.caches.batch import SlotCache
from mlx_redrafter.target.target import Target, TargetOutputs
from mlx_redrafter.tree import TokenTree


class Progress(NamedTuple):
    """What a step of a batch has brought one of its texts.

    Attributes:
        text: The text, which has left the batch if it is finished, cancelled or in error.
        tokens: Tokens of its step.
        error: Reason why it cannot go on; None where it can.
    """

    text: Text
    tokens: list[Token]
    error: Exception | None = None


class Batch:
    """Texts that have begun, each in a slot of its own.

    Slots come in powers of two, and grow and shrink with the number of texts.

    Args:
        target: The model whose texts they are.

    Raises:
        UnsupportedTargetError: The model has layers that do not attend to all tokens.
    """

    def __init__(self, target: Target):
        self.target = target
        self._cache = target.new_batch_cache()
        self._seats: list[_Seat] = []

    def __len__(self) -> int:
        return len(self._seats)

    @property
    def num_slots(self) -> int:
        """Slots of a forward pass, B; idle ones take time, too."""
        return self._cache.num_slots

    def add(self, text: Text) -> None:
        """Take in a text whose first step, the prompt, is done."""
        cache, taken = self._cache, {seat.slot for seat in self._seats}
        with mx.stream(generation_stream):
            if len(taken) == cache.num_slots:
                cache.resize(range(len(taken)), max(1, 2 * len(taken)), cache.capacity)
            slot = next(slot for slot in range(cache.num_slots) if slot not in taken)
            cache.insert(slot, text.own_cache.stock)
        text.cache = SlotCache(cache, slot)
        self._seats.append(_Seat(text, slot))

    def step(self) -> list[Progress]:
        """One forward pass, and what it has brought every text whose step has ended."""
        for seat in self._seats:
            seat.begin()
        for seat in self._seats:
            seat.proceed()
        self._process([seat for seat in self._seats if seat.wanted is not None])
        for seat in self._seats:
            seat.proceed()
        return [self._take(seat) for seat in list(self._seats) if seat.has_news]

    def remove(self, text: Text) -> None:
        """Let a text go. Its caches are its own again where its request asks for them."""
        seat = next(seat for seat in self._seats if seat.text is text)
        self._seats.remove(seat)
        with mx.stream(generation_stream):
            text.cache = self._cache.leave(seat.slot, text.request.leave_as_stock)
            if 4 * len(self._seats) <= self._cache.num_slots:
                self._shrink()

    def _take(self, seat: _Seat) -> Progress:
        progress = seat.take()
        if seat.text.is_finished or seat.text.is_cancelled or progress.error is not None:
            self.remove(seat.text)
        return progress

    def _process(self, asking: Sequence[_Seat]) -> None:
        """Answer all texts that ask for a forward pass with one."""
        if not asking:
            return
        trees = [_IDLE] * self._cache.num_slots
        for seat in asking:
            trees[seat.slot] = seat.tree
        size = max(tree.size for tree in trees)
        with mx.stream(generation_stream):
            padded = [tree.padded(size) for tree in trees]
            # One proposer drafts for all of them.
            outputs = self.target.verify_batch(padded, self._cache, asking[0].text.layers)
            outputs = [one.first(tree.size) for one, tree in zip(outputs, trees, strict=True)]
        for seat in asking:
            if not isinstance(seat.wanted, TokenTree):
                self._cache.commit(seat.slot, [0])
            seat.send(outputs[seat.slot])

    def _shrink(self) -> None:
        self._cache.shrink([seat.slot for seat in self._seats], self._cache.num_slots // 2)
        for slot, seat in enumerate(self._seats):
            seat.slot = slot
            seat.text.cache = SlotCache(self._cache, slot)


class _Seat:
    """A text in its slot, and how far it is with its step.

    Attributes:
        wanted: Root or tree that the target is to process for it next.
        has_news: Whether its step has ended.
    """

    def __init__(self, text: Text, slot: int):
        self.text = text
        self.slot = slot
        self.wanted: mx.array | TokenTree | None = None
        self.has_news = False
        self._steps: Processing[list[Token]] | None = None
        self._progress = Progress(text, [])

    @property
    def tree(self) -> TokenTree:
        """What it wants, as a tree."""
        assert self.wanted is not None
        return self.wanted if isinstance(self.wanted, TokenTree) else TokenTree.alone(self.wanted)

    def begin(self) -> None:
        """Draft and dispatch, as far as that goes without waiting for the device."""
        if self.text.is_cancelled:
            self.has_news = True
        elif self._steps is None:
            self._steps = self.text.steps()
            self.send(None)

    def proceed(self) -> None:
        """Go on until the next forward pass, or to the end of the step."""
        while self._steps is not None and self.wanted is None and not self.has_news:
            self.send(None)

    def send(self, outputs: TargetOutputs | None) -> None:
        """Go on with the outputs of the forward pass that was wanted, if one was."""
        assert self._steps is not None
        try:
            self.wanted = self._steps.send(outputs)
            return
        except StopIteration as end:
            self._progress = Progress(self.text, end.value)
        except Exception as error:  # the other texts go on
            self._progress = Progress(self.text, [], error)
        self.wanted = self._steps = None
        self.has_news = True

    def take(self) -> Progress:
        """What the step that has ended brought."""
        self.has_news, progress = False, self._progress
        self._progress = Progress(self.text, [])
        return progress


_IDLE = TokenTree.of([0], [0])
