// The keys of a sequence are cut into steps; the steps of all sequences make one list, of which blocks take parts.
// Lengths are read here, on the device: a captured graph follows them.
#pragma once
#include "decode_params.cuh"

DEVICE int int_at(u32 at) {
  int x;
  asm volatile("ld.shared.s32 %0, [%1];" : "=r"(x) : "r"(at) : "memory");
  return x;
}
DEVICE void put_int(u32 at, int x) { asm volatile("st.shared.s32 [%0], %1;" ::"r"(at), "r"(x) : "memory"); }

DEVICE int lowest_key(const Params& p, int length) { return LEFT ? max(0, length - 1 - p.left) : 0; }
DEVICE int first_step(const Params& p, int length) { return lowest_key(p, length) / KEYS; }
DEVICE int steps_of(const Params& p, int length) {
  return length > 0 ? ceil_div(length, KEYS) - first_step(p, length) : 0;
}

// The kernel ahead may still run where this one is launched early: whatever it may write is read behind this. The table
// is the second of three latencies before the first key arrives. All blocks bring it and the lengths to the L2, which is
// right whoever writes them meanwhile; a small table then comes to this SM while the lengths are on their way.
DEVICE void wait_for_kernel_ahead(const Params& p) {
  constexpr int LINE = 32, MOST_LINES = 128;
  const i64 all = (p.batch - 1) * p.table_batch + p.table_width;
  const i64 own = ((i64)blockIdx.x * THREADS + threadIdx.x) * LINE;
  if (own < p.batch) asm volatile("prefetch.global.L2 [%0];" ::"l"(p.lengths + own));
  if (own < all) asm volatile("prefetch.global.L2 [%0];" ::"l"(p.table + own));
  let_next_start();
  wait_for_previous();
  const int at = threadIdx.x * LINE;
  int unused;
  if (all <= LINE * MOST_LINES && at < all)
    asm volatile("ld.global.ca.s32 %0, [%1];" : "=r"(unused) : "l"(p.table + at));
}

// The first step of every sequence to shared memory, at the end all of them; and the lengths.
DEVICE void count_steps(const Params& p, u32 smem, int warp, int lane) {
  constexpr int EACH = ceil_div(MOST_SEQUENCES, THREADS);
  const int each = ceil_div(p.batch, THREADS), from = (warp * 32 + lane) * each;
  int own[EACH], sum = 0;
#pragma unroll
  for (int i = 0; i < EACH; i++) own[i] = i < each && from + i < p.batch ? p.lengths[from + i] : 0;
#pragma unroll
  for (int i = 0; i < EACH; i++) {
    if (i < each && from + i < p.batch) put_int(smem + LENGTHS_AT + 4 * (from + i), own[i]);
    sum += own[i] = steps_of(p, own[i]);
  }
  int before = sum;
#pragma unroll
  for (int distance = 1; distance < 32; distance *= 2) {
    const int left = __shfl_up_sync(~0u, before, distance);
    if (lane >= distance) before += left;
  }
  if (lane == 31) put_int(smem + WARP_SUMS_AT + 4 * warp, before);
  __syncthreads();
  before -= sum;
  int all = 0;
#pragma unroll
  for (int w = 0; w < THREADS / 32; w++) {
    const int other = int_at(smem + WARP_SUMS_AT + 4 * w);
    all += other;
    if (w < warp) before += other;
  }
#pragma unroll
  for (int i = 0; i < EACH; i++)
    if (i < each && from + i < p.batch) {
      put_int(smem + STARTS_AT + 4 * (from + i), before);
      before += own[i];
    }
  if (warp == 0 && lane == 0) put_int(smem + STARTS_AT + 4 * p.batch, all);
  __syncthreads();
}

// A part of a unit, which is a KV head of a sequence: the steps [from, to) of it that a piece has.
struct Part {
  int batch, head;
  int from, to, all;    // all: of the unit
  int length, lowest;   // keys
  int begin;            // of the unit, in the list of all steps
  DEVICE bool whole() const { return from == 0 && to == all; }
  DEVICE int key_of(int step) const { return (step + (LEFT ? lowest / KEYS : 0)) * KEYS; }  // its first
};

// The part that starts at step `item` of the list, and ends there or with its unit.
DEVICE Part part_at(const Params& p, u32 smem, int item, int end, int head) {
  auto start = [&](int b) { return int_at(smem + STARTS_AT + 4 * b); };
  int low = 0, count = p.batch;
  while (count > 1) {  // the last sequence that starts at or before it: those without steps are passed by
    const int half = count / 2;
    if (start(low + half) <= item) low += half, count -= half;
    else count = half;
  }
  Part part;
  part.batch = low;
  part.head = head;
  part.length = int_at(smem + LENGTHS_AT + 4 * low);
  part.lowest = lowest_key(p, part.length);
  part.begin = start(low);
  part.all = start(low + 1) - part.begin;
  part.from = item - part.begin;
  part.to = min(part.all, end - part.begin);
  return part;
}
