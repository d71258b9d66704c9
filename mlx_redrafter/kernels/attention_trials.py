"""Trials of `tree_attention` on the user's machine.

The kernel qualifies if its bits are those of MLX's attention for one token whose cache is a node's
path, and if it is no slower than MLX's attention with a mask.

Axes: N nodes of a tree, S committed tokens, D head size.
"""

import mlx.core as mx

from mlx_redrafter.kernels.attention import AttentionShape
from mlx_redrafter.kernels.small_t import as_integers
from mlx_redrafter.kernels.tree_attention import tree_attention
from mlx_redrafter.kernels.trial import KernelTrial, Times, time_interleaved
from mlx_redrafter.kernels.variant import DTYPES
from mlx_redrafter.trees.tree import ancestor_mask

# Parents in a tree with branches whose nodes stand apart from their parents.
PARENTS = (0, 0, 0, 1, 2, 3, 3, 5, 4, 7, 7, 0, 6, 11, 9, 14)
# Maximum numbers of keys that MLX reads in one pass: if heads share keys, and on Max and Ultra
# chips. For more keys MLX divides them by other rules.
MAX_KEYS = (4095, 1023)
# Committed tokens of two short comparisons: less than one key per SIMD group, and a few of them.
FEW_KEYS = (5, 200)


class AttentionTrial(KernelTrial[int]):
    """A trial for a shape of attention; ``equal`` is the maximum number of keys with equal bits."""

    # Maximum share of MLX's time: 1, with a margin for timing noise.
    max_time = 1.05
    reference = "MLX's attention for one token"
    shape: AttentionShape

    def find_equal(self) -> int | None:
        """Return the first of `MAX_KEYS` up to which the bits are equal."""
        depth = max(len(_path(node)) for node in range(len(PARENTS)))
        if not all(_is_equal(self.shape, committed) for committed in FEW_KEYS):
            return None
        return next((keys for keys in MAX_KEYS if _is_equal(self.shape, keys - depth)), None)

    def measure(self, equal: int, rows: int) -> Times:
        queries, keys, values = probe(self.shape, equal - len(PARENTS))
        queries, scale = mx.contiguous(queries[:, :, :rows]), self.shape.head_size**-0.5
        parents = mx.array(PARENTS[:rows])
        committed = mx.ones((rows, equal - rows), dtype=mx.bool_)
        mask = mx.concatenate([committed, ancestor_mask(parents, rows)], axis=1)
        mx.eval(queries, keys, values, mask)
        attend = mx.fast.scaled_dot_product_attention
        return time_interleaved(
            lambda: [attend(queries, keys, values, scale=scale, mask=mask)],
            lambda: [tree_attention(queries, keys, values, parents, scale)],
        )

    def timing_key(self, equal: int) -> object:
        return "tree_attention", equal

    @property
    def outcome(self) -> str:
        return f"equal: up to {self.equal} keys"


def probe(shape: AttentionShape, committed: int) -> tuple[mx.array, mx.array, mx.array]:
    """Make random queries, keys and values of the tree `PARENTS` after ``committed`` tokens.

    Queries are long, so that a few keys weigh more than all others together.
    """
    nodes, size = len(PARENTS), shape.head_size
    entries = (1, shape.key_heads, committed + nodes, size)
    queries, keys, values = (
        mx.random.normal(one, key=mx.random.key(seed)).astype(DTYPES[shape.dtype])
        for seed, one in enumerate([(1, shape.heads, nodes, size), entries, entries])
    )
    return 3 * queries, keys, values


def _is_equal(shape: AttentionShape, committed: int) -> bool:
    """Whether every node has the bits of one token after its path; blocks until computed."""
    queries, keys, values = probe(shape, committed)
    scale = shape.head_size**-0.5
    y = tree_attention(queries, keys, values, mx.array(PARENTS), scale)
    same = []
    for node in range(len(PARENTS)):
        seen = mx.array([*range(committed), *(committed + above for above in _path(node))])
        alone = mx.fast.scaled_dot_product_attention(
            queries[:, :, node : node + 1], keys[:, :, seen], values[:, :, seen], scale=scale
        )
        same.append(mx.all(as_integers(y[:, :, node : node + 1]) == as_integers(alone)))
    return bool(mx.all(mx.stack(same)).item())


def _path(node: int) -> list[int]:
    return [0] if node == 0 else [*_path(PARENTS[node]), node]
