// Decode over a paged cache for Hopper (sm_90a): one query token a sequence, compiled at run time for one head
// dimension, format and set of features. Whole rows by bulk copies, of some neighbouring heads together.
//
// Memory is the limit, so the design is about keeping loads in flight, and out of the queue that loads from shared memory
// wait in. One warp does nothing but load, a row of K or V by each instruction. The other warps belong to a head each and
// take its steps in turn. They meet only where a unit (the block's heads of a sequence) ends, or its piece of the work.
// Parts of units go to memory; who brings the last one joins them, in order.
#include "rows_layout.cuh"
#include "rows_schedule.cuh"
#include "decode_ends.cuh"

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
  make_barriers(smem);
  wait_for_kernel_ahead(p);
  count_steps(p, smem, warp, lane);
  const Shares shares(p, smem);
  if (warp == WARPS) load_all(p, shares, smem, lane);
  else compute_all(p, shares, smem, warp, lane);
  finish_empty(p, smem);
}
