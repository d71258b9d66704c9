"""Attention in the emulator: MLX's kernel for one token, and ours for the nodes of a tree.

Axes: N nodes of a tree, S committed tokens, D head size.
"""

import ctypes
from collections.abc import Mapping, Sequence

import mlx.core as mx
import numpy as np

from mlx_redrafter.kernels.tree_attention import AttentionVariant
from mlx_redrafter.kernels.variant import METAL_TYPES, dtype_name
from tests.kernels.emulator import HEADERS, ROUNDED, bits_of, compiled, require_emulator, template

STATE = """
static constexpr bool has_mask = false, query_transposed = false, do_causal = false;
static constexpr bool bool_mask = false, float_mask = false, has_sinks = false;
static const void *queries, *keys, *values; static void* y; static const int* parents;
static const int *queries_shape, *keys_shape; static const int64_t* strides;
static float scale; static int head, node;
"""

RUN = """
extern "C" bool {name}(
    const void* queries_, const void* keys_, const void* values_, void* y_, const int* parents_,
    const int* shapes_, const int64_t* strides_, float scale_, int order) {{
  queries = queries_, keys = keys_, values = values_, y = y_, parents = parents_;
  queries_shape = shapes_, keys_shape = shapes_ + 4, strides = strides_, scale = scale_;
  simd_order = order;
  for (head = 0; head < queries_shape[1]; head++)
    for (node = 0; node < queries_shape[2]; node++)
      if (!run_threadgroup([] {{ {call} }}, 32)) return false;
  return true;
}}
"""

STOCK_CALL = """
    sdpa_vector<{number}, {head_size}>(
        (const {number}*)::queries, (const {number}*)::keys, (const {number}*)::values,
        ({number}*)::y, queries_shape[1] / keys_shape[1], keys_shape[2],
        size_t(strides[5]), size_t(strides[6]), size_t(strides[9]), size_t(strides[10]), scale,
        nullptr, nullptr, 0, 0, 0, nullptr, 0, uint3{{uint(head), uint(node), 0}},
        uint3{{uint(queries_shape[1]), uint(queries_shape[2]), 1}}, simd_group, lane);"""

OURS = """
static void kernel_{name}(
    const {number}* queries, const int* queries_shape, const int64_t* queries_strides,
    const {number}* keys, const int* keys_shape, const int64_t* keys_strides,
    const {number}* values, const int64_t* values_strides, const int* parents,
    const int64_t* parents_strides, const float& scale, {number}* y,
    uint3 threadgroup_position_in_grid, uint simdgroup_index_in_threadgroup,
    uint thread_index_in_simdgroup) {{
{source}}}
"""
OUR_CALL = """
    kernel_{name}(
        (const {number}*)::queries, queries_shape, strides, (const {number}*)::keys, keys_shape,
        strides + 4, (const {number}*)::values, strides + 8, parents, strides + 12, scale,
        ({number}*)::y,
        uint3{{uint(head), uint(node), 0}}, simd_group, lane);"""


class AttentionKernels:
    """Attention of some variants: ours, and for each of them MLX's own for one token."""

    def __init__(
        self, sources: Mapping[AttentionVariant, str], flags: Sequence[str] = ROUNDED
    ) -> None:
        require_emulator()
        header = (HEADERS / "sdpa_vector.h").read_text(encoding="utf-8")
        text = '#include "shim.h"\n' + STATE + template(header, "sdpa_vector")
        for variant, source in sources.items():
            number = METAL_TYPES[variant.dtype]
            call = STOCK_CALL.format(number=number, head_size=variant.head_size)
            text += RUN.format(name=f"stock_{variant}", call=call)
            text += OURS.format(name=variant, number=number, source=source)
            call = OUR_CALL.format(name=variant, number=number)
            text += RUN.format(name=f"ours_{variant}", call=call)
        self._library = compiled(text, tuple(flags))

    def stock(self, *rows: mx.array, scale: float, order: int = 0) -> mx.array:
        """MLX's kernel for the query of one token, shape (1, heads, 1, D), keys and values."""
        assert rows[0].shape[2] == 1
        return self._run("stock", rows, None, scale, order)

    def ours(self, *rows: mx.array, parents: mx.array, scale: float, order: int = 0) -> mx.array:
        """Our kernel for queries of shape (1, heads, N, D), keys and values."""
        return self._run("ours", rows, parents, scale, order)

    def _run(
        self,
        whose: str,
        rows: Sequence[mx.array],
        parents: mx.array | None,
        scale: float,
        order: int,
    ) -> mx.array:
        queries, keys, values = map(bits_of, rows)
        # As in mlx-lm: queries are transposed, keys and values parts of larger buffers; parents may
        # be a part of something, too.
        queries = np.ascontiguousarray(queries.swapaxes(1, 2)).swapaxes(1, 2)
        more = [(0, 0), (0, 0), (0, 3), (0, 0)]
        keys, values = (np.pad(one, more, constant_values=1)[:, :, :-3] for one in (keys, values))
        y = np.zeros(queries.shape, queries.dtype)
        shapes = (ctypes.c_int * 8)(*queries.shape, *keys.shape)
        steps = [step // one.itemsize for one in (queries, keys, values) for step in one.strides]
        above = np.repeat(np.zeros(1, np.int32) if parents is None else np.array(parents), 2)[::2]
        steps.append(above.strides[0] // above.itemsize)
        name = f"{whose}_{AttentionVariant(queries.shape[-1], dtype_name(rows[0].dtype))}"
        function = getattr(self._library, name)
        function.restype = ctypes.c_bool
        if not function(
            *(one.ctypes.data_as(ctypes.c_void_p) for one in (queries, keys, values, y, above)),
            shapes,
            (ctypes.c_int64 * 13)(*steps),
            ctypes.c_float(scale),
            order,
        ):
            raise RuntimeError(f"threads have parted in {name}")
        return mx.array(y).view(rows[0].dtype)
