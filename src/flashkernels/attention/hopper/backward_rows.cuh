// Before the backward itself: what it wants to know of each query row.
#pragma once
#include "backward_finite.cuh"
#include "backward_places.cuh"

DEVICE float low(u32 pair) {
  if (!FP16) return __uint_as_float(pair << 16);
  float y;
  asm("{.reg .b16 a, b; mov.b32 {a, b}, %1; cvt.f32.f16 %0, a;}" : "=f"(y) : "r"(pair));
  return y;
}
DEVICE float high(u32 pair) {
  if (!FP16) return __uint_as_float(pair & 0xffff0000u);
  float y;
  asm("{.reg .b16 a, b; mov.b32 {a, b}, %1; cvt.f32.f16 %0, b;}" : "=f"(y) : "r"(pair));
  return y;
}

DEVICE float dot(u32 x, u32 y) { return fmaf(low(x), low(y), high(x) * high(y)); }
DEVICE float dot(uint4 x, uint4 y) { return dot(x.x, y.x) + dot(x.y, y.y) + dot(x.z, y.z) + dot(x.w, y.w); }

// A block of queries of one head, at a multiple of BLOCK places. `rows` <= 0: nobody's.
struct QueryBlock {
  int batch, head, q_row, first, rows;  // first: row of its sequence; rows: of the sequence, from there on
};

DEVICE QueryBlock query_block(const Params& p, int block) {
  QueryBlock b;
  const int row = block / p.blocks, at = block % p.blocks;
  if (VARLEN) {
    b.batch = last_sequence(p.cu_q, p.batch, at, BLOCK);
    b.head = row;
    b.q_row = p.cu_q[b.batch];
    b.first = (at - b.q_row / BLOCK - b.batch) * BLOCK;
    b.rows = p.cu_q[b.batch + 1] - b.q_row - b.first;
  } else {
    b.batch = row / p.heads;
    b.head = row % p.heads;
    b.q_row = 0;
    b.first = at * BLOCK;
    b.rows = p.seq_q - b.first;
  }
  return b;
}

// The i-th sum of the block's dQ: of all parts, one after the other.
DEVICE float* sum_of_block(const Params& p, int i) {
  constexpr int PART = TALL ? BLOCK * 16 : SUMS;
  return sums_at(p, blockIdx.x * BLOCK, i / PART) + i % PART;
}

// dQ of a row with the level NaN is NaN, also where the row sees no key but those that `Tile::clean` hides.
DEVICE void poison_sums(const Params& p, int thread) {
  const float* levels = p.level + (i64)blockIdx.x * BLOCK;
  for (int i = thread; i < SUMS; i += 256) {
    const int fragment = i / 128, lane = i / 4 % 32, e = i % 4;  // as `queries` reads them
    const int row = TALL ? fragment % (BLOCK / 8) * 8 + 2 * (lane % 4) + e % 2
                         : fragment / (D / 8) * 16 + lane / 4 + 8 * (e / 2);
    const float level = levels[row];
    if (level != level) *sum_of_block(p, i) = level;
  }
}

// Of each row: delta = rowsum(dO * O) - dL, and the level: its log-sum-exp L in units of log2. A row that sees nothing,
// or is not there, has the level +inf: all its weights are 0. A row in whose O, L or dO a NaN or Inf shows has the
// level NaN, which is all that the backward needs to know of it: its delta is 0. A block that may have one in Q or dO
// is noted, for the producer to clean. So weights of 0 meet only finite numbers. Also clears the sums of dQ.
//
// Of Q, L tells. A NaN or Inf in a row of Q makes each of its scores NaN or infinite, so L is not finite; nor is it
// where the row sees nothing. Only a softcap makes such scores finite, and a sink their sum: then Q itself is read.
extern "C" __global__ void __launch_bounds__(256) rows(const __grid_constant__ Params p) {
  wait_for_previous();
  const QueryBlock b = query_block(p, blockIdx.x);
  const int t = threadIdx.x;
  if (b.rows <= 0) return;
  if (WANT_Q)
#pragma unroll 4
    for (int i = 4 * t; i < SUMS; i += 4 * 256) *(float4*)sum_of_block(p, i) = {0.f, 0.f, 0.f, 0.f};
  constexpr int WIDEST = D > DV ? D : DV, LANES = WIDEST <= 64 ? 8 : WIDEST <= 128 ? 16 : 32;  // of a row
  const int lane = t % LANES;
  const i64 row = b.q_row + b.first;
  const u16* out = (const u16*)p.out + b.batch * p.out_strides.batch + b.head * p.out_strides.head + lane * 8;
  const u16* grad = (const u16*)p.grad_out_data + b.batch * p.grad_out_strides.batch +
                    b.head * p.grad_out_strides.head + lane * 8;
  const u16* q = (const u16*)p.q_data + b.batch * p.q_strides.batch + b.head * p.q_strides.head + lane * 8;
  const bool look_at_q = HIDES && (SOFTCAP || p.has_sinks);
  const int owned = VARLEN ? p.cu_q[p.batch] - row : b.rows;  // rows from here on that are somebody's
  bool bad = false;
#pragma unroll
  for (int i = 0; i < ceil_div(BLOCK * LANES, 256); i++) {
    const int r = t / LANES + i * (256 / LANES);
    if (r >= BLOCK) break;  // a whole warp's rows
    float delta = 0.f;
    const bool loaded = VARLEN ? row + r < p.total_q : r < b.rows;  // also rows of the next sequence
#pragma unroll
    for (int c = 0; c < DV; c += 8 * LANES)
      if (loaded && c / 8 + lane < DV / 8) {
        const uint4 y = __ldg((const uint4*)(grad + (row + r) * p.grad_out_strides.seq + c));
        if (HIDES) bad |= has_bad(y);
        if (r < b.rows) delta += dot(__ldg((const uint4*)(out + (row + r) * p.out_strides.seq + c)), y);
      }
#pragma unroll
    for (int c = 0; c < D; c += 8 * LANES)
      if (look_at_q && loaded && c / 8 + lane < D / 8)
        bad |= has_bad(__ldg((const uint4*)(q + (row + r) * p.q_strides.seq + c)));
#pragma unroll
    for (int step = LANES / 2; step; step /= 2) delta += __shfl_xor_sync(~0u, delta, step);
    if (lane) continue;
    const i64 query = row + r, at = b.batch * p.lse_batch + b.head * p.lse_head + query;
    if (HIDES && loaded) bad |= r >= owned || !is_finite(__ldg(p.lse + at));
    float level = INF;
    if (r < b.rows) {
      level = __ldg(p.lse + at) * LOG2E;
      if (p.grad_lse != nullptr)
        delta -= p.grad_lse[b.batch * p.grad_lse_batch + b.head * p.grad_lse_head + query * p.grad_lse_seq];
      if (p.row_delta != nullptr) p.row_delta[at] = delta;
      if (level == -INF) level = INF;
      else if (!is_finite(level) || !is_finite(delta)) level = __int_as_float(0x7fffffff);
      if (!is_finite(delta)) delta = 0.f;
    }
    p.level[(i64)blockIdx.x * BLOCK + r] = level;
    p.delta[(i64)blockIdx.x * BLOCK + r] = TALL ? -delta : delta;  // tall: what dP starts from
  }
  if (HIDES) {
    bad = __syncthreads_or(bad);
    if (t == 0) p.poisoned[blockIdx.x] = bad;
    if (WANT_Q && bad) poison_sums(p, t);
  }
}
