// Which tile a block works on next: from the plan's offsets, on the device; and how its producer tells the consumers.
#pragma once
#include "counter.cuh"
#include "gemm_cut.cuh"
#include "gemm_params.cuh"
#include "mbarrier.cuh"

// One tile: `count` rows of the output from `row` on, computed as `granules`; 0 granules: there is none left.
struct Work {
  int granules, row, count, feature, expert;
};

// How all rows are cut.
struct Cut {
  int most, tiles;  // granules of a tile; tiles in all
};

// Cuts the rows: of the candidates MOST, MOST - 2, ... the granules that take the fewest and fullest rounds. All
// threads call this together; afterwards `table` holds the granules of each expert.
constexpr int CANDIDATES = MOST / 4 + 1;
static_assert(CANDIDATES < 16);
DEVICE constexpr int candidate(int i) { return MOST - 2 * i; }

DEVICE Cut cut_rows(const Params& p, int* sums, int* table) {
  const int lane = threadIdx.x % 32;
  if (threadIdx.x <= CANDIDATES) sums[threadIdx.x] = 0;
  __syncthreads();
  int mine[CANDIDATES + 1] = {};  // tiles by candidate, and granules
  for (int e = threadIdx.x; e < p.experts; e += THREADS) {
    const int granules = granules_of(p.offsets[e + 1] - p.offsets[e], GRANULE);
    table[e] = granules;
    mine[CANDIDATES] += granules;
#pragma unroll
    for (int c = 0; c < CANDIDATES; c++) mine[c] += tiles_of(granules, candidate(c));
  }
#pragma unroll
  for (int c = 0; c <= CANDIDATES; c++) {
    const int all = __reduce_add_sync(~0u, mine[c]);
    if (lane == 0 && all) atomicAdd(sums + c, all);
  }
  __syncthreads();
  int best = 0;
  float least = INF;
  for (int c = 0; c < CANDIDATES; c++) {
    const float cost = rounds_cost(sums[c], sums[CANDIDATES], GRANULE, p.features, gridDim.x / CLUSTER, FIXED);
    if (cost < least) best = c, least = cost;
  }
  return {candidate(best), sums[best] * p.features};
}

// Turns the table of granules into the number of row tiles before each expert. One warp.
DEVICE void count_before(const Cut& cut, int* table, int experts, int lane) {
  int before = 0;
  for (int first = 0; first < experts; first += 32) {
    const int e = first + lane, own = e < experts ? tiles_of(table[e], cut.most) : 0;
    int sum = own;
#pragma unroll
    for (int step = 1; step < 32; step *= 2) {
      const int other = __shfl_up_sync(~0u, sum, step);
      if (lane >= step) sum += other;
    }
    if (e < experts) table[e] = before + sum - own;
    before += __shfl_sync(~0u, sum, 31);
  }
  __syncwarp();
}

// Tile t, by a whole warp. Tiles are sorted by expert; the last one that starts at or before t has some.
DEVICE Work decode(const Params& p, const Cut& cut, const int* table, int t, int lane) {
  const int expert = last_not_after(table, p.experts, t / p.features, lane);
  const int start = p.offsets[expert], rows = p.offsets[expert + 1] - start;
  const int granules = granules_of(rows, GRANULE), tiles = tiles_of(granules, cut.most);
  const Place at = place(t - table[expert] * p.features, tiles, p.features, TOGETHER);
  const Piece cutout = piece(granules, tiles, at.row);
  const int first = cutout.first * GRANULE;
  return {cutout.count, start + first, min(rows - first, cutout.count * GRANULE), at.feature * 2 * SHARE * CLUSTER, expert};
}

// The producer hands tiles to the consumers through two slots in shared memory; in a cluster that of its first block
// fills the slots of all blocks.
struct Mailbox {
  u32 smem;
  mbarrier::Ring<2> slot;

  DEVICE Mailbox(u32 smem, u32 phase) : smem(smem), slot(phase) {}
  DEVICE u32 at() const { return smem + WORK_AT + 32 * slot.stage; }
  DEVICE u32 full() const { return smem + WORK_FULL + 8 * slot.stage; }
  DEVICE u32 empty() const { return smem + WORK_EMPTY + 8 * slot.stage; }

  DEVICE void put(const Work& w, int lane) {
    mbarrier::wait(empty(), slot.phase);
    if (lane < CLUSTER) {
      const u32 to = CLUSTER == 1 ? at() : mbarrier::address_in(at(), lane);
      asm volatile("st.shared::cluster.v4.s32 [%0], {%1, %2, %3, %4};"
                   ::"r"(to), "r"(w.granules), "r"(w.row), "r"(w.count), "r"(w.feature) : "memory");
      asm volatile("st.shared::cluster.s32 [%0], %1;" ::"r"(to + 16), "r"(w.expert) : "memory");
      if (CLUSTER == 1) mbarrier::arrive(full());
      else mbarrier::arrive_after_writes_in(full(), lane);
    }
    slot.advance();
  }

  // What comes out decides branches and loops around wgmma: ptxas is told that all lanes have the same.
  DEVICE Work get(int lane) {
    Work w;
    if (CLUSTER == 1) mbarrier::wait(full(), slot.phase);
    else mbarrier::wait_for_cluster(full(), slot.phase);
    asm volatile("ld.shared.v4.s32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(w.granules), "=r"(w.row), "=r"(w.count), "=r"(w.feature) : "r"(at()) : "memory");
    asm volatile("ld.shared.s32 %0, [%1];" : "=r"(w.expert) : "r"(at() + 16) : "memory");
    __syncwarp();
    if (lane == 0) {
      if (CLUSTER == 1) mbarrier::arrive(empty());
      else mbarrier::arrive_in(empty(), 0);
    }
    slot.advance();
    w.granules = broadcast(w.granules);
    return w;
  }
};
