// What the consumers of all kinds have in common: where they are in the walk over query blocks, weights from scores,
// dS and dQ on their ways, and dK and dV to memory.
//
// Scores lie on their side: Sᵀ = K·Qᵀ. A wgmma accumulator gives each thread two keys, 8 apart: element 4j + e of Sᵀ is
// of key e / 2 and query 8j + e % 2, counted from the query 2 * (lane % 4) of the block.
#pragma once
#include "backward_queries.cuh"
#include "backward_schedule.cuh"
#include "wgmma.cuh"

constexpr int SCORES = BLOCK / 2;  // of a thread
constexpr int WORDS = BLOCK / 4;   // registers of P or dS, 16 bits an element
constexpr int TURN = SHARES_DQ ? 1 : 2;  // blocks; of one of them, this warpgroup makes dQ, all or a part

// `lowest` of keys that the walk hides from all queries: not there, or with a NaN or Inf; and of such that one sees.
constexpr int HIDDEN = 1 << 30, HARMED = HIDDEN + 1;

struct Tile {
  const Params& p;
  const u32 smem;
  const int group, warp, lane;
  const u32 ds_rows;  // descriptor (lower half)
  Mailbox mail;
  mbarrier::Ring<Q_STAGES> q;
  u32 done = 0;  // query blocks so far, in all tiles: buffers of dO and dS alternate
  Work w;
  Queries queries;
  int first_key;               // of this warpgroup
  int clear_from, clear_to;    // blocks that start at rows in between see all of this warpgroup's keys
  int lowest[2], highest[2];   // queries that see the thread's two keys, less 2 * (lane % 4)
  int row, place, head;        // where the next block to compute scores of starts: in its head, in all; and whose
  int previous;                // the place of the block before the current one
  float slope;

  DEVICE Tile(const Params& p, u32 smem, int group, int warp, int lane)
      : p(p), smem(smem), group(group), warp(warp), lane(lane),
        ds_rows(wgmma::by_row(smem + DS_AT + (TALL && HALVES ? group * DQ_COLUMNS * ROW : 0))), mail(smem, 0),
        q(0) {}

  // --- buffers

  DEVICE void release(int barrier) {
    if (RELEASES > 1 || lane == 0) mbarrier::arrive(smem + barrier);
  }
  // Of Q or dO: to all blocks that load it together.
  DEVICE void release_rows(int barrier) {
    if constexpr (CLUSTER == 1) release(barrier);
    else if (lane < CLUSTER) mbarrier::arrive_in(smem + barrier, lane);
  }
  DEVICE void await_q(const mbarrier::Ring<Q_STAGES>& at) { mbarrier::wait(smem + Q_FULL + 8 * at.stage, at.phase); }
  // Of block n, counted like `done`: which buffer, and the parity of its round.
  DEVICE static u32 buffer(u32 n) { return n & 1; }
  DEVICE static u32 parity(u32 n) { return n >> 1 & 1; }
  DEVICE void await(int barriers, u32 n) { mbarrier::wait(smem + barriers + 8 * buffer(n), parity(n)); }
  DEVICE void await_empty(int barriers, u32 n) { mbarrier::wait(smem + barriers + 8 * buffer(n), parity(n) ^ 1); }

  // --- one tile of keys

  // Of the mailbox, the slot that this tile came in: they alternate, as do the phases of K and V.
  DEVICE u32 slot() const { return mail.slot.stage ^ 1; }

  // Takes the next tile and waits for its K and V. False: there is none.
  DEVICE bool begin() {
    w = mail.get(p, lane);
    if (broadcast(w.id) < 0) return false;
    w.block = broadcast(w.block) * CLUSTER + cluster_rank();
    w.head = broadcast(w.head);
    w.batch = broadcast(w.batch);
    if (VARLEN) {
      w.q_row = broadcast(w.q_row);
      w.seq_q = broadcast(w.seq_q);
      w.k_row = broadcast(w.k_row);
      w.seq_k = broadcast(w.seq_k);
    }
    queries = queries_of(p, w);
    queries.first = broadcast(queries.first);
    queries.end = broadcast(queries.end);
    first_key = w.block * KEYS + (PAIRED ? 0 : group * 64);
    const int shift = w.seq_k - w.seq_q;
    clear_from = RIGHT ? first_key + 63 - shift - p.right : 0;
    clear_to = (VARLEN ? w.seq_q : queries.end) - BLOCK + 1;
    if (LEFT) clear_to = min(clear_to, first_key - shift + p.left - BLOCK + 2);
    if (first_key + 64 > w.seq_k) clear_to = 0;
    mbarrier::wait(smem + K_FULL, slot());
    mbarrier::wait(smem + V_FULL, slot());
    u32 bad = 0;
    if (HIDES) bad = clean();
    clear_from = broadcast(clear_to ? clear_from : 1 << 30);
    if (LEFT || VARLEN) clear_to = broadcast(clear_to);
#pragma unroll
    for (int r = 0; r < 2; r++) {
      const int key = first_key + warp * 16 + lane / 4 + 8 * r, from = 2 * (lane & 3);
      const int low = RIGHT ? key - shift - p.right : -(1 << 30);
      const int high = LEFT ? min(w.seq_q - 1, key - shift + p.left) : w.seq_q - 1;
      lowest[r] = low - from;
      highest[r] = high - from;
      if (HIDES && bad >> (4 * r) & 1) lowest[r] = max(low, 0) <= high ? HARMED : HIDDEN;
      if (key >= w.seq_k) lowest[r] = HIDDEN;
    }
    row = queries.first;
    head = w.head * p.group;
    place = first_place(p, w.batch, w.q_row, head) + row;
    take_slope();
    return true;
  }

  // Under a mask the second warpgroup begins a tile half a step behind the first, so that the products of one run under
  // the exponentials of the other. Without one, and where tiles are long, they come apart by themselves (H200,
  // 2026-11-18: 128 columns, causal, S=4096 6 %, S=16384 and without a mask nothing).
  DEVICE void fall_behind() {
    if (HIDES && group == 1) named_barrier::sync(2, 256);
  }
  DEVICE void let_follow() {
    if (HIDES && group == 0) named_barrier::arrive(2, 256);
  }

  // Under a causal mask the second warpgroup sees nothing of a tile's first 64 queries.
  DEVICE bool sees_nothing_of_the_first() const {
    return SKIPS && group == 1 && steps() > 1 && first_key - (w.seq_k - w.seq_q) - p.right >= queries.first + BLOCK;
  }
  // Hands the block back. Of dQ it has no part: dS is 0.
  DEVICE void pass_over() {
    u32 none[WORDS] = {};
    await(O_FULL, done);
    if constexpr (WANT_Q) put_ds(none);
    release_rows(O_EMPTY + 8 * buffer(done));
    release_rows(Q_EMPTY + 8 * q.stage);
    q.advance();
    done++;
    advance();
    await_q(q);
  }

  DEVICE int steps() const { return queries.count() * p.group; }
  DEVICE bool is_clear(int row) const { return row >= clear_from && (!(LEFT || VARLEN) || row < clear_to); }
  // The next blocks of the walk, as many as a warpgroup's turn takes.
  DEVICE bool is_clear() const { return is_clear(row) && (TURN == 1 || is_clear(after(row))); }
  // The block after that of `row`: the walk goes through all query heads of the group.
  DEVICE int after(int row) const { return row + BLOCK == queries.end ? queries.first : row + BLOCK; }
  // Places from the end of one head's blocks to the first of the next.
  DEVICE int gap() const { return p.blocks * BLOCK - (queries.end - queries.first); }

  // The block whose dS is next: the one before `place` in the walk.
  DEVICE int current() const { return place - BLOCK - (row == queries.first ? gap() : 0); }

  DEVICE void advance() {
    previous = current();
    place += BLOCK;
    row += BLOCK;
    if (row == queries.end) {
      row = queries.first;
      place += gap();
      head++;
      take_slope();
    }
  }
  DEVICE void take_slope() {
    if (ALIBI) slope = p.slopes[w.batch * p.slope_batch + min(head, p.heads - 1)] * LOG2E;
  }

  // A NaN or Inf in K or V: a weight of 0 does not take it away. A row that may see it shows it in its level; so here
  // it becomes 0, and its key hidden. dQ of such a row is NaN by `rows`, dK and dV of such a key by `store`. Returns,
  // in bits 0 and 4, whether the thread's two keys are such.
  DEVICE u32 clean() {
    const u32 thread = group * 128 + warp * 32 + lane;
    bool mine = false;
#pragma unroll 4
    for (u32 at = thread * 16; at < K_TILE + V_TILE; at += 256 * 16) mine |= has_bad(load_shared(smem + K_AT + at));
    if (!named_barrier::any(1, 256, mine)) return 0;
    if (thread < 4) asm volatile("st.shared.u32 [%0], %1;" ::"r"(smem + BAD_AT + 4 * thread), "r"(0) : "memory");
    named_barrier::sync(1, 256);
#pragma unroll 1
    for (u32 at = thread * 16; at < K_TILE + V_TILE; at += 256 * 16) {
      const uint4 x = load_shared(smem + K_AT + at);
      if (!has_bad(x)) continue;
      store_shared(smem + K_AT + at, finite(x));
      const u32 key = at % (KEYS * ROW) / ROW;
      if (at < K_TILE)
        asm volatile("red.shared.or.b32 [%0], %1;" ::"r"(smem + BAD_AT + key / 32 * 4), "r"(1u << key % 32) : "memory");
    }
    publish_shared();
    named_barrier::sync(1, 256);
    clear_to = 0;
    u32 bits;
    const u32 key = (PAIRED ? 0 : group * 64) + warp * 16 + lane / 4;
    asm volatile("ld.shared.u32 %0, [%1];" : "=r"(bits) : "r"(smem + BAD_AT + key / 32 * 4) : "memory");
    bits >>= key % 32;
    return (bits & 1) | (bits >> 8 & 1) << 4;
  }

  // --- matrix products

  // keys·rowsᵀ; not FRESH: added to what is there.
  template <int STEPS, bool FRESH = true> DEVICE void issue_scores(float (&to)[SCORES], u32 keys, u32 rows) {
    wgmma::fence();
#pragma unroll
    for (int k = 0; k < STEPS; k++) {
      const u64 a = wgmma::descriptor(keys + (column_step(k, KEYS) >> 4), ROW);
      const u64 b = wgmma::descriptor(rows + (column_step(k, BLOCK) >> 4), ROW);
      if (FRESH && k == 0) mma_scores_first(to, a, b);
      else mma_scores(to, a, b);
    }
    wgmma::commit();
  }
  DEVICE void issue_dv(float (&dv)[DV / 2], const u32* weights, u32 n) {  // dV += Pᵀ·dO
    const u32 from = wgmma::by_column(smem + O_AT + O_TILE * buffer(n), ROW, BLOCK);
    wgmma::fence();
#pragma unroll
    for (int k = 0; k < BLOCK / 16; k++)
      if (WANT_V) mma_dv(dv, weights + 4 * k, wgmma::descriptor(from + (row_step(k) >> 4), ROW));
    wgmma::commit();
  }
  DEVICE void issue_dk(float (&dk)[D / 2], const u32* gradients) {  // dK += dSᵀ·Q
    const u32 from = wgmma::by_column(smem + Q_AT + Q_TILE * q.stage, ROW, BLOCK);
    wgmma::fence();
#pragma unroll
    for (int k = 0; k < BLOCK / 16; k++)
      if (WANT_K) mma_dk(dk, gradients + 4 * k, wgmma::descriptor(from + (row_step(k) >> 4), ROW));
    wgmma::commit();
  }
  // dQ = dS·K of the n-th block, or on its side: N numbers of a thread. `keys`: its columns of K.
  template <int N> DEVICE void issue_dq(float (&dq)[N], u32 keys, u32 n) {
    await(DS_FULL, n);
    publish_shared();
    const u32 from = ds_rows + buffer(n) * (DS_TILE >> 4);
    wgmma::fence();
#pragma unroll
    for (int k = 0; k < KEYS / 16; k++) {
      const u64 ds = wgmma::descriptor(from + (column_step(k, BLOCK) >> 4), ROW);
      const u64 columns = wgmma::descriptor(keys + (row_step(k) >> 4), ROW);
      if (k == 0) mma_dq_first(dq, TALL ? columns : ds, TALL ? ds : columns);
      else mma_dq(dq, TALL ? columns : ds, TALL ? ds : columns);
    }
    wgmma::commit();
  }

  // --- weights and dS

  // Of queries 8j + 2 * (lane % 4), the next one, and the same two 8 further on.
  DEVICE float4 statistics(u32 from, int j) const {
    const float2 a = load_pair(from + 8 * (lane & 3) + 32 * j), b = load_pair(from + 8 * (lane & 3) + 32 * j + 32);
    return {a.x, a.y, b.x, b.y};
  }

  // P = 2^(logit - level) in 16 bits, of the next block; with a softcap also P * (1 - tanh²), which dS is made of.
  template <bool MASKED>
  DEVICE void weigh(const float (&s)[SCORES], int stage, u32 (&weights)[WORDS], u32 (&capped)[SOFTCAP ? WORDS : 1]) {
    const u32 levels = smem + LEVEL_AT + STATISTICS * stage;
    int low[2], high[2];
    float away[2];
#pragma unroll
    for (int r = 0; r < 2; r++) {
      low[r] = lowest[r] - row;
      high[r] = highest[r] - row;
      if (ALIBI)
        away[r] = (float)(row + 2 * (lane & 3) + w.seq_k - w.seq_q - first_key - warp * 16 - lane / 4 - 8 * r);
    }
#pragma unroll
    for (int j = 0; j < BLOCK / 8; j += 2) {
      const float4 four = statistics(levels, j);
      const float level[4] = {four.x, four.y, four.z, four.w};
#pragma unroll
      for (int half = 0; half < 2; half++)
#pragma unroll
        for (int r = 0; r < 2; r++) {
          float weight[2], rest[2];
#pragma unroll
          for (int e = 0; e < 2; e++) {
            const int at = 8 * (j + half) + e;
            const float score = s[4 * (j + half) + 2 * r + e];
            float x;
            if (SOFTCAP) {
              const float t = tanh_approx(score * p.scale);
              rest[e] = fmaf(-t, t, 1.f);
              x = fmaf(p.softcap, t, -level[2 * half + e]);
            } else {
              x = fmaf(score, p.scale, -level[2 * half + e]);
            }
            if (ALIBI) x = fmaf(-slope, fabsf(away[r] + at), x);
            // After the level was subtracted, which may be NaN.
            if (MASKED && (at < low[r] || ((LEFT || VARLEN) && at > high[r]))) x = -INF;
            weight[e] = exp2_approx(x);
          }
          const int word = 2 * (j + half) + r;
          weights[word] = pack(weight[0], weight[1]);
          if constexpr (SOFTCAP) capped[word] = pack(weight[0] * rest[0], weight[1] * rest[1]);
        }
    }
  }

  // dS of two elements: their weights times a and b. In bf16 the latter are rounded first: one instruction multiplies
  // both, and nothing is unpacked. fp16 has not the range for that.
  DEVICE static u32 ds_of(u32 weights, float a, float b) {
    if (FP16) return pack(low(weights) * a, high(weights) * b);
    u32 y;
    asm("mul.rn.bf16x2 %0, %1, %2;" : "=r"(y) : "r"(weights), "r"(pack(a, b)));
    return y;
  }

  // dSᵀ = Pᵀ * (dPᵀ - delta). `words` and `weights` may be the same registers.
  DEVICE void differentiate(const float (&dp)[SCORES], const u32* weights, u32* words) const {
    const u32 deltas = smem + DELTA_AT + STATISTICS * buffer(done);
#pragma unroll
    for (int j = 0; j < BLOCK / 8; j += 2) {
      const float4 delta = statistics(deltas, j);
#pragma unroll
      for (int r = 0; r < 2; r++) {
        const int at = 2 * j + r, x = 4 * j + 2 * r, y = x + 4;
        words[at] = ds_of(weights[at], dp[x] - delta.x, dp[x + 1] - delta.y);
        words[at + 2] = ds_of(weights[at + 2], dp[y] - delta.z, dp[y + 1] - delta.w);
      }
    }
  }

  // dSᵀ to shared memory as [query][key], chunks of 64 keys: the A operand of dQ. Who reads it makes it visible to the
  // tensor cores, a block later: a fence here would stand between dS and dK.
  DEVICE void put_ds(const u32* words) {
    const int chunk = PAIRED ? 0 : group;
    const u32 column = (32 * warp + (lane >> 3 & 1) * 16) ^ (lane & 7) << 4;
    const u32 row = (lane >> 4) * 8 + (lane & 7);
    const u32 to = smem + DS_AT + DS_TILE * buffer(done) + (chunk * BLOCK + row) * ROW + column;
    await_empty(DS_EMPTY, done);
#pragma unroll
    for (int k = 0; k < BLOCK / 16; k++)
      asm volatile("stmatrix.sync.aligned.m8n8.x4.trans.shared.b16 [%0], {%1, %2, %3, %4};"
                   ::"r"(to + row_step(k)), "r"(words[4 * k]), "r"(words[4 * k + 1]), "r"(words[4 * k + 2]),
                   "r"(words[4 * k + 3]) : "memory");
    __syncwarp();
    release(DS_FULL + 8 * buffer(done));
  }

  // --- dQ, dK and dV

  // Fragments of dQ, 512 contiguous bytes of a warp each, the first `count` of N / 4, are added to their sums: from
  // registers, or by the copy engine from the warp's own part of shared memory.
  template <int N> DEVICE void add_fragments(const float (&x)[N], float* sums, int count) {
    static_assert(!STAGED || N * 128 == STAGED_BYTES, "of a warp's dQ");
    const u32 stage = smem + STAGE_AT + (group * 4 + warp) * STAGED_BYTES;
    if (STAGED) {
      if (lane == 0) await_reads();
      __syncwarp();
    }
#pragma unroll
    for (int i = 0; i < N / 4; i++)
      if (i < count) {
        if (STAGED)
          asm volatile("st.shared.v4.f32 [%0], {%1, %2, %3, %4};" ::"r"(stage + lane * 16 + i * 512), "f"(x[4 * i]),
                       "f"(x[4 * i + 1]), "f"(x[4 * i + 2]), "f"(x[4 * i + 3]) : "memory");
        else
          asm volatile("red.relaxed.gpu.global.add.v4.f32 [%0], {%1, %2, %3, %4};" ::"l"(sums + lane * 4 + i * 128),
                       "f"(x[4 * i]), "f"(x[4 * i + 1]), "f"(x[4 * i + 2]), "f"(x[4 * i + 3]) : "memory");
      }
    if (STAGED) {
      publish_shared();
      __syncwarp();
      if (lane == 0)
        asm volatile("cp.reduce.async.bulk.global.shared::cta.bulk_group.add.f32 [%0], [%1], %2;\n"
                     "cp.async.bulk.commit_group;" ::"l"(sums), "r"(stage), "r"(count * 512) : "memory");
    }
  }
  // N columns from `column` on of dQ of the block at `to`. The last may be past the head's end.
  template <int N> DEVICE void add_dq(const float (&dq)[N / 2], int to, int column) {
    float* sums = sums_at(p, to, 0) + warp * 16 * D + column * 16;
    add_fragments(dq, sums, D % N ? min(N, D - column) / 8 : N / 8);
  }
  // No copy may still read shared memory when a block ends.
  DEVICE void await_copies() {
    if (STAGED && lane == 0) asm volatile("cp.async.bulk.wait_group 0;" ::: "memory");
  }

  // The tile's keys and values are read for the last time.
  DEVICE void end() {
    __syncwarp();
    release(KV_EMPTY);
  }

  // Sums of this warp's keys, times `factor`, to memory: by the copy engine, or, as that would write past a sequence's
  // end, from registers.
  template <int N>
  DEVICE void store(const float (&sum)[N / 2], u16* data, const Strides& strides, float factor, const TensorMap& map) {
    float factors[2] = {factor, factor};
#pragma unroll
    for (int r = 0; r < 2; r++)
      if (HIDES && lowest[r] == HARMED) factors[r] = __int_as_float(0x7fffffff);
    auto word = [&](int j, int r) {
      const int at = 4 * j + 2 * r;
      return pack(sum[at] * factors[r], sum[at + 1] * factors[r]);
    };
    const int first = first_key + warp * 16, key = first + lane / 4;
    if (SENDS && (!VARLEN || first + 16 <= w.seq_k)) return send<N>(word, map, first);
    u16* to = data + w.batch * strides.batch + w.head * strides.head + (i64)(w.k_row + key) * strides.seq;
    store_words<N>(word, to, strides.seq, w.seq_k - key, lane);
  }

  // Through the shared memory that this warp's dQ goes through: 64 columns at a time.
  template <int N, class Words> DEVICE void send(Words word, const TensorMap& map, int first) {
    static_assert(!SENDS || ROWS_CHUNK * ceil_div(N, 64) <= STAGED_BYTES, "a warp's part of shared memory is too small");
    const u32 from = smem + STAGE_AT + (group * 4 + warp) * STAGED_BYTES;
    const u32 row = from + (lane & 15) * ROW;
    if (lane == 0) await_reads();
    __syncwarp();
    put_rows<N>(row, ((row >> 7 & 7) ^ lane >> 4) << 4, word);
    publish_shared();
    __syncwarp();
    if (lane == 0) send_chunks<ceil_div(N, 64)>(from, map, w.k_row + first, w.head, VARLEN ? 0 : w.batch);
  }
};

// One turn. A step is MASKED where the next block hides something; in its first, dQ of the block before is made.
template <bool MASKED, class Consumer> DEVICE void take_turn(Consumer& c, int& last) {
  c.template step<MASKED, true>();
  if constexpr (TURN > 1) c.template step<MASKED, false>();
  last -= TURN;
}

// In a copy for each warpgroup, whose number the compiler then knows: with one for both, 48 columns without a mask and 64
// with one and S=16384 are 3 to 5 % slower (H200, 2026-11-18).
template <int GROUP, class Consumer> DEVICE void take_clear_turns(Consumer& c, int& last) {
  __builtin_assume(c.group == GROUP);
#pragma unroll 1
  do take_turn<false>(c, last);
  while (last >= TURN && c.is_clear());
}

// The first `last` blocks of a tile: all but one, and those that were passed over. dQ of the first is there for the
// second step; where warpgroups take turns, the second one's first turn is a step later.
template <class Consumer> DEVICE void walk(Consumer& c, int last, int passed = 0) {
#pragma unroll 1
  for (int idle = (TURN > 1 ? c.group : 0) - passed; idle >= 0 && last > 0; idle--, last--) c.template step<true, false>();
#pragma unroll 1
  while (last >= TURN) {
    if (!c.is_clear()) take_turn<true>(c, last);
    else if (c.group == 0) take_clear_turns<0>(c, last);
    else take_clear_turns<1>(c, last);
  }
  if (TURN > 1 && last > 0) c.template step<true, true>();
}

// What is left of a tile of `count` blocks when its last dS is there: dQ of the last two, and dK and dV to memory.
template <class Consumer> DEVICE void finish(Consumer& c, int count) {
  if constexpr (WANT_Q) {
#pragma unroll 1
    for (int back = count > 1; back >= 0; back--) {
      if (!SHARES_DQ && (count - 1 - back & 1) != c.group) continue;
      c.issue_dq(c.dq, c.k_columns, c.done - back);
      wgmma::wait<0>();
      c.add(c.done - back, back ? c.previous : c.current());
    }
  }
  c.q.advance();
  c.done++;
  c.end();
  if constexpr (WANT_K) c.template store<D>(c.dk, c.p.dk, c.p.dk_strides, c.p.grad_scale, c.p.dk_rows);
  if constexpr (WANT_V) c.template store<DV>(c.dv, c.p.dv, c.p.dv_strides, 1.f, c.p.dv_rows);
}
