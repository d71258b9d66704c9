const int head = threadgroup_position_in_grid.x;
const int node = threadgroup_position_in_grid.y;
const int group = simdgroup_index_in_threadgroup;
const int lane = thread_index_in_simdgroup;
const int committed = keys_shape[2] - queries_shape[2];
const int key_head = head / (queries_shape[1] / keys_shape[1]);

int depth = 0;
for (int n = node; n > 0; n = parents[n * parents_strides[0]]) {
  depth++;
}

float query[PART];
float key[PART];
float sums[PART] = {};
const device number* q =
    queries + head * queries_strides[1] + node * queries_strides[2];
for (int j = 0; j < PART; j++) {
  query[j] = scale * float(q[(lane * PART + j) * queries_strides[3]]);
}

float max_score = Limits<float>::finite_min;
float total = 0;
for (int i = group; i <= committed + depth; i += 32) {
  int row = i;
  if (i >= committed) {  // the node's ancestor at depth i - committed
    row = node;
    for (int up = committed + depth - i; up > 0; up--) {
      row = parents[row * parents_strides[0]];
    }
    row += committed;
  }
  const device number* k = keys + key_head * keys_strides[1] + row * keys_strides[2];
  const device number* v = values + key_head * values_strides[1] + row * values_strides[2];
  for (int j = 0; j < PART; j++) {
    key[j] = k[(lane * PART + j) * keys_strides[3]];
  }
  float score = 0;
  for (int j = 0; j < PART; j++) {
    score += query[j] * key[j];
  }
  score = simd_sum(score);
  const float new_max = max(max_score, score);
  const float factor = fast::exp(max_score - new_max);
  const float weight = fast::exp(score - new_max);
  max_score = new_max;
  total = total * factor + weight;
  for (int j = 0; j < PART; j++) {
    const float value = v[(lane * PART + j) * values_strides[3]];
    sums[j] = sums[j] * factor + weight * value;
  }
}

threadgroup float all_sums[32 * 32];
threadgroup float max_scores[32];
threadgroup float totals[32];
if (lane == 0) {
  max_scores[group] = max_score;
  totals[group] = total;
}
threadgroup_barrier(mem_flags::mem_threadgroup);
max_score = max_scores[lane];
const float new_max = simd_max(max_score);
const float factor = fast::exp(max_score - new_max);
total = simd_sum(totals[lane] * factor);
for (int j = 0; j < PART; j++) {
  all_sums[lane * 32 + group] = sums[j];
  threadgroup_barrier(mem_flags::mem_threadgroup);
  sums[j] = simd_sum(all_sums[group * 32 + lane] * factor);
  sums[j] = total == 0 ? sums[j] : (sums[j] / total);
  threadgroup_barrier(mem_flags::mem_threadgroup);
}
if (lane == 0) {
  const size_t first = (size_t(head) * queries_shape[2] + node) * 32 * PART + group * PART;
  for (int j = 0; j < PART; j++) {
    y[first + j] = static_cast<number>(sums[j]);
  }
}

// 64_float16: typedef float16_t number; constexpr int PART = 64 / 32;
// 64_bfloat16: typedef bfloat16_t number; constexpr int PART = 64 / 32;
// 64_float32: typedef float number; constexpr int PART = 64 / 32;
// 96_float16: typedef float16_t number; constexpr int PART = 96 / 32;
// 96_bfloat16: typedef bfloat16_t number; constexpr int PART = 96 / 32;
// 96_float32: typedef float number; constexpr int PART = 96 / 32;
// 128_float16: typedef float16_t number; constexpr int PART = 128 / 32;
// 128_bfloat16: typedef bfloat16_t number; constexpr int PART = 128 / 32;
// 128_float32: typedef float number; constexpr int PART = 128 / 32;
// 256_float16: typedef float16_t number; constexpr int PART = 256 / 32;
// 256_bfloat16: typedef bfloat16_t number; constexpr int PART = 256 / 32;
// 256_float32: typedef float number; constexpr int PART = 256 / 32;
