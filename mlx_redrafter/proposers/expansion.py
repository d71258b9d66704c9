"""From scored continuations to the tree that is verified, for every proposer that scores levels.

Axes: W beam width, L beam length, K nodes scored per level, M in all, N nodes of the tree.
"""

from __future__ import annotations

from typing import NamedTuple

import mlx.core as mx

from mlx_redrafter.device_read import to_ints
from mlx_redrafter.draft_plan import DraftPlan, DraftShape
from mlx_redrafter.trees.tree import TokenTree, ancestor_mask


class Expansion(NamedTuple):
    """The nodes that a search scored, as many per level and the best first.

    Node ids count from 0 in their order. The first W of every level were expanded; those of the
    last level are what the W beams end with.

    Attributes:
        tokens: Token ids, int32, shape (M,).
        scores: Sum of natural log-probabilities from the root, float32, shape (M,).
        parents: Node id of the parent, int32, shape (M,); -1 where it is the root.
    """

    tokens: mx.array
    scores: mx.array
    parents: mx.array

    def of_root(self, root: int) -> Expansion:
        """That of one root, out of arrays with an axis of roots before their own."""
        return Expansion(*(array[root] for array in self))

    @property
    def alone(self) -> Expansion:
        """That of the only root, in fewer operations."""
        return Expansion(*(array.squeeze(0) for array in self))


def build_tree(expansion: Expansion, root: mx.array, plan: DraftPlan) -> TokenTree:
    """The tree that a plan asks for.

    Args:
        expansion: Scored nodes, M.
        root: The newest token, integer, shape (1,).
        plan: Shape of the search, how nodes are selected, and N.
    """
    if plan.shape.select == "beam":
        return merge_beams(expansion, root, plan.shape)
    return best_nodes(expansion, root, plan)


def best_nodes(expansion: Expansion, root: mx.array, plan: DraftPlan) -> TokenTree:
    """The tree of the N - 1 most probable nodes of an expansion, the root and then by probability.

    Accepted paths then often are the first nodes in order, whose K/V rows stay where they are. A
    child is never more probable than its parent and comes after it, so the best nodes, the first
    of equals preferred, always form a tree. It maximises the expected number of accepted drafts
    when the scores are true (OPT-Tree, arXiv 2406.17276).

    Args:
        expansion: Scored nodes, M.
        root: The newest token, integer, shape (1,).
        plan: N, and the shape of the search.
    """
    shape = plan.shape
    if shape.width == 1:
        tree = _chain(expansion, root, plan.num_nodes)
        return tree.scored(expansion.scores[: plan.num_nodes - 1])
    best = mx.argsort(-expansion.scores)[: plan.num_nodes - 1].astype(mx.int32)
    tree = _pack(expansion, root, best, 1 + best // _level_size(expansion, shape), shape)
    return tree.scored(expansion.scores[best])


def _chain(expansion: Expansion, root: mx.array, num_nodes: int) -> TokenTree:
    """The first nodes of a search of width 1: each is the only child of the one before."""
    drafts = expansion.tokens[: num_nodes - 1]
    tokens = mx.concatenate([root.astype(mx.int32), drafts])
    return TokenTree.chain(tokens, num_unmerged=expansion.tokens.shape[0] + 1)


def merge_beams(expansion: Expansion, root: mx.array, shape: DraftShape) -> TokenTree:
    """The paper's dynamic tree attention: the W beams with shared prefixes merged.

    Node for node what deduplicating and packing the W x L beams gives (``dedup_prefix`` and
    ``pack_beam`` of ml-recurrent-drafter). Of several beams the number of nodes is read, so the
    device is waited for.

    Args:
        expansion: Scored nodes, M.
        root: The newest token, integer, shape (1,).
        shape: W and L.
    """
    scored, level = expansion.tokens.shape[0], _level_size(expansion, shape)
    if shape.width == 1:
        return _chain(expansion, root, shape.length)
    lineage = [mx.arange(shape.width, dtype=mx.int32) + (scored - level)]
    for _ in range(shape.levels - 1):
        lineage.append(expansion.parents[lineage[-1]])
    on_beam = mx.zeros((scored,), dtype=mx.int32).at[mx.concatenate(lineage)].maximum(1)
    ids = mx.arange(scored, dtype=mx.int32)
    kept = mx.sort(mx.where(on_beam == 1, ids, scored))
    (count,) = to_ints(mx.sum(on_beam, keepdims=True))
    kept = kept[:count]
    return _pack(expansion, root, kept, 1 + kept // level, shape)


def _level_size(expansion: Expansion, shape: DraftShape) -> int:
    return expansion.tokens.shape[0] // shape.levels


def _pack(
    expansion: Expansion, root: mx.array, kept: mx.array, depths: mx.array, shape: DraftShape
) -> TokenTree:
    """Number nodes of an expansion 1 to N - 1 in the order of ``kept``, int32, shape (N - 1,)."""
    size = kept.shape[0] + 1
    # Node index by id of the expansion; the last entry is the root's, whose id is -1.
    nodes = mx.zeros((expansion.tokens.shape[0] + 1,), dtype=mx.int32)
    nodes = mx.put_along_axis(nodes, kept, mx.arange(1, size, dtype=mx.int32), axis=0)
    zero = mx.zeros((1,), dtype=mx.int32)
    parents = mx.concatenate([zero, nodes[expansion.parents[kept]]])
    return TokenTree(
        tokens=mx.concatenate([root.astype(mx.int32), expansion.tokens[kept]]),
        parents=parents,
        depths=mx.concatenate([zero, depths]),
        ancestors=ancestor_mask(parents, shape.levels),
        num_nodes=size,
        num_unmerged=1 + shape.width * shape.levels,
        max_depth=shape.levels,
    )
