"""A longer comparison than the tests make: `python -m tests.kernels.grid rounded fused`.

All variants of products, all numbers of rows of one launch, several sizes, all variants of
attention over trees, all orders of a SIMD group's sum; with every operation rounded, and with
multiplications and additions fused as the compiler likes.
Prints what differs; takes some minutes.
"""

from __future__ import annotations

from collections import Counter
from itertools import product

import mlx.core as mx
import typer

from mlx_redrafter.kernels.metal_source import MAX_ROWS
from mlx_redrafter.kernels.small_t import as_integers, source_of
from mlx_redrafter.kernels.tree_attention import attention_source
from mlx_redrafter.kernels.variant import DTYPES, AnyVariant, DenseVariant
from tests.kernels.attention_emulator import AttentionKernels
from tests.kernels.emulator import FUSED, ROUNDED, SIMD_ORDERS, Kernels, random_matrix
from tests.kernels.stand_in import ATTENTION_VARIANTS, emulated
from tests.kernels.test_small_t import DENSE_VARIANTS, VARIANTS
from tests.kernels.test_tree_attention import different_nodes

COMPILED = range(2, MAX_ROWS + 1)
# Committed tokens before a tree.
TREES = (0, 1, 29, 70, 300)
FLAGS = {"rounded": ROUNDED, "fused": FUSED}


def compare(kernels: Kernels, variant: AnyVariant, name: str) -> Counter[str]:
    """Numbers of comparisons, and of those where a bit differs; these are printed."""
    counts: Counter[str] = Counter()
    for inputs in sizes(variant):
        for outputs in (8, 13, 32):
            matrix = random_matrix(variant, outputs, inputs, seed=inputs)
            x = mx.random.normal((MAX_ROWS, inputs)).astype(DTYPES[variant.dtype])
            for order in SIMD_ORDERS:
                expected = as_integers(kernels.stock(variant, x, *matrix, order=order))
                for rows in COMPILED:
                    source = source_of(variant, rows)
                    groups = -(-outputs // source.outputs) * source.simd_groups
                    y = kernels.ours(variant, x[:rows], *matrix, groups=groups, order=order)
                    share = mx.mean(as_integers(y) == expected[:rows]).item()
                    counts["compared"] += 1
                    counts["different"] += share < 1
                    if share < 1:
                        size = f"{rows} rows, {outputs} x {inputs}, order {order}"
                        typer.echo(f"{name}: {variant}, {size}: {share:.4f} equal")
    return counts


def sizes(variant: AnyVariant) -> tuple[int, ...]:
    """Numbers of inputs: less than a block where there may be, some blocks, and a part more."""
    if isinstance(variant, DenseVariant):
        return variant.block - 5, 3 * variant.block, 3 * variant.block + 5
    step = variant.block if variant.order == "qmv_fast" else variant.group_size
    return step, 3 * variant.block, 3 * variant.block + step


def compare_attention(name: str) -> Counter[str]:
    """Numbers of comparisons of trees, and of those with nodes that differ; these are printed."""
    counts: Counter[str] = Counter()
    kernels = AttentionKernels(
        {one: attention_source(one) for one in ATTENTION_VARIANTS}, FLAGS[name]
    )
    for variant, committed, order in product(ATTENTION_VARIANTS, TREES, SIMD_ORDERS):
        nodes = different_nodes(kernels, variant, committed, order)
        counts["compared"] += 1
        counts["different"] += bool(nodes)
        if nodes:
            typer.echo(
                f"{name}: attention {variant}, {committed} tokens, order {order}: nodes {nodes}"
            )
    return counts


def main(arithmetic: list[str]) -> None:
    """Compare and print."""
    for name in arithmetic:
        total: Counter[str] = Counter()
        for variant in (*VARIANTS, *DENSE_VARIANTS):
            kernels = emulated([(variant, rows) for rows in COMPILED], flags=FLAGS[name])
            total.update(compare(kernels, variant, name))
        typer.echo(f"{name}: {total['compared']} compared, {total['different']} different")
        trees = compare_attention(name)
        typer.echo(f"{name}: {trees['compared']} trees compared, {trees['different']} different")


if __name__ == "__main__":
    typer.run(main)
