"""The plans on offer to the adaptive policy, and what each would have got out of given drafts.

Axes: W widths on offer, L lengths, S numbers of nodes, n drafts of a tree.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate

import numpy as np
import numpy.typing as npt

from mlx_redrafter.draft_plan import DraftPlan, DraftShape
from mlx_redrafter.trees.tree import Drafts

Floats = npt.NDArray[np.float64]

# Beam widths, beam lengths and numbers of nodes, root included.
WIDTHS = (1, 2, 3, 4)
LENGTHS = tuple(range(2, 11))
SIZES = (2, 3, 4, 5, 6, 8, 12, 16, 24, 32)
SHAPES = {
    (w, length): DraftShape(width, beam_length)
    for w, width in enumerate(WIDTHS)
    for length, beam_length in enumerate(LENGTHS)
}
PLACES = {shape: place for place, shape in SHAPES.items()}
# Plans with all drafts that a search scores, as those of narrower ones are among them, and the plan
# that shows all others.
PLANS = {place: DraftPlan(shape, shape.max_nodes) for place, shape in SHAPES.items()}
SHORTEST, LONGEST = PLANS[0, 0], PLANS[len(WIDTHS) - 1, len(LENGTHS) - 1]
WIDEST = PLANS[len(WIDTHS) - 1, 0]
# Drafts out of the text take no time, so they are long.
LOOKUP = DraftPlan(DraftShape(4, 16), SIZES[-1], from_text=True)
# Whether a shape has that many nodes, shape (W, L, S).
FITS = np.zeros((len(WIDTHS), len(LENGTHS), len(SIZES)), dtype=np.bool_)
for _place, _shape in SHAPES.items():
    FITS[_place] = np.array(SIZES) <= _shape.max_nodes
_DEEPEST = np.array(LENGTHS)[:, None] - 1
_MOST = np.array(SIZES) - 1
# Drafts of a chain, by its length and the number of nodes, shape (L, S).
CHAIN = np.minimum(_DEEPEST, _MOST)
_PLACES = np.ogrid[: len(WIDTHS), : len(LENGTHS), :1]
# Drafts that a search of each width scores at a level.
_LEVEL_NODES = [DraftShape(width, 2).level_nodes for width in WIDTHS]


def best_first(chances: Sequence[float]) -> list[int]:
    """Indices of n drafts, the likeliest first and of equals their parents."""
    return sorted(range(len(chances)), key=lambda draft: -chances[draft])


def highest(values: Floats) -> tuple[float, tuple[int, ...]]:
    """The highest value and its place."""
    index, place = int(values.argmax()), []
    highest = float(values.item(index))
    for length in reversed(values.shape):
        index, last = divmod(index, length)
        place.append(last)
    return highest, tuple(reversed(place))


def expected_drafts(
    drafts: Drafts, chances: Sequence[float], shape: DraftShape
) -> tuple[Floats, Floats]:
    """Expected number of accepted drafts of every shape within a search's own, and size.

    Args:
        drafts: The best drafts of the search.
        chances: Probability of each of the n that it is accepted.
        shape: Shape of the search.

    Returns:
        Sums over the drafts that the proposer finds best, and over those with the best chances,
        each of shape (W', L', S) for the widths and lengths up to the search's.
    """
    if shape.width == 1:
        found = _sums_of_chain(chances)[:, : LENGTHS.index(shape.length) + 1]
        return found, found
    widths = WIDTHS.index(shape.width) + 1
    shallow = np.array(drafts.depths) <= _DEEPEST[: LENGTHS.index(shape.length) + 1]
    inside = _insides(drafts, widths)[:, None] & shallow
    values, order = np.array(chances), best_first(chances)
    return _sums_of_first(inside, values), _sums_of_first(inside[:, :, order], values[order])


def _sums_of_chain(chances: Sequence[float]) -> Floats:
    """The same sums for a chain, whose drafts have one order and one per level, (1, L, S)."""
    sums = np.array(list(accumulate(chances, initial=0.0)))
    found: Floats = sums[np.minimum(CHAIN, len(chances))][None]
    return found


def _sums_of_first(inside: npt.NDArray[np.bool_], chances: Floats) -> Floats:
    """Sums of the chances of as many drafts as there are inside, (W', L', n), by size: (.., S)."""
    count = len(chances)
    widths, lengths, _ = inside.shape
    sums = np.zeros((widths, lengths, count + 1))
    w, length = _PLACES[0][:widths], _PLACES[1][:, :lengths]
    sums[w, length, inside.cumsum(axis=-1)] = (inside * chances).cumsum(axis=-1)
    found: Floats = np.maximum.accumulate(sums, axis=-1)[..., np.minimum(_MOST, count)]
    return found


def _insides(drafts: Drafts, widths: int) -> npt.NDArray[np.bool_]:
    """The drafts that a search of each of the first widths would have scored as well, (W', n)."""
    inside = np.zeros((len(drafts.depths), widths), dtype=np.bool_)
    inside[:, -1] = True
    # Of each node the widths, but for the search's own, whose beams it is one of.
    beams: list[list[int]] = [list(range(widths - 1))]
    counts = [[0] * widths for _ in range(LENGTHS[-1])]
    for draft, (parent, depth) in enumerate(zip(drafts.parents, drafts.depths, strict=True)):
        mine = []
        for w in beams[parent]:
            rank = counts[depth][w]
            if rank < _LEVEL_NODES[w]:
                counts[depth][w] = rank + 1
                inside[draft, w] = True
                if rank < WIDTHS[w]:
                    mine.append(w)
        beams.append(mine)
    return inside.T
