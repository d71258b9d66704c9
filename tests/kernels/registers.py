"""Registers that nvcc gives a thread of the kernels: `python -m tests.kernels.registers`.

All variants and all numbers of rows of one launch. A hint only of what Apple's compiler does: it is
another compiler, and another GPU. Takes some minutes.
"""

from pathlib import Path
from tempfile import TemporaryDirectory

import typer

from mlx_redrafter.kernels.metal_source import MAX_ROWS
from tests.kernels.cuda import Usage, usage
from tests.kernels.stand_in import ATTENTION_VARIANTS
from tests.kernels.test_small_t import DENSE_VARIANTS, VARIANTS

# Registers of a thread on Apple's GPUs, as philipturner/metal-benchmarks has found.
MOST_REGISTERS = 128
ROWS = range(2, MAX_ROWS + 1)


def main() -> None:
    """Compile and print a line per variant."""
    found: list[Usage] = []
    with TemporaryDirectory() as folder:
        for variant in (*VARIANTS, *DENSE_VARIANTS):
            of_rows = usage([(variant, rows) for rows in ROWS], Path(folder))
            texts = (f"{rows}: {_text(one)}" for rows, one in zip(ROWS, of_rows, strict=True))
            typer.echo(f"{variant}: {', '.join(texts)}")
            found += of_rows
        heads = usage(ATTENTION_VARIANTS, Path(folder))
    for one, head in zip(ATTENTION_VARIANTS, heads, strict=True):
        typer.echo(f"attention {one}: {_text(head)}")
    found += heads
    most = max(one.registers for one in found)
    spilled = sum(one.spilled > 0 for one in found)
    typer.echo(f"{len(found)} kernels: at most {most} registers, {spilled} with spills")


def _text(used: Usage) -> str:
    return f"{used.registers}" + (f" and {used.spilled} bytes spilled" if used.spilled else "")


if __name__ == "__main__":
    typer.run(main)
