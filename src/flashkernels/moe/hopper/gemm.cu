// Grouped GEMM for Hopper (sm_90a): rows sorted by expert, each times the matrix of its expert.
//
// A block is one producer warp, which only issues loads (TMA), and two consumer warpgroups, which only compute (wgmma).
// Blocks stay on their multiprocessor and take tile after tile from a counter. A tile is 256 rows of the weights, the
// first operand, 128 for each consumer, by 8 to 8 * MOST rows of x, the second operand: wgmma's N, which takes what
// an expert has, so little is padding. N is a constant of the instruction: there is a copy of the loop for each.
//
// In a cluster two blocks have the same rows and neighbouring features: each loads half of the rows for both.
//
// With SwiGLU a consumer's 128 rows are 64 of the gate and the same 64 of up: both are sums of one thread.
#include "gemm_epilogue.cuh"
#include "rounding.cuh"
#include "wgmma.cuh"

// --- the producer

DEVICE int row_boxes(const Work& w) { return ceil_div(w.granules * GRANULE, BOX_ROWS); }
DEVICE int row_bytes(const Work& w) { return FUSED ? w.granules * GRANULE * ROW_BYTES : row_boxes(w) * BOX; }

// The blocks of a cluster take turns: every second box.
DEVICE void load_boxes(const Params& p, const Work& w, u32 to, u32 barrier, int column, u32 rank, int lane) {
  if (lane < row_boxes(w) && lane % CLUSTER == rank)
    tma::multicast(to + lane * BOX, p.x, barrier, column, w.row + lane * BOX_ROWS, 0, 0);
}

// Announces all that a stage will hold, and loads the weights.
DEVICE void begin_stage(const Params& p, const Work& w, u32 smem, int stage, int column, int feature, int lane) {
  const u32 barrier = smem + FULL + 8 * stage;
  if (lane == 0) mbarrier::expect(barrier, 2 * WEIGHTS + row_bytes(w));
  __syncwarp();
  if (lane < 2) tma::load(smem + STAGE * stage + lane * WEIGHTS, p.w, barrier, column, feature + lane * SHARE, 0, w.expert);
}

// AHEAD: the kernel ahead writes rows, but neither weights nor the plan. The weights of the first stages are on their
// way before it has ended.
DEVICE void produce(const Params& p, u32 smem, const Cut& cut, int* table, u32 rank, int lane) {
  mbarrier::Ring<STAGES> ring(1);
  int begun = 0;  // stages of the first tile
  bool waited = !AHEAD;
  Mailbox mail(smem, rank == 0 ? 1 : 0);
  count_before(cut, table, p.experts, lane);
  int t = blockIdx.x / CLUSTER;
  while (true) {
    Work w = {};
    if (rank == 0) {
      if (t < cut.tiles) w = decode(p, cut, table, t, lane);
      mail.put(w, lane);
    } else {
      w = mail.get(lane);
    }
    if (w.granules == 0) break;
    const int feature = w.feature + rank * 2 * SHARE;
    if (!waited) {
      for (; begun < STAGES && begun * DEPTH < p.depth; begun++)
        begin_stage(p, w, smem, begun, begun * DEPTH, feature, lane);
      wait_for_previous();
      waited = true;
    }
    // Asked for now and looked at after the loads of this tile: the answer takes a microsecond.
    if (rank == 0 && lane == 0) t = atomicAdd(p.counters, 1) + gridDim.x / CLUSTER;
#pragma unroll 1
    for (int column = 0; column < p.depth; column += DEPTH) {
      if (begun > 0) {
        begun--;
      } else {
        mbarrier::wait(smem + EMPTY + 8 * ring.stage, ring.phase);
        begin_stage(p, w, smem, ring.stage, column, feature, lane);
      }
      const u32 to = smem + STAGE * ring.stage + 2 * WEIGHTS, barrier = smem + FULL + 8 * ring.stage;
      if (!FUSED) load_boxes(p, w, to, barrier, column, rank, lane);
      ring.advance();
    }
    t = __shfl_sync(~0u, t, 0);
  }
  if (!waited) wait_for_previous();  // a block without a tile: the counters are still the other's
  if (rank == 0 && lane == 0) leave_counters(p.counters, (int)gridDim.x / CLUSTER);
}

// Rows gathered by the loads, one by one: by the other three warps of the producer's warpgroup, as one warp issues a load
// in about 40 cycles. The producer announces their bytes.
DEVICE void gather_rows(const Params& p, u32 smem, int warp, int lane) {
  constexpr int EACH = ceil_div(MOST * GRANULE, 96);  // rows of a lane
  mbarrier::Ring<STAGES> ring(1);
  Mailbox mail(smem, 0);
  for (Work w = mail.get(lane); w.granules > 0; w = mail.get(lane)) {
    int token[EACH];
    const int first = lane * 3 + warp - 1;  // the lanes of three warps
#pragma unroll
    for (int i = 0; i < EACH; i++) token[i] = p.permutation[w.row + min(first + 96 * i, w.count - 1)] / p.of_token;
#pragma unroll 1
    for (int column = 0; column < p.depth; column += DEPTH) {
      const u32 to = smem + STAGE * ring.stage + 2 * WEIGHTS, barrier = smem + FULL + 8 * ring.stage;
      mbarrier::wait(smem + EMPTY + 8 * ring.stage, ring.phase);
#pragma unroll
      for (int i = 0; i < EACH; i++)
        if (first + 96 * i < w.granules * GRANULE)
          tma::load(to + (first + 96 * i) * ROW_BYTES, p.x, barrier, column, token[i], 0, 0);
      ring.advance();
    }
  }
}

// --- the consumers

template <int N> DEVICE void keep(int (&x)[N]) {
#pragma unroll
  for (int i = 0; i < N; i++) asm volatile("" : "+r"(x[i])::"memory");
}

struct Consumer {
  const Params& p;
  const u32 smem, rank;
  const int group, warp, lane;
  const u32 first_w, first_x;  // descriptors (lower halves) of the ring's first stage
  mbarrier::Ring<STAGES> ring;

  DEVICE Consumer(const Params& p, u32 smem, u32 rank, int group, int warp, int lane)
      : p(p), smem(smem), rank(rank), group(group), warp(warp), lane(lane), first_w(wgmma::by_row(smem + group * WEIGHTS)),
        first_x(wgmma::by_row(smem + 2 * WEIGHTS)), ring(0) {}

  DEVICE void release(int stage) const {
    const u32 barrier = smem + EMPTY + 8 * stage;
    if (CLUSTER == 1) {
      if (lane == 0) mbarrier::arrive(barrier);
    } else if (lane < CLUSTER) {
      mbarrier::arrive_in(barrier, lane);
    }
  }
  DEVICE int stage_before() const { return (ring.stage ? ring.stage : STAGES) - 1; }

  // a and b: the products of 64 rows of the weights each.
  template <int N> DEVICE void multiply_stage(Sum (&a)[N / 2], Sum (&b)[N / 2]) {
    const u32 at_w = first_w + ring.stage * (STAGE >> 4), at_x = first_x + ring.stage * (STAGE >> 4);
    wgmma::fence();
#pragma unroll
    for (int i = 0; i < ROW_BYTES / 32; i++) {
      const u64 x = wgmma::descriptor(at_x + 2 * i, ROW_BYTES);
      mma(a, wgmma::descriptor(at_w + 2 * i, ROW_BYTES), x);
      mma(b, wgmma::descriptor(at_w + (WEIGHTS >> 5) + 2 * i, ROW_BYTES), x);
    }
    wgmma::commit();
  }

  // A stage goes back when the products of the next one are issued; the last one serves the epilogue first.
  template <int N> DEVICE void multiply(const Work& w) {
    const Epilogue epilogue{p, group, warp, lane};
    const Factors factors = epilogue.factors<N>(w);
    Sum a[N / 2], b[N / 2];
#pragma unroll
    for (int i = 0; i < N / 2; i++) a[i] = b[i] = 0;
#pragma unroll 1
    for (int column = 0; column < p.depth; column += DEPTH) {
      mbarrier::wait(smem + FULL + 8 * ring.stage, ring.phase);
      multiply_stage<N>(a, b);
      wgmma::wait<1>();
      if (column > 0) release(stage_before());
      ring.advance();
    }
    wgmma::wait<0>();
    keep(a);
    keep(b);
    float y[N / 2], z[N / 2];
#pragma unroll
    for (int i = 0; i < N / 2; i++) y[i] = a[i], z[i] = b[i];
    epilogue.run<N>(y, z, w, factors, smem + STAGE * stage_before() + group * WEIGHTS);
    asm volatile("fence.proxy.async.shared::cta;" ::: "memory");  // TMA writes next what was written here
    __syncwarp();
    release(stage_before());
  }

  template <int GRANULES> DEVICE void multiply_by_size(const Work& w) {
    if (round_up(w.granules, STEP) == GRANULES) multiply<GRANULES * GRANULE>(w);
    else if constexpr (GRANULES > STEP) multiply_by_size<GRANULES - STEP>(w);
  }

  DEVICE void run() {
    Mailbox mail(smem, 0);
    for (Work w = mail.get(lane); w.granules > 0; w = mail.get(lane)) {
      w.feature += rank * 2 * SHARE;
      multiply_by_size<MOST>(w);
    }
  }
};

extern "C" __global__ void __launch_bounds__(THREADS, 1)
#if CLUSTERED
__cluster_dims__(CLUSTER, 1, 1)
#endif
gemm(const __grid_constant__ Params p) {
  extern __shared__ __align__(1024) char shared_memory[];
  const u32 smem = shared_address(shared_memory);
  const int warpgroup = broadcast(threadIdx.x / 128), warp = broadcast(threadIdx.x / 32 % 4), lane = threadIdx.x % 32;
  u32 rank = 0;
  if (CLUSTER > 1) asm volatile("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));

  if (threadIdx.x == 0) {
    asm volatile("prefetch.tensormap [%0];\nprefetch.tensormap [%1];" ::"l"(&p.w), "l"(&p.x) : "memory");
    for (int i = 0; i < STAGES; i++) {
      mbarrier::init(smem + FULL + 8 * i, 1);
      mbarrier::init(smem + EMPTY + 8 * i, CONSUMERS);
    }
    for (int i = 0; i < 2; i++) {
      mbarrier::init(smem + WORK_FULL + 8 * i, 1);
      mbarrier::init(smem + WORK_EMPTY + 8 * i, CONSUMERS + CLUSTER - 1 + (FUSED ? 3 : 0));
    }
    mbarrier::publish();
  }
  if (CLUSTER > 1) cluster_sync();
  if (!AHEAD) {
    wait_for_previous();
    let_next_start();
  }
  int* table = (int*)(shared_memory + TABLE_AT);
  const Cut cut = cut_rows(p, (int*)(shared_memory + SUMS_AT), table);  // its barriers are for the inits, too

  if (warpgroup == 0) {
    asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(PRODUCER_REGISTERS));
    if (warp == 0) produce(p, smem, cut, table, rank, lane);
    else if (FUSED) gather_rows(p, smem, warp, lane);
  } else {
    asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(CONSUMER_REGISTERS));
    if (AHEAD) {
      wait_for_previous();
      let_next_start();
    }
    Consumer(p, smem, rank, warpgroup - 1, warp, lane).run();
  }
  if (CLUSTER > 1) cluster_sync();  // no block leaves while another may still write into it
}

// gathered[place] = tokens[token of the place], and scales, a warp a row, 16 bytes a lane: TMA then loads boxes.
extern "C" __global__ void __launch_bounds__(256) gather(const __grid_constant__ Params p) {
  wait_for_previous();
  let_next_start();
  const int place = blockIdx.x * 8 + threadIdx.x / 32, lane = threadIdx.x % 32;
  if (place >= p.offsets[p.experts]) return;
  const int token = p.permutation[place] / p.of_token, pieces = p.depth * ELEMENT / 16;
  const uint4* from = (const uint4*)(p.tokens + token * p.stride_tokens);
  uint4* to = (uint4*)p.gathered + (i64)place * pieces;
  if (SCALED && lane == 0) p.x_scales[place] = p.token_scales[token];
  for (int first = lane; first < pieces; first += 128) {  // four loads at once
    uint4 piece[4];
#pragma unroll
    for (int i = 0; i < 4; i++)
      if (first + 32 * i < pieces) piece[i] = from[first + 32 * i];
#pragma unroll
    for (int i = 0; i < 4; i++)
      if (first + 32 * i < pieces) to[first + 32 * i] = piece[i];
  }
}

#if ROUNDS
// The same of rows in 16 bits, which are rounded on the way: read once for all their places.
extern "C" __global__ void __launch_bounds__(512) round_and_gather(const __grid_constant__ Params p) {
  __shared__ u32 most[16];
  wait_for_previous();
  let_next_start();
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const int token = blockIdx.x * (blockDim.x / 32 / p.row_warps) + warp / p.row_warps;
  const bool there = token < p.token_count;
  const int* places = p.inverse + (i64)token * p.of_token;
  int place = there && lane < p.of_token ? places[lane] : -1;
  const Part part = {warp % p.row_warps * 32 + lane, 32 * p.row_warps, there ? p.depth / 8 : 0};
  uint4 row[PIECES];
  read_row(row, p.tokens + token * p.stride_tokens, part);
  const float scale = scale_of(largest(row, most, warp, p.row_warps, lane));
  round_row(row, scale);
  for (int j = 0; j < p.of_token; j++) {
    if (j > 0 && j % 32 == 0) place = there && j + lane < p.of_token ? places[j + lane] : -1;
    const int to = __shfl_sync(~0u, place, j % 32);
    if (to < 0) continue;  // an expert that is not here
    write_row(row, p.gathered + (i64)to * p.depth, part);
    if (part.first == 0) p.x_scales[to] = scale;
  }
}
#endif
