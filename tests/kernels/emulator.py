"""Metal kernels run on this CPU: MLX's own, out of the headers that its wheel has, and ours.

Both are compiled by g++ against ``shim.h``. What that shows is arithmetic: whether two sources add
up the same numbers in the same order. It shows neither that Apple's compiler takes a source nor
what it makes of it.

Axes: T rows of inputs, K inputs, N outputs.
"""

from __future__ import annotations

import ctypes
import hashlib
import re
import shutil
import subprocess
import sys
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path
from tempfile import mkdtemp

import mlx.core as mx
import numpy as np
import pytest

from mlx_redrafter.kernels.small_t import as_integers
from mlx_redrafter.kernels.source import SIMD_GROUPS
from mlx_redrafter.kernels.variant import DTYPES, METAL_TYPES, Variant

SHIM = Path(__file__).with_name("shim.h")
HEADERS = Path(mx.__file__).parent / "include/mlx/backend/metal/kernels"
HEADER = HEADERS / "quantized.h"
# Vectorised code fuses other multiplications with additions than scalar code does.
FLAGS = (
    "-O1",
    "-std=c++17",
    "-shared",
    "-fPIC",
    "-w",
    "-fno-tree-slp-vectorize",
    "-U_FORTIFY_SOURCE",  # it forbids jumps between stacks
    f"-I{SHIM.parent}",
)
ROUNDED, FUSED = ("-ffp-contract=off",), ("-ffp-contract=fast", "-mfma")
SIMD_ORDERS = (0, 1, 2)

needs_emulator = pytest.mark.skipif(
    sys.platform != "linux" or shutil.which("g++") is None or not HEADER.exists(),
    reason="needs Linux, g++ and the Metal headers of MLX's wheel",
)

# What MLX's kernels for one row are made of.
STOCK = (
    "get_pack_factor",
    "get_bytes_per_pack",
    "load_vector",
    "load_vector_safe",
    "qdot",
    "qdot_safe",
    "qmv_fast_impl",
    "qmv_impl",
)

RUN = """
extern "C" bool {name}(
    const void* w_, const void* scales_, const void* biases_, const void* x_, void* y_,
    const int* shape_, const int* grid, int order) {{
  w = w_, scales = scales_, biases = biases_, x = x_, y = y_, shape = shape_;
  simd_order = order;
  for (group = 0; group < grid[1]; group++)
    for (column = 0; column < grid[0]; column++)
      if (!run_threadgroup([] {{ {call} }})) return false;
  return true;
}}
"""
# Arguments of a kernel: T, K, N and words of a row, and the place in the grid.
STATE = """
static const void *w, *scales, *biases, *x; static void* y; static const int* shape;
static int group, column;
"""


class Kernels:
    """Kernels compiled together: ours, and for each of their variants MLX's own for one row.

    Args:
        sources: Sources of ours by variant and rows.
        flags: Further flags of the compiler.
        older: Whether MLX's own adds up inputs in their dtype, as it did before 0.32.3.
    """

    def __init__(
        self,
        sources: Mapping[tuple[Variant, int], str],
        flags: Sequence[str] = ROUNDED,
        older: bool = False,
    ):
        text = '#include "shim.h"\n' + STATE + _stock_source(older)
        text += "".join(map(_stock_run, dict.fromkeys(variant for variant, _ in sources)))
        text += "".join(_our_run(*key, source) for key, source in sources.items())
        self._library = compiled(text, tuple(flags))

    def stock(self, variant: Variant, x: mx.array, *weights: mx.array, order: int = 0) -> mx.array:
        """MLX's kernel, one row at a time: x of shape (T, K), packed weights, scales, biases."""
        grid = x.shape[0], -(-weights[0].shape[0] // 8) * SIMD_GROUPS
        return self._run(f"stock_{variant}", grid, x, weights, order)

    def ours(
        self,
        variant: Variant,
        x: mx.array,
        *weights: mx.array,
        groups: int,
        order: int = 0,
    ) -> mx.array:
        """Our kernel for all rows of x at once, in ``groups`` SIMD groups."""
        return self._run(f"ours_{x.shape[0]}_{variant}", (1, groups), x, weights, order)

    def _run(
        self,
        name: str,
        grid: tuple[int, int],
        x: mx.array,
        weights: Sequence[mx.array],
        order: int,
    ) -> mx.array:
        rows, outputs = x.shape[0], weights[0].shape[0]
        inputs = [np.ascontiguousarray(bits_of(one)) for one in (*weights, x)]
        y = np.zeros((rows, outputs), inputs[-1].dtype)
        shape = (ctypes.c_int * 4)(rows, x.shape[1], outputs, weights[0].shape[1])
        pointers = [one.ctypes.data_as(ctypes.c_void_p) for one in (*inputs, y)]
        function = getattr(self._library, name)
        function.restype = ctypes.c_bool
        if not function(*pointers, shape, (ctypes.c_int * 2)(*grid), order):
            raise RuntimeError(f"lanes of a SIMD group have parted in {name}")
        return mx.array(y).view(x.dtype)


def random_matrix(variant: Variant, outputs: int, inputs: int, seed: int = 0) -> list[mx.array]:
    """Packed weights, scales and biases of a random matrix."""
    spread = inputs**-0.5
    values = mx.random.normal((outputs, inputs), scale=spread, key=mx.random.key(seed))
    values = values.astype(DTYPES[variant.dtype])
    return list(mx.quantize(values, group_size=variant.group_size, bits=variant.bits))


def bits_of(x: mx.array) -> np.ndarray:
    return np.array(x if x.dtype == mx.uint32 else as_integers(x))


def _stock_source(older: bool) -> str:
    """The functions `STOCK` of the installed MLX."""
    header = HEADER.read_text(encoding="utf-8")
    text = "static constexpr int SIMD_SIZE = 32;\n" + "".join(function_in(header, n) for n in STOCK)
    if older:
        text, found = re.subn(r"\bU\((x\[i[ +1-7]*\])\)", r"\1", text)
        assert found
    return text


def function_in(header: str, name: str) -> str:
    """A function template of MLX, from its ``template`` to the brace that ends it."""
    place = re.search(rf"\b{name}\(", header)
    assert place, f"MLX's headers have no {name}"
    begin = header.rindex("template <", 0, place.start())
    depth, end = 0, header.index("{", place.start())
    while True:
        depth += {"{": 1, "}": -1}.get(header[end], 0)
        end += 1
        if depth == 0:
            return header[begin:end] + "\n"


def _arguments(number: str) -> str:
    return (
        f"(const uint32_t*)::w, (const {number}*)::scales, (const {number}*)::biases, "
        f"(const {number}*)::x, ({number}*)::y, "
    )


def _stock_run(variant: Variant) -> str:
    number = METAL_TYPES[variant.dtype]
    partial_rows = ", true" if variant.order == "qmv_fast" else ""  # N need not be a multiple of 8
    call = (
        f"{variant.order}_impl<{number}, {variant.group_size}, {variant.bits}{partial_rows}>("
        f"{_arguments(number)} shape[1], shape[2], "
        f"uint3{{uint(column), uint(group / {SIMD_GROUPS}), 0}}, group % {SIMD_GROUPS}, lane);"
    )
    return RUN.format(name=f"stock_{variant}", call=call)


def _our_run(variant: Variant, rows: int, source: str) -> str:
    name, number = f"ours_{rows}_{variant}", METAL_TYPES[variant.dtype]
    return (
        f"static void kernel_{name}(const uint32_t* w, const {number}* scales, "
        f"const {number}* biases, const {number}* x, {number}* y, const int* x_shape, "
        "const int* w_shape, uint thread_index_in_simdgroup, uint3 thread_position_in_grid) {\n"
        f"{source}}}\n"
        + RUN.format(
            name=name,
            call=f"const int w_shape[] = {{shape[2], shape[3]}}; kernel_{name}("
            f"{_arguments(number)} shape, w_shape, lane, uint3{{uint(lane), uint(group), 0}});",
        )
    )


@cache
def _folder() -> Path:
    return Path(mkdtemp(prefix="redrafter-kernels-"))


@cache
def compiled(text: str, flags: tuple[str, ...]) -> ctypes.CDLL:
    """A library of a C++ source; compiled once.

    Raises:
        RuntimeError: It does not compile; the compiler's first error.
    """
    name = _folder() / hashlib.sha256(repr((text, flags)).encode()).hexdigest()[:16]
    source, library = name.with_suffix(".cpp"), name.with_suffix(".so")
    source.write_text(text, encoding="utf-8")
    command = ["g++", *FLAGS, *flags, str(source), "-o", str(library)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(next(line for line in done.stderr.splitlines() if "error" in line))
    return ctypes.CDLL(str(library))
