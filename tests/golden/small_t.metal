// body 1
const int K = x_shape[1];
const int N = w_shape[0];
const int groups = K / GROUP;
const int bytes = K / 8 * BITS;
const int lane = thread_index_in_simdgroup;
// The last tile is moved back and computes some outputs again, to the same bits.
const int first = min(TILE * int(thread_position_in_grid.y), N - TILE);

const device uchar* wl = (const device uchar*)w + size_t(first) * bytes + lane * VALUES * BITS / 8;
const device number* sl = scales + size_t(first) * groups + lane * VALUES / GROUP;
const device number* bl = biases + size_t(first) * groups + lane * VALUES / GROUP;
const device number* xl = x + lane * VALUES;

float results[TILE][ROWS] = {};
for (int k = lane * VALUES; k < K; k += BLOCK) {
  float dots[TILE][ROWS] = {};
  float sums[ROWS] = {};
  for (int i = 0; i < VALUES; i += 4) {
    float inputs[ROWS][4];
    for (int t = 0; t < ROWS; t++) {
      const device number* v = xl + t * K + i;
      sums[t] += float(v[0]) + float(v[1]) + float(v[2]) + float(v[3]);
      inputs[t][0] = v[0];
      inputs[t][1] = v[1] / 16.0f;
      inputs[t][2] = v[2] / 256.0f;
      inputs[t][3] = v[3] / 4096.0f;
    }
    for (int r = 0; r < TILE; r++) {
      const device uchar* packed = wl + r * bytes + i * BITS / 8;
      const ushort u = *(const device ushort*)packed;
      const float q[4] = {
          float(u & 0x000f), float(u & 0x00f0), float(u & 0x0f00), float(u & 0xf000)};
      for (int t = 0; t < ROWS; t++) {
        const thread float* v = inputs[t];
        dots[r][t] += v[0] * q[0] + v[1] * q[1] + v[2] * q[2] + v[3] * q[3];
      }
    }
  }
  for (int r = 0; r < TILE; r++) {
    const float s = sl[r * groups];
    const float b = bl[r * groups];
    for (int t = 0; t < ROWS; t++) {
      results[r][t] += s * dots[r][t] + sums[t] * b;
    }
  }
  wl += BLOCK * BITS / 8;
  sl += BLOCK / GROUP;
  bl += BLOCK / GROUP;
  xl += BLOCK;
}

for (int r = 0; r < TILE; r++) {
  for (int t = 0; t < ROWS; t++) {
    const float total = simd_sum(results[r][t]);
    if (lane == 0) {
      y[size_t(t) * N + first + r] = static_cast<number>(total);
    }
  }
}

// body 2
const int K = x_shape[1];
const int N = w_shape[0];
const int groups = K / GROUP;
const int bytes = K / 8 * BITS;
const int lane = thread_index_in_simdgroup;
// The last tile is moved back and computes some outputs again, to the same bits.
const int first = min(TILE * int(thread_position_in_grid.y), N - TILE);

const device uchar* wl = (const device uchar*)w + size_t(first) * bytes + lane * VALUES * BITS / 8;
const device number* sl = scales + size_t(first) * groups + lane * VALUES / GROUP;
const device number* bl = biases + size_t(first) * groups + lane * VALUES / GROUP;
const device number* xl = x + lane * VALUES;

float results[TILE][ROWS] = {};
for (int k = lane * VALUES; k < K; k += BLOCK) {
  float dots[TILE][ROWS] = {};
  float sums[ROWS] = {};
  for (int i = 0; i < VALUES; i += 4) {
    float inputs[ROWS][4];
    for (int t = 0; t < ROWS; t++) {
      const device number* v = xl + t * K + i;
      sums[t] += v[0] + v[1] + v[2] + v[3];
      inputs[t][0] = v[0];
      inputs[t][1] = v[1] / 16.0f;
      inputs[t][2] = v[2] / 256.0f;
      inputs[t][3] = v[3] / 4096.0f;
    }
    for (int r = 0; r < TILE; r++) {
      const device uchar* packed = wl + r * bytes + i * BITS / 8;
      const ushort u = *(const device ushort*)packed;
      const float q[4] = {
          float(u & 0x000f), float(u & 0x00f0), float(u & 0x0f00), float(u & 0xf000)};
      for (int t = 0; t < ROWS; t++) {
        const thread float* v = inputs[t];
        dots[r][t] += v[0] * q[0] + v[1] * q[1] + v[2] * q[2] + v[3] * q[3];
      }
    }
  }
  for (int r = 0; r < TILE; r++) {
    const float s = sl[r * groups];
    const float b = bl[r * groups];
    for (int t = 0; t < ROWS; t++) {
      results[r][t] += s * dots[r][t] + sums[t] * b;
    }
  }
  wl += BLOCK * BITS / 8;
  sl += BLOCK / GROUP;
  bl += BLOCK / GROUP;
  xl += BLOCK;
}

for (int r = 0; r < TILE; r++) {
  for (int t = 0; t < ROWS; t++) {
    const float total = simd_sum(results[r][t]);
    if (lane == 0) {
      y[size_t(t) * N + first + r] = static_cast<number>(total);
    }
  }
}

// body 3
const int K = x_shape[1];
const int N = w_shape[0];
const int groups = K / GROUP;
const int bytes = K / 8 * BITS;
const int lane = thread_index_in_simdgroup;
// The last tile is moved back and computes some outputs again, to the same bits.
const int first = min(TILE * int(thread_position_in_grid.y), N - TILE);

const device uchar* wl = (const device uchar*)w + size_t(first) * bytes + lane * VALUES * BITS / 8;
const device number* sl = scales + size_t(first) * groups + lane * VALUES / GROUP;
const device number* bl = biases + size_t(first) * groups + lane * VALUES / GROUP;
const device number* xl = x + lane * VALUES;

float results[TILE][ROWS] = {};
for (int k = lane * VALUES; k < K; k += BLOCK) {
  float dots[TILE][ROWS] = {};
  float sums[ROWS] = {};
  for (int i = 0; i < VALUES; i += 4) {
    float inputs[ROWS][4];
    for (int t = 0; t < ROWS; t++) {
      const device number* v = xl + t * K + i;
      for (int j = 0; j < 4; j++) {
        sums[t] += v[j];
        inputs[t][j] = v[j];
      }
    }
    for (int r = 0; r < TILE; r++) {
      const device uchar* packed = wl + r * bytes + i * BITS / 8;
      const float q[4] = {
          float(packed[0]), float(packed[1]), float(packed[2]), float(packed[3])};
      for (int t = 0; t < ROWS; t++) {
        const thread float* v = inputs[t];
        for (int j = 0; j < 4; j++) {
          dots[r][t] += v[j] * q[j];
        }
      }
    }
  }
  for (int r = 0; r < TILE; r++) {
    const float s = sl[r * groups];
    const float b = bl[r * groups];
    for (int t = 0; t < ROWS; t++) {
      results[r][t] += s * dots[r][t] + sums[t] * b;
    }
  }
  wl += BLOCK * BITS / 8;
  sl += BLOCK / GROUP;
  bl += BLOCK / GROUP;
  xl += BLOCK;
}

for (int r = 0; r < TILE; r++) {
  for (int t = 0; t < ROWS; t++) {
    const float total = simd_sum(results[r][t]);
    if (lane == 0) {
      y[size_t(t) * N + first + r] = static_cast<number>(total);
    }
  }
}

// qmv_fast_4_bits_32_float16, body 1: typedef float16_t number; BITS = 4; GROUP = 32; ROWS = 2; TILE = 4; VALUES = 16; BLOCK = 32 * VALUES;
// qmv_fast_4_bits_32_float16, body 1: typedef float16_t number; BITS = 4; GROUP = 32; ROWS = 3; TILE = 4; VALUES = 16; BLOCK = 32 * VALUES;
// qmv_fast_4_bits_32_float16, body 1: typedef float16_t number; BITS = 4; GROUP = 32; ROWS = 4; TILE = 4; VALUES = 16; BLOCK = 32 * VALUES;
// qmv_fast_4_bits_32_float16, body 1: typedef float16_t number; BITS = 4; GROUP = 32; ROWS = 5; TILE = 4; VALUES = 16; BLOCK = 32 * VALUES;
// qmv_fast_4_bits_32_float16, body 1: typedef float16_t number; BITS = 4; GROUP = 32; ROWS = 6; TILE = 2; VALUES = 16; BLOCK = 32 * VALUES;
// qmv_fast_4_bits_32_float16, body 1: typedef float16_t number; BITS = 4; GROUP = 32; ROWS = 7; TILE = 2; VALUES = 16; BLOCK = 32 * VALUES;
// qmv_fast_4_bits_32_float16, body 1: typedef float16_t number; BITS = 4; GROUP = 32; ROWS = 8; TILE = 2; VALUES = 16; BLOCK = 32 * VALUES;
// qmv_fast_4_bits_32_float16_float16_sums, body 2: typedef float16_t number; BITS = 4; GROUP = 32; ROWS = 2; TILE = 4; VALUES = 16; BLOCK = 32 * VALUES;
// qmv_fast_4_bits_32_float16_float16_sums, body 2: typedef float16_t number; BITS = 4; GROUP = 32; ROWS = 3; TILE = 4; VALUES = 16; BLOCK = 32 * VALUES;
// qmv_fast_4_bits_32_float16_float16_sums, body 2: typedef float16_t number; BITS = 4; GROUP = 32; ROWS = 4; TILE = 4; VALUES = 16; BLOCK = 32 * VALUES;
// qmv_fast_4_bits_32_float16_float16_sums, body 2: typedef float16_t number; BITS = 4; GROUP = 32; ROWS = 5; TILE = 4; VALUES = 16; BLOCK = 32 * VALUES;
// qmv_fast_4_bits_32_float16_float16_sums, body 2: typedef float16_t number; BITS = 4; GROUP = 32; ROWS = 6; TILE = 2; VALUES = 16; BLOCK = 32 * VALUES;
// qmv_fast_4_bits_32_float16_float16_sums, body 2: typedef float16_t number; BITS = 4; GROUP = 32; ROWS = 7; TILE = 2; VALUES = 16; BLOCK = 32 * VALUES;
// qmv_fast_4_bits_32_float16_float16_sums, body 2: typedef float16_t number; BITS = 4; GROUP = 32; ROWS = 8; TILE = 2; VALUES = 16; BLOCK = 32 * VALUES;
// qmv_4_bits_32_float16, body 1: typedef float16_t number; BITS = 4; GROUP = 32; ROWS = 2; TILE = 4; VALUES = 8; BLOCK = 32 * VALUES;
// qmv_4_bits_32_float16, body 1: typedef float16_t number; BITS = 4; GROUP = 32; ROWS = 3; TILE = 4; VALUES = 8; BLOCK = 32 * VALUES;
// qmv_4_bits_32_float16, body 1: typedef float16_t number; BITS = 4; GROUP = 32; ROWS = 4; TILE = 4; VALUES = 8; BLOCK = 32 * VALUES;
// qmv_4_bits_32_float16, body 1: typedef float16_t number; BITS = 4; GROUP = 32; ROWS = 5; TILE = 4; VALUES = 8; BLOCK = 32 * VALUES;
// qmv_4_bits_32_float16, body 1: typedef float16_t number; BITS = 4; GROUP = 32; ROWS = 6; TILE = 2; VALUES = 8; BLOCK = 32 * VALUES;
// qmv_4_bits_32_float16, body 1: typedef float16_t number; BITS = 4; GROUP = 32; ROWS = 7; TILE = 2; VALUES = 8; BLOCK = 32 * VALUES;
// qmv_4_bits_32_float16, body 1: typedef float16_t number; BITS = 4; GROUP = 32; ROWS = 8; TILE = 2; VALUES = 8; BLOCK = 32 * VALUES;
// qmv_4_bits_32_float16_float16_sums, body 2: typedef float16_t number; BITS = 4; GROUP = 32; ROWS = 2; TILE = 4; VALUES = 8; BLOCK = 32 * VALUES;
// qmv_4_bits_32_float16_float16_sums, body 2: typedef float16_t number; BITS = 4; GROUP = 32; ROWS = 3; TILE = 4; VALUES = 8; BLOCK = 32 * VALUES;
// qmv_4_bits_32_float16_float16_sums, body 2: typedef float16_t number; BITS = 4; GROUP = 32; ROWS = 4; TILE = 4; VALUES = 8; BLOCK = 32 * VALUES;
// qmv_4_bits_32_float16_float16_sums, body 2: typedef float16_t number; BITS = 4; GROUP = 32; ROWS = 5; TILE = 4; VALUES = 8; BLOCK = 32 * VALUES;
// qmv_4_bits_32_float16_float16_sums, body 2: typedef float16_t number; BITS = 4; GROUP = 32; ROWS = 6; TILE = 2; VALUES = 8; BLOCK = 32 * VALUES;
// qmv_4_bits_32_float16_float16_sums, body 2: typedef float16_t number; BITS = 4; GROUP = 32; ROWS = 7; TILE = 2; VALUES = 8; BLOCK = 32 * VALUES;
// qmv_4_bits_32_float16_float16_sums, body 2: typedef float16_t number; BITS = 4; GROUP = 32; ROWS = 8; TILE = 2; VALUES = 8; BLOCK = 32 * VALUES;
// qmv_fast_4_bits_32_bfloat16, body 1: typedef bfloat16_t number; BITS = 4; GROUP = 32; ROWS = 2; TILE = 4; VALUES = 16; BLOCK = 32 * VALUES;
// qmv_fast_4_bits_32_bfloat16, body 1: typedef bfloat16_t number; BITS = 4; GROUP = 32; ROWS = 3; TILE = 4; VALUES = 16; BLOCK = 32 * VALUES;
// qmv_fast_4_bits_32_bfloat16, body 1: typedef bfloat16_t number; BITS = 4; GROUP = 32; ROWS = 4; TILE = 4; VALUES = 16; BLOCK = 32 * VALUES;
// qmv_fast_4_bits_32_bfloat16, body 1: typedef bfloat16_t number; BITS = 4; GROUP = 32; ROWS = 5; TILE = 4; VALUES = 16; BLOCK = 32 * VALUES;
// qmv_fast_4_bits_32_bfloat16, body 1: typedef bfloat16_t number; BITS = 4; GROUP = 32; ROWS = 6; TILE = 2; VALUES = 16; BLOCK = 32 * VALUES;
// qmv_fast_4_bits_32_bfloat16, body 1: typedef bfloat16_t number; BITS = 4; GROUP = 32; ROWS = 7; TILE = 2; VALUES = 16; BLOCK = 32 * VALUES;
// qmv_fast_4_bits_32_bfloat16, body 1: typedef bfloat16_t number; BITS = 4; GROUP = 32; ROWS = 8; TILE = 2; VALUES = 16; BLOCK = 32 * VALUES;
// qmv_fast_4_bits_32_bfloat16_bfloat16_sums, body 2: typedef bfloat16_t number; BITS = 4; GROUP = 32; ROWS = 2; TILE = 4; VALUES = 16; BLOCK = 32 * VALUES;
// qmv_fast_4_bits_32_bfloat16_bfloat16_sums, body 2: typedef bfloat16_t number; BITS = 4; GROUP = 32; ROWS = 3; TILE = 4; VALUES = 16; BLOCK = 32 * VALUES;
// qmv_fast_4_bits_32_bfloat16_bfloat16_sums, body 2: typedef bfloat16_t number; BITS = 4; GROUP = 32; ROWS = 4; TILE = 4; VALUES = 16; BLOCK = 32 * VALUES;
// qmv_fast_4_bits_32_bfloat16_bfloat16_sums, body 2: typedef bfloat16_t number; BITS = 4; GROUP = 32; ROWS = 5; TILE = 4; VALUES = 16; BLOCK = 32 * VALUES;
// qmv_fast_4_bits_32_bfloat16_bfloat16_sums, body 2: typedef bfloat16_t number; BITS = 4; GROUP = 32; ROWS = 6; TILE = 2; VALUES = 16; BLOCK = 32 * VALUES;
// qmv_fast_4_bits_32_bfloat16_bfloat16_sums, body 2: typedef bfloat16_t number; BITS = 4; GROUP = 32; ROWS = 7; TILE = 2; VALUES = 16; BLOCK = 32 * VALUES;
// qmv_fast_4_bits_32_bfloat16_bfloat16_sums, body 2: typedef bfloat16_t number; BITS = 4; GROUP = 32; ROWS = 8; TILE = 2; VALUES = 16; BLOCK = 32 * VALUES;
// qmv_4_bits_32_bfloat16, body 1: typedef bfloat16_t number; BITS = 4; GROUP = 32; ROWS = 2; TILE = 4; VALUES = 8; BLOCK = 32 * VALUES;
// qmv_4_bits_32_bfloat16, body 1: typedef bfloat16_t number; BITS = 4; GROUP = 32; ROWS = 3; TILE = 4; VALUES = 8; BLOCK = 32 * VALUES;
// qmv_4_bits_32_bfloat16, body 1: typedef bfloat16_t number; BITS = 4; GROUP = 32; ROWS = 4; TILE = 4; VALUES = 8; BLOCK = 32 * VALUES;
// qmv_4_bits_32_bfloat16, body 1: typedef bfloat16_t number; BITS = 4; GROUP = 32; ROWS = 5; TILE = 4; VALUES = 8; BLOCK = 32 * VALUES;
// qmv_4_bits_32_bfloat16, body 1: typedef bfloat16_t number; BITS = 4; GROUP = 32; ROWS = 6; TILE = 2; VALUES = 8; BLOCK = 32 * VALUES;
// qmv_4_bits_32_bfloat16, body 1: typedef bfloat16_t number; BITS = 4; GROUP = 32; ROWS = 7; TILE = 2; VALUES = 8; BLOCK = 32 * VALUES;
// qmv_4_bits_32_bfloat16, body 1: typedef bfloat16_t number; BITS = 4; GROUP = 32; ROWS = 8; TILE = 2; VALUES = 8; BLOCK = 32 * VALUES;
// qmv_4_bits_32_bfloat16_bfloat16_sums, body 2: typedef bfloat16_t number; BITS = 4; GROUP = 32; ROWS = 2; TILE = 4; VALUES = 8; BLOCK = 32 * VALUES;
// qmv_4_bits_32_bfloat16_bfloat16_sums, body 2: typedef bfloat16_t number; BITS = 4; GROUP = 32; ROWS = 3; TILE = 4; VALUES = 8; BLOCK = 32 * VALUES;
// qmv_4_bits_32_bfloat16_bfloat16_sums, body 2: typedef bfloat16_t number; BITS = 4; GROUP = 32; ROWS = 4; TILE = 4; VALUES = 8; BLOCK = 32 * VALUES;
// qmv_4_bits_32_bfloat16_bfloat16_sums, body 2: typedef bfloat16_t number; BITS = 4; GROUP = 32; ROWS = 5; TILE = 4; VALUES = 8; BLOCK = 32 * VALUES;
// qmv_4_bits_32_bfloat16_bfloat16_sums, body 2: typedef bfloat16_t number; BITS = 4; GROUP = 32; ROWS = 6; TILE = 2; VALUES = 8; BLOCK = 32 * VALUES;
// qmv_4_bits_32_bfloat16_bfloat16_sums, body 2: typedef bfloat16_t number; BITS = 4; GROUP = 32; ROWS = 7; TILE = 2; VALUES = 8; BLOCK = 32 * VALUES;
// qmv_4_bits_32_bfloat16_bfloat16_sums, body 2: typedef bfloat16_t number; BITS = 4; GROUP = 32; ROWS = 8; TILE = 2; VALUES = 8; BLOCK = 32 * VALUES;
// qmv_fast_4_bits_32_float32, body 1: typedef float number; BITS = 4; GROUP = 32; ROWS = 2; TILE = 4; VALUES = 16; BLOCK = 32 * VALUES;
// qmv_fast_4_bits_32_float32, body 1: typedef float number; BITS = 4; GROUP = 32; ROWS = 3; TILE = 4; VALUES = 16; BLOCK = 32 * VALUES;
// qmv_fast_4_bits_32_float32, body 1: typedef float number; BITS = 4; GROUP = 32; ROWS = 4; TILE = 4; VALUES = 16; BLOCK = 32 * VALUES;
// qmv_fast_4_bits_32_float32, body 1: typedef float number; BITS = 4; GROUP = 32; ROWS = 5; TILE = 4; VALUES = 16; BLOCK = 32 * VALUES;
// qmv_fast_4_bits_32_float32, body 1: typedef float number; BITS = 4; GROUP = 32; ROWS = 6; TILE = 2; VALUES = 16; BLOCK = 32 * VALUES;
// qmv_fast_4_bits_32_float32, body 1: typedef float number; BITS = 4; GROUP = 32; ROWS = 7; TILE = 2; VALUES = 16; BLOCK = 32 * VALUES;
// qmv_fast_4_bits_32_float32, body 1: typedef float number; BITS = 4; GROUP = 32; ROWS = 8; TILE = 2; VALUES = 16; BLOCK = 32 * VALUES;
// qmv_4_bits_32_float32, body 1: typedef float number; BITS = 4; GROUP = 32; ROWS = 2; TILE = 4; VALUES = 8; BLOCK = 32 * VALUES;
// qmv_4_bits_32_float32, body 1: typedef float number; BITS = 4; GROUP = 32; ROWS = 3; TILE = 4; VALUES = 8; BLOCK = 32 * VALUES;
// qmv_4_bits_32_float32, body 1: typedef float number; BITS = 4; GROUP = 32; ROWS = 4; TILE = 4; VALUES = 8; BLOCK = 32 * VALUES;
// qmv_4_bits_32_float32, body 1: typedef float number; BITS = 4; GROUP = 32; ROWS = 5; TILE = 4; VALUES = 8; BLOCK = 32 * VALUES;
// qmv_4_bits_32_float32, body 1: typedef float number; BITS = 4; GROUP = 32; ROWS = 6; TILE = 2; VALUES = 8; BLOCK = 32 * VALUES;
// qmv_4_bits_32_float32, body 1: typedef float number; BITS = 4; GROUP = 32; ROWS = 7; TILE = 2; VALUES = 8; BLOCK = 32 * VALUES;
// qmv_4_bits_32_float32, body 1: typedef float number; BITS = 4; GROUP = 32; ROWS = 8; TILE = 2; VALUES = 8; BLOCK = 32 * VALUES;
// qmv_fast_4_bits_64_float16, body 1: typedef float16_t number; BITS = 4; GROUP = 64; ROWS = 2; TILE = 4; VALUES = 16; BLOCK = 32 * VALUES;
// qmv_fast_4_bits_64_float16, body 1: typedef float16_t number; BITS = 4; GROUP = 64; ROWS = 3; TILE = 4; VALUES = 16; BLOCK = 32 * VALUES;
// qmv_fast_4_bits_64_float16, body 1: typedef float16_t number; BITS = 4; GROUP = 64; ROWS = 4; TILE = 4; VALUES = 16; BLOCK = 32 * VALUES;
// qmv_fast_4_bits_64_float16, body 1: typedef float16_t number; BITS = 4; GROUP = 64; ROWS = 5; TILE = 4; VALUES = 16; BLOCK = 32 * VALUES;
// qmv_fast_4_bits_64_float16, body 1: typedef float16_t number; BITS = 4; GROUP = 64; ROWS = 6; TILE = 2; VALUES = 16; BLOCK = 32 * VALUES;
// qmv_fast_4_bits_64_float16, body 1: typedef float16_t number; BITS = 4; GROUP = 64; ROWS = 7; TILE = 2; VALUES = 16; BLOCK = 32 * VALUES;
// qmv_fast_4_bits_64_float16, body 1: typedef float16_t number; BITS = 4; GROUP = 64; ROWS = 8; TILE = 2; VALUES = 16; BLOCK = 32 * VALUES;
// qmv_fast_4_bits_64_float16_float16_sums, body 2: typedef float16_t number; BITS = 4; GROUP = 64; ROWS = 2; TILE = 4; VALUES = 16; BLOCK = 32 * VALUES;
// qmv_fast_4_bits_64_float16_float16_sums, body 2: typedef float16_t number; BITS = 4; GROUP = 64; ROWS = 3; TILE = 4; VALUES = 16; BLOCK = 32 * VALUES;
// qmv_fast_4_bits_64_float16_float16_sums, body 2: typedef float16_t number; BITS = 4; GROUP = 64; ROWS = 4; TILE = 4; VALUES = 16; BLOCK = 32 * VALUES;
// qmv_fast_4_bits_64_float16_float16_sums, body 2: typedef float16_t number; BITS = 4; GROUP = 64; ROWS = 5; TILE = 4; VALUES = 16; BLOCK = 32 * VALUES;
// qmv_fast_4_bits_64_float16_float16_sums, body 2: typedef float16_t number; BITS = 4; GROUP = 64; ROWS = 6; TILE = 2; VALUES = 16; BLOCK = 32 * VALUES;
// qmv_fast_4_bits_64_float16_float16_sums, body 2: typedef float16_t number; BITS = 4; GROUP = 64; ROWS = 7; TILE = 2; VALUES = 16; BLOCK = 32 * VALUES;
// qmv_fast_4_bits_64_float16_float16_sums, body 2: typedef float16_t number; BITS = 4; GROUP = 64; ROWS = 8; TILE = 2; VALUES = 16; BLOCK = 32 * VALUES;
// qmv_4_bits_64_float16, body 1: typedef float16_t number; BITS = 4; GROUP = 64; ROWS = 2; TILE = 4; VALUES = 8; BLOCK = 32 * VALUES;
// qmv_4_bits_64_float16, body 1: typedef float16_t number; BITS = 4; GROUP = 64; ROWS = 3; TILE = 4; VALUES = 8; BLOCK = 32 * VALUES;
// qmv_4_bits_64_float16, body 1: typedef float16_t number; BITS = 4; GROUP = 64; ROWS = 4; TILE = 4; VALUES = 8; BLOCK = 32 * VALUES;
// qmv_4_bits_64_float16, body 1: typedef float16_t number; BITS = 4; GROUP = 64; ROWS = 5; TILE = 4; VALUES = 8; BLOCK = 32 * VALUES;
// qmv_4_bits_64_float16, body 1: typedef float16_t number; BITS = 4; GROUP = 64; ROWS = 6; TILE = 2; VALUES = 8; BLOCK = 32 * VALUES;
// qmv_4_bits_64_float16, body 1: typedef float16_t number; BITS = 4; GROUP = 64; ROWS = 7; TILE = 2; VALUES = 8; BLOCK = 32 * VALUES;
// qmv_4_bits_64_float16, body 1: typedef float16_t number; BITS = 4; GROUP = 64; ROWS = 8; TILE = 2; VALUES = 8; BLOCK = 32 * VALUES;
// qmv_4_bits_64_float16_float16_sums, body 2: typedef float16_t number; BITS = 4; GROUP = 64; ROWS = 2; TILE = 4; VALUES = 8; BLOCK = 32 * VALUES;
// qmv_4_bits_64_float16_float16_sums, body 2: typedef float16_t number; BITS = 4; GROUP = 64; ROWS = 3; TILE = 4; VALUES = 8; BLOCK = 32 * VALUES;
// qmv_4_bits_64_float16_float16_sums, body 2: typedef float16_t number; BITS = 4; GROUP = 64; ROWS = 4; TILE = 4; VALUES = 8; BLOCK = 32 * VALUES;
// qmv_4_bits_64_float16_float16_sums, body 2: typedef float16_t number; BITS = 4; GROUP = 64; ROWS = 5; TILE = 4; VALUES = 8; BLOCK = 32 * VALUES;
// qmv_4_bits_64_float16_float16_sums, body 2: typedef float16_t number; BITS = 4; GROUP = 64; ROWS = 6; TILE = 2; VALUES = 8; BLOCK = 32 * VALUES;
// qmv_4_bits_64_float16_float16_sums, body 2: typedef float16_t number; BITS = 4; GROUP = 64; ROWS = 7; TILE = 2; VALUES = 8; BLOCK = 32 * VALUES;
// qmv_4_bits_64_float16_float16_sums, body 2: typedef float16_t number; BITS = 4; GROUP = 64; ROWS = 8; TILE = 2; VALUES = 8; BLOCK = 32 * VALUES;
// qmv_fast_4_bits_64_bfloat16, body 1: typedef bfloat16_t number; BITS = 4; GROUP = 64; ROWS = 2; TILE = 4; VALUES = 16; BLOCK = 32 * VALUES;
// qmv_fast_4_bits_64_bfloat16, body 1: typedef bfloat16_t number; BITS = 4; GROUP = 64; ROWS = 3; TILE = 4; VALUES = 16; BLOCK = 32 * VALUES;
// qmv_fast_4_bits_64_bfloat16, body 1: typedef bfloat16_t number; BITS = 4; GROUP = 64; ROWS = 4; TILE = 4; VALUES = 16; BLOCK = 32 * VALUES;
// qmv_fast_4_bits_64_bfloat16, body 1: typedef bfloat16_t number; BITS = 4; GROUP = 64; ROWS = 5; TILE = 4; VALUES = 16; BLOCK = 32 * VALUES;
// qmv_fast_4_bits_64_bfloat16, body 1: typedef bfloat16_t number; BITS = 4; GROUP = 64; ROWS = 6; TILE = 2; VALUES = 16; BLOCK = 32 * VALUES;
// qmv_fast_4_bits_64_bfloat16, body 1: typedef bfloat16_t number; BITS = 4; GROUP = 64; ROWS = 7; TILE = 2; VALUES = 16; BLOCK = 32 * VALUES;
// qmv_fast_4_bits_64_bfloat16, body 1: typedef bfloat16_t number; BITS = 4; GROUP = 64; ROWS = 8; TILE = 2; VALUES = 16; BLOCK = 32 * VALUES;
// qmv_fast_4_bits_64_bfloat16_bfloat16_sums, body 2: typedef bfloat16_t number; BITS = 4; GROUP = 64; ROWS = 2; TILE = 4; VALUES = 16; BLOCK = 32 * VALUES;
// qmv_fast_4_bits_64_bfloat16_bfloat16_sums, body 2: typedef bfloat16_t number; BITS = 4; GROUP = 64; ROWS = 3; TILE = 4; VALUES = 16; BLOCK = 32 * VALUES;
// qmv_fast_4_bits_64_bfloat16_bfloat16_sums, body 2: typedef bfloat16_t number; BITS = 4; GROUP = 64; ROWS = 4; TILE = 4; VALUES = 16; BLOCK = 32 * VALUES;
// qmv_fast_4_bits_64_bfloat16_bfloat16_sums, body 2: typedef bfloat16_t number; BITS = 4; GROUP = 64; ROWS = 5; TILE = 4; VALUES = 16; BLOCK = 32 * VALUES;
// qmv_fast_4_bits_64_bfloat16_bfloat16_sums, body 2: typedef bfloat16_t number; BITS = 4; GROUP = 64; ROWS = 6; TILE = 2; VALUES = 16; BLOCK = 32 * VALUES;
// qmv_fast_4_bits_64_bfloat16_bfloat16_sums, body 2: typedef bfloat16_t number; BITS = 4; GROUP = 64; ROWS = 7; TILE = 2; VALUES = 16; BLOCK = 32 * VALUES;
// qmv_fast_4_bits_64_bfloat16_bfloat16_sums, body 2: typedef bfloat16_t number; BITS = 4; GROUP = 64; ROWS = 8; TILE = 2; VALUES = 16; BLOCK = 32 * VALUES;
// qmv_4_bits_64_bfloat16, body 1: typedef bfloat16_t number; BITS = 4; GROUP = 64; ROWS = 2; TILE = 4; VALUES = 8; BLOCK = 32 * VALUES;
// qmv_4_bits_64_bfloat16, body 1: typedef bfloat16_t number; BITS = 4; GROUP = 64; ROWS = 3; TILE = 4; VALUES = 8; BLOCK = 32 * VALUES;
// qmv_4_bits_64_bfloat16, body 1: typedef bfloat16_t number; BITS = 4; GROUP = 64; ROWS = 4; TILE = 4; VALUES = 8; BLOCK = 32 * VALUES;
// qmv_4_bits_64_bfloat16, body 1: typedef bfloat16_t number; BITS = 4; GROUP = 64; ROWS = 5; TILE = 4; VALUES = 8; BLOCK = 32 * VALUES;
// qmv_4_bits_64_bfloat16, body 1: typedef bfloat16_t number; BITS = 4; GROUP = 64; ROWS = 6; TILE = 2; VALUES = 8; BLOCK = 32 * VALUES;
// qmv_4_bits_64_bfloat16, body 1: typedef bfloat16_t number; BITS = 4; GROUP = 64; ROWS = 7; TILE = 2; VALUES = 8; BLOCK = 32 * VALUES;
// qmv_4_bits_64_bfloat16, body 1: typedef bfloat16_t number; BITS = 4; GROUP = 64; ROWS = 8; TILE = 2; VALUES = 8; BLOCK = 32 * VALUES;
// qmv_4_bits_64_bfloat16_bfloat16_sums, body 2: typedef bfloat16_t number; BITS = 4; GROUP = 64; ROWS = 2; TILE = 4; VALUES = 8; BLOCK = 32 * VALUES;
// qmv_4_bits_64_bfloat16_bfloat16_sums, body 2: typedef bfloat16_t number; BITS = 4; GROUP = 64; ROWS = 3; TILE = 4; VALUES = 8; BLOCK = 32 * VALUES;
// qmv_4_bits_64_bfloat16_bfloat16_sums, body 2: typedef bfloat16_t number; BITS = 4; GROUP = 64; ROWS = 4; TILE = 4; VALUES = 8; BLOCK = 32 * VALUES;
// qmv_4_bits_64_bfloat16_bfloat16_sums, body 2: typedef bfloat16_t number; BITS = 4; GROUP = 64; ROWS = 5; TILE = 4; VALUES = 8; BLOCK = 32 * VALUES;
// qmv_4_bits_64_bfloat16_bfloat16_sums, body 2: typedef bfloat16_t number; BITS = 4; GROUP = 64; ROWS = 6; TILE = 2; VALUES = 8; BLOCK = 32 * VALUES;
// qmv_4_bits_64_bfloat16_bfloat16_sums, body 2: typedef bfloat16_t number; BITS = 4; GROUP = 64; ROWS = 7; TILE = 2; VALUES = 8; BLOCK = 32 * VALUES;
// qmv_4_bits_64_bfloat16_bfloat16_sums, body 2: typedef bfloat16_t number; BITS = 4; GROUP = 64; ROWS = 8; TILE = 2; VALUES = 8; BLOCK = 32 * VALUES;
// qmv_fast_4_bits_64_float32, body 1: typedef float number; BITS = 4; GROUP = 64; ROWS = 2; TILE = 4; VALUES = 16; BLOCK = 32 * VALUES;
// qmv_fast_4_bits_64_float32, body 1: typedef float number; BITS = 4; GROUP = 64; ROWS = 3; TILE = 4; VALUES = 16; BLOCK = 32 * VALUES;
// qmv_fast_4_bits_64_float32, body 1: typedef float number; BITS = 4; GROUP = 64; ROWS = 4; TILE = 4; VALUES = 16; BLOCK = 32 * VALUES;
// qmv_fast_4_bits_64_float32, body 1: typedef float number; BITS = 4; GROUP = 64; ROWS = 5; TILE = 4; VALUES = 16; BLOCK = 32 * VALUES;
// qmv_fast_4_bits_64_float32, body 1: typedef float number; BITS = 4; GROUP = 64; ROWS = 6; TILE = 2; VALUES = 16; BLOCK = 32 * VALUES;
// qmv_fast_4_bits_64_float32, body 1: typedef float number; BITS = 4; GROUP = 64; ROWS = 7; TILE = 2; VALUES = 16; BLOCK = 32 * VALUES;
// qmv_fast_4_bits_64_float32, body 1: typedef float number; BITS = 4; GROUP = 64; ROWS = 8; TILE = 2; VALUES = 16; BLOCK = 32 * VALUES;
// qmv_4_bits_64_float32, body 1: typedef float number; BITS = 4; GROUP = 64; ROWS = 2; TILE = 4; VALUES = 8; BLOCK = 32 * VALUES;
// qmv_4_bits_64_float32, body 1: typedef float number; BITS = 4; GROUP = 64; ROWS = 3; TILE = 4; VALUES = 8; BLOCK = 32 * VALUES;
// qmv_4_bits_64_float32, body 1: typedef float number; BITS = 4; GROUP = 64; ROWS = 4; TILE = 4; VALUES = 8; BLOCK = 32 * VALUES;
// qmv_4_bits_64_float32, body 1: typedef float number; BITS = 4; GROUP = 64; ROWS = 5; TILE = 4; VALUES = 8; BLOCK = 32 * VALUES;
// qmv_4_bits_64_float32, body 1: typedef float number; BITS = 4; GROUP = 64; ROWS = 6; TILE = 2; VALUES = 8; BLOCK = 32 * VALUES;
// qmv_4_bits_64_float32, body 1: typedef float number; BITS = 4; GROUP = 64; ROWS = 7; TILE = 2; VALUES = 8; BLOCK = 32 * VALUES;
// qmv_4_bits_64_float32, body 1: typedef float number; BITS = 4; GROUP = 64; ROWS = 8; TILE = 2; VALUES = 8; BLOCK = 32 * VALUES;
// qmv_fast_4_bits_128_float16, body 1: typedef float16_t number; BITS = 4; GROUP = 128; ROWS = 2; TILE = 4; VALUES = 16; BLOCK = 32 * VALUES;
// qmv_fast_4_bits_128_float16, body 1: typedef float16_t number; BITS = 4; GROUP = 128; ROWS = 3; TILE = 4; VALUES = 16; BLOCK = 32 * VALUES;
// qmv_fast_4_bits_128_float16, body 1: typedef float16_t number; BITS = 4; GROUP = 128; ROWS = 4; TILE = 4; VALUES = 16; BLOCK = 32 * VALUES;
// qmv_fast_4_bits_128_float16, body 1: typedef float16_t number; BITS = 4; GROUP = 128; ROWS = 5; TILE = 4; VALUES = 16; BLOCK = 32 * VALUES;
// qmv_fast_4_bits_128_float16, body 1: typedef float16_t number; BITS = 4; GROUP = 128; ROWS = 6; TILE = 2; VALUES = 16; BLOCK = 32 * VALUES;
// qmv_fast_4_bits_128_float16, body 1: typedef float16_t number; BITS = 4; GROUP = 128; ROWS = 7; TILE = 2; VALUES = 16; BLOCK = 32 * VALUES;
// qmv_fast_4_bits_128_float16, body 1: typedef float16_t number; BITS = 4; GROUP = 128; ROWS = 8; TILE = 2; VALUES = 16; BLOCK = 32 * VALUES;
// qmv_fast_4_bits_128_float16_float16_sums, body 2: typedef float16_t number; BITS = 4; GROUP = 128; ROWS = 2; TILE = 4; VALUES = 16; BLOCK = 32 * VALUES;
// qmv_fast_4_bits_128_float16_float16_sums, body 2: typedef float16_t number; BITS = 4; GROUP = 128; ROWS = 3; TILE = 4; VALUES = 16; BLOCK = 32 * VALUES;
// qmv_fast_4_bits_128_float16_float16_sums, body 2: typedef float16_t number; BITS = 4; GROUP = 128; ROWS = 4; TILE = 4; VALUES = 16; BLOCK = 32 * VALUES;
// qmv_fast_4_bits_128_float16_float16_sums, body 2: typedef float16_t number; BITS = 4; GROUP = 128; ROWS = 5; TILE = 4; VALUES = 16; BLOCK = 32 * VALUES;
// qmv_fast_4_bits_128_float16_float16_sums, body 2: typedef float16_t number; BITS = 4; GROUP = 128; ROWS = 6; TILE = 2; VALUES = 16; BLOCK = 32 * VALUES;
// qmv_fast_4_bits_128_float16_float16_sums, body 2: typedef float16_t number; BITS = 4; GROUP = 128; ROWS = 7; TILE = 2; VALUES = 16; BLOCK = 32 * VALUES;
// qmv_fast_4_bits_128_float16_float16_sums, body 2: typedef float16_t number; BITS = 4; GROUP = 128; ROWS = 8; TILE = 2; VALUES = 16; BLOCK = 32 * VALUES;
// qmv_4_bits_128_float16, body 1: typedef float16_t number; BITS = 4; GROUP = 128; ROWS = 2; TILE = 4; VALUES = 8; BLOCK = 32 * VALUES;
// qmv_4_bits_128_float16, body 1: typedef float16_t number; BITS = 4; GROUP = 128; ROWS = 3; TILE = 4; VALUES = 8; BLOCK = 32 * VALUES;
// qmv_4_bits_128_float16, body 1: typedef float16_t number; BITS = 4; GROUP = 128; ROWS = 4; TILE = 4; VALUES = 8; BLOCK = 32 * VALUES;
// qmv_4_bits_128_float16, body 1: typedef float16_t number; BITS = 4; GROUP = 128; ROWS = 5; TILE = 4; VALUES = 8; BLOCK = 32 * VALUES;
// qmv_4_bits_128_float16, body 1: typedef float16_t number; BITS = 4; GROUP = 128; ROWS = 6; TILE = 2; VALUES = 8; BLOCK = 32 * VALUES;
// qmv_4_bits_128_float16, body 1: typedef float16_t number; BITS = 4; GROUP = 128; ROWS = 7; TILE = 2; VALUES = 8; BLOCK = 32 * VALUES;
// qmv_4_bits_128_float16, body 1: typedef float16_t number; BITS = 4; GROUP = 128; ROWS = 8; TILE = 2; VALUES = 8; BLOCK = 32 * VALUES;
// qmv_4_bits_128_float16_float16_sums, body 2: typedef float16_t number; BITS = 4; GROUP = 128; ROWS = 2; TILE = 4; VALUES = 8; BLOCK = 32 * VALUES;
// qmv_4_bits_128_float16_float16_sums, body 2: typedef float16_t number; BITS = 4; GROUP = 128; ROWS = 3; TILE = 4; VALUES = 8; BLOCK = 32 * VALUES;
// qmv_4_bits_128_float16_float16_sums, body 2: typedef float16_t number; BITS = 4; GROUP = 128; ROWS = 4; TILE = 4; VALUES = 8; BLOCK = 32 * VALUES;
// qmv_4_bits_128_float16_float16_sums, body 2: typedef float16_t number; BITS = 4; GROUP = 128; ROWS = 5; TILE = 4; VALUES = 8; BLOCK = 32 * VALUES;
// qmv_4_bits_128_float16_float16_sums, body 2: typedef float16_t number; BITS = 4; GROUP = 128; ROWS = 6; TILE = 2; VALUES = 8; BLOCK = 32 * VALUES;
// qmv_4_bits_128_float16_float16_sums, body 2: typedef float16_t number; BITS = 4; GROUP = 128; ROWS = 7; TILE = 2; VALUES = 8; BLOCK = 32 * VALUES;
// qmv_4_bits_128_float16_float16_sums, body 2: typedef float16_t number; BITS = 4; GROUP = 128; ROWS = 8; TILE = 2; VALUES = 8; BLOCK = 32 * VALUES;
// qmv_fast_4_bits_128_bfloat16, body 1: typedef bfloat16_t number; BITS = 4; GROUP = 128; ROWS = 2; TILE = 4; VALUES = 16; BLOCK = 32 * VALUES;
// qmv_fast_4_bits_128_bfloat16, body 1: typedef bfloat16_t number; BITS = 4; GROUP = 128; ROWS = 3; TILE = 4; VALUES = 16; BLOCK = 32 * VALUES;
// qmv_fast_4_bits_128_bfloat16, body 1: typedef bfloat16_t number; BITS = 4; GROUP = 128; ROWS = 4; TILE = 4; VALUES = 16; BLOCK = 32 * VALUES;
// qmv_fast_4_bits_128_bfloat16, body 1: typedef bfloat16_t number; BITS = 4; GROUP = 128; ROWS = 5; TILE = 4; VALUES = 16; BLOCK = 32 * VALUES;
// qmv_fast_4_bits_128_bfloat16, body 1: typedef bfloat16_t number; BITS = 4; GROUP = 128; ROWS = 6; TILE = 2; VALUES = 16; BLOCK = 32 * VALUES;
// qmv_fast_4_bits_128_bfloat16, body 1: typedef bfloat16_t number; BITS = 4; GROUP = 128; ROWS = 7; TILE = 2; VALUES = 16; BLOCK = 32 * VALUES;
// qmv_fast_4_bits_128_bfloat16, body 1: typedef bfloat16_t number; BITS = 4; GROUP = 128; ROWS = 8; TILE = 2; VALUES = 16; BLOCK = 32 * VALUES;
// qmv_fast_4_bits_128_bfloat16_bfloat16_sums, body 2: typedef bfloat16_t number; BITS = 4; GROUP = 128; ROWS = 2; TILE = 4; VALUES = 16; BLOCK = 32 * VALUES;
// qmv_fast_4_bits_128_bfloat16_bfloat16_sums, body 2: typedef bfloat16_t number; BITS = 4; GROUP = 128; ROWS = 3; TILE = 4; VALUES = 16; BLOCK = 32 * VALUES;
// qmv_fast_4_bits_128_bfloat16_bfloat16_sums, body 2: typedef bfloat16_t number; BITS = 4; GROUP = 128; ROWS = 4; TILE = 4; VALUES = 16; BLOCK = 32 * VALUES;
// qmv_fast_4_bits_128_bfloat16_bfloat16_sums, body 2: typedef bfloat16_t number; BITS = 4; GROUP = 128; ROWS = 5; TILE = 4; VALUES = 16; BLOCK = 32 * VALUES;
// qmv_fast_4_bits_128_bfloat16_bfloat16_sums, body 2: typedef bfloat16_t number; BITS = 4; GROUP = 128; ROWS = 6; TILE = 2; VALUES = 16; BLOCK = 32 * VALUES;
// qmv_fast_4_bits_128_bfloat16_bfloat16_sums, body 2: typedef bfloat16_t number; BITS = 4; GROUP = 128; ROWS = 7; TILE = 2; VALUES = 16; BLOCK = 32 * VALUES;
// qmv_fast_4_bits_128_bfloat16_bfloat16_sums, body 2: typedef bfloat16_t number; BITS = 4; GROUP = 128; ROWS = 8; TILE = 2; VALUES = 16; BLOCK = 32 * VALUES;
// qmv_4_bits_128_bfloat16, body 1: typedef bfloat16_t number; BITS = 4; GROUP = 128; ROWS = 2; TILE = 4; VALUES = 8; BLOCK = 32 * VALUES;
// qmv_4_bits_128_bfloat16, body 1: typedef bfloat16_t number; BITS = 4; GROUP = 128; ROWS = 3; TILE = 4; VALUES = 8; BLOCK = 32 * VALUES;
// qmv_4_bits_128_bfloat16, body 1: typedef bfloat16_t number; BITS = 4; GROUP = 128; ROWS = 4; TILE = 4; VALUES = 8; BLOCK = 32 * VALUES;
// qmv_4_bits_128_bfloat16, body 1: typedef bfloat16_t number; BITS = 4; GROUP = 128; ROWS = 5; TILE = 4; VALUES = 8; BLOCK = 32 * VALUES;
// qmv_4_bits_128_bfloat16, body 1: typedef bfloat16_t number; BITS = 4; GROUP = 128; ROWS = 6; TILE = 2; VALUES = 8; BLOCK = 32 * VALUES;
// qmv_4_bits_128_bfloat16, body 1: typedef bfloat16_t number; BITS = 4; GROUP = 128; ROWS = 7; TILE = 2; VALUES = 8; BLOCK = 32 * VALUES;
// qmv_4_bits_128_bfloat16, body 1: typedef bfloat16_t number; BITS = 4; GROUP = 128; ROWS = 8; TILE = 2; VALUES = 8; BLOCK = 32 * VALUES;
// qmv_4_bits_128_bfloat16_bfloat16_sums, body 2: typedef bfloat16_t number; BITS = 4; GROUP = 128; ROWS = 2; TILE = 4; VALUES = 8; BLOCK = 32 * VALUES;
// qmv_4_bits_128_bfloat16_bfloat16_sums, body 2: typedef bfloat16_t number; BITS = 4; GROUP = 128; ROWS = 3; TILE = 4; VALUES = 8; BLOCK = 32 * VALUES;
// qmv_4_bits_128_bfloat16_bfloat16_sums, body 2: typedef bfloat16_t number; BITS = 4; GROUP = 128; ROWS = 4; TILE = 4; VALUES = 8; BLOCK = 32 * VALUES;
// qmv_4_bits_128_bfloat16_bfloat16_sums, body 2: typedef bfloat16_t number; BITS = 4; GROUP = 128; ROWS = 5; TILE = 4; VALUES = 8; BLOCK = 32 * VALUES;
// qmv_4_bits_128_bfloat16_bfloat16_sums, body 2: typedef bfloat16_t number; BITS = 4; GROUP = 128; ROWS = 6; TILE = 2; VALUES = 8; BLOCK = 32 * VALUES;
// qmv_4_bits_128_bfloat16_bfloat16_sums, body 2: typedef bfloat16_t number; BITS = 4; GROUP = 128; ROWS = 7; TILE = 2; VALUES = 8; BLOCK = 32 * VALUES;
// qmv_4_bits_128_bfloat16_bfloat16_sums, body 2: typedef bfloat16_t number; BITS = 4; GROUP = 128; ROWS = 8; TILE = 2; VALUES = 8; BLOCK = 32 * VALUES;
// qmv_fast_4_bits_128_float32, body 1: typedef float number; BITS = 4; GROUP = 128; ROWS = 2; TILE = 4; VALUES = 16; BLOCK = 32 * VALUES;
// qmv_fast_4_bits_128_float32, body 1: typedef float number; BITS = 4; GROUP = 128; ROWS = 3; TILE = 4; VALUES = 16; BLOCK = 32 * VALUES;
// qmv_fast_4_bits_128_float32, body 1: typedef float number; BITS = 4; GROUP = 128; ROWS = 4; TILE = 4; VALUES = 16; BLOCK = 32 * VALUES;
// qmv_fast_4_bits_128_float32, body 1: typedef float number; BITS = 4; GROUP = 128; ROWS = 5; TILE = 4; VALUES = 16; BLOCK = 32 * VALUES;
// qmv_fast_4_bits_128_float32, body 1: typedef float number; BITS = 4; GROUP = 128; ROWS = 6; TILE = 2; VALUES = 16; BLOCK = 32 * VALUES;
// qmv_fast_4_bits_128_float32, body 1: typedef float number; BITS = 4; GROUP = 128; ROWS = 7; TILE = 2; VALUES = 16; BLOCK = 32 * VALUES;
// qmv_fast_4_bits_128_float32, body 1: typedef float number; BITS = 4; GROUP = 128; ROWS = 8; TILE = 2; VALUES = 16; BLOCK = 32 * VALUES;
// qmv_4_bits_128_float32, body 1: typedef float number; BITS = 4; GROUP = 128; ROWS = 2; TILE = 4; VALUES = 8; BLOCK = 32 * VALUES;
// qmv_4_bits_128_float32, body 1: typedef float number; BITS = 4; GROUP = 128; ROWS = 3; TILE = 4; VALUES = 8; BLOCK = 32 * VALUES;
// qmv_4_bits_128_float32, body 1: typedef float number; BITS = 4; GROUP = 128; ROWS = 4; TILE = 4; VALUES = 8; BLOCK = 32 * VALUES;
// qmv_4_bits_128_float32, body 1: typedef float number; BITS = 4; GROUP = 128; ROWS = 5; TILE = 4; VALUES = 8; BLOCK = 32 * VALUES;
// qmv_4_bits_128_float32, body 1: typedef float number; BITS = 4; GROUP = 128; ROWS = 6; TILE = 2; VALUES = 8; BLOCK = 32 * VALUES;
// qmv_4_bits_128_float32, body 1: typedef float number; BITS = 4; GROUP = 128; ROWS = 7; TILE = 2; VALUES = 8; BLOCK = 32 * VALUES;
// qmv_4_bits_128_float32, body 1: typedef float number; BITS = 4; GROUP = 128; ROWS = 8; TILE = 2; VALUES = 8; BLOCK = 32 * VALUES;
// qmv_fast_8_bits_32_float16, body 3: typedef float16_t number; BITS = 8; GROUP = 32; ROWS = 2; TILE = 4; VALUES = 8; BLOCK = 32 * VALUES;
// qmv_fast_8_bits_32_float16, body 3: typedef float16_t number; BITS = 8; GROUP = 32; ROWS = 3; TILE = 4; VALUES = 8; BLOCK = 32 * VALUES;
// qmv_fast_8_bits_32_float16, body 3: typedef float16_t number; BITS = 8; GROUP = 32; ROWS = 4; TILE = 4; VALUES = 8; BLOCK = 32 * VALUES;
// qmv_fast_8_bits_32_float16, body 3: typedef float16_t number; BITS = 8; GROUP = 32; ROWS = 5; TILE = 4; VALUES = 8; BLOCK = 32 * VALUES;
// qmv_fast_8_bits_32_float16, body 3: typedef float16_t number; BITS = 8; GROUP = 32; ROWS = 6; TILE = 2; VALUES = 8; BLOCK = 32 * VALUES;
// qmv_fast_8_bits_32_float16, body 3: typedef float16_t number; BITS = 8; GROUP = 32; ROWS = 7; TILE = 2; VALUES = 8; BLOCK = 32 * VALUES;
// qmv_fast_8_bits_32_float16, body 3: typedef float16_t number; BITS = 8; GROUP = 32; ROWS = 8; TILE = 2; VALUES = 8; BLOCK = 32 * VALUES;
// qmv_8_bits_32_float16, body 3: typedef float16_t number; BITS = 8; GROUP = 32; ROWS = 2; TILE = 4; VALUES = 4; BLOCK = 32 * VALUES;
// qmv_8_bits_32_float16, body 3: typedef float16_t number; BITS = 8; GROUP = 32; ROWS = 3; TILE = 4; VALUES = 4; BLOCK = 32 * VALUES;
// qmv_8_bits_32_float16, body 3: typedef float16_t number; BITS = 8; GROUP = 32; ROWS = 4; TILE = 4; VALUES = 4; BLOCK = 32 * VALUES;
// qmv_8_bits_32_float16, body 3: typedef float16_t number; BITS = 8; GROUP = 32; ROWS = 5; TILE = 4; VALUES = 4; BLOCK = 32 * VALUES;
// qmv_8_bits_32_float16, body 3: typedef float16_t number; BITS = 8; GROUP = 32; ROWS = 6; TILE = 2; VALUES = 4; BLOCK = 32 * VALUES;
// qmv_8_bits_32_float16, body 3: typedef float16_t number; BITS = 8; GROUP = 32; ROWS = 7; TILE = 2; VALUES = 4; BLOCK = 32 * VALUES;
// qmv_8_bits_32_float16, body 3: typedef float16_t number; BITS = 8; GROUP = 32; ROWS = 8; TILE = 2; VALUES = 4; BLOCK = 32 * VALUES;
// qmv_fast_8_bits_32_bfloat16, body 3: typedef bfloat16_t number; BITS = 8; GROUP = 32; ROWS = 2; TILE = 4; VALUES = 8; BLOCK = 32 * VALUES;
// qmv_fast_8_bits_32_bfloat16, body 3: typedef bfloat16_t number; BITS = 8; GROUP = 32; ROWS = 3; TILE = 4; VALUES = 8; BLOCK = 32 * VALUES;
// qmv_fast_8_bits_32_bfloat16, body 3: typedef bfloat16_t number; BITS = 8; GROUP = 32; ROWS = 4; TILE = 4; VALUES = 8; BLOCK = 32 * VALUES;
// qmv_fast_8_bits_32_bfloat16, body 3: typedef bfloat16_t number; BITS = 8; GROUP = 32; ROWS = 5; TILE = 4; VALUES = 8; BLOCK = 32 * VALUES;
// qmv_fast_8_bits_32_bfloat16, body 3: typedef bfloat16_t number; BITS = 8; GROUP = 32; ROWS = 6; TILE = 2; VALUES = 8; BLOCK = 32 * VALUES;
// qmv_fast_8_bits_32_bfloat16, body 3: typedef bfloat16_t number; BITS = 8; GROUP = 32; ROWS = 7; TILE = 2; VALUES = 8; BLOCK = 32 * VALUES;
// qmv_fast_8_bits_32_bfloat16, body 3: typedef bfloat16_t number; BITS = 8; GROUP = 32; ROWS = 8; TILE = 2; VALUES = 8; BLOCK = 32 * VALUES;
// qmv_8_bits_32_bfloat16, body 3: typedef bfloat16_t number; BITS = 8; GROUP = 32; ROWS = 2; TILE = 4; VALUES = 4; BLOCK = 32 * VALUES;
// qmv_8_bits_32_bfloat16, body 3: typedef bfloat16_t number; BITS = 8; GROUP = 32; ROWS = 3; TILE = 4; VALUES = 4; BLOCK = 32 * VALUES;
// qmv_8_bits_32_bfloat16, body 3: typedef bfloat16_t number; BITS = 8; GROUP = 32; ROWS = 4; TILE = 4; VALUES = 4; BLOCK = 32 * VALUES;
// qmv_8_bits_32_bfloat16, body 3: typedef bfloat16_t number; BITS = 8; GROUP = 32; ROWS = 5; TILE = 4; VALUES = 4; BLOCK = 32 * VALUES;
// qmv_8_bits_32_bfloat16, body 3: typedef bfloat16_t number; BITS = 8; GROUP = 32; ROWS = 6; TILE = 2; VALUES = 4; BLOCK = 32 * VALUES;
// qmv_8_bits_32_bfloat16, body 3: typedef bfloat16_t number; BITS = 8; GROUP = 32; ROWS = 7; TILE = 2; VALUES = 4; BLOCK = 32 * VALUES;
// qmv_8_bits_32_bfloat16, body 3: typedef bfloat16_t number; BITS = 8; GROUP = 32; ROWS = 8; TILE = 2; VALUES = 4; BLOCK = 32 * VALUES;
// qmv_fast_8_bits_32_float32, body 3: typedef float number; BITS = 8; GROUP = 32; ROWS = 2; TILE = 4; VALUES = 8; BLOCK = 32 * VALUES;
// qmv_fast_8_bits_32_float32, body 3: typedef float number; BITS = 8; GROUP = 32; ROWS = 3; TILE = 4; VALUES = 8; BLOCK = 32 * VALUES;
// qmv_fast_8_bits_32_float32, body 3: typedef float number; BITS = 8; GROUP = 32; ROWS = 4; TILE = 4; VALUES = 8; BLOCK = 32 * VALUES;
// qmv_fast_8_bits_32_float32, body 3: typedef float number; BITS = 8; GROUP = 32; ROWS = 5; TILE = 4; VALUES = 8; BLOCK = 32 * VALUES;
// qmv_fast_8_bits_32_float32, body 3: typedef float number; BITS = 8; GROUP = 32; ROWS = 6; TILE = 2; VALUES = 8; BLOCK = 32 * VALUES;
// qmv_fast_8_bits_32_float32, body 3: typedef float number; BITS = 8; GROUP = 32; ROWS = 7; TILE = 2; VALUES = 8; BLOCK = 32 * VALUES;
// qmv_fast_8_bits_32_float32, body 3: typedef float number; BITS = 8; GROUP = 32; ROWS = 8; TILE = 2; VALUES = 8; BLOCK = 32 * VALUES;
// qmv_8_bits_32_float32, body 3: typedef float number; BITS = 8; GROUP = 32; ROWS = 2; TILE = 4; VALUES = 4; BLOCK = 32 * VALUES;
// qmv_8_bits_32_float32, body 3: typedef float number; BITS = 8; GROUP = 32; ROWS = 3; TILE = 4; VALUES = 4; BLOCK = 32 * VALUES;
// qmv_8_bits_32_float32, body 3: typedef float number; BITS = 8; GROUP = 32; ROWS = 4; TILE = 4; VALUES = 4; BLOCK = 32 * VALUES;
// qmv_8_bits_32_float32, body 3: typedef float number; BITS = 8; GROUP = 32; ROWS = 5; TILE = 4; VALUES = 4; BLOCK = 32 * VALUES;
// qmv_8_bits_32_float32, body 3: typedef float number; BITS = 8; GROUP = 32; ROWS = 6; TILE = 2; VALUES = 4; BLOCK = 32 * VALUES;
// qmv_8_bits_32_float32, body 3: typedef float number; BITS = 8; GROUP = 32; ROWS = 7; TILE = 2; VALUES = 4; BLOCK = 32 * VALUES;
// qmv_8_bits_32_float32, body 3: typedef float number; BITS = 8; GROUP = 32; ROWS = 8; TILE = 2; VALUES = 4; BLOCK = 32 * VALUES;
// qmv_fast_8_bits_64_float16, body 3: typedef float16_t number; BITS = 8; GROUP = 64; ROWS = 2; TILE = 4; VALUES = 8; BLOCK = 32 * VALUES;
// qmv_fast_8_bits_64_float16, body 3: typedef float16_t number; BITS = 8; GROUP = 64; ROWS = 3; TILE = 4; VALUES = 8; BLOCK = 32 * VALUES;
// qmv_fast_8_bits_64_float16, body 3: typedef float16_t number; BITS = 8; GROUP = 64; ROWS = 4; TILE = 4; VALUES = 8; BLOCK = 32 * VALUES;
// qmv_fast_8_bits_64_float16, body 3: typedef float16_t number; BITS = 8; GROUP = 64; ROWS = 5; TILE = 4; VALUES = 8; BLOCK = 32 * VALUES;
// qmv_fast_8_bits_64_float16, body 3: typedef float16_t number; BITS = 8; GROUP = 64; ROWS = 6; TILE = 2; VALUES = 8; BLOCK = 32 * VALUES;
// qmv_fast_8_bits_64_float16, body 3: typedef float16_t number; BITS = 8; GROUP = 64; ROWS = 7; TILE = 2; VALUES = 8; BLOCK = 32 * VALUES;
// qmv_fast_8_bits_64_float16, body 3: typedef float16_t number; BITS = 8; GROUP = 64; ROWS = 8; TILE = 2; VALUES = 8; BLOCK = 32 * VALUES;
// qmv_8_bits_64_float16, body 3: typedef float16_t number; BITS = 8; GROUP = 64; ROWS = 2; TILE = 4; VALUES = 4; BLOCK = 32 * VALUES;
// qmv_8_bits_64_float16, body 3: typedef float16_t number; BITS = 8; GROUP = 64; ROWS = 3; TILE = 4; VALUES = 4; BLOCK = 32 * VALUES;
// qmv_8_bits_64_float16, body 3: typedef float16_t number; BITS = 8; GROUP = 64; ROWS = 4; TILE = 4; VALUES = 4; BLOCK = 32 * VALUES;
// qmv_8_bits_64_float16, body 3: typedef float16_t number; BITS = 8; GROUP = 64; ROWS = 5; TILE = 4; VALUES = 4; BLOCK = 32 * VALUES;
// qmv_8_bits_64_float16, body 3: typedef float16_t number; BITS = 8; GROUP = 64; ROWS = 6; TILE = 2; VALUES = 4; BLOCK = 32 * VALUES;
// qmv_8_bits_64_float16, body 3: typedef float16_t number; BITS = 8; GROUP = 64; ROWS = 7; TILE = 2; VALUES = 4; BLOCK = 32 * VALUES;
// qmv_8_bits_64_float16, body 3: typedef float16_t number; BITS = 8; GROUP = 64; ROWS = 8; TILE = 2; VALUES = 4; BLOCK = 32 * VALUES;
// qmv_fast_8_bits_64_bfloat16, body 3: typedef bfloat16_t number; BITS = 8; GROUP = 64; ROWS = 2; TILE = 4; VALUES = 8; BLOCK = 32 * VALUES;
// qmv_fast_8_bits_64_bfloat16, body 3: typedef bfloat16_t number; BITS = 8; GROUP = 64; ROWS = 3; TILE = 4; VALUES = 8; BLOCK = 32 * VALUES;
// qmv_fast_8_bits_64_bfloat16, body 3: typedef bfloat16_t number; BITS = 8; GROUP = 64; ROWS = 4; TILE = 4; VALUES = 8; BLOCK = 32 * VALUES;
// qmv_fast_8_bits_64_bfloat16, body 3: typedef bfloat16_t number; BITS = 8; GROUP = 64; ROWS = 5; TILE = 4; VALUES = 8; BLOCK = 32 * VALUES;
// qmv_fast_8_bits_64_bfloat16, body 3: typedef bfloat16_t number; BITS = 8; GROUP = 64; ROWS = 6; TILE = 2; VALUES = 8; BLOCK = 32 * VALUES;
// qmv_fast_8_bits_64_bfloat16, body 3: typedef bfloat16_t number; BITS = 8; GROUP = 64; ROWS = 7; TILE = 2; VALUES = 8; BLOCK = 32 * VALUES;
// qmv_fast_8_bits_64_bfloat16, body 3: typedef bfloat16_t number; BITS = 8; GROUP = 64; ROWS = 8; TILE = 2; VALUES = 8; BLOCK = 32 * VALUES;
// qmv_8_bits_64_bfloat16, body 3: typedef bfloat16_t number; BITS = 8; GROUP = 64; ROWS = 2; TILE = 4; VALUES = 4; BLOCK = 32 * VALUES;
// qmv_8_bits_64_bfloat16, body 3: typedef bfloat16_t number; BITS = 8; GROUP = 64; ROWS = 3; TILE = 4; VALUES = 4; BLOCK = 32 * VALUES;
// qmv_8_bits_64_bfloat16, body 3: typedef bfloat16_t number; BITS = 8; GROUP = 64; ROWS = 4; TILE = 4; VALUES = 4; BLOCK = 32 * VALUES;
// qmv_8_bits_64_bfloat16, body 3: typedef bfloat16_t number; BITS = 8; GROUP = 64; ROWS = 5; TILE = 4; VALUES = 4; BLOCK = 32 * VALUES;
// qmv_8_bits_64_bfloat16, body 3: typedef bfloat16_t number; BITS = 8; GROUP = 64; ROWS = 6; TILE = 2; VALUES = 4; BLOCK = 32 * VALUES;
// qmv_8_bits_64_bfloat16, body 3: typedef bfloat16_t number; BITS = 8; GROUP = 64; ROWS = 7; TILE = 2; VALUES = 4; BLOCK = 32 * VALUES;
// qmv_8_bits_64_bfloat16, body 3: typedef bfloat16_t number; BITS = 8; GROUP = 64; ROWS = 8; TILE = 2; VALUES = 4; BLOCK = 32 * VALUES;
// qmv_fast_8_bits_64_float32, body 3: typedef float number; BITS = 8; GROUP = 64; ROWS = 2; TILE = 4; VALUES = 8; BLOCK = 32 * VALUES;
// qmv_fast_8_bits_64_float32, body 3: typedef float number; BITS = 8; GROUP = 64; ROWS = 3; TILE = 4; VALUES = 8; BLOCK = 32 * VALUES;
// qmv_fast_8_bits_64_float32, body 3: typedef float number; BITS = 8; GROUP = 64; ROWS = 4; TILE = 4; VALUES = 8; BLOCK = 32 * VALUES;
// qmv_fast_8_bits_64_float32, body 3: typedef float number; BITS = 8; GROUP = 64; ROWS = 5; TILE = 4; VALUES = 8; BLOCK = 32 * VALUES;
// qmv_fast_8_bits_64_float32, body 3: typedef float number; BITS = 8; GROUP = 64; ROWS = 6; TILE = 2; VALUES = 8; BLOCK = 32 * VALUES;
// qmv_fast_8_bits_64_float32, body 3: typedef float number; BITS = 8; GROUP = 64; ROWS = 7; TILE = 2; VALUES = 8; BLOCK = 32 * VALUES;
// qmv_fast_8_bits_64_float32, body 3: typedef float number; BITS = 8; GROUP = 64; ROWS = 8; TILE = 2; VALUES = 8; BLOCK = 32 * VALUES;
// qmv_8_bits_64_float32, body 3: typedef float number; BITS = 8; GROUP = 64; ROWS = 2; TILE = 4; VALUES = 4; BLOCK = 32 * VALUES;
// qmv_8_bits_64_float32, body 3: typedef float number; BITS = 8; GROUP = 64; ROWS = 3; TILE = 4; VALUES = 4; BLOCK = 32 * VALUES;
// qmv_8_bits_64_float32, body 3: typedef float number; BITS = 8; GROUP = 64; ROWS = 4; TILE = 4; VALUES = 4; BLOCK = 32 * VALUES;
// qmv_8_bits_64_float32, body 3: typedef float number; BITS = 8; GROUP = 64; ROWS = 5; TILE = 4; VALUES = 4; BLOCK = 32 * VALUES;
// qmv_8_bits_64_float32, body 3: typedef float number; BITS = 8; GROUP = 64; ROWS = 6; TILE = 2; VALUES = 4; BLOCK = 32 * VALUES;
// qmv_8_bits_64_float32, body 3: typedef float number; BITS = 8; GROUP = 64; ROWS = 7; TILE = 2; VALUES = 4; BLOCK = 32 * VALUES;
// qmv_8_bits_64_float32, body 3: typedef float number; BITS = 8; GROUP = 64; ROWS = 8; TILE = 2; VALUES = 4; BLOCK = 32 * VALUES;
// qmv_fast_8_bits_128_float16, body 3: typedef float16_t number; BITS = 8; GROUP = 128; ROWS = 2; TILE = 4; VALUES = 8; BLOCK = 32 * VALUES;
// qmv_fast_8_bits_128_float16, body 3: typedef float16_t number; BITS = 8; GROUP = 128; ROWS = 3; TILE = 4; VALUES = 8; BLOCK = 32 * VALUES;
// qmv_fast_8_bits_128_float16, body 3: typedef float16_t number; BITS = 8; GROUP = 128; ROWS = 4; TILE = 4; VALUES = 8; BLOCK = 32 * VALUES;
// qmv_fast_8_bits_128_float16, body 3: typedef float16_t number; BITS = 8; GROUP = 128; ROWS = 5; TILE = 4; VALUES = 8; BLOCK = 32 * VALUES;
// qmv_fast_8_bits_128_float16, body 3: typedef float16_t number; BITS = 8; GROUP = 128; ROWS = 6; TILE = 2; VALUES = 8; BLOCK = 32 * VALUES;
// qmv_fast_8_bits_128_float16, body 3: typedef float16_t number; BITS = 8; GROUP = 128; ROWS = 7; TILE = 2; VALUES = 8; BLOCK = 32 * VALUES;
// qmv_fast_8_bits_128_float16, body 3: typedef float16_t number; BITS = 8; GROUP = 128; ROWS = 8; TILE = 2; VALUES = 8; BLOCK = 32 * VALUES;
// qmv_8_bits_128_float16, body 3: typedef float16_t number; BITS = 8; GROUP = 128; ROWS = 2; TILE = 4; VALUES = 4; BLOCK = 32 * VALUES;
// qmv_8_bits_128_float16, body 3: typedef float16_t number; BITS = 8; GROUP = 128; ROWS = 3; TILE = 4; VALUES = 4; BLOCK = 32 * VALUES;
// qmv_8_bits_128_float16, body 3: typedef float16_t number; BITS = 8; GROUP = 128; ROWS = 4; TILE = 4; VALUES = 4; BLOCK = 32 * VALUES;
// qmv_8_bits_128_float16, body 3: typedef float16_t number; BITS = 8; GROUP = 128; ROWS = 5; TILE = 4; VALUES = 4; BLOCK = 32 * VALUES;
// qmv_8_bits_128_float16, body 3: typedef float16_t number; BITS = 8; GROUP = 128; ROWS = 6; TILE = 2; VALUES = 4; BLOCK = 32 * VALUES;
// qmv_8_bits_128_float16, body 3: typedef float16_t number; BITS = 8; GROUP = 128; ROWS = 7; TILE = 2; VALUES = 4; BLOCK = 32 * VALUES;
// qmv_8_bits_128_float16, body 3: typedef float16_t number; BITS = 8; GROUP = 128; ROWS = 8; TILE = 2; VALUES = 4; BLOCK = 32 * VALUES;
// qmv_fast_8_bits_128_bfloat16, body 3: typedef bfloat16_t number; BITS = 8; GROUP = 128; ROWS = 2; TILE = 4; VALUES = 8; BLOCK = 32 * VALUES;
// qmv_fast_8_bits_128_bfloat16, body 3: typedef bfloat16_t number; BITS = 8; GROUP = 128; ROWS = 3; TILE = 4; VALUES = 8; BLOCK = 32 * VALUES;
// qmv_fast_8_bits_128_bfloat16, body 3: typedef bfloat16_t number; BITS = 8; GROUP = 128; ROWS = 4; TILE = 4; VALUES = 8; BLOCK = 32 * VALUES;
// qmv_fast_8_bits_128_bfloat16, body 3: typedef bfloat16_t number; BITS = 8; GROUP = 128; ROWS = 5; TILE = 4; VALUES = 8; BLOCK = 32 * VALUES;
// qmv_fast_8_bits_128_bfloat16, body 3: typedef bfloat16_t number; BITS = 8; GROUP = 128; ROWS = 6; TILE = 2; VALUES = 8; BLOCK = 32 * VALUES;
// qmv_fast_8_bits_128_bfloat16, body 3: typedef bfloat16_t number; BITS = 8; GROUP = 128; ROWS = 7; TILE = 2; VALUES = 8; BLOCK = 32 * VALUES;
// qmv_fast_8_bits_128_bfloat16, body 3: typedef bfloat16_t number; BITS = 8; GROUP = 128; ROWS = 8; TILE = 2; VALUES = 8; BLOCK = 32 * VALUES;
// qmv_8_bits_128_bfloat16, body 3: typedef bfloat16_t number; BITS = 8; GROUP = 128; ROWS = 2; TILE = 4; VALUES = 4; BLOCK = 32 * VALUES;
// qmv_8_bits_128_bfloat16, body 3: typedef bfloat16_t number; BITS = 8; GROUP = 128; ROWS = 3; TILE = 4; VALUES = 4; BLOCK = 32 * VALUES;
// qmv_8_bits_128_bfloat16, body 3: typedef bfloat16_t number; BITS = 8; GROUP = 128; ROWS = 4; TILE = 4; VALUES = 4; BLOCK = 32 * VALUES;
// qmv_8_bits_128_bfloat16, body 3: typedef bfloat16_t number; BITS = 8; GROUP = 128; ROWS = 5; TILE = 4; VALUES = 4; BLOCK = 32 * VALUES;
// qmv_8_bits_128_bfloat16, body 3: typedef bfloat16_t number; BITS = 8; GROUP = 128; ROWS = 6; TILE = 2; VALUES = 4; BLOCK = 32 * VALUES;
// qmv_8_bits_128_bfloat16, body 3: typedef bfloat16_t number; BITS = 8; GROUP = 128; ROWS = 7; TILE = 2; VALUES = 4; BLOCK = 32 * VALUES;
// qmv_8_bits_128_bfloat16, body 3: typedef bfloat16_t number; BITS = 8; GROUP = 128; ROWS = 8; TILE = 2; VALUES = 4; BLOCK = 32 * VALUES;
// qmv_fast_8_bits_128_float32, body 3: typedef float number; BITS = 8; GROUP = 128; ROWS = 2; TILE = 4; VALUES = 8; BLOCK = 32 * VALUES;
// qmv_fast_8_bits_128_float32, body 3: typedef float number; BITS = 8; GROUP = 128; ROWS = 3; TILE = 4; VALUES = 8; BLOCK = 32 * VALUES;
// qmv_fast_8_bits_128_float32, body 3: typedef float number; BITS = 8; GROUP = 128; ROWS = 4; TILE = 4; VALUES = 8; BLOCK = 32 * VALUES;
// qmv_fast_8_bits_128_float32, body 3: typedef float number; BITS = 8; GROUP = 128; ROWS = 5; TILE = 4; VALUES = 8; BLOCK = 32 * VALUES;
// qmv_fast_8_bits_128_float32, body 3: typedef float number; BITS = 8; GROUP = 128; ROWS = 6; TILE = 2; VALUES = 8; BLOCK = 32 * VALUES;
// qmv_fast_8_bits_128_float32, body 3: typedef float number; BITS = 8; GROUP = 128; ROWS = 7; TILE = 2; VALUES = 8; BLOCK = 32 * VALUES;
// qmv_fast_8_bits_128_float32, body 3: typedef float number; BITS = 8; GROUP = 128; ROWS = 8; TILE = 2; VALUES = 8; BLOCK = 32 * VALUES;
// qmv_8_bits_128_float32, body 3: typedef float number; BITS = 8; GROUP = 128; ROWS = 2; TILE = 4; VALUES = 4; BLOCK = 32 * VALUES;
// qmv_8_bits_128_float32, body 3: typedef float number; BITS = 8; GROUP = 128; ROWS = 3; TILE = 4; VALUES = 4; BLOCK = 32 * VALUES;
// qmv_8_bits_128_float32, body 3: typedef float number; BITS = 8; GROUP = 128; ROWS = 4; TILE = 4; VALUES = 4; BLOCK = 32 * VALUES;
// qmv_8_bits_128_float32, body 3: typedef float number; BITS = 8; GROUP = 128; ROWS = 5; TILE = 4; VALUES = 4; BLOCK = 32 * VALUES;
// qmv_8_bits_128_float32, body 3: typedef float number; BITS = 8; GROUP = 128; ROWS = 6; TILE = 2; VALUES = 4; BLOCK = 32 * VALUES;
// qmv_8_bits_128_float32, body 3: typedef float number; BITS = 8; GROUP = 128; ROWS = 7; TILE = 2; VALUES = 4; BLOCK = 32 * VALUES;
// qmv_8_bits_128_float32, body 3: typedef float number; BITS = 8; GROUP = 128; ROWS = 8; TILE = 2; VALUES = 4; BLOCK = 32 * VALUES;
