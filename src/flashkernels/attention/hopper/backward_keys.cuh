// Which keys have a NaN or Inf: for kernels that make dQ alone.
#pragma once
#include "backward_finite.cuh"
#include "backward_places.cuh"

// Of a block of 64 keys: bits of those whose K has a NaN or Inf, and whether K or V has one.
struct Bad { u64 keys, any; };

DEVICE int first_bad(const Params& p, int batch, int kv_head, int k_row) {
  return VARLEN ? kv_head * p.bad_blocks + k_row / 64 + batch : (batch * p.kv_heads + kv_head) * p.bad_blocks;
}

// One block of 128 threads for 64 keys of one key head, two threads a key.
extern "C" __global__ void __launch_bounds__(128) keys(const __grid_constant__ Params p) {
  wait_for_previous();
  if (!HIDES) return;
  __shared__ u32 halves[4];
  const int row = blockIdx.x / p.bad_blocks, key = threadIdx.x / 2;
  int at = blockIdx.x % p.bad_blocks, batch = row / p.kv_heads, head = row % p.kv_heads, k_row = 0;
  if (VARLEN) {
    batch = last_sequence(p.cu_k, p.batch, at, 64);
    head = row;
    k_row = p.cu_k[batch];
    at -= k_row / 64 + batch;
  }
  const i64 k_at = k_row + at * 64 + key;
  u32 bad_k = 0, bad_v = 0;
  if (k_at < p.total_k_rows) {  // also rows of the next sequence
    const u16* k = (const u16*)p.k_data + batch * p.k_strides.batch + head * p.k_strides.head + k_at * p.k_strides.seq;
    const u16* v = (const u16*)p.v_data + batch * p.v_strides.batch + head * p.v_strides.head + k_at * p.v_strides.seq;
    for (int c = threadIdx.x % 2; c < D / 8; c += 2) bad_k |= has_bad(__ldg((const uint4*)k + c));
    for (int c = threadIdx.x % 2; c < DV / 8; c += 2) bad_v |= has_bad(__ldg((const uint4*)v + c));
  }
  bad_k |= __shfl_xor_sync(~0u, bad_k, 1);
  // lane l has key l / 2 of this warp's 16: the even lanes' votes, closed up
  u32 votes = __ballot_sync(~0u, bad_k) & 0x55555555u;
  votes = (votes | votes >> 1) & 0x33333333u;
  votes = (votes | votes >> 2) & 0x0f0f0f0fu;
  votes = (votes | votes >> 4) & 0x00ff00ffu;
  votes = (votes | votes >> 8) & 0x0000ffffu;
  if (threadIdx.x % 32 == 0) halves[threadIdx.x / 32] = votes;
  const int any = __syncthreads_or(bad_k | bad_v);
  if (threadIdx.x == 0) {
    const u64 low = halves[0] | halves[1] << 16, high = halves[2] | halves[3] << 16;
    ((Bad*)p.bad_keys)[blockIdx.x] = {low | high << 32, (u64)(any != 0)};
  }
}
