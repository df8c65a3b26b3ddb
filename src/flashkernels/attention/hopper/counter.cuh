// Tiles that persistent blocks draw from a counter in memory.
#pragma once
#include "prelude.cuh"

// How many key tiles (query blocks, in the backward) before a tile's last one a block draws its next tile. The answer
// takes a microsecond, which two of them last. Drawn when a tile begins, the next one may go to the block that is last
// to be free: heavy tiles then follow heavy ones. Of 8 tiles a block, under a causal mask, that cost 8 % (D=256; H200,
// 2026-11-18). A walk that is no longer than that draws before its first loads, which wait for buffers.
constexpr int DRAWN_AHEAD = 2;

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
