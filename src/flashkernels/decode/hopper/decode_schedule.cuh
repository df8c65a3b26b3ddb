// Who computes what. The list of all steps is cut into equal ranges. A piece of work is a range and a KV head. The heads
// of a range come one after the other, so that blocks which run side by side read the same pages: their rows lie side by
// side in memory. Blocks take pieces as they get done: memory does not serve all SMs alike (of 132 equal shares the
// first was done after 72 % of the time). What is summed with what depends on the pieces alone, so the result is the
// same in every run.
#pragma once
#include "decode_steps.cuh"

struct Schedule {
  const Params& p;
  const u32 smem;
  int total, ranges, groups, pieces;  // groups: of heads, one each
  int each, rest;  // steps of a range; the first `rest` of them have one more

  DEVICE Schedule(const Params& p, u32 smem) : p(p), smem(smem) {
    total = start(p.batch);
    // each block at least one piece, and more only of some steps for every warp
    const int worth = (int)min((i64)p.most_pieces, (i64)total * p.kv_heads / (LEAST * WARPS));
    groups = p.kv_heads;
    ranges = max(1, min(total, max((int)gridDim.x, worth) / groups));
    pieces = total ? ranges * groups : 0;
    each = total / ranges;
    rest = total % ranges;
  }
  DEVICE int start(int b) const { return int_at(smem + STARTS_AT + 4 * b); }
  DEVICE int begin(int range) const { return range * each + min(range, rest); }
  DEVICE int share_of(int step) const {
    const int long_ones = rest * (each + 1);
    return step < long_ones ? step / (each + 1) : rest + (step - long_ones) / each;
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
