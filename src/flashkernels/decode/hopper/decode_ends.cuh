// The ends of units, by all computing warps: their sums become the output, or a part of it; the last part joins all.
#pragma once
#include "decode_finish.cuh"

constexpr int COMPUTING = 32 * WARPS;  // threads
constexpr int PART = round_up(ROWS * (DV + 2), 4);  // floats: all sums, then maximum and weight of each row
constexpr int CELLS = ROWS * FOURS;
DEVICE void meet() { named_barrier::sync(1, COMPUTING); }

// How many came before. Releases what the block has written before it met, and acquires what others have.
DEVICE int arrive_at(int* counter) {
  int before;
  asm volatile("atom.acq_rel.gpu.global.add.s32 %0, [%1], 1;" : "=r"(before) : "l"(counter) : "memory");
  return before;
}

// The parts [from, to) of a unit, in order, of N cells from `at` on, COMPUTING apart: many at a time, so that their
// loads fly together. Part n is in the share `first` + n.
template <int N>
DEVICE void gather(Cell (&cells)[N], const Params& p, int groups, int group, int first, int from, int to, int at) {
  constexpr int LOADS = THREADS * PER_SM > 288 ? 8 : 16, PARTS = LOADS / N;  // as registers allow
#pragma unroll 1
  for (; from < to; from += PARTS) {
    float2 state[PARTS][N];
    float4 x[PARTS][N];
#pragma unroll
    for (int i = 0; i < PARTS; i++)
#pragma unroll
      for (int k = 0; k < N; k++) {
        const int n = from + i, cell = at + k * COMPUTING, row = cell / FOURS, column = cell % FOURS * 4;
        const bool there = n < to && cell < CELLS;
        const float* part = p.parts + (i64)(2 * ((first + n) * groups + group) + (n == 0)) * PART;
        state[i][k] = there ? __ldcg((const float2*)(part + ROWS * DV) + row) : make_float2(-INF, 0.f);
        x[i][k] = there ? __ldcg((const float4*)(part + row * DV + column)) : make_float4(0.f, 0.f, 0.f, 0.f);
      }
#pragma unroll
    for (int k = 0; k < N; k++) {
      float most = cells[k].top;
#pragma unroll
      for (int i = 0; i < PARTS; i++) most = fmaxf(most, state[i][k].x);
      cells[k].scale_to(most);
#pragma unroll
      for (int i = 0; i < PARTS; i++) cells[k].add(state[i][k].x, state[i][k].y, x[i][k]);
    }
  }
}

// All parts of a unit to its output. Threads that are left over make teams, each with some of the parts.
template <class Cut>
DEVICE void join(const Params& p, const Cut& cut, const Part& unit, int first, int count, u32 smem) {
  constexpr int FLOATS = 6;
  constexpr int ROOM = WARPS * GROUP * PITCH / (CELLS * FLOATS);  // where the warps' sums were
  constexpr int TEAMS = COMPUTING / CELLS < ROOM ? COMPUTING / CELLS : ROOM;
  const int group = unit.head / HEADS;
  auto write = [&](int i, const Cell& cell) { finish(p, unit, i / FOURS, i % FOURS * 4, cell); };
  if constexpr (TEAMS < 2) {
    constexpr int MINE = ceil_div(CELLS, COMPUTING), N = MINE > 2 ? 4 : MINE;
#pragma unroll 1
    for (int i = threadIdx.x; i < CELLS; i += N * COMPUTING) {
      Cell cells[N];
      gather(cells, p, cut.groups, group, first, 0, count, i);
#pragma unroll
      for (int k = 0; k < N; k++)
        if (i + k * COMPUTING < CELLS) write(i + k * COMPUTING, cells[k]);
    }
  } else {
    const int team = threadIdx.x / CELLS, i = threadIdx.x % CELLS, share = ceil_div(count, TEAMS);
    auto place = [&](int team, int n) { return smem + MERGE_AT + ((team * FLOATS + n) * CELLS + i) * 4; };
    Cell cells[1];
    Cell& cell = cells[0];
    if (team < TEAMS) gather(cells, p, cut.groups, group, first, team * share, min(count, (team + 1) * share), i);
    if (team > 0 && team < TEAMS) {
      put_float(place(team, 4), cell.top), put_float(place(team, 5), cell.weight);
#pragma unroll
      for (int e = 0; e < 4; e++) put_float(place(team, e), cell.sum[e]);
    }
    meet();
    if (team > 0) return;
#pragma unroll
    for (int other = 1; other < TEAMS; other++) {
      const float top = float_at(place(other, 4));
      cell.scale_to(fmaxf(cell.top, top));
      cell.add(top, float_at(place(other, 5)), make_float4(float_at(place(other, 0)), float_at(place(other, 1)),
                                                           float_at(place(other, 2)), float_at(place(other, 3))));
    }
    write(i, cell);
  }
}

// Joins what the warps have, and writes the output, or this piece's part of it. `unit`: the part, by its first head.
template <class Cut> DEVICE void merge(const Params& p, const Cut& cut, const Part& unit, int piece, u32 smem) {
  const int place = unit.from == 0 ? 1 : 0;  // a piece shares at most two units: one began before it, one ends after
  float* own = p.parts + (i64)(2 * piece + place) * PART;
#pragma unroll 1
  for (int i = threadIdx.x; i < CELLS; i += COMPUTING) {
    const int row = i / FOURS, column = i % FOURS * 4;
    auto state = [&](int split) { return state_at(smem + TOPS_AT + (split * ROWS + row) * 8); };
    Cell cell;
#pragma unroll
    for (int split = 0; split < SPLITS; split++) cell.top = fmaxf(cell.top, state(split).top);
#pragma unroll
    for (int split = 0; split < SPLITS; split++)
      cell.add(state(split).top, state(split).weight,
               four_floats_at(smem + MERGE_AT + ((split * ROWS + row) * PITCH + column) * 4));
    if (unit.whole()) {
      finish(p, unit, row, column, cell);
    } else {
      *(float4*)(own + row * DV + column) = make_float4(cell.sum[0], cell.sum[1], cell.sum[2], cell.sum[3]);
      if (column == 0) ((float2*)(own + ROWS * DV))[row] = make_float2(cell.top, cell.weight);
    }
  }
  if (unit.whole()) return;

  const int first = cut.share_of(unit.begin), last = cut.share_of(unit.begin + unit.all - 1);
  int* arrived = p.counters + 2 + first * cut.groups + unit.head / HEADS;
  meet();
  if (threadIdx.x == 0) put_int(smem + ARRIVED_AT, arrive_at(arrived));
  meet();
  if (int_at(smem + ARRIVED_AT) != last - first) return;  // others are still at it
  if (threadIdx.x == 0) *arrived = 0;
  join(p, cut, unit, first, last - first + 1, smem);
}
