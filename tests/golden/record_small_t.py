"""The Metal source of `small_t` for quantised matrices, as recorded here, so that changes are seen.

`python -m tests.golden.record_small_t` writes the file anew.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from itertools import product
from pathlib import Path

from mlx_redrafter.kernels.metal_source import MAX_ROWS, metal_source
from mlx_redrafter.kernels.variant import (
    BITS,
    DTYPES,
    GROUP_SIZES,
    AnyVariant,
    MatrixShape,
    Variant,
)

COMPILED = range(2, MAX_ROWS + 1)
# The constants that depend on the number of rows.
OWN = re.compile(r"ROWS = \d+; TILE = \d+; ")
FILE = Path(__file__).with_name("small_t.metal")


def record() -> str:
    """All sources: the bodies, tiles by rows, and the other constants, a line for each variant."""
    return numbered(
        {one: [metal_source(one, rows).body for rows in COMPILED] for one in _variants()}
    )


def numbered(sources: Mapping[AnyVariant, Sequence[str]]) -> str:
    """What sources by variant, of all numbers of rows, have in common, and their constants."""
    bodies: dict[str, int] = {}
    heads, tiles = [], set()
    for variant, of_rows in sources.items():
        parts = [one.partition("\n\n") for one in of_rows]
        (body,) = {body for _, _, body in parts}
        constants = [_constants(head) for head, _, _ in parts]
        (others,) = {OWN.sub("", one) for one in constants}
        tiles.add("".join(found for one in constants for found in OWN.findall(one)).strip())
        number = bodies.setdefault(body, len(bodies) + 1)
        heads.append(f"// {variant}, body {number}: {others}\n")
    texts = [f"// body {number}\n{body}\n" for body, number in bodies.items()]
    return "".join([*texts, *(f"// {one}\n" for one in tiles), *heads])


def _variants() -> Iterator[Variant]:
    for bits, group_size, dtype in product(BITS, GROUP_SIZES, DTYPES):
        fast = MatrixShape(bits, group_size, dtype, Variant(bits, group_size, dtype).block, 8)
        yield from fast.variants()
    for dtype in DTYPES:
        yield from MatrixShape(4, 32, dtype, 512, 8, "mxfp4").variants()


def _constants(head: str) -> str:
    constants = re.sub(r" *//.*\n", "\n", head).replace("constexpr int ", "")
    return " ".join(constants.split())


if __name__ == "__main__":
    FILE.write_text(record(), encoding="utf-8")
