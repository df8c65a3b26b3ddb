// Who has seen what: vector clocks of the warps of a cluster.
//
// An action of a warp is known by the warp and its time. It happens before another one if that one's warp has heard of
// this time, through barriers. `fenced` is what has been made visible to the tensor cores and the copy engine: of each
// warp, the time up to which a fence.proxy.async stands between its ordinary stores and whoever holds this clock.
#pragma once
#include <algorithm>

#include "numbers.h"

constexpr int MOST_AGENTS = 64;  // warps of a cluster

struct Clock {
  u32 seen[MOST_AGENTS] = {}, fenced[MOST_AGENTS] = {};
  void join(const Clock& other) {
    for (int i = 0; i < MOST_AGENTS; i++) {
      seen[i] = std::max(seen[i], other.seen[i]);
      fenced[i] = std::max(fenced[i], other.fenced[i]);
    }
  }
  void fence() {
    for (int i = 0; i < MOST_AGENTS; i++) fenced[i] = std::max(fenced[i], seen[i]);
  }
};
