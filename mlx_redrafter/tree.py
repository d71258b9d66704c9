"""Token trees: which drafts one forward pass of the target verifies, and who sees whom.

Axes: N nodes of the tree (node 0 is the root), L beam length, M nodes of the expansion.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import mlx.core as mx

from mlx_redrafter.config import TreeShape
from mlx_redrafter.host import to_ints
from mlx_redrafter.proposers.redrafter.beam import Expansion

# Trees of data-dependent size are padded to one of these, or to their bound.
STATIC_SIZES = (2, 3, 4, 5, 6, 8, 10, 12, 16, 20, 24, 32, 40, 48, 64, 96, 128, 192, 256, 384, 512)
NO_TOKEN = -1


@dataclass(frozen=True)
class TokenTree:
    """Drafts merged into one tree, parents before children, siblings distinct.

    Padding nodes have the token -1, which matches nothing, and hang below the root.

    Attributes:
        tokens: Token ids, int32, shape (N,).
        parents: Node index of each node's parent, int32, shape (N,); the root's is 0.
        depths: Edges from the root, int32, shape (N,).
        ancestors: Ancestor mask, bool, shape (N, N): row n marks n and its ancestors.
        num_nodes: Nodes that are no padding, root included; N unless beams were merged.
        num_unmerged: Tokens of the beams before their prefixes were merged, root included.
        max_depth: No node is deeper; None where that is not known.
        scores: Of the drafts, nodes 1 to N - 1: natural logarithm of the probability that the
            drafter gives to a node and all above it, float32, shape (N - 1,); nodes are in its
            order. None where they are not.
    """

    tokens: mx.array
    parents: mx.array
    depths: mx.array
    ancestors: mx.array
    num_nodes: int
    num_unmerged: int
    max_depth: int | None = None
    scores: mx.array | None = None

    @property
    def arrays(self) -> tuple[mx.array, ...]:
        """What the device has to compute for this tree."""
        known = self.tokens, self.parents, self.depths, self.ancestors
        return known if self.scores is None else (*known, self.scores)

    def first(self, num_nodes: int) -> TokenTree:
        """The tree of the first ``num_nodes`` nodes, none of them padding."""
        return replace(
            self,
            tokens=self.tokens[:num_nodes],
            parents=self.parents[:num_nodes],
            depths=self.depths[:num_nodes],
            ancestors=self.ancestors[:num_nodes, :num_nodes],
            num_nodes=num_nodes,
            scores=None if self.scores is None else self.scores[: num_nodes - 1],
        )


def best_nodes(expansion: Expansion, root: mx.array, shape: TreeShape) -> TokenTree:
    """The tree of the N - 1 most probable nodes of an expansion, the root and then by probability.

    Accepted paths then often are the first nodes in order, whose K/V rows stay where they are. A
    child is never more probable than its parent and comes after it, so the best nodes, the first
    of equals preferred, always form a tree. It maximises the expected number of accepted drafts
    when the scores are true (OPT-Tree, arXiv 2406.17276).

    Args:
        expansion: M scored nodes.
        root: The newest token, integer, shape (1,).
        shape: Says N.
    """
    assert shape.tree_nodes is not None
    if shape.beam_width == 1:
        return _chain(expansion, root, shape.tree_nodes)
    best = mx.argsort(-expansion.scores)[: shape.tree_nodes - 1].astype(mx.int32)
    tree = _pack(expansion, root, best, 1 + best // _level_size(expansion, shape), shape)
    return replace(tree, scores=expansion.scores[best])


def _chain(expansion: Expansion, root: mx.array, num_nodes: int) -> TokenTree:
    """The first nodes of a search of width 1: each is the only child of the one before."""
    nodes = mx.arange(num_nodes, dtype=mx.int32)
    before = mx.maximum(nodes - 1, 0)
    return TokenTree(
        tokens=mx.concatenate([root.astype(mx.int32), expansion.tokens[: num_nodes - 1]]),
        parents=before,
        depths=nodes,
        ancestors=nodes[:, None] >= nodes,
        num_nodes=num_nodes,
        num_unmerged=expansion.tokens.shape[0] + 1,
        max_depth=expansion.tokens.shape[0],
        scores=expansion.scores[: num_nodes - 1],
    )


def merge_beams(expansion: Expansion, root: mx.array, shape: TreeShape) -> TokenTree:
    """The paper's dynamic tree attention: the W beams with shared prefixes merged.

    Node for node what deduplicating and packing the W x L beams gives (``dedup_prefix`` and
    ``pack_beam`` of ml-recurrent-drafter). Reads the number of nodes, so the device is waited for.

    Args:
        expansion: M scored nodes.
        root: The newest token, integer, shape (1,).
        shape: Says W and L.
    """
    scored, level = expansion.tokens.shape[0], _level_size(expansion, shape)
    lineage = [mx.arange(shape.beam_width, dtype=mx.int32) + (scored - level)]
    for _ in range(shape.draft_length - 1):
        lineage.append(expansion.parents[lineage[-1]])
    on_beam = mx.zeros((scored,), dtype=mx.int32).at[mx.concatenate(lineage)].maximum(1)
    ids = mx.arange(scored, dtype=mx.int32)
    kept = mx.sort(mx.where(on_beam == 1, ids, scored))
    (count,) = to_ints(mx.sum(on_beam, keepdims=True))
    size = next((s for s in STATIC_SIZES if s > count), shape.max_nodes)
    kept = kept[: min(size, shape.max_nodes) - 1]
    padded = Expansion(
        tokens=mx.concatenate([expansion.tokens, mx.array([NO_TOKEN], dtype=mx.int32)]),
        scores=expansion.scores,
        parents=mx.concatenate([expansion.parents, mx.array([-1], dtype=mx.int32)]),
    )
    depths = mx.where(kept < scored, 1 + kept // level, 0)
    return replace(_pack(padded, root, kept, depths, shape), num_nodes=count + 1)


def _level_size(expansion: Expansion, shape: TreeShape) -> int:
    return expansion.tokens.shape[0] // shape.draft_length


def _pack(
    expansion: Expansion, root: mx.array, kept: mx.array, depths: mx.array, shape: TreeShape
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
        ancestors=ancestor_mask(parents, shape.draft_length),
        num_nodes=size,
        num_unmerged=1 + shape.beam_width * shape.draft_length,
        max_depth=shape.draft_length,
    )


def ancestor_mask(parents: mx.array, depth: int) -> mx.array:
    """Mark every node's ancestors and itself.

    Args:
        parents: Node index of each node's parent, shape (N,); the root's is 0.
        depth: Depth of the deepest node.

    Returns:
        bool, shape (N, N), true at [n, m] when m is n or above it.
    """
    nodes = mx.arange(parents.shape[0], dtype=mx.int32)
    chain = [nodes]
    for _ in range(depth):
        chain.append(parents[chain[-1]])
    return mx.any(mx.stack(chain)[..., None] == nodes, axis=0)
