// Metal on a CPU, as far as products with quantised matrices and attention need it. Threads are
// fibers; simd_sum, simd_max, shuffles and barriers are where they meet. Threadgroups run one after
// the other, and so do their SIMD groups between barriers. Lanes that have returned are not waited
// for at shuffles and barriers.
#pragma once
#include <setjmp.h>
#include <ucontext.h>

#include <algorithm>
#include <cfloat>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <memory>
#include <type_traits>

#define device
#define constant
#define thread
#define threadgroup static
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
namespace fast {
inline float exp(float x) { return std::exp(x); }
}  // namespace fast
template <typename A>
struct Limits {
  static constexpr float finite_min = -FLT_MAX;
};
enum class mem_flags { mem_none, mem_threadgroup };
template <typename A>
using uniform = A;
template <typename A>
constexpr A make_uniform(A v) {
  return v;
}

template <typename A>
inline A clamp(A v, A low, A high) {
  return v < low ? low : v > high ? high : v;
}
template <typename A, typename B>
inline A as_type(B v) {
  static_assert(sizeof(A) == sizeof(B));
  A bits;
  std::memcpy(static_cast<void*>(&bits), &v, sizeof v);
  return bits;
}
namespace metal {
using std::abs, std::isfinite, std::isnan, std::log2, std::round, std::signbit;
}
template <typename A>
inline A select(A no, A yes, bool which) {
  return which ? yes : no;
}

// 16-bit numbers: every operation of two of them rounds.
struct float16_t {
  _Float16 v;
  float16_t() = default;
  float16_t(float f) : v(static_cast<_Float16>(f)) {}
  operator float() const { return static_cast<float>(v); }
};
struct bfloat16_t {
  uint16_t v;
  bfloat16_t() = default;
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
template <typename A>  // of no other type, as numbers of two types are multiplied as float
inline std::enable_if_t<std::is_same_v<A, float16_t>, A> operator*(A a, A b) {
  return float(a) * float(b);
}
inline float16_t operator-(float16_t a) { return -float(a); }
inline void operator*=(float16_t& a, double b) { a = a * float16_t(b); }
typedef float16_t half;
inline bfloat16_t operator+(bfloat16_t a, bfloat16_t b) { return float(a) + float(b); }

constexpr int LANES = 32, MOST_GROUPS = 32;
constexpr size_t STACK = 64 << 10;

enum class Meeting { BEGIN, SUM, MAX, SHUFFLE, BARRIER, END };
struct Fiber {
  ucontext_t start;
  jmp_buf place;  // where it goes on: a jump asks the system for nothing, a change of context does
  bool has_started;
  std::unique_ptr<char[]> stack;
  Meeting meeting;  // where it waits
  float value;      // what it adds to a sum, then the sum
  int distance;     // in a shuffle, of the lane whose value it gets
};
static Fiber fibers[MOST_GROUPS][LANES];
static jmp_buf scheduler;
static int simd_group, lane;
static void (*body)();
// How a SIMD group adds up is not documented: what is tested must hold for all orders.
static int simd_order;

inline float meet(Meeting meeting, float value = 0) {
  Fiber& self = fibers[simd_group][lane];
  self.meeting = meeting;
  self.value = value;
  if (!_setjmp(self.place)) _longjmp(scheduler, 1);
  return self.value;
}
inline void go_on(Fiber& fiber) {
  if (_setjmp(scheduler)) return;
  if (fiber.has_started) _longjmp(fiber.place, 1);
  fiber.has_started = true;
  setcontext(&fiber.start);
}
inline float simd_sum(float value) { return meet(Meeting::SUM, value); }
inline float simd_max(float value) { return meet(Meeting::MAX, value); }
inline float simd_shuffle_down(float value, int distance) {
  fibers[simd_group][lane].distance = distance;
  return meet(Meeting::SHUFFLE, value);
}
inline void threadgroup_barrier(mem_flags) { meet(Meeting::BARRIER); }

static void run_fiber() {
  body();
  meet(Meeting::END);
}

inline void add_up(Fiber* group) {
  float values[LANES], sums[LANES];
  for (int i = 0; i < LANES; i++) values[i] = group[i].value;
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
  for (int i = 0; i < LANES; i++) group[i].value = values[i];
}

inline void find_maximum(Fiber* group) {
  float found = group[0].value;
  for (int i = 1; i < LANES; i++) found = max(found, group[i].value);
  for (int i = 0; i < LANES; i++) group[i].value = found;
}

// Values of lanes that do not exist or have returned are undefined: a NaN shows that one was used.
inline void shuffle(Fiber* group) {
  float values[2 * LANES];
  std::fill(values, values + 2 * LANES, NAN);
  for (int i = 0; i < LANES; i++)
    if (group[i].meeting != Meeting::END) values[i] = group[i].value;
  for (int i = 0; i < LANES; i++) group[i].value = values[i + group[i].distance];
}

// Whether the lanes of a SIMD group have met everywhere until they all stand at the last place.
inline bool run_simd_group(Meeting& last) {
  Fiber* group = fibers[simd_group];
  for (;;) {
    bool has_ended = false;
    last = Meeting::END;
    for (lane = 0; lane < LANES; lane++) {
      Fiber& fiber = group[lane];
      if (fiber.meeting != Meeting::END) go_on(fiber);
      if (fiber.meeting == Meeting::END) has_ended = true;
      else if (last == Meeting::END) last = fiber.meeting;
      else if (fiber.meeting != last) return false;
    }
    if (has_ended && (last == Meeting::SUM || last == Meeting::MAX)) return false;
    if (last == Meeting::SUM) add_up(group);
    else if (last == Meeting::MAX) find_maximum(group);
    else if (last == Meeting::SHUFFLE) shuffle(group);
    else return true;
  }
}

// Whether all threads have met everywhere.
inline bool run_threadgroup(void (*kernel)(), int num_groups = 1) {
  body = kernel;
  for (int i = 0; i < num_groups; i++) {
    for (Fiber& fiber : fibers[i]) {
      if (!fiber.stack) fiber.stack.reset(new char[STACK]);
      fiber.has_started = false;
      fiber.meeting = Meeting::BEGIN;
      fiber.distance = 0;
      getcontext(&fiber.start);
      fiber.start.uc_stack.ss_sp = fiber.stack.get();
      fiber.start.uc_stack.ss_size = STACK;
      fiber.start.uc_link = nullptr;
      makecontext(&fiber.start, run_fiber, 0);
    }
  }
  for (;;) {
    Meeting first, last;
    for (simd_group = 0; simd_group < num_groups; simd_group++) {
      if (!run_simd_group(last)) return false;
      if (simd_group == 0) first = last;
      if (last != first) return false;
    }
    if (last == Meeting::END) return true;
  }
}
