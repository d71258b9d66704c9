"""Metal sources that MLX generates around those of this package."""

from collections.abc import Callable
from pathlib import Path

import mlx.core as mx
import pytest


def print_generated_source(
    folder: Path, function: Callable[[mx.array], mx.array], x: mx.array
) -> None:
    """Let MLX print the source of a function's kernel for an input; nothing is compiled.

    Args:
        folder: Folder for a file that nobody needs.
        function: Function that launches a kernel not launched before.
        x: The input; only shape and dtype count.
    """
    kernel = mx.fast.metal_kernel
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(mx.fast, "metal_kernel", lambda **given: _verbose(kernel(**given)))
        mx.export_function(str(folder / "kernel.mlxfn"), function, x)


def _verbose(kernel: object) -> object:
    return lambda **given: kernel(**given, verbose=True)  # type: ignore[operator]
