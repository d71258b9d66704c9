"""The plans on offer to the adaptive policy, and what each would have got out of given drafts.

Axes: W widths on offer, L lengths, S numbers of nodes, n drafts of a tree.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from mlx_redrafter.config import DraftPlan, DraftShape
from mlx_redrafter.tree import Drafts

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
_MOST = np.array(SIZES)[:, None, None] - 1


def best_first(chances: Floats) -> npt.NDArray[np.int64]:
    """Indices of drafts, the likeliest first and of equals their parents, shape (n,)."""
    return np.argsort(-chances, kind="stable")


def expected_drafts(drafts: Drafts, chances: Floats, shape: DraftShape) -> tuple[Floats, Floats]:
    """Expected number of accepted drafts of every shape within a search's own, and size.

    Args:
        drafts: The best drafts of the search.
        chances: Probability of each that it is accepted, shape (n,).
        shape: Shape of the search.

    Returns:
        Sums over the drafts that the proposer finds best, and over those with the best chances,
        each of shape (W', L', S) for the widths and lengths up to the search's.
    """
    order = best_first(chances)
    depths = np.array(drafts.depths)
    shallow = depths <= _DEEPEST[: LENGTHS.index(shape.length) + 1]
    found, chosen = [], []
    for width in WIDTHS[: WIDTHS.index(shape.width) + 1]:
        inside = shallow
        if width < shape.width:
            inside = shallow & _narrower(drafts, DraftShape(width, shape.length))
        found.append(_sums_of_first(inside, chances))
        chosen.append(_sums_of_first(inside[:, order], chances[order]))
    return np.stack(found), np.stack(chosen)


def _sums_of_first(inside: npt.NDArray[np.bool_], chances: Floats) -> Floats:
    """Sums of the chances of as many drafts as there are inside, (L', n), by size, (L', S)."""
    ranks = np.cumsum(inside, axis=1)
    sums: Floats = ((ranks <= _MOST) & inside) @ chances  # (S, L')
    return sums.T


def _narrower(drafts: Drafts, shape: DraftShape) -> npt.NDArray[np.bool_]:
    """The drafts that a narrower search would have scored as well, shape (n,)."""
    beams = {0}
    counts = [0] * (max(drafts.depths, default=0) + 1)
    inside = np.zeros(len(drafts.depths), dtype=np.bool_)
    for draft, (parent, depth) in enumerate(zip(drafts.parents, drafts.depths, strict=True)):
        if parent in beams and counts[depth] < shape.level_nodes:
            counts[depth] += 1
            inside[draft] = True
            if counts[depth] <= shape.width:
                beams.add(draft + 1)
    return inside
