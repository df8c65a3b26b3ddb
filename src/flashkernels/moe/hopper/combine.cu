// The end of a layer: a token's K results, weighted and added in a fixed order.
//
// A thread has 16 bytes of a token's row. The places of all results are read first and then all results, so that a
// thread waits for the memory twice, however many there are.
#include "prelude.cuh"

struct Params {
  const char* y;         // [places, width]
  const float* weights;  // [tokens, K]
  const char* shared;    // [tokens, width]
  const int* inverse;    // [tokens, K]
  char* out;             // [tokens, width]
  int tokens, pieces;    // of 16 bytes, in a row
  int settled;           // the kernel ahead has written neither weights nor places
};
constexpr int THREADS = 256;

DEVICE uint4 read(const void* from) {
  uint4 y;
  asm volatile("ld.global.cs.v4.u32 {%0, %1, %2, %3}, [%4];" : "=r"(y.x), "=r"(y.y), "=r"(y.z), "=r"(y.w) : "l"(from));
  return y;
}

DEVICE float number(u32 word, int half) {
  if (!FP16) return __int_as_float(half ? word & 0xffff0000 : word << 16);
  float y;
  asm("cvt.f32.f16 %0, %1;" : "=f"(y) : "h"((u16)(word >> 16 * half)));
  return y;
}

DEVICE void add(float (&sum)[8], const uint4& y, float weight) {
  const u32 words[4] = {y.x, y.y, y.z, y.w};
#pragma unroll
  for (int i = 0; i < 8; i++) sum[i] = __fadd_rn(sum[i], __fmul_rn(number(words[i / 2], i % 2), weight));
}

extern "C" __global__ void __launch_bounds__(THREADS, 2) combine(const __grid_constant__ Params p) {
  const u32 piece = blockIdx.x * THREADS + threadIdx.x, token = piece / p.pieces, at = piece % p.pieces;
  if (!p.settled) wait_for_previous();
  if (token >= p.tokens) return;
  const int* places = p.inverse + (i64)token * K;
  int place[K];
  float weight[K];
#pragma unroll
  for (int j = 0; j < K; j++) place[j] = places[j];
#pragma unroll
  for (int j = 0; j < K; j++) weight[j] = WEIGHTED ? p.weights[(i64)token * K + j] : 1.f;
  if (p.settled) wait_for_previous();
  uint4 y[K];
#pragma unroll
  for (int j = 0; j < K; j++) {
    y[j] = {};
    if (place[j] >= 0) y[j] = read(p.y + ((i64)place[j] * p.pieces + at) * 16);
  }
  float sum[8] = {};
  if (SHARED) add(sum, read(p.shared + (i64)piece * 16), 1.f);
#pragma unroll
  for (int j = 0; j < K; j++) add(sum, y[j], place[j] >= 0 ? weight[j] : 0.f);
  asm volatile("st.global.v4.u32 [%0], {%1, %2, %3, %4};" ::"l"(p.out + (i64)piece * 16), "r"(pack(sum[0], sum[1])),
               "r"(pack(sum[2], sum[3])), "r"(pack(sum[4], sum[5])), "r"(pack(sum[6], sum[7])) : "memory");
}
