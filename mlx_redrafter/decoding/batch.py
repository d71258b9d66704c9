"""Several texts whose forward passes are one.

Axes: B slots, N nodes of each slot's tree.

Every text drafts as it would alone, and asks for what the target is to process; a step of the batch
answers all of them with one forward pass. Where they ask for trees of different sizes, all are
padded to the largest. Texts that choose alike are judged with one set of operations and one read.
Weights are read once for all texts, so that several texts together take less time than one after
the other, with drafts or without.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Container, Iterable, Sequence
from functools import partial
from typing import NamedTuple

import mlx.core as mx
from mlx_lm.generate import generation_stream
from mlx_lm.models.cache import KVCache

from mlx_redrafter.decoding.records import Token
from mlx_redrafter.decoding.sequence import PassRequest, Processing, SequenceDecoder
from mlx_redrafter.decoding.verdict import TargetChoice, judge_roots, judge_trees
from mlx_redrafter.target.caches.batch_cache import SlotCache
from mlx_redrafter.target.shared_prefill import prefill_together
from mlx_redrafter.target.target import Target, TargetOutputs
from mlx_redrafter.trees.tree import TokenTree
from mlx_redrafter.trees.tree_batch import TreeBatch, tree_size

# Steps that leave half of the slots idle, until those are given up: a text that comes meanwhile
# moves nobody else's rows.
PATIENCE = 4


class Progress(NamedTuple):
    """What a step of a batch has brought one of its texts.

    Attributes:
        text: The text, which has left the batch if it is finished, cancelled or in error.
        tokens: Tokens of its step.
        error: Reason why it cannot go on; None where it can.
    """

    text: SequenceDecoder
    tokens: list[Token]
    error: Exception | None = None


class Batch:
    """Texts that have begun, each in a slot of its own.

    Slots come in powers of two, and grow and shrink with the number of texts, the latter after some
    steps, as arrivals may need them.

    Args:
        target: The model whose texts they are.

    Raises:
        UnsupportedTargetError: The model has layers that do not attend to all tokens.
    """

    def __init__(self, target: Target):
        self.target = target
        self._cache = target.new_batch_cache()
        self._seats: list[_Seat] = []
        self._idle = mx.zeros((1,), dtype=mx.int32)
        # Steps in a row that left half of the slots idle.
        self._num_spare = 0

    def __len__(self) -> int:
        return len(self._seats)

    def __contains__(self, text: object) -> bool:
        return any(seat.text is text for seat in self._seats)

    @property
    def texts(self) -> list[SequenceDecoder]:
        """Texts that are in it."""
        return [seat.text for seat in self._seats]

    @property
    def num_slots(self) -> int:
        """Slots of a forward pass, B; idle ones take time, too."""
        return self._cache.num_slots

    def begin(self, texts: Sequence[SequenceDecoder]) -> None:
        """Process the prompts of texts but for their last tokens, see `SequenceDecoder.begin`.

        Those of similar lengths share forward passes.
        """
        sharing = [text for text in texts if text.begins_with_others]
        for group in _of_similar_lengths(sharing):
            if len(group) > 1:
                with mx.stream(generation_stream):
                    prefill_together(
                        self.target,
                        [text.request.prompt[:-1] for text in group],
                        [text.own_cache for text in group],
                        group[0].request.prefill_step_size,
                        partial(_are_cancelled, group),
                    )
        for text in texts:
            text.begin()

    def add(self, text: SequenceDecoder) -> None:
        """Take in a text at rest, such as one that has just begun.

        Its own caches are empty until it leaves.
        """
        cache, taken = self._cache, {seat.slot for seat in self._seats}
        with mx.stream(generation_stream):
            if len(taken) == cache.num_slots:
                cache.resize(range(len(taken)), max(1, 2 * len(taken)), cache.capacity)
            slot = next(slot for slot in range(cache.num_slots) if slot not in taken)
            stock = text.own_cache.stock
            cache.insert(slot, stock)
        text.cache = SlotCache(cache, slot)
        self._seats.append(_Seat(text, slot, stock))

    def step(self, resting: Container[SequenceDecoder] = ()) -> list[Progress]:
        """One forward pass, and what it has brought every text whose step has ended.

        Args:
            resting: Texts that have no part in it.
        """
        seats = [seat for seat in self._seats if seat.text not in resting]
        for seat in seats:
            seat.begin()
        for seat in seats:
            seat.proceed()
        self._process([seat for seat in seats if seat.wanted is not None])
        for seat in seats:
            seat.proceed()
        news = [self._take(seat) for seat in seats if seat.has_news]
        self._num_spare = self._num_spare + 1 if 2 * len(self._seats) <= self.num_slots else 0
        if self._num_spare > PATIENCE:
            self._shrink()
        return news

    def is_between_steps(self, text: SequenceDecoder) -> bool:
        """Whether a text has ended the step that it began."""
        return not self._seat_of(text).is_in_step

    def remove(self, text: SequenceDecoder) -> None:
        """Let a text go, its caches its own again, with its rows if it may need them."""
        seat = self._seat_of(text)
        self._seats.remove(seat)
        is_over = text.is_finished or text.is_cancelled
        is_wanted = text.request.leave_as_stock or not is_over
        with mx.stream(generation_stream):
            text.cache = self._cache.leave(seat.slot, seat.stock if is_wanted else None)
        if not self._seats:
            self._shrink()

    def _seat_of(self, text: SequenceDecoder) -> _Seat:
        return next(seat for seat in self._seats if seat.text is text)

    def _take(self, seat: _Seat) -> Progress:
        progress = seat.take()
        if seat.text.is_finished or seat.text.is_cancelled or progress.error is not None:
            self.remove(seat.text)
        return progress

    def _process(self, asking: Sequence[_Seat]) -> None:
        """Answer all texts that ask for a forward pass with one."""
        if not asking:
            return
        drafts: list[mx.array | TokenTree] = [self._idle] * self._cache.num_slots
        for seat in asking:
            assert seat.wanted is not None
            drafts[seat.slot] = seat.wanted.drafts
        forest = TreeBatch(drafts)
        with mx.stream(generation_stream):
            # One proposer drafts for all of them.
            outputs = self.target.verify_batch(forest, self._cache, asking[0].text.layers)
            for seat in asking:
                if not seat.wants_tree:
                    self._cache.commit(seat.slot, [0])
            for seats in _together(asking):
                self._answer(seats, outputs, forest)

    def _answer(self, seats: Sequence[_Seat], outputs: TargetOutputs, forest: TreeBatch) -> None:
        """Judge what several texts get with one set of operations, or leave one to judge."""
        slots = [seat.slot for seat in seats]
        choosers = [one for seat in seats if (one := seat.text.common_chooser) is not None]
        if not choosers:
            (seat,) = seats
            assert seat.wanted is not None
            seat.send(outputs.of(seat.slot).first(tree_size(seat.wanted.drafts)))
            return
        if slots != list(range(self.num_slots)):
            outputs, forest = outputs.of(mx.array(slots)), forest.of(slots)
        if seats[0].wants_tree:
            noises = [seat.wanted.noise for seat in seats if seat.wanted is not None]
            verdicts = judge_trees(choosers, outputs, forest, noises)
        else:
            positions = [seat.text.cache.length for seat in seats]
            verdicts = judge_roots(choosers, outputs, positions)
        for seat, verdict in zip(seats, verdicts, strict=True):
            seat.send(verdict)

    def _shrink(self) -> None:
        """Keep as many slots as there are texts, rounded up to a power of two."""
        count = len(self._seats)
        with mx.stream(generation_stream):
            num_slots = 1 << (count - 1).bit_length() if count else 0
            self._cache.shrink([seat.slot for seat in self._seats], num_slots)
        self._num_spare = 0
        for slot, seat in enumerate(self._seats):
            seat.slot = slot
            seat.text.cache = SlotCache(self._cache, slot)


def _are_cancelled(texts: Sequence[SequenceDecoder]) -> bool:
    return all(text.is_cancelled for text in texts)


def _of_similar_lengths(texts: Sequence[SequenceDecoder]) -> list[list[SequenceDecoder]]:
    """Texts in groups, no prompt in one more than a quarter shorter than the longest."""
    groups: list[list[SequenceDecoder]] = []
    for text in sorted(texts, key=lambda text: -len(text.request.prompt)):
        if groups and 4 * len(text.request.prompt) >= 3 * len(groups[-1][0].request.prompt):
            groups[-1].append(text)
        else:
            groups.append([text])
    return groups


class _Seat:
    """A text in its slot, and how far it is with its step.

    Args:
        text: The text.
        slot: Its slot.
        stock: Its own mlx-lm caches, which hold nothing meanwhile.

    Attributes:
        wanted: Root or tree that the target is to process for it next.
        has_news: Whether its step has ended.
    """

    def __init__(self, text: SequenceDecoder, slot: int, stock: Sequence[KVCache]):
        self.text = text
        self.slot = slot
        self.stock = stock
        self.wanted: PassRequest | None = None
        self.has_news = False
        self._steps: Processing[list[Token]] | None = None
        self._progress = Progress(text, [])

    @property
    def is_in_step(self) -> bool:
        """Whether it is in the middle of a step."""
        return self._steps is not None

    @property
    def wants_tree(self) -> bool:
        """Whether it wants more than a root."""
        return self.wanted is not None and isinstance(self.wanted.drafts, TokenTree)

    @property
    def kind(self) -> object:
        """What is equal for texts that are judged together."""
        assert self.wanted is not None
        chooser, noise = self.text.common_chooser, self.wanted.noise
        if chooser is None:
            return self.slot
        num_levels = None if noise is None else noise.values.shape[0]
        return self.wants_tree, num_levels, chooser.unseeded

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

    def send(self, answer: TargetOutputs | TargetChoice | None) -> None:
        """Go on with the answer of the forward pass that was wanted, if one was."""
        assert self._steps is not None
        try:
            self.wanted = self._steps.send(answer)
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


def _together(seats: Sequence[_Seat]) -> Iterable[list[_Seat]]:
    """Seats whose texts are judged together."""
    kinds = defaultdict(list)
    for seat in seats:
        kinds[seat.kind].append(seat)
    return kinds.values()
