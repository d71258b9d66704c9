"""The Metal source of `small_t` for matrices that are not quantised.

The kernel computes every row in the order of MLX's kernel for one row (``gemv``), expression by
expression: the same inputs per lane, blocks and additions, and the same sums over lanes and SIMD
groups. MLX reads a weight once for each row of inputs, this kernel once for all rows.

Axes: T rows of inputs, K inputs, N outputs.
"""

from mlx_redrafter.kernels.metal_source import SIMD_GROUPS, KernelSource
from mlx_redrafter.kernels.variant import LANES, METAL_TYPES, DenseVariant

# Outputs per lane: the most at which a thread's sums stay in its registers.
TILE = 4

# The body of the kernel.
SOURCE = """\
typedef {dtype} number;
constexpr int ROWS = {rows};       // T
constexpr int TILE = {tile};       // outputs per lane
constexpr int LANES = {lanes};     // that share an output
constexpr int GROUPS = {groups};   // SIMD groups that share an output
constexpr int BLOCK = 4 * LANES * GROUPS;

const int K = x_shape[1];
const int N = w_shape[0];
const int lane = thread_index_in_simdgroup;
const int group = int(thread_position_in_grid.y) % GROUPS;
const int tile = int(thread_position_in_grid.y) / GROUPS * (32 / LANES) + lane / LANES;
// The last tile is moved back and computes some outputs again, to the same bits.
const int first = min(TILE * tile, N - TILE);
const device number* wl = w + size_t(first) * K;

float results[TILE][ROWS] = {{}};
int k = 4 * (group * LANES + lane % LANES);
for (int end = BLOCK; end <= K; end += BLOCK) {{
{whole}
  k += BLOCK;
}}
if (K % BLOCK > 0) {{
{rest}
}}

{sums}"""
# Products of four inputs of all rows with four weights of all outputs.
PRODUCTS = """\
  float inputs[ROWS][4];
  for (int t = 0; t < ROWS; t++) {{
    for (int i = 0; i < 4; i++) {{
      inputs[t][i] = {present}x[t * K + k + i]{else_zero};
    }}
  }}
  for (int r = 0; r < TILE; r++) {{
    for (int i = 0; i < 4; i++) {{
      const float weight = {present}wl[r * K + k + i]{else_zero};
      for (int t = 0; t < ROWS; t++) {{
        results[r][t] += weight * inputs[t][i];
      }}
    }}
  }}"""
# The beginning of a sum over the lanes that share an output.
SUM_OF_LANES = """\
for (int r = 0; r < TILE; r++) {
  for (int t = 0; t < ROWS; t++) {
    float total = results[r][t];
    for (int by = LANES / 2; by > 0; by /= 2) {
      total += simd_shuffle_down(total, by);
    }
"""
# Sums of a kernel whose outputs belong to one SIMD group each.
SUMS = (
    SUM_OF_LANES
    + """\
    if (lane % LANES == 0) {
      y[size_t(t) * N + first + r] = static_cast<number>(total);
    }
  }
}
"""
)
# Sums of a kernel in which several SIMD groups share an output.
SUMS_OF_GROUPS = (
    """\
threadgroup float totals[GROUPS][TILE * ROWS];
"""
    + SUM_OF_LANES
    + """\
    if (lane == 0) {
      totals[group][r * ROWS + t] = total;
    }
  }
}
threadgroup_barrier(mem_flags::mem_threadgroup);
if (group == 0 && lane < TILE * ROWS) {
  float total = totals[0][lane];
  for (int g = 1; g < GROUPS; g++) {
    total += totals[g][lane];
  }
  y[size_t(lane % ROWS) * N + first + lane / ROWS] = static_cast<number>(total);
}
"""
)


def dense_source(variant: DenseVariant, rows: int) -> KernelSource:
    """Write the kernel for T rows.

    The arguments of its body are x of shape (T, K), w of shape (N, K) and y of shape (T, N), all of
    the variant's dtype. `DenseVariant.groups` SIMD groups compute 32 / lanes times `TILE` outputs
    of all rows.
    """
    body = SOURCE.format(
        dtype=METAL_TYPES[variant.dtype],
        rows=rows,
        tile=TILE,
        lanes=variant.lanes,
        groups=variant.groups,
        whole=PRODUCTS.format(present="", else_zero=""),
        rest=PRODUCTS.format(present="k + i < K ? float(", else_zero=") : 0.0f"),
        sums=SUMS if variant.groups == 1 else SUMS_OF_GROUPS,
    )
    simd_groups = max(SIMD_GROUPS, variant.groups)
    outputs = simd_groups // variant.groups * LANES // variant.lanes * TILE
    return KernelSource(body, ("w",), simd_groups, outputs)
