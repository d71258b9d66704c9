"""Every row of `small_t` has the bits of MLX's kernel for one row, in the emulator.

Axes: T rows of inputs, K inputs, N outputs.
"""

from collections.abc import Callable, Sequence
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import pytest

from mlx_redrafter.kernels import trials
from mlx_redrafter.kernels.attention import AttentionShape
from mlx_redrafter.kernels.layers import layers_by_shape
from mlx_redrafter.kernels.metal_source import MAX_ROWS
from mlx_redrafter.kernels.small_t import ROWS, as_integers, small_t
from mlx_redrafter.kernels.tree_attention import HEAD_SIZES, tree_attention
from mlx_redrafter.kernels.trials import AttentionTrial, ProductTrial
from mlx_redrafter.kernels.variant import (
    DENSE_ORDERS,
    DTYPES,
    MANY,
    PACKS,
    AnyVariant,
    DenseShape,
    DenseVariant,
    Variant,
)
from tests.golden.record_metal import DENSE_VARIANTS, RECORDS, VARIANTS
from tests.kernels.emulator import FUSED, ROUNDED, SIMD_ORDERS, Kernels, random_matrix
from tests.kernels.stand_in import emulated, run_emulated

# What the tests compare: of weights that are rarely seen, a sample.
COMMON = (4, 8)
SAMPLE: list[AnyVariant] = [
    variant
    for variant in VARIANTS
    if variant.bits in COMMON
    or (variant.group_size, variant.dtype, variant.order)
    in ((64, "float16", "qmv_fast"), (32, "bfloat16", "qmv"), (128, "float32", "qmv_fast"))
] + DENSE_VARIANTS
LAUNCHED = range(2, MAX_ROWS + 1)
# A number of rows for either size of tiles; sources for all dtypes differ in a name only.
FEW = (3, 8)
OUTPUTS = 13  # no multiple of a tile or a threadgroup


def _launched(variant: AnyVariant) -> Sequence[int]:
    is_common = isinstance(variant, DenseVariant) or variant.bits in COMMON
    return LAUNCHED if variant.dtype == "float16" and is_common else FEW


@pytest.fixture(scope="module")
def kernels() -> Kernels:
    """All variants of the sample."""
    return emulated((variant, t) for variant in SAMPLE for t in _launched(variant))


def different_rows(
    kernels: Kernels,
    variant: AnyVariant,
    rows: Sequence[int],
    order: int = 0,
    size: tuple[int, int] | None = None,
) -> list[int]:
    """Values of T for which some bit is not that of one row at a time."""
    inputs = 2 * variant.block
    if isinstance(variant, DenseVariant):
        inputs += 5  # some lanes have nothing in the last block, and one has a part
    elif variant.order == "qmv":
        inputs -= variant.group_size  # some lanes have nothing in the last block
    matrix = random_matrix(variant, *(size or (OUTPUTS, inputs)))
    shape = ROWS[-1], size[1] if size else inputs
    x = mx.random.normal(shape, key=mx.random.key(1)).astype(DTYPES[variant.dtype])
    expected = as_integers(kernels.stock(variant, x, *matrix, order=order))
    found = {t: as_integers(small_t(x[:t], matrix, variant)) for t in rows}
    return [t for t, y in found.items() if not mx.array_equal(y, expected[:t])]


@pytest.mark.parametrize("variant", SAMPLE, ids=str)
def test_rows_have_the_bits_of_one_row(kernels, monkeypatch, variant):
    has_all = _launched(variant) is LAUNCHED
    rows = ROWS if has_all else (*FEW, 2 * MAX_ROWS)
    for order in SIMD_ORDERS if has_all else SIMD_ORDERS[::2]:
        run_emulated(monkeypatch, kernels, order)
        assert different_rows(kernels, variant, rows, order) == []


@pytest.mark.parametrize(
    "variants",
    [
        *(
            [Variant(number, 64, "float32", "qmv_fast"), Variant(number, 64, "float16", "qmv")]
            for number in PACKS
        ),
        [DenseVariant("float32", *order) for order in DENSE_ORDERS],
        [Variant(4, 32, dtype, mode="mxfp4") for dtype in ("float16", "bfloat16")],
    ],
    ids=lambda variants: str(variants[0]),
)
def test_rows_have_the_bits_of_one_row_where_the_compiler_fuses(monkeypatch, variants):
    fused = emulated([(variant, t) for variant in variants for t in FEW], flags=FUSED)
    run_emulated(monkeypatch, fused)
    for variant in variants:
        assert different_rows(fused, variant, FEW) == []


def test_the_compiler_fuses():
    variant = DenseVariant("float32")
    (weight,) = random_matrix(variant, OUTPUTS, 4 * variant.block)
    x = mx.random.normal((1, 4 * variant.block))
    rounded, fused = (
        emulated([(variant, 2)], flags=flags).stock(variant, x, weight)
        for flags in (ROUNDED, FUSED)
    )
    assert not mx.array_equal(rounded, fused)


@pytest.mark.parametrize(
    "variant",
    [
        Variant(4, 64, "float32"),
        Variant(4, 32, "float32", mode="mxfp4"),
        *(DenseVariant("float32", *order) for order in DENSE_ORDERS),
    ],
    ids=str,
)
def test_the_emulated_kernel_computes_the_product(kernels, variant):
    matrix = random_matrix(variant, OUTPUTS, 1024)
    x = mx.random.normal((3, 1024))
    if isinstance(variant, DenseVariant):
        expected = x @ matrix[0].T
    else:
        matrix[1][0, 0] = 0  # the least power of two in mxfp4
        how = {"group_size": variant.group_size, "bits": variant.bits, "mode": variant.mode}
        expected = mx.quantized_matmul(x, *matrix, **how)
    assert mx.allclose(kernels.stock(variant, x, *matrix), expected, atol=1e-5)


def _product(variant: AnyVariant) -> Callable[[mx.array], mx.array]:
    matrix = random_matrix(variant, 16, 512)
    return lambda x: small_t(x, matrix, variant)


def _attention(queries: mx.array) -> mx.array:
    rows, parents = mx.zeros((1, 2, 20, 64), mx.bfloat16), mx.zeros((16,), mx.int32)
    return tree_attention(queries, rows, rows, parents, 0.1)


PRODUCT = [
    "const device bfloat16_t* x [[buffer(0)]]", "const constant int* x_shape",
    "const constant int* w_shape", "uint3 thread_position_in_grid [[thread_position_in_grid]]",
]  # fmt: skip
# Function, shape of its first input, and arguments of its kernel.
SIGNATURES: dict[str, tuple[Callable[[mx.array], mx.array], tuple[int, ...], list[str]]] = {
    "4 bits": (_product(Variant(4, 64, "bfloat16")), (4, 512),
        [*PRODUCT, "const device uint32_t* w "]),
    "dense": (_product(DenseVariant("bfloat16", *MANY)), (4, 512),
        [*PRODUCT, "const device bfloat16_t* w "]),
    "attention": (_attention, (1, 4, 16, 64), [
        "const device bfloat16_t* queries [[buffer(0)]]", "const constant int* queries_shape",
        "const constant int64_t* queries_strides", "const constant int64_t* values_strides",
        "const constant int64_t* parents_strides", "int32_t* parents [[buffer(",
        "const constant float& scale [[buffer(",
        "uint3 threadgroup_position_in_grid [[threadgroup_position_in_grid]]",
        "uint simdgroup_index_in_threadgroup [[simdgroup_index_in_threadgroup]]"]),
}  # fmt: skip


@pytest.mark.parametrize("name", SIGNATURES)
def test_signature_of_the_generated_source(monkeypatch, tmp_path, capfd, name):
    """What MLX makes of the source, as it prints it; nothing is compiled."""
    kernel = mx.fast.metal_kernel

    def verbose(**given: Any) -> Any:
        launch = kernel(**given)
        return lambda **inputs: launch(**inputs, verbose=True)

    monkeypatch.setattr(mx.fast, "metal_kernel", verbose)
    function, shape, arguments = SIGNATURES[name]
    mx.export_function(str(tmp_path / "kernel.mlxfn"), function, mx.zeros(shape, mx.bfloat16))
    source = capfd.readouterr().out
    lane = "uint thread_index_in_simdgroup [[thread_index_in_simdgroup]]"
    for argument in (*arguments, "device bfloat16_t* y ", lane):
        assert argument in source


def test_orders_of_dense_matrices():
    """As MLX chooses for a product with one row; the others follow."""
    orders = {
        (shape.lanes, shape.groups): [
            (outputs, inputs)
            for outputs, inputs in ((512, 64), (512, 65), (512, 8191), (512, 8192), (8, 64))
            if next(DenseShape("float16", inputs, outputs).variants()) == shape
        ]
        for shape in DenseShape("float16", 4096, 4096).variants()
    }
    assert orders == {
        (32, 1): [(512, 65), (512, 8191)],
        (4, 1): [(512, 64), (8, 64)],
        (32, 8): [(512, 8192)],
    }


def test_sources_are_those_on_record():
    for file, record in RECORDS.items():
        assert record() == file.read_text(encoding="utf-8")


@pytest.mark.metal
@pytest.mark.skipif(not mx.metal.is_available(), reason="needs an Apple GPU")
@pytest.mark.parametrize("kind", ["dense", "mxfp4", *PACKS])
@pytest.mark.parametrize("dtype", DTYPES)
def test_equal_on_an_apple_gpu(monkeypatch, kind, dtype):
    monkeypatch.setattr(trials, "load_or_time", lambda *args: args[-1]())
    model = nn.Sequential(nn.Linear(1024, 256), nn.Linear(416, 100), nn.Linear(1024, 32))
    model.set_dtype(DTYPES[dtype])
    if kind == "mxfp4":
        nn.quantize(model, 32, 4, mode="mxfp4")
    elif kind != "dense":
        nn.quantize(model, 32, kind)
    assert len(layers_by_shape(model)) == 3
    for shape, layers in layers_by_shape(model).items():
        tried = ProductTrial(shape, layers)
        assert tried.failure is None, f"{shape}: {tried.failure}"


@pytest.mark.metal
@pytest.mark.skipif(not mx.metal.is_available(), reason="needs an Apple GPU")
@pytest.mark.parametrize("size", HEAD_SIZES)
@pytest.mark.parametrize("dtype", DTYPES)
def test_attention_is_equal_on_an_apple_gpu(monkeypatch, size, dtype):
    monkeypatch.setattr(trials, "load_or_time", lambda *args: args[-1]())
    assert AttentionTrial(AttentionShape(8, 2, size, dtype), 1).failure is None
