"""The plan expected to be fastest, step by step: how far to draft, and how much to verify.

Axes: W beam width, L beam length, N tree nodes.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import accumulate
from math import exp

from mlx_redrafter.config import DraftPlan, DraftShape
from mlx_redrafter.decoding.protocols import Step
from mlx_redrafter.decoding.stats import ShapeStats
from mlx_redrafter.policy.acceptance import AcceptanceStats
from mlx_redrafter.policy.step_times import StepTimes
from mlx_redrafter.tree import TokenTree

# Widths and lengths of the searches on offer, and numbers of nodes that may be verified of each.
WIDTH = 2
LENGTHS = (3, 4, 5, 6, 7, 8)
SIZES = (2, 4, 6, 8, 12, 16)
# Plans with the largest tree of each length, and all plans of that length by number of nodes.
TREES = {
    DraftPlan(DraftShape(WIDTH, length), SIZES[-1]): {
        size: DraftPlan(DraftShape(WIDTH, length), size) for size in SIZES
    }
    for length in LENGTHS
}
SHORTEST, *_, LONGEST = TREES
CANDIDATES = tuple(plan for plans in TREES.values() for plan in plans.values())
# Plans of drafts out of the text by number of nodes; they take no time to draft, so they are long.
LOOKUPS = {size: DraftPlan(DraftShape(4, 16), size, from_text=True) for size in SIZES}
LOOKUP = LOOKUPS[SIZES[-1]]

# During the first TRIAL steps of the first text, drafts go on as long as their estimated speed is
# at least PLAUSIBLE of plain decoding: the estimate rests on a few drafts.
TRIAL = 8
PLAUSIBLE = 0.8
# Steps with drafts between the plain steps that measure the time of plain ones.
PLAIN_EVERY = 128
# Plain steps until a draft measures acceptance; the interval doubles up to the second number.
DRAFT_EVERY = 32
DRAFT_EVERY_AT_MOST = 256


class AdaptivePolicy:
    """The plan with the most expected tokens per second in every step, or plain decoding.

    The length of a search is chosen by the acceptance of its levels; then, of the drafts at hand,
    those are verified whose probabilities are worth the time that they take. Drafts out of the text
    are preferred where their probabilities promise more. Step times are corrected as they pass.

    Args:
        seconds: Duration of a step by plan, of plain decoding under None, as timed beforehand; the
            plans in it are those on offer.
        before: Statistics of the text before. Without them, plain decoding is only chosen in the
            first steps where it seems much faster.
    """

    def __init__(
        self, seconds: Mapping[DraftPlan | None, float], before: AcceptanceStats | None = None
    ):
        self.seconds = StepTimes(seconds)
        self.acceptance = AcceptanceStats(LONGEST.shape.levels, before)
        self._trees = [tree for tree in TREES if tree in seconds]
        self._trial = 0 if before else TRIAL
        self.current = self._best()
        self._steps = dict.fromkeys(self.seconds, 0)
        self._tokens = dict.fromkeys(self.seconds, 0)
        self._last = self._next = self.current
        self._expected = [0.0]
        self._interval = self._until_probe = self._first_interval()
        # Plans of the next steps, the last one first, before they are `current` again.
        self._probe: list[DraftPlan | None] = []
        if self.current is None and self._trees:
            self._probe = [self._best_tree()]

    def choose(self, outlook: Sequence[float] | None) -> DraftPlan | None:
        """See `DraftPolicy.choose`."""
        self._next = LOOKUP if self._looks_up(outlook) else self._choose()
        return self._next

    @property
    def carried_over(self) -> AcceptanceStats | None:
        """Statistics for the next text; None before this one's trial is over."""
        return None if self._trial > 0 else self.acceptance

    def _choose(self) -> DraftPlan | None:
        if not self._trees:
            return None
        if not self._probe:
            self._until_probe -= 1
            if self._until_probe > 0:
                return self.current
            self._begin_probe()
        return self._probe.pop()

    def _looks_up(self, outlook: Sequence[float] | None) -> bool:
        """Whether drafts out of the text, of these probabilities, promise the most speed."""
        if not outlook or LOOKUP not in self.seconds:
            return False
        expected = [1.0, *accumulate(outlook, initial=1.0)]
        best = max(
            expected[min(size, len(expected) - 1)] / self.seconds[plan]
            for size, plan in LOOKUPS.items()
        )
        return best > self._speed(self.current)

    def _first_interval(self) -> int:
        return DRAFT_EVERY if self.current is None else PLAIN_EVERY

    def _begin_probe(self) -> None:
        if self.current is None:
            self._interval = min(2 * self._interval, DRAFT_EVERY_AT_MOST)
            self._probe = [self._best_tree()]
        else:
            # The second of three is timed.
            self._probe = [None] * 3
        self._until_probe = self._interval

    def keep(self, plan: DraftPlan, tree: TokenTree) -> int:
        """See `DraftPolicy.keep`; waits for the scores of the drafts."""
        plans = LOOKUPS if plan.from_text else TREES[plan]
        scores, depths = tree.read()
        probabilities = list(map(exp, scores))
        # At n - 1, the expected number of accepted drafts of a tree of n nodes: the probability of
        # a draft counts those above it, so the probabilities add up.
        expected = list(accumulate(probabilities, initial=0.0))
        # Probabilities of drafts out of the text are frequencies; they need no correction.
        ratio = 1.0 if plan.from_text else self.acceptance.calibration_ratio
        per_second = self._speed(self.current)

        def gain(size: int) -> float:
            """Tokens beyond those that the time of the step would give otherwise."""
            seconds = self.seconds[None] if size == 1 else self.seconds[plans[size]]
            return ratio * expected[size - 1] - per_second * seconds

        sizes = [size for size in plans if size <= tree.size]
        size = max([1, *sizes] if plan.from_text else sizes, key=gain)
        if not plan.from_text:
            self._expected = [0.0] * plan.shape.levels
            for depth, probability in zip(depths[: size - 1], probabilities, strict=False):
                self._expected[depth - 1] += probability
        return size

    def observe(self, step: Step) -> None:
        """See `DraftPolicy.observe`."""
        plan = step.plan
        kind = None if plan is None or step.num_nodes == 1 else _kind(plan, step.num_nodes)
        self._steps[kind] += 1
        self._tokens[kind] += 1 + step.num_accepted
        # A plain step is dispatched before the outcome of the one before is read, which may wait
        # for both: the first of some plain steps takes twice its time, and the last one none.
        neighbours = self._last, plan, self._next
        is_inner = len({one is None for one in neighbours}) == 1
        # Nor is a step one of its kind in which drafts were looked up in vain.
        if step.seconds is not None and is_inner and (kind is None) == (plan is None):
            self.seconds.learn(kind, step.seconds)
        self._last = plan
        if plan is not None and not plan.from_text:
            self.acceptance.learn(step.num_nodes, step.num_accepted, self._expected)
        before, self.current = self.current, self._best()
        self._trial = 0 if self.current is None else self._trial - 1
        if (before is None) != (self.current is None):
            self._interval = self._until_probe = self._first_interval()

    def shapes(self) -> list[ShapeStats]:
        """See `DecodingStats.shapes`; those with drafts in the order of the plans on offer."""
        return [
            ShapeStats(plan, seconds, self._steps[plan], self._tokens[plan])
            for plan, seconds in self.seconds.items()
            if plan is None or self._steps[plan]
        ]

    def _best(self) -> DraftPlan | None:
        if not self._trees:
            return None
        tree = self._best_tree()
        least = PLAUSIBLE if self._trial > 0 else 1.0
        return tree if self._speed(tree) > least * self._speed(None) else None

    def _best_tree(self) -> DraftPlan:
        return max(self._trees, key=self._speed)

    def _speed(self, tree: DraftPlan | None) -> float:
        """Expected tokens per second."""
        if tree is None:
            return 1 / self.seconds[None]
        seconds = {size: self.seconds[plan] for size, plan in TREES[tree].items()}
        return self.acceptance.speed(tree.shape.length, seconds)


def _kind(plan: DraftPlan, num_nodes: int) -> DraftPlan:
    return (LOOKUPS if plan.from_text else TREES[DraftPlan(plan.shape, SIZES[-1])])[num_nodes]
