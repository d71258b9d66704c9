"""Current costs of steps, and what drafting has lost to plain decoding.

Axes: W widths, L lengths, S sizes.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from statistics import median_low
from typing import Any

import numpy as np

from mlx_redrafter.draft_plan import DraftPlan
from mlx_redrafter.policy.plans import (
    COUNTS,
    FITS,
    LENGTHS,
    PLACES,
    PLANS,
    SIZES,
    Floats,
    StepCosts,
    checked,
)

# Variance, from one step to the next, of what slows all steps; one step's noise has variance 1.
CHANGE = 0.25
# Variance of what slows one kind of step alone, before its first one.
OWN = 0.5
# Number of steps of a kind after which that variance falls no further, as costs change.
KNOWN = 24
# Maximum number of plain steps that each budget saves, and that drafting saves of its gains.
SPARE = 8.0
# Number of plain steps that drafting may lose before it has gained any.
TRUST = 3.0
# Share of all tokens, in plain steps, that drafting may lose besides; with less, bad luck stops
# drafting that pays a little.
LOSS = 0.05

# Kind of step with shadow drafts; other kinds, except the next one, are numbers of nodes.
SHADOW = 0
# Kind of step of a prompt lookup of which nothing is verified.
EMPTY = -1
_NEVER = 1e9  # seconds of a plan that is not offered


class TimeRatios:
    """Ratio of measured to stored step costs, by kind of step.

    Its logarithm is a part common to all kinds, such as a hot chip, other work or a long context,
    plus one of the kind's own. A filter with two gains divides a surprise by their variances. One
    slow step changes nothing: each ratio is cut to between the estimate and the one before.
    """

    def __init__(self) -> None:
        self._common = 0.0
        # Logarithm and variance by kind.
        self._own: dict[int, tuple[float, float]] = {}
        self._newest: dict[int, float] = {}

    def of(self, kind: int) -> float:
        """Return the ratio of a kind: a number of nodes (1: plain), or SHADOW."""
        return math.exp(self._common + self._own.get(kind, (0.0, 0.0))[0])

    @property
    def are_low(self) -> bool:
        """Whether some kind of step, after many of them, costs far less than was timed."""
        known = (kind for kind, (_, variance) in self._own.items() if variance < 2 / KNOWN)
        return any(self.of(kind) < 0.75 for kind in known)

    def fade(self) -> None:
        """Forget half of the common part, as the rest may be the length of the sequence."""
        self._common /= 2
        self._newest.clear()

    def learn(self, kind: int, ratio: float) -> None:
        """Learn from one step."""
        own, variance = self._own.get(kind, (0.0, OWN))
        known, ratio = self._common + own, math.log(max(ratio, 1e-3))
        last, self._newest[kind] = self._newest.get(kind, min(known, ratio)), ratio
        surprise = max(min(last, known), min(ratio, max(last, known))) - known
        total = 1 + CHANGE + variance
        self._common += surprise * CHANGE / total
        variance, own = variance - variance**2 / total, own + surprise * variance / total
        self._own[kind] = own, max(1 / KNOWN, variance)

    def stored(self) -> dict[str, Any]:
        """Return what each kind has of its own, for a file; costs that will be timed again lack."""
        return {} if self.are_low else {str(kind): one for kind, one in self._own.copy().items()}

    @classmethod
    def restored(cls, stored: Mapping[str, Any]) -> TimeRatios:
        """Begin with the numbers of a file, at twice their variance.

        Raises:
            ValueError: They are damaged.
        """
        found = cls()
        for kind, one in stored.items():
            own, variance = checked(one, (2,), -7.0, 7.0).tolist()
            if int(kind) not in (SHADOW, EMPTY, 1, *SIZES) or not 0 < variance <= OWN:
                raise ValueError(f"{kind} with variance {variance}")
            found._own[int(kind)] = own, min(OWN, 2 * variance)
        return found


class CurrentCosts:
    """Seconds that steps cost at present, by plan.

    Args:
        costs: Seconds as timed beforehand.
        max_length: Longest beams that the proposer can draft; None if it has no bound.

    Attributes:
        offered: Whether the proposer can draft a plan, bool, shape (W, L).
        plain: A plain step.
        verify: Verifying, by entry of COUNTS; at least a plain step.
        step: Drafting and verifying, shape (W, L, 1 + S); without end if the plan has fewer drafts.
        waiting: The same if the host waits for the drafts.
    """

    def __init__(self, costs: StepCosts, max_length: int | None = None):
        self._costs = costs
        short = np.array(LENGTHS)[:, None] <= (max_length or LENGTHS[-1])
        fits = FITS & short & bool(costs.level)
        self._unfit = np.where(fits, 0.0, _NEVER)
        self.offered = fits[..., 1]
        self._drafting: Floats = np.zeros(FITS.shape[:2])
        for place, plan in PLANS.items() if costs.level else ():
            self._drafting[place] = costs.drafting(plan.shape)
        padded = map(costs.cheapest_size, SIZES)
        verify = costs.plain, *(costs.verify.get(size, _NEVER) for size in padded)
        self._verify = np.array(verify)
        self.update(TimeRatios())

    def update(self, ratios: TimeRatios) -> None:
        """Take over the newest ratios."""
        slowed = np.array([ratios.of(kind) for kind in (SHADOW, *SIZES)])
        self.plain: float = self._costs.plain * ratios.of(1)
        verify = np.maximum(self._verify * slowed, self.plain)
        self.verify: list[float] = verify.tolist()
        self.step: Floats = self._drafting[..., None] * slowed + self._unfit + verify
        self.waiting: Floats = self.step + self._costs.wait

    def timed(self, plan: DraftPlan | None, num_nodes: int, waits: bool) -> float:
        """Return the seconds of a step as timed beforehand."""
        if plan is None:
            return self._costs.plain
        drafting = 0.0 if plan.from_text else float(self._drafting[PLACES[plan.shape]])
        return (
            drafting + float(self._verify[COUNTS.index(num_nodes - 1)]) + waits * self._costs.wait
        )


class Guard:
    """Measured cost of drafted steps, next to plain decoding of the same tokens.

    It estimates nothing, so no wrong estimate makes drafting lose more than it has gained before,
    TRUST plain steps, LOSS of the tokens, and the cost of one step.

    Args:
        plain: Seconds of a plain step as timed. Half of it counts as the first measurement: other
            work may have disturbed the timing, and if drafting is not twice as fast, the guard will
            soon have plain steps measured.

    Attributes:
        plain: Seconds of a plain step: the median of the newest five, the lower one of two.
    """

    def __init__(self, plain: float):
        self.plain = plain / 2
        self._newest = [self.plain]
        # Seconds of drafted steps, and the plain steps that may cost as much.
        self._seconds = self._steps = 0.0

    def fade(self) -> None:
        """Begin the next sequence, for which half of the losses and gains count.

        After one step of a thousand plain ones, such as one that has waited for a kernel to be
        compiled, some seven sequences are decoded plainly.
        """
        self._seconds, self._steps = self._seconds / 2, self._steps / 2
        self._newest = self._newest[-2:]

    def learn_plain(self, seconds: float) -> None:
        """Learn the cost of a plain step between plain ones."""
        self._newest = [*self._newest[-4:], seconds]
        self.plain = median_low(self._newest)

    def learn_drafted(self, seconds: float, num_tokens: float) -> None:
        """Count a step for which drafts were drawn, and its tokens."""
        self._seconds, self._steps = self._seconds + seconds, self._steps + num_tokens
        if self._lost < -SPARE:
            self._seconds, self._steps = 0.0, SPARE

    def count(self, num_tokens: float) -> None:
        """Count tokens of any step, of which drafting may lose a share."""
        if self._lost > 0:
            self._steps += LOSS * num_tokens

    def stored(self) -> dict[str, Any]:
        """Return the newest plain steps in seconds, and the lost ones, for a file."""
        return {"plain": self._newest[-2:], "lost": max(-SPARE, min(self._lost, TRUST))}

    @classmethod
    def restored(cls, stored: Mapping[str, Any]) -> Guard:
        """Begin with the numbers of a file: some trust is left, whatever has been lost.

        Raises:
            ValueError: They are damaged.
        """
        num_newest = min(2, max(1, len(stored["plain"])))
        newest = checked(stored["plain"], (num_newest,), 1e-9, 3600.0).tolist()
        found = cls(newest[-1])
        found._newest, found.plain = newest, median_low(newest)
        found._steps = -float(checked(stored["lost"], (), -SPARE, TRUST)) / 2
        return found

    @property
    def allows_drafts(self) -> bool:
        """Whether drafting has lost no more than it may lose."""
        return self._lost <= TRUST

    @property
    def _lost(self) -> float:
        """Plain steps that drafting has lost; negative if it has gained."""
        return self._seconds / self.plain - self._steps
