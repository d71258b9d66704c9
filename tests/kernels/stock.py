"""MLX's own Metal source for products with one row, out of the headers that its wheel has.

Axes: T rows of inputs, K inputs, N outputs.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple

import mlx.core as mx

from mlx_redrafter.kernels.variant import LANES, METAL_TYPES, AnyVariant, DenseVariant

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
    """A call of a kernel for one row.

    Attributes:
        call: The call, in a program with the variables of `emulator.STATE`.
        groups: SIMD groups of a threadgroup.
        outputs: Outputs of a threadgroup.
    """

    call: str
    groups: int
    outputs: int


def stock_source(variants: Iterable[AnyVariant]) -> str:
    """The `TEMPLATES` of the installed MLX that these variants need.

    Args:
        variants: Any variants.
    """
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
