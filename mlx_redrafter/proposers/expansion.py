"""Selection of the nodes to verify among scored continuations, for proposers that score levels.

Axes: W beam width, L beam length, K nodes scored per level, M in all, N nodes of the tree.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
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
    """Build the tree of a plan, of merged beams or of the N - 1 most probable nodes.

    Those are ordered by probability after the root. In this order an accepted path often is the
    first nodes, whose K/V entries stay where they are. A child is never more probable than its
    parent and comes after it, so the best nodes, the first of equals preferred, always form a tree.
    It maximises the expected number of accepted drafts if the scores are true (OPT-Tree, arXiv
    2406.17276).

    Args:
        expansion: Scored nodes, M.
        root: The newest token, integer, shape (1,).
        plan: Shape of the search, the selection of nodes, and N.
    """
    if plan.shape.select == "beam":
        return merge_beams(expansion, root, plan.shape)
    return _tree(plan, _best(expansion, root, plan))


def build_trees(
    expansion: Expansion, roots: Sequence[mx.array], plan: DraftPlan
) -> list[TokenTree]:
    """Build the trees of several roots with the operations of one.

    Args:
        expansion: Scored nodes, each array with an axis of roots before its own.
        roots: The newest tokens, integer, shape (1,).
        plan: As in `build_tree`.
    """
    count = len(roots)
    if plan.shape.select == "beam":
        return [build_tree(expansion.of_root(i), root, plan) for i, root in enumerate(roots)]
    arrays = _best(expansion, mx.concatenate(list(roots))[:, None], plan)
    rows = zip(*(mx.split(array, count) for array in arrays), strict=True)
    return [_tree(plan, [array.squeeze(0) for array in row]) for row in rows]


def _best(expansion: Expansion, root: mx.array, plan: DraftPlan) -> list[mx.array]:
    """Choose the best nodes, for arrays with any axes before those of the nodes.

    Returns:
        Arrays of a `TokenTree`: tokens, scores and ``packed``; and, if the nodes are no chain,
        parents, depths and ancestors.
    """
    shape, count = plan.shape, plan.num_nodes - 1
    if shape.width == 1:
        tokens = mx.concatenate([root.astype(mx.int32), expansion.tokens[..., :count]], axis=-1)
        scores = expansion.scores[..., :count]
        return [tokens, scores, _packed(tokens, scores)]
    best = mx.argsort(-expansion.scores, axis=-1)[..., :count].astype(mx.int32)
    depths = 1 + best // _level_size(expansion, shape)
    tokens, parents, depths = _number(expansion, root, best, depths)
    scores = mx.take_along_axis(expansion.scores, best, axis=-1)
    ancestors = ancestor_mask(parents, shape.levels)
    return [tokens, scores, _packed(tokens, scores, parents, depths), parents, depths, ancestors]


def _packed(tokens: mx.array, scores: mx.array, *places: mx.array) -> mx.array:
    columns = [tokens[..., 1:], scores.view(mx.int32), *(array[..., 1:] for array in places)]
    return mx.concatenate(columns, axis=-1)


def _tree(plan: DraftPlan, arrays: Sequence[mx.array]) -> TokenTree:
    """Make a tree of the arrays of `_best`."""
    tokens, scores, packed, *places = arrays
    shape = plan.shape
    if not places:
        tree = TokenTree.chain(tokens, num_unmerged=1 + shape.levels)
    else:
        parents, depths, ancestors = places
        tree = TokenTree(
            tokens,
            parents,
            depths,
            ancestors,
            num_nodes=tokens.shape[0],
            num_unmerged=1 + shape.width * shape.levels,
            max_depth=shape.levels,
        )
    return replace(tree, scores=scores, packed=packed)


def merge_beams(expansion: Expansion, root: mx.array, shape: DraftShape) -> TokenTree:
    """Merge shared prefixes of the W beams: the paper's dynamic tree attention.

    The tree equals, node for node, the deduplicated and packed beams of ml-recurrent-drafter
    (``dedup_prefix`` and ``pack_beam``). With several beams the host reads the number of nodes, so
    it waits for the device.
    """
    if shape.width == 1:
        tokens = mx.concatenate([root.astype(mx.int32), expansion.tokens[: shape.levels]])
        return TokenTree.chain(tokens, num_unmerged=expansion.tokens.shape[0] + 1)
    scored, level = expansion.tokens.shape[0], _level_size(expansion, shape)
    lineage = [mx.arange(shape.width, dtype=mx.int32) + (scored - level)]
    for _ in range(shape.levels - 1):
        lineage.append(expansion.parents[lineage[-1]])
    on_beam = mx.zeros((scored,), dtype=mx.int32).at[mx.concatenate(lineage)].maximum(1)
    ids = mx.arange(scored, dtype=mx.int32)
    kept = mx.sort(mx.where(on_beam == 1, ids, scored))
    (count,) = to_ints(mx.sum(on_beam, keepdims=True))
    kept = kept[:count]
    tokens, parents, depths = _number(expansion, root, kept, 1 + kept // level)
    return TokenTree(
        tokens,
        parents,
        depths,
        ancestor_mask(parents, shape.levels),
        num_nodes=1 + count,
        num_unmerged=1 + shape.width * shape.levels,
        max_depth=shape.levels,
    )


def _level_size(expansion: Expansion, shape: DraftShape) -> int:
    return expansion.tokens.shape[-1] // shape.levels


def _number(
    expansion: Expansion, root: mx.array, kept: mx.array, depths: mx.array
) -> tuple[mx.array, mx.array, mx.array]:
    """Number nodes of an expansion 1 to N - 1 in the order of ``kept``, int32, shape (..., N - 1).

    Returns:
        Tokens, parents and depths of all nodes, the root's included, int32, shape (..., N).
    """
    # Node index by id of the expansion, and of the root, whose id is -1, at the end.
    nodes = mx.zeros((*kept.shape[:-1], expansion.tokens.shape[-1] + 1), dtype=mx.int32)
    numbers = mx.broadcast_to(mx.arange(1, kept.shape[-1] + 1, dtype=mx.int32), kept.shape)
    nodes = mx.put_along_axis(nodes, kept, numbers, axis=-1)
    above = mx.take_along_axis(expansion.parents, kept, axis=-1)
    zero = mx.zeros(root.shape, dtype=mx.int32)
    tokens = mx.take_along_axis(expansion.tokens, kept, axis=-1)
    return (
        mx.concatenate([root.astype(mx.int32), tokens], axis=-1),
        mx.concatenate([zero, mx.take_along_axis(nodes, above, axis=-1)], axis=-1),
        mx.concatenate([zero, depths], axis=-1),
    )
