// NaN and Inf: finding them, and putting zeros in their place.
#pragma once
#include "stores.cuh"

// Two elements, with 0 for a NaN or an Inf.
DEVICE u32 finite(u32 pair) {
  constexpr u32 EXPONENT = FP16 ? 0x7c00u : 0x7f80u;
  if ((pair & EXPONENT) == EXPONENT) pair &= 0xffff0000u;
  if ((pair >> 16 & EXPONENT) == EXPONENT) pair &= 0x0000ffffu;
  return pair;
}
DEVICE uint4 finite(uint4 x) { return {finite(x.x), finite(x.y), finite(x.z), finite(x.w)}; }
// Whether there is one: a full exponent and 1 carry into the sign.
DEVICE u32 carries(u32 pair) { return FP16 ? (pair & 0x7c007c00u) + 0x04000400u : (pair & 0x7f807f80u) + 0x00800080u; }
DEVICE bool has_bad(uint4 x) { return (carries(x.x) | carries(x.y) | carries(x.z) | carries(x.w)) & 0x80008000u; }
DEVICE bool is_finite(float x) { return x - x == 0.f; }

DEVICE uint4 load_shared(u32 at) {
  uint4 x;
  asm volatile("ld.shared.v4.u32 {%0, %1, %2, %3}, [%4];"
               : "=r"(x.x), "=r"(x.y), "=r"(x.z), "=r"(x.w) : "r"(at) : "memory");
  return x;
}
DEVICE void store_shared(u32 at, uint4 x) {
  asm volatile("st.shared.v4.u32 [%0], {%1, %2, %3, %4};" ::"r"(at), "r"(x.x), "r"(x.y), "r"(x.z), "r"(x.w) : "memory");
}

// A warp puts zeros in the place of those in shared memory that the copy engine filled, for the tensor cores to read.
DEVICE void make_finite(u32 to, int bytes, int lane) {
#pragma unroll 1
  for (int at = lane * 16; at < bytes; at += 512) store_shared(to + at, finite(load_shared(to + at)));
  publish_shared();
  __syncwarp();
}
