// route_machine.cuh for the CPU.
#pragma once
#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstdlib>
#include <cstring>

#include "fibers.h"

typedef unsigned short u16;
typedef unsigned int u32;
typedef long long i64;

#define DEVICE static inline
#define __global__
#define __grid_constant__
#define __launch_bounds__(...)
using std::max;
using std::min;

DEVICE float __int_as_float(int x) {
  float y;
  memcpy(&y, &x, 4);
  return y;
}
DEVICE int __float_as_int(float x) {
  int y;
  memcpy(&y, &x, 4);
  return y;
}
#define INF __int_as_float(0x7f800000)

DEVICE int warp_max(int x) {
  return fibers::exchange(x, [](int* v, int) { return *std::max_element(v, v + 32); });
}
DEVICE u32 ballot(bool x) {
  return fibers::exchange(x, [](int* v, int) {
    u32 bits = 0;
    for (int i = 0; i < 32; i++) bits |= (u32)v[i] << i;
    return (int)bits;
  });
}
DEVICE int from_lane(int x, int lane) {
  return fibers::exchange(x, [=](int* v, int) { return v[lane]; });
}
DEVICE int from_later(int x, int by) {
  return fibers::exchange(x, [=](int* v, int lane) { return v[lane + by < 32 ? lane + by : lane]; });
}
DEVICE float across(float x, int mask) {
  return __int_as_float(fibers::exchange(__float_as_int(x), [=](int* v, int lane) { return v[lane ^ mask]; }));
}
DEVICE void warp_barrier() { fibers::meet_warp(); }
DEVICE void block_barrier() { fibers::meet(fibers::blocks[blockIdx.x], fibers::threads); }

DEVICE void cluster_arrive() {
  fibers::all[fibers::now].seen = fibers::grid.held;
  fibers::arrive(fibers::grid, (int)fibers::all.size());
}
DEVICE void cluster_wait() {
  while (fibers::grid.held == fibers::all[fibers::now].seen) fibers::yield();
}
DEVICE void grid_arrive(u32* arrivals) { ++*arrivals, fibers::progress++; }
DEVICE void grid_wait(u32* arrivals, u32 blocks) {
  while (*arrivals < blocks) fibers::yield();
}
DEVICE u32 add_one(u32* counter) { return (*counter)++; }
DEVICE void wait_for_previous() {}
DEVICE void let_next_start() {}

DEVICE u32 take_number(u32* counter) { return (*counter)++; }
DEVICE void add_shared(u32* sum, u32 x) { *sum += x; }

template <int BYTES> DEVICE void read_once(u32* to, const void* from) {
  if ((uintptr_t)from % BYTES) {
    fprintf(stderr, "a load of %d bytes at %p\n", BYTES, from);
    abort();
  }
  to[0] = 0;
  memcpy(to, from, BYTES);
}
template <int BYTES> DEVICE void read_shared_by_blocks(u32* to, const void* from) { read_once<BYTES>(to, from); }

DEVICE float bf16_number(u32 bits) { return __int_as_float(bits << 16); }
DEVICE float fp16_number(u32 bits) {
  u16 half = bits;
  _Float16 y;
  memcpy(&y, &half, 2);
  return y;
}
DEVICE float canonical(float x) { return x != x ? __int_as_float(0x7fffffff) : x == 0 ? 0.0f : x; }
DEVICE float power(float x) { return std::exp(x); }
DEVICE float divide(float a, float b) { return a / b; }
