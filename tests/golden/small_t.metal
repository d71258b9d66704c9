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
      inputs[t][0] = float(v[0]);
      inputs[t][1] = float(v[1]) / 4.0f;
      inputs[t][2] = float(v[2]) / 16.0f;
      inputs[t][3] = float(v[3]) / 64.0f;
    }
    for (int r = 0; r < TILE; r++) {
      const device uchar* packed = wl + r * bytes + i * BITS / 8;
      const float q[4] = {
          float(packed[0] & 0x03), float(packed[0] & 0x0c), float(packed[0] & 0x30),
          float(packed[0] & 0xc0)};
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
  for (int i = 0; i < VALUES; i += 8) {
    float added[ROWS];
    for (int j = 0; j < 8; j++) {
      const int byte = (i + j) * BITS / 8;
      const int bit = (i + j) * BITS % 8;
      float inputs[ROWS];
      for (int t = 0; t < ROWS; t++) {
        const float v = xl[t * K + i + j];
        added[t] = j == 0 ? v : added[t] + v;
        inputs[t] = v / float(1 << bit);
      }
      for (int r = 0; r < TILE; r++) {
        const float low = float(wl[r * bytes + byte] & (MASK << bit));
        for (int t = 0; t < ROWS; t++) {
          dots[r][t] += low * inputs[t];
        }
        if (bit + BITS > 8) {
          const float high = float(wl[r * bytes + byte + 1] & (MASK >> (8 - bit)));
          for (int t = 0; t < ROWS; t++) {
            dots[r][t] += high * (inputs[t] * 256.0f);
          }
        }
      }
    }
    for (int t = 0; t < ROWS; t++) {
      sums[t] += added[t];
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
      sums[t] += float(v[0]) + float(v[1]) + float(v[2]) + float(v[3]);
      inputs[t][0] = float(v[0]);
      inputs[t][1] = float(v[1]) / 16.0f;
      inputs[t][2] = float(v[2]) / 256.0f;
      inputs[t][3] = float(v[3]) / 4096.0f;
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

// body 4
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
    float added[ROWS];
    for (int j = 0; j < 4; j++) {
      const int byte = (i + j) * BITS / 8;
      const int bit = (i + j) * BITS % 8;
      float inputs[ROWS];
      for (int t = 0; t < ROWS; t++) {
        const float v = xl[t * K + i + j];
        added[t] = j == 0 ? v : added[t] + v;
        inputs[t] = v / float(1 << bit);
      }
      for (int r = 0; r < TILE; r++) {
        const float low = float(wl[r * bytes + byte] & (MASK << bit));
        for (int t = 0; t < ROWS; t++) {
          dots[r][t] += low * inputs[t];
        }
        if (bit + BITS > 8) {
          const float high = float(wl[r * bytes + byte + 1] & (MASK >> (8 - bit)));
          for (int t = 0; t < ROWS; t++) {
            dots[r][t] += high * (inputs[t] * 256.0f);
          }
        }
      }
    }
    for (int t = 0; t < ROWS; t++) {
      sums[t] += added[t];
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

// body 5
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
        sums[t] += float(v[j]);
        inputs[t][j] = float(v[j]);
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

// body 6
const int K = x_shape[1];
const int N = w_shape[0];
const int groups = K / GROUP;
const int bytes = K / 8 * BITS;
const int lane = thread_index_in_simdgroup;
// The last tile is moved back and computes some outputs again, to the same bits.
const int first = min(TILE * int(thread_position_in_grid.y), N - TILE);

const device uchar* wl = (const device uchar*)w + size_t(first) * bytes + lane * VALUES * BITS / 8;
const device uchar* sl = scales + size_t(first) * groups + lane * VALUES / GROUP;
const device number* xl = x + lane * VALUES;

float results[TILE][ROWS] = {};
for (int k = lane * VALUES; k < K; k += BLOCK) {
  float dots[TILE][ROWS] = {};
  for (int i = 0; i < VALUES; i += 4) {
    float inputs[ROWS][4];
    for (int t = 0; t < ROWS; t++) {
      const device number* v = xl + t * K + i;
      for (int j = 0; j < 4; j++) {
        inputs[t][j] = float(v[j]);
      }
    }
    for (int r = 0; r < TILE; r++) {
      const device uchar* packed = wl + r * bytes + i * BITS / 8;
      const uint u = *(const device ushort*)packed;
      float q[4];
      for (int j = 0; j < 4; j++) {
        const float16_t small = as_type<float16_t>(ushort((u >> (4 * j) & 7) << 9));
        const float size = small * float16_t(16384.0f);
        q[j] = u >> (4 * j) & 8 ? -size : size;
      }
      for (int t = 0; t < ROWS; t++) {
        const thread float* v = inputs[t];
        dots[r][t] += v[0] * q[0] + v[1] * q[1] + v[2] * q[2] + v[3] * q[3];
      }
    }
  }
  for (int r = 0; r < TILE; r++) {
    const uint exponent = sl[r * groups];
    const float s = as_type<float>(exponent == 0 ? 0x400000 : exponent << 23);
    for (int t = 0; t < ROWS; t++) {
      results[r][t] += s * dots[r][t];
    }
  }
  wl += BLOCK * BITS / 8;
  sl += BLOCK / GROUP;
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

// ROWS = 2; TILE = 4; ROWS = 3; TILE = 4; ROWS = 4; TILE = 4; ROWS = 5; TILE = 4; ROWS = 6; TILE = 2; ROWS = 7; TILE = 2; ROWS = 8; TILE = 2;
// qmv_fast_2_bits_32_float16, body 1: typedef float16_t number; BITS = 2; MASK = (1 << BITS) - 1; GROUP = 32; VALUES = 16; BLOCK = 32 * VALUES;
// qmv_fast_2_bits_32_bfloat16, body 1: typedef bfloat16_t number; BITS = 2; MASK = (1 << BITS) - 1; GROUP = 32; VALUES = 16; BLOCK = 32 * VALUES;
// qmv_fast_2_bits_32_float32, body 1: typedef float number; BITS = 2; MASK = (1 << BITS) - 1; GROUP = 32; VALUES = 16; BLOCK = 32 * VALUES;
// qmv_fast_2_bits_64_float16, body 1: typedef float16_t number; BITS = 2; MASK = (1 << BITS) - 1; GROUP = 64; VALUES = 16; BLOCK = 32 * VALUES;
// qmv_fast_2_bits_64_bfloat16, body 1: typedef bfloat16_t number; BITS = 2; MASK = (1 << BITS) - 1; GROUP = 64; VALUES = 16; BLOCK = 32 * VALUES;
// qmv_fast_2_bits_64_float32, body 1: typedef float number; BITS = 2; MASK = (1 << BITS) - 1; GROUP = 64; VALUES = 16; BLOCK = 32 * VALUES;
// qmv_fast_2_bits_128_float16, body 1: typedef float16_t number; BITS = 2; MASK = (1 << BITS) - 1; GROUP = 128; VALUES = 16; BLOCK = 32 * VALUES;
// qmv_fast_2_bits_128_bfloat16, body 1: typedef bfloat16_t number; BITS = 2; MASK = (1 << BITS) - 1; GROUP = 128; VALUES = 16; BLOCK = 32 * VALUES;
// qmv_fast_2_bits_128_float32, body 1: typedef float number; BITS = 2; MASK = (1 << BITS) - 1; GROUP = 128; VALUES = 16; BLOCK = 32 * VALUES;
// qmv_fast_3_bits_32_float16, body 2: typedef float16_t number; BITS = 3; MASK = (1 << BITS) - 1; GROUP = 32; VALUES = 16; BLOCK = 32 * VALUES;
// qmv_3_bits_32_float16, body 2: typedef float16_t number; BITS = 3; MASK = (1 << BITS) - 1; GROUP = 32; VALUES = 8; BLOCK = 32 * VALUES;
// qmv_fast_3_bits_32_bfloat16, body 2: typedef bfloat16_t number; BITS = 3; MASK = (1 << BITS) - 1; GROUP = 32; VALUES = 16; BLOCK = 32 * VALUES;
// qmv_3_bits_32_bfloat16, body 2: typedef bfloat16_t number; BITS = 3; MASK = (1 << BITS) - 1; GROUP = 32; VALUES = 8; BLOCK = 32 * VALUES;
// qmv_fast_3_bits_32_float32, body 2: typedef float number; BITS = 3; MASK = (1 << BITS) - 1; GROUP = 32; VALUES = 16; BLOCK = 32 * VALUES;
// qmv_3_bits_32_float32, body 2: typedef float number; BITS = 3; MASK = (1 << BITS) - 1; GROUP = 32; VALUES = 8; BLOCK = 32 * VALUES;
// qmv_fast_3_bits_64_float16, body 2: typedef float16_t number; BITS = 3; MASK = (1 << BITS) - 1; GROUP = 64; VALUES = 16; BLOCK = 32 * VALUES;
// qmv_3_bits_64_float16, body 2: typedef float16_t number; BITS = 3; MASK = (1 << BITS) - 1; GROUP = 64; VALUES = 8; BLOCK = 32 * VALUES;
// qmv_fast_3_bits_64_bfloat16, body 2: typedef bfloat16_t number; BITS = 3; MASK = (1 << BITS) - 1; GROUP = 64; VALUES = 16; BLOCK = 32 * VALUES;
// qmv_3_bits_64_bfloat16, body 2: typedef bfloat16_t number; BITS = 3; MASK = (1 << BITS) - 1; GROUP = 64; VALUES = 8; BLOCK = 32 * VALUES;
// qmv_fast_3_bits_64_float32, body 2: typedef float number; BITS = 3; MASK = (1 << BITS) - 1; GROUP = 64; VALUES = 16; BLOCK = 32 * VALUES;
// qmv_3_bits_64_float32, body 2: typedef float number; BITS = 3; MASK = (1 << BITS) - 1; GROUP = 64; VALUES = 8; BLOCK = 32 * VALUES;
// qmv_fast_3_bits_128_float16, body 2: typedef float16_t number; BITS = 3; MASK = (1 << BITS) - 1; GROUP = 128; VALUES = 16; BLOCK = 32 * VALUES;
// qmv_3_bits_128_float16, body 2: typedef float16_t number; BITS = 3; MASK = (1 << BITS) - 1; GROUP = 128; VALUES = 8; BLOCK = 32 * VALUES;
// qmv_fast_3_bits_128_bfloat16, body 2: typedef bfloat16_t number; BITS = 3; MASK = (1 << BITS) - 1; GROUP = 128; VALUES = 16; BLOCK = 32 * VALUES;
// qmv_3_bits_128_bfloat16, body 2: typedef bfloat16_t number; BITS = 3; MASK = (1 << BITS) - 1; GROUP = 128; VALUES = 8; BLOCK = 32 * VALUES;
// qmv_fast_3_bits_128_float32, body 2: typedef float number; BITS = 3; MASK = (1 << BITS) - 1; GROUP = 128; VALUES = 16; BLOCK = 32 * VALUES;
// qmv_3_bits_128_float32, body 2: typedef float number; BITS = 3; MASK = (1 << BITS) - 1; GROUP = 128; VALUES = 8; BLOCK = 32 * VALUES;
// qmv_fast_4_bits_32_float16, body 3: typedef float16_t number; BITS = 4; MASK = (1 << BITS) - 1; GROUP = 32; VALUES = 16; BLOCK = 32 * VALUES;
// qmv_4_bits_32_float16, body 3: typedef float16_t number; BITS = 4; MASK = (1 << BITS) - 1; GROUP = 32; VALUES = 8; BLOCK = 32 * VALUES;
// qmv_fast_4_bits_32_bfloat16, body 3: typedef bfloat16_t number; BITS = 4; MASK = (1 << BITS) - 1; GROUP = 32; VALUES = 16; BLOCK = 32 * VALUES;
// qmv_4_bits_32_bfloat16, body 3: typedef bfloat16_t number; BITS = 4; MASK = (1 << BITS) - 1; GROUP = 32; VALUES = 8; BLOCK = 32 * VALUES;
// qmv_fast_4_bits_32_float32, body 3: typedef float number; BITS = 4; MASK = (1 << BITS) - 1; GROUP = 32; VALUES = 16; BLOCK = 32 * VALUES;
// qmv_4_bits_32_float32, body 3: typedef float number; BITS = 4; MASK = (1 << BITS) - 1; GROUP = 32; VALUES = 8; BLOCK = 32 * VALUES;
// qmv_fast_4_bits_64_float16, body 3: typedef float16_t number; BITS = 4; MASK = (1 << BITS) - 1; GROUP = 64; VALUES = 16; BLOCK = 32 * VALUES;
// qmv_4_bits_64_float16, body 3: typedef float16_t number; BITS = 4; MASK = (1 << BITS) - 1; GROUP = 64; VALUES = 8; BLOCK = 32 * VALUES;
// qmv_fast_4_bits_64_bfloat16, body 3: typedef bfloat16_t number; BITS = 4; MASK = (1 << BITS) - 1; GROUP = 64; VALUES = 16; BLOCK = 32 * VALUES;
// qmv_4_bits_64_bfloat16, body 3: typedef bfloat16_t number; BITS = 4; MASK = (1 << BITS) - 1; GROUP = 64; VALUES = 8; BLOCK = 32 * VALUES;
// qmv_fast_4_bits_64_float32, body 3: typedef float number; BITS = 4; MASK = (1 << BITS) - 1; GROUP = 64; VALUES = 16; BLOCK = 32 * VALUES;
// qmv_4_bits_64_float32, body 3: typedef float number; BITS = 4; MASK = (1 << BITS) - 1; GROUP = 64; VALUES = 8; BLOCK = 32 * VALUES;
// qmv_fast_4_bits_128_float16, body 3: typedef float16_t number; BITS = 4; MASK = (1 << BITS) - 1; GROUP = 128; VALUES = 16; BLOCK = 32 * VALUES;
// qmv_4_bits_128_float16, body 3: typedef float16_t number; BITS = 4; MASK = (1 << BITS) - 1; GROUP = 128; VALUES = 8; BLOCK = 32 * VALUES;
// qmv_fast_4_bits_128_bfloat16, body 3: typedef bfloat16_t number; BITS = 4; MASK = (1 << BITS) - 1; GROUP = 128; VALUES = 16; BLOCK = 32 * VALUES;
// qmv_4_bits_128_bfloat16, body 3: typedef bfloat16_t number; BITS = 4; MASK = (1 << BITS) - 1; GROUP = 128; VALUES = 8; BLOCK = 32 * VALUES;
// qmv_fast_4_bits_128_float32, body 3: typedef float number; BITS = 4; MASK = (1 << BITS) - 1; GROUP = 128; VALUES = 16; BLOCK = 32 * VALUES;
// qmv_4_bits_128_float32, body 3: typedef float number; BITS = 4; MASK = (1 << BITS) - 1; GROUP = 128; VALUES = 8; BLOCK = 32 * VALUES;
// qmv_fast_5_bits_32_float16, body 2: typedef float16_t number; BITS = 5; MASK = (1 << BITS) - 1; GROUP = 32; VALUES = 16; BLOCK = 32 * VALUES;
// qmv_5_bits_32_float16, body 2: typedef float16_t number; BITS = 5; MASK = (1 << BITS) - 1; GROUP = 32; VALUES = 8; BLOCK = 32 * VALUES;
// qmv_fast_5_bits_32_bfloat16, body 2: typedef bfloat16_t number; BITS = 5; MASK = (1 << BITS) - 1; GROUP = 32; VALUES = 16; BLOCK = 32 * VALUES;
// qmv_5_bits_32_bfloat16, body 2: typedef bfloat16_t number; BITS = 5; MASK = (1 << BITS) - 1; GROUP = 32; VALUES = 8; BLOCK = 32 * VALUES;
// qmv_fast_5_bits_32_float32, body 2: typedef float number; BITS = 5; MASK = (1 << BITS) - 1; GROUP = 32; VALUES = 16; BLOCK = 32 * VALUES;
// qmv_5_bits_32_float32, body 2: typedef float number; BITS = 5; MASK = (1 << BITS) - 1; GROUP = 32; VALUES = 8; BLOCK = 32 * VALUES;
// qmv_fast_5_bits_64_float16, body 2: typedef float16_t number; BITS = 5; MASK = (1 << BITS) - 1; GROUP = 64; VALUES = 16; BLOCK = 32 * VALUES;
// qmv_5_bits_64_float16, body 2: typedef float16_t number; BITS = 5; MASK = (1 << BITS) - 1; GROUP = 64; VALUES = 8; BLOCK = 32 * VALUES;
// qmv_fast_5_bits_64_bfloat16, body 2: typedef bfloat16_t number; BITS = 5; MASK = (1 << BITS) - 1; GROUP = 64; VALUES = 16; BLOCK = 32 * VALUES;
// qmv_5_bits_64_bfloat16, body 2: typedef bfloat16_t number; BITS = 5; MASK = (1 << BITS) - 1; GROUP = 64; VALUES = 8; BLOCK = 32 * VALUES;
// qmv_fast_5_bits_64_float32, body 2: typedef float number; BITS = 5; MASK = (1 << BITS) - 1; GROUP = 64; VALUES = 16; BLOCK = 32 * VALUES;
// qmv_5_bits_64_float32, body 2: typedef float number; BITS = 5; MASK = (1 << BITS) - 1; GROUP = 64; VALUES = 8; BLOCK = 32 * VALUES;
// qmv_fast_5_bits_128_float16, body 2: typedef float16_t number; BITS = 5; MASK = (1 << BITS) - 1; GROUP = 128; VALUES = 16; BLOCK = 32 * VALUES;
// qmv_5_bits_128_float16, body 2: typedef float16_t number; BITS = 5; MASK = (1 << BITS) - 1; GROUP = 128; VALUES = 8; BLOCK = 32 * VALUES;
// qmv_fast_5_bits_128_bfloat16, body 2: typedef bfloat16_t number; BITS = 5; MASK = (1 << BITS) - 1; GROUP = 128; VALUES = 16; BLOCK = 32 * VALUES;
// qmv_5_bits_128_bfloat16, body 2: typedef bfloat16_t number; BITS = 5; MASK = (1 << BITS) - 1; GROUP = 128; VALUES = 8; BLOCK = 32 * VALUES;
// qmv_fast_5_bits_128_float32, body 2: typedef float number; BITS = 5; MASK = (1 << BITS) - 1; GROUP = 128; VALUES = 16; BLOCK = 32 * VALUES;
// qmv_5_bits_128_float32, body 2: typedef float number; BITS = 5; MASK = (1 << BITS) - 1; GROUP = 128; VALUES = 8; BLOCK = 32 * VALUES;
// qmv_fast_6_bits_32_float16, body 4: typedef float16_t number; BITS = 6; MASK = (1 << BITS) - 1; GROUP = 32; VALUES = 8; BLOCK = 32 * VALUES;
// qmv_6_bits_32_float16, body 4: typedef float16_t number; BITS = 6; MASK = (1 << BITS) - 1; GROUP = 32; VALUES = 4; BLOCK = 32 * VALUES;
// qmv_fast_6_bits_32_bfloat16, body 4: typedef bfloat16_t number; BITS = 6; MASK = (1 << BITS) - 1; GROUP = 32; VALUES = 8; BLOCK = 32 * VALUES;
// qmv_6_bits_32_bfloat16, body 4: typedef bfloat16_t number; BITS = 6; MASK = (1 << BITS) - 1; GROUP = 32; VALUES = 4; BLOCK = 32 * VALUES;
// qmv_fast_6_bits_32_float32, body 4: typedef float number; BITS = 6; MASK = (1 << BITS) - 1; GROUP = 32; VALUES = 8; BLOCK = 32 * VALUES;
// qmv_6_bits_32_float32, body 4: typedef float number; BITS = 6; MASK = (1 << BITS) - 1; GROUP = 32; VALUES = 4; BLOCK = 32 * VALUES;
// qmv_fast_6_bits_64_float16, body 4: typedef float16_t number; BITS = 6; MASK = (1 << BITS) - 1; GROUP = 64; VALUES = 8; BLOCK = 32 * VALUES;
// qmv_6_bits_64_float16, body 4: typedef float16_t number; BITS = 6; MASK = (1 << BITS) - 1; GROUP = 64; VALUES = 4; BLOCK = 32 * VALUES;
// qmv_fast_6_bits_64_bfloat16, body 4: typedef bfloat16_t number; BITS = 6; MASK = (1 << BITS) - 1; GROUP = 64; VALUES = 8; BLOCK = 32 * VALUES;
// qmv_6_bits_64_bfloat16, body 4: typedef bfloat16_t number; BITS = 6; MASK = (1 << BITS) - 1; GROUP = 64; VALUES = 4; BLOCK = 32 * VALUES;
// qmv_fast_6_bits_64_float32, body 4: typedef float number; BITS = 6; MASK = (1 << BITS) - 1; GROUP = 64; VALUES = 8; BLOCK = 32 * VALUES;
// qmv_6_bits_64_float32, body 4: typedef float number; BITS = 6; MASK = (1 << BITS) - 1; GROUP = 64; VALUES = 4; BLOCK = 32 * VALUES;
// qmv_fast_6_bits_128_float16, body 4: typedef float16_t number; BITS = 6; MASK = (1 << BITS) - 1; GROUP = 128; VALUES = 8; BLOCK = 32 * VALUES;
// qmv_6_bits_128_float16, body 4: typedef float16_t number; BITS = 6; MASK = (1 << BITS) - 1; GROUP = 128; VALUES = 4; BLOCK = 32 * VALUES;
// qmv_fast_6_bits_128_bfloat16, body 4: typedef bfloat16_t number; BITS = 6; MASK = (1 << BITS) - 1; GROUP = 128; VALUES = 8; BLOCK = 32 * VALUES;
// qmv_6_bits_128_bfloat16, body 4: typedef bfloat16_t number; BITS = 6; MASK = (1 << BITS) - 1; GROUP = 128; VALUES = 4; BLOCK = 32 * VALUES;
// qmv_fast_6_bits_128_float32, body 4: typedef float number; BITS = 6; MASK = (1 << BITS) - 1; GROUP = 128; VALUES = 8; BLOCK = 32 * VALUES;
// qmv_6_bits_128_float32, body 4: typedef float number; BITS = 6; MASK = (1 << BITS) - 1; GROUP = 128; VALUES = 4; BLOCK = 32 * VALUES;
// qmv_fast_8_bits_32_float16, body 5: typedef float16_t number; BITS = 8; MASK = (1 << BITS) - 1; GROUP = 32; VALUES = 8; BLOCK = 32 * VALUES;
// qmv_8_bits_32_float16, body 5: typedef float16_t number; BITS = 8; MASK = (1 << BITS) - 1; GROUP = 32; VALUES = 4; BLOCK = 32 * VALUES;
// qmv_fast_8_bits_32_bfloat16, body 5: typedef bfloat16_t number; BITS = 8; MASK = (1 << BITS) - 1; GROUP = 32; VALUES = 8; BLOCK = 32 * VALUES;
// qmv_8_bits_32_bfloat16, body 5: typedef bfloat16_t number; BITS = 8; MASK = (1 << BITS) - 1; GROUP = 32; VALUES = 4; BLOCK = 32 * VALUES;
// qmv_fast_8_bits_32_float32, body 5: typedef float number; BITS = 8; MASK = (1 << BITS) - 1; GROUP = 32; VALUES = 8; BLOCK = 32 * VALUES;
// qmv_8_bits_32_float32, body 5: typedef float number; BITS = 8; MASK = (1 << BITS) - 1; GROUP = 32; VALUES = 4; BLOCK = 32 * VALUES;
// qmv_fast_8_bits_64_float16, body 5: typedef float16_t number; BITS = 8; MASK = (1 << BITS) - 1; GROUP = 64; VALUES = 8; BLOCK = 32 * VALUES;
// qmv_8_bits_64_float16, body 5: typedef float16_t number; BITS = 8; MASK = (1 << BITS) - 1; GROUP = 64; VALUES = 4; BLOCK = 32 * VALUES;
// qmv_fast_8_bits_64_bfloat16, body 5: typedef bfloat16_t number; BITS = 8; MASK = (1 << BITS) - 1; GROUP = 64; VALUES = 8; BLOCK = 32 * VALUES;
// qmv_8_bits_64_bfloat16, body 5: typedef bfloat16_t number; BITS = 8; MASK = (1 << BITS) - 1; GROUP = 64; VALUES = 4; BLOCK = 32 * VALUES;
// qmv_fast_8_bits_64_float32, body 5: typedef float number; BITS = 8; MASK = (1 << BITS) - 1; GROUP = 64; VALUES = 8; BLOCK = 32 * VALUES;
// qmv_8_bits_64_float32, body 5: typedef float number; BITS = 8; MASK = (1 << BITS) - 1; GROUP = 64; VALUES = 4; BLOCK = 32 * VALUES;
// qmv_fast_8_bits_128_float16, body 5: typedef float16_t number; BITS = 8; MASK = (1 << BITS) - 1; GROUP = 128; VALUES = 8; BLOCK = 32 * VALUES;
// qmv_8_bits_128_float16, body 5: typedef float16_t number; BITS = 8; MASK = (1 << BITS) - 1; GROUP = 128; VALUES = 4; BLOCK = 32 * VALUES;
// qmv_fast_8_bits_128_bfloat16, body 5: typedef bfloat16_t number; BITS = 8; MASK = (1 << BITS) - 1; GROUP = 128; VALUES = 8; BLOCK = 32 * VALUES;
// qmv_8_bits_128_bfloat16, body 5: typedef bfloat16_t number; BITS = 8; MASK = (1 << BITS) - 1; GROUP = 128; VALUES = 4; BLOCK = 32 * VALUES;
// qmv_fast_8_bits_128_float32, body 5: typedef float number; BITS = 8; MASK = (1 << BITS) - 1; GROUP = 128; VALUES = 8; BLOCK = 32 * VALUES;
// qmv_8_bits_128_float32, body 5: typedef float number; BITS = 8; MASK = (1 << BITS) - 1; GROUP = 128; VALUES = 4; BLOCK = 32 * VALUES;
// qmv_fast_mxfp4_float16, body 6: typedef float16_t number; BITS = 4; MASK = (1 << BITS) - 1; GROUP = 32; VALUES = 16; BLOCK = 32 * VALUES;
// qmv_mxfp4_float16, body 6: typedef float16_t number; BITS = 4; MASK = (1 << BITS) - 1; GROUP = 32; VALUES = 8; BLOCK = 32 * VALUES;
// qmv_fast_mxfp4_bfloat16, body 6: typedef bfloat16_t number; BITS = 4; MASK = (1 << BITS) - 1; GROUP = 32; VALUES = 16; BLOCK = 32 * VALUES;
// qmv_mxfp4_bfloat16, body 6: typedef bfloat16_t number; BITS = 4; MASK = (1 << BITS) - 1; GROUP = 32; VALUES = 8; BLOCK = 32 * VALUES;
// qmv_fast_mxfp4_float32, body 6: typedef float number; BITS = 4; MASK = (1 << BITS) - 1; GROUP = 32; VALUES = 16; BLOCK = 32 * VALUES;
// qmv_mxfp4_float32, body 6: typedef float number; BITS = 4; MASK = (1 << BITS) - 1; GROUP = 32; VALUES = 8; BLOCK = 32 * VALUES;
