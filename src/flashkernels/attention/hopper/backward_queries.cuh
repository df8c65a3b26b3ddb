// After the backward: dQ in 16 bits from its sums.
#pragma once
#include "backward_rows.cuh"

// N columns of two rows of an accumulator to memory, 16 bits an element. Pairs of lanes exchange halves so that each
// stores 8 bytes, and four lanes 32 contiguous ones.
template <int N>
DEVICE void store_rows(const float (&x)[N / 2], float factor, u16* first, i64 stride, int rows, int lane) {
  const int quarter = lane & 3, odd = quarter & 1;
#pragma unroll
  for (int r = 0; r < 2; r++) {
    u16* row = first + r * 8 * stride;
    const bool exists = 8 * r < rows;
    auto word = [&](int j) { return pack(x[4 * j + 2 * r] * factor, x[4 * j + 2 * r + 1] * factor); };
#pragma unroll
    for (int j = 0; j + 1 < N / 8; j += 2) {
      const u32 mine = word(j), next = word(j + 1);
      const u32 given = __shfl_xor_sync(~0u, odd ? mine : next, 1);
      uint2 both;
      both.x = odd ? given : mine;
      both.y = odd ? next : given;
      if (exists) *(uint2*)(row + (j + odd) * 8 + (quarter >> 1) * 4) = both;
    }
    if ((N / 8) % 2 && exists) *(u32*)(row + N - 8 + quarter * 2) = word(N / 8 - 1);
  }
}

// N columns of 16 queries, read for the last time. The sums are in fragment order: [16 queries][8 columns][lane][4].
template <int N> DEVICE void turn(const float4* sums, float factor, u16* to, i64 stride, int rows, int lane) {
  float x[N / 2];
#pragma unroll
  for (int j = 0; j < N / 8; j++) {
    const float4 four = __ldcs(sums + j * 32);
    x[4 * j] = four.x, x[4 * j + 1] = four.y, x[4 * j + 2] = four.z, x[4 * j + 3] = four.w;
  }
  store_rows<N>(x, factor, to, stride, rows, lane);
}

// 16 queries of a block, `slab` of 4, by one warp, AT_ONCE columns at a time.
template <int AT_ONCE> DEVICE void turn_slab(const Params& p, const QueryBlock& b, int place, int slab, int lane) {
  const int first = slab * 16 + lane / 4;
  if (b.rows <= slab * 16) return;
  const float4* sums = (const float4*)(p.sums + (i64)place * BLOCK * D + slab * 16 * D) + lane;
  u16* to = p.dq + b.batch * p.dq_strides.batch + b.head * p.dq_strides.head +
            (i64)(b.q_row + b.first + first) * p.dq_strides.seq;
#pragma unroll 1
  for (int column = 0; column + AT_ONCE <= D; column += AT_ONCE, sums += AT_ONCE * 4, to += AT_ONCE)
    turn<AT_ONCE>(sums, p.grad_scale, to, p.dq_strides.seq, b.rows - first, lane);
  if constexpr (D % AT_ONCE) turn<D % AT_ONCE>(sums, p.grad_scale, to, p.dq_strides.seq, b.rows - first, lane);
}

extern "C" __global__ void __launch_bounds__(128) queries(const __grid_constant__ Params p) {
  if (EARLY) await_previous();
  const int place = blockIdx.x + (SPARE_DQ ? p.turned * p.group * p.blocks : 0);
  if (WANT_Q) turn_slab<D>(p, query_block(p, place), place, threadIdx.x / 32, threadIdx.x % 32);
}
