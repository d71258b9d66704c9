"""Search for drafts, as arrays of fixed shape, with any network that scores them level by level.

Axes: R roots, W beam width, L beam length (root included), K nodes scored per level, M in all, V
tokens that the network proposes, N nodes of the tree.

A search never duplicates a prefix: its nodes are distinct continuations of distinct prefixes, so
they are already a tree. `build_tree` selects those that the target verifies.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, NamedTuple, Protocol

import mlx.core as mx

from mlx_redrafter.decoding.sampling import top_k
from mlx_redrafter.device_read import to_ints
from mlx_redrafter.draft_plan import DraftPlan, DraftShape
from mlx_redrafter.trees.tree import TokenTree, ancestor_mask

# Replaces log-probabilities that are NaN or minus infinity, so that order stays defined.
LEAST_LOG_PROB = -1e30
# Weight of the target's noise for networks that are not calibrated. All of it: their distribution
# is their own, not one that was fitted to greedy choices.
COUPLING_WEIGHT = 1.0


class NoiseRank(Protocol):
    """A function that ranks tokens after nodes with the target's noise."""

    def __call__(
        self, log_probs: mx.array, depth: int | mx.array, /, *, token_ids: mx.array | None = ...
    ) -> mx.array:
        """Return scores, given log-probabilities and the nodes' depth or depths, int32.

        ``token_ids`` are those of the columns if not of all rows of the head.
        """


def rank_from(starts: mx.array, rank: NoiseRank | None) -> NoiseRank | None:
    """Return the rank of several roots' rows, equally many of each, with depths from ``starts``."""
    if rank is None:
        return None

    def rank_rows(log_probs: mx.array, depth: int | mx.array, **options: Any) -> mx.array:
        depths = mx.repeat(starts, log_probs.shape[0] // starts.shape[0]) + depth
        return rank(log_probs, depths, **options)

    return rank_rows


def log_probs(logits: mx.array, num_rows: int | None = None) -> mx.array:
    """Return natural log-probabilities of the first tokens, float32, shape (W, ``num_rows``)."""
    logits = logits[:, :num_rows].astype(mx.float32)
    return logits - mx.logsumexp(logits, axis=-1, keepdims=True)


def bounded(scores: mx.array) -> mx.array:
    """Return the scores with NaN and all below `LEAST_LOG_PROB` replaced by it."""
    return mx.where(scores > LEAST_LOG_PROB, scores, LEAST_LOG_PROB)


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


class LevelScorer(Protocol):
    """A network about to draft after R roots, mostly one; it scores one level after another."""

    def first(self) -> mx.array:
        """Return natural log-probabilities of tokens after the roots, float32, shape (R, V)."""

    def following(self, beams: mx.array | None, tokens: mx.array, depth: int) -> mx.array:
        """Return log-probabilities of the tokens after the beams, one token longer each, (R W, V).

        ``beams`` has the index of the beam that each continues, int32, shape (R W,); those of a
        root are neighbours. None if each continues that of its own index, or the only root. The
        newest tokens of the beams, int32, shape (R W,), are at ``depth``, 1 for children of roots.
        """

    def to_token_ids(self, rows: mx.array) -> mx.array:
        """Return token ids, int32, of indices into V; any shape."""


def search_all(levels: LevelScorer, shape: DraftShape, rank: NoiseRank | None = None) -> Expansion:
    """Score the best continuations of every root, and those of the W best nodes of every level.

    Every root has a search of its own, in the same calls of the network. The host reads nothing.
    ``rank`` replaces the network's log-probabilities, shape (R W, V). The shape has W, L and the
    number of nodes to score per level, at most V. Arrays of the result have an axis of R before
    their own.
    """
    width, log_probs = shape.width, levels.first()
    roots, rows = log_probs.shape
    count = min(shape.level_nodes, rows)

    def ranked(log_probs: mx.array, depth: int) -> mx.array:
        return log_probs if rank is None else rank(log_probs, depth)

    def best_of(scores: mx.array) -> tuple[mx.array, mx.array]:
        return top_k(bounded(scores).reshape(roots, -1), count)

    scores, chosen = best_of(ranked(log_probs, 0))
    tokens = levels.to_token_ids(chosen)
    found = [(tokens, scores, mx.full((roots, count), -1, dtype=mx.int32))]
    first_beams = mx.arange(roots, dtype=mx.int32)[:, None]
    beams = None if 1 in (roots, width) else mx.repeat(first_beams, width)
    for depth in range(1, shape.levels):
        newest = tokens[:, :width].reshape(-1)
        log_probs = ranked(levels.following(beams, newest, depth), depth)
        scores, chosen = best_of(scores[:, :width].reshape(-1, 1) + log_probs)
        chosen = chosen.astype(mx.int32)
        if width == 1:
            parents = mx.full((roots, 1), depth - 1, dtype=mx.int32)
        else:
            # Not mx.divmod, which aborts the process under mx.vmap (MLX 0.32).
            above, chosen = chosen // rows, chosen % rows
            parents = above + (depth - 1) * count
            beams = (above[:, :width] + first_beams * width).reshape(-1)
        tokens = levels.to_token_ids(chosen)
        found.append((tokens, scores, parents))

    return Expansion(*(mx.concatenate(list(parts), axis=1) for parts in zip(*found, strict=True)))


def build_tree(expansion: Expansion, root: mx.array, plan: DraftPlan) -> TokenTree:
    """Build the tree of a plan, of merged beams or of the N - 1 most probable nodes.

    Those are ordered by probability after the root, an integer of shape (1,). In this order an
    accepted path often is the first nodes, whose K/V entries stay where they are. A child is never
    more probable than its parent and comes after it, so the best nodes, the first of equals
    preferred, always form a tree. It maximises the expected number of accepted drafts if the scores
    are true (OPT-Tree, arXiv 2406.17276).
    """
    if plan.shape.select == "beam":
        return merge_beams(expansion, root, plan.shape)
    return _tree(plan, _best(expansion, root, plan))


def build_trees(
    expansion: Expansion, roots: Sequence[mx.array], plan: DraftPlan
) -> list[TokenTree]:
    """Build the trees of several roots, each of shape (1,), with the operations of `build_tree`."""
    count = len(roots)
    if plan.shape.select == "beam":
        return [build_tree(expansion.of_root(i), root, plan) for i, root in enumerate(roots)]
    arrays = _best(expansion, mx.concatenate(list(roots))[:, None], plan)
    rows = zip(*(mx.split(array, count) for array in arrays), strict=True)
    return [_tree(plan, [array.squeeze(0) for array in row]) for row in rows]


def _best(expansion: Expansion, root: mx.array, plan: DraftPlan) -> list[mx.array]:
    """Choose the best nodes, for arrays with any axes before those of the nodes.

    Return arrays of a `TokenTree`: tokens and ``packed``; and, if the nodes are no chain, parents,
    depths and ancestors.
    """
    shape, count = plan.shape, plan.num_nodes - 1
    if shape.width == 1:
        tokens = mx.concatenate([root.astype(mx.int32), expansion.tokens[..., :count]], axis=-1)
        return [tokens, _packed(tokens, expansion.scores[..., :count])]
    best = mx.argsort(-expansion.scores, axis=-1)[..., :count].astype(mx.int32)
    depths = 1 + best // (expansion.tokens.shape[-1] // shape.levels)
    tokens, parents, depths = _number(expansion, root, best, depths)
    scores = mx.take_along_axis(expansion.scores, best, axis=-1)
    ancestors = ancestor_mask(parents, shape.levels)
    return [tokens, _packed(tokens, scores, parents, depths), parents, depths, ancestors]


def _packed(tokens: mx.array, scores: mx.array, *places: mx.array) -> mx.array:
    columns = [tokens[..., 1:], scores.view(mx.int32), *(array[..., 1:] for array in places)]
    return mx.concatenate(columns, axis=-1)


def _tree(plan: DraftPlan, arrays: Sequence[mx.array]) -> TokenTree:
    tokens, packed, *places = arrays
    if not places:
        return replace(TokenTree.chain(tokens), packed=packed)
    parents, depths, ancestors = places
    sizes = tokens.shape[0], plan.shape.levels
    return TokenTree(tokens, parents, depths, ancestors, *sizes, packed)


def merge_beams(expansion: Expansion, root: mx.array, shape: DraftShape) -> TokenTree:
    """Merge shared prefixes of the W beams: the paper's dynamic tree attention.

    The tree equals, node for node, the deduplicated and packed beams of ml-recurrent-drafter. With
    several beams the host reads the number of nodes, so it waits for the device.
    """
    if shape.width == 1:
        tokens = mx.concatenate([root.astype(mx.int32), expansion.tokens[: shape.levels]])
        return TokenTree.chain(tokens)
    scored = expansion.tokens.shape[0]
    level = scored // shape.levels
    lineage = [mx.arange(shape.width, dtype=mx.int32) + (scored - level)]
    for _ in range(shape.levels - 1):
        lineage.append(expansion.parents[lineage[-1]])
    on_beam = mx.zeros((scored,), dtype=mx.int32).at[mx.concatenate(lineage)].maximum(1)
    ids = mx.arange(scored, dtype=mx.int32)
    kept = mx.sort(mx.where(on_beam == 1, ids, scored))
    (count,) = to_ints(mx.sum(on_beam, keepdims=True))
    kept = kept[:count]
    tokens, parents, depths = _number(expansion, root, kept, 1 + kept // level)
    ancestors = ancestor_mask(parents, shape.levels)
    return TokenTree(tokens, parents, depths, ancestors, tokens.shape[0], shape.levels)


def _number(
    expansion: Expansion, root: mx.array, kept: mx.array, depths: mx.array
) -> tuple[mx.array, mx.array, mx.array]:
    """Number nodes of an expansion 1 to N - 1 in the order of ``kept``, int32, shape (..., N - 1).

    Return tokens, parents and depths of all nodes, the root's included, int32, shape (..., N).
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
