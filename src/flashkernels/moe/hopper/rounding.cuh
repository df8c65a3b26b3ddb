// Rows of 16-bit numbers rounded to 8 bits, each with one scale. A row is in the registers of one or more warps of a
// block, PIECES pieces of 16 bytes in each lane: it is read once.
#pragma once
#include "prelude.cuh"

constexpr int PIECES = 4;
constexpr float LARGEST = INT8 ? 127.f : 448.f;        // of 8 bits
constexpr u32 INFINITE = WIDE_FP16 ? 0x7c00 : 0x7f80;  // bits of a number without its sign from which on it is Inf or NaN

DEVICE float wide_number(u32 bits) {
  if (!WIDE_FP16) return __int_as_float(bits << 16);
  float y;
  asm("cvt.f32.f16 %0, %1;" : "=f"(y) : "h"((u16)bits));
  return y;
}

// Which part of a row a thread has: `pieces` of the row in all, every `step`-th from `first` on.
struct Part {
  int first, step, pieces;
  template <class F> DEVICE void each(F f) const {
#pragma unroll
    for (int i = 0; i < PIECES; i++)
      if (first + i * step < pieces) f(i, first + i * step);
  }
};

// Read once and not again: what is in the L2 beside it stays.
DEVICE void read_row(uint4 (&row)[PIECES], const void* from, const Part& part) {
#pragma unroll
  for (int i = 0; i < PIECES; i++) row[i] = {};
  part.each([&](int i, int at) {
    asm volatile("ld.global.cs.v4.u32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(row[i].x), "=r"(row[i].y), "=r"(row[i].z), "=r"(row[i].w) : "l"((const uint4*)from + at));
  });
}

DEVICE u32 larger(u32 a, u32 b) {
  u32 y;
  asm("max.u16x2 %0, %1, %2;" : "=r"(y) : "r"(a), "r"(b & 0x7fff7fff));
  return y;
}

// The largest number of a row, as bits without a sign: these have the order of the numbers, and NaN is on top. `warps`
// neighbouring warps of the block share the row; `shared` has a place for each warp.
DEVICE u32 largest(const uint4 (&row)[PIECES], u32* shared, int warp, int warps, int lane) {
  u32 most = 0;
#pragma unroll
  for (int i = 0; i < PIECES; i++)
    most = larger(larger(larger(larger(most, row[i].x), row[i].y), row[i].z), row[i].w);
  most = __reduce_max_sync(~0u, max(most & 0xffff, most >> 16));
  if (warps == 1) return most;
  if (lane == 0) shared[warp] = most;
  __syncthreads();
  return __reduce_max_sync(~0u, lane < warps ? shared[warp / warps * warps + lane] : 0u);
}

// To multiply by: 1 where all is 0, NaN where something is Inf or NaN.
DEVICE float scale_of(u32 most) {
  if (most == 0) return 1.f;
  // Not below the smallest normal number, as everywhere else: bf16 reaches it.
  return most >= INFINITE ? __int_as_float(0x7fffffff) : fmaxf(__fdiv_rn(wide_number(most), LARGEST), 1.17549435e-38f);
}

// Division by one number, rounded as IEEE has it: where the scale has few bits, many quotients lie between two numbers
// of 8 bits, and must fall to the same side as everywhere else. From the reciprocal, rounded, two FMAs make that of it;
// of a very small scale the reciprocal would overflow.
struct Quotient {
  float scale, inverse;
  DEVICE Quotient(float scale) : scale(scale), inverse(__fdiv_rn(1.f, scale)) {}
  DEVICE float operator()(float x) const {
    const float near = __fmul_rn(x, inverse);
    return scale < 1e-30f ? __fdiv_rn(x, scale) : __fmaf_rn(__fmaf_rn(-near, scale, x), inverse, near);
  }
};

// Four numbers as bytes; of INT8 those that are not finite are 0.
DEVICE u32 pack_four(u32 first, u32 second, const Quotient& over) {
  const float x[4] = {over(wide_number(first & 0xffff)), over(wide_number(first >> 16)),
                      over(wide_number(second & 0xffff)), over(wide_number(second >> 16))};
  if (!INT8) return pack_bytes(x[0], x[1]) | pack_bytes(x[2], x[3]) << 16;
  int y[4];
#pragma unroll
  for (int i = 0; i < 4; i++) y[i] = max(__float2int_rn(x[i]), -127);
  u32 upper, all;
  asm("cvt.pack.sat.s8.s32.b32 %0, %1, %2, 0;" : "=r"(upper) : "r"(y[3]), "r"(y[2]));
  asm("cvt.pack.sat.s8.s32.b32 %0, %1, %2, %3;" : "=r"(all) : "r"(y[1]), "r"(y[0]), "r"(upper));
  return all;
}

// The row in 8 bits: of each 16 bytes the first two words.
DEVICE void round_row(uint4 (&row)[PIECES], float scale) {
  const Quotient over(scale);
#pragma unroll
  for (int i = 0; i < PIECES; i++)
    row[i].x = pack_four(row[i].x, row[i].y, over), row[i].y = pack_four(row[i].z, row[i].w, over);
}

DEVICE void write_row(const uint4 (&row)[PIECES], void* to, const Part& part) {
  part.each([&](int i, int at) {
    asm volatile("st.global.v2.u32 [%0], {%1, %2};" ::"l"((uint2*)to + at), "r"(row[i].x), "r"(row[i].y) : "memory");
  });
}
