// Attention backward for Hopper (sm_90a) and heads of up to 512 columns, of which the sums of one gradient alone fill
// the registers of two warpgroups. backward.cu has the narrower ones, and the headers that both share.
//
// Kernels: `rows` makes what is needed of each query row, `keys` finds NaN in K and V, and `backward` makes the gradients.
// Each is made by itself, by one template: 8 products for 5, and nothing is added in memory, so all is the same to the
// bit in every run.
//
// A block makes the gradient of 64 rows, queries or keys, and has two consumer warpgroups. The other side passes by in
// pairs of tiles of 64 columns: each warpgroup makes the weights W of one tile, P for dV and dS for dQ and dK, over the
// whole head, and leaves them in shared memory; then both multiply both W with their own half of the columns of what is
// summed up: dQ += dS·K, dK += dSᵀ·Q, dV += Pᵀ·dO. So a byte that passes by is read by one warpgroup alone, and each has
// a ring of its own, of small slots, filled by a producer warp of its own. Blocks in a cluster have neighbouring rows
// and share their loads.
#include "config.cuh"
#include "backward_keys.cuh"
#include "backward_queries.cuh"
#include "backward_wide_layout.cuh"
#include "mbarrier.cuh"
#include "wgmma.cuh"

enum Barrier { EXCHANGE = 1, W_FREE };  // named ones; W_FREE + warpgroup: its W is read

template <int OF> DEVICE void add_product(float (&sums)[Layout<OF>::COLUMNS / 2], u64 a, u64 b) {
  if constexpr (OF == OF_V) mma_dv(sums, a, b);
  else mma_dk(sums, a, b);
}

// --- loads: one warp for each consumer warpgroup (`share`)

template <int OF> struct Producer {
  using L = Layout<OF>;
  const Params& p;
  const Place& x;
  const u32 smem, rank;
  const int share, lane;
  mbarrier::Ring<L::STAGES> ring;
  u32 raw_phases = 0;  // of the slots, a bit for each
  const int row_batch;

  DEVICE Producer(const Params& p, const Place& x, u32 smem, u32 rank, int share, int lane)
      : p(p), x(x), smem(smem), rank(rank), share(share), lane(lane), ring(1), row_batch(VARLEN ? 0 : x.batch) {}

  // Fills the next slot. The blocks of a cluster load a part of each, for all. One that may have a NaN or Inf is cleaned
  // before the consumers get it: a weight of 0 would not take it away.
  template <class Load> DEVICE void fill(int bytes, bool dirty, Load load) {
    const u32 slot = 8 * (L::STAGES * share + ring.stage), full = smem + L::FULL + slot;
    const u32 to = smem + L::RING_AT + L::SLOT * (L::STAGES * share + ring.stage);
    mbarrier::wait(smem + L::EMPTY + slot, ring.phase);
    const u32 barrier = dirty ? smem + L::RAW + slot : full;
    if (lane == 0) {
      mbarrier::expect(barrier, bytes);
      load(to, barrier);
    }
    if (dirty) {
      mbarrier::wait(barrier, raw_phases >> ring.stage & 1);
      raw_phases ^= 1 << ring.stage;
      make_finite(to, bytes, lane);
      if (lane == 0) mbarrier::arrive(full);
    }
    ring.advance();
  }

  // The operands of the rows, which stay.
  DEVICE void load_own() {
    const TensorMap* maps[2] = {OF == OF_Q ? &p.q : &p.k, OF == OF_Q ? &p.grad_out : &p.v};
    if (lane) return;
    mbarrier::expect(smem + L::OWN_FULL, L::OWN_BYTES);
#pragma unroll 1
    for (int c = 0; c < L::OWN_BYTES / CHUNK; c++)
      for (int r = 0; r < 64; r += BOX)
        tma::load(smem + L::OWN_AT + c * CHUNK + r * ROW, *maps[c >= K_CHUNKS], smem + L::OWN_FULL,
                  (c < K_CHUNKS ? c : c - K_CHUNKS) * 64, x.row + x.first + r, x.head, row_batch);
  }

  // A tile of 64 columns as an operand of scores: chunk after chunk. `first`: also their statistics.
  template <int CHUNKS> DEVICE void load_tile(const TensorMap& map, const Step& at, int n, bool first) {
    const int tile = 2 * at.pair + share, row = x.column + tile * 64;
    const u32 statistics = smem + L::STATISTICS_AT + L::STATISTICS * (2 * share + (n & 1));
#pragma unroll 1
    for (int c = 0; c < CHUNKS; c += L::GRAIN) {
      const int chunks = min(L::GRAIN, CHUNKS - c), more = first && c == 0 ? L::STATISTICS : 0;
      fill(chunks * CHUNK + more, false, [&](u32 to, u32 barrier) {
        for (int i = 0; i < chunks; i++)
          for (int r = 0; r < 64 / CLUSTER; r += BOX) {
            const int from = rank * (64 / CLUSTER) + r;
            tma::multicast(to + i * CHUNK + from * ROW, map, barrier, (c + i) * 64, row + from, at.head, row_batch);
          }
        if (more) {
          const int place = first_place(p, x.batch, x.column, at.head) + tile * 64;
          tma::copy(statistics, p.level + place, 256, barrier);
          tma::copy(statistics + 256, p.delta + place, 256, barrier);
        }
      });
    }
  }

  // One half of the columns of what is summed up, of a tile's 64 rows.
  DEVICE void load_sums(const Step& at, int tile) {
    const TensorMap& map = OF == OF_Q ? p.k : OF == OF_K ? p.q : p.grad_out;
    const bool dirty = HIDES && may_be_dirty(at, tile);
#pragma unroll 1
    for (int row = 0; row < 64; row += L::SUM_ROWS)
      fill(L::SUM_BYTES, dirty, [&](u32 to, u32 barrier) {
        for (int c = rank; c < L::SUM_CHUNKS; c += CLUSTER)
          for (int r = 0; r < L::SUM_ROWS; r += BOX)
            tma::multicast(to + (c * L::SUM_ROWS + r) * ROW, map, barrier, share * L::COLUMNS + c * 64,
                           x.column + tile * 64 + row + r, at.head, row_batch);
      });
  }
  DEVICE bool may_be_dirty(const Step& at, int tile) const {
    if (OF != OF_Q) return p.poisoned[first_place(p, x.batch, x.column, at.head) / BLOCK + at.pair];
    const Bad* bad = (const Bad*)p.bad_keys + first_bad(p, x.batch, at.head, x.column);
    return tile * 64 < x.columns && bad[tile].any;
  }

  DEVICE void run() {
    const int count = count_steps<OF>(p, x);
    if (count == 0) return;
    if (share == 0) load_own();
    Step now = first_step<OF>(p, x), before = now;
#pragma unroll 1
    for (int n = 0; n <= count; n++) {
      if (n < count) {
        load_tile<K_CHUNKS>(OF == OF_Q ? p.k : p.q, now, n, true);
        if (L::TWO) load_tile<V_CHUNKS>(OF == OF_Q ? p.v : p.grad_out, now, n, false);
      }
      if (n) {
        load_sums(before, 2 * before.pair + share);
        load_sums(before, 2 * before.pair + 1 - share);
      }
      before = now;
      advance(x, now);
    }
  }
};

template <int OF> struct Consumer {
  using L = Layout<OF>;
  const Params& p;
  const Place& x;
  const u32 smem;
  const int share, warp, lane;
  mbarrier::Ring<L::STAGES> ring, tail;  // the slot to use next, and to hand back next
  const u32 fulls, empties;
  const u32 slot_rows, slot_columns;  // descriptors (lower halves) of the ring's first slot: as scores and as sums read
  const u32 own, weights;             // and of the rows' operands, and of both W
  int low[2], high[2];                // columns that the thread's two rows see
  int clear_from, clear_to;           // tiles in between are seen by all rows
  float level[2], delta[2];           // dQ: of the two rows
  float sums[L::COLUMNS / 2], s[32], dp[L::TWO ? 32 : 1];
  u32 words[16];                      // W, 16 bits an element

  DEVICE Consumer(const Params& p, const Place& x, u32 smem, int share, int warp, int lane)
      : p(p), x(x), smem(smem), share(share), warp(warp), lane(lane), ring(0), tail(0),
        fulls(smem + L::FULL + 8 * L::STAGES * share), empties(smem + L::EMPTY + 8 * L::STAGES * share),
        slot_rows(wgmma::by_row(smem + L::RING_AT + L::SLOT * L::STAGES * share)),
        slot_columns(wgmma::by_column(smem + L::RING_AT + L::SLOT * L::STAGES * share, ROW, L::SUM_ROWS)),
        own(wgmma::by_row(smem + L::OWN_AT)), weights(wgmma::by_row(smem + L::WEIGHTS_AT)) {
    using S = Side<OF>;
    const i64 place = S::QUERIES ? first_place(p, x.batch, x.row, x.head) : 0;
#pragma unroll
    for (int r = 0; r < 2; r++) {
      const int row = x.first + warp * 16 + lane / 4 + 8 * r;
      low[r] = S::BACK ? row + x.shift - S::back(p) : 0;
      high[r] = S::AHEAD ? min(x.columns - 1, row + x.shift + S::ahead(p)) : x.columns - 1;
      if (S::QUERIES) {
        level[r] = row < x.rows ? p.level[place + row] : INF;
        delta[r] = row < x.rows ? p.delta[place + row] : 0.f;
      }
    }
    clear_from = S::BACK ? ceil_div(max(0, x.first + 63 + x.shift - S::back(p)), 64) : 0;
    clear_to = x.columns / 64;
    if (S::AHEAD) clear_to = min(clear_to, max(0, x.first + x.shift + S::ahead(p) + 1) / 64);
  }

  // --- buffers

  DEVICE void await_slot() { mbarrier::wait(fulls + 8 * ring.stage, ring.phase); }
  DEVICE void release_slot() {
    if (lane < CLUSTER) mbarrier::arrive_in(empties + 8 * tail.stage, lane);
    tail.advance();
  }

  // --- matrix products: a group of wgmmas for each slot

  // Slots go back in order, when all but RUNNING groups are complete; `count` of them are.
  template <int RUNNING> DEVICE void retire(int count = 1) {
    wgmma::wait<RUNNING>();
#pragma unroll
    for (int i = 0; i < count; i++) release_slot();
  }

  // The rows' operand times that of a tile, over the head. Before it HELD slots are held, after it no more than SHORT.
  template <int STEPS, int HELD> DEVICE void issue_scores(float (&to)[32], u32 rows) {
    constexpr int SLOTS = ceil_div(STEPS, 4 * L::GRAIN);
#pragma unroll
    for (int i = 0; i < SLOTS; i++) {
      await_slot();
      const u32 from = wgmma::anew(rows), columns = slot_rows + ring.stage * (L::SLOT >> 4);
      wgmma::fence();
#pragma unroll
      for (int k = 0; k < min(4 * L::GRAIN, STEPS - 4 * L::GRAIN * i); k++) {
        const u64 a = wgmma::descriptor(from + (column_step(4 * L::GRAIN * i + k, 64) >> 4), ROW);
        const u64 b = wgmma::descriptor(columns + (column_step(k, 64) >> 4), ROW);
        if (i + k == 0) mma_scores_first(to, a, b);
        else mma_scores(to, a, b);
      }
      wgmma::commit();
      ring.advance();
      if (HELD + i >= L::SHORT) retire<L::SHORT>();
    }
  }
  DEVICE void issue_tile() {
    constexpr int SLOTS = ceil_div(K_STEPS, 4 * L::GRAIN), HELD = SLOTS < L::SHORT ? SLOTS : L::SHORT;
    issue_scores<K_STEPS, 0>(s, own);
    if constexpr (L::TWO) issue_scores<V_STEPS, HELD>(dp, own + (CHUNK * K_CHUNKS >> 4));
    static_assert(L::TWO || HELD == L::SHORT, "fewer slots are held");
  }

  // The sums += W times what is summed up, of both tiles of a pair: the warpgroup's own, then the other's. Before it HELD
  // slots are held, after it LAG.
  template <int HELD> DEVICE void issue_sums() {
#pragma unroll
    for (int i = 0; i < 2 * L::SUM_SLOTS; i++) {
      await_slot();
      const u32 w = wgmma::anew(weights + ((i < L::SUM_SLOTS ? share : 1 - share) * CHUNK >> 4));
      const u32 columns = slot_columns + ring.stage * (L::SLOT >> 4);
      wgmma::fence();
#pragma unroll
      for (int k = 0; k < L::GRAIN; k++) {
        const int step = L::GRAIN * (i % L::SUM_SLOTS) + k;
        add_product<OF>(sums, wgmma::descriptor(w + (step * 32 >> 4), ROW),
                        wgmma::descriptor(columns + (row_step(k) >> 4), ROW));
      }
      wgmma::commit();
      ring.advance();
      if (HELD + i >= L::SHORT && i < 2 * L::SUM_SLOTS - (L::LAG - L::SHORT)) retire<L::SHORT>();
    }
  }

  // --- weights

  // W of a tile: P = 2^(logit - level), or dS = P * (dP - delta), with a softcap times 1 - tanh². Of a hidden pair it is
  // 0, whatever the operands have.
  template <bool MASKED> DEVICE void weigh(const Step& at, int n) {
    const int column = (2 * at.pair + share) * 64 + 2 * (lane & 3);
    const u32 statistics = smem + L::STATISTICS_AT + L::STATISTICS * (2 * share + (n & 1)) + 8 * (lane & 3);
    float slope = 0.f;
    if (ALIBI) slope = p.slopes[x.batch * p.slope_batch + (OF == OF_Q ? x.head : at.head)] * LOG2E;
#pragma unroll
    for (int j = 0; j < 8; j++) {
      float2 levels = {0.f, 0.f}, deltas = {0.f, 0.f};
      if (OF != OF_Q) levels = load_pair(statistics + 32 * j);
      if (OF == OF_K) deltas = load_pair(statistics + 256 + 32 * j);
#pragma unroll
      for (int r = 0; r < 2; r++) {
        float w[2];
#pragma unroll
        for (int e = 0; e < 2; e++) {
          const int i = 4 * j + 2 * r + e, to = column + 8 * j + e;
          const float from = OF == OF_Q ? level[r] : e ? levels.y : levels.x;
          const float less = OF == OF_Q ? delta[r] : e ? deltas.y : deltas.x;
          float y, rest = 1.f;
          if (SOFTCAP) {
            const float t = tanh_approx(s[i] * p.scale);
            if (L::TWO) rest = fmaf(-t, t, 1.f);
            y = fmaf(p.softcap, t, -from);
          } else {
            y = fmaf(s[i], p.scale, -from);
          }
          if (ALIBI) y = fmaf(-slope, fabsf((float)(x.first + warp * 16 + lane / 4 + 8 * r + x.shift - to)), y);
          w[e] = exp2_approx(y);
          if constexpr (L::TWO) w[e] *= (SOFTCAP ? rest : 1.f) * (dp[i] - less);
          if (MASKED && (to > high[r] || (Side<OF>::BACK && to < low[r]))) w[e] = 0.f;
        }
        words[2 * j + r] = pack(w[0], w[1]);
      }
    }
  }
  // Without a mask only dQ's first step may go past an end: queries that are not there have the level +inf. Of P alone a
  // mask costs less than the choice.
  DEVICE void make_weights(const Step& at, int n) {
    const int tile = 2 * at.pair + share;
    const bool clear = tile >= clear_from && tile < clear_to;
    if (!HIDES || (L::TWO && clear)) weigh<false>(at, n);
    else weigh<true>(at, n);
  }

  // W goes through shared memory, in rows of 128 bytes whose 16-byte parts are swizzled.
  DEVICE void leave_weights() const {
    u32 to = smem + L::WEIGHTS_AT + CHUNK * share + (warp * 16 + (lane & 15)) * ROW + (((lane >> 4) ^ (lane & 7)) << 4);
#pragma unroll
    for (int i = 0; i < 4; i++)
      store_matrices(to ^ 32 * i, words[4 * i], words[4 * i + 1], words[4 * i + 2], words[4 * i + 3]);
    publish_shared();
  }

  // --- the rows of a block

  DEVICE void run() {
#pragma unroll
    for (int i = 0; i < L::COLUMNS / 2; i++) sums[i] = 0.f;
    const int count = count_steps<OF>(p, x);
    if (count > 0) walk(count);
    if (share == 0) store<L::COLUMNS>();
    else store<L::ALL - L::COLUMNS>();
  }

  DEVICE void walk(int count) {
    Step at = first_step<OF>(p, x);
    mbarrier::wait(smem + L::OWN_FULL, 0);
    issue_tile();
    retire<0>(L::SHORT);
    keep(s);
    keep(dp);
    weigh<true>(at, 0);
    leave_weights();
#pragma unroll 1
    for (int n = 1; n < count; n++) {
      advance(x, at);
      issue_tile();
      named_barrier::sync(EXCHANGE, 256);
      issue_sums<L::SHORT>();
      keep(s);
      keep(dp);
      make_weights(at, n);
      retire<0>(L::LAG);
      named_barrier::arrive(W_FREE + 1 - share, 256);
      named_barrier::sync(W_FREE + share, 256);
      leave_weights();
    }
    named_barrier::sync(EXCHANGE, 256);
    issue_sums<0>();
    retire<0>(L::LAG);
    keep(sums);
  }

  template <int N> DEVICE void store() {
    const int first = x.first + warp * 16 + lane / 4;
    u16* data = OF == OF_Q ? p.dq : OF == OF_K ? p.dk : p.dv;
    const Strides& strides = OF == OF_Q ? p.dq_strides : OF == OF_K ? p.dk_strides : p.dv_strides;
    u16* to = data + x.batch * strides.batch + x.head * strides.head + (i64)(x.row + first) * strides.seq +
              share * L::COLUMNS;
    float factors[2];
#pragma unroll
    for (int r = 0; r < 2; r++) {
      factors[r] = OF == OF_V ? 1.f : p.grad_scale;
      if (OF == OF_Q && level[r] != level[r]) factors[r] = level[r];  // also of a row that sees no key but hidden ones
    }
    auto word = [&](int j, int r) {
      return pack(sums[4 * j + 2 * r] * factors[r], sums[4 * j + 2 * r + 1] * factors[r]);
    };
    store_words<N>(word, to, strides.seq, x.rows - first, lane);
  }
};

// Barriers, and then each warp's part.
template <int OF> DEVICE void make(const Params& p, u32 smem, int cluster) {
  using L = Layout<OF>;
  const int warpgroup = __shfl_sync(~0u, (int)threadIdx.x / 128, 0);
  const int warp = __shfl_sync(~0u, (int)threadIdx.x / 32 % 4, 0);
  const int lane = threadIdx.x % 32;
  const u32 rank = cluster_rank();
  const Place x = place_of<OF>(p, cluster, rank);
  if (x.first - rank * 64 >= x.rows) return;  // all blocks of the cluster do

  if (threadIdx.x == 0) {
    mbarrier::init(smem + L::OWN_FULL, 1);
    for (int i = 0; i < 2 * L::STAGES; i++) {
      mbarrier::init(smem + L::FULL + 8 * i, 1);
      mbarrier::init(smem + L::EMPTY + 8 * i, 4 * CLUSTER);
      mbarrier::init(smem + L::RAW + 8 * i, 1);
    }
    mbarrier::publish();
  }
  cluster_sync();

  if (warpgroup == 0) {
    asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(PRODUCER_REGISTERS));
    if (warp < 2) Producer<OF>(p, x, smem, rank, warp, lane).run();
  } else {
    asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(CONSUMER_REGISTERS));
    Consumer<OF>(p, x, smem, warpgroup - 1, warp, lane).run();
  }
  cluster_sync();  // no block leaves while another may still write into it
}

// All gradients that are wanted, in one launch, so that none waits for the last blocks of another: those with the most
// products come first.
extern "C" __global__ void __launch_bounds__(THREADS, 1) __cluster_dims__(CLUSTER, 1, 1)
backward(const __grid_constant__ Params p) {
  wait_for_previous();
  extern __shared__ __align__(1024) char shared_memory[];
  const u32 smem = shared_address(shared_memory);
  const int copies = VARLEN ? 1 : p.batch, cluster = blockIdx.x / CLUSTER;
  const int of_q = p.dq ? p.own_blocks * p.heads * copies : 0, of_k = p.dk ? p.key_blocks * p.kv_heads * copies : 0;
  if (cluster < of_q) make<OF_Q>(p, smem, cluster);
  else if (cluster < of_q + of_k) make<OF_K>(p, smem, cluster - of_q);
  else make<OF_V>(p, smem, cluster - of_q - of_k);
}
