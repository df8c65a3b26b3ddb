// Attention backward for Hopper (sm_90a), compiled at run time for one pair of head dimensions and set of features.
//
// Kernels: `order` ranks the sequences of a ragged batch, `rows` makes what is needed of each query row, `backward`
// makes dK, dV and the sums of dQ, and `queries` makes dQ of them. Or `gradient_of_queries` makes dQ by itself.
//
// A block of `backward` is one producer warp, which only issues loads (TMA), and two consumer warpgroups. A tile is a
// block of keys of one key head. Its K and V stay in shared memory; the queries that see them, of all query heads that
// share the key head, pass by in blocks of 64 or more. P is made again from the log-sum-exp. dK and dV are summed in
// registers; dQ is summed in memory, by additions whose order is not fixed: it is not the same to the bit in every run,
// unless `gradient_of_queries` makes it.
//
// The order of statements around wgmma is not free: docs/notes/hopper_backward.md has the rules.
#include "config.cuh"
#if PAIRED_CONSUMERS
#include "backward_pair.cuh"
#elif TALL_BLOCKS
#include "backward_tall.cuh"
#else
#include "backward_split.cuh"
#endif
#if DQ_KERNEL
#include "backward_dq.cuh"
#endif

struct Producer {
  const Params& p;
  const u32 smem, rank;
  const int lane;
  mbarrier::Ring<Q_STAGES> q;
  mbarrier::Ring<2> o;
  u32 raw_phase = 0;

  DEVICE Producer(const Params& p, u32 smem, u32 rank, int lane) : p(p), smem(smem), rank(rank), lane(lane), q(1), o(1) {}

  // One block of Q or dO with its statistics. Of a cluster, each block loads some rows for all. A block in which `rows`
  // saw a NaN or Inf is cleaned before the consumers get it, by ordinary stores.
  template <int CHUNKS>
  DEVICE void load(u32 to, u32 full, const TensorMap& map, int row, int head, int batch, u32 statistics_to,
                   const float* statistics, bool poisoned) {
    constexpr int BYTES = BLOCK * ROW * CHUNKS;
    const u32 barrier = HIDES && poisoned ? smem + RAW : full;
    if (lane == 0) {
      mbarrier::expect(barrier, BYTES + STATISTICS);
#pragma unroll
      for (int c = 0; c < CHUNKS; c++) {
        const int first = rank * (BLOCK / CLUSTER);
        tma::multicast(to + (c * BLOCK + first) * ROW, map, barrier, c * 64, row + first, head, batch);
      }
      tma::copy(statistics_to, statistics, STATISTICS, barrier);
    }
    if (HIDES && poisoned) {
      mbarrier::wait(barrier, raw_phase);
      raw_phase ^= 1;
      make_finite(to, BYTES, lane);
      if (lane == 0) mbarrier::arrive(full);
    }
  }

  DEVICE void run() {
    Mailbox mail(smem, rank == 0 ? 1 : 0);
    u32 kv_phase = 1;
    const int tiles = total_tiles(p);
    int t = blockIdx.x / CLUSTER;
    while (true) {
      Work w;
      if (rank == 0) {
        w.id = -1;
        if (t < tiles) w = decode(p, t, lane);
        mail.put(w, lane);
      } else {
        w = mail.get(p, lane);
      }
      if (w.id < 0) break;
      w.block = w.block * CLUSTER + rank;
      const Queries queries = queries_of(p, w);
      const int batch = VARLEN ? 0 : w.batch, count = queries.count();
      int until_drawn = max(0, p.group * count - 1 - DRAWN_AHEAD);
#pragma unroll 1
      for (int g = 0; g < p.group; g++) {
        const int head = w.head * p.group + g, first = first_place(p, w.batch, w.q_row, head) + queries.first;
        u32 poisoned = 0;  // of 32 blocks, a bit for each
#pragma unroll 1
        for (int i = 0; i < count; i++) {
          if (HIDES && i % 32 == 0) {
            const int at = first + (i + lane) * BLOCK;  // `rows` has blocks at multiples of BLOCK: of two, some rows
            const bool exists = i + lane < count;
            poisoned = __ballot_sync(~0u, exists && (p.poisoned[at / BLOCK] | p.poisoned[(at + BLOCK - 1) / BLOCK]));
          }
          if (until_drawn-- == 0 && rank == 0 && lane == 0) t = atomicAdd(p.counters, 1) + gridDim.x / CLUSTER;
          const int row = w.q_row + queries.first + i * BLOCK, place = first + i * BLOCK;
          const bool bad = poisoned >> (i & 31) & 1;
          mbarrier::wait(smem + Q_EMPTY + 8 * q.stage, q.phase);
          load<K_CHUNKS>(smem + Q_AT + Q_TILE * q.stage, smem + Q_FULL + 8 * q.stage, p.q, row, head, batch,
                         smem + LEVEL_AT + STATISTICS * q.stage, p.level + place, bad);
          q.advance();
          mbarrier::wait(smem + O_EMPTY + 8 * o.stage, o.phase);
          load<V_CHUNKS>(smem + O_AT + O_TILE * o.stage, smem + O_FULL + 8 * o.stage, p.grad_out, row, head, batch,
                         smem + DELTA_AT + STATISTICS * o.stage, p.delta + place, bad);
          o.advance();
          if (g == 0 && i == 0) {
            mbarrier::wait(smem + KV_EMPTY, kv_phase);
            kv_phase ^= 1;
            load_keys(w, batch);
          }
        }
      }
      t = broadcast(t);
    }
    if (rank == 0 && lane == 0) leave_counters(p.counters, gridDim.x / CLUSTER);
  }

  DEVICE void load_keys(const Work& w, int batch) {
    if (lane) return;
    const int row = w.k_row + w.block * KEYS;
    mbarrier::expect(smem + K_FULL, K_TILE);
#pragma unroll
    for (int c = 0; c < K_CHUNKS; c++)
#pragma unroll
      for (int r = 0; r < KEYS; r += KEY_BOX)
        tma::load(smem + K_AT + (c * KEYS + r) * ROW, p.k, smem + K_FULL, c * 64, row + r, w.head, batch);
    mbarrier::expect(smem + V_FULL, V_TILE);
#pragma unroll
    for (int c = 0; c < V_CHUNKS; c++)
#pragma unroll
      for (int r = 0; r < KEYS; r += KEY_BOX)
        tma::load(smem + V_AT + (c * KEYS + r) * ROW, p.v, smem + V_FULL, c * 64, row + r, w.head, batch);
  }
};

extern "C" __global__ void __launch_bounds__(THREADS, 1)
#if CLUSTERED
__cluster_dims__(CLUSTER, 1, 1)
#endif
backward(const __grid_constant__ Params p) {
  extern __shared__ __align__(1024) char shared_memory[];
  const u32 smem = shared_address(shared_memory);
  const int warpgroup = __shfl_sync(~0u, (int)threadIdx.x / 128, 0);
  const int warp = __shfl_sync(~0u, (int)threadIdx.x / 32 % 4, 0);
  const int lane = threadIdx.x % 32;
  const u32 rank = cluster_rank();

  if (threadIdx.x == 0) {
    mbarrier::init(smem + K_FULL, 1);
    mbarrier::init(smem + V_FULL, 1);
    mbarrier::init(smem + KV_EMPTY, 8 * RELEASES);
    mbarrier::init(smem + RAW, 1);
    mbarrier::init(smem + P_FULL, 4 * RELEASES);
    mbarrier::init(smem + P_EMPTY, 4 * RELEASES);
    for (int i = 0; i < Q_STAGES; i++) {
      mbarrier::init(smem + Q_FULL + 8 * i, 1);
      mbarrier::init(smem + Q_EMPTY + 8 * i, ROWS_RELEASES);
    }
    for (int i = 0; i < 2; i++) {
      mbarrier::init(smem + O_FULL + 8 * i, 1);
      mbarrier::init(smem + O_EMPTY + 8 * i, ROWS_RELEASES);
      mbarrier::init(smem + DS_FULL + 8 * i, DS_WRITERS * RELEASES);
      mbarrier::init(smem + DS_EMPTY + 8 * i, DS_READERS * RELEASES);
      mbarrier::init(smem + WORK_FULL + 8 * i, 1);
      mbarrier::init(smem + WORK_EMPTY + 8 * i, (8 * CLUSTER + CLUSTER - 1) * RELEASES);
    }
    mbarrier::publish();
  }
  wait_for_previous();
  if (CLUSTER > 1) cluster_sync();
  else __syncthreads();

  if (warpgroup == 0) {
    asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(PRODUCER_REGISTERS));
    if (warp == 0) Producer(p, smem, rank, lane).run();
  } else {
    asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(CONSUMER_REGISTERS));
#if PAIRED_CONSUMERS
    if (warpgroup == 1) Weights(p, smem, warp, lane).run();
    else Gradients(p, smem, warp, lane).run();
#else
    Consumer(p, smem, warpgroup - 1, warp, lane).run();
#endif
  }
  if (CLUSTER > 1) cluster_sync();  // no block leaves while another may still write into it
}
