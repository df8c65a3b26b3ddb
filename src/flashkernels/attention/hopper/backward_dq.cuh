// dQ by a kernel of its own: S and dP once more, and no additions in memory. For heads over 128, where a tile has few
// keys and the additions would bind; and wherever dQ has to be the same to the bit in every run.
//
// A block makes dQ of 128 queries of one head, 64 for each of two consumer warpgroups; Q and dO stay in shared memory,
// K and V pass by in blocks of 64 keys. A warpgroup issues S and dP of a block behind dQ of the one before, computes
// exponentials under dP, and dS is the operand of dQ += dS·K in registers. Rows are rows here, as in the forward.
#pragma once
#include "backward_keys.cuh"
#include "backward_tile.cuh"

namespace own {

constexpr int QUERIES = 128;
static_assert(BLOCK == 64, "each of two warpgroups has a block of queries");
static_assert(CLUSTER == 1, "a box has all rows of a block of queries");
constexpr int K_BLOCK = 64 * ROW * K_CHUNKS, V_BLOCK = 64 * ROW * V_CHUNKS;
constexpr int Q_AT = 0;
constexpr int O_AT = Q_AT + 2 * Q_TILE;
constexpr int K_AT = O_AT + 2 * O_TILE;
constexpr int V_AT = K_AT + K_BLOCK * OWN_K_STAGES;
constexpr int BAD_AT = V_AT + V_BLOCK * OWN_V_STAGES;  // of each K block, a bit for each key that is hidden
constexpr int Q_FULL = BAD_AT + 8 * OWN_K_STAGES;      // one for each warpgroup: its Q and dO
constexpr int K_FULL = Q_FULL + 16;
constexpr int K_EMPTY = K_FULL + 8 * OWN_K_STAGES;
constexpr int V_FULL = K_EMPTY + 8 * OWN_K_STAGES;
constexpr int V_EMPTY = V_FULL + 8 * OWN_V_STAGES;
constexpr int RAW = V_EMPTY + 8 * OWN_V_STAGES;
constexpr int SHARED_BYTES = RAW + 8;
static_assert(SHARED_BYTES == OWN_SHARED_MEMORY, "backward_source.py and backward_dq.cuh disagree about shared memory");

// 128 queries of one head, and the key blocks [first, end) that some of them see.
struct Place {
  int batch, head, q_row, seq_q, k_row, seq_k, query;
  int first, end;
};

DEVICE Place place_of(const Params& p) {
  Place x;
  const int blocks = p.own_blocks, row = blockIdx.x / blocks;
  int at = blocks - 1 - blockIdx.x % blocks;  // under a causal mask the last rows have the most keys
  if (VARLEN) {
    x.batch = last_sequence(p.cu_q, p.batch, at, QUERIES);
    x.head = row;
    x.q_row = p.cu_q[x.batch];
    x.k_row = p.cu_k[x.batch];
    x.seq_q = p.cu_q[x.batch + 1] - x.q_row;
    x.seq_k = p.cu_k[x.batch + 1] - x.k_row;
    at -= x.q_row / QUERIES + x.batch;
  } else {
    x.batch = row / p.heads;
    x.head = row % p.heads;
    x.q_row = x.k_row = 0;
    x.seq_q = p.seq_q;
    x.seq_k = p.seq_k;
  }
  x.query = at * QUERIES;
  const int shift = x.seq_k - x.seq_q, last = min(x.query + QUERIES, x.seq_q) - 1;
  x.first = LEFT ? max(0, x.query + shift - p.left) / 64 : 0;
  x.end = ceil_div(RIGHT ? min(x.seq_k, max(0, last + shift + p.right + 1)) : x.seq_k, 64);
  return x;
}

DEVICE void produce(const Params& p, const Place& x, u32 smem, int lane) {
  mbarrier::Ring<OWN_K_STAGES> k(1);
  mbarrier::Ring<OWN_V_STAGES> v(1);
  u32 raw_phase = 0;
  const int batch = VARLEN ? 0 : x.batch, head = x.head / p.group;
  if (lane == 0)
    for (int g = 0; g < 2; g++) {
      const u32 full = smem + Q_FULL + 8 * g;
      const int row = x.q_row + x.query + g * 64;
      mbarrier::expect(full, Q_TILE + O_TILE);
#pragma unroll
      for (int c = 0; c < K_CHUNKS; c++)
        tma::load(smem + Q_AT + Q_TILE * g + c * BLOCK * ROW, p.q, full, c * 64, row, x.head, batch);
#pragma unroll
      for (int c = 0; c < V_CHUNKS; c++)
        tma::load(smem + O_AT + O_TILE * g + c * BLOCK * ROW, p.grad_out, full, c * 64, row, x.head, batch);
    }
  // 64 keys of K or V; a block that has a NaN or Inf is cleaned before the consumers get it.
  auto load = [&](u32 to, u32 full, const TensorMap& map, int chunks, int row, bool dirty) {
    const u32 barrier = dirty ? smem + RAW : full;
    if (lane == 0) {
      mbarrier::expect(barrier, chunks * 64 * ROW);
      for (int c = 0; c < chunks; c++) tma::load(to + c * 64 * ROW, map, barrier, c * 64, row, head, batch);
    }
    if (!dirty) return;
    mbarrier::wait(barrier, raw_phase);
    raw_phase ^= 1;
    make_finite(to, chunks * 64 * ROW, lane);
    if (lane == 0) mbarrier::arrive(full);
  };
  const Bad* bad = (const Bad*)p.bad_keys + (HIDES ? first_bad(p, x.batch, head, x.k_row) : 0);
#pragma unroll 1
  for (int n = x.first; n < x.end; n++) {
    const int row = x.k_row + n * 64;
    const Bad found = HIDES ? bad[n] : Bad{0, 0};
    mbarrier::wait(smem + K_EMPTY + 8 * k.stage, k.phase);
    if (HIDES && lane == 0)
      asm volatile("st.shared.u64 [%0], %1;" ::"r"(smem + BAD_AT + 8 * k.stage), "l"(found.keys) : "memory");
    load(smem + K_AT + K_BLOCK * k.stage, smem + K_FULL + 8 * k.stage, p.k, K_CHUNKS, row, HIDES && found.any);
    k.advance();
    mbarrier::wait(smem + V_EMPTY + 8 * v.stage, v.phase);
    load(smem + V_AT + V_BLOCK * v.stage, smem + V_FULL + 8 * v.stage, p.v, V_CHUNKS, row, HIDES && found.any);
    v.advance();
  }
}

struct Consumer {
  const Params& p;
  const Place& x;
  const u32 smem;
  const int group, warp, lane;
  mbarrier::Ring<OWN_K_STAGES> k;
  mbarrier::Ring<OWN_V_STAGES> v;
  int begin[2], end[2], diagonal[2];  // of the thread's two rows: visible keys, and the key at distance 0
  float level[2], delta[2], slope;
  int clear_from, clear_to;           // key blocks in between are seen by all rows of this warpgroup
  float dq[D / 2], s[SCORES], dp[SCORES];
  u32 words[WORDS];

  DEVICE Consumer(const Params& p, const Place& x, u32 smem, int group, int warp, int lane)
      : p(p), x(x), smem(smem), group(group), warp(warp), lane(lane), k(0), v(0) {
    const int shift = x.seq_k - x.seq_q, first = x.query + group * 64;
    const i64 place = first_place(p, x.batch, x.q_row, x.head) + first;
#pragma unroll
    for (int r = 0; r < 2; r++) {
      const int row = warp * 16 + lane / 4 + 8 * r;
      const bool exists = first + row < x.seq_q;
      diagonal[r] = first + row + shift;
      begin[r] = LEFT ? diagonal[r] - p.left : 0;
      end[r] = RIGHT ? min(x.seq_k, diagonal[r] + p.right + 1) : x.seq_k;
      level[r] = exists ? p.level[place + row] : INF;
      delta[r] = exists ? p.delta[place + row] : 0.f;
    }
    clear_from = LEFT ? ceil_div(max(0, first + 63 + shift - p.left), 64) : 0;
    clear_to = x.seq_k / 64;
    if (RIGHT) clear_to = min(clear_to, max(0, first + shift + p.right + 1) / 64);
    if (ALIBI) slope = p.slopes[x.batch * p.slope_batch + x.head] * LOG2E;
  }

  template <int STEPS> DEVICE void issue_scores(float (&to)[SCORES], u32 rows, u32 keys) {  // rows·keysᵀ
    const u32 from = D > 240 ? wgmma::anew(rows) : rows;  // up to there ptxas needs no help
    wgmma::fence();
#pragma unroll
    for (int i = 0; i < STEPS; i++) {
      const u64 a = wgmma::descriptor(from + (column_step(i, BLOCK) >> 4), ROW);
      const u64 b = wgmma::descriptor(keys + (column_step(i, 64) >> 4), ROW);
      if (i == 0) mma_scores_first(to, a, b);
      else mma_scores(to, a, b);
    }
    wgmma::commit();
  }
  DEVICE void issue_dq() {  // dQ += dS·K
    const u32 from = wgmma::by_column(smem + K_AT + K_BLOCK * k.stage, ROW, 64);
    wgmma::fence();
#pragma unroll
    for (int i = 0; i < 4; i++) mma_own_dq(dq, words + 4 * i, wgmma::descriptor(from + (row_step(i) >> 4), ROW));
    wgmma::commit();
  }
  DEVICE void release(u32 barrier) {
    if (RELEASES > 1 || lane == 0) mbarrier::arrive(smem + barrier);
  }

  // P, with a softcap times 1 - tanh², in the place of the scores.
  template <bool MASKED> DEVICE void weigh(int n, u64 bad) {
    const int key = n * 64 + 2 * (lane & 3);
#pragma unroll
    for (int i = 0; i < SCORES; i++) {
      const int r = i >> 1 & 1, at = (i >> 2) * 8 + (i & 1);
      float y, rest = 1.f;
      if (SOFTCAP) {
        const float t = tanh_approx(s[i] * p.scale);
        rest = fmaf(-t, t, 1.f);
        y = fmaf(p.softcap, t, -level[r]);
      } else {
        y = fmaf(s[i], p.scale, -level[r]);
      }
      if (ALIBI) y = fmaf(-slope, fabsf((float)(diagonal[r] - key) - at), y);
      if (MASKED) {
        const bool hidden = at >= end[r] - key || (LEFT && at < begin[r] - key);
        if (hidden || (HIDES && bad >> (2 * (lane & 3) + at) & 1)) y = -INF, rest = 0.f;  // tanh may be a NaN
      }
      s[i] = SOFTCAP ? exp2_approx(y) * rest : exp2_approx(y);
    }
  }
  // dS. A row that sees nothing may have a NaN in dO.
  template <bool MASKED> DEVICE void differentiate() {
#pragma unroll
    for (int i = 0; i < WORDS; i++) {
      const int r = i & 1;
      float a = s[2 * i] * (dp[2 * i] - delta[r]), b = s[2 * i + 1] * (dp[2 * i + 1] - delta[r]);
      if (MASKED) {
        a = s[2 * i] == 0.f ? 0.f : a;
        b = s[2 * i + 1] == 0.f ? 0.f : b;
      }
      words[i] = pack(a, b);
    }
  }

  // One block of keys. Before and after it only dQ of a block is in flight.
  template <bool MASKED, bool FIRST> DEVICE void step(int n, u64 bad) {
    mbarrier::Ring<OWN_K_STAGES> next = k;
    if (!FIRST) next.advance();
    issue_scores<K_STEPS>(s, wgmma::by_row(smem + Q_AT + Q_TILE * group),
                          wgmma::by_row(smem + K_AT + K_BLOCK * next.stage));
    mbarrier::wait(smem + V_FULL + 8 * v.stage, v.phase);
    issue_scores<V_STEPS>(dp, wgmma::by_row(smem + O_AT + O_TILE * group),
                          wgmma::by_row(smem + V_AT + V_BLOCK * v.stage));
    wgmma::wait<1>();
    keep(s);
    if constexpr (!FIRST) {  // dQ of the block before is complete
      keep(words);
      release(K_EMPTY + 8 * k.stage);
    }
    k = next;
    weigh<MASKED>(n, bad);
    keep(s);
    wgmma::wait<0>();
    keep(dp);
    release(V_EMPTY + 8 * v.stage);
    v.advance();
    differentiate<MASKED>();
    keep(words);
    issue_dq();
  }
  // Waits for the K of the next block, and says which of its keys are hidden.
  DEVICE u64 await_k(bool first) {
    mbarrier::Ring<OWN_K_STAGES> next = k;
    if (!first) next.advance();
    mbarrier::wait(smem + K_FULL + 8 * next.stage, next.phase);
    u64 bad = 0;
    if (HIDES) asm volatile("ld.shared.u64 %0, [%1];" : "=l"(bad) : "r"(smem + BAD_AT + 8 * next.stage) : "memory");
    return bad;
  }

  DEVICE void run() {
#pragma unroll
    for (int i = 0; i < D / 2; i++) dq[i] = 0.f;
    mbarrier::wait(smem + Q_FULL + 8 * group, 0);
    if (x.first < x.end) {
      const u64 found = await_k(true);
      step<true, true>(x.first, found);
#pragma unroll 1
      for (int n = x.first + 1; n < x.end; n++) {
        const u64 bad = await_k(false);
        if (n >= clear_from && n < clear_to && !bad) step<false, false>(n, bad);
        else step<true, false>(n, bad);
      }
      wgmma::wait<0>();
      keep(words);
    }
    const int first = x.query + group * 64 + warp * 16 + lane / 4;
    u16* to = p.dq + x.batch * p.dq_strides.batch + x.head * p.dq_strides.head +
              (i64)(x.q_row + first) * p.dq_strides.seq;
    // NaN where the level is, also of a row that sees no key but hidden ones
    auto factor = [&](int r) { return level[r] == level[r] ? p.grad_scale : level[r]; };
    store_rows<D>(dq, {factor(0), factor(1)}, to, p.dq_strides.seq, x.seq_q - first, lane);
  }
};

}  // namespace own

extern "C" __global__ void __launch_bounds__(THREADS, 1) gradient_of_queries(const __grid_constant__ Params p) {
  wait_for_previous();
  extern __shared__ __align__(1024) char shared_memory[];
  const u32 smem = shared_address(shared_memory);
  const int warpgroup = __shfl_sync(~0u, (int)threadIdx.x / 128, 0);
  const int warp = __shfl_sync(~0u, (int)threadIdx.x / 32 % 4, 0);
  const int lane = threadIdx.x % 32;
  const own::Place x = own::place_of(p);
  if (x.query >= x.seq_q) return;

  if (threadIdx.x == 0) {
    for (int i = 0; i < 2; i++) mbarrier::init(smem + own::Q_FULL + 8 * i, 1);
    for (int i = 0; i < OWN_K_STAGES; i++) {
      mbarrier::init(smem + own::K_FULL + 8 * i, 1);
      mbarrier::init(smem + own::K_EMPTY + 8 * i, 8 * RELEASES);
    }
    for (int i = 0; i < OWN_V_STAGES; i++) {
      mbarrier::init(smem + own::V_FULL + 8 * i, 1);
      mbarrier::init(smem + own::V_EMPTY + 8 * i, 8 * RELEASES);
    }
    mbarrier::init(smem + own::RAW, 1);
    mbarrier::publish();
  }
  __syncthreads();
  if (warpgroup == 0) {
    asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(PRODUCER_REGISTERS));
    if (warp == 0) own::produce(p, x, smem, lane);
  } else {
    asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(CONSUMER_REGISTERS));
    own::Consumer(p, x, smem, warpgroup - 1, warp, lane).run();
  }
}
