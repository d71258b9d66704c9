"""A longer comparison than the tests make: `python -m tests.kernels.grid rounded fused`.

All variants, all numbers of rows of one launch, several sizes, all orders of a SIMD group's sum;
with every operation rounded, and with multiplications and additions fused as the compiler likes.
Prints what differs; takes some minutes.
"""

from __future__ import annotations

from collections import Counter

import mlx.core as mx
import typer

from mlx_redrafter.kernels.small_t import as_integers
from mlx_redrafter.kernels.source import MOST_ROWS, tile
from mlx_redrafter.kernels.variant import DTYPES, Variant
from tests.kernels.emulator import FUSED, ROUNDED, SIMD_ORDERS, Kernels, random_matrix
from tests.kernels.stand_in import emulated
from tests.kernels.test_small_t import VARIANTS

COMPILED = range(2, MOST_ROWS + 1)
FLAGS = {"rounded": ROUNDED, "fused": FUSED}


def compare(kernels: Kernels, variant: Variant, name: str) -> Counter[str]:
    """Numbers of comparisons, and of those where a bit differs; these are printed."""
    counts: Counter[str] = Counter()
    step = variant.block if variant.order == "qmv_fast" else variant.group_size
    for inputs in (step, 3 * variant.block, 3 * variant.block + step):
        for outputs in (8, 13, 32):
            matrix = random_matrix(variant, outputs, inputs, seed=inputs)
            x = mx.random.normal((MOST_ROWS, inputs)).astype(DTYPES[variant.dtype])
            for order in SIMD_ORDERS:
                expected = as_integers(kernels.stock(variant, x, *matrix, order=order))
                for rows in COMPILED:
                    groups = -(-outputs // tile(rows))
                    y = kernels.ours(variant, x[:rows], *matrix, groups=groups, order=order)
                    share = mx.mean(as_integers(y) == expected[:rows]).item()
                    counts["compared"] += 1
                    counts["different"] += share < 1
                    if share < 1:
                        typer.echo(f"{name}: {variant}, {rows} rows, K {inputs}: {share:.4f} equal")
    return counts


def main(arithmetic: list[str]) -> None:
    """Compare and print."""
    for name in arithmetic:
        total: Counter[str] = Counter()
        for variant in VARIANTS:
            kernels = emulated([(variant, rows) for rows in COMPILED], flags=FLAGS[name])
            total.update(compare(kernels, variant, name))
        typer.echo(f"{name}: {total['compared']} compared, {total['different']} different")


if __name__ == "__main__":
    typer.run(main)
