"""Exploration: steps that show what the best choice does not, paid from a budget.

- shadow drafts, which are drawn next to a plain step, scored and not verified;
- larger drafts, one length longer or one width wider, of which as many are verified;
- a switch: plain steps while drafting, or drafted steps while decoding plainly.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from mlx_redrafter.policy.plans import COUNTS, PLACES, PLANS, Choice, Floats
from mlx_redrafter.policy.step_times import CurrentCosts

# Share by which drafting must seem faster than plain decoding: both are estimates.
MARGIN = 0.03
# Number of steps of a switch: a plain step is timed if plain ones come before and after it.
SWITCH = 3
# Share of the time for exploring, half for drafts and half for switches.
EXPLORE = 0.01
# Share of the time for learning on the host; the cost of one plain step is lent.
LEARNING = 0.03


@dataclass
class Budget:
    """Seconds that are saved for exploration, and for learning on the host.

    Attributes:
        drafts: Seconds for shadow drafts and larger ones.
        switches: Seconds for switches.
        learning: Seconds for learning.
        num_larger: Number of times that larger drafts were paid for.
    """

    drafts: float = 0.0
    switches: float = 0.0
    learning: float = 0.0
    num_larger: int = 0

    def save(self, seconds: float, most: float) -> None:
        """Save shares of a step's cost, up to ``most`` seconds for each purpose."""
        self.drafts = min(most, self.drafts + EXPLORE / 2 * seconds)
        self.switches = min(most, self.switches + EXPLORE / 2 * seconds)
        self.learning = min(most, self.learning + LEARNING * seconds)

    def pay_drafts(self, seconds: float, is_larger: bool) -> bool:
        """Pay for shadow drafts, or larger ones, if there is enough; return whether there was."""
        if self.drafts < seconds:
            return False
        self.drafts -= seconds
        self.num_larger += is_larger
        return True

    def pay_switch(self, seconds: float) -> bool:
        """Spend all that is saved for switches if that is enough; return whether it was.

        Nothing is kept: a switch that gains would pay for the next one.
        """
        if self.switches < seconds:
            return False
        self.switches = 0.0
        return True

    def pay_learning(self, seconds: float) -> None:
        """Pay for the host's time."""
        self.learning -= seconds


class Explorer:
    """Chooses in every step between the best choice and exploration.

    Args:
        costs: Current costs of steps.
        budget: Time that may be spent.
    """

    def __init__(self, costs: CurrentCosts, budget: Budget):
        self._costs = costs
        self._budget = budget
        self._best = Choice()
        # Shadow or larger drafts, a step of a switch, and the cost of either in seconds.
        self._further, self._further_cost = Choice(), math.inf
        self._untried, self._switch_cost = Choice(), math.inf
        # The steps of a switch that are left, all alike.
        self._switch: list[Choice] = []

    def prepare(self, best: Choice, drafted: Choice, fixed: Choice, all_tokens: Floats) -> None:
        """Find what explores next to the best choice.

        Args:
            best: The best choice.
            drafted: The best one with drafts.
            fixed: The best one with drafts and a fixed number of nodes.
            all_tokens: Expected tokens of every plan, shape (W, L, 1 + S).
        """
        costs, self._best = self._costs, best
        if best.plan is None:
            assert drafted.plan is not None
            self._further = Choice(replace(drafted.plan, num_nodes=1), 1)
            w, n = PLACES[drafted.plan.shape]
            self._further_cost = float(costs.step[w, n, 0]) - costs.plain
            self._untried, loss = fixed, fixed.seconds - fixed.tokens * costs.plain
        else:
            self._further, self._further_cost = self._larger(best, all_tokens)
            self._untried, loss = Choice(), costs.plain - 1 / best.rate
        # An expected gain may be wrong, so each step of a switch costs something.
        self._switch_cost = SWITCH * max(loss, 3 * MARGIN * costs.plain)

    def choose(self, allows_drafts: bool) -> Choice:
        """Return the best choice, or now and then one that shows more.

        Args:
            allows_drafts: Whether the guard allows drafts.
        """
        if allows_drafts and not self._switch and self._budget.pay_switch(self._switch_cost):
            self._switch = SWITCH * [self._untried]
        if self._switch and (allows_drafts or self._switch[-1].plan is None):
            return self._switch.pop()
        is_larger = self._best.plan is not None
        if is_larger and not allows_drafts:
            return Choice()
        return (
            self._further if self._budget.pay_drafts(self._further_cost, is_larger) else self._best
        )

    def begin_plain(self) -> None:
        """Begin with plain steps if drafting seems best, so that the guard knows their cost."""
        if self._best.plan is not None:
            self._switch = SWITCH * [Choice()]

    def stop_switch(self) -> None:
        """Give up the switch that is under way, if there is one."""
        self._switch = []

    def _larger(self, best: Choice, all_tokens: Floats) -> tuple[Choice, float]:
        """Return the best choice with longer and wider drafts in turns, and its further cost."""
        assert best.plan is not None
        (w, n), costs = PLACES[best.plan.shape], self._costs
        wider = (w, n + 1), (w + 1, n)
        further = [place for place in wider if place in PLANS and costs.offered[place]]
        if not further:
            return best, math.inf
        place = further[self._budget.num_larger % len(further)]
        cost = costs.step[place][0] - costs.step[w, n, 0]
        if best.num_nodes is not None:  # what its first nodes are expected to yield less
            size = *place, COUNTS.index(best.num_nodes - 1)
            cost = max(cost, costs.step[size] - all_tokens[size] / best.rate)
        return best._replace(plan=PLANS[place]), float(cost)
