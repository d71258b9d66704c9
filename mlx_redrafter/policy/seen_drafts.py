"""A network's drafts as a policy learns from them.

Axes: n drafts of a tree.
"""

from __future__ import annotations

from functools import cached_property

import numpy as np
import numpy.typing as npt

from mlx_redrafter.config import DraftPlan
from mlx_redrafter.policy.calibration import Calibration, draft_features
from mlx_redrafter.tree import Drafts, TokenTree

Floats = npt.NDArray[np.float64]

# Drafts of a tree that are looked at, the best ones; a wide search finds many of no worth.
MOST_SEEN = 64


class SeenDrafts:
    """A network's drafts, which the host reads when they are needed."""

    def __init__(self, plan: DraftPlan, tree: TokenTree):
        self.plan = plan
        self._tree = tree

    @cached_property
    def drafts(self) -> Drafts:
        """The best of the drafts; waits for the device."""
        scores, depths, parents, tokens = self._tree.read()
        seen = slice(MOST_SEEN)
        return Drafts(scores[seen], depths[seen], parents[seen], tokens[seen])

    @cached_property
    def features(self) -> Floats:
        """What their probabilities depend on, shape (n, 4)."""
        return draft_features(self.drafts)

    def chances(self, calibration: Calibration) -> Floats:
        """Probability that each is accepted, those above it included, shape (n,)."""
        chances = [1.0]
        own = calibration.probabilities(self.features).tolist()
        for parent, chance in zip(self.drafts.parents, own, strict=True):
            chances.append(chances[parent] * chance)
        return np.array(chances[1:])
