"""How much slower steps are at present than they were when they were timed, by number of nodes."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

# Window of the running mean of a slowdown, in steps.
MEMORY = 6
# Weight of the time measured beforehand, in steps.
TIMED = 2
# Steps of other sizes after which half of a slowdown is forgotten.
FORGET_AFTER = 32


class Slowdowns:
    """Ratio of present step times to those timed beforehand, by number of nodes.

    A longer context, a hot chip or other work slows steps down, larger trees by more or by less,
    whatever their shape. The slowdown of the sizes in use is interpolated, by nodes, for the
    others. At both ends, sizes never used are assumed to be slowed down as little as any that was:
    this optimism makes the policy try them, which measures them. The slowdown of a size comes half
    as near to that, again and again, when other sizes are used instead, as other work on the
    machine may have been the reason.

    Args:
        sizes: Numbers of nodes, ascending, 1 for plain decoding.
        before: Slowdowns of the text before, of the same sizes. Half of each is believed, as the
            rest may be that text's length.

    Attributes:
        factors: Slowdown by size, in the order of ``sizes``.
    """

    def __init__(self, sizes: Sequence[int], before: Slowdowns | None = None):
        self._sizes = list(sizes)
        self._used: dict[int, float] = {}
        self._counts = dict.fromkeys(self._sizes, TIMED)
        self._unused: dict[int, int] = {}
        # Ratio of the newest step of each size.
        self._newest: dict[int, float] = {}
        if before is not None:
            self._used = {size: (1 + known) / 2 for size, known in before._used.items()}
            self._unused = dict.fromkeys(before._unused, 0)
        self.factors: npt.NDArray[np.float64] = self._interpolate()

    def of(self, num_nodes: int) -> float:
        """The slowdown of one size."""
        return float(self.factors[self._sizes.index(num_nodes)])

    def learn(self, num_nodes: int, ratio: float) -> None:
        """Take in a step that took ``ratio`` times as long as was timed."""
        if num_nodes > 1:
            self._forget_unused()
        self._unused[num_nodes] = 0
        known = self.of(num_nodes)
        # The median: a single step may have waited, two in a row have not.
        before = self._newest.get(num_nodes, known)
        self._newest[num_nodes] = ratio
        ratio = sorted((ratio, before, known))[1]
        self._counts[num_nodes] = min(self._counts[num_nodes] + 1, MEMORY)
        self._used[num_nodes] = known + (ratio - known) / self._counts[num_nodes]
        self.factors = self._interpolate()

    def _interpolate(self) -> npt.NDArray[np.float64]:
        least = self._least
        ends = {self._sizes[0]: least, self._sizes[-1]: least}
        used, slowdowns = zip(*sorted((ends | self._used).items()), strict=True)
        factors: npt.NDArray[np.float64] = np.interp(self._sizes, used, slowdowns)
        return factors

    @property
    def _least(self) -> float:
        """The least slowdown of any size that was measured; 1 until there are two.

        One alone may have been timed wrongly.
        """
        return min(self._used.values()) if len(self._used) > 1 else 1.0

    def _forget_unused(self) -> None:
        self._unused = {size: steps + 1 for size, steps in self._unused.items()}
        for size in [size for size, steps in self._unused.items() if steps > FORGET_AFTER]:
            self._used[size] = (self._least + self._used[size]) / 2
            self._unused[size] = 0
            self._counts[size] = TIMED
            self._newest.pop(size, None)
