"""What drafts of every shape and size have got lately, those never tried by extrapolation.

Axes: W widths on offer, L lengths, S numbers of nodes; W' and L' those within a search's shape.
"""

from __future__ import annotations

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
# Drafts that count for what the next text begins with.
TYPICAL = 64
# Window of the sums whose ratios extrapolate, in drafts that show both sides.
RATIO_MEMORY = 8
# Before the first draft, with hope: share of the drafts of a chain that are accepted of those whose
# parents are, and what each width gets relative to a chain.
PRIOR_SHARE = 0.75
PRIOR_WIDER = np.array([1.0, 1.15, 1.2, 1.23])
# Place of every shape's first number among those of none verified and of each size, flattened.
_FIRST = (1 + len(SIZES)) * np.arange(len(WIDTHS) * len(LENGTHS)).reshape(len(WIDTHS), -1)


class Gains:
    """Mean expected number of accepted drafts by shape and size.

    Args:
        before: Gains of the text before.
        num_texts: Number of texts whose drafts are taken in; as before by default.

    Attributes:
        mean: Shape (W, L, S).
        chosen: Mean number of accepted drafts of steps that verify as many as are worth it, and
            mean of what those steps take by what those that verify the fewest do, shape (2, W, L):
            what all steps take changes before the next draft is learnt from.
    """

    def __init__(self, before: Gains | None = None, num_texts: int | None = None):
        self._num_texts: int = before._num_texts if before is not None else 1
        if num_texts is not None:
            self._num_texts = min(num_texts, MOST_TEXTS)
        self.mean: Floats = _prior()
        # Before the first draft, no speed.
        self.chosen: Floats = np.ones((2, *self.mean.shape[:2]))
        self.chosen[0] = -1.0
        self._count = self._chosen_count = 0
        # Drafts of this text, and drafts of all before that count, with the means of their texts.
        self._num_drafts = self._num_typical = 0
        self._typical: tuple[Floats, Floats] | None = None
        self._extrapolation: Extrapolation = Extrapolation(
            None if before is None else before._extrapolation
        )
        if before is not None:
            # Arrays are replaced, never written to.
            self._typical = before._typical_of_texts()
            self._num_typical = min(before._num_typical + before._num_drafts, TYPICAL)
            self.mean, self.chosen = self._typical
            self._count = min(before._count, CARRIED_OVER * self._num_texts)
            self._chosen_count = min(before._chosen_count, CARRIED_OVER)

    def learn(
        self, found: Floats, chosen: Floats, seconds: Floats, fewest: Floats, rate: float
    ) -> None:
        """Take in the gains of one draft.

        Args:
            found: Gains of the shapes within the search's, shape (W', L', S).
            chosen: The same where the drafts verified are chosen by their chances.
            seconds: Duration of steps that look at the drafts first, and verify none of them or
                so many, (W, L, 1 + S).
            fewest: Duration of steps that verify the fewest, see `Prices`, (W, L).
            rate: Tokens per second that time is worth.
        """
        gains, chosen = self._extrapolation.extend(found, chosen)
        self._num_drafts += 1
        self._count = min(self._count + 1, MEMORY * self._num_texts)
        self._chosen_count = min(self._chosen_count + 1, MEMORY)
        self.mean = self.mean + (gains[..., 1:] - self.mean) / self._count
        best = (chosen - rate * seconds).argmax(axis=-1) + _FIRST
        newest = np.array([chosen.take(best), seconds.take(best) / fewest])
        self.chosen = self.chosen + (newest - self.chosen) / self._chosen_count

    def _typical_of_texts(self) -> tuple[Floats, Floats]:
        """The means, over the texts so far: the end of one says little about the next."""
        if self._typical is None:
            return self.mean, self.chosen
        share = self._num_drafts / max(1, self._num_drafts + self._num_typical)
        mean, chosen = self._typical
        return mean + (self.mean - mean) * share, chosen + (self.chosen - chosen) * share


class Extrapolation:
    """From the gains of some shapes to those of wider and longer ones, by ratios seen before.

    Axis K stands for the two kinds of gains: of the drafts that the proposer finds best, and of
    those with the best chances.

    Args:
        before: Ratios of the text before.
    """

    def __init__(self, before: Extrapolation | None = None) -> None:
        prior = np.stack([_prior()] * 2)
        # Sums of gains: of the next width and of this one, of lengths likewise.
        self._wider = np.stack([prior[:, 1:], prior[:, :-1]])
        self._longer = np.stack([prior[:, :, 1:], prior[:, :, :-1]])
        if before is not None:
            self._wider, self._longer = before._wider.copy(), before._longer.copy()
        # Ratios to the gains of the last width or length shown, by how many are shown, until they
        # change.
        self._by_width: dict[int, Floats] = {}
        self._by_length: dict[int, Floats] = {}

    def extend(self, *shown: Floats) -> Floats:
        """Gains of both kinds at all places, of which a draft shows the first.

        Args:
            shown: Those within the shape of a search, of each kind, shape (W', L', S).

        Returns:
            Those of none verified, which are 0, and of each size, shape (K, W, L, 1 + S).
        """
        widths, lengths, _ = shown[0].shape
        everywhere = np.zeros((2, len(WIDTHS), len(LENGTHS), 1 + len(SIZES)))
        gains = everywhere[..., 1:]
        gains[0, :widths, :lengths], gains[1, :widths, :lengths] = shown
        found = gains[:, :widths, :lengths]
        if widths > 1:
            _add(self._wider, found[:, 1:], found[:, :-1])
            self._by_width.clear()
        if lengths > 1:
            _add(self._longer, found[:, :, 1:], found[:, :, :-1])
            self._by_length = {k: v for k, v in self._by_length.items() if k >= lengths}
        if lengths < len(LENGTHS):
            ratios = self._beyond_length(lengths)
            gains[:, :widths, lengths:] = found[:, :, -1:] * ratios[:, :widths]
        if widths < len(WIDTHS):
            gains[:, widths:] = gains[:, widths - 1 : widths] * self._beyond_width(widths)
        return everywhere

    def _beyond_length(self, lengths: int) -> Floats:
        if lengths not in self._by_length:
            next_, here = self._longer[:, :, :, lengths - 1 :]
            self._by_length[lengths] = np.cumprod(next_ / here, axis=2)
        return self._by_length[lengths]

    def _beyond_width(self, widths: int) -> Floats:
        if widths not in self._by_width:
            next_, here = self._wider[:, :, widths - 1 :]
            self._by_width[widths] = np.cumprod(next_ / here, axis=1)
        return self._by_width[widths]


def _add(sums: Floats, *found: Floats) -> None:
    """Add a draft to running sums; it may show the first places only."""
    _, widths, lengths, _ = found[0].shape
    seen = sums[:, :, :widths, :lengths]
    seen *= 1 - 1 / RATIO_MEMORY
    seen += 1e-6
    seen[0] += found[0]
    seen[1] += found[1]


def _prior() -> Floats:
    chain = PRIOR_SHARE * (1 - PRIOR_SHARE**CHAIN) / (1 - PRIOR_SHARE)
    return PRIOR_WIDER[: len(WIDTHS), None, None] * chain
