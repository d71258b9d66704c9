"""One step of several sequences: the four parts of `SequenceDecoder.step`, each for all of them.

One forward pass answers all sequences: trees of different sizes are padded to the largest. A
network drafts for all of them in the same passes if it can, and sequences with equal samplers are
sampled with one set of operations. The host reads all outcomes at once.

Axes: B slots, N nodes of each slot's tree, V vocabulary.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, TypeVar

import mlx.core as mx
from mlx_lm.generate import generation_stream

from mlx_redrafter.decoding.protocols import JointPolicy, Outlook, Wish, propose_all
from mlx_redrafter.decoding.records import PendingPass, Token
from mlx_redrafter.decoding.sampling import GumbelNoise, noise_for_all
from mlx_redrafter.decoding.sequence import SequenceDecoder
from mlx_redrafter.decoding.target_choice import sample_and_accept_all, sample_roots
from mlx_redrafter.target.caches.batch_cache import BatchCache, Slot
from mlx_redrafter.target.target import Target, TargetOutputs
from mlx_redrafter.trees.tree import TokenTree
from mlx_redrafter.trees.tree_batch import TreeBatch

T = TypeVar("T")
# Trees that sequences ask the target to process, or roots, shape (1,), with the ends of prompts
# before them, shape (n,).
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


@dataclass
class JointStep:
    """One step of sequences that have one proposer or none.

    An error of one sequence ends the step of that sequence only.

    Attributes:
        target: The model that decodes them.
        cache: Their cache.
        slots: Their slots in it.
        policy: Decides how much they draft.
    """

    target: Target
    cache: BatchCache
    slots: dict[SequenceDecoder, Slot]
    policy: JointPolicy
    _has_drafts: bool = False
    _errors: dict[SequenceDecoder, Exception] = field(default_factory=dict)

    def run(self, active: Sequence[SequenceDecoder]) -> list[Progress]:
        """Draft, ask, answer, take; no cancelled sequence takes part."""
        live = [one for one in active if not one.is_cancelled]
        self._draft(live)
        asked = self._ask(live)
        self._answer(asked)
        taken = self._each(SequenceDecoder.take, live)
        return [Progress(one, taken.get(one, []), self._errors.get(one)) for one in active]

    def _each(
        self, do: Callable[[SequenceDecoder], T], sequences: Iterable[SequenceDecoder]
    ) -> dict[SequenceDecoder, T]:
        """Call a function for several sequences."""
        results = {}
        for sequence in sequences:
            if sequence not in self._errors:
                try:
                    results[sequence] = do(sequence)
                except Exception as error:
                    self._errors[sequence] = error
        return results

    def _draft(self, live: Sequence[SequenceDecoder]) -> None:
        """Dispatch the drafts of all sequences; those with one plan are drafted together."""
        chooses = self._each(SequenceDecoder.look, live)
        outlooks = [Outlook(one.policy, one.outlook) for one in live if chooses.get(one)]
        self.policy.look(outlooks, len(live))
        wishes = self._each(SequenceDecoder.wish, live)
        groups: defaultdict[Any, list[tuple[SequenceDecoder, Wish]]] = defaultdict(list)
        for sequence, wish in wishes.items():
            if wish is not None:
                sampler = sequence.common_sampler
                key = type(wish.drafting), wish.plan, sampler.kind if sampler else ()
                groups[key].append((sequence, wish))
        self._has_drafts = bool(groups)
        arrays: list[mx.array] = []
        with mx.stream(generation_stream):
            for members in groups.values():
                try:
                    group = _with_noise(members)
                    trees = propose_all([one._replace(plan=one.plan.searched) for _, one in group])
                except Exception as error:  # no single sequence has caused it
                    self._errors |= {sequence: error for sequence, _ in members}
                    continue
                for (sequence, wish), tree in zip(group, trees, strict=True):
                    sequence.receive(wish, tree)
                    if tree is not None and tree.known is None:
                        arrays.extend(tree.arrays)
            if arrays:
                mx.async_eval(arrays)

    def _ask(self, live: Sequence[SequenceDecoder]) -> Asked:
        """Return what the target is to process next, by sequence; none for those at their end."""
        if self._has_drafts:
            self._each(SequenceDecoder.read, live)
            offers = self._each(lambda one: one.offer, live).values()
            self.policy.weigh([one for one in offers if one is not None])
        asked = self._each(SequenceDecoder.ask, live)
        return {one: drafts for one, drafts in asked.items() if drafts is not None}

    def _answer(self, asked: Asked) -> None:
        """Run the target on all roots and trees, sample, and answer each sequence."""
        if not asked:
            return
        drafts: list[mx.array | TokenTree] = [_IDLE] * self.cache.num_slots
        for sequence, one in asked.items():
            drafts[self.slots[sequence].number] = one
        trees = TreeBatch(drafts)
        # Sequences without drafts may be among those with them.
        layers = next((one.layers for one in asked if one.layers), ())
        with mx.stream(generation_stream):
            outputs = self.target.verify_batch(trees, self.cache, layers)
            for sequence, one in asked.items():
                if not isinstance(one, TokenTree):
                    self._commit(sequence, one, outputs)
            outputs = self._process(asked, outputs)
            asked = {one: drafts for one, drafts in asked.items() if one not in self._errors}
            chosen: dict[SequenceDecoder, PendingPass] = {}
            for group in _sampled_alike(asked):
                chosen |= zip(group, self._sample(group, outputs, trees), strict=True)
        self._each(lambda one: one.answer(chosen[one]), chosen)
        alone = [one for one in asked if one not in chosen]
        self._each(lambda one: one.answer(self._sample_alone(one, asked[one], outputs)), alone)

    def _commit(self, sequence: SequenceDecoder, tokens: mx.array, outputs: TargetOutputs) -> None:
        """Keep a root, and the end of the prompt before it."""
        num_tokens = tokens.shape[0]
        sequence.cache.commit(range(num_tokens))
        if num_tokens > 1 and outputs.states is not None:
            slot = self.slots[sequence].number
            sequence.read_states(outputs.states[slot, : num_tokens - 1])

    def _process(self, asked: Asked, outputs: TargetOutputs) -> TargetOutputs:
        """Apply the logits processors and grammars of the sequences that have any."""
        having = [one for one in asked if one.processors is not None]
        if not having:
            return outputs
        rows = list(outputs.logits)

        def process(sequence: SequenceDecoder) -> None:
            slot, one = self.slots[sequence].number, asked[sequence]
            logits, (start, end) = rows[slot], _sampled_nodes(one)
            processed = sequence.process(one, logits[start:end]).astype(logits.dtype)
            rows[slot] = mx.concatenate([logits[:start], processed, logits[end:]])

        self._each(process, having)
        return outputs._replace(logits=mx.stack(rows))

    def _sample(
        self, group: Sequence[SequenceDecoder], outputs: TargetOutputs, trees: TreeBatch
    ) -> list[PendingPass]:
        """Sample after the trees or roots of several sequences with one set of operations."""
        slots = [self.slots[one].number for one in group]
        samplers = [one.common_sampler for one in group if one.common_sampler is not None]
        is_tree = isinstance(trees.drafts[slots[0]], TokenTree)
        if slots != list(range(self.cache.num_slots)):
            outputs, trees = outputs.of(mx.array(slots)), trees.of(slots)
        num_best = max([one.num_best for one in group])
        if is_tree:
            noises = [one.noise for one in group]
            return sample_and_accept_all(samplers, outputs, trees, noises, num_best)
        if trees.size > 1:
            outputs = outputs.at([one.size - 1 for one in trees.drafts])
        positions = [one.cache.length - 1 for one in group]
        return sample_roots(samplers, outputs, positions, num_best)

    def _sample_alone(
        self, sequence: SequenceDecoder, drafts: mx.array | TokenTree, outputs: TargetOutputs
    ) -> PendingPass:
        own = outputs.of(self.slots[sequence].number)
        return sequence.choose(drafts, own.between(*_sampled_nodes(drafts)))


# Root of a slot without a sequence, made once.
_IDLE = mx.array([0], dtype=mx.int32)


def _with_noise(
    group: Sequence[tuple[SequenceDecoder, Wish]],
) -> Sequence[tuple[SequenceDecoder, Wish]]:
    """Add the noise of the target's choices to wishes of one plan, unless they are greedy."""
    samplers = [one.common_sampler for one, _ in group if one.common_sampler is not None]
    if not samplers or not samplers[0].kind:
        return group
    pending, num_levels = [wish.pending for _, wish in group], group[0][1].plan.shape.length
    further = None
    if any(one.max_accepted for one in pending):
        further = mx.concatenate([one.num_accepted for one in pending])
    positions = [one.length + 1 for one in pending]
    values = mx.split(noise_for_all(samplers, positions, num_levels, further), len(group))
    return [
        (sequence, wish._replace(noise=GumbelNoise(sampler.params, one)))
        for (sequence, wish), sampler, one in zip(group, samplers, values, strict=True)
    ]


def _sampled_nodes(drafts: mx.array | TokenTree) -> tuple[int, int]:
    """Return the first node after which a token is sampled, and the end of those nodes."""
    return (0 if isinstance(drafts, TokenTree) else drafts.size - 1), drafts.size


def _sampled_alike(asked: Asked) -> Iterable[list[SequenceDecoder]]:
    """Group the sequences that one set of operations can sample; leave out all others."""
    groups = defaultdict(list)
    for sequence, drafts in asked.items():
        sampler, noise = sequence.common_sampler, sequence.noise
        if sampler is not None:
            num_levels = None if noise is None else noise.values.shape[0]
            key = isinstance(drafts, TokenTree), num_levels, sampler.kind
            groups[key].append(sequence)
    return groups.values()
