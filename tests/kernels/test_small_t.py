"""Every row of `small_t` has the bits of MLX's kernel for one row, in the emulator.

Axes: T rows of inputs, K inputs, N outputs.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import mlx.core as mx
import pytest

from mlx_redrafter.kernels.small_t import ROWS, as_integers, small_t
from mlx_redrafter.kernels.source import MOST_ROWS
from mlx_redrafter.kernels.variant import BITS, DTYPES, GROUP_SIZES, Variant
from tests.helpers.sources import print_generated_source
from tests.kernels.emulator import (
    FUSED,
    SIMD_ORDERS,
    Kernels,
    needs_emulator,
    random_matrix,
)
from tests.kernels.stand_in import emulated, run_emulated

VARIANTS = [
    Variant(number, group_size, dtype, order)
    for number in BITS
    for group_size in GROUP_SIZES
    for dtype in DTYPES
    for order in ("qmv_fast", "qmv")
    if (number, order) != (2, "qmv")  # the same as its "qmv_fast"
]
# What the tests compare: of weights that are rarely seen, a sample.
COMMON = (4, 8)
SAMPLE = [
    variant
    for variant in VARIANTS
    if variant.bits in COMMON
    or (variant.group_size, variant.dtype, variant.order)
    in ((64, "float16", "qmv_fast"), (32, "bfloat16", "qmv"), (128, "float32", "qmv_fast"))
]
LAUNCHED = range(2, MOST_ROWS + 1)
# A number of rows for either size of tiles; sources for all dtypes differ in a name only.
FEW = (3, 8)
OUTPUTS = 13  # no multiple of a tile or a threadgroup


def _launched(variant: Variant) -> Sequence[int]:
    return LAUNCHED if variant.dtype == "float16" and variant.bits in COMMON else FEW


@pytest.fixture(scope="module")
def kernels() -> Kernels:
    """All variants of the sample."""
    return emulated((variant, t) for variant in SAMPLE for t in _launched(variant))


def _different(
    kernels: Kernels, variant: Variant, rows: Sequence[int], order: int = 0
) -> list[int]:
    """Values of T for which some bit is not that of one row at a time."""
    # Two blocks; in the last one of "qmv" some lanes have nothing.
    inputs = 2 * variant.block - (0 if variant.order == "qmv_fast" else variant.group_size)
    matrix = random_matrix(variant, OUTPUTS, inputs)
    x = mx.random.normal((ROWS[-1], inputs), key=mx.random.key(1)).astype(DTYPES[variant.dtype])
    expected = as_integers(kernels.stock(variant, x, *matrix, order=order))
    found = {t: as_integers(small_t(x[:t], *matrix, variant)) for t in rows}
    return [t for t, y in found.items() if not mx.array_equal(y, expected[:t])]


@needs_emulator
@pytest.mark.parametrize("variant", SAMPLE, ids=str)
def test_rows_have_the_bits_of_one_row(
    kernels: Kernels, monkeypatch: pytest.MonkeyPatch, variant: Variant
) -> None:
    rows = ROWS if _launched(variant) is LAUNCHED else (*FEW, 2 * MOST_ROWS)
    for order in SIMD_ORDERS:
        run_emulated(monkeypatch, kernels, order)
        assert _different(kernels, variant, rows, order) == []


@needs_emulator
@pytest.mark.parametrize("number", BITS)
def test_rows_have_the_bits_of_one_row_where_the_compiler_fuses(
    monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    variants = [Variant(number, 64, "float32", "qmv_fast"), Variant(number, 64, "float16", "qmv")]
    fused = emulated([(variant, t) for variant in variants for t in FEW], flags=FUSED)
    run_emulated(monkeypatch, fused)
    for variant in variants:
        assert _different(fused, variant, FEW) == []


@needs_emulator
@pytest.mark.parametrize("number", [2, 3, 4, 5, 6])
@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_sums_of_older_versions(monkeypatch: pytest.MonkeyPatch, dtype: str, number: int) -> None:
    older, newer = Variant(number, 64, dtype, sums=dtype), Variant(number, 64, dtype)
    kernels = emulated([(variant, 3) for variant in (older, newer)], older=True)
    run_emulated(monkeypatch, kernels)
    assert _different(kernels, older, [3]) == []
    assert _different(kernels, newer, [3]) == [3]


@needs_emulator
def test_the_emulated_kernel_computes_the_product(kernels: Kernels) -> None:
    variant = Variant(4, 64, "float32")
    weight, scales, biases = random_matrix(variant, OUTPUTS, 1024)
    x = mx.random.normal((3, 1024))
    y = kernels.stock(variant, x, weight, scales, biases)
    expected = mx.quantized_matmul(x, weight, scales, biases, group_size=64, bits=4)
    assert mx.allclose(y, expected, atol=1e-5)


@needs_emulator
def test_the_emulator_notices_lanes_that_part() -> None:
    variant = Variant(4, 64, "float32")
    source = "if (thread_index_in_simdgroup < 3) { y[0] = simd_sum(1.0f); }"
    kernels = Kernels({(variant, 2): source})
    matrix = random_matrix(variant, 8, 512)
    with pytest.raises(RuntimeError, match="have parted"):
        kernels.ours(variant, mx.zeros((2, 512)), *matrix, groups=2)


def test_signature_of_the_generated_source(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """What MLX makes of the source, as it prints it; nothing is compiled."""
    variant = Variant(4, 64, "bfloat16")
    matrix = random_matrix(variant, 16, 512)
    x = mx.zeros((4, 512), mx.bfloat16)
    print_generated_source(tmp_path, lambda x: small_t(x, *matrix, variant), x)
    source = capfd.readouterr().out
    for argument in (
        "const device bfloat16_t* x [[buffer(0)]]",
        "const constant int* x_shape",
        "const device uint32_t* w ",
        "const constant int* w_shape",
        "device bfloat16_t* y ",
        "uint thread_index_in_simdgroup [[thread_index_in_simdgroup]]",
        "uint3 thread_position_in_grid [[thread_position_in_grid]]",
    ):
        assert argument in source
