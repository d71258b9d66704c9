"""What steps take at present.

Axes: W widths on offer, L lengths, S numbers of nodes.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import accumulate

import numpy as np
import numpy.typing as npt

from mlx_redrafter.policy.candidates import FITS, SHAPES, SIZES, best_first
from mlx_redrafter.policy.slowdowns import Slowdowns
from mlx_redrafter.policy.step_costs import StepCosts

Floats = npt.NDArray[np.float64]


class Prices:
    """Seconds of steps and of their parts, as timed beforehand until they are updated.

    Args:
        costs: Seconds as timed beforehand.
        fits: Whether a shape is on offer with so many nodes, bool, shape (W, L, S).

    Attributes:
        timed_drafting: Drafting, as timed beforehand, shape (W, L).
        plain: A step without drafts.
        drafting: Drafting, shape (W, L).
        verify: Verifying, by size, infinite for those that were not timed.
        step: Both, infinite where the size does not fit, shape (W, L, S).
        looking: Steps that look at the drafts first, and verify none of them or so many, shape
            (W, L, 1 + S).
        fewest: Steps that look at the drafts first, and verify the fewest of them, for shapes that
            do not fit as well, shape (W, L).
    """

    def __init__(self, costs: StepCosts, fits: npt.NDArray[np.bool_]):
        self._costs = costs
        # Infinite for numbers of nodes, after none verified, that do not fit; shape (W, L, 1 + S).
        self._unfit = np.where(np.insert(fits, 0, True, axis=-1), 0.0, np.inf)
        self.timed_drafting: Floats = np.zeros(FITS.shape[:2])
        for place, shape in SHAPES.items() if costs.level else ():
            self.timed_drafting[place] = costs.drafting(shape)
        self.update(Slowdowns([1, *costs.verify]), 1.0)

    def update(self, slowdowns: Slowdowns, in_vain: float) -> None:
        """Take in how much slower steps are, and beyond that those whose drafts are in vain."""
        wait, (of_plain, *factors) = self._costs.wait, slowdowns.factors
        self.plain: float = self._costs.plain * of_plain
        # What slows plain steps down, but for a longer text, slows drafting down as well.
        drafting = self.timed_drafting * (in_vain * of_plain) + (in_vain - 1) * (self.plain + wait)
        self.drafting: Floats = np.maximum(0.0, drafting)
        # What took less than a plain step was timed in a quieter moment.
        timed = zip(self._costs.verify.items(), factors, strict=True)
        known = {size: max(self.plain, seconds * factor) for (size, seconds), factor in timed}
        self.verify: list[float] = [known.get(size, math.inf) for size in SIZES]
        every = self.drafting[..., None] + (self._unfit + np.array([self.plain, *self.verify]))
        self.step: Floats = every[..., 1:]
        self.looking: Floats = every + wait
        self.fewest: Floats = self.drafting + (self.verify[0] + wait)

    def worth(self, chances: Sequence[float], rate: float) -> list[int]:
        """The drafts with the most tokens beyond what their time gives otherwise, the best first.

        Args:
            chances: Probability of each draft that it is accepted, which are there: to verify none
                takes a plain step.
            rate: Tokens per second otherwise.
        """
        order = best_first(chances)
        gains = list(accumulate((chances[draft] for draft in order), initial=0.0))
        best, num_nodes = -rate * self.plain, 1
        # Not by NumPy, which takes longer for so few.
        for size, seconds in zip(SIZES, self.verify, strict=True):
            if size <= len(gains) and gains[size - 1] - rate * seconds > best:
                best, num_nodes = gains[size - 1] - rate * seconds, size
        return order[: num_nodes - 1]
