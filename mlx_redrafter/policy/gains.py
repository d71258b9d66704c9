"""What drafts of every shape and size have got lately, those never tried by extrapolation.

Axes: W widths on offer, L lengths, S numbers of nodes; W' and L' those within a search's shape.
"""

from __future__ import annotations

from copy import copy

import numpy as np
import numpy.typing as npt

from mlx_redrafter.policy.candidates import CHAIN, LENGTHS, SIZES, WIDTHS

Floats = npt.NDArray[np.float64]

# Window of the running means, in drafts, and weight of those of the text before. For several texts,
# which differ, the window of gains is that many times as long, up to `MOST_TEXTS`; that of what is
# chosen, which depends on prices, is not.
MEMORY = 14
CARRIED_OVER = 8
MOST_TEXTS = 4
# Window of the sums whose ratios extrapolate, in drafts that show both sides.
RATIO_MEMORY = 8
# Before the first draft, with hope: share of the drafts of a chain that are accepted of those whose
# parents are, and what each width gets relative to a chain.
PRIOR_SHARE = 0.75
PRIOR_WIDER = np.array([1.0, 1.15, 1.2, 1.23])
_PLACES = np.ogrid[: len(WIDTHS), : len(LENGTHS)]


class Gains:
    """Mean expected number of accepted drafts by shape and size.

    Args:
        before: Gains of the text before.
        num_texts: Number of texts whose drafts are taken in; as before by default.

    Attributes:
        mean: Shape (W, L, S).
        chosen_tokens: Mean tokens of steps that verify as many drafts as are worth it, (W, L).
        chosen_seconds: Mean seconds of those steps, (W, L).
    """

    def __init__(self, before: Gains | None = None, num_texts: int | None = None):
        self._num_texts: int = before._num_texts if before is not None else 1
        if num_texts is not None:
            self._num_texts = min(num_texts, MOST_TEXTS)
        self.mean: Floats = _prior()
        self.chosen_tokens: Floats = np.zeros(self.mean.shape[:2])
        self.chosen_seconds: Floats = np.ones(self.mean.shape[:2])
        self._count = self._chosen_count = 0
        self._extrapolation = Extrapolation()
        if before is not None:
            # Arrays are replaced, never written to.
            self.mean = before.mean
            self.chosen_tokens, self.chosen_seconds = before.chosen_tokens, before.chosen_seconds
            self._count = min(before._count, CARRIED_OVER * self._num_texts)
            self._chosen_count = min(before._chosen_count, CARRIED_OVER)
            self._extrapolation = copy(before._extrapolation)

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
        gains, chosen = self._extrapolation.extend(found, chosen)
        self._count = min(self._count + 1, MEMORY * self._num_texts)
        self._chosen_count = min(self._chosen_count + 1, MEMORY)
        self.mean = self.mean + (gains - self.mean) / self._count
        values = chosen - rate * seconds
        best = values.argmax(axis=-1)
        is_worth = values[(*_PLACES, best)] > -rate * unverified
        chosen_best, seconds_best = chosen[(*_PLACES, best)], seconds[(*_PLACES, best)]
        tokens = 1 + is_worth * chosen_best
        took = np.where(is_worth, seconds_best, unverified)
        self.chosen_tokens = self.chosen_tokens + (tokens - self.chosen_tokens) / self._chosen_count
        self.chosen_seconds = (
            self.chosen_seconds + (took - self.chosen_seconds) / self._chosen_count
        )


class Extrapolation:
    """From the gains of some shapes to those of wider and longer ones, by ratios seen before.

    Axis K stands for the two kinds of gains: of the drafts that the proposer finds best, and of
    those with the best chances.
    """

    def __init__(self) -> None:
        prior = np.stack([_prior()] * 2)
        # Sums of gains: of the next width and of this one, of lengths likewise.
        self._wider = np.stack([prior[:, 1:], prior[:, :-1]])
        self._longer = np.stack([prior[:, :, 1:], prior[:, :, :-1]])

    def extend(self, *shown: Floats) -> Floats:
        """Gains of both kinds at all places, (K, W, L, S), of which a draft shows the first.

        Args:
            shown: Those within the shape of a search, of each kind, shape (W', L', S).
        """
        widths, lengths, _ = shown[0].shape
        gains = np.empty((2, len(WIDTHS), len(LENGTHS), len(SIZES)))
        gains[0, :widths, :lengths], gains[1, :widths, :lengths] = shown
        found = gains[:, :widths, :lengths]
        if widths > 1:
            self._wider = _add(self._wider, found[:, 1:], found[:, :-1])
        if lengths > 1:
            self._longer = _add(self._longer, found[:, :, 1:], found[:, :, :-1])
        if lengths < len(LENGTHS):
            next_, here = self._longer[:, :, :widths, lengths - 1 :]
            gains[:, :widths, lengths:] = found[:, :, -1:] * np.cumprod(next_ / here, axis=2)
        if widths < len(WIDTHS):
            next_, here = self._wider[:, :, widths - 1 :]
            gains[:, widths:] = gains[:, widths - 1 : widths] * np.cumprod(next_ / here, axis=1)
        return gains


def _add(sums: Floats, *found: Floats) -> Floats:
    """Running sums with one more draft, which may show the first places only."""
    _, widths, lengths, _ = found[0].shape
    sums = sums.copy()
    seen = sums[:, :, :widths, :lengths]
    seen *= 1 - 1 / RATIO_MEMORY
    seen += 1e-6
    seen[0] += found[0]
    seen[1] += found[1]
    return sums


def _prior() -> Floats:
    chain = PRIOR_SHARE * (1 - PRIOR_SHARE**CHAIN) / (1 - PRIOR_SHARE)
    return PRIOR_WIDER[: len(WIDTHS), None, None] * chain
