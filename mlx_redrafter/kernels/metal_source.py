"""The Metal source of `small_t`: a product with a quantised matrix for several rows at once.

The kernel computes every row in the order of MLX's kernel for one row, expression by expression:
the same inputs per lane, blocks and additions, and the sum over a SIMD group at the end. Only loops
are exchanged: MLX unpacks a weight once for each row of inputs, this kernel once for all rows.

Axes: T rows of inputs, K inputs, N outputs.
"""

from typing import NamedTuple

from mlx_redrafter.kernels.variant import METAL_TYPES, PACKS, Variant

# Maximum number of rows per launch: a thread's sums for more do not fit into its registers.
MAX_ROWS = 8
# SIMD groups per threadgroup, as in MLX.
SIMD_GROUPS = 2


class KernelSource(NamedTuple):
    """A kernel's body for `mx.fast.metal_kernel`, and the parameters of its launch.

    ``matrix`` names the arrays of a matrix. A threadgroup has ``simd_groups`` SIMD groups, which
    compute ``outputs`` outputs for all rows.
    """

    body: str
    matrix: tuple[str, ...]
    simd_groups: int
    outputs: int


# The body of the kernel; "{dots}" stands for the products of a block.
SOURCE = """\
typedef {dtype} number;
constexpr int BITS = {bits};
constexpr int MASK = (1 << BITS) - 1;
constexpr int GROUP = {group_size};   // weights per scale and bias
constexpr int ROWS = {rows};          // T
constexpr int TILE = {tile};          // outputs per SIMD group
constexpr int VALUES = {values};      // inputs of a lane per block
constexpr int BLOCK = 32 * VALUES;

const int K = x_shape[1];
const int N = w_shape[0];
const int groups = K / GROUP;
const int bytes = K / 8 * BITS;
const int lane = thread_index_in_simdgroup;
// The last tile is moved back and computes some outputs again, to the same bits.
const int first = min(TILE * int(thread_position_in_grid.y), N - TILE);

const device uchar* wl = (const device uchar*)w + size_t(first) * bytes + lane * VALUES * BITS / 8;
{pointers}
const device number* xl = x + lane * VALUES;

float results[TILE][ROWS] = {{}};
for (int k = lane * VALUES; k < K; k += BLOCK) {{
  float dots[TILE][ROWS] = {{}};
{dots}
  wl += BLOCK * BITS / 8;
{next}
  xl += BLOCK;
}}

for (int r = 0; r < TILE; r++) {{
  for (int t = 0; t < ROWS; t++) {{
    const float total = simd_sum(results[r][t]);
    if (lane == 0) {{
      y[size_t(t) * N + first + r] = static_cast<number>(total);
    }}
  }}
}}
"""

# Code for scales and biases: pointers to them, their use in a block, the step to the next block.
AFFINE = (
    """\
const device number* sl = scales + size_t(first) * groups + lane * VALUES / GROUP;
const device number* bl = biases + size_t(first) * groups + lane * VALUES / GROUP;""",
    """\
  float sums[ROWS] = {{}};
{dots}
  for (int r = 0; r < TILE; r++) {{
    const float s = sl[r * groups];
    const float b = bl[r * groups];
    for (int t = 0; t < ROWS; t++) {{
      results[r][t] += s * dots[r][t] + sums[t] * b;
    }}
  }}""",
    """\
  sl += BLOCK / GROUP;
  bl += BLOCK / GROUP;""",
)
# The same for scales alone, which are powers of two.
MXFP4 = (
    """\
const device uchar* sl = scales + size_t(first) * groups + lane * VALUES / GROUP;""",
    """\
{dots}
  for (int r = 0; r < TILE; r++) {{
    const uint exponent = sl[r * groups];
    const float s = as_type<float>(exponent == 0 ? 0x400000 : exponent << 23);
    for (int t = 0; t < ROWS; t++) {{
      results[r][t] += s * dots[r][t];
    }}
  }}""",
    """\
  sl += BLOCK / GROUP;""",
)
# Products with four weights at a time, if one or two bytes hold them.
FOURS = """\
  for (int i = 0; i < VALUES; i += 4) {{
    float inputs[ROWS][4];
    for (int t = 0; t < ROWS; t++) {{
      const device number* v = xl + t * K + i;
{load}
    }}
    for (int r = 0; r < TILE; r++) {{
      const device uchar* packed = wl + r * bytes + i * BITS / 8;
{unpack}
      for (int t = 0; t < ROWS; t++) {{
        const thread float* v = inputs[t];
{multiply}
      }}
    }}
  }}"""
# Products with one weight at a time, if some weights have their upper bits in the next byte.
ONES = """\
  for (int i = 0; i < VALUES; i += {pack}) {{
    float added[ROWS];
    for (int j = 0; j < {pack}; j++) {{
      const int byte = (i + j) * BITS / 8;
      const int bit = (i + j) * BITS % 8;
      float inputs[ROWS];
      for (int t = 0; t < ROWS; t++) {{
        const float v = xl[t * K + i + j];
        added[t] = j == 0 ? v : added[t] + v;
        inputs[t] = v / float(1 << bit);
      }}
      for (int r = 0; r < TILE; r++) {{
        const float low = float(wl[r * bytes + byte] & (MASK << bit));
        for (int t = 0; t < ROWS; t++) {{
          dots[r][t] += low * inputs[t];
        }}
        if (bit + BITS > 8) {{
          const float high = float(wl[r * bytes + byte + 1] & (MASK >> (8 - bit)));
          for (int t = 0; t < ROWS; t++) {{
            dots[r][t] += high * (inputs[t] * 256.0f);
          }}
        }}
      }}
    }}
    for (int t = 0; t < ROWS; t++) {{
      sums[t] += added[t];
    }}
  }}"""
# Four inputs that meet weights of mxfp4.
LOAD_MXFP4 = """\
      for (int j = 0; j < 4; j++) {
        inputs[t][j] = float(v[j]);
      }"""
# Four weights of mxfp4: a sign, two bits of an exponent and one bit of a mantissa each.
UNPACK_MXFP4 = """\
      const uint u = *(const device ushort*)packed;
      float q[4];
      for (int j = 0; j < 4; j++) {
        const float16_t small = as_type<float16_t>(ushort((u >> (4 * j) & 7) << 9));
        const float size = small * float16_t(16384.0f);
        q[j] = u >> (4 * j) & 8 ? -size : size;
      }"""
# Four inputs: their sum, and their values divided to suit weights that are not shifted.
LOAD_DIVIDED = """\
      sums[t] += float(v[0]) + float(v[1]) + float(v[2]) + float(v[3]);
      inputs[t][0] = float(v[0]);
      inputs[t][1] = float(v[1]) / {}.0f;
      inputs[t][2] = float(v[2]) / {}.0f;
      inputs[t][3] = float(v[3]) / {}.0f;"""
# The same by bits.
LOAD = {
    2: LOAD_DIVIDED.format(4, 16, 64),
    4: LOAD_DIVIDED.format(16, 256, 4096),
    8: """\
      for (int j = 0; j < 4; j++) {
        sums[t] += float(v[j]);
        inputs[t][j] = float(v[j]);
      }""",
}
# Four weights by bits.
UNPACK = {
    2: """\
      const float q[4] = {
          float(packed[0] & 0x03), float(packed[0] & 0x0c), float(packed[0] & 0x30),
          float(packed[0] & 0xc0)};""",
    4: """\
      const ushort u = *(const device ushort*)packed;
      const float q[4] = {
          float(u & 0x000f), float(u & 0x00f0), float(u & 0x0f00), float(u & 0xf000)};""",
    8: """\
      const float q[4] = {
          float(packed[0]), float(packed[1]), float(packed[2]), float(packed[3])};""",
}
# Products of four inputs and four weights, added up at once, and one by one.
FOUR_PRODUCTS = """\
        dots[r][t] += v[0] * q[0] + v[1] * q[1] + v[2] * q[2] + v[3] * q[3];"""
ONE_BY_ONE = """\
        for (int j = 0; j < 4; j++) {
          dots[r][t] += v[j] * q[j];
        }"""


def tile(rows: int) -> int:
    """Return the outputs per SIMD group: the most whose sums stay in a thread's registers."""
    return 4 if rows <= 5 else 2


def metal_source(variant: Variant, rows: int) -> KernelSource:
    """Write the kernel for T rows.

    The arguments of its body are x of shape (T, K), w of shape (N, K * bits / 32), scales and
    biases of shape (N, K / group_size), and y of shape (T, N). Their dtype is the variant's, except
    w in uint32 and the scales of mxfp4 in uint8. mxfp4 has no biases.
    One SIMD group computes `tile` outputs of all rows.
    """
    is_affine = variant.mode == "affine"
    pointers, block, following = AFFINE if is_affine else MXFP4
    body = SOURCE.format(
        dtype=METAL_TYPES[variant.dtype],
        bits=variant.bits,
        group_size=variant.group_size,
        rows=rows,
        tile=tile(rows),
        values=variant.values,
        pointers=pointers,
        dots=block.format(dots=_dots(variant)),
        next=following,
    )
    matrix = ("w", "scales", "biases") if is_affine else ("w", "scales")
    return KernelSource(body, matrix, SIMD_GROUPS, SIMD_GROUPS * tile(rows))


def _dots(variant: Variant) -> str:
    bits = variant.bits
    if variant.mode == "mxfp4":
        return FOURS.format(load=LOAD_MXFP4, unpack=UNPACK_MXFP4, multiply=FOUR_PRODUCTS)
    if bits not in LOAD:
        return ONES.format(pack=PACKS[bits])
    multiply = ONE_BY_ONE if bits == 8 else FOUR_PRODUCTS
    return FOURS.format(load=LOAD[bits], unpack=UNPACK[bits], multiply=multiply)
