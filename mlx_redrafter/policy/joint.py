"""How much the texts of a batch draft: one decision for all of them at every step.

A forward pass has one size for all texts, so what counts is how many tokens all of them get
together. One `AdaptivePolicy` decides, which learns from the drafts of all texts: its means are
over them.
"""

from __future__ import annotations

from collections.abc import Callable, MutableMapping, Sequence

import numpy as np

from mlx_redrafter.decoding.protocols import Step
from mlx_redrafter.draft_plan import DraftPlan
from mlx_redrafter.policy.adaptive import AdaptivePolicy
from mlx_redrafter.policy.awaited_drafts import AwaitedDrafts
from mlx_redrafter.policy.experience import Experience
from mlx_redrafter.policy.seen_drafts import SeenDrafts
from mlx_redrafter.policy.step_costs import StepCosts
from mlx_redrafter.trees.tree import TokenTree


def batch_costs(costs: StepCosts, num_slots: int) -> StepCosts:
    """What steps of a batch take, expected from those of one text.

    A pass over B trees of N nodes has as many rows as one over a tree of B N nodes. Beyond the
    largest that was timed, each more row takes as much as rows on the way there, from wherever they
    took most: a device that has reached its arithmetic's limit does not come below it again, and
    the last two sizes alone are noise. Texts draft one after the other.
    """
    sizes = [1, *costs.verify]
    seconds = [costs.plain, *costs.verify.values()]
    last = sizes[-1], seconds[-1]
    before = zip(sizes[:-1], seconds[:-1], strict=True)
    slope = max(0.0, *((last[1] - taken) / (last[0] - size) for size, taken in before))

    def verify(num_rows: int) -> float:
        beyond = max(0, num_rows - sizes[-1])
        return float(np.interp(num_rows, sizes, seconds)) + slope * beyond

    return StepCosts(
        plain=verify(num_slots),
        verify={size: verify(num_slots * size) for size in costs.verify},
        first={width: num_slots * taken for width, taken in costs.first.items()},
        level={width: num_slots * taken for width, taken in costs.level.items()},
        wait=costs.wait,
    )


class JointPolicy:
    """The policy of a batch.

    Args:
        costs: Seconds of steps of one text.
        num_slots: Function that returns the number of slots of the batch.
        batches: Experience by number of slots, which is kept up.
        before: Experience of a text or batch before, for numbers of slots without their own.
        max_length: As in `AdaptivePolicy`.
    """

    def __init__(
        self,
        costs: StepCosts,
        num_slots: Callable[[], int],
        batches: MutableMapping[int, Experience],
        before: Experience | None = None,
        max_length: int | None = None,
    ):
        self._costs = costs
        self._num_slots = num_slots
        self._batches = batches
        self._max_length = max_length
        self._begin(before)
        self._plan: DraftPlan | None = None
        self.num_steps = 0

    def of_text(self) -> TextPolicy:
        """The policy of one of the texts."""
        return TextPolicy(self)

    def choose(self, text: TextPolicy) -> DraftPlan | None:
        """The plan of a text's next step; the first text to ask has it decided for all."""
        if text.num_steps == self.num_steps:
            self._decide(text)
        text.num_steps = self.num_steps
        return self._plan

    def keep(self, text: TextPolicy, plan: DraftPlan, tree: TokenTree) -> TokenTree:
        """The nodes of a text's drafts that are worth verifying."""
        text.seen = SeenDrafts(plan, tree)
        return self._policy.select(text.seen, tree)

    def observe(self, text: TextPolicy, step: Step) -> None:
        """Learn from a step of a text; of one of them what it takes, too."""
        if text is self._timed:
            self._policy.observe(step)
        self._policy.follow(text.awaited, text.seen, step.tokens)
        text.seen = None

    def _begin(self, before: Experience | None) -> None:
        """Decide by the costs of as many slots as there are."""
        self._size = self._num_slots()
        costs = batch_costs(self._costs, max(1, self._size))
        begin = self._batches.get(self._size)
        if begin is None:
            begin = Experience([1, *costs.verify], before)
            begin.begin_batch(max(1, self._size))
        self._policy = AdaptivePolicy(costs, begin, max_length=self._max_length)
        self._batches[self._size] = self._policy.experience
        self._timed: TextPolicy | None = None

    def _decide(self, text: TextPolicy) -> None:
        if self._size != self._num_slots():
            self._begin(self._policy.conclude())
        self._timed = text
        self._plan = self._policy.choose(None)
        self.num_steps += 1


class TextPolicy:
    """A `DraftPolicy` of one text, which does what is decided for all.

    Attributes:
        num_steps: Decisions so far that the text has followed.
        seen: Drafts of its step; None without any.
        awaited: Drafts that more of the text may prove right or wrong.
    """

    def __init__(self, joint: JointPolicy):
        self._joint = joint
        self.num_steps = joint.num_steps
        self.seen: SeenDrafts | None = None
        self.awaited = AwaitedDrafts()

    def choose(self, outlook: Sequence[float] | None) -> DraftPlan | None:
        """See `DraftPolicy.choose`."""
        return self._joint.choose(self)

    def keep(self, plan: DraftPlan, tree: TokenTree) -> TokenTree:
        """See `DraftPolicy.keep`."""
        return self._joint.keep(self, plan, tree)

    def observe(self, step: Step) -> None:
        """See `DraftPolicy.observe`."""
        self._joint.observe(self, step)
