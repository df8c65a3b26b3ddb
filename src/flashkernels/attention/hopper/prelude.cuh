// Short names, constants, and the few scalar instructions that CUDA C++ has no name for.
#pragma once
#include "config.cuh"

typedef unsigned short u16;
typedef unsigned int u32;
typedef unsigned long long u64;
typedef long long i64;

#define DEVICE __device__ __forceinline__

constexpr float LOG2E = 1.4426950408889634f;
constexpr float LN2 = 0.6931471805599453f;
#define INF __int_as_float(0x7f800000)

__host__ __device__ constexpr int ceil_div(int a, int b) { return (a + b - 1) / b; }
__host__ __device__ constexpr int round_up(int a, int b) { return ceil_div(a, b) * b; }
__host__ __device__ constexpr int gcd(int a, int b) { return b ? gcd(b, a % b) : a; }

DEVICE u32 shared_address(const void* pointer) {
  u32 address;
  asm("{.reg .u64 t; cvta.to.shared.u64 t, %1; cvt.u32.u64 %0, t;}" : "=r"(address) : "l"(pointer));
  return address;
}

// A kernel that is launched before the one ahead of it has ended waits here for that: it reads and writes nothing of
// the other's before. And from here on the next one may start.
DEVICE void wait_for_previous() { asm volatile("griddepcontrol.wait;" ::: "memory"); }
DEVICE void let_next_start() { asm volatile("griddepcontrol.launch_dependents;" ::: "memory"); }

// A value that all lanes have, in a way that ptxas understands: what follows from it stays in uniform registers, and a
// loop that it ends may use them.
DEVICE int broadcast(int x) { return __shfl_sync(~0u, x, 0); }

DEVICE float exp2_approx(float x) {
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

DEVICE float log2_approx(float x) {
  float y;
  asm("lg2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

DEVICE float reciprocal(float x) {
  float y;
  asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

DEVICE float tanh_approx(float x) {
  float y;
  asm("tanh.approx.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

// Two floats as one register of 16-bit elements, `low` in the lower half.
DEVICE u32 pack(float low, float high) {
  u32 r;
  if (FP16) asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(r) : "f"(high), "f"(low));
  else asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(r) : "f"(high), "f"(low));
  return r;
}

// Two floats as two bytes of FP8 (e4m3).
DEVICE u32 pack_bytes(float low, float high) {
  u16 r;
  asm("cvt.rn.satfinite.e4m3x2.f32 %0, %1, %2;" : "=h"(r) : "f"(high), "f"(low));
  return r;
}

// Element `at` of an input.
DEVICE float element(const void* data, i64 at) {
  float y;
  if (FP8) {
    asm("{.reg .b32 both; .reg .b16 low, high; cvt.rn.f16x2.e4m3x2 both, %1; mov.b32 {low, high}, both;"
        " cvt.f32.f16 %0, low;}" : "=f"(y) : "h"((u16)((const unsigned char*)data)[at]));
  } else if (FP16) {
    asm("cvt.f32.f16 %0, %1;" : "=f"(y) : "h"(((const u16*)data)[at]));
  } else {
    y = __int_as_float((int)((const u16*)data)[at] << 16);
  }
  return y;
}

// Registers that an asynchronous wgmma reads or writes must not be reused before its wait: an empty statement that
// claims to change them keeps them alive up to this point (without it ptxas serialises the wgmmas: warning C7513).
template <int N> DEVICE void keep(u32 (&x)[N]) {
#pragma unroll
  for (int i = 0; i < N; i++) asm volatile("" : "+r"(x[i])::"memory");
}
template <int N> DEVICE void keep(float (&x)[N]) {
#pragma unroll
  for (int i = 0; i < N; i++) asm volatile("" : "+f"(x[i])::"memory");
}
