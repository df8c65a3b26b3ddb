// Tiles that persistent blocks draw from a counter in memory.
#pragma once
#include "prelude.cuh"

// Largest i with starts[i] <= t, found by a whole warp: 32 probes at a time.
DEVICE int last_not_after(const int* starts, int count, int t, int lane) {
  int low = 0;
  for (int width = count; width > 1;) {
    const int step = ceil_div(width, 32), at = low + lane * step;
    const u32 hits = __ballot_sync(~0u, at < min(low + width, count) && starts[at] <= t);
    low += (31 - __clz(hits | 1)) * step;
    width = min(step, count - low);
  }
  return low;
}

// The last of the blocks, or clusters, leaves the counters as it found them. For one thread.
DEVICE void leave_counters(int* counters, int blocks) {
  __threadfence();
  if (atomicAdd(counters + 1, 1) == blocks - 1) {
    counters[0] = counters[1] = 0;
    __threadfence();
  }
}
