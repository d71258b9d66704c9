"""The Metal source of the kernel `small_t` for matrices that are not quantised, as recorded here.

`python -m tests.golden.record_dense` writes the file anew.
"""

from __future__ import annotations

from itertools import product
from pathlib import Path

from mlx_redrafter.kernels.dense_source import dense_source
from mlx_redrafter.kernels.variant import DENSE_ORDERS, DTYPES, DenseVariant
from tests.golden.record_small_t import COMPILED, numbered

FILE = Path(__file__).with_name("small_t_dense.metal")


def record() -> str:
    """All sources: the bodies, tiles by rows, and the other constants, a line for each variant."""
    variants = [DenseVariant(dtype, *order) for dtype, order in product(DTYPES, DENSE_ORDERS)]
    return numbered({one: [dense_source(one, rows).body for rows in COMPILED] for one in variants})


if __name__ == "__main__":
    FILE.write_text(record(), encoding="utf-8")
