// Who computes what. The keys of a sequence are cut into steps; the steps of all sequences make one list, which is cut
// into equal ranges. A piece of work is a range and a KV head. The heads of a range come one after the other, so that
// blocks which run side by side read the same pages: their rows lie side by side in memory. Blocks take pieces as they
// get done: memory does not serve all SMs alike (of 132 equal shares the first was done after 72 % of the time). What
// is summed with what depends on the pieces alone, so the result is the same in every run. Lengths are read here, on
// the device: a captured graph follows them.
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
  for (int w = 0; w < WARPS; w++) {
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

struct Schedule {
  const Params& p;
  const u32 smem;
  int total, ranges, pieces;
  int each, rest;  // steps of a range; the first `rest` of them have one more

  DEVICE Schedule(const Params& p, u32 smem) : p(p), smem(smem) {
    total = start(p.batch);
    // each block at least one piece, and more only of some steps for every warp
    const int worth = (int)min((i64)p.most_pieces, (i64)total * p.kv_heads / (LEAST * WARPS));
    ranges = max(1, min(min(total, MOST_RANGES), max((int)gridDim.x, worth) / p.kv_heads));
    pieces = total ? ranges * p.kv_heads : 0;
    each = total / ranges;
    rest = total % ranges;
  }
  DEVICE int start(int b) const { return int_at(smem + STARTS_AT + 4 * b); }
  DEVICE int begin(int range) const { return range * each + min(range, rest); }
  DEVICE int range_of(int step) const {
    const int long_ones = rest * (each + 1);
    return step < long_ones ? step / (each + 1) : rest + (step - long_ones) / each;
  }

  // The part that starts at step `item` of the list, and ends there or with its unit.
  DEVICE Part part_at(int item, int end, int head) const {
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
};

// The pieces of a block, in turn: the first two are its own, the others are taken when they are needed soon.
struct Queue {
  const Params& p;
  const Schedule& schedule;

  DEVICE Queue(const Params& p, const Schedule& schedule) : p(p), schedule(schedule) {}

  // The n-th; not below `schedule.pieces`: there is none. Known from the start of the one before the last on.
  DEVICE int at(int n) const {
    if (n < 2) return blockIdx.x + n * gridDim.x;
    return int_at(schedule.smem + QUEUE_AT + 4 * (n & 3));
  }
  DEVICE bool shared() const { return schedule.pieces > 2 * (int)gridDim.x; }
  // One thread asks at the start of piece n for piece n + 2, and hands it on before the block next meets.
  DEVICE int ask() const { return shared() ? 2 * gridDim.x + atomicAdd(p.counters, 1) : schedule.pieces; }
  DEVICE void hand_on(int n, int piece) const { put_int(schedule.smem + QUEUE_AT + 4 * (n + 2 & 3), piece); }
  // The last block leaves the counters as it found them.
  DEVICE void leave() const {
    if (shared() && atomicAdd(p.counters + 1, 1) == gridDim.x - 1) p.counters[0] = p.counters[1] = 0;
  }
};
