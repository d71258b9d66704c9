"""What steps take at present.

Axes: W widths on offer, L lengths, S numbers of nodes.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from mlx_redrafter.policy.candidates import FITS, SHAPES, SIZES, best_first
from mlx_redrafter.policy.slowdowns import Slowdowns
from mlx_redrafter.policy.step_costs import StepCosts

Floats = npt.NDArray[np.float64]

_SIZES = np.array(SIZES)


class Prices:
    """Seconds of steps and of their parts, as timed beforehand until they are updated.

    Args:
        costs: Seconds as timed beforehand.
        fits: Whether a shape is on offer with so many nodes, bool, shape (W, L, S).

    Attributes:
        timed_drafting: Drafting, as timed beforehand, shape (W, L).
        plain: A step without drafts.
        drafting: Drafting, shape (W, L).
        verify: Verifying, infinite for sizes that were not timed, shape (S,).
        step: Both, infinite where the size does not fit, shape (W, L, S).
        looking: Steps that look at the drafts first, and verify none of them or so many, shape
            (W, L, 1 + S).
    """

    def __init__(self, costs: StepCosts, fits: npt.NDArray[np.bool_]):
        self._costs = costs
        # Infinite for numbers of nodes, after none verified, that do not fit; shape (W, L, 1 + S).
        self._unfit = np.where(np.insert(fits, 0, True, axis=-1), 0.0, np.inf)
        # Places of the sizes that were timed, and their seconds then.
        self._places = [SIZES.index(size) for size in costs.verify]
        self._timed_verify = np.array(list(costs.verify.values()))
        self.timed_drafting: Floats = np.zeros(FITS.shape[:2])
        for place, shape in SHAPES.items() if costs.level else ():
            self.timed_drafting[place] = costs.drafting(shape)
        self.update(Slowdowns([1, *costs.verify]), 1.0)

    def update(self, slowdowns: Slowdowns, in_vain: float) -> None:
        """Take in how much slower steps are, and beyond that those whose drafts are in vain."""
        wait, factors = self._costs.wait, slowdowns.factors
        self.plain: float = self._costs.plain * float(factors[0])
        # What slows plain steps down, but for a longer text, slows drafting down as well.
        drafting = self.timed_drafting * (in_vain * float(factors[0]))
        drafting += (in_vain - 1) * (self.plain + wait)
        self.drafting: Floats = np.maximum(0.0, drafting)
        self.verify: Floats = np.full(len(SIZES), np.inf)
        # What took less than a plain step was timed in a quieter moment.
        self.verify[self._places] = np.maximum(self.plain, self._timed_verify * factors[1:])
        every = np.empty(self._unfit.shape)
        every[..., 0], every[..., 1:] = self.plain, self.verify
        every += self.drafting[..., None] + self._unfit
        self.step: Floats = every[..., 1:]
        self.looking: Floats = every + wait

    def worth(self, chances: Floats, rate: float) -> list[int]:
        """The drafts with the most tokens beyond what their time gives otherwise, the best first.

        Args:
            chances: Probability of each draft that it is accepted, shape (n,), which are there:
                to verify none takes a plain step.
            rate: Tokens per second otherwise.
        """
        order = best_first(chances)
        gains = np.concatenate([[0.0], np.cumsum(chances[order])])
        is_there = _SIZES <= len(gains)
        values = gains[np.minimum(_SIZES, len(gains)) - 1] - rate * self.verify
        best = int(np.argmax(np.where(is_there, values, -np.inf)))
        num_nodes = SIZES[best] if values[best] > -rate * self.plain else 1
        return [int(draft) for draft in order[: num_nodes - 1]]
