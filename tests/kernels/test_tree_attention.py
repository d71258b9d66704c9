"""Every node of a tree has the bits of MLX's attention for one token, in the emulator.

Axes: N nodes of a tree, S committed tokens, D head size.
"""

import mlx.core as mx
import pytest

from mlx_redrafter.kernels.small_t import as_integers
from mlx_redrafter.kernels.tree_attention import AttentionVariant, attention_source
from mlx_redrafter.kernels.variant import DTYPES
from tests.golden.record_metal import ATTENTION_VARIANTS
from tests.helpers.oracles import node_paths
from tests.kernels.attention_emulator import AttentionKernels
from tests.kernels.emulator import FUSED, SIMD_ORDERS
from tests.kernels.stand_in import emulated_attention

# A branch from the root, one from its middle, and nodes that stand apart from their parents.
PARENTS = [0, 0, 1, 2, 1]
# More than a key per SIMD group, a group without any, and the tree alone.
COMMITTED = (70, 29, 0)
# What may be wrong with a source, one for each variant so that all are compiled at once.
MUTATIONS = [
    ("int up = committed + depth - i;", "int up = committed + depth - i - 1;"),
    ("i <= committed + depth", "i < committed + depth"),
    ("int i = group;", "int i = group ^ (group >> 1);"), ("row += committed;", ""),
    ("scale * float(", "float("), ("total = total * factor", "total = total"),
    ("sums[j] = sums[j] * factor", "sums[j] = sums[j]"), ("totals[lane] * factor", "totals[lane]"),
    ("32 + lane] * factor", "32 + lane]"),
    ("head / (queries_shape[1] / keys_shape[1])", "head % keys_shape[1]"),
    ("node * queries_strides[2]", "head * queries_strides[2]"),
    ("key_head * values_strides[1]", "0"),
]  # fmt: skip


def different_nodes(
    kernels: AttentionKernels, variant: AttentionVariant, committed: int, order: int = 0
) -> list[int]:
    """Nodes with some bit that is not that of one token whose cache is the node's path."""
    rows = (2, committed + len(PARENTS))  # two heads share one of keys
    queries, keys, values = (
        mx.random.normal((1, *shape, variant.head_size), key=mx.random.key(seed)).astype(
            DTYPES[variant.dtype]
        )
        for seed, shape in enumerate([(4, len(PARENTS)), rows, rows])
    )
    parents, scale = mx.array(PARENTS), 0.3
    y = kernels.ours(queries, keys, values, parents=parents, scale=scale, order=order)
    found = []
    for node, path in enumerate(node_paths(PARENTS)):
        seen = mx.array([*range(committed), *(committed + one for one in path)])
        own = queries[:, :, node : node + 1], keys[:, :, seen], values[:, :, seen]
        alone = as_integers(kernels.stock(*own, scale=scale, order=order))
        if not mx.array_equal(as_integers(y[:, :, node : node + 1]), alone):
            found.append(node)
    return found


@pytest.mark.parametrize("variant", ATTENTION_VARIANTS, ids=str)
def test_nodes_have_the_bits_of_one_token(variant):
    for order, committed in zip(SIMD_ORDERS, COMMITTED, strict=True):
        assert different_nodes(emulated_attention(), variant, committed, order) == []


def test_nodes_have_the_bits_of_one_token_where_the_compiler_fuses():
    variants = [AttentionVariant(64, "float32"), AttentionVariant(96, "float16")]
    fused = AttentionKernels({one: attention_source(one) for one in variants}, FUSED)
    for variant in variants:
        assert different_nodes(fused, variant, COMMITTED[0]) == []


def test_wrong_sources_differ():
    pairs = list(zip(ATTENTION_VARIANTS, MUTATIONS, strict=True))
    sources = {variant: attention_source(variant) for variant, _ in pairs}
    assert [wrong for variant, wrong in pairs if wrong[0] not in sources[variant]] == []
    kernels = AttentionKernels({one: sources[one].replace(*wrong) for one, wrong in pairs})
    missed = [w for one, w in pairs if not different_nodes(kernels, one, COMMITTED[0])]
    assert missed == []


def test_the_emulated_kernel_attends():
    shapes = [(1, 4, 1, 64), (1, 2, 40, 64), (1, 2, 40, 64)]
    rows = [mx.random.normal(shape) for shape in shapes]
    y = emulated_attention().stock(*rows, scale=0.125)
    expected = mx.fast.scaled_dot_product_attention(*rows, scale=0.125)
    assert mx.allclose(y, expected, atol=1e-5)
