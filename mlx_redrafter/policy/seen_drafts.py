"""A network's drafts as a policy learns from them."""

from __future__ import annotations

from functools import cached_property

from mlx_redrafter.draft_plan import DraftPlan
from mlx_redrafter.policy.calibration import Calibration, Features, draft_features
from mlx_redrafter.trees.tree import Drafts, TokenTree

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
    def features(self) -> list[Features]:
        """What their probabilities depend on."""
        return draft_features(self.drafts)

    def chances(self, calibration: Calibration) -> list[float]:
        """Probability that each is accepted, those above it included."""
        chances = [1.0]
        own = calibration.probabilities(self.features)
        for parent, chance in zip(self.drafts.parents, own, strict=True):
            chances.append(chances[parent] * chance)
        return chances[1:]
