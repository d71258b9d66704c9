"""One step of sequences, alone or several at once: draft, verify, accept, commit.

A step yields the tokens of the pass before the one that it dispatches. So the host reads them while
the device drafts what may follow, or computes the next token in plain decoding. If a compiled pass
can follow a path that nobody has read, the host dispatches that pass first. If a policy reads the
drafts' probabilities, or a lookup waits for the outcome, the device is idle while the host builds
the next pass.
"""

import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import mlx.core as mx
from mlx_lm.generate import generation_stream

from mlx_redrafter.decoding.delivery import Token
from mlx_redrafter.decoding.passes import Part, Pass
from mlx_redrafter.decoding.prefill import num_unread, prefill
from mlx_redrafter.decoding.protocols import Group, JointDrafting, JointPolicy
from mlx_redrafter.decoding.sampling import GumbelNoise, KeyedSampler
from mlx_redrafter.decoding.sequence import SequenceDecoder, Status, attempt, fail
from mlx_redrafter.draft_plan import DraftPlan
from mlx_redrafter.errors import ConfigError, NonFiniteError
from mlx_redrafter.trees.tree import TokenTree

# Tokens between two calls that return unused memory of MLX to the system, as in mlx-lm.
CLEAR_CACHE_EVERY = 256

# Trees that the target is to process next, or roots, shape (1,); a first root in a batch may have
# the end of its prompt before it, shape (n,).
Inputs = dict[SequenceDecoder, mx.array | TokenTree]
Noises = dict[SequenceDecoder, GumbelNoise | None]


class Lane:
    """The part of a step that depends on its caches: here one sequence's own.

    It has the cheapest operations for one sequence, and no state, so that all sequences share it. A
    ``policy`` decides how much the sequences draft together; without one, each decides alone.
    """

    policy: JointPolicy | None = None

    def noises(
        self, sequences: Sequence[SequenceDecoder], num_levels: int
    ) -> Sequence[GumbelNoise | None]:
        """Return the noise of the choices after trees of as many levels behind the newest passes.

        The sequences have samplers of one kind.
        """
        (one,) = sequences
        last = one.last
        assert last is not None
        further = last.num_accepted, last.max_accepted
        return [one.sampler.noise(last.length + 1, num_levels, *further)]

    def look_ahead(self, sequence: SequenceDecoder) -> bool:
        """Whether a pass might follow the sequence's newest one before the host has read that."""
        reads_first = sequence.processors is not None
        reads_first |= not isinstance(sequence.sampler, KeyedSampler)
        reads_first |= sequence.own_cache.needs_notice
        return not reads_first and sequence.target.compiled.are_used

    def follow(self, sequence: SequenceDecoder, tree: TokenTree) -> bool:
        """Commit the newest pass on the device alone, if a pass over the tree can follow that."""
        last = sequence.last
        assert last is not None
        longest, cache = last.max_accepted + 1, sequence.own_cache
        follows = sequence.target.compiled.may_follow(tree, cache, sequence.layers, longest)
        if follows:
            cache.follow(last.path, last.num_accepted)
        return follows

    def verify(self, inputs: Inputs, noises: Noises) -> dict[SequenceDecoder, Part]:
        """Run the target on roots and trees, sample, dispatch that; errors go to the outboxes."""
        ((one, drafts),) = inputs.items()
        if not isinstance(drafts, TokenTree):
            return {one: (one.advance(drafts), 0)}
        outputs = one.target.verify(drafts, one.own_cache, one.layers)
        if one.target.compiled.is_first_use:
            one.delivery.clock.skip()
        return {one: (one.sample(drafts, outputs, noises[one]), 0)}


ALONE = Lane()


def step_alone(sequence: SequenceDecoder) -> None:
    """Decode one step of a sequence in its own cache, unless it has something to take.

    Before the first step, process the prompt, or what is left of it.
    """
    if sequence.status is Status.WAITING:
        for _ in prefill([sequence]):
            pass
    if not sequence.is_ready:
        step(ALONE, [sequence])


def decode(
    sequence: SequenceDecoder,
    step_on: Callable[[SequenceDecoder], None] = step_alone,
    leave: Callable[[SequenceDecoder], None] = SequenceDecoder.close,
) -> Iterator[Token]:
    """Yield the tokens of a sequence, and close it however decoding ends.

    ``step_on`` decodes until the sequence is ready, such as `Scheduler.step`; ``leave`` closes it,
    such as `Scheduler.leave`. NaN raises NonFiniteError.
    """
    try:
        while not sequence.is_cancelled and (
            not sequence.is_finished or not sequence.outbox.is_empty
        ):
            step_on(sequence)
            for token in sequence.delivery.deliver(sequence.take()):
                if sequence.delivery.stats.num_tokens % CLEAR_CACHE_EVERY == 0:
                    mx.clear_cache()
                yield token
    except GeneratorExit:
        raise
    except BaseException:
        sequence.fail()
        raise
    finally:
        leave(sequence)


def step(lane: Lane, sequences: Sequence[SequenceDecoder]) -> None:
    """Decode one step of sequences that have one proposer or none.

    Their tokens go to their outboxes, and so does an error that only one sequence has. The first
    step of a sequence yields one token, the second one none, and every further one the tokens of
    the pass that the step before has dispatched.
    """
    with mx.stream(generation_stream):
        _Step(lane, sequences).run()


class _Step:
    """One step, with the drafts and the passes of each sequence."""

    def __init__(self, lane: Lane, live: Sequence[SequenceDecoder]):
        self._lane = lane
        self._live = live
        # Plans of those that draft.
        self._plans: dict[SequenceDecoder, DraftPlan] = {}
        self._trees: dict[SequenceDecoder, TokenTree] = {}
        self._noises: Noises = {}
        # Drafts to verify that the policy chose before the newest pass was read.
        self._early: dict[SequenceDecoder, TokenTree | None] = {}
        # Sequences whose policy chooses the drafts to verify.
        self._choosing: list[SequenceDecoder] = []
        self._inputs: Inputs = {}
        self._found: dict[SequenceDecoder, Part] = {}

    def run(self) -> None:
        groups = self._request()
        self._draft(groups)
        self._each(self._read, self._live)
        self._select()
        if self._inputs:
            for one in self._inputs:
                one.enter(Status.VERIFYING)
            self._found = self._lane.verify(self._inputs, self._noises)
        self._each(self._commit, self._live)

    def _each(
        self, do: Callable[[SequenceDecoder], object], sequences: Iterable[SequenceDecoder]
    ) -> None:
        """Call a function for several sequences; an error ends the step of its sequence only."""
        for one in sequences:
            if one.outbox.error is None:
                attempt(do, one)

    def _request(self) -> Iterable[list[SequenceDecoder]]:
        """Let policies choose plans; return the sequences that ask for drafts, by plan."""
        matches: dict[SequenceDecoder, Sequence[float] | None] = {}
        groups: defaultdict[Any, list[SequenceDecoder]] = defaultdict(list)

        def find_matches(one: SequenceDecoder) -> None:
            if one.drafting and one.policy and one.last and not one.outbox.is_last_next:
                matches[one] = one.drafting.matches(one.policy.least_chance)

        def choose(one: SequenceDecoder) -> None:
            if one.last is not None and one.last is one.committed:
                one.last.check_finite()  # NaN may follow drafts that were accepted
            plan = one.policy.choose(matches[one]) if one.policy and one in matches else None
            if plan is not None:
                self._plans[one] = plan
                kind = one.sampler.kind if isinstance(one.sampler, KeyedSampler) else ()
                groups[type(one.drafting), plan, kind].append(one)
            elif one.last is one.committed:
                one.skip_drafts()

        start, live = time.perf_counter(), self._live
        self._each(find_matches, [one for one in live if one.drafting])
        if self._lane.policy is not None:
            found = [(one.policy, chances) for one, chances in matches.items() if one.policy]
            self._lane.policy.choose_all(found, len(self._live), time.perf_counter() - start)
        self._each(choose, [one for one in live if one in matches or one.last is one.committed])
        return groups.values()

    def _draft(self, groups: Iterable[list[SequenceDecoder]]) -> None:
        """Dispatch drafts behind the newest passes; the sequences of a group draft together."""
        arrays: list[mx.array] = []
        for group in groups:
            try:
                arrays += self._propose(group)
            except Exception as error:  # no single sequence has caused it
                fail(group, error)
        if arrays:
            mx.async_eval(arrays)

    def _propose(self, alike: Sequence[SequenceDecoder]) -> list[mx.array]:
        """Build the trees of sequences with one plan; return the arrays to dispatch."""
        plan = self._plans[alike[0]]
        noises = self._lane.noises(alike, plan.shape.length)
        group = [(one.drafting, one.pass_for_drafts()) for one in alike]
        trees = propose_all(group, plan.searched, noises)
        arrays: list[mx.array] = []
        for one, noise, tree in zip(alike, noises, trees, strict=True):
            if tree is None:
                continue
            self._trees[one], self._noises[one] = tree, noise
            if tree.known is None:
                reads = one.policy is None or one.policy.reads_drafts
                arrays.extend(tree.arrays if reads else tree.unscored_arrays)
        return arrays

    def _read(self, one: SequenceDecoder) -> None:
        """Read the newest pass, if the next one depends on it, and find what the target does next.

        From one token to the next nothing is read, as the length is known anyway.
        """
        last, tree, plan = one.last, self._trees.get(one), self._plans.get(one)
        if last is None:
            # The last token of the prompt alone, as in mlx-lm; in a batch, also those before it.
            self._inputs[one] = mx.array(one.request.prompt[-num_unread(one) :], dtype=mx.int32)
            return
        is_plain = plan is None or plan.is_shadow
        if last is not one.committed:
            if not last.has_path and is_plain:
                if one.request.keeps_cache or not one.outbox.is_last_next:
                    self._inputs[one] = last.root
                return
            if tree is not None and not is_plain and self._looks_ahead(one, last, tree):
                return
            one.commit()
        if one.is_finished or not last.is_finite:
            return
        if tree is None or is_plain:
            self._inputs[one] = last.root
        else:
            self._choosing.append(one)

    def _looks_ahead(self, one: SequenceDecoder, last: Pass, tree: TokenTree) -> bool:
        """Let the target process drafts behind a path that nobody has read, if it can."""
        is_unread = last.has_path and not last.is_read
        if not is_unread or one.policy is None or not self._lane.look_ahead(one):
            return False
        early = self._early[one] = one.policy.select_early(self._plans[one], tree)
        if early is None or not self._lane.follow(one, early):
            return False
        self._inputs[one] = early
        return True

    def _select(self) -> None:
        """Let policies choose the drafts to verify, after the commits: they use their times."""
        if self._plans and self._lane.policy is not None:
            trees = [(one.policy, self._trees[one]) for one in self._choosing if one.policy]
            self._lane.policy.select_all(trees)
        self._each(self._choose, self._choosing)

    def _choose(self, one: SequenceDecoder) -> None:
        tree, last = self._early.get(one) or self._selected(one), one.last
        assert last is not None
        self._inputs[one] = tree if tree.size > 1 and one.cache.takes(tree) else last.root

    def _selected(self, one: SequenceDecoder) -> TokenTree:
        assert one.policy is not None
        return one.policy.select(self._plans[one], self._trees[one])

    def _commit(self, one: SequenceDecoder) -> None:
        plan = self._plans.get(one)
        one.commit()
        if plan is None:
            one.skip_drafts()
        if one in self._found:
            one.push(self._found[one], self._inputs[one], plan)
        has_shadow = plan is not None and plan.is_shadow and one in self._trees
        if has_shadow and not one.is_finished:
            self._selected(one)  # the policy updates its estimates from them


def propose_all(
    group: Group, plan: DraftPlan, noises: Sequence[GumbelNoise | None]
) -> list[TokenTree | None]:
    """Draft for one or several sequences, in the same passes of a network if it can do that."""
    first, found = group[0][0], None
    if len(group) > 1 and isinstance(first, JointDrafting):
        found = first.propose_all(group, plan, noises)
    if found is not None:
        return found
    found = [None] * len(group)
    for number, ((one, flight), noise) in enumerate(zip(group, noises, strict=True)):
        try:
            found[number] = one.propose(flight, plan, noise)
        except (NonFiniteError, ConfigError):
            if flight.is_finite:
                raise
            # The commit of the pass raises the same, and ends its sequence alone.
    return found
