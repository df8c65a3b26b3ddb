// Attention forward for Hopper (sm_90a) and heads of up to 512 columns, of which O alone would fill a warpgroup's
// registers twice. forward.cu has the narrower ones, and the headers that both share.
//
// A block has 64 query rows and two consumer warpgroups, each with one half of O's columns. Keys come in pairs of tiles
// of 64: each warpgroup makes the scores and exponentials of one tile, over the whole head, and leaves its P in shared
// memory for the other; then both multiply both P with their own columns of V. So every byte of K and V is read by one
// warpgroup alone, and each has a ring of its own, of small slots, filled by a producer warp of its own.
//
// Blocks are in clusters, whose blocks have neighbouring rows and share their loads of K and V.
//
// Rows have one reference for their exponentials (softmax.cuh), on which the two warpgroups agree: with the first pair,
// and when either of them outgrows it.
#include "epilogue.cuh"
#include "queries.cuh"
#include "wgmma.cuh"

enum Barrier { VOTE = 1, EXCHANGE, P_FREE };  // named ones; P_FREE + warpgroup: the other has taken its P

// --- loads: one warp for each consumer warpgroup (`share`)

DEVICE void produce(const Params& p, u32 smem, u32 rank, int share, int lane) {
  const bool draws = rank == 0 && share == 0, leader = lane == 0;
  mbarrier::Ring<STAGES> ring(1);
  mbarrier::Ring<1> q(1);
  Mailbox mail(smem, draws ? 1 : 0);
  const int tiles = total_tiles(p);
  const u32 fulls = smem + SLOT_FULL + 8 * STAGES * share, empties = smem + SLOT_EMPTY + 8 * STAGES * share;
  const u32 slots = smem + RING_AT + SLOT * STAGES * share;
  int kv_head, batch;  // of this tile

  // Fills the next slot. The blocks of a cluster load a part of each, for all: of K some rows, of V some chunks.
  auto fill = [&](int bytes, auto load) {
    const u32 full = fulls + 8 * ring.stage;
    mbarrier::wait(empties + 8 * ring.stage, ring.phase);
    if (leader) {
      mbarrier::expect(full, bytes);
      load(slots + SLOT * ring.stage, full);
    }
    ring.advance();
  };
  // Where a tile starts: its row, and the batch, or of a paged cache the page. Pages are of whole tiles.
  struct Start { int row, batch; };
  auto start_of = [&](const Work& w, int tile) -> Start {
    if (!PAGED) return {w.k_row + tile * BLOCK_N, batch};
    const int key = max(0, min(tile * BLOCK_N, w.seq_k - 1));  // keys past the end are masked, whatever they are
    return {key % p.page_size / BLOCK_N * BLOCK_N, p.pages[(i64)w.batch * p.max_pages + key / p.page_size]};
  };
  auto load_k = [&](const Work& w, int tile) {
    const Start at = start_of(w, tile);
    const int key = at.row + rank * K_ROWS;
#pragma unroll 1
    for (int first = 0; first < K_CHUNKS; first += GRAIN) {
      const int chunks = min(GRAIN, K_CHUNKS - first);
      fill(chunks * CHUNK, [&](u32 to, u32 full) {
        for (int c = 0; c < chunks; c++)
          tma::multicast(to + c * CHUNK + rank * K_ROWS * 128, p.k, full, (first + c) * 64, key, kv_head, at.batch);
      });
    }
  };
  auto load_v = [&](const Work& w, int tile) {
    const Start at = start_of(w, tile);
    const int column = share * O_COLUMNS;
#pragma unroll 1
    for (int row = 0; row < BLOCK_N; row += V_ROWS)
      fill(V_BYTES, [&](u32 to, u32 full) {
        for (int c = rank; c < V_CHUNKS; c += CLUSTER)
          tma::multicast(to + c * V_ROWS * 128, p.v, full, column + c * 64, at.row + row, kv_head, at.batch);
      });
  };
  auto load_q = [&](const Work& w) {
    mbarrier::wait(smem + Q_EMPTY, q.phase);
    q.advance();
    if (!leader) return;
    mbarrier::expect(smem + Q_FULL, Q_BYTES);
    for (int c = 0; c < K_CHUNKS; c++)
      load_queries(smem + Q_AT + c * CHUNK, p.q, smem + Q_FULL, c * 64, w.q_row + w.block * BLOCK_Q, w.head, batch);
  };

  int t = blockIdx.x / CLUSTER;
  while (true) {
    Work w;
    if (draws) {
      if (t < tiles) w = decode(p, t, lane);
      else w.id = -1;
      mail.put(w, lane);
    } else {
      w = mail.get(p, lane);
    }
    if (w.id < 0) break;
    const Keys keys = keys_of(p, w, w.block * CLUSTER * BLOCK_Q, BLOCK_Q * CLUSTER);
    w.block = w.block * CLUSTER + rank;
    kv_head = w.head / p.group;
    batch = VARLEN ? 0 : w.batch;
    int pair = ceil_div(keys.end, 2) - 1;
    auto draw = [&] {
      if (draws && leader) t = atomicAdd(p.counters, 1) + gridDim.x / CLUSTER;
    };
    const bool is_short = pair <= keys.first / 2 + DRAWN_AHEAD;
    if (is_short) draw();
    if (share == 0) load_q(w);
    load_k(w, 2 * pair + share);
#pragma unroll 1
    for (; pair >= keys.first / 2; pair--) {
      if (pair == keys.first / 2 + DRAWN_AHEAD && !is_short) draw();
      if (pair > keys.first / 2) load_k(w, 2 * pair - 2 + share);
      load_v(w, 2 * pair + share);
      load_v(w, 2 * pair + 1 - share);
    }
    t = __shfl_sync(~0u, t, 0);
  }
  if (draws && leader) leave_counters(p.counters, (int)gridDim.x / CLUSTER);
}

struct Consumer {
  const Params& p;
  const u32 smem, rank;
  const int share, warp, lane;
  mbarrier::Ring<STAGES> ring, tail;  // the slot to use next, and to hand back next
  mbarrier::Ring<1> q_ring;
  Mailbox mail;
  const u32 fulls, empties;
  const u32 first_k, first_v;  // descriptors (lower halves) of the ring's first slot,
  const u32 at_q;              // and of Q
  Work w;
  int first, end;              // pairs of key tiles
  Rows rows;
  Softmax softmax;
  float s[BLOCK_N / 2], o[O_COLUMNS / 2];
  u32 weights[P_WORDS], theirs[P_WORDS];  // P, and the other warpgroup's

  DEVICE Consumer(const Params& p, u32 smem, u32 rank, int share, int warp, int lane)
      : p(p), smem(smem), rank(rank), share(share), warp(warp), lane(lane), ring(0), tail(0), q_ring(0), mail(smem, 0),
        fulls(smem + SLOT_FULL + 8 * STAGES * share), empties(smem + SLOT_EMPTY + 8 * STAGES * share),
        first_k(wgmma::by_row(smem + RING_AT + SLOT * STAGES * share)),
        first_v(wgmma::by_column(smem + RING_AT + SLOT * STAGES * share, 128, V_ROWS)),
        at_q(wgmma::by_row(smem + Q_AT)) {
    softmax.scale[0] = softmax.scale[1] = TRANSFORMED ? 1.f : p.scale;
  }

  // --- buffers

  DEVICE void await_slot() { mbarrier::wait(fulls + 8 * ring.stage, ring.phase); }
  DEVICE void release_slot() {
    const u32 barrier = empties + 8 * tail.stage;
    if (CLUSTER == 1) {
      if (lane == 0) mbarrier::arrive(barrier);
    } else if (lane < CLUSTER) {
      mbarrier::arrive_in(barrier, lane);
    }
    tail.advance();
  }
  DEVICE void release_q(bool now) {
    if (lane == 0 && now) mbarrier::arrive(smem + Q_EMPTY);
  }

  // --- matrix products: a group of wgmmas for each slot

  // Slots go back in order, when all but RUNNING groups are complete; `count` of them are.
  template <int RUNNING> DEVICE void retire(int count = 1) {
    wgmma::wait<RUNNING>();
#pragma unroll
    for (int i = 0; i < count; i++) release_slot();
  }

  // S = Q·Kᵀ. Before it SHORT slots are held, with FIRST none; after it SHORT.
  template <bool FIRST> DEVICE void issue_scores() {
#pragma unroll
    for (int i = 0; i < K_SLOTS; i++) {
      await_slot();
      const u32 from = wgmma::anew(at_q), at_k = first_k + ring.stage * (SLOT >> 4);
      wgmma::fence();
#pragma unroll
      for (int k = 0; k < min(4 * GRAIN, QK_STEPS - 4 * GRAIN * i); k++) {
        const int step = 4 * GRAIN * i + k;
        const u64 a = wgmma::descriptor(from + ((step / 4 * CHUNK + k % 4 * 32) >> 4), 128);
        mma_qk(s, a, wgmma::descriptor(at_k + ((k / 4 * CHUNK + k % 4 * 32) >> 4), 128), step > 0);
      }
      wgmma::commit();
      ring.advance();
      if (!FIRST || i >= SHORT) retire<SHORT>();
    }
  }

  // O += P·V of both tiles of a pair: the warpgroup's own, then the other's. SHORT slots are held before it, LAG after.
  DEVICE void issue_values(const u32 (&theirs)[P_WORDS]) {
#pragma unroll
    for (int i = 0; i < 2 * V_SLOTS; i++) {
      await_slot();
      const u32 at_v = first_v + ring.stage * (SLOT >> 4);
      wgmma::fence();
#pragma unroll
      for (int k = 0; k < GRAIN; k++) {
        const int step = GRAIN * (i % V_SLOTS) + k;
        mma_pv(o, (i < V_SLOTS ? weights : theirs) + 4 * step, wgmma::descriptor(at_v + ((k * 16 * 128) >> 4), 128));
      }
      wgmma::commit();
      ring.advance();
      if (i < V_SLOTS) retire<SHORT>();
      else if (i >= V_SLOTS + LAG - SHORT) retire<LAG>();
    }
  }

  // --- what the warpgroups tell one another

  DEVICE float other(u32 at, int r) const {
    float x;
    asm volatile("ld.shared.f32 %0, [%1];"
                 : "=f"(x) : "r"(smem + at + 256 * (1 - share) + 4 * (warp * 16 + lane / 4 + 8 * r)) : "memory");
    return x;
  }
  // Leaves one number for each row and takes the other warpgroup's.
  DEVICE void exchange(u32 at, const float (&mine)[2], float (&theirs)[2]) const {
#pragma unroll
    for (int r = 0; r < 2; r++)
      if ((lane & 3) == 0)
        asm volatile("st.shared.f32 [%0], %1;"
                     ::"r"(smem + at + 256 * share + 4 * (warp * 16 + lane / 4 + 8 * r)), "f"(mine[r]) : "memory");
    named_barrier::sync(EXCHANGE, 256);
#pragma unroll
    for (int r = 0; r < 2; r++) theirs[r] = other(at, r);
  }
  // P goes through shared memory, in rows of 128 bytes whose 16-byte parts are swizzled. This lane's row and its first
  // part; of step i it is two parts further: ^ 32 * i. (Asked for again each time: eight addresses would not fit the
  // registers.)
  DEVICE u32 weights_at(int of) const {
    u32 at = smem + P_AT + CHUNK * of + (warp * 16 + (lane & 15)) * 128 + (((lane >> 4) ^ (lane & 7)) << 4);
    asm volatile("" : "+r"(at));
    return at;
  }
  DEVICE void leave_weights() const {
    const u32 to = weights_at(share);
#pragma unroll
    for (int i = 0; i < PV_STEPS; i++)
      asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1, %2, %3, %4};"
                   ::"r"(to ^ 32 * i), "r"(weights[4 * i]), "r"(weights[4 * i + 1]), "r"(weights[4 * i + 2]),
                     "r"(weights[4 * i + 3]) : "memory");
  }
  DEVICE void take_weights(u32 (&theirs)[P_WORDS]) const {
    const u32 from = weights_at(1 - share);
#pragma unroll
    for (int i = 0; i < PV_STEPS; i++)
      asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
                   : "=r"(theirs[4 * i]), "=r"(theirs[4 * i + 1]), "=r"(theirs[4 * i + 2]), "=r"(theirs[4 * i + 3])
                   : "r"(from ^ 32 * i) : "memory");
  }

  // --- softmax (softmax.cuh), of S, which stays as it is: ptxas would serialise the P·V in flight if it were changed

  // Scores 4j to 4j + 3 as logits.
  template <bool MASKED> DEVICE void see(float (&four)[4], int j, int tile) const {
#pragma unroll
    for (int i = 0; i < 4; i++) four[i] = s[4 * j + i];
    transform(p, four, rows, 1.f, tile, lane, 8 * j);
    if (MASKED) hide(four, rows, tile, lane, 8 * j);
  }

  // The largest logit that either warpgroup has for each row, rounded up.
  template <bool MASKED> DEVICE void row_max(int tile, float (&most)[2]) const {
    float logits[BLOCK_N / 2], theirs[2];
#pragma unroll
    for (int j = 0; j < BLOCK_N / 8; j++) {
      float four[4];
      see<MASKED>(four, j, tile);
#pragma unroll
      for (int i = 0; i < 4; i++) logits[4 * j + i] = four[i];
    }
    Softmax::row_max(logits, most);
#pragma unroll
    for (int r = 0; r < 2; r++) most[r] = ceilf(most[r] * softmax.scale[r]);
    exchange(MAXIMA_AT, most, theirs);
#pragma unroll
    for (int r = 0; r < 2; r++) most[r] = fmaxf(most[r], theirs[r]);
  }

  // P = 2^(S - reference) in 16 bits, and this thread's part of the row sums. Logits are made four at a time: all of
  // them would not fit the registers beside S.
  template <bool MASKED> DEVICE void exponentials(int tile, float (&sum)[2]) {
    float part[2][2] = {{0.f, 0.f}, {0.f, 0.f}};
#pragma unroll
    for (int j = 0; j < BLOCK_N / 8; j++) {
      float four[4];
      see<MASKED>(four, j, tile);
#pragma unroll
      for (int i = 0; i < 4; i++) {
        const float reference = softmax.reference[i / 2];
        four[i] = exp2_approx(TRANSFORMED ? four[i] - reference : fmaf(four[i], softmax.scale[i / 2], -reference));
        part[i / 2][i % 2] += four[i];
      }
      weights[2 * j] = pack(four[0], four[1]);
      weights[2 * j + 1] = pack(four[2], four[3]);
    }
    sum[0] = part[0][0] + part[0][1];
    sum[1] = part[1][0] + part[1][1];
  }

  // --- one query tile

  DEVICE void begin_tile(const Work& next) {
    w = next;
    w.block = w.block * CLUSTER + rank;
    const Keys keys = keys_of(p, w, w.block / CLUSTER * CLUSTER * BLOCK_Q, BLOCK_Q * CLUSTER);
    first = keys.first / 2;
    end = ceil_div(keys.end, 2);
    rows.look(p, w, keys, 0, warp, lane);
    mbarrier::wait(smem + Q_FULL, q_ring.phase);
    q_ring.advance();
  }

  // The first pair sets the references of the rows.
  DEVICE void first_step() {
    const int pair = end - 1, tile = 2 * pair + share;
    issue_scores<true>();
    wgmma::wait<0>();
    keep(s);
    release_q(pair == first);
    float most[2];
    row_max<true>(tile, most);
#pragma unroll
    for (int r = 0; r < 2; r++) softmax.reference[r] = fmaxf(most[r], UNSEEN);
    exponentials<true>(tile, softmax.total);
    leave_weights();
    named_barrier::sync(EXCHANGE, 256);
#pragma unroll
    for (int i = 0; i < O_COLUMNS / 2; i++) o[i] = 0.f;
  }

  // One pair of key tiles: S = Q·Kᵀ and, from the pair before it, O += P·V; then the softmax of S.
  DEVICE void step(int pair) {
    const int tile = 2 * pair + share;
    issue_scores<false>();
    keep(theirs);
    take_weights(theirs);
    named_barrier::arrive(P_FREE + 1 - share, 256);
    issue_values(theirs);
    keep(weights);
    keep(s);
    release_q(pair == first);
    float sum[2];
    exponentials<BAND>(tile, sum);
    named_barrier::sync(P_FREE + share, 256);
    leave_weights();
    retire<SHORT>(LAG - SHORT);
    const bool outgrown = !(sum[0] < LIMIT) || !(sum[1] < LIMIT);  // also where a sum is NaN
    if (__builtin_expect(named_barrier::any(VOTE, 256, outgrown), 0)) {
      wgmma::wait_rare<0>();
      keep(o);
      renew(sum, tile);
    }
    softmax.total[0] += sum[0];
    softmax.total[1] += sum[1];
  }

  // New references from this pair; what was accumulated so far is rescaled, and P made again.
  DEVICE void renew(float (&sum)[2], int tile) {
    float most[2];
    row_max<BAND>(tile, most);
#pragma unroll
    for (int r = 0; r < 2; r++) {
      const float next = fmaxf(softmax.reference[r], most[r]);
      const float factor = exp2_approx(softmax.reference[r] - next);
      softmax.reference[r] = next;
      softmax.total[r] *= factor;
#pragma unroll
      for (int j = 0; j < O_COLUMNS / 8; j++) {
        o[4 * j + 2 * r] *= factor;
        o[4 * j + 2 * r + 1] *= factor;
      }
    }
    exponentials<BAND>(tile, sum);
    leave_weights();
    named_barrier::sync(EXCHANGE, 256);
  }

  DEVICE void run() {
    const u32 noted = smem + POISONED_AT + 4 * (4 * share + warp);
    if (lane == 0) asm volatile("st.shared.b32 [%0], %1;" ::"r"(noted), "r"(-1) : "memory");
    __syncwarp();
    Epilogue epilogue{p, 0, warp, lane, share * O_COLUMNS};
    while (true) {
      const Work next = mail.get(p, lane);
      if (next.id < 0) break;
      begin_tile(next);
      first_step();
#pragma unroll 1
      for (int pair = end - 2; pair >= first; pair--) step(pair);
      u32 last[P_WORDS];  // not `theirs`, which a P·V in flight may still read
      take_weights(last);
      issue_values(last);
      retire<0>(LAG);
      keep(weights);
      keep(theirs);
      keep(last);
      keep(o);
      share_totals();
      float factor[2];
      epilogue.normalise(w, softmax, factor);
      const bool again = epilogue.poisoned(o);
      epilogue.round(o, factor);
      epilogue.store(w);
      epilogue.note(again, noted, w);
    }
    if (BAND || RAGGED) make_noted_again(p, noted, 0, warp, lane, rank, share * O_COLUMNS);
  }

  // The sums of both warpgroups, in one order; the first lane of a row has all of it, as `normalise` adds up its lanes.
  DEVICE void share_totals() {
    float mine[2], theirs[2];
#pragma unroll
    for (int r = 0; r < 2; r++) {
      const float two = softmax.total[r] + __shfl_xor_sync(~0u, softmax.total[r], 1);
      mine[r] = two + __shfl_xor_sync(~0u, two, 2);
    }
    exchange(TOTALS_AT, mine, theirs);
#pragma unroll
    for (int r = 0; r < 2; r++) softmax.total[r] = (lane & 3) ? 0.f : mine[r] + theirs[r];
  }
};

extern "C" __global__ void __launch_bounds__(THREADS, 1)
#if CLUSTERED
__cluster_dims__(CLUSTER, 1, 1)
#endif
forward(const __grid_constant__ Params p) {
  extern __shared__ __align__(1024) char shared_memory[];
  const u32 smem = shared_address(shared_memory);
  const int warpgroup = __shfl_sync(~0u, (int)threadIdx.x / 128, 0);
  const int warp = __shfl_sync(~0u, (int)threadIdx.x / 32 % 4, 0);
  const int lane = threadIdx.x % 32;
  const u32 rank = cluster_rank();

  if (threadIdx.x == 0) {
    mbarrier::init(smem + Q_FULL, 1);
    mbarrier::init(smem + Q_EMPTY, 4 * CONSUMERS);
    for (int i = 0; i < CONSUMERS * STAGES; i++) {
      mbarrier::init(smem + SLOT_FULL + 8 * i, 1);
      mbarrier::init(smem + SLOT_EMPTY + 8 * i, 4 * CLUSTER);
    }
    for (int i = 0; i < 2; i++) {  // read by every warp but the producer that draws
      mbarrier::init(smem + WORK_FULL + 8 * i, 1);
      mbarrier::init(smem + WORK_EMPTY + 8 * i, (5 * CONSUMERS * CLUSTER - 1) * RELEASES);
    }
    mbarrier::publish();
  }
  if constexpr (QUERIES * PACK < 64) clear_rows_of_nobody(smem);
  if (CLUSTER > 1) cluster_sync();
  else __syncthreads();

  if (warpgroup == 0) {
    asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(PRODUCER_REGISTERS));
    if (warp < CONSUMERS) produce(p, smem, rank, warp, lane);
  } else {
    asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(CONSUMER_REGISTERS));
    Consumer(p, smem, rank, warpgroup - 1, warp, lane).run();
  }
  if (CLUSTER > 1) cluster_sync();  // no block leaves while another may still write into it
}
