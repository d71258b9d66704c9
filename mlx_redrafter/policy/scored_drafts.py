"""Drafts of a step with their probabilities, and how far the sequence has followed them."""

from __future__ import annotations

from collections.abc import Sequence

from mlx_redrafter.draft_plan import DraftPlan
from mlx_redrafter.policy.calibration import Calibration, features_of
from mlx_redrafter.policy.plans import SIZES
from mlx_redrafter.trees.tree import TokenTree

# Maximum number of drafts per tree that the host scores: as many as a step verifies.
MAX_DRAFTS = SIZES[-1] - 1


class ScoredDrafts:
    """The best drafts of one step, and the tokens that follow them.

    Args:
        plan: Plan of the drafts.
        tree: The drafts; the host reads them on first use, which may wait for the device.
        is_early: Whether the next step to be observed comes before these drafts.

    Attributes:
        plan: Plan of the drafts.
        probabilities: The newest result of `score`; empty before.
    """

    def __init__(self, plan: DraftPlan, tree: TokenTree, is_early: bool = False):
        self.plan = plan
        self.probabilities: list[float] = []
        self._tree = tree
        self._is_early = is_early
        # Node that the sequence has reached; None once it has left the tree.
        self._node: int | None = 0
        # Tokens of the sequence after that node that `follow` has yet to compare.
        self._following: list[int] = []

    @property
    def is_new(self) -> bool:
        """Whether no token has been compared with the drafts yet."""
        return self._node == 0

    @property
    def has_news(self) -> bool:
        """Whether there are tokens to compare with the drafts."""
        return bool(self._following)

    @property
    def is_open(self) -> bool:
        """Whether the next tokens of the sequence may be in the tree."""
        return self._node is not None and not self._following

    def extend(self, tokens: Sequence[int]) -> None:
        """Note the tokens of a step, unless it comes before these drafts."""
        if not self._is_early:
            self._following.extend(tokens)
        self._is_early = False

    def score(self, calibration: Calibration) -> list[float]:
        """Estimate each draft's probability of being accepted."""
        if not self.probabilities:
            self.drafts = self._tree.read().first(MAX_DRAFTS)
            self._features = features_of(self.drafts)
        self.probabilities = calibration.probabilities(self._features, self.drafts.parents)
        return self.probabilities

    def follow(self, calibration: Calibration) -> None:
        """Compare the next tokens with the drafts, and learn from every sibling up to the right."""
        found: list[tuple[int, bool]] = []
        drafts, tokens, self._following = self.drafts, self._following, []
        for token in tokens:
            node, self._node = self._node, None
            for draft, parent in enumerate(drafts.parents):
                if parent == node:
                    is_right = drafts.tokens[draft] == token
                    found.append((draft, is_right))
                    if is_right:
                        self._node = draft + 1
                        break
            if self._node is None:
                break
        calibration.learn(self._features, found)


def most_probable(probabilities: Sequence[float]) -> list[int]:
    """Sort the indices of drafts, the most probable first and among equals their parents."""
    return sorted(range(len(probabilities)), key=lambda draft: -probabilities[draft])
