// After the backward: dQ in 16 bits from its sums.
#pragma once
#include "backward_rows.cuh"

// N columns of two rows of an accumulator to memory, 16 bits an element. Pairs of lanes exchange halves so that each
// stores 8 bytes, and four lanes 32 contiguous ones.
template <int N, class Words> DEVICE void store_words(Words words, u16* first, i64 stride, int rows, int lane) {
  const int quarter = lane & 3, odd = quarter & 1;
#pragma unroll
  for (int r = 0; r < 2; r++) {
    u16* row = first + r * 8 * stride;
    const bool exists = 8 * r < rows;
    auto word = [&](int j) { return words(j, r); };
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

// The same of fp32, its two rows times two factors.
template <int N>
DEVICE void store_rows(const float (&x)[N / 2], float2 factors, u16* first, i64 stride, int rows, int lane) {
  auto word = [&](int j, int r) {
    const float factor = r ? factors.y : factors.x;
    return pack(x[4 * j + 2 * r] * factor, x[4 * j + 2 * r + 1] * factor);
  };
  store_words<N>(word, first, stride, rows, lane);
}

// An 8 x 8 matrix of 16 bits, a row of it in four lanes, turned.
DEVICE u32 turn(u32 pair) {
  u32 y;
  asm("movmatrix.sync.aligned.m8n8.trans.b16 %0, %1;" : "=r"(y) : "r"(pair));
  return y;
}

// One warp for 16 queries.
extern "C" __global__ void __launch_bounds__(2 * BLOCK) queries(const __grid_constant__ Params p) {
  wait_for_previous();
  const QueryBlock b = query_block(p, blockIdx.x);
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, first = warp * 16 + lane / 4;
  if (!WANT_Q || b.rows <= warp * 16) return;
  const int place = blockIdx.x * BLOCK + warp * 16;
  u16* to = p.dq + b.batch * p.dq_strides.batch + b.head * p.dq_strides.head +
            (i64)(b.q_row + b.first + first) * p.dq_strides.seq;
  if constexpr (TALL) {
    u32 words[SUMS / BLOCK / 8][2];
#pragma unroll
    for (int c = 0; c < SUMS / BLOCK / 16; c++)
#pragma unroll
      for (int r = 0; r < 2; r++) {
        const float4 four = __ldcs((const float4*)sums_at(p, place, c) + r * 32 + lane);
        words[2 * c][r] = turn(pack(four.x * p.grad_scale, four.y * p.grad_scale));
        words[2 * c + 1][r] = turn(pack(four.z * p.grad_scale, four.w * p.grad_scale));
      }
    store_words<D>([&](int j, int r) { return words[j][r]; }, to, p.dq_strides.seq, b.rows - first, lane);
  } else {
    float x[D / 2];
#pragma unroll
    for (int j = 0; j < D / 8; j++) {
      const float4 four = __ldcs((const float4*)sums_at(p, place, 0) + j * 32 + lane);  // read for the last time
      x[4 * j] = four.x, x[4 * j + 1] = four.y, x[4 * j + 2] = four.z, x[4 * j + 3] = four.w;
    }
    store_rows<D>(x, {p.grad_scale, p.grad_scale}, to, p.dq_strides.seq, b.rows - first, lane);
  }
}
