"""Attention of a tree's nodes, bit for bit that of one token at a time, and its Metal source.

The kernel computes every node in the order of MLX's kernel for one token (``sdpa_vector``) whose
cache is the node's path: key k belongs to SIMD group k mod 32, and so on, expression by expression.
Only the position of a key in the buffer differs: committed tokens come first, then the node's
ancestors and the node itself, wherever they stand among the nodes.

Axes: N nodes of a tree, S committed tokens, D head size.
"""

from dataclasses import dataclass
from functools import cache
from typing import Any

import mlx.core as mx

from mlx_redrafter.kernels.variant import LANES, METAL_TYPES, dtype_name

# Head sizes for which MLX has the kernel.
HEAD_SIZES = (64, 96, 128, 256)
# Threads per threadgroup: 32 SIMD groups of 32 threads.
THREADS = LANES * LANES

SOURCE = """\
typedef {dtype} number;
constexpr int PART = {head_size} / 32;  // numbers of a head per lane

const int head = threadgroup_position_in_grid.x;
const int node = threadgroup_position_in_grid.y;
const int group = simdgroup_index_in_threadgroup;
const int lane = thread_index_in_simdgroup;
const int committed = keys_shape[2] - queries_shape[2];
const int key_head = head / (queries_shape[1] / keys_shape[1]);

int depth = 0;
for (int n = node; n > 0; n = parents[n * parents_strides[0]]) {{
  depth++;
}}

float query[PART];
float key[PART];
float sums[PART] = {{}};
const device number* q =
    queries + head * queries_strides[1] + node * queries_strides[2];
for (int j = 0; j < PART; j++) {{
  query[j] = scale * float(q[(lane * PART + j) * queries_strides[3]]);
}}

float max_score = Limits<float>::finite_min;
float total = 0;
for (int i = group; i <= committed + depth; i += 32) {{
  int row = i;
  if (i >= committed) {{  // the node's ancestor at depth i - committed
    row = node;
    for (int up = committed + depth - i; up > 0; up--) {{
      row = parents[row * parents_strides[0]];
    }}
    row += committed;
  }}
  const device number* k = keys + key_head * keys_strides[1] + row * keys_strides[2];
  const device number* v = values + key_head * values_strides[1] + row * values_strides[2];
  for (int j = 0; j < PART; j++) {{
    key[j] = k[(lane * PART + j) * keys_strides[3]];
  }}
  float score = 0;
  for (int j = 0; j < PART; j++) {{
    score += query[j] * key[j];
  }}
  score = simd_sum(score);
  const float new_max = max(max_score, score);
  const float factor = fast::exp(max_score - new_max);
  const float weight = fast::exp(score - new_max);
  max_score = new_max;
  total = total * factor + weight;
  for (int j = 0; j < PART; j++) {{
    const float value = v[(lane * PART + j) * values_strides[3]];
    sums[j] = sums[j] * factor + weight * value;
  }}
}}

threadgroup float all_sums[32 * 32];
threadgroup float max_scores[32];
threadgroup float totals[32];
if (lane == 0) {{
  max_scores[group] = max_score;
  totals[group] = total;
}}
threadgroup_barrier(mem_flags::mem_threadgroup);
max_score = max_scores[lane];
const float new_max = simd_max(max_score);
const float factor = fast::exp(max_score - new_max);
total = simd_sum(totals[lane] * factor);
for (int j = 0; j < PART; j++) {{
  all_sums[lane * 32 + group] = sums[j];
  threadgroup_barrier(mem_flags::mem_threadgroup);
  sums[j] = simd_sum(all_sums[group * 32 + lane] * factor);
  sums[j] = total == 0 ? sums[j] : (sums[j] / total);
  threadgroup_barrier(mem_flags::mem_threadgroup);
}}
if (lane == 0) {{
  const size_t first = (size_t(head) * queries_shape[2] + node) * 32 * PART + group * PART;
  for (int j = 0; j < PART; j++) {{
    y[first + j] = static_cast<number>(sums[j]);
  }}
}}
"""


@dataclass(frozen=True)
class AttentionVariant:
    head_size: int
    dtype: str

    def __str__(self) -> str:
        return f"{self.head_size}_{self.dtype}"


def attention_source(variant: AttentionVariant) -> str:
    """Write the body of the kernel for `mx.fast.metal_kernel`.

    The arguments of the body are those of `tree_attention`, the scale in float32, and y of the
    shape of the queries. One threadgroup of `THREADS` threads computes a node of a head.
    """
    return SOURCE.format(dtype=METAL_TYPES[variant.dtype], head_size=variant.head_size)


def tree_attention(
    queries: mx.array, keys: mx.array, values: mx.array, parents: mx.array, scale: float
) -> mx.array:
    """Let the nodes of one tree attend to all committed tokens, their ancestors and themselves.

    Queries have shape (1, heads, N, D), like the result, keys and values (1, key heads, S + N, D),
    with the entries of the nodes at the end, all in one dtype. Parents are node indices, int32,
    shape (N,), the root's 0. MLX raises a RuntimeError when it computes a kernel that does not
    compile.
    """
    _, heads, nodes, head_size = queries.shape
    (y,) = _kernel(AttentionVariant(head_size, dtype_name(queries.dtype)))(
        inputs=[queries, keys, values, parents, mx.array(scale, dtype=mx.float32)],
        grid=(heads * THREADS, nodes, 1),
        threadgroup=(THREADS, 1, 1),
        output_shapes=[queries.shape],
        output_dtypes=[queries.dtype],
    )
    return y


@cache
def _kernel(variant: AttentionVariant) -> Any:
    return mx.fast.metal_kernel(
        name=f"tree_attention_{variant}",
        input_names=["queries", "keys", "values", "parents", "scale"],
        output_names=["y"],
        source=attention_source(variant),
        ensure_row_contiguous=False,  # keys are a slice of a buffer, which MLX would copy
    )
