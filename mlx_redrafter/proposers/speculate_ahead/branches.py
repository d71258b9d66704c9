"""Networks along a tree whose pass still runs, before they know the target's states there.

Axes: N nodes of a tree, R roots, W beam width, H hidden size, V tokens that the network proposes.
"""

from __future__ import annotations

from typing import Protocol

import mlx.core as mx

from mlx_redrafter.decoding.sampling import GumbelNoise
from mlx_redrafter.proposers.draft_model import DraftLevels, ModelDrafting
from mlx_redrafter.proposers.redrafter.beam import RecurrentLevels, score_scale
from mlx_redrafter.proposers.redrafter.network import RecurrentDrafting
from mlx_redrafter.proposers.scores import log_probs
from mlx_redrafter.proposers.search import LevelScorer
from mlx_redrafter.target.caches.draft_cache import DraftLineage
from mlx_redrafter.trees.tree import TokenTree

# Drafts of the networks that can follow a tree.
Branching = RecurrentDrafting | ModelDrafting


class Branches(LevelScorer, Protocol):
    """A network along a tree: after all its nodes, then after tokens below some of them."""

    def after_nodes(self) -> mx.array:
        """Return natural log-probabilities of tokens after every node, float32, shape (N, V)."""
        ...

    def begin(self, nodes: mx.array, tokens: mx.array) -> None:
        """Make roots of the `LevelScorer` of tokens after some nodes, both int32, shape (R,)."""
        ...


def branches_of(
    drafting: Branching, tree: TokenTree, origin: mx.array, noise: GumbelNoise | None
) -> Branches:
    """Take a network along a tree; this changes nothing of its other drafts.

    ``origin``, shape (H,), is the state that predicted the root; a draft model needs none.
    """
    if isinstance(drafting, ModelDrafting):
        return ModelBranches(drafting, tree)
    scale = score_scale(drafting.network, drafting.rank(noise))
    levels = RecurrentLevels(
        drafting.network, drafting.project_input, origin[None], tree.tokens[:1], scale
    )
    return RecurrentBranches(levels, tree)


class RecurrentBranches:
    """A recurrent drafter along a tree, from the state that predicted the tree's root."""

    def __init__(self, levels: RecurrentLevels, tree: TokenTree):
        self.levels = levels
        self.tree = tree
        self.num_rows = levels.num_rows
        self.to_token_ids = levels.to_token_ids
        self.following = levels.following

    def after_nodes(self) -> mx.array:
        levels, tree = self.levels, self.tree
        inputs = levels.project_input(mx.maximum(tree.tokens, 0))  # padding has no token
        first = levels.drafter.start(inputs)
        state = first
        for _ in range(tree.max_depth):  # right for nodes of depth d from round d on
            advanced = levels.drafter.advance(state[tree.parents], inputs)
            state = mx.where(tree.depths[:, None] > 0, advanced, first)
        levels.state = state
        return levels.log_probs()

    def begin(self, nodes: mx.array, tokens: mx.array) -> None:
        levels = self.levels
        levels.state = levels.drafter.advance(levels.state[nodes], levels.project_input(tokens))

    def first(self) -> mx.array:
        return self.levels.log_probs()


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
