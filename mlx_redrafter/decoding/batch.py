"""A batch of sequences, which share their forward passes.

One forward pass answers all sequences: trees of different sizes are padded to the largest. A
network drafts for all of them in the same passes if it can, and sequences with equal samplers are
sampled with one set of operations. The host reads all outcomes at once.
"""

import sys
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from functools import partial

import mlx.core as mx
from mlx_lm.generate import generation_stream

from mlx_redrafter.decoding.passes import (
    Part,
    Results,
    num_best_of,
    roots_of,
    sample_and_accept_all,
    sample_roots,
)
from mlx_redrafter.decoding.prefill import read_states
from mlx_redrafter.decoding.protocols import JointPolicy
from mlx_redrafter.decoding.sampling import GumbelNoise, KeyedSampler, noise_for_all
from mlx_redrafter.decoding.sequence import SequenceDecoder, Status, attempt, fail
from mlx_redrafter.decoding.step import Inputs, Lane, Noises, step
from mlx_redrafter.target.caches.batch_cache import Slot
from mlx_redrafter.target.target import Target, TargetOutputs
from mlx_redrafter.trees.tree import TokenTree, TreeBatch

# Nodes that an idle slot may cost, if half of the slots are, before those are given up. A sequence
# that comes before then finds a free slot, so that nobody's K/V entries are moved.
PATIENCE = 4
# Logits of sequences whose processors return another dtype, such as float32 for bfloat16: rounded,
# as beside others, they would have ties that they have not alone.
Promoted = dict[SequenceDecoder, mx.array]
# Root of a slot without a sequence, made once.
_IDLE = mx.array([0], dtype=mx.int32)


class Batch(Lane):
    """A `Lane` of several sequences of a target, each in a slot of its own.

    Slots come in powers of two, as many as sequences need. A policy decides how much these draft.
    """

    def __init__(self, target: Target):
        self.cache = target.caches.of_batch()
        self.policy: JointPolicy | None = None
        self._target = target
        self._slots: dict[SequenceDecoder, Slot] = {}
        # Nodes of each slot in the newest pass, and in all passes since half of the slots are idle.
        self._num_nodes = self._num_spare = 0

    def __contains__(self, sequence: SequenceDecoder) -> bool:
        return sequence in self._slots

    def __iter__(self) -> Iterator[SequenceDecoder]:
        return iter(list(self._slots))

    def make_room(self, num_sequences: int) -> None:
        """Make the slots for sequences that join next, all at once: that moves no entries twice."""
        with mx.stream(generation_stream):
            self.cache.make_room(num_sequences)

    def join(self, sequence: SequenceDecoder) -> None:
        """Move a sequence in, whose newest pass is committed."""
        cache = self.cache
        with mx.stream(generation_stream):
            number = cache.idle_slot()
            cache.insert(number, sequence.own_cache, partial(_num_kept, sequence))
        self._slots[sequence] = cache.slots[number]
        own = sequence.policy
        sequence.move(cache.slots[number], self.policy.join(own) if self.policy else own)

    def leave(self, sequence: SequenceDecoder, is_whole: bool = True) -> None:
        """Move a sequence out; its own caches get its K/V entries if they may be needed.

        They stay empty unless the entries are ``is_whole``.
        """
        slot = self._slots.pop(sequence)
        is_over = sequence.is_finished or sequence.is_cancelled
        is_needed = is_whole and (sequence.request.keeps_cache or not is_over)
        with mx.stream(generation_stream):
            self.cache.leave(slot.number, slot.own if is_needed else None)
        sequence.move(None)
        if not self._slots:
            self._shrink()

    def step(self, sequences: Sequence[SequenceDecoder]) -> None:
        """Run a pass for some sequences; the others rest, and those that have ended leave.

        A sequence that is cancelled before this rests, and one that is cancelled later takes part.
        """
        live = [one for one in sequences if not one.is_cancelled]
        for one in self:
            if one not in live:  # the pass overwrites the entries of its tree in flight
                attempt(SequenceDecoder.commit, one)
        step(self, live)
        self._leave_ended(self)
        is_spare = 2 * len(self._slots) <= self.cache.num_slots
        self._num_spare = self._num_spare + self._num_nodes if is_spare else 0
        if self._num_spare > PATIENCE:
            self._shrink()

    def _leave_ended(self, sequences: Iterable[SequenceDecoder]) -> None:
        for one in sequences:
            if one.is_finished or one.is_cancelled or one.outbox.error is not None:
                self.leave(one)

    def _shrink(self) -> None:
        with mx.stream(generation_stream):
            self.cache.shrink()
        self._num_spare = 0

    def noises(
        self, sequences: Sequence[SequenceDecoder], num_levels: int
    ) -> Sequence[GumbelNoise | None]:
        samplers = _samplers(sequences)
        if not samplers or not samplers[0].kind:
            return [None] * len(sequences)
        newest, further = [one.last for one in sequences if one.last is not None], None
        if any(one.max_accepted for one in newest):
            further = mx.concatenate([one.num_accepted for one in newest])
        positions = [one.length + 1 for one in newest]
        values = mx.split(noise_for_all(samplers, positions, num_levels, further), len(sequences))
        return [
            GumbelNoise(sampler.params, one) for sampler, one in zip(samplers, values, strict=True)
        ]

    def look_ahead(self, sequence: SequenceDecoder) -> bool:
        return False

    def verify(self, inputs: Inputs, noises: Noises) -> dict[SequenceDecoder, Part]:
        # Before the pass overwrites the root of a tree whose outcome is an error.
        self._leave_ended(one for one in self if one not in inputs)
        inputs = {one: inputs[one] for one in sorted(inputs, key=self._number)}
        trees = self._trees(inputs)
        self._num_nodes = trees.size
        # Sequences without drafts may be among those with them.
        layers = next((one.layers for one in inputs if one.layers), ())
        outputs = self._run(trees, layers)
        for sequence, one in inputs.items():
            if not isinstance(one, TokenTree):  # a root, and the end of the prompt before it
                sequence.cache.commit(range(one.size))
                if one.size > 1 and outputs.states is not None:
                    read_states(sequence, outputs.states[self._number(sequence), : one.size - 1])
        outputs, promoted = self._process(inputs, outputs)
        inputs = {one: drafts for one, drafts in inputs.items() if one.outbox.error is None}
        found: dict[SequenceDecoder, Part] = {}
        alike = {one: drafts for one, drafts in inputs.items() if one not in promoted}
        for group in _sampled_alike(alike, noises):
            results = self._sample(group, noises, outputs, trees)
            found |= {one: (results, number) for number, one in enumerate(group)}
        alone = {one: drafts for one, drafts in inputs.items() if one not in found}
        return found | self._sample_alone(alone, outputs, noises, promoted)

    def _run(self, trees: TreeBatch, layers: Sequence[int]) -> TargetOutputs:
        """Run the target; an error ends all sequences, also those that rest, with empty caches."""
        try:
            return self._target.verify_batch(trees, self.cache, layers)
        except BaseException as error:  # some layers may have lost entries
            for sequence in self:
                sequence.enter(Status.VERIFYING)
                sequence.fail()
                sequence.outbox.fail(error)
                self.leave(sequence, is_whole=False)
            raise

    def _number(self, sequence: SequenceDecoder) -> int:
        return self._slots[sequence].number

    def _trees(self, inputs: Inputs) -> TreeBatch:
        """Return what each slot is to process, the sequences being in the order of their slots."""
        drafts: list[mx.array | TokenTree] = [_IDLE] * self.cache.num_slots
        for sequence, one in inputs.items():
            drafts[self._number(sequence)] = one
        newest = [one.last for one in inputs if one.last is not None]
        are_roots = not any(isinstance(one, TokenTree) for one in drafts)
        if are_roots and len(newest) == len(drafts):
            return TreeBatch(drafts, tokens=roots_of(newest)[:, None])
        return TreeBatch(drafts)

    def _sample_alone(
        self, inputs: Inputs, outputs: TargetOutputs, noises: Noises, promoted: Promoted
    ) -> dict[SequenceDecoder, Part]:
        found: dict[SequenceDecoder, Part] = {}
        for sequence, one in inputs.items():
            own = outputs.of(self._number(sequence)).of(slice(*_sampled_nodes(one)))
            own = own._replace(logits=promoted.get(sequence, own.logits))
            try:
                found[sequence] = sequence.choose(one, own, noises.get(sequence)), 0
            except Exception as error:
                sequence.outbox.fail(error)
        return found

    def _process(self, inputs: Inputs, outputs: TargetOutputs) -> tuple[TargetOutputs, Promoted]:
        """Apply the logits processors and grammars of the sequences that have any."""
        rows: list[mx.array] = []
        promoted: Promoted = {}
        for sequence, one in inputs.items():
            if sequence.processors is None:
                continue
            rows = rows or list(outputs.logits)
            slot, (start, end) = self._number(sequence), _sampled_nodes(one)
            logits = rows[slot]
            try:
                processed = sequence.processors.process_after(one, logits[start:end])
            except BaseException as error:  # of the user's processors or of a grammar
                fail([sequence], error)
                continue
            if processed.dtype != logits.dtype:
                promoted[sequence] = processed
                continue
            rows[slot] = mx.concatenate([logits[:start], processed, logits[end:]])
        return outputs._replace(logits=mx.stack(rows)) if rows else outputs, promoted

    def _sample(
        self,
        group: Sequence[SequenceDecoder],
        noises: Noises,
        outputs: TargetOutputs,
        trees: TreeBatch,
    ) -> Results:
        slots, samplers = [self._number(one) for one in group], _samplers(group)
        is_tree = isinstance(trees.drafts[slots[0]], TokenTree)
        if slots != list(range(self.cache.num_slots)):
            outputs, trees = outputs.of(mx.array(slots)), trees.of(slots)
        num_best = max(num_best_of(one.drafting) for one in group)
        first = samplers[0]  # they differ in their seeds only
        if is_tree:
            own = [noises[one] for one in group]
            return sample_and_accept_all(first, outputs, trees, own, num_best)
        if trees.size > 1:
            outputs = outputs.at([one.size - 1 for one in trees.drafts])
        noise = None
        if first.kind:
            positions = [one.cache.length - 1 for one in group]
            noise = GumbelNoise(first.params, noise_for_all(samplers, positions))
        return sample_roots(first, outputs.of_roots, noise, num_best)


def _samplers(sequences: Iterable[SequenceDecoder]) -> list[KeyedSampler]:
    return [one.sampler for one in sequences if isinstance(one.sampler, KeyedSampler)]


def _num_kept(sequence: SequenceDecoder) -> int:
    """Return the number of tokens that its caches will hold at least when a sequence ends."""
    if not sequence.request.keeps_cache:
        return sys.maxsize
    return sequence.outbox.end_of_prompt + sequence.delivery.stats.num_tokens


def _sampled_nodes(drafts: mx.array | TokenTree) -> tuple[int, int]:
    """Return the first node after which a token is sampled, and the end of those nodes."""
    return (0 if isinstance(drafts, TokenTree) else drafts.size - 1), drafts.size


def _sampled_alike(inputs: Inputs, noises: Noises) -> Iterable[list[SequenceDecoder]]:
    """Group the sequences that one set of operations can sample; leave out all others."""
    groups = defaultdict(list)
    for sequence, drafts in inputs.items():
        sampler, is_tree = sequence.sampler, isinstance(drafts, TokenTree)
        if isinstance(sampler, KeyedSampler):
            noise = noises[sequence] if is_tree else None
            num_levels = None if noise is None else noise.values.shape[0]
            groups[is_tree, num_levels, sampler.kind].append(sequence)
    return groups.values()
