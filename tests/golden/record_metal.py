"""The Metal sources of all kernels, as recorded beside this file, so that changes are seen.

`python -m tests.golden.record_metal` writes the files anew.
"""

import re
from collections.abc import Callable, Mapping, Sequence
from itertools import product
from pathlib import Path

from mlx_redrafter.kernels.dense_source import dense_source
from mlx_redrafter.kernels.metal_source import MAX_ROWS, metal_source
from mlx_redrafter.kernels.tree_attention import HEAD_SIZES, AttentionVariant, attention_source
from mlx_redrafter.kernels.variant import (
    DENSE_ORDERS,
    DTYPES,
    GROUP_SIZES,
    ORDERS,
    PACKS,
    AnyVariant,
    DenseVariant,
    Variant,
)

VARIANTS = [
    Variant(number, group_size, dtype, order)
    for number, group_size, dtype, order in product(PACKS, GROUP_SIZES, DTYPES, ORDERS)
    if (number, order) != (2, "qmv")  # the same as its "qmv_fast"
] + [Variant(4, 32, dtype, order, mode="mxfp4") for dtype, order in product(DTYPES, ORDERS)]
DENSE_VARIANTS = [DenseVariant(dtype, *order) for dtype, order in product(DTYPES, DENSE_ORDERS)]
ATTENTION_VARIANTS = [AttentionVariant(size, dtype) for size, dtype in product(HEAD_SIZES, DTYPES)]
COMPILED = range(2, MAX_ROWS + 1)
# The constants that depend on the number of rows.
OWN = re.compile(r"ROWS = \d+; TILE = \d+; ")


def record_small_t() -> str:
    """The kernel `small_t` for quantised matrices."""
    return numbered({one: [metal_source(one, rows).body for rows in COMPILED] for one in VARIANTS})


def record_dense() -> str:
    """The kernel `small_t` for matrices that are not quantised."""
    sources = {one: [dense_source(one, rows).body for rows in COMPILED] for one in DENSE_VARIANTS}
    return numbered(sources)


def record_tree_attention() -> str:
    """The constants of every variant, and the body that all have in common."""
    heads, bodies = [], set()
    for variant in ATTENTION_VARIANTS:
        head, _, body = attention_source(variant).partition("\n\n")
        constants = " ".join(head.partition("//")[0].split())
        heads.append(f"// {variant}: {constants}\n")
        bodies.add(body)
    (body,) = bodies
    return f"{body}\n{''.join(heads)}"


# Function that records each file.
RECORDS: dict[Path, Callable[[], str]] = {
    Path(__file__).with_name("small_t.metal"): record_small_t,
    Path(__file__).with_name("small_t_dense.metal"): record_dense,
    Path(__file__).with_name("tree_attention.metal"): record_tree_attention,
}


def numbered(sources: Mapping[AnyVariant, Sequence[str]]) -> str:
    """The bodies, tiles by rows, and the other constants, a line for each variant."""
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


def _constants(head: str) -> str:
    constants = re.sub(r" *//.*\n", "\n", head).replace("constexpr int ", "")
    return " ".join(constants.split())


if __name__ == "__main__":
    for file, record in RECORDS.items():
        file.write_text(record(), encoding="utf-8")
