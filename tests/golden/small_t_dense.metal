// body 1
const int K = x_shape[1];
const int N = w_shape[0];
const int lane = thread_index_in_simdgroup;
const int group = int(thread_position_in_grid.y) % GROUPS;
const int tile = int(thread_position_in_grid.y) / GROUPS * (32 / LANES) + lane / LANES;
// The last tile is moved back and computes some outputs again, to the same bits.
const int first = min(TILE * tile, N - TILE);
const device number* wl = w + size_t(first) * K;

float results[TILE][ROWS] = {};
int k = 4 * (group * LANES + lane % LANES);
for (int end = BLOCK; end <= K; end += BLOCK) {
  float inputs[ROWS][4];
  for (int t = 0; t < ROWS; t++) {
    for (int i = 0; i < 4; i++) {
      inputs[t][i] = x[t * K + k + i];
    }
  }
  for (int r = 0; r < TILE; r++) {
    for (int i = 0; i < 4; i++) {
      const float weight = wl[r * K + k + i];
      for (int t = 0; t < ROWS; t++) {
        results[r][t] += weight * inputs[t][i];
      }
    }
  }
  k += BLOCK;
}
if (K % BLOCK > 0) {
  float inputs[ROWS][4];
  for (int t = 0; t < ROWS; t++) {
    for (int i = 0; i < 4; i++) {
      inputs[t][i] = k + i < K ? float(x[t * K + k + i]) : 0.0f;
    }
  }
  for (int r = 0; r < TILE; r++) {
    for (int i = 0; i < 4; i++) {
      const float weight = k + i < K ? float(wl[r * K + k + i]) : 0.0f;
      for (int t = 0; t < ROWS; t++) {
        results[r][t] += weight * inputs[t][i];
      }
    }
  }
}

for (int r = 0; r < TILE; r++) {
  for (int t = 0; t < ROWS; t++) {
    float total = results[r][t];
    for (int by = LANES / 2; by > 0; by /= 2) {
      total += simd_shuffle_down(total, by);
    }
    if (lane % LANES == 0) {
      y[size_t(t) * N + first + r] = static_cast<number>(total);
    }
  }
}

// body 2
const int K = x_shape[1];
const int N = w_shape[0];
const int lane = thread_index_in_simdgroup;
const int group = int(thread_position_in_grid.y) % GROUPS;
const int tile = int(thread_position_in_grid.y) / GROUPS * (32 / LANES) + lane / LANES;
// The last tile is moved back and computes some outputs again, to the same bits.
const int first = min(TILE * tile, N - TILE);
const device number* wl = w + size_t(first) * K;

float results[TILE][ROWS] = {};
int k = 4 * (group * LANES + lane % LANES);
for (int end = BLOCK; end <= K; end += BLOCK) {
  float inputs[ROWS][4];
  for (int t = 0; t < ROWS; t++) {
    for (int i = 0; i < 4; i++) {
      inputs[t][i] = x[t * K + k + i];
    }
  }
  for (int r = 0; r < TILE; r++) {
    for (int i = 0; i < 4; i++) {
      const float weight = wl[r * K + k + i];
      for (int t = 0; t < ROWS; t++) {
        results[r][t] += weight * inputs[t][i];
      }
    }
  }
  k += BLOCK;
}
if (K % BLOCK > 0) {
  float inputs[ROWS][4];
  for (int t = 0; t < ROWS; t++) {
    for (int i = 0; i < 4; i++) {
      inputs[t][i] = k + i < K ? float(x[t * K + k + i]) : 0.0f;
    }
  }
  for (int r = 0; r < TILE; r++) {
    for (int i = 0; i < 4; i++) {
      const float weight = k + i < K ? float(wl[r * K + k + i]) : 0.0f;
      for (int t = 0; t < ROWS; t++) {
        results[r][t] += weight * inputs[t][i];
      }
    }
  }
}

threadgroup float totals[GROUPS][TILE * ROWS];
for (int r = 0; r < TILE; r++) {
  for (int t = 0; t < ROWS; t++) {
    float total = results[r][t];
    for (int by = LANES / 2; by > 0; by /= 2) {
      total += simd_shuffle_down(total, by);
    }
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

// ROWS = 2; TILE = 4; ROWS = 3; TILE = 4; ROWS = 4; TILE = 4; ROWS = 5; TILE = 4; ROWS = 6; TILE = 4; ROWS = 7; TILE = 4; ROWS = 8; TILE = 4;
// gemv_32_lanes_1_groups_float16, body 1: typedef float16_t number; LANES = 32; GROUPS = 1; BLOCK = 4 * LANES * GROUPS;
// gemv_4_lanes_1_groups_float16, body 1: typedef float16_t number; LANES = 4; GROUPS = 1; BLOCK = 4 * LANES * GROUPS;
// gemv_32_lanes_8_groups_float16, body 2: typedef float16_t number; LANES = 32; GROUPS = 8; BLOCK = 4 * LANES * GROUPS;
// gemv_32_lanes_1_groups_bfloat16, body 1: typedef bfloat16_t number; LANES = 32; GROUPS = 1; BLOCK = 4 * LANES * GROUPS;
// gemv_4_lanes_1_groups_bfloat16, body 1: typedef bfloat16_t number; LANES = 4; GROUPS = 1; BLOCK = 4 * LANES * GROUPS;
// gemv_32_lanes_8_groups_bfloat16, body 2: typedef bfloat16_t number; LANES = 32; GROUPS = 8; BLOCK = 4 * LANES * GROUPS;
// gemv_32_lanes_1_groups_float32, body 1: typedef float number; LANES = 32; GROUPS = 1; BLOCK = 4 * LANES * GROUPS;
// gemv_4_lanes_1_groups_float32, body 1: typedef float number; LANES = 4; GROUPS = 1; BLOCK = 4 * LANES * GROUPS;
// gemv_32_lanes_8_groups_float32, body 2: typedef float number; LANES = 32; GROUPS = 8; BLOCK = 4 * LANES * GROUPS;
