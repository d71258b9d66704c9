"""Metal kernels run on this CPU: MLX's own, out of the headers that its wheel has, and ours.

Both are compiled by g++ against ``shim.h``. What that shows is arithmetic: whether two sources add
up the same numbers in the same order. It shows neither that Apple's compiler takes a source nor
what it makes of it.

Axes: T rows of inputs, K inputs, N outputs.
"""

import ctypes
import hashlib
import re
import shutil
import subprocess
import sys
from collections.abc import Iterable, Mapping, Sequence
from functools import cache
from pathlib import Path
from tempfile import mkdtemp
from typing import NamedTuple

import mlx.core as mx
import numpy as np
import pytest

from mlx_redrafter.kernels.metal_source import KernelSource
from mlx_redrafter.kernels.small_t import as_integers
from mlx_redrafter.kernels.variant import DTYPES, LANES, METAL_TYPES, AnyVariant, DenseVariant

HEADERS = Path(mx.__file__).parent / "include/mlx/backend/metal/kernels"
# What the kernels are made of, by header.
TEMPLATES = {
    "quantized.h": ("get_pack_factor", "get_bytes_per_pack", "load_vector", "load_vector_safe",
        "qdot", "qdot_safe", "qmv_fast_impl", "qmv_impl"),
    "gemv.h": ("GEMVKernel", ),
    "fp_quantized.h": ("get_pack_factor", "get_bytes_per_pack", "dequantize_scale", "Dequantize",
        "load_vector", "load_vector_safe", "qdot", "qdot_safe", "fp_qmv_fast_impl", "fp_qmv_impl"),
}  # fmt: skip
# Whole headers before these.
NUMBERS = {"fp_quantized.h": ("fp4.h", "fp8.h")}
# Macros, constants and types that stand elsewhere in the headers.
BEFORE = """
#define MLX_MTL_CONST static constant constexpr const
static constexpr int SIMD_SIZE = 32;
template <typename A>
struct DefaultAccT {
  using type = float;
};
static float group_memory[256];
"""

# A bias of outputs, where there is one, is in the place of quantised weights' scales.
GEMV_CALL = """
    const auto run = [](auto has_bias) {{
      gemv::GEMVKernel<{number}, {bm}, {bn}, {sm}, {sn}, 4, 4, decltype(has_bias)::value>::run(
          (const {number}*)::w, (const {number}*)::x + column * shape[1], (const {number}*)::scales,
          ({number}*)::y + column * shape[2], shape[1], shape[2], shape[1], 1, 1, 1, group_memory,
          uint3{{uint(group / {groups}), 0, 0}}, uint3{{0, 0, 0}}, simd_group, lane);
    }};
    ::scales ? run(std::true_type()) : run(std::false_type());"""
FP_QMV_CALL = """
    fp_quantized::fp_{order}_impl<{number}, {group_size}, {bits}{partial_rows}>(
        (const uint32_t*)::w, (const uint8_t*)::scales, nullptr,
        (const {number}*)::x, ({number}*)::y, shape[1], shape[2],
        uint3{{uint(column), uint(group / {groups}), 0}}, simd_group, lane);"""
QMV_CALL = """
    quantized::{order}_impl<{number}, {group_size}, {bits}{partial_rows}>(
        (const uint32_t*)::w, (const {number}*)::scales, (const {number}*)::biases,
        (const {number}*)::x, ({number}*)::y, shape[1], shape[2],
        uint3{{uint(column), uint(group / {groups}), 0}}, simd_group, lane);"""


class Stock(NamedTuple):
    """A kernel for one row: its call, by `STATE`, and a threadgroup's SIMD groups and outputs."""

    call: str
    groups: int
    outputs: int


def stock_source(variants: Iterable[AnyVariant]) -> str:
    """The `TEMPLATES` of the installed MLX that these variants need."""
    text = BEFORE
    for file in dict.fromkeys(map(_file, variants)):
        header, names = _text(file), TEMPLATES[file]
        parts = [*map(_text, NUMBERS.get(file, ())), *(template(header, name) for name in names)]
        text += f"namespace {file.removesuffix('.h')} {{\n{''.join(parts)}}}\n"
    return text.replace("threadgroup AccT*", "AccT*")


def stock(variant: AnyVariant) -> Stock:
    """MLX's kernel in a variant's order."""
    number = METAL_TYPES[variant.dtype]
    if isinstance(variant, DenseVariant):
        bm = 4 if (variant.lanes, variant.groups) == (LANES, 1) else 1
        sizes = {"bm": bm, "bn": variant.groups, "sm": LANES // variant.lanes, "sn": variant.lanes}
        groups = bm * variant.groups
        call = GEMV_CALL.format(number=number, groups=groups, **sizes)
        return Stock(call, groups, bm * sizes["sm"] * 4)
    text = QMV_CALL if variant.mode == "affine" else FP_QMV_CALL
    call = text.format(
        order=variant.order,
        number=number,
        group_size=variant.group_size,
        bits=variant.bits,
        partial_rows=", true" if variant.order == "qmv_fast" else "",  # N is no multiple of 8
        groups=2,
    )
    return Stock(call, 2, 8)


def _file(variant: AnyVariant) -> str:
    if isinstance(variant, DenseVariant):
        return "gemv.h"
    return "quantized.h" if variant.mode == "affine" else "fp_quantized.h"


def _text(file: str) -> str:
    return (HEADERS / file).read_text(encoding="utf-8")


def template(header: str, name: str) -> str:
    """A template for a function or a struct, to the brace that ends it."""
    place = re.search(rf"\b{name}(\(| {{)", header)
    assert place, f"MLX's headers have no {name}"
    begin = header.rindex("template <", 0, place.start())
    depth, end = 0, header.index("{", place.start())
    while True:
        depth += {"{": 1, "}": -1}.get(header[end], 0)
        end += 1
        if depth == 0:
            return header[begin:end] + ";\n"


SHIM = Path(__file__).with_name("shim.h")
# Vectorised code fuses other multiplications with additions than scalar code does.
FLAGS = (
    "-O1",
    "-std=c++17",
    "-shared",
    "-fPIC",
    "-w",
    "-fno-tree-slp-vectorize",
    "-U_FORTIFY_SOURCE",  # it forbids jumps between stacks
)
ROUNDED = ("-ffp-contract=off",)
# The compiler forms no fused operation without this option, which is a part of -O2.
FUSED = ("-ffp-contract=fast", "-mfma", "-fexpensive-optimizations")
SIMD_ORDERS = (0, 1, 2)


def require_emulator() -> None:
    """Skip a test on machines that cannot compile the kernels."""
    if sys.platform != "linux" or shutil.which("g++") is None or not HEADERS.exists():
        pytest.skip("needs Linux, g++ and the Metal headers of MLX's wheel")


RUN = """
extern "C" bool {name}(
    const void* x_, void* y_, const void* w_, const void* scales_, const void* biases_,
    const int* shape_, const int* grid, int order) {{
  w = w_, scales = scales_, biases = biases_, x = x_, y = y_, shape = shape_;
  simd_order = order;
  for (group = 0; group < grid[1]; group += {groups})
    for (column = 0; column < grid[0]; column++)
      if (!run_threadgroup([] {{ {call} }}, {groups})) return false;
  return true;
}}
"""
# Arguments of a kernel, in its shape T, K, N and words of a row, and the place in the grid.
STATE = """
static const void *w, *scales, *biases, *x; static void* y; static const int* shape;
static int group, column;
"""


class Kernels:
    """Kernels compiled together: ours, and for each of their variants MLX's own for one row."""

    def __init__(
        self, sources: Mapping[tuple[AnyVariant, int], KernelSource], flags: Sequence[str] = ROUNDED
    ):
        require_emulator()
        variants = dict.fromkeys(variant for variant, _ in sources)
        text = '#include "shim.h"\n' + STATE + stock_source(variants)
        text += "".join(map(_stock_run, variants))
        text += "".join(_our_run(*key, source) for key, source in sources.items())
        self._library = compiled(text, tuple(flags))

    def stock(
        self, variant: AnyVariant, x: mx.array, *matrix: mx.array, order: int = 0
    ) -> mx.array:
        """MLX's kernel, one row at a time: x of shape (T, K), and what a matrix consists of.

        A matrix that is not quantised may be followed by a bias of shape (N,).
        """
        _, groups, outputs = stock(variant)
        groups *= -(-matrix[0].shape[0] // outputs)
        return self._run(f"stock_{variant}", (x.shape[0], groups), x, matrix, order)

    def ours(
        self, variant: AnyVariant, x: mx.array, *matrix: mx.array, groups: int, order: int = 0
    ) -> mx.array:
        """Our kernel for all rows of x at once, in ``groups`` SIMD groups."""
        return self._run(f"ours_{x.shape[0]}_{variant}", (1, groups), x, matrix, order)

    def _run(
        self, name: str, grid: tuple[int, int], x: mx.array, matrix: Sequence[mx.array], order: int
    ) -> mx.array:
        rows, outputs = x.shape[0], matrix[0].shape[0]
        x_bits, *bits = (np.ascontiguousarray(bits_of(one)) for one in (x, *matrix))
        y = np.zeros((rows, outputs), x_bits.dtype)
        shape = (ctypes.c_int * 4)(rows, x.shape[1], outputs, matrix[0].shape[1])
        pointers = [one.ctypes.data_as(ctypes.c_void_p) for one in (x_bits, y, *bits)]
        pointers += [ctypes.c_void_p()] * (5 - len(pointers))
        function = getattr(self._library, name)
        function.restype = ctypes.c_bool
        if not function(*pointers, shape, (ctypes.c_int * 2)(*grid), order):
            raise RuntimeError(f"lanes of a SIMD group have parted in {name}")
        return mx.array(y).view(x.dtype)


def kinds(variant: AnyVariant) -> dict[str, str]:
    """Names of the dtypes of what a matrix consists of."""
    if isinstance(variant, DenseVariant):
        return {"w": variant.dtype}
    scales = variant.dtype if variant.mode == "affine" else "uint8"
    return {"w": "uint32", "scales": scales, "biases": variant.dtype}


def random_matrix(variant: AnyVariant, outputs: int, inputs: int, seed: int = 0) -> list[mx.array]:
    """What a random matrix consists of: weights, for a quantised one scales and biases, too."""
    spread = inputs**-0.5
    values = mx.random.normal((outputs, inputs), scale=spread, key=mx.random.key(seed))
    values = values.astype(DTYPES[variant.dtype])
    if isinstance(variant, DenseVariant):
        return [values]
    return list(mx.quantize(values, variant.group_size, variant.bits, mode=variant.mode))


def bits_of(x: mx.array) -> np.ndarray:
    return np.array(as_integers(x) if mx.issubdtype(x.dtype, mx.floating) else x)


def _stock_run(variant: AnyVariant) -> str:
    call, groups, _ = stock(variant)
    return RUN.format(name=f"stock_{variant}", groups=groups, call=call)


def _our_run(variant: AnyVariant, rows: int, source: KernelSource) -> str:
    name, number = f"ours_{rows}_{variant}", METAL_TYPES[variant.dtype]
    types = {name: METAL_TYPES.get(kind, f"{kind}_t") for name, kind in kinds(variant).items()}
    parameters = "".join(f"const {types[one]}* {one}, " for one in source.matrix)
    arguments = "".join(f"(const {types[one]}*)::{one}, " for one in source.matrix)
    return (
        f"static void kernel_{name}({parameters}const {number}* x, {number}* y, "
        "const int* x_shape, const int* w_shape, uint thread_index_in_simdgroup, "
        f"uint3 thread_position_in_grid) {{\n{source.body}}}\n"
        + RUN.format(
            name=name,
            groups=source.simd_groups,
            call=f"const int w_shape[] = {{shape[2], shape[3]}}; kernel_{name}({arguments}"
            f"(const {number}*)::x, ({number}*)::y, shape, w_shape, lane, "
            "uint3{uint(lane), uint(group + simd_group), 0});",
        )
    )


@cache
def _folder() -> Path:
    return Path(mkdtemp(prefix="redrafter-kernels-"))


@cache
def _header(flags: tuple[str, ...]) -> Path:
    """A folder with the shim, compiled: to read it takes most of the time of a small source."""
    folder = _folder() / hashlib.sha256(repr(flags).encode()).hexdigest()[:16]
    folder.mkdir()
    header = folder / SHIM.name
    shutil.copy(SHIM, header)
    command = ["g++", *FLAGS, *flags, "-x", "c++-header", str(header), "-o", f"{header}.gch"]
    subprocess.run(command, check=True)
    return folder


@cache
def compiled(text: str, flags: tuple[str, ...]) -> ctypes.CDLL:
    """A library of a C++ source, compiled once; `RuntimeError` has the compiler's first error."""
    name = _folder() / hashlib.sha256(repr((text, flags)).encode()).hexdigest()[:16]
    source, library = name.with_suffix(".cpp"), name.with_suffix(".so")
    source.write_text(text, encoding="utf-8")
    command = ["g++", *FLAGS, *flags, f"-I{_header(flags)}", str(source), "-o", str(library)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(next(line for line in done.stderr.splitlines() if "error" in line))
    return ctypes.CDLL(str(library))
