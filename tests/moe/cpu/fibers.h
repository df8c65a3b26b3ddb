// Threads of a grid as fibers of one thread of the CPU: each runs until it has to wait for others.
#pragma once
#include <ucontext.h>

#include <cstdio>
#include <vector>

struct Index {
  int x;
};
inline Index blockIdx, gridDim, threadIdx;

namespace fibers {

struct Fiber {
  ucontext_t context;
  int block = 0, thread = 0;
  long seen = 0;  // meetings of the grid, when it arrived
  bool done = false;
};

struct Meeting {
  int here = 0;
  long held = 0;
};

inline std::vector<Fiber> all;
inline std::vector<Meeting> warps, blocks;
inline Meeting grid;
inline std::vector<int> values;  // of the lanes of each warp
inline ucontext_t scheduler;
inline int now, threads;
inline long progress;

inline void yield() { swapcontext(&all[now].context, &scheduler); }

inline bool arrive(Meeting& m, int expected) {
  if (++m.here < expected) return false;
  m.here = 0, m.held++, progress++;
  return true;
}

inline void meet(Meeting& m, int expected) {
  long held = m.held;
  if (!arrive(m, expected)) {
    while (m.held == held) yield();
  }
}

inline void meet_warp() { meet(warps[now / 32], 32); }

// f(values of all lanes, this lane)
template <class F> int exchange(int x, F f) {
  int* mine = &values[now / 32 * 32];
  mine[now % 32] = x;
  meet_warp();
  int y = f(mine, now % 32);
  meet_warp();
  return y;
}

}  // namespace fibers
