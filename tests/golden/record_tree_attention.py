"""The Metal source of the kernel `tree_attention`, as recorded beside this file.

`python -m tests.golden.record_tree_attention` writes the file anew.
"""

from __future__ import annotations

from itertools import product
from pathlib import Path

from mlx_redrafter.kernels.tree_attention import HEAD_SIZES, AttentionVariant, attention_source
from mlx_redrafter.kernels.variant import DTYPES

FILE = Path(__file__).with_name("tree_attention.metal")


def record() -> str:
    """The constants of every variant, and the body that all have in common."""
    heads, bodies = [], set()
    for size, dtype in product(HEAD_SIZES, DTYPES):
        variant = AttentionVariant(size, dtype)
        head, _, body = attention_source(variant).partition("\n\n")
        constants = " ".join(head.partition("//")[0].split())
        heads.append(f"// {variant}: {constants}\n")
        bodies.add(body)
    (body,) = bodies
    return f"{body}\n{''.join(heads)}"


if __name__ == "__main__":
    FILE.write_text(record(), encoding="utf-8")
