"""Networks along a tree whose pass still runs, before they know the target's states there.

Axes: N nodes of a tree, R roots, W beam width, H hidden size, V tokens that the network proposes.
"""

from __future__ import annotations

import mlx.core as mx

from mlx_redrafter.decoding.sampling import GumbelNoise
from mlx_redrafter.proposers.draft_model import DraftLevels, ModelDrafting
from mlx_redrafter.proposers.redrafter.network import RecurrentDrafting, RecurrentLevels
from mlx_redrafter.proposers.search import log_probs
from mlx_redrafter.target.caches.draft_cache import DraftLineage
from mlx_redrafter.trees.tree import TokenTree

# Drafts of the networks that can follow a tree.
Branching = RecurrentDrafting | ModelDrafting


def branches_of(
    drafting: Branching, tree: TokenTree, origin: mx.array, noise: GumbelNoise | None
) -> RecurrentBranches | ModelBranches:
    """Take a network along a tree; this changes nothing of its other drafts.

    The result scores tokens after all nodes, and then, as a `LevelScorer`, below some of them.
    ``origin``, shape (H,), is the state that predicted the root; a draft model needs none.
    """
    if isinstance(drafting, ModelDrafting):
        return ModelBranches(drafting, tree)
    return RecurrentBranches(drafting, tree, origin, drafting.rank(noise) is not None)


class RecurrentBranches(RecurrentLevels):
    """A recurrent drafter along a tree, from the state that predicted the tree's root."""

    def __init__(
        self, drafting: RecurrentDrafting, tree: TokenTree, origin: mx.array, with_noise: bool
    ):
        network, root = drafting.network, tree.tokens[:1]
        super().__init__(network, drafting.project_input, origin[None], root, with_noise)
        self.tree = tree

    def after_nodes(self) -> mx.array:
        """Return natural log-probabilities of tokens after every node, float32, shape (N, V)."""
        inputs = self.project_input(mx.maximum(self.tree.tokens, 0))  # padding has no token
        first = self.state = self.drafter.start(inputs)
        for _ in range(self.tree.max_depth):  # right for nodes of depth d from round d on
            advanced = self.drafter.advance(self.state[self.tree.parents], inputs)
            self.state = mx.where(self.tree.depths[:, None] > 0, advanced, first)
        return self.log_probs()

    def begin(self, nodes: mx.array, tokens: mx.array) -> None:
        """Make roots of the `LevelScorer` of tokens after some nodes, both int32, shape (R,)."""
        self.state = self.drafter.advance(self.state[nodes], self.project_input(tokens))

    def first(self) -> mx.array:
        return self.log_probs()


class ModelBranches(DraftLevels):
    """A draft model along a tree; the entries of all nodes stay aside, the root's too."""

    def __init__(self, drafting: ModelDrafting, tree: TokenTree):
        super().__init__(drafting)
        self.tree = tree

    def after_nodes(self) -> mx.array:
        drafting, tree = self.drafting, self.tree
        drafting.read_known()
        # The tree's root has an entry already, which no query sees: its logits are computed again.
        length = drafting.length - 1
        before = mx.array([length - 1], dtype=mx.int32)
        self._lineage = DraftLineage(length, before, drafting.cache.num_rows)
        tokens = mx.maximum(tree.tokens, 0)  # padding has no token
        return log_probs(
            drafting.read_level(tokens, *self._lineage.start_at_nodes(tree)), self.num_rows
        )

    def begin(self, nodes: mx.array, tokens: mx.array) -> None:
        self._nodes, self._tokens = nodes, tokens

    def first(self) -> mx.array:
        return self._extend(self._nodes, self._tokens, 0)

    def following(self, beams: mx.array | None, tokens: mx.array, depth: int) -> mx.array:
        return self._extend(beams, tokens, depth)

    def _extend(self, beams: mx.array | None, tokens: mx.array, depth: int) -> mx.array:
        width, roots = tokens.shape[0], self._nodes.shape[0]
        # A child of a node of depth d stands at d + 2, as the tree's root is at 1.
        depths = mx.repeat(self.tree.depths[self._nodes], width // roots) + (2 + depth)
        level = self._lineage.extend(beams, width, depths, self.tree.max_depth + 2 + depth)
        return log_probs(self.drafting.read_level(tokens, *level), self.num_rows)
