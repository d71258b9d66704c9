"""Sequences of one thread, which share their forward passes while there are several of them.

A sequence is decoded alone until another one has begun, too. Then both finish their passes in
flight and move into a batch, each into a slot of its own; the last one that is left moves out
again. A sequence moves with its K/V entries, and its tokens are the same wherever it is decoded.

Every sequence of the batch drafts as it does alone, and asks for what the target is to process.
One forward pass answers all of them: trees of different sizes are padded to the largest, and
sequences with equal samplers are sampled with one set of operations. As weights are read once for
all sequences, several of them together cost less time than one after the other.

Axes: B slots, N nodes of each slot's tree.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from functools import partial
from typing import NamedTuple, TypeVar

import mlx.core as mx
from mlx_lm.generate import generation_stream

from mlx_redrafter.decoding.protocols import DraftPolicy
from mlx_redrafter.decoding.records import PendingPass, Token
from mlx_redrafter.decoding.sequence import SequenceDecoder
from mlx_redrafter.decoding.target_choice import sample_and_accept_all, sample_roots
from mlx_redrafter.errors import NonFiniteError
from mlx_redrafter.target.caches.batch_cache import SlotCache
from mlx_redrafter.target.target import Target, TargetOutputs
from mlx_redrafter.trees.tree import TokenTree
from mlx_redrafter.trees.tree_batch import TreeBatch, tree_size

# Steps with half of the slots idle before those are given up. A sequence that comes before then
# finds a free slot, so that nobody's K/V entries are moved.
PATIENCE = 4

T = TypeVar("T")
PolicyInBatch = Callable[[DraftPolicy | None], DraftPolicy | None]
# Roots, shape (1,), or trees that sequences ask the target to process.
Asked = dict[SequenceDecoder, mx.array | TokenTree]


class Progress(NamedTuple):
    """Result of a forward pass for one sequence.

    Attributes:
        sequence: The sequence, which has left the batch if it is finished, cancelled or in error.
        tokens: Its next tokens.
        error: Reason why it cannot go on; None if it can.
    """

    sequence: SequenceDecoder
    tokens: list[Token]
    error: Exception | None = None


class Scheduler:
    """Decodes the sequences of one thread: one of them at a call, or all.

    Slots come in powers of two, and grow and shrink with the number of sequences.

    Args:
        target: The model that decodes them.
        policy_in_batch: Function from the policy of a sequence to its policy in the batch.
    """

    def __init__(self, target: Target, policy_in_batch: PolicyInBatch = lambda policy: policy):
        self.target = target
        self._policy_in_batch = policy_in_batch
        self._begun: list[SequenceDecoder] = []
        self._cache = target.new_batch_cache()
        # Slots of the sequences in the batch.
        self._slots: dict[SequenceDecoder, SlotCache] = {}
        # Results that nobody has asked for yet; those sequences rest meanwhile.
        self._ready: dict[SequenceDecoder, Progress] = {}
        # Errors of sequences in the newest step.
        self._errors: dict[SequenceDecoder, Exception] = {}
        self._idle = mx.zeros((1,), dtype=mx.int32)
        # Steps in a row with half of the slots idle.
        self._num_spare = 0

    @property
    def num_slots(self) -> int:
        """Slots of a forward pass, B; idle ones cost time, too."""
        return self._cache.num_slots

    def begin(self, sequences: Sequence[SequenceDecoder]) -> None:
        """Process all but the last tokens of prompts; similar lengths share forward passes."""
        for group in _of_similar_lengths([one for one in sequences if one.shares_prefill]):
            if len(group) > 1:
                with mx.stream(generation_stream):
                    self.target.prefill_together(
                        [one.request.prompt[:-1] for one in group],
                        [one.own_cache for one in group],
                        group[0].request.prefill_step_size,
                        partial(_are_cancelled, group),
                    )
        for sequence in sequences:
            sequence.begin()
        self._begun += [one for one in sequences if not one.is_finished]

    def step(self, sequence: SequenceDecoder) -> list[Token]:
        """Return the next tokens of a sequence, from a step of its own or of the whole batch.

        Raises:
            NonFiniteError: The logits after the tokens so far are NaN.
        """
        if sequence not in self._begun:
            # Alone: between the chunks of its prompt, the caller may step the other sequences.
            tokens = sequence.step()
            self._begun.append(sequence)
            return tokens
        is_alone = len(self._begun) == 1
        if sequence in self._slots and sequence not in self._ready:
            if is_alone:
                return self._move_out(sequence)
            while sequence not in self._ready:
                self._step_batch()
        if sequence not in self._ready:
            return sequence.step() if is_alone else self._move_in(sequence)
        progress = self._ready.pop(sequence)
        if progress.error is not None:
            raise progress.error
        return progress.tokens

    def step_all(self) -> list[Progress]:
        """Return the results of the next forward pass, or of the next step if only one has begun.

        Raises:
            NonFiniteError: The logits after the tokens so far of a lone sequence are NaN.
        """
        if len(self._begun) == 1:
            return [Progress(self._begun[0], self.step(self._begun[0]))]
        joining = [one for one in self._begun if one not in self._slots]
        moved = [Progress(one, self._move_in(one)) for one in joining]
        if any(progress.tokens and progress.sequence in self._slots for progress in moved):
            return moved
        if self._slots:
            self._step_batch()
        alone = [one for one in moved if one.tokens or one.sequence.is_finished]
        results, self._ready = [*alone, *self._ready.values()], {}
        return results

    def is_ready(self, sequence: SequenceDecoder) -> bool:
        """Whether the next tokens of a sequence are there without another step."""
        return sequence in self._ready

    def leave(self, sequence: SequenceDecoder) -> None:
        """Let a sequence go, for whatever reason; its caches are its own again."""
        if sequence in self._begun:
            self._begun.remove(sequence)
        self._ready.pop(sequence, None)
        if sequence in self._slots:
            self._free(sequence)

    def _move_in(self, sequence: SequenceDecoder) -> list[Token]:
        """Move a sequence into the batch, and return the tokens of its pass in flight.

        One that the batch cannot take, at least not yet, makes a step of its own instead.
        """
        if not self._cache.takes(sequence.own_cache):
            return sequence.step()
        tokens = sequence.finish_pass()
        if sequence.is_finished:
            return tokens
        cache, taken = self._cache, {one.slot for one in self._slots.values()}
        with mx.stream(generation_stream):
            if len(taken) == cache.num_slots:
                cache.resize(range(len(taken)), max(1, 2 * len(taken)), cache.capacity)
            number = next(slot for slot in range(cache.num_slots) if slot not in taken)
            own = sequence.own_cache
            cache.insert(number, own, sequence.num_kept)
        self._slots[sequence] = SlotCache(cache, number, own)
        sequence.move(self._slots[sequence], self._policy_in_batch(sequence.policy))
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
            self._cache.leave(slot.slot, slot.own if is_needed else None)
        sequence.move(slot.own)
        if not self._slots:
            self._shrink()

    def _step_batch(self) -> None:
        """Run one forward pass for all sequences of the batch but those that rest."""
        for sequence, progress in self._ready.items():
            # The next pass overwrites the K/V entries of the tree in flight of one that rests.
            if sequence in self._slots:
                with suppress(NonFiniteError):  # its own next step raises it again
                    progress.tokens.extend(sequence.finish_pass())
        active = [one for one in self._slots if one not in self._ready and not one.is_finished]
        try:
            results = self._run_pass(active)
        except Exception as error:  # no single sequence has caused it
            results = [Progress(one, [], error) for one in self._slots]
        for result in results:
            if result.tokens or result.error or result.sequence not in self._slots:
                self._ready[result.sequence] = result
        self._num_spare = self._num_spare + 1 if 2 * len(self._slots) <= self.num_slots else 0
        if self._num_spare > PATIENCE:
            self._shrink()

    def _run_pass(self, active: Sequence[SequenceDecoder]) -> list[Progress]:
        """Draft, ask, answer, take, as `SequenceDecoder.step` does, for several sequences."""
        self._errors.clear()
        live = [one for one in active if not one.is_cancelled]
        self._each(SequenceDecoder.draft, live)
        asked = self._each(SequenceDecoder.ask, live)
        self._answer({one: drafts for one, drafts in asked.items() if drafts is not None})
        taken = self._each(SequenceDecoder.take, live)
        results = [Progress(one, taken.get(one, []), self._errors.get(one)) for one in active]
        for sequence, _, error in results:
            if sequence.is_finished or sequence.is_cancelled or error is not None:
                self._free(sequence)
        return results

    def _each(
        self, do: Callable[[SequenceDecoder], T], sequences: Iterable[SequenceDecoder]
    ) -> dict[SequenceDecoder, T]:
        """Call a function for several sequences; an error ends the step of that sequence only."""
        results = {}
        for sequence in sequences:
            if sequence not in self._errors:
                try:
                    results[sequence] = do(sequence)
                except Exception as error:
                    self._errors[sequence] = error
        return results

    def _answer(self, asked: Asked) -> None:
        """Run the target on all roots and trees, sample, and answer each sequence."""
        if not asked:
            return
        drafts: list[mx.array | TokenTree] = [self._idle] * self.num_slots
        for sequence, one in asked.items():
            drafts[self._slots[sequence].slot] = one
        trees = TreeBatch(drafts)
        with mx.stream(generation_stream):
            # One proposer drafts for all of them, so they all read the same layers.
            outputs = self.target.verify_batch(trees, self._cache, next(iter(asked)).layers)
            for sequence, one in asked.items():
                if not isinstance(one, TokenTree):
                    sequence.cache.commit([0])
            chosen: dict[SequenceDecoder, PendingPass] = {}
            for group in _sampled_alike(asked):
                chosen |= zip(group, self._sample(group, outputs, trees), strict=True)
        self._each(lambda one: one.answer(chosen[one]), chosen)
        alone = [one for one in asked if one not in chosen]
        self._each(lambda one: one.answer(self._sample_alone(one, asked[one], outputs)), alone)

    def _sample(
        self, group: Sequence[SequenceDecoder], outputs: TargetOutputs, trees: TreeBatch
    ) -> list[PendingPass]:
        """Sample after the trees or roots of several sequences with one set of operations."""
        slots = [self._slots[one].slot for one in group]
        samplers = [one.common_sampler for one in group if one.common_sampler is not None]
        is_tree = isinstance(trees.drafts[slots[0]], TokenTree)
        if slots != list(range(self.num_slots)):
            outputs, trees = outputs.of(mx.array(slots)), trees.of(slots)
        if is_tree:
            return sample_and_accept_all(samplers, outputs, trees, [one.noise for one in group])
        return sample_roots(samplers, outputs, [one.cache.length for one in group])

    def _sample_alone(
        self, sequence: SequenceDecoder, drafts: mx.array | TokenTree, outputs: TargetOutputs
    ) -> PendingPass:
        own = outputs.of(self._slots[sequence].slot)
        return sequence.sample(drafts, own.first(tree_size(drafts)))

    def _shrink(self) -> None:
        """Keep one slot for each sequence, rounded up to a power of two."""
        count = len(self._slots)
        with mx.stream(generation_stream):
            num_slots = 1 << (count - 1).bit_length() if count else 0
            self._cache.shrink([one.slot for one in self._slots.values()], num_slots)
        self._num_spare = 0
        for number, one in enumerate(self._slots.values()):
            one.slot = number


def _sampled_alike(asked: Asked) -> Iterable[list[SequenceDecoder]]:
    """Group the sequences that one set of operations can sample; leave out all others."""
    groups = defaultdict(list)
    for sequence, drafts in asked.items():
        sampler, noise = sequence.common_sampler, sequence.noise
        if sampler is not None:
            num_levels = None if noise is None else noise.values.shape[0]
            key = isinstance(drafts, TokenTree), num_levels, sampler.unseeded
            groups[key].append(sequence)
    return groups.values()


def _are_cancelled(sequences: Sequence[SequenceDecoder]) -> bool:
    return all(sequence.is_cancelled for sequence in sequences)


def _of_similar_lengths(sequences: Sequence[SequenceDecoder]) -> list[list[SequenceDecoder]]:
    """Group sequences so that no prompt is more than a quarter shorter than the longest one."""
    groups: list[list[SequenceDecoder]] = []
    for sequence in sorted(sequences, key=lambda one: -len(one.request.prompt)):
        if groups and 4 * len(sequence.request.prompt) >= 3 * len(groups[-1][0].request.prompt):
            groups[-1].append(sequence)
        else:
            groups.append([sequence])
    return groups
