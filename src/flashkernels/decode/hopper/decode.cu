// Decode over a paged cache for Hopper (sm_90a): one query token a sequence, compiled at run time for one head
// dimension, format and set of features.
//
// Memory is the limit, so the design is about keeping loads in flight. Every warp is on its own: it copies the keys and
// values of its steps into its own ring, some steps ahead and across the ends of sequences, computes with mma.sync, and
// keeps its own maximum, sums and output. Warps of a block meet only where a unit (a KV head of a sequence) ends, or
// its piece of the work. Parts of units go to memory; who brings the last one joins them, in order.
//
// Copies are of 16 bytes a lane, not by TMA: that took 7 to 10 cycles for each row of a box of 16, whatever its bytes.
#include "decode_formats.cuh"
#include "decode_schedule.cuh"
#include "decode_ends.cuh"

// --- loads, ahead of their use

struct Loader {
  const Params& p;
  const Schedule& schedule;
  const Queue& queue;
  const u32 ring, scales, barriers;  // of this warp
  const int warp, lane;
  Part part;
  int turn = -1, known = 0;  // the piece that is loaded, and the last that may be asked for, as the queue counts
  int item = 0, end = 0;     // of the list: where the next part starts, and where the piece ends
  int head = 0;
  int step = 0;              // of the part, the next to load
  int stage = 0, ahead = 0;  // ahead: stages that are loaded or on their way
  int pages, next;           // of the next steps, a lane for each 16 keys: those in use, and those after them
  int used = 0;              // of `pages`, in steps
  bool inside = false;       // of a part that has a step of this warp

  static constexpr int BATCH = 32 / SUB;  // steps whose pages are looked up together

  DEVICE Loader(const Params& p, const Schedule& schedule, const Queue& queue, u32 smem, int warp, int lane)
      : p(p), schedule(schedule), queue(queue), ring(smem + warp * STAGES * LOADED),
        scales(smem + SCALES_AT + warp * STAGES * SCALE_STAGE), barriers(smem + BARRIERS_AT + 8 * warp * STAGES),
        warp(warp), lane(lane) {}

  // To the next part in which this warp has a step. False: there is none yet.
  DEVICE bool enter() {
    do {
      while (item >= end) {
        if (turn == known) return false;
        const int piece = queue.at(++turn);
        const int range = piece / p.kv_heads;
        head = piece % p.kv_heads;
        if (piece < schedule.pieces) item = schedule.begin(range), end = schedule.begin(range + 1);
        else item = end = 0;
      }
      part = part_at(p, schedule.smem, item, end, head);
      item = part.begin + part.to;
      step = part.from + warp;
    } while (step >= part.to);
    pages = look_up(step);
    next = look_up(step + BATCH * WARPS);
    used = 0;
    return inside = true;
  }
  DEVICE int look_up(int from) const {
    const int key = part.key_of(from + lane / SUB * WARPS) + lane % SUB * 16;
    return p.table[part.batch * p.table_batch + min(key, part.length - 1) / p.page_size];  // never past the last page
  }

  DEVICE static void copy(u32 to, const void* from) {
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(to), "l"(from) : "memory");
  }
  // 16 rows of BYTES each, 16 bytes a lane.
  template <int BYTES, int SLOT> DEVICE void copy_rows(u32 to, const char* from) const {
    constexpr int PIECES = BYTES / 16;
#pragma unroll
    for (int i = 0; i < ceil_div(PIECES, 2); i++) {
      const int at = i * 32 + lane, row = at / PIECES, piece = at % PIECES;
      if (PIECES % 2 && row >= 16) continue;
      copy(to + piece / 8 * SUB * BOX + row * 128 + ((piece % 8 ^ row % 8) << 4), from + row * SLOT + piece * 16);
    }
  }

  DEVICE void issue() {
    const u32 to = ring + stage * LOADED;
#pragma unroll
    for (int sub = 0; sub < SUB; sub++) {
      const i64 page = __shfl_sync(~0u, pages, used * SUB + sub);
      // Keys past the end take those of the last page: nobody looks at them.
      const int slot = min(part.key_of(step) + 16 * sub, (part.length - 1) / 16 * 16) % p.page_size;
      copy_rows<ROW_BYTES, K_SLOT>(to + sub * BOX, p.k + page * p.k_page + part.head * p.k_head + (i64)slot * K_SLOT);
      copy_rows<V_ROW_BYTES, V_SLOT>(to + K_BYTES + sub * BOX,
                                     p.v + page * p.v_page + part.head * p.v_head + (i64)slot * V_SLOT);
      if constexpr (TOKEN_SCALES) {  // a lane has one key's, of K or of V
        const int row = slot + (lane & 15);
        const bool of_v = lane >= 16;
        const u16* from = of_v ? p.v_scale + page * p.v_scale_page + row * p.v_scale_slot + part.head * p.v_scale_head
                               : p.k_scale + page * p.k_scale_page + row * p.k_scale_slot + part.head * p.k_scale_head;
        const u32 place = scales + stage * SCALE_STAGE + ((of_v ? KEYS : 0) + sub * 16 + (lane & 15)) * SCALE_BYTES;
        // At least 4 bytes are copied: a scale alone comes with its neighbour.
        const u64 source = (u64)from & ~(u64)(SCALE_BYTES == 4 && KIND != INT4 ? 3 : 0);
        asm volatile("cp.async.ca.shared.global [%0], [%1], %2;" ::"r"(place), "l"(source), "n"(SCALE_BYTES) : "memory");
      }
    }
    asm volatile("cp.async.mbarrier.arrive.noinc.shared.b64 [%0];" ::"r"(barriers + 8 * stage) : "memory");
    if (++stage == STAGES) stage = 0;
    ahead++;
    step += WARPS;
    inside = step < part.to;
    if (inside && ++used == BATCH) {
      pages = next;
      next = look_up(step + BATCH * WARPS);
      used = 0;
    }
  }

  // As many steps as there are free stages.
  DEVICE void fill() {
    while (ahead < STAGES && (inside || enter())) issue();
  }
};

// --- steps of a warp, in order

struct Reader {
  const u32 ring, scales, barriers;  // of this warp
  int stage = 0;
  u32 phase = 0;

  DEVICE Reader(u32 smem, int warp)
      : ring(smem + warp * STAGES * LOADED), scales(smem + SCALES_AT + warp * STAGES * SCALE_STAGE),
        barriers(smem + BARRIERS_AT + 8 * warp * STAGES) {}

  DEVICE Loaded wait() const {
    mbarrier::wait(barriers + 8 * stage, phase);
    const u32 k = ring + stage * LOADED, k_scales = scales + stage * SCALE_STAGE;
    return {k, k + K_BYTES, k_scales, k_scales + KEYS * SCALE_BYTES};
  }
  DEVICE void advance() {
    if (++stage == STAGES) stage = 0, phase ^= 1;
  }
};

// All steps of a part that are this warp's. `loader` refills each stage as soon as it is read.
DEVICE void walk(Consumer& consumer, Reader& reader, const Part& part, Loader& loader) {
#pragma unroll 1
  for (int step = part.from + loader.warp; step < part.to; step += WARPS) {
    const Loaded from = reader.wait();
    const int key = part.key_of(step);
    if (key + KEYS > part.length || (LEFT && key < part.lowest)) consumer.compute<true>(part, key, from);
    else consumer.compute<false>(part, key, from);
    reader.advance();
    __syncwarp();
    loader.ahead--;
    loader.fill();
  }
}

extern "C" __global__ void __launch_bounds__(THREADS, PER_SM) decode(const __grid_constant__ Params p) {
  extern __shared__ __align__(1024) char shared_memory[];
  const u32 smem = shared_address(shared_memory);
  const int warp = __shfl_sync(~0u, (int)threadIdx.x / 32, 0), lane = threadIdx.x % 32;
  if (threadIdx.x < WARPS * STAGES) mbarrier::init(smem + BARRIERS_AT + 8 * threadIdx.x, 32);
  if constexpr (ROW_BYTES % 128 || V_ROW_BYTES % 128) {  // columns past a head's end are read too, and never written
    for (int at = threadIdx.x * 16; at < SCALES_AT; at += THREADS * 16)
      asm volatile("st.shared.v4.u32 [%0], {%1, %1, %1, %1};" ::"r"(smem + at), "r"(0) : "memory");
  }
  wait_for_kernel_ahead(p);
  count_steps(p, smem, warp, lane);
  const Schedule schedule(p, smem);
  const Queue queue(p, schedule);
  Loader loader(p, schedule, queue, smem, warp, lane);
  Consumer consumer(p, smem, warp, lane);
  Reader reader(smem, warp);
#pragma unroll 1
  for (int turn = 0;; turn++) {
    const int piece = queue.at(turn);
    if (piece >= schedule.pieces) break;
    const int asked = threadIdx.x == 0 ? queue.ask() : 0;
    const int range = piece / p.kv_heads, end = schedule.begin(range + 1);
#pragma unroll 1
    for (int item = schedule.begin(range); item < end;) {
      const Part part = part_at(p, smem, item, end, piece % p.kv_heads);
      item = part.begin + part.to;
      consumer.load_queries(part);
      loader.known = turn + 1;
      loader.fill();
      consumer.begin(part);
      walk(consumer, reader, part, loader);
      consumer.hand_over();
      if (threadIdx.x == 0) queue.hand_on(turn, asked);
      __syncthreads();
      merge(p, schedule, part, piece, smem);
      __syncthreads();
    }
  }
  if (threadIdx.x == 0) queue.leave();
  finish_empty(p, smem);
}
