"""The kernels as CUDA: nvcc keeps them in registers; rows and nodes do not depend on each other.

Axes: T rows of inputs, K inputs, N outputs or nodes of a tree.
"""

import mlx.core as mx
import pytest

from mlx_redrafter.kernels import small_t, tree_attention
from mlx_redrafter.kernels.metal_source import MAX_ROWS
from mlx_redrafter.kernels.small_t import as_integers
from mlx_redrafter.kernels.tree_attention import HEAD_SIZES, AttentionVariant
from mlx_redrafter.kernels.variant import (
    DENSE_ORDERS,
    DTYPES,
    PACKS,
    AnyVariant,
    DenseVariant,
    Variant,
)
from tests.helpers.oracles import node_paths
from tests.kernels.cuda import (
    MOST_REGISTERS,
    cuda_kernel,
    fused_by_choice,
    needs_nvcc,
    needs_nvidia,
    usage,
)
from tests.kernels.emulator import random_matrix

# Most rows with either size of tiles.
FULL = (5, MAX_ROWS)
SOME: list[AnyVariant] = [
    *(Variant(number, 64, "float16") for number in PACKS),
    Variant(4, 32, "float16", mode="mxfp4"),
    *(DenseVariant("float16", *order) for order in DENSE_ORDERS),
]
PARENTS = (0, 0, 1, 0, 3, 4)


@needs_nvcc
def test_sums_stay_in_registers(tmp_path):
    heads = [AttentionVariant(size, "float16") for size in HEAD_SIZES]
    variants = [*((variant, rows) for variant in SOME for rows in FULL), *heads]
    found = dict(zip(map(str, variants), usage(variants, tmp_path), strict=True))
    assert {name: one for name, one in found.items() if one.spilled} == {}
    assert {name: one for name, one in found.items() if one.registers > MOST_REGISTERS} == {}


@needs_nvcc
@pytest.mark.parametrize("dtype", ["float16", "float32"])
def test_all_rows_are_fused_alike(tmp_path, dtype):
    """Of a sum of two products the compiler may fuse either, for one row another than for two."""
    variants = [type(one)(**{**vars(one), "dtype": dtype}) for one in SOME]
    heads = [AttentionVariant(size, dtype) for size in HEAD_SIZES]
    products = [(variant, rows) for variant in variants for rows in (1, *FULL)]
    assert fused_by_choice([*products, *heads], tmp_path) == []


@pytest.fixture
def nvidia(monkeypatch: pytest.MonkeyPatch) -> None:
    """Kernels as CUDA in the place of Metal's."""
    monkeypatch.setattr(mx.fast, "metal_kernel", cuda_kernel)
    for module in (small_t, tree_attention):
        monkeypatch.setattr(module, "_kernel", module._kernel.__wrapped__)


@pytest.mark.usefixtures("nvidia")
@needs_nvidia
@pytest.mark.parametrize("variant", SOME, ids=str)
@pytest.mark.parametrize("dtype", DTYPES)
def test_rows_are_those_of_one_row_on_a_gpu(variant, dtype):
    """One row is computed by the same source for T = 1, which no program of this package uses."""
    variant = type(variant)(**{**vars(variant), "dtype": dtype})
    inputs = 3 * variant.block
    matrix = random_matrix(variant, 100, inputs)
    x = mx.random.normal((MAX_ROWS, inputs), key=mx.random.key(1)).astype(DTYPES[dtype])
    y = small_t.small_t(x, matrix, variant)
    alone = [small_t.small_t(x[row : row + 1], matrix, variant) for row in range(MAX_ROWS)]
    assert mx.array_equal(as_integers(y), as_integers(mx.concatenate(alone)))
    if isinstance(variant, Variant):
        size, number = variant.group_size, variant.bits
        weights = mx.dequantize(*matrix, group_size=size, bits=number, mode=variant.mode)
    else:
        (weights,) = matrix
    expected = x.astype(mx.float32) @ weights.astype(mx.float32).T
    assert mx.allclose(y.astype(mx.float32), expected, rtol=2e-2, atol=2e-2)


@pytest.mark.usefixtures("nvidia")
@needs_nvidia
@pytest.mark.parametrize("size", HEAD_SIZES)
@pytest.mark.parametrize("dtype", DTYPES)
def test_nodes_are_those_of_their_paths_on_a_gpu(size, dtype):
    """A path alone is a chain, for the same source."""
    rows = (1, 2, 70 + len(PARENTS), size)
    queries, keys, values = (
        mx.random.normal(shape, key=mx.random.key(seed)).astype(DTYPES[dtype])
        for seed, shape in enumerate([(1, 4, len(PARENTS), size), rows, rows])
    )
    y = tree_attention.tree_attention(queries, keys, values, mx.array(PARENTS), 0.1)
    for node, path in enumerate(node_paths(PARENTS)):
        seen = mx.array([*range(70), *(70 + one for one in path)])
        chain = mx.array([0, *range(len(path) - 1)])
        alone = tree_attention.tree_attention(
            queries[:, :, mx.array(path)], keys[:, :, seen], values[:, :, seen], chain, 0.1
        )
        found = as_integers(y[:, :, node])
        assert mx.array_equal(found, as_integers(alone[:, :, -1]))
