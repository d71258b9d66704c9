"""How much slower steps are at present than they were when they were timed, by number of nodes."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

# Variances relative to that of one step's time: of what slows all steps down, which changes, and
# of what a size takes beyond that, 1 / n after n steps: `TIMED` of them are the times measured
# beforehand, and it is never better known than after `MOST_KNOWN`.
CHANGE = 0.25
TIMED, MOST_KNOWN = 2, 24
# The same where times were calculated, which may be wrong by far, and all in the same way.
CHANGE_IF_CALCULATED, CALCULATED = 0.02, 0.25
# A clock may read twice the same, but no step takes less of its time.
LEAST_RATIO = 1e-3
# Steps of a size that show that it takes less than was timed, and at most which share.
SHOWN, TOO_LONG = 16, 0.75
# Steps of other sizes after which half of a size's own slowdown is forgotten.
FORGET_AFTER = 32


class Slowdowns:
    """Ratio of present step times to those known beforehand, by number of nodes.

    Two things are told apart, by a Kalman filter on their logarithms. A hot chip, other work or a
    longer context slow all steps down, from one passage to the next. What a size takes beyond that
    is the machine's, or an error of its timing: the better it is known, the less of a surprise is
    put down to it. That of the sizes in use is interpolated, by nodes, for the others. At both
    ends, sizes never used are assumed to be slowed down by no more than was timed, and as little as
    any that was used: this optimism makes the policy try them, which measures them. Where times
    were not measured but calculated, those of trees err alike: sizes never used are slowed down as
    the nearest that was.

    Args:
        sizes: Numbers of nodes, ascending, 1 for plain decoding.
        before: Slowdowns of the text before, of the same sizes. Half of what slows all down is
            believed, as the rest may be that text's length.
        are_calculated: Whether the times beforehand were calculated.
    """

    def __init__(
        self,
        sizes: Sequence[int],
        before: Slowdowns | None = None,
        are_calculated: bool = False,
    ):
        self._sizes = list(sizes)
        self._are_calculated: bool = (
            before._are_calculated if before is not None else are_calculated
        )
        self._common = 1.0
        self._own: dict[int, float] = {}
        self._timed = CALCULATED if self._are_calculated else TIMED
        self._change = CHANGE_IF_CALCULATED if self._are_calculated else CHANGE
        self._counts: dict[int, float] = dict.fromkeys(self._sizes, self._timed)
        self._unused: dict[int, int] = {}
        # Ratio of the newest step of each size.
        self._newest: dict[int, float] = {}
        if before is not None:
            self._common = (1 + before._common) / 2
            self._own, self._counts = dict(before._own), dict(before._counts)
            self._unused = dict.fromkeys(before._unused, 0)
        # Interpolated when they are asked for: most steps are of sizes in use.
        self._factors: list[float] | None = None

    @property
    def factors(self) -> list[float]:
        """Slowdown by size, in the order of the sizes."""
        if self._factors is None:
            self._factors = self._interpolate()
        return self._factors

    def of(self, num_nodes: int) -> float:
        """The slowdown of one size."""
        if num_nodes in self._own:
            return self._common * self._own[num_nodes]
        return self.factors[self._sizes.index(num_nodes)]

    @property
    def show_long_times(self) -> bool:
        """Whether a size takes far less than was timed: something disturbed that timing."""
        return any(
            self._counts[size] >= min(SHOWN + TIMED, MOST_KNOWN) and self.of(size) < TOO_LONG
            for size in self._own
        )

    def learn(self, num_nodes: int, ratio: float, num_steps: int = 1) -> None:
        """Take in a step, or the typical one of several, as ``ratio`` of what was timed."""
        if num_nodes > 1:
            self._forget_unused()
        self._unused[num_nodes] = 0
        known = self.of(num_nodes)
        # The median: a single step may have waited, two in a row have not. The first one of a size
        # that was never timed is all there is.
        before = self._newest.get(num_nodes, ratio if self._are_calculated else known)
        self._newest[num_nodes] = ratio
        if num_steps == 1:
            ratio = max(min(before, known), min(ratio, max(before, known)))
        ratio, count = max(LEAST_RATIO, ratio), self._counts[num_nodes]
        own, surprise = known / self._common, ratio / known
        spread = 1 / num_steps + self._change + 1 / count
        self._common *= surprise ** (self._change / spread)
        self._own[num_nodes] = own * surprise ** (1 / count / spread)
        self._counts[num_nodes] = min(count + num_steps, MOST_KNOWN)
        self._factors = None

    def _interpolate(self) -> list[float]:
        used = sorted((self._ends | self._own).items())
        factors = [self._common * used[0][1]]
        # Not by NumPy, which takes longer for so few.
        for (low, start), (high, end) in pairwise(used):
            slope = (end - start) / (high - low)
            between = (size - low for size in self._sizes if low < size <= high)
            factors.extend(self._common * (start + slope * nodes) for nodes in between)
        return factors

    @property
    def _ends(self) -> dict[int, float]:
        """Slowdowns of the first and last sizes unless they were used, beyond the common one."""
        plain, last = self._sizes[0], self._sizes[-1]
        trees = sorted(self._own.keys() - {plain})
        if self._are_calculated and trees:
            smallest = {self._sizes[1]: self._own[trees[0]]}
            return {plain: self._least, last: self._own[trees[-1]], **smallest}
        return {plain: self._least, last: self._least}

    @property
    def _least(self) -> float:
        """The least slowdown of any size that was measured, beyond what slows all of them down."""
        return min(1.0, *self._own.values()) if self._own else 1.0

    def _forget_unused(self) -> None:
        self._unused = {size: steps + 1 for size, steps in self._unused.items()}
        for size in [size for size, steps in self._unused.items() if steps > FORGET_AFTER]:
            self._own[size] = (self._least + self._own[size]) / 2
            self._unused[size] = 0
            self._counts[size] = self._timed
            self._newest.pop(size, None)
