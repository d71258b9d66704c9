"""Draft plans that the adaptive policy chooses from, fixed plans, and what their steps cost.

Axes: W widths, L lengths, S sizes, N nodes verified.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from copy import copy
from dataclasses import dataclass, field
from statistics import median_low
from typing import Any, ClassVar, NamedTuple

import numpy as np
import numpy.typing as npt

from mlx_redrafter.decoding.protocols import Step
from mlx_redrafter.draft_plan import DraftPlan, DraftShape
from mlx_redrafter.trees.tree import TokenTree

Floats = npt.NDArray[np.float64]

# Beam widths: a chain and a narrow tree, whose search scores four children of every beam.
WIDTHS = (1, 2)
# Beam lengths in tokens, root included; lengths in between are about as fast as both neighbours.
LENGTHS = (2, 3, 4, 5, 6, 8, 10)
# Numbers of nodes to verify, root included; the steps that are timed on the machine.
SIZES = (2, 3, 4, 5, 6, 8, 12, 16, 24, 32)

# Plans with all drafts that their search scores, by place in WIDTHS and LENGTHS.
PLANS = {
    (w, n): DraftPlan(shape := DraftShape(width, length), shape.max_nodes)
    for w, width in enumerate(WIDTHS)
    for n, length in enumerate(LENGTHS)
}
PLACES = {plan.shape: place for place, plan in PLANS.items()}
SHORTEST, WIDEST = PLANS[0, 0], PLANS[len(WIDTHS) - 1, 0]
# Prompt lookup costs no draft time, so it may draft many tokens.
LOOKUP = DraftPlan(DraftShape(4, 16), SIZES[-1], from_text=True)
# Number of drafts that a step verifies: none, or one less than the nodes of each size.
COUNTS = (0, *(size - 1 for size in SIZES))
# Whether a plan has as many drafts as each of COUNTS, shape (W, L, 1 + S).
FITS = np.reshape(
    [[count < plan.num_nodes for count in COUNTS] for plan in PLANS.values()],
    (len(WIDTHS), len(LENGTHS), len(COUNTS)),
)
# Minimum share of the cost that padding must save, above the noise of timing.
MIN_GAIN = 0.05
# Variance, from one step to the next, of what slows all steps; one step's noise has variance 1.
CHANGE = 0.25
# The same before the first step if costs were not timed but estimated from those of other steps.
ESTIMATED = 4.0
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

# Tokens of drafted steps that count in the evenness of a batch.
WINDOW = 256.0
# Tokens that count before its first one.
ALIKE = 16.0
# Share of the slowest text in the mean tokens of lookups, before a batch has used any.
UNEVEN = 0.6

# Kind of step with shadow drafts; other kinds, except the next one, are numbers of nodes.
SHADOW = 0
# Kind of step whose drafts the host has read, and of which nothing is verified: unlike a plain
# step, it does not overlap with the host's work.
EMPTY = -1
_NEVER = 1e9  # seconds of a plan that is not offered


def checked(
    values: Any, shape: tuple[int, ...], least: float | Floats, most: float | Floats
) -> Floats:
    """Return a file's numbers; raise ValueError for another shape or numbers out of range."""
    found = np.array(values, dtype=np.float64)
    if found.shape != shape or not ((found >= least) & (found <= most)).all():
        raise ValueError(f"expected numbers between {least} and {most} of shape {shape}")
    return found


@dataclass(frozen=True)
class StepCosts:
    """Seconds of a step by its parts; those of drafting are by width, none for prompt lookup."""

    plain: float  # a step of plain decoding
    verify: Mapping[int, float]  # a step that verifies N nodes and drafts nothing, by N
    first: Mapping[int, float] = field(default_factory=dict)  # drafting without its levels
    level: Mapping[int, float] = field(default_factory=dict)  # each level of drafts
    wait: float = 0.0  # additional, if the host reads the drafts before the target verifies them

    def cheapest_size(self, num_nodes: int) -> int:
        """Return the number of nodes, at least ``num_nodes``, with the lowest cost.

        Kernels switch with the number of rows: 16 nodes may cost less than 12.
        """
        sizes = sorted(size for size in self.verify if size >= num_nodes)
        if not sizes:
            return num_nodes
        best = min(sizes, key=self.verify.__getitem__)
        is_clear = self.verify[best] < (1 - MIN_GAIN) * self.verify[sizes[0]]
        return best if is_clear else num_nodes

    def drafting(self, shape: DraftShape) -> float:
        """Return the seconds of a search; widths in between are interpolated."""
        widths = list(self.level)
        first = np.interp(shape.width, widths, list(self.first.values()))
        level = np.interp(shape.width, widths, list(self.level.values()))
        return max(0.0, float(first + shape.levels * level))


class Choice(NamedTuple):
    """Choice for one step, and what is expected of it."""

    plan: DraftPlan | None = None  # of the drafts; None for plain decoding
    num_nodes: int | None = None  # to verify; None to choose it by the drafts' probabilities
    tokens: float = 1.0  # expected, the target's own one included
    seconds: float = 1.0  # expected cost
    waits: bool = False  # whether the host waited for the drafts

    @property
    def rate(self) -> float:
        """Tokens per second."""
        return self.tokens / self.seconds


@dataclass(frozen=True)
class FixedPolicy:
    """A `DraftPolicy` with one plan, None for plain decoding; the costs, if any, pad its trees."""

    plan: DraftPlan | None
    costs: StepCosts | None = None
    reads_drafts: ClassVar[bool] = False
    least_chance: ClassVar[float] = 0.0

    def choose(self, matches: Sequence[float] | None) -> DraftPlan | None:
        has_nothing = matches is not None and len(matches) == 0
        return None if has_nothing else self.plan

    def select(self, plan: DraftPlan, tree: TokenTree) -> TokenTree:
        """Keep all nodes, with padding if a larger size costs less."""
        return tree if self.costs is None else tree.padded(self.costs.cheapest_size(tree.size))

    select_early = select

    def observe(self, step: Step) -> None:
        """Do nothing."""


class TimeRatios:
    """Ratio of measured to stored step costs, by kind of step.

    Its logarithm is a part common to all kinds, such as a hot chip, other work or a long context,
    plus one of the kind's own. A filter with two gains divides a surprise by their variances. One
    slow step changes nothing: each ratio is cut to between the estimate and the one before.

    ``change`` is the variance of the common part before the first step.
    """

    def __init__(self, change: float = CHANGE) -> None:
        self._common = 0.0
        self._change = change
        # Logarithm and variance by kind.
        self._own: dict[int, tuple[float, float]] = {}
        self._newest: dict[int, float] = {}

    def __deepcopy__(self, memo: dict[int, Any]) -> TimeRatios:
        """Copy in a way that another thread, whose batch learns meanwhile, cannot disturb."""
        found = copy(self)
        found._own, found._newest = self._own.copy(), self._newest.copy()
        return found

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
        own, variance = self._own.get(kind, (0.0, OWN))
        known, ratio = self._common + own, math.log(max(ratio, 1e-3))
        last, self._newest[kind] = self._newest.get(kind, min(known, ratio)), ratio
        surprise = max(min(last, known), min(ratio, max(last, known))) - known
        change = self._change
        total = 1 + change + variance
        self._common += surprise * change / total
        if surprise:  # else this step was cut, and tells nothing yet
            self._change = max(CHANGE, change - change**2 / total)
        variance, own = variance - variance**2 / total, own + surprise * variance / total
        self._own[kind] = own, max(1 / KNOWN, variance)

    def stored(self) -> dict[str, Any]:
        """Return what each kind has of its own, for a file; costs that will be timed again lack."""
        return {} if self.are_low else {str(kind): one for kind, one in self._own.copy().items()}

    @classmethod
    def restored(cls, stored: Mapping[str, Any]) -> TimeRatios:
        """Begin with a file's numbers at twice their variance; ValueError if they are damaged."""
        found = cls()
        for kind, one in stored.items():
            own, variance = checked(one, (2,), -7.0, 7.0).tolist()
            if int(kind) not in (SHADOW, EMPTY, 1, *SIZES) or not 0 < variance <= OWN:
                raise ValueError(f"{kind} with variance {variance}")
            found._own[int(kind)] = own, min(OWN, 2 * variance)
        return found


class Evenness:
    """Shares of the mean tokens of a batch that its slowest sequence has in steps with drafts.

    A batch ends with its slowest sequence, and no drafts of others may slow that. Lookups are less
    even than networks: some texts repeat themselves, and some do not.

    ``shares`` are those of networks and of lookups before the first step.
    """

    def __init__(self, shares: Sequence[float] = (1.0, 1.0)) -> None:
        # Tokens of the slowest sequence, and the mean.
        self._least, self._mean = [ALIKE * one for one in shares], [ALIKE, ALIKE]

    @property
    def shares(self) -> list[float]:
        return [self.share(from_text) for from_text in (False, True)]

    def share(self, from_text: bool) -> float:
        return min(1.0, self._least[from_text] / self._mean[from_text])

    def learn(self, from_text: bool, least: float, mean: float) -> None:
        """Count the tokens of a step; the newest ones count for most."""
        kept = max(0.0, 1 - mean / WINDOW)
        self._least[from_text] = kept * self._least[from_text] + least
        self._mean[from_text] = kept * self._mean[from_text] + mean


class CurrentCosts:
    """Seconds that steps cost at present, by plan, from ``costs`` as timed beforehand.

    Those of a network's drafts are for as many tokens as the slowest sequence of a batch has.

    Attributes:
        offered: Whether the proposer can draft a plan, bool, shape (W, L).
        plain: A plain step.
        verify: Verifying drafts that the host has read, by entry of COUNTS; at least a plain step.
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
        self._verify = np.array([costs.plain, *(costs.verify.get(n, _NEVER) for n in padded)])
        self.update(TimeRatios())

    def update(self, ratios: TimeRatios, share: float = 1.0) -> None:
        """Take over the newest ratios, and the share of `Evenness` of a network."""
        slowed = np.array([ratios.of(kind) for kind in (EMPTY, *SIZES)])
        uneven = np.array([1.0, *(1 / share for _ in SIZES)])
        self.plain: float = self._costs.plain * ratios.of(1)
        verify = np.maximum(self._verify * slowed, self.plain)
        self.verify: list[float] = verify.tolist()
        self.step: Floats = (self._drafting[..., None] * slowed + verify) * uneven + self._unfit
        self.waiting: Floats = self.step + self._costs.wait
        # Without nodes to verify, a step whose drafts nobody waits for has shadow drafts.
        shadow = ratios.of(SHADOW)
        plain = max(self._costs.plain * shadow, self.plain)
        self.step[..., 0] = self._drafting * shadow + plain + self._unfit[..., 0]

    def timed(self, plan: DraftPlan | None, num_nodes: int, waits: bool) -> float:
        """Return the seconds of a step as timed beforehand."""
        if plan is None:
            return self._costs.plain
        drafting = 0.0 if plan.from_text else float(self._drafting[PLACES[plan.shape]])
        verify = float(self._verify[COUNTS.index(num_nodes - 1)])
        return drafting + verify + waits * self._costs.wait


class Guard:
    """Measured cost of drafted steps, next to plain decoding of the same tokens.

    It estimates nothing, so no wrong estimate makes drafting lose more than it has gained before,
    TRUST plain steps, LOSS of the tokens, and the cost of one step. ``plain`` is the seconds of a
    plain step: the median of the newest five, the lower one of two. Half of the timed cost counts
    as the first measurement: other work may have disturbed the timing, and if drafting is not twice
    as fast, the guard will soon have plain steps measured.
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

    def take_over(self, before: Guard) -> None:
        """Go on with what drafting has lost or gained in steps of another cost."""
        self._seconds, self._steps = 0.0, -before._lost

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
        """Begin with a file's numbers and some trust, whatever was lost; ValueError if damaged."""
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
