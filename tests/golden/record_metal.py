"""The Metal sources of all kernels, as recorded beside this file, so that changes are seen.

`python -m tests.golden.record_metal` writes the files anew.
"""

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import product
from pathlib import Path

from mlx_redrafter.kernels.dense_source import dense_source
from mlx_redrafter.kernels.metal_source import MAX_ROWS, metal_source
from mlx_redrafter.kernels.tree_attention import HEAD_SIZES, AttentionVariant, attention_source
from mlx_redrafter.kernels.variant import (
    DENSE_ORDERS,
    DTYPES,
    GROUP_SIZES,
    PACKS,
    AnyVariant,
    DenseVariant,
    MatrixShape,
    Variant,
)

COMPILED = range(2, MAX_ROWS + 1)
# The constants that depend on the number of rows.
OWN = re.compile(r"ROWS = \d+; TILE = \d+; ")


def record_small_t() -> str:
    """The kernel `small_t` for quantised matrices."""
    return numbered({one: [metal_source(one, rows).body for rows in COMPILED] for one in _small()})


def record_dense() -> str:
    """The kernel `small_t` for matrices that are not quantised."""
    variants = [DenseVariant(dtype, *order) for dtype, order in product(DTYPES, DENSE_ORDERS)]
    return numbered({one: [dense_source(one, rows).body for rows in COMPILED] for one in variants})


def record_tree_attention() -> str:
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


# Function that records each file.
RECORDS: dict[Path, Callable[[], str]] = {
    Path(__file__).with_name(f"{name}.metal"): record
    for name, record in (
        ("small_t", record_small_t),
        ("small_t_dense", record_dense),
        ("tree_attention", record_tree_attention),
    )
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


def _small() -> Iterator[Variant]:
    for bits, group_size, dtype in product(PACKS, GROUP_SIZES, DTYPES):
        fast = MatrixShape(bits, group_size, dtype, Variant(bits, group_size, dtype).block, 8)
        yield from fast.variants()
    for dtype in DTYPES:
        yield from MatrixShape(4, 32, dtype, 512, 8, "mxfp4").variants()


def _constants(head: str) -> str:
    constants = re.sub(r" *//.*\n", "\n", head).replace("constexpr int ", "")
    return " ".join(constants.split())


if __name__ == "__main__":
    for file, record in RECORDS.items():
        file.write_text(record(), encoding="utf-8")
