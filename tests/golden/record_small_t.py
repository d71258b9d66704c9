"""The Metal source of the kernel `small_t`, as recorded beside this file, so that changes are seen.

`python -m tests.golden.record_small_t` writes the file anew.
"""

from __future__ import annotations

import re
from itertools import product
from pathlib import Path

from mlx_redrafter.kernels.source import MOST_ROWS, metal_source
from mlx_redrafter.kernels.variant import BITS, DTYPES, GROUP_SIZES, Variant

FILE = Path(__file__).with_name("small_t.metal")


def record() -> str:
    """All sources: the bodies, and the constants that stand before them, a line for each."""
    bodies: dict[str, int] = {}
    heads = []
    for bits, group_size, dtype in product(BITS, GROUP_SIZES, DTYPES):
        own_sums = () if bits == 8 or dtype == "float32" else (dtype,)
        for order, sums in product(("qmv_fast", "qmv"), ("float32", *own_sums)):
            variant = Variant(bits, group_size, dtype, order, sums)  # type: ignore[arg-type]
            for rows in range(2, MOST_ROWS + 1):
                head, _, body = metal_source(variant, rows).partition("\n\n")
                number = bodies.setdefault(body, len(bodies) + 1)
                constants = re.sub(r" *//.*\n", "\n", head).replace("constexpr int ", "")
                heads.append(f"// {variant}, body {number}: {' '.join(constants.split())}\n")
    texts = [f"// body {number}\n{body}\n" for body, number in bodies.items()]
    return "".join([*texts, *heads])


if __name__ == "__main__":
    FILE.write_text(record(), encoding="utf-8")
