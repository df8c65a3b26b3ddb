// Decode over a paged cache for Hopper (sm_90a): one query token a sequence, compiled at run time for one head
// dimension, format and set of features. Whole rows by bulk copies, of some neighbouring heads together.
//
// Memory is the limit, so the design is about keeping loads in flight, and out of the queue that loads from shared memory
// wait in. One warp does nothing but load, a row of K or V by each instruction. The other warps belong to a head each and
// take its steps in turn. They meet only where a unit (the block's heads of a sequence) ends, or its piece of the work.
// Parts of units go to memory; who brings the last one joins them, in order.
#include "rows_layout.cuh"
#include "rows_schedule.cuh"
#include "decode_finish.cuh"

// --- the loading warp

DEVICE void copy_bulk(u32 to, const void* from, u32 bytes, u32 barrier) {
  asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];"
               ::"r"(to), "l"(from), "r"(bytes), "r"(barrier) : "memory");
}

// True for one lane of the warp.
DEVICE bool elected() {
  u32 one;
  asm volatile("{.reg .pred p; elect.sync _|p, 0xffffffff; selp.u32 %0, 1, 0, p;}" : "=r"(one));
  return one;
}

struct Loader {
  const Params& p;
  const u32 smem;
  const int lane;
  int stage = 0;
  u32 phase = 0;

  static constexpr int BATCH = 32 / SUB;  // steps whose pages are looked up together, a lane for each 16 keys

  DEVICE int look_up(const Part& part, int from) const {
    const int key = part.key_of(from) + lane * 16;
    return p.table[part.batch * p.table_batch + min(key, part.length - 1) / p.page_size];  // never past the last page
  }

  DEVICE void load(const Part& part) {
    int pages = look_up(part, part.from);
#pragma unroll 1
    for (int from = part.from; from < part.to; from += BATCH) {
      const int next = look_up(part, from + BATCH);
#pragma unroll 1
      for (int i = 0; i < BATCH && from + i < part.to; i++) issue(part, from + i, pages, i);
      pages = next;
    }
  }

  // All addresses are the warp's, not a lane's: the copies take them from uniform registers, and of a lane's own the
  // compiler would make a loop over the lanes, 9 instructions each.
  DEVICE void issue(const Part& part, int step, int pages, int used) {
    const u32 full = smem + FULL_AT + 8 * stage, to = smem + stage * STAGE;
    mbarrier::wait(smem + EMPTY_AT + 8 * stage, phase ^ 1);
#pragma unroll
    for (int sub = 0; sub < SUB; sub++) {
      const i64 page = broadcast(__shfl_sync(~0u, pages, used * SUB + sub));
      // Keys past the end take those of the last page: nobody looks at them.
      const int slot = min(part.key_of(step) + 16 * sub, (part.length - 1) / 16 * 16) % p.page_size;
      const char* k = p.k + page * p.k_page + part.head * p.k_head + (i64)slot * K_SLOT;
      const char* v = p.v + page * p.v_page + part.head * p.v_head + (i64)slot * V_SLOT;
      if (elected()) {
        if (sub == 0) mbarrier::expect(full, COPIED);
#pragma unroll
        for (int i = 0; i < 16; i++) copy_bulk(to + sub * K_SUB + i * K_PITCH, k + i * K_SLOT, K_WIDE, full);
#pragma unroll
        for (int i = 0; i < 16; i++) copy_bulk(to + K_BYTES + sub * V_SUB + i * V_PITCH, v + i * V_SLOT, V_WIDE, full);
        if constexpr (TOKEN_SCALES) {  // of 16 keys and all heads, one after the other
          const u32 place = to + K_BYTES + V_BYTES + sub * 16 * SCALE_PITCH;
          copy_bulk(place, p.k_scale + page * p.k_scale_page + slot * p.k_scale_slot, 16 * SCALE_PITCH, full);
          copy_bulk(place + SCALE_STAGE, p.v_scale + page * p.v_scale_page + slot * p.v_scale_slot, 16 * SCALE_PITCH,
                    full);
        }
      }
      __syncwarp();
    }
    if (++stage == STAGES) stage = 0, phase ^= 1;
  }
};

DEVICE void load_all(const Params& p, const Shares& shares, u32 smem, int lane) {
  Loader loader{p, smem, lane};
#pragma unroll 1
  for (int piece = blockIdx.x; piece < shares.pieces; piece += gridDim.x) {
    const int end = shares.end(piece);
#pragma unroll 1
    for (int item = shares.begin(piece); item < end;) {
      const Part part = part_at(p, smem, item, end, shares.head(piece));
      item = part.begin + part.to;
      loader.load(part);
    }
  }
}

// --- the computing warps

struct Walker {  // over the parts of a block, as one of its warps sees them
  const Params& p;
  const Shares& shares;
  const u32 smem;
  const int warp, lane;
  int piece = blockIdx.x, item = shares.begin(piece);
  u32 steps = 0;  // of all parts before: which stage is next follows from it

  // False: there is none left.
  DEVICE bool next(Part& part) {
    if (piece < shares.pieces && item >= shares.end(piece)) item = shares.begin(piece += gridDim.x);
    if (piece >= shares.pieces) return false;
    part = part_at(p, smem, item, shares.end(piece), shares.head(piece) + warp % HEADS);
    item = part.begin + part.to;
    return true;
  }

  DEVICE void walk(Consumer& consumer, const Part& part) {
    const int split = warp / HEADS, local = warp % HEADS;
    u32 stage = (steps + split) % STAGES, phase = (steps + split) / STAGES & 1;
#pragma unroll 1
    for (int step = part.from + split; step < part.to; step += SPLITS) {
      const u32 k = smem + stage * STAGE, k_scales = k + K_BYTES + V_BYTES + part.head * SCALE_BYTES;
      const Loaded from = {k + local * ROW_BYTES, k + K_BYTES + local * V_ROW_BYTES, k_scales, k_scales + SCALE_STAGE};
      mbarrier::wait(smem + FULL_AT + 8 * stage, phase);
      const int key = part.key_of(step);
      if (key + KEYS > part.length || (LEFT && key < part.lowest)) {
        consumer.compute<true>(part, key, from);
        asm volatile("fence.proxy.async.shared::cta;" ::: "memory");  // hidden rows were written: before the next copy
      } else {
        consumer.compute<false>(part, key, from);
      }
      __syncwarp();
      if (lane == 0) mbarrier::arrive(smem + EMPTY_AT + 8 * stage);
      stage += SPLITS;
      if (stage >= STAGES) stage -= STAGES, phase ^= 1;
    }
    steps += part.to - part.from;
  }
};

// --- the ends of units, by all computing warps

constexpr int COMPUTING = 32 * WARPS;  // threads
constexpr int PART = round_up(ROWS * (DV + 2), 4);  // floats: all sums, then maximum and weight of each row
DEVICE void meet() { named_barrier::sync(1, COMPUTING); }

// How many came before. Releases what the block has written before it met, and acquires what others have.
DEVICE int arrive_at(int* counter) {
  int before;
  asm volatile("atom.acq_rel.gpu.global.add.s32 %0, [%1], 1;" : "=r"(before) : "l"(counter) : "memory");
  return before;
}

// Four columns of a row: sums, and the row's maximum and weight.
struct Cell {
  float top = -INF, weight = 0.f, sum[4] = {};

  DEVICE void scale_to(float most) {
    const float factor = weight_of(top, most);
    top = most;
    weight *= factor;
#pragma unroll
    for (int e = 0; e < 4; e++) sum[e] *= factor;
  }
  DEVICE void add(float other_top, float other_weight, float4 x) {  // `top` is the maximum of both
    const float factor = weight_of(other_top, top);
    weight = fmaf(other_weight, factor, weight);
    sum[0] = fmaf(x.x, factor, sum[0]), sum[1] = fmaf(x.y, factor, sum[1]);
    sum[2] = fmaf(x.z, factor, sum[2]), sum[3] = fmaf(x.w, factor, sum[3]);
  }
};

// The parts [from, to) of a unit, in order: eight at a time, so that their loads fly together. Part n is in the
// share `first` + n.
DEVICE Cell gathered(const Params& p, int groups, int group, int first, int from, int to, int row, int column) {
  constexpr int AT_ONCE = 8;
  Cell cell;
#pragma unroll 1
  for (; from < to; from += AT_ONCE) {
    float2 state[AT_ONCE];
    float4 x[AT_ONCE];
#pragma unroll
    for (int i = 0; i < AT_ONCE; i++) {
      const int n = from + i;
      const float* part = p.parts + (i64)(2 * ((first + n) * groups + group) + (n == 0)) * PART;
      state[i] = n < to ? __ldcg((const float2*)(part + ROWS * DV) + row) : make_float2(-INF, 0.f);
      x[i] = n < to ? __ldcg((const float4*)(part + row * DV + column)) : make_float4(0.f, 0.f, 0.f, 0.f);
    }
    float most = cell.top;
#pragma unroll
    for (int i = 0; i < AT_ONCE; i++) most = fmaxf(most, state[i].x);
    cell.scale_to(most);
#pragma unroll
    for (int i = 0; i < AT_ONCE; i++) cell.add(state[i].x, state[i].y, x[i]);
  }
  return cell;
}

// All parts of a unit to its output. Threads that are left over make teams, each with some of the parts.
DEVICE void join(const Params& p, const Shares& shares, const Part& unit, int first, int count, u32 smem) {
  constexpr int FOURS = DV / 4, CELLS = ROWS * FOURS, FLOATS = 6;
  constexpr int ROOM = WARPS * GROUP * PITCH / (CELLS * FLOATS);  // where the warps' sums were
  constexpr int TEAMS = COMPUTING / CELLS < ROOM ? COMPUTING / CELLS : ROOM;
  const int group = unit.head / HEADS;
  auto gather = [&](int i, int from, int to) {
    return gathered(p, shares.groups, group, first, from, to, i / FOURS, i % FOURS * 4);
  };
  auto write = [&](int i, const Cell& cell) {
#pragma unroll
    for (int e = 0; e < 4; e++) finish(p, unit, i / FOURS, i % FOURS * 4 + e, cell.sum[e], cell.top, cell.weight);
  };
  if constexpr (TEAMS < 2) {
#pragma unroll 1
    for (int i = threadIdx.x; i < CELLS; i += COMPUTING) write(i, gather(i, 0, count));
  } else {
    const int team = threadIdx.x / CELLS, i = threadIdx.x % CELLS, share = ceil_div(count, TEAMS);
    auto place = [&](int team, int n) { return smem + MERGE_AT + ((team * FLOATS + n) * CELLS + i) * 4; };
    Cell cell;
    if (team < TEAMS) cell = gather(i, team * share, min(count, (team + 1) * share));
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
DEVICE void merge(const Params& p, const Shares& shares, const Part& unit, int piece, u32 smem) {
  const int place = unit.from == 0 ? 1 : 0;  // a piece shares at most two units: one began before it, one ends after
  float* own = p.parts + (i64)(2 * piece + place) * PART;
#pragma unroll 1
  for (int i = threadIdx.x; i < ROWS * DV; i += COMPUTING) {
    const int row = i / DV, column = i % DV;
    float top = -INF, weight = 0.f, sum = 0.f;
#pragma unroll
    for (int split = 0; split < SPLITS; split++)
      top = fmaxf(top, state_at(smem + TOPS_AT + (split * ROWS + row) * 8).top);
#pragma unroll
    for (int split = 0; split < SPLITS; split++) {
      const State x = state_at(smem + TOPS_AT + (split * ROWS + row) * 8);
      const float factor = weight_of(x.top, top);
      weight = fmaf(x.weight, factor, weight);
      sum = fmaf(float_at(smem + MERGE_AT + ((split * ROWS + row) * PITCH + column) * 4), factor, sum);
    }
    if (unit.whole()) {
      finish(p, unit, row, column, sum, top, weight);
    } else {
      own[i] = sum;
      if (column == 0) ((float2*)(own + ROWS * DV))[row] = make_float2(top, weight);
    }
  }
  if (unit.whole()) return;

  const int first = shares.share_of(unit.begin), last = shares.share_of(unit.begin + unit.all - 1);
  int* arrived = p.counters + 2 + first * shares.groups + unit.head / HEADS;
  meet();
  if (threadIdx.x == 0) put_int(smem + ARRIVED_AT, arrive_at(arrived));
  meet();
  if (int_at(smem + ARRIVED_AT) != last - first) return;  // others are still at it
  if (threadIdx.x == 0) *arrived = 0;
  join(p, shares, unit, first, last - first + 1, smem);
}

DEVICE void compute_all(const Params& p, const Shares& shares, u32 smem, int warp, int lane) {
  Walker walker{p, shares, smem, warp, lane};
  Consumer consumer(p, smem, warp, lane);
  Part part;
  u32 merged = 1;  // parity of the last time that all warps were done with the sums in shared memory
  bool more = walker.next(part);
  if (more) consumer.load_queries(part);
#pragma unroll 1
  while (more) {
    const int piece = walker.piece;
    Part unit = part;
    unit.head -= warp % HEADS;
    consumer.begin(part);
    walker.walk(consumer, part);
    more = walker.next(part);
    if (more) consumer.load_queries(part);  // on their way while the warps meet
    mbarrier::wait(smem + MERGED_AT, merged);
    merged ^= 1;
    consumer.hand_over();
    meet();
    merge(p, shares, unit, piece, smem);
    __syncwarp();
    if (lane == 0) mbarrier::arrive(smem + MERGED_AT);
  }
}

// The table is the second of three latencies before the first key arrives: a small one is brought to this SM while the
// lengths are on their way, of a large one every block brings a share to the L2.
DEVICE void prefetch_table(const Params& p) {
  constexpr int LINE = 32, MOST_LINES = 128;
  const i64 all = (p.batch - 1) * p.table_batch + p.table_width;
  const bool small = all <= LINE * MOST_LINES;
  const i64 at = ((small ? 0 : (i64)blockIdx.x * THREADS) + threadIdx.x) * LINE;
  if (at >= all) return;
  int unused;
  if (small) asm volatile("ld.global.ca.s32 %0, [%1];" : "=r"(unused) : "l"(p.table + at));
  else asm volatile("prefetch.global.L2 [%0];" ::"l"(p.table + at));
}

DEVICE void make_barriers(u32 smem) {
  if (threadIdx.x < STAGES) {
    mbarrier::init(smem + FULL_AT + 8 * threadIdx.x, 1);
    mbarrier::init(smem + EMPTY_AT + 8 * threadIdx.x, HEADS);
  }
  if (threadIdx.x == 0) mbarrier::init(smem + MERGED_AT, WARPS);
  mbarrier::publish();
}

extern "C" __global__ void __launch_bounds__(THREADS, 1) decode(const __grid_constant__ Params p) {
  extern __shared__ __align__(1024) char shared_memory[];
  const u32 smem = shared_address(shared_memory);
  const int warp = __shfl_sync(~0u, (int)threadIdx.x / 32, 0), lane = threadIdx.x % 32;
  prefetch_table(p);
  make_barriers(smem);
  count_steps(p, smem, warp, lane);
  const Shares shares(p, smem);
  if (warp == WARPS) load_all(p, shares, smem, lane);
  else compute_all(p, shares, smem, warp, lane);
  finish_empty(p, smem);
}
