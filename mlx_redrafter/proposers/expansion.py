"""Selection of the nodes to verify among scored continuations, for proposers that score levels.

Axes: W beam width, L beam length, K nodes scored per level, M in all, N nodes of the tree.
"""

from __future__ import annotations

from typing import NamedTuple

import mlx.core as mx

from mlx_redrafter.device_read import to_ints
from mlx_redrafter.draft_plan import DraftPlan, DraftShape
from mlx_redrafter.trees.tree import TokenTree, ancestor_mask


class Expansion(NamedTuple):
    """Nodes that a search scored, equally many per level and the best first.

    Node ids count from 0 in their order. The search expanded the first W of every level; those of
    the last level are the ends of the W beams.

    Attributes:
        tokens: Token ids, int32, shape (M,).
        scores: Sum of natural log-probabilities from the root, float32, shape (M,).
        parents: Node id of the parent, int32, shape (M,); -1 for the root.
    """

    tokens: mx.array
    scores: mx.array
    parents: mx.array

    def of_root(self, root: int) -> Expansion:
        """Select the nodes of one root from arrays with an axis of roots before their own."""
        return Expansion(*(array[root] for array in self))

    @property
    def alone(self) -> Expansion:
        """The nodes of the only root, in fewer operations than `of_root`."""
        return Expansion(*(array.squeeze(0) for array in self))


def build_tree(expansion: Expansion, root: mx.array, plan: DraftPlan) -> TokenTree:
    """Build the tree of a plan, of the best nodes or of merged beams.

    Args:
        expansion: Scored nodes, M.
        root: The newest token, integer, shape (1,).
        plan: Shape of the search, the selection of nodes, and N.
    """
    if plan.shape.select == "beam":
        return merge_beams(expansion, root, plan.shape)
    return best_nodes(expansion, root, plan)


def best_nodes(expansion: Expansion, root: mx.array, plan: DraftPlan) -> TokenTree:
    """Build the tree of the N - 1 most probable nodes, ordered by probability after the root.

    In this order an accepted path often is the first nodes, whose K/V entries stay where they are.
    A child is never more probable than its parent and comes after it, so the best nodes, the first
    of equals preferred, always form a tree. It maximises the expected number of accepted drafts
    if the scores are true (OPT-Tree, arXiv 2406.17276).
    """
    shape = plan.shape
    if shape.width == 1:
        tree = _chain(expansion, root, plan.num_nodes)
        return tree.scored(expansion.scores[: plan.num_nodes - 1])
    best = mx.argsort(-expansion.scores)[: plan.num_nodes - 1].astype(mx.int32)
    tree = _pack(expansion, root, best, 1 + best // _level_size(expansion, shape), shape)
    return tree.scored(expansion.scores[best])


def _chain(expansion: Expansion, root: mx.array, num_nodes: int) -> TokenTree:
    """Build the tree of a search of width 1, in which each node is the child of the one before."""
    drafts = expansion.tokens[: num_nodes - 1]
    tokens = mx.concatenate([root.astype(mx.int32), drafts])
    return TokenTree.chain(tokens, num_unmerged=expansion.tokens.shape[0] + 1)


def merge_beams(expansion: Expansion, root: mx.array, shape: DraftShape) -> TokenTree:
    """Merge shared prefixes of the W beams: the paper's dynamic tree attention.

    The tree equals, node for node, the deduplicated and packed beams of ml-recurrent-drafter
    (``dedup_prefix`` and ``pack_beam``). With several beams the host reads the number of nodes, so
    it waits for the device.
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
