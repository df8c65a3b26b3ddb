// Attention forward for Hopper (sm_90a), compiled at run time for one head dimension, tile and set of features.
//
// A block is one producer warp, which only issues loads (TMA), and 1 to 4 consumer warpgroups of 64 query rows each,
// which only compute (wgmma). Blocks stay on their multiprocessor and take tile after tile from a counter.
//
// A consumer issues Q·Kᵀ of the next key tile and P·V of the last one together, waits for the first, and computes its
// exponentials while the second runs. P never leaves registers. The first Q·Kᵀ of the next query tile runs under the
// epilogue of the previous one.
//
// The order of statements around wgmma is not free: ptxas serialises asynchronous wgmmas (and says so in a warning,
// which the build turns into an error) when their registers are copied, or when a branch lies between them and their
// wait. docs/notes/hopper_forward.md has the rules.
#include "epilogue.cuh"
#include "queries.cuh"
#include "values.cuh"
#include "wgmma.cuh"

DEVICE void produce(const Params& p, u32 smem, u32 rank, int lane) {
  mbarrier::Ring<STAGES> k(1), v(1);
  mbarrier::Ring<Q_STAGES> q(1);
  Mailbox mail(smem, rank == 0 ? 1 : 0);
  const int end = id_of(p, total_tiles(p));
  const bool leader = lane == 0;
  int kv_head;  // of this tile; divided once, not for each key tile: a division takes as long as a load's issue

  // One key tile of K or V: every lane with a box of rows loads it, chunk of columns by chunk.
  auto load_rows = [&](const Work& w, u32 to, u32 barrier, int tile, const TensorMap& map, int width, int chunks,
                       const TensorMap* rest, int rest_width) {  // widths in bytes
    if (lane >= BLOCK_N / (BOX * CLUSTER)) return;
    const int row = PAGED ? lane * BOX : rank * BOX;
    int key = tile * BLOCK_N + row, batch = VARLEN ? 0 : w.batch;
    if (PAGED) {
      const int page = max(0, min(key, w.seq_k - 1)) / p.page_size;  // keys past the end are masked, whatever they are
      batch = p.pages[(i64)w.batch * p.max_pages + page];
      key %= p.page_size;
    }
#pragma unroll
    for (int c = 0; c < chunks; c++)
      tma::multicast(to + (c * BLOCK_N + row) * width, map, barrier, c * width / ELEMENT, w.k_row + key, kv_head, batch);
    if (rest_width)
      tma::multicast(to + chunks * BLOCK_N * width + row * rest_width, *rest, barrier, chunks * width / ELEMENT,
                     w.k_row + key, kv_head, batch);
  };
  auto load_k = [&](const Work& w, int tile) {
    const u32 barrier = smem + K_FULL + 8 * k.stage;
    mbarrier::wait(smem + K_EMPTY + 8 * k.stage, k.phase);
    if (leader) mbarrier::expect(barrier, K_BYTES);
    __syncwarp();
    load_rows(w, smem + K_AT + K_TILE * k.stage, barrier, tile, p.k, K_WIDTH, K_CHUNKS, &p.k_rest, K_REST);
    k.advance();
  };
  auto load_v = [&](const Work& w, int tile) {
    const u32 barrier = smem + V_FULL + 8 * v.stage;
    mbarrier::wait(smem + V_EMPTY + 8 * v.stage, v.phase);
    if (leader) mbarrier::expect(barrier, V_BYTES);
    __syncwarp();
    const u32 to = smem + V_AT + V_TILE * v.stage;
    if constexpr (FP8) {  // transposed: the keys are columns
      if (leader)
#pragma unroll
        for (int c = 0; c < V_CHUNKS; c++)
          tma::load(to + c * DV * V_WIDTH, p.v, barrier, tile * BLOCK_N + c * V_WIDTH, 0, kv_head, w.batch);
    } else {
      load_rows(w, to, barrier, tile, p.v, V_WIDTH, V_CHUNKS, nullptr, 0);
    }
    v.advance();
  };
  auto load_q = [&](const Work& w, int group) {
    const int slot = q.stage * GROUPS + group;
    const u32 barrier = smem + Q_FULL + 8 * slot, to = smem + Q_AT + Q_TILE * slot;
    mbarrier::wait(smem + Q_EMPTY + 8 * slot, q.phase);
    if (!leader) return;
    mbarrier::expect(barrier, Q_BYTES);
    const int query = w.q_row + first_query(w, group), batch = VARLEN ? 0 : w.batch;
#pragma unroll
    for (int c = 0; c < K_CHUNKS; c++)
      load_queries(to + c * 64 * K_WIDTH, p.q, barrier, c * K_WIDTH / ELEMENT, query, w.head, batch);
    if (K_REST)
      load_queries(to + K_CHUNKS * 64 * K_WIDTH, p.q_rest, barrier, K_CHUNKS * K_WIDTH / ELEMENT, query, w.head, batch);
  };

  int id = id_of(p, blockIdx.x / CLUSTER);
  while (true) {
    Work w;
    if (rank == 0) {
      if (id < end) w = decode(p, id, lane);
      else w.id = -1;
      mail.put(w, lane);
    } else {
      w = mail.get(p, lane);
    }
    if (w.id < 0) break;
    w.block = w.block * CLUSTER + rank;
    kv_head = w.head / p.group;
    const Keys keys = keys_of(p, w, w.block / CLUSTER * CLUSTER * BLOCK_Q, BLOCK_Q * CLUSTER);
    int tile = keys.end - 1;
    auto draw = [&] {
      if (rank == 0 && leader && !is_part(p, w.id)) id = id_of(p, atomicAdd(p.counters, 1) + gridDim.x / CLUSTER);
    };
    const bool is_short = tile <= keys.first + DRAWN_AHEAD;
    if (is_short) draw();
#pragma unroll
    for (int group = 0; group < GROUPS; group++) {
      load_q(w, group);
      if (group == 0) load_k(w, tile);
    }
    q.advance();
#pragma unroll 1
    for (; tile >= keys.first; tile--) {
      if (tile == keys.first + DRAWN_AHEAD && !is_short) draw();
      if (tile > keys.first) load_k(w, tile - 1);
      load_v(w, tile);
    }
    id = __shfl_sync(~0u, id, 0);
    if (is_part(p, w.id)) id = part_of(p, w.id).last ? end : id + 1;  // there are no more shares than blocks: one each
  }
  if (rank == 0 && leader) leave_counters(p.counters, (int)gridDim.x / CLUSTER);
}

// Key tiles, at the right end of its block's, that a warpgroup may have to pass over. The producer loads one V between
// two K: where there may be more of them than stages, a warpgroup hands the last V of the tile before back first.
constexpr int MOST_SKIPPED = RIGHT ? ceil_div((GROUPS * CLUSTER - 1) * QUERIES, BLOCK_N) : 0;
constexpr bool SHORT_RING = MOST_SKIPPED > STAGES;

struct Consumer {
  const Params& p;
  const u32 smem, rank;
  const int group, warp, lane;
  mbarrier::Ring<STAGES> k, v;
  mbarrier::Ring<Q_STAGES> q_ring;
  Mailbox mail;
  const u32 first_k, first_v;  // descriptors (lower halves) of the rings' first buffers,
  u32 at_q;                    // and of this tile's Q
  Work w;
  Keys keys;
  int skipped;             // key tiles of the block, at its right end, that this warpgroup does not see
  int clear_from, clear_to;  // key tiles in between hide nothing from any row of this warpgroup
  Rows rows;
  const float* key_scales;  // FP8: of this tile's key head, one for all or for each 128 keys
  float head_scale;
  Softmax softmax;
  float s[BLOCK_N / 2], o[DV / 2];
  u32 q[Q_IN_REGISTERS ? QK_STEPS * 4 : 1];
  LateWeights late;  // P, but for what it has two sets of

  DEVICE Consumer(const Params& p, u32 smem, u32 rank, int group, int warp, int lane)
      : p(p), smem(smem), rank(rank), group(group), warp(warp), lane(lane), k(0), v(0), q_ring(0), mail(smem, 0),
        first_k(wgmma::by_row(smem + K_AT)),
        first_v(FP8 ? wgmma::by_row(smem + V_AT) : wgmma::by_column(smem + V_AT, V_WIDTH, BLOCK_N)) {
    softmax.scale[0] = softmax.scale[1] = TRANSFORMED ? 1.f : p.scale;
  }

  // --- taking turns: with ping-pong, one warpgroup's matrix products run under the other's exponentials

  DEVICE void await_turn() {
    if (PINGPONG) named_barrier::sync(1 + group, 256);
  }
  DEVICE void pass_turn() {
    if (PINGPONG) named_barrier::arrive(1 + (group + 1) % GROUPS, 256);
  }

  // --- buffers

  DEVICE void release(u32 barrier) {
    if (CLUSTER == 1) {
      if (lane == 0) mbarrier::arrive(barrier);
    } else if (lane < CLUSTER) {
      mbarrier::arrive_in(barrier, lane);
    }
  }
  DEVICE void await_k() { mbarrier::wait(smem + K_FULL + 8 * k.stage, k.phase); }
  DEVICE void await_v() { mbarrier::wait(smem + V_FULL + 8 * v.stage, v.phase); }
  DEVICE void release_k() {
    release(smem + K_EMPTY + 8 * k.stage);
    k.advance();
  }
  DEVICE void release_v() {
    release(smem + V_EMPTY + 8 * v.stage);
    v.advance();
  }
  DEVICE int q_slot() const { return q_ring.stage * GROUPS + group; }
  DEVICE void release_q(bool now) {
    if (lane == 0 && now) mbarrier::arrive(smem + Q_EMPTY + 8 * q_slot());
  }
  // S of a tile is complete: its K is no longer needed, and with the last one neither is Q. In registers Q is there for
  // sure when the first product has read it: an arrival may overtake the loads before it (`ldmatrix` behind the tensor
  // cores' own reads), and the next Q overwrote the first rows of this one.
  DEVICE void release_operands(bool q_too) {
    release_k();
    release_q(q_too);
  }
  // Key tiles that only other warpgroups see. K comes first for all of them: the ring must have room for as many.
  DEVICE void skip_k() {
    static_assert(MOST_SKIPPED <= STAGES + SHORT_RING, "the K ring would run dry");
    if constexpr (RIGHT) {
#pragma unroll 1
      for (int i = 0; i < skipped; i++) {
        await_k();
        release_k();
        await_turn();
        pass_turn();
      }
    }
  }
  DEVICE void skip_v() {
    if constexpr (RIGHT) {
#pragma unroll 1
      for (int i = 0; i < skipped; i++) {
        await_v();
        release_v();
      }
    }
  }

  // --- matrix products

  DEVICE void issue_qk() {  // S = Q·Kᵀ
    const u32 at_k = first_k + k.stage * (K_TILE >> 4);
    wgmma::fence();
#pragma unroll
    for (int i = 0; i < QK_STEPS; i++) {
      const u64 b = wgmma::descriptor(at_k + ((step_chunk(i, BLOCK_N) + step_byte(i)) >> 4), step_width(i));
      if (Q_IN_REGISTERS) {
        mma_qk_registers(s, q + 4 * i, b, i > 0);
      } else {
        const u32 at = at_q + ((step_chunk(i, 64) + step_byte(i)) >> 4);
        mma_qk(s, wgmma::descriptor(at, step_width(i)), b, i > 0);
      }
    }
    wgmma::commit();
  }
  DEVICE void issue_pv(const Weights& weights) {  // O += P·V
    const u32 at_v = first_v + v.stage * (V_TILE >> 4);
#pragma unroll
    for (int i = 0; i < LATE; i++) {
      if (i % LATE_GROUP == 0) wgmma::fence();
      mma_pv(o, late + 4 * i, wgmma::descriptor(at_v + (value_step(EARLY + i) >> 4), V_WIDTH));
      if (i % LATE_GROUP == LATE_GROUP - 1 || i == LATE - 1) wgmma::commit();
    }
    wgmma::fence();
#pragma unroll
    for (int i = 0; i < EARLY; i++)
      mma_pv(o, weights + 4 * i, wgmma::descriptor(at_v + (value_step(i) >> 4), V_WIDTH));
    wgmma::commit();
  }

  // --- one query tile

  // Coordinates and limits of tile w; waits for its Q.
  DEVICE void begin_tile(const Work& next, bool first_tile) {
    w = next;
    w.block = w.block * CLUSTER + rank;
    keys = keys_of(p, w, w.block / CLUSTER * CLUSTER * BLOCK_Q, BLOCK_Q * CLUSTER);
    const int first = first_query(w, group), last = first + QUERIES - 1, shift = w.seq_k - w.seq_q;
    skipped = 0;
    clear_from = keys.first;
    clear_to = (SPLIT && keys.none) ? 0 : w.seq_k / BLOCK_N;
    if (RIGHT) {
      const int end = max(keys.first + 1, min(keys.end, ceil_div(max(0, last + shift + p.right + 1), BLOCK_N)));
      skipped = keys.end - end;
      keys.end = end;
      clear_to = min(clear_to, max(0, first + shift + p.right + 1) / BLOCK_N);
    }
    if (LEFT) clear_from = ceil_div(max(0, last + shift - p.left), BLOCK_N);
    rows.look(p, w, keys, group, warp, lane);
    if (FP8) {
      key_scales = p.k_scale + key_scale_row(p, w) * max(1, p.k_blocks);
      head_scale = *key_scales;
    }
    if (!first_tile) q_ring.advance();
    at_q = wgmma::by_row(smem + Q_AT + Q_TILE * q_slot());
    mbarrier::wait(smem + Q_FULL + 8 * q_slot(), q_ring.phase);
    if (!Q_IN_REGISTERS) return;
    const u32 from = smem + Q_AT + Q_TILE * q_slot();
#pragma unroll
    for (int i = 0; i < QK_STEPS; i++) {
      const int width = step_width(i);
      u32 at = (warp * 16 + (lane & 15)) * width + step_byte(i) + (lane >> 4) * 16;
      at ^= ((at >> 7) & (width / 16 - 1)) << 4;
      asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
                   : "=r"(q[4 * i]), "=r"(q[4 * i + 1]), "=r"(q[4 * i + 2]), "=r"(q[4 * i + 3])
                   : "r"(from + step_chunk(i, 64) + at) : "memory");
    }
  }

  DEVICE bool is_clear(int tile) const { return tile < clear_to && (!LEFT || tile >= clear_from); }

  // FP8: what the scores of a key tile are worth. (BLOCK_N divides 128, so a tile has one scale.)
  DEVICE float scale_of(int tile) const {
    return !FP8 ? 1.f : p.k_blocks ? key_scales[tile * BLOCK_N / SCALED_ROWS] : head_scale;
  }
  DEVICE void take_scale(float of_keys) {
    if (FP8 && !TRANSFORMED)
#pragma unroll
      for (int r = 0; r < 2; r++)  // not 0, even for a head of zeros: hidden scores are -inf
        softmax.scale[r] = fmaxf(p.scale * rows.scale[r] * of_keys, 1e-37f);
  }

  // The softmax of a query tile's first key tile.
  DEVICE void first_softmax(Weights& weights) {
    const float of_keys = scale_of(keys.end - 1);
    take_scale(of_keys);
    transform(p, s, rows, of_keys, keys.end - 1, lane);
    if (!is_clear(keys.end - 1)) hide(s, rows, keys.end - 1, lane);
    softmax.begin(s, weights, late);
  }

  // The exponentials of the late steps, group by group: each as soon as P·V has read the P that it replaces.
  template <int GROUP> DEVICE void late_exponentials(int tile, float (&part)[2][2]) {
    if constexpr (GROUP < LATE_GROUPS) {
      constexpr int FIRST = GROUP * LATE_GROUP, STEPS = LATE - FIRST < LATE_GROUP ? LATE - FIRST : LATE_GROUP;
      u32(&freed)[4 * STEPS] = (u32(&)[4 * STEPS])late[4 * FIRST];
      keep(part[0]);  // or the additions move behind the branch, and all weights stay alive until there
      keep(part[1]);
      // A branch that no tile takes: ptxas would hoist these waits above all exponentials, but not out of a branch.
      // (This one depends on no exponential, so that those ahead of it may still be under way.)
      if (__builtin_expect(tile < 0, 0)) wgmma::wait_rare<LATE_GROUPS - GROUP>();
      else wgmma::wait<LATE_GROUPS - GROUP>();
      keep(freed);
      softmax.exponentials<EARLY + FIRST>(s, freed, part);
      keep(freed);
      late_exponentials<GROUP + 1>(tile, part);
    }
  }

  // One key tile: S = Q·Kᵀ and, from the tile before it, O += P·V; then the softmax of S into the other P.
  template <bool MASKED>
  DEVICE void step(int tile, Weights& weights, Weights& next) {
    const float of_keys = scale_of(tile);
    await_k();
    await_turn();
    issue_qk();
    await_v();
    issue_pv(weights);
    pass_turn();
    wgmma::wait<LATE_GROUPS + 1>();
    release_operands(!Q_IN_REGISTERS && tile == keys.first);
    take_scale(of_keys);
    transform(p, s, rows, of_keys, tile, lane);
    if (MASKED) hide(s, rows, tile, lane);
    float part[2][2] = {{0.f, 0.f}, {0.f, 0.f}};
    softmax.exponentials<0>(s, next, part);
    keep(next);
    late_exponentials<0>(tile, part);
    float sum[2] = {part[0][0] + part[0][1], part[1][0] + part[1][1]};
    // The wait for P·V is behind a branch that depends on every exponential: ptxas would hoist it above them.
    if (__builtin_expect(Softmax::outgrown(sum), 0)) {
      wgmma::wait_rare<0>();
      keep(weights);
      softmax.renew(s, next, late, sum, o);
    } else {
      wgmma::wait<0>();
      keep(weights);
    }
    release_v();
    softmax.total[0] += sum[0];
    softmax.total[1] += sum[1];
  }

  // Steps come in pairs, so that P alternates between two sets of registers: a copy in the loop would serialise.
  DEVICE void walk_keys(Weights& even, Weights& odd) {
    int tile = keys.end - 2;
#pragma unroll
    for (int i = 0; i < DV / 2; i++) o[i] = 0.f;
    if constexpr (RIGHT) {
#pragma unroll 1
      for (; tile > keys.first && !is_clear(tile); tile -= 2) {
        step<true>(tile, even, odd);
        step<true>(tile - 1, odd, even);
      }
    }
#pragma unroll 1
    for (; tile > (LEFT ? max(keys.first, clear_from) : keys.first); tile -= 2) {
      step<false>(tile, even, odd);
      step<false>(tile - 1, odd, even);
    }
    if constexpr (LEFT) {
#pragma unroll 1
      for (; tile > keys.first; tile -= 2) {
        step<true>(tile, even, odd);
        step<true>(tile - 1, odd, even);
      }
    }
    if (tile == keys.first) {
      step<BAND>(tile, even, odd);
#pragma unroll
      for (int i = 0; i < 4 * EARLY; i++) asm volatile("mov.b32 %0, %1;" : "=r"(even[i]) : "r"(odd[i]) : "memory");
    }
  }

  DEVICE void start_first_product() {
    skip_k();
    await_k();
    await_turn();
    issue_qk();
    pass_turn();
  }

  DEVICE void run() {
    Weights even, odd;
    const u32 noted = smem + POISONED_AT + 4 * (4 * group + warp);
    const u32 outputs = smem + OUT_AT + (4 * group + warp) * OUT_CHUNKS * ROWS_CHUNK;
    if (lane == 0) asm volatile("st.shared.b32 [%0], %1;" ::"r"(noted), "r"(-1) : "memory");
    __syncwarp();
    if (PINGPONG && group == GROUPS - 1) named_barrier::arrive(1, 256);
    Epilogue epilogue{p, group, warp, lane};
    Work next = mail.get(p, lane);
    for (bool first = true; next.id >= 0; first = false) {  // once, or again behind a part of a tile
      begin_tile(next, first);
      start_first_product();
      wgmma::wait<0>();
      keep(s);
      release_operands(Q_IN_REGISTERS || keys.end - 1 == keys.first);
      skip_v();
      first_softmax(even);
      while (true) {
        walk_keys(even, odd);
        next = mail.get(p, lane);
        const Work done = w;
        const Softmax last = softmax;
        float factor[2];
        if (next.id < 0 || is_part(p, done.id)) {
          await_v();
          issue_pv(even);
          if (!SPLIT) epilogue.normalise(done, last, factor);
          wgmma::wait<0>();
          keep(even);
          if (LATE) keep(late);
          keep(o);
          release_v();
          if (is_part(p, done.id)) {
            if (!broadcast(epilogue.leave(done, last, o))) break;
            epilogue.combine(done, softmax, o);
          }
          if (SPLIT) epilogue.normalise(done, softmax, factor);
          const bool again = epilogue.poisoned(o);
          epilogue.round(o, factor);
          epilogue.store(done);
          if (SPLIT && again) careful_rows(p, done, group, warp, lane);
          epilogue.note(again, noted, done);
          break;
        }
        // The last P·V of this tile, then the first Q·Kᵀ of the next one, and the epilogue while that runs. (No branch
        // may come between the product and its wait, so the last tile above has its own copy of these lines.)
        await_v();
        issue_pv(even);
        begin_tile(next, false);
        if (SHORT_RING) {
          wgmma::wait<0>();
          release_v();
        }
        start_first_product();
        epilogue.normalise(done, last, factor);
        wgmma::wait<1>();
        keep(even);
        if (LATE) keep(late);
        keep(o);
        const bool again = epilogue.poisoned(o);
        // Rows that are made again may hold anything until then. That the factors depend on it makes ptxas look for NaN
        // ahead of the rounding: else the accumulators stay beside the words, which do not fit next to so large an S.
        if (LATE) factor[0] = again ? 0.f : factor[0];
        if (LATE) factor[1] = again ? 0.f : factor[1];
        epilogue.round(o, factor);
        if (!SHORT_RING) release_v();
        if constexpr (OUT_CHUNKS) epilogue.send(done, outputs, again);
        else epilogue.store(done);
        epilogue.note(again, noted, done);
        wgmma::wait<0>();
        keep(s);
        release_operands(Q_IN_REGISTERS || keys.end - 1 == keys.first);
        skip_v();
        first_softmax(even);
      }
      if (!SPLIT) break;
    }
    if (OUT_CHUNKS && lane == 0) await_reads();  // or the block might end before
    if ((BAND || RAGGED) && !SPLIT) make_noted_again(p, noted, group, warp, lane, rank);
  }
};

extern "C" __global__ void __launch_bounds__(THREADS, 1)
#if CLUSTERED
__cluster_dims__(CLUSTER, 1, 1)
#endif
forward(const __grid_constant__ Params p) {
  extern __shared__ __align__(1024) char shared_memory[];
  const u32 smem = shared_address(shared_memory);
  const int warpgroup = __shfl_sync(~0u, (int)threadIdx.x / 128, 0), warp = __shfl_sync(~0u, (int)threadIdx.x / 32 % 4, 0);
  const int lane = threadIdx.x % 32;
  const u32 rank = cluster_rank();

  if (threadIdx.x == 0) {
    for (int i = 0; i < GROUPS * Q_STAGES; i++) {
      mbarrier::init(smem + Q_FULL + 8 * i, 1);
      mbarrier::init(smem + Q_EMPTY + 8 * i, 4);
    }
    for (int i = 0; i < STAGES; i++) {
      mbarrier::init(smem + K_FULL + 8 * i, 1);
      mbarrier::init(smem + V_FULL + 8 * i, 1);
      mbarrier::init(smem + K_EMPTY + 8 * i, 4 * GROUPS * CLUSTER);
      mbarrier::init(smem + V_EMPTY + 8 * i, 4 * GROUPS * CLUSTER);
    }
    for (int i = 0; i < 2; i++) {
      mbarrier::init(smem + WORK_FULL + 8 * i, 1);
      mbarrier::init(smem + WORK_EMPTY + 8 * i, (4 * GROUPS * CLUSTER + CLUSTER - 1) * RELEASES);
    }
    mbarrier::publish();
  }
  if constexpr (QUERIES * PACK < 64) clear_rows_of_nobody(smem);
  if (CLUSTER > 1) cluster_sync();
  else __syncthreads();

  if (warpgroup == 0) {
    if (GROUPS > 1) asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(PRODUCER_REGISTERS));
    if (warp == 0) produce(p, smem, rank, lane);
  } else {
    if (GROUPS > 1) asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(CONSUMER_REGISTERS));
    Consumer(p, smem, rank, warpgroup - 1, warp, lane).run();
  }
  if (CLUSTER > 1) cluster_sync();  // no block leaves while another may still write into it
}
