"""Seconds that may go into finding out what other plans would give, a share of all time."""

from __future__ import annotations

from mlx_redrafter.policy.candidates import PLACES, SIZES
from mlx_redrafter.policy.lessons import Taken
from mlx_redrafter.policy.prices import Prices

# Share of the time, and seconds at first, in plain steps.
EXPLORE, EXPLORE_AT_FIRST = 0.018, 0.3
# Share of that for looking at drafts where none are verified. The rest is for trials, which take so
# much that looking must not wait until there is enough for one.
LOOKING = 0.5


class Credits:
    """Seconds to explore with.

    Args:
        looking: Seconds at first.

    Attributes:
        looking: Seconds for drafts that are only looked at, or wider than those in use.
        trials: Seconds for verifying drafts where plain decoding seems faster.
    """

    def __init__(self, looking: float):
        self.looking = looking
        self.trials = 0.0

    def take(self, taken: Taken, prices: Prices, hope: float, is_drafting: bool) -> None:
        """Add the share of steps' time, and charge a trial what it lost.

        Args:
            taken: The steps.
            prices: Seconds that steps take.
            hope: Part of the share that is used.
            is_drafting: Whether drafts are in use: then all of it is for looking.
        """
        step, plan = taken.step, taken.step.plan
        share = EXPLORE * hope * taken.num_steps * (step.seconds or prices.plain)
        looking = 1.0 if is_drafting else LOOKING
        self.looking += looking * share
        self.trials += (1 - looking) * share
        if plan is not None and not (is_drafting or plan.from_text or step.num_nodes == 1):
            seconds = prices.step[(*PLACES[plan.shape], SIZES.index(step.num_nodes))]
            self.trials -= seconds - len(step.tokens) * prices.plain

    def pay(self, seconds: float) -> bool:
        """Take seconds from those for looking, if there are so many."""
        if self.looking < seconds:
            return False
        self.looking -= seconds
        return True
