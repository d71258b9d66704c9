// Metal on a CPU, as far as products with quantised matrices need it. Threads of a SIMD group are
// fibers; simd_sum is where they meet. SIMD groups run one after the other.
#pragma once
#include <ucontext.h>

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <memory>

#define device
#define constant
#define thread
#define METAL_FUNC inline
#define MLX_MTL_PRAGMA_UNROLL

typedef unsigned int uint;
typedef unsigned short ushort;
typedef unsigned char uchar;
struct uint3 {
  uint x, y, z;
};
using std::max;
using std::min;

template <typename A>
inline A clamp(A v, A low, A high) {
  return v < low ? low : v > high ? high : v;
}
template <typename A>
inline A select(A no, A yes, bool which) {
  return which ? yes : no;
}

// 16-bit numbers: every operation of two of them rounds.
struct float16_t {
  _Float16 v;
  float16_t(float f) : v(static_cast<_Float16>(f)) {}
  operator float() const { return static_cast<float>(v); }
};
struct bfloat16_t {
  uint16_t v;
  bfloat16_t(float f) {
    uint32_t u;
    std::memcpy(&u, &f, sizeof u);
    v = static_cast<uint16_t>((u + 0x7fff + ((u >> 16) & 1)) >> 16);
  }
  operator float() const {
    const uint32_t u = static_cast<uint32_t>(v) << 16;
    float f;
    std::memcpy(&f, &u, sizeof f);
    return f;
  }
};
inline float16_t operator+(float16_t a, float16_t b) { return float(a) + float(b); }
inline bfloat16_t operator+(bfloat16_t a, bfloat16_t b) { return float(a) + float(b); }

constexpr int LANES = 32;
constexpr size_t STACK = 64 << 10;

struct Fiber {
  ucontext_t context;
  std::unique_ptr<char[]> stack{new char[STACK]};
  bool is_done;
  float value;  // what it adds to a sum, then the sum
};
static Fiber fibers[LANES];
static ucontext_t scheduler;
static int lane;
static void (*body)();
// How a SIMD group adds up is not documented: what is tested must hold for all orders.
static int simd_order;

static void run_fiber() {
  body();
  fibers[lane].is_done = true;
  swapcontext(&fibers[lane].context, &scheduler);
}

inline float simd_sum(float value) {
  Fiber& self = fibers[lane];
  self.value = value;
  swapcontext(&self.context, &scheduler);
  return self.value;
}

inline void add_up() {
  float values[LANES], sums[LANES];
  for (int i = 0; i < LANES; i++) values[i] = fibers[i].value;
  if (simd_order == 2) {  // one lane after the other
    for (int i = 1; i < LANES; i++) values[0] += values[i];
    std::fill(values + 1, values + LANES, values[0]);
  } else {  // pairs, whose distance falls or rises
    for (int step = 0; step < 5; step++) {
      const int distance = simd_order == 0 ? 16 >> step : 1 << step;
      for (int i = 0; i < LANES; i++) sums[i] = values[i] + values[i ^ distance];
      std::copy(sums, sums + LANES, values);
    }
  }
  for (int i = 0; i < LANES; i++) fibers[i].value = values[i];
}

// Whether all lanes have met at every sum and at the end.
inline bool run_simd_group(void (*kernel)()) {
  body = kernel;
  for (Fiber& fiber : fibers) {
    fiber.is_done = false;
    getcontext(&fiber.context);
    fiber.context.uc_stack.ss_sp = fiber.stack.get();
    fiber.context.uc_stack.ss_size = STACK;
    fiber.context.uc_link = nullptr;
    makecontext(&fiber.context, run_fiber, 0);
  }
  for (;;) {
    int done = 0;
    for (lane = 0; lane < LANES; lane++) {
      swapcontext(&scheduler, &fibers[lane].context);
      done += fibers[lane].is_done;
    }
    if (done) return done == LANES;
    add_up();
  }
}
