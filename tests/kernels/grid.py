"""A longer comparison than the tests make: `python -m tests.kernels.grid rounded fused`.

All variants of products, all numbers of rows of one launch, several sizes, all variants of
attention over trees, all orders of a SIMD group's sum; with every operation rounded, and with
multiplications and additions fused as the compiler likes.
Prints what differs; takes some minutes.
"""

from collections import Counter
from itertools import product

import pytest
import typer

from mlx_redrafter.kernels.tree_attention import attention_source
from mlx_redrafter.kernels.variant import AnyVariant, DenseVariant
from tests.golden.record_metal import ATTENTION_VARIANTS, DENSE_VARIANTS, VARIANTS
from tests.kernels.attention_emulator import AttentionKernels
from tests.kernels.emulator import FUSED, ROUNDED, SIMD_ORDERS
from tests.kernels.stand_in import emulated, run_emulated
from tests.kernels.test_small_t import LAUNCHED, different_rows
from tests.kernels.test_tree_attention import different_nodes

# Committed tokens before a tree.
TREES = (0, 1, 29, 70, 300)
FLAGS = {"rounded": ROUNDED, "fused": FUSED}


def sizes(variant: AnyVariant) -> tuple[int, ...]:
    """Numbers of inputs: less than a block where there may be, some blocks, and a part more."""
    if isinstance(variant, DenseVariant):
        return variant.block - 5, 3 * variant.block, 3 * variant.block + 5
    step = variant.block if variant.order == "qmv_fast" else variant.group_size
    return step, 3 * variant.block, 3 * variant.block + step


def compare(name: str) -> Counter[str]:
    """Numbers of comparisons by what differs; what differs is printed."""
    counts: Counter[str] = Counter()
    for variant in (*VARIANTS, *DENSE_VARIANTS):
        kernels = emulated(((variant, rows) for rows in LAUNCHED), flags=FLAGS[name])
        for outputs, inputs, order in product((8, 13, 32), sizes(variant), SIMD_ORDERS):
            with pytest.MonkeyPatch.context() as patch:
                run_emulated(patch, kernels, order)
                rows = different_rows(kernels, variant, LAUNCHED, order, (outputs, inputs))
            counts["products"] += len(LAUNCHED)
            counts["different products"] += len(rows)
            if rows:
                typer.echo(f"{name}: {variant}, {outputs} x {inputs}, order {order}: rows {rows}")
    trees = AttentionKernels(
        {one: attention_source(one) for one in ATTENTION_VARIANTS}, FLAGS[name]
    )
    for head, committed, order in product(ATTENTION_VARIANTS, TREES, SIMD_ORDERS):
        nodes = different_nodes(trees, head, committed, order)
        counts["trees"] += 1
        counts["different trees"] += bool(nodes)
        if nodes:
            typer.echo(f"{name}: {head}, {committed} tokens, order {order}: nodes {nodes}")
    return counts


def main(arithmetic: list[str]) -> None:
    """Compare and print."""
    for name in arithmetic:
        typer.echo(f"{name}: {dict(compare(name))}")


if __name__ == "__main__":
    typer.run(main)
