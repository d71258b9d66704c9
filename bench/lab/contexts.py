"""Models, caches and trees of any size for measurements.

Their weights and tokens are arbitrary, which does not change the cost of a pass.
"""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import mlx.core as mx

from mlx_redrafter.target.caches.tree_cache import TreeCache
from mlx_redrafter.target.target import Target, TargetOutputs
from mlx_redrafter.trees.tree import TokenTree

# Sizes of a random, narrow model.
COMMON: Mapping[str, Any] = {
    "vocab_size": 256,
    "hidden_size": 64,
    "intermediate_size": 64,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "rms_norm_eps": 1e-5,
    "max_position_embeddings": 4096,
    "rope_theta": 10000.0,
    "tie_word_embeddings": False,
}
# Prompt tokens per forward pass. Fewer than mlx-lm's 2,048, so that the memory of attention scores,
# which plain and drafted decoding need, does not hide the difference.
PREFILL_STEP = 512


def prefill(
    target: Target, prompt: mx.array, cache: TreeCache, step_size: int = PREFILL_STEP
) -> TargetOutputs:
    """Process a prompt in chunks, and its last token alone as mlx-lm does.

    Blocks until MLX has computed the chunks. Returns the outputs of the last token, which MLX has
    not computed yet.
    """
    for start in range(0, prompt.shape[0] - 1, step_size):
        chunk = prompt[start : min(start + step_size, prompt.shape[0] - 1)]
        target.process_chunk(chunk, cache, ())
        mx.eval([layer.state for layer in cache.stock])
    return target.advance(prompt[-1:], cache)


def bushy_tree(size: int) -> TokenTree:
    """Make a binary tree of ``size`` nodes, filled level by level."""
    tree = TokenTree.of(range(size), [max(node - 1, 0) // 2 for node in range(size)])
    mx.eval(tree.arrays)
    return tree


@contextmanager
def gpu_like() -> Iterator[None]:
    """Make one operation of each norm, rotation and attention, with other numbers.

    The CPU back end makes them of many operations, a GPU's has one for each.
    """

    def norm(x: mx.array, weight: mx.array | None, eps: float) -> mx.array:
        return mx.stop_gradient(x) if weight is None else mx.depends([x], [weight])[0]

    def rotate(x: mx.array, dims: int, **options: Any) -> mx.array:
        return mx.stop_gradient(x)

    def attend(q: mx.array, k: mx.array, v: mx.array, **options: Any) -> mx.array:
        mask = options.get("mask")
        return mx.depends([q], [k, v, mask] if isinstance(mask, mx.array) else [k, v])[0]

    with patch.multiple(mx.fast, rms_norm=norm, rope=rotate, scaled_dot_product_attention=attend):
        yield
