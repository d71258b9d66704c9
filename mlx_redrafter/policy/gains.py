"""What drafts of every shape and size have got lately, those never tried by extrapolation.

Axes: W widths on offer, L lengths, S numbers of nodes; W' and L' those within a search's shape.
"""

from __future__ import annotations

from copy import copy

import numpy as np
import numpy.typing as npt

from mlx_redrafter.policy.candidates import LENGTHS, SIZES, WIDTHS

Floats = npt.NDArray[np.float64]

# Window of the running mean, in drafts, and weight of the mean of the text before.
MEMORY = 14
CARRIED_OVER = 8
# Window of the sums whose ratios extrapolate, in drafts that show both sides.
RATIO_MEMORY = 8
# Before the first draft, with hope: share of the drafts of a chain that are accepted of those whose
# parents are, and what each width gets relative to a chain.
PRIOR_SHARE = 0.75
PRIOR_WIDER = np.array([1.0, 1.15, 1.2, 1.23])


class Gains:
    """Mean expected number of accepted drafts by shape and size.

    Args:
        before: Gains of the text before.

    Attributes:
        mean: Shape (W, L, S).
        chosen_tokens: Mean tokens of steps that verify as many drafts as are worth it, (W, L).
        chosen_seconds: Mean seconds of those steps, (W, L).
    """

    def __init__(self, before: Gains | None = None):
        self.mean: Floats = _prior()
        self.chosen_tokens: Floats = np.zeros(self.mean.shape[:2])
        self.chosen_seconds: Floats = np.ones(self.mean.shape[:2])
        self._count = 0
        # Of the drafts that the proposer finds best, and of those with the best chances.
        self._best, self._chosen = Extrapolation(), Extrapolation()
        if before is not None:
            # Arrays are replaced, never written to.
            self.mean = before.mean
            self.chosen_tokens, self.chosen_seconds = before.chosen_tokens, before.chosen_seconds
            self._count = min(before._count, CARRIED_OVER)
            self._best, self._chosen = copy(before._best), copy(before._chosen)

    def learn(
        self, found: Floats, chosen: Floats, seconds: Floats, unverified: Floats, rate: float
    ) -> None:
        """Take in the gains of one draft.

        Args:
            found: Gains of the shapes within the search's, shape (W', L', S).
            chosen: The same where the drafts verified are chosen by their chances.
            seconds: Duration of steps that look at the drafts first, (W, L, S).
            unverified: Duration of those that then verify none of them, (W, L).
            rate: Tokens per second that time is worth.
        """
        gains, chosen = self._best.extend(found), self._chosen.extend(chosen)
        self._count = min(self._count + 1, MEMORY)
        self.mean = self.mean + (gains - self.mean) / self._count
        values = chosen - rate * seconds
        best = np.argmax(values, axis=-1)[..., None]
        is_worth = np.take_along_axis(values, best, -1)[..., 0] > -rate * unverified
        tokens = 1 + np.where(is_worth, np.take_along_axis(chosen, best, -1)[..., 0], 0.0)
        took = np.where(is_worth, np.take_along_axis(seconds, best, -1)[..., 0], unverified)
        self.chosen_tokens = self.chosen_tokens + (tokens - self.chosen_tokens) / self._count
        self.chosen_seconds = self.chosen_seconds + (took - self.chosen_seconds) / self._count


class Extrapolation:
    """From the gains of some shapes to those of wider and longer ones, by ratios seen before."""

    def __init__(self) -> None:
        prior = _prior()
        # Sums of gains: of the next width and of this one, of lengths likewise.
        self._wider = prior[1:], prior[:-1]
        self._longer = prior[:, 1:], prior[:, :-1]

    def extend(self, found: Floats) -> Floats:
        """Gains at all places, (W, L, S), of which a draft shows the first, (W', L', S)."""
        widths, lengths, _ = found.shape
        self._wider = _add(self._wider, (found[1:], found[:-1]))
        self._longer = _add(self._longer, (found[:, 1:], found[:, :-1]))
        gains = np.empty((len(WIDTHS), len(LENGTHS), len(SIZES)))
        gains[:widths, :lengths] = found
        next_, here = (sums[:widths, lengths - 1 :] for sums in self._longer)
        gains[:widths, lengths:] = found[:, -1:] * np.cumprod(next_ / here, axis=1)
        next_, here = (sums[widths - 1 :] for sums in self._wider)
        gains[widths:] = gains[widths - 1] * np.cumprod(next_ / here, axis=0)
        return gains


def _add(sums: tuple[Floats, Floats], found: tuple[Floats, Floats]) -> tuple[Floats, Floats]:
    """Running sums with one more draft, whose arrays may cover the first places only."""
    widths, lengths, _ = found[0].shape
    updated = []
    for sum_, new in zip(sums, found, strict=True):
        sum_ = sum_.copy()
        sum_[:widths, :lengths] = (1 - 1 / RATIO_MEMORY) * sum_[:widths, :lengths] + new + 1e-6
        updated.append(sum_)
    return updated[0], updated[1]


def _prior() -> Floats:
    levels = np.minimum(np.array(LENGTHS)[:, None], np.array(SIZES)) - 1
    chain = PRIOR_SHARE * (1 - PRIOR_SHARE**levels) / (1 - PRIOR_SHARE)
    return PRIOR_WIDER[: len(WIDTHS), None, None] * chain
