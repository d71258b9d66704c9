"""The Metal source of the kernel `small_t`, as recorded beside this file, so that changes are seen.

`python -m tests.golden.record_small_t` writes the file anew.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from itertools import product
from pathlib import Path

from mlx_redrafter.kernels.source import MOST_ROWS, metal_source
from mlx_redrafter.kernels.variant import BITS, DTYPES, GROUP_SIZES, MatrixShape, Variant

COMPILED = range(2, MOST_ROWS + 1)
# The constants that depend on the number of rows.
OWN = re.compile(r"ROWS = \d+; TILE = \d+; ")
FILE = Path(__file__).with_name("small_t.metal")


def record() -> str:
    """All sources: the bodies, tiles by rows, and the other constants, a line for each variant."""
    bodies: dict[str, int] = {}
    heads, tiles = [], set()
    for variant in _variants():
        sources = [metal_source(variant, rows).partition("\n\n") for rows in COMPILED]
        (body,) = {body for _, _, body in sources}
        constants = [_constants(head) for head, _, _ in sources]
        (others,) = {OWN.sub("", one) for one in constants}
        tiles.add(" ".join(found for one in constants for found in OWN.findall(one)))
        number = bodies.setdefault(body, len(bodies) + 1)
        heads.append(f"// {variant}, body {number}: {others}\n")
    texts = [f"// body {number}\n{body}\n" for body, number in bodies.items()]
    return "".join([*texts, *(f"// {one}\n" for one in tiles), *heads])


def _variants() -> Iterator[Variant]:
    for bits, group_size, dtype in product(BITS, GROUP_SIZES, DTYPES):
        fast = MatrixShape(bits, group_size, dtype, Variant(bits, group_size, dtype).block, 8)
        yield from fast.variants()


def _constants(head: str) -> str:
    constants = re.sub(r" *//.*\n", "\n", head).replace("constexpr int ", "")
    return " ".join(constants.split())


if __name__ == "__main__":
    FILE.write_text(record(), encoding="utf-8")
