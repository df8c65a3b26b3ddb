// Consumers that split the keys of a tile, for blocks of more than 64 queries: the operands of fewer, longer products
// are read less often from shared memory, and a block's waits come less often.
//
// All that ordinary instructions do has a product behind it: dS of block i runs under dV of i, the additions of dQ of
// block i - 1 under S of i + 1, and the exponentials of i + 1 under dP of i + 1.
//
// Of dQ, each warpgroup makes 64 columns; of heads up to 64 all of every other block's, or of one half of a block's
// queries (HALVES), which leaves registers for K or V.
//
// S takes the registers of P and dS, and dQ those of dP: dQ is on its side, dQᵀ = Kᵀ·dSᵀ, as long as a block of scores.
// dP starts from -delta, which is loaded while S runs; under dS there would be nothing to wait for it with.
#pragma once
#include "backward_operands.cuh"

struct Consumer : Operands {
  const u32 k_columns;  // descriptor (lower half)
  float dk[D / 2], dv[DV / 2], s[SCORES], dp[SCORES], dq[DQ_COLUMNS / 2];
  u32 weights[WORDS], gradients[WORDS];
  static_assert(!SOFTCAP, "dS would need more registers than P has: softcaps are for pairs");

  DEVICE Consumer(const Params& p, u32 smem, int group, int warp, int lane)
      : Operands(p, smem, group, warp, lane),
        k_columns(wgmma::by_column(smem + K_AT + (SHARES_DQ && !HALVES ? group * KEYS * ROW : 0), ROW, KEYS)) {}

  // --- steps

  DEVICE void load_deltas(u32 n) {
    const u32 deltas = smem + DELTA_AT + STATISTICS * buffer(n) + 8 * (lane & 3);
#pragma unroll
    for (int j = 0; j < BLOCK / 8; j++) {
      const float2 less = load_pair(deltas + 32 * j);
      dp[4 * j] = dp[4 * j + 2] = less.x;
      dp[4 * j + 1] = dp[4 * j + 3] = less.y;
    }
    keep(dp);
  }
  DEVICE void make_ds() {
#pragma unroll
    for (int i = 0; i < WORDS; i++) gradients[i] = ds_of(weights[i], dp[2 * i], dp[2 * i + 1]);
    keep(gradients);
    if constexpr (WANT_Q) put_ds(gradients);
  }

  // dQᵀ of block n to its place in the sums: 16 columns of dQ are this warp's.
  DEVICE void add(u32 n, int to) {
    keep(dq);
    release(DS_EMPTY + 8 * buffer(n));
    const int part = SHARES_DQ && !HALVES ? group * 4 + warp : warp;
    if (part * 16 >= D) return;  // past the head's end
    constexpr int COUNT = DQ_COLUMNS / 8;
    add_fragments(dq, sums_at(p, to + (HALVES ? group * DQ_COLUMNS : 0), part), COUNT);
  }

  // Weights of block n and its dP; S and dP are under way.
  template <bool MASKED> DEVICE void weigh_block(int stage, u32 n) {
    u32 none[1];
    wgmma::wait<1>();
    keep(s);
    weigh<MASKED>(s, stage, weights, none);
    keep(weights);
    issue_dv(dv, weights, n);
    wgmma::wait<1>();
    keep(dp);
  }

  // One query block, not a tile's last. Before and after it only dV of a block is in flight, and its dP is there.
  template <bool MASKED, bool OURS_TO_ADD> DEVICE void step() {
    constexpr bool OURS = OURS_TO_ADD && WANT_Q;
    mbarrier::Ring<Q_STAGES> next = q;
    next.advance();
    make_ds();
    issue_dk(dk, gradients);
    if constexpr (OURS) issue_dq(dq, k_columns, done - 1);
    wgmma::wait<OURS ? 1 : 0>();
    keep(weights);
    keep(gradients);
    release_rows(O_EMPTY + 8 * buffer(done));
    release_rows(Q_EMPTY + 8 * q.stage);
    await_q(next);
    issue_s(s, next.stage);
    if constexpr (OURS) {
      wgmma::wait<1>();
      add(done - 1, previous);
    }
    await(O_FULL, done + 1);
    load_deltas(done + 1);
    issue_dp<false>(dp, done + 1);
    weigh_block<MASKED>(next.stage, done + 1);
    q = next;
    done++;
    advance();
  }

  DEVICE void run() {
    while (begin()) {
#pragma unroll
      for (int i = 0; i < D / 2; i++) dk[i] = 0.f;
#pragma unroll
      for (int i = 0; i < DV / 2; i++) dv[i] = 0.f;
      load_operands();
      await(O_FULL, done);
      load_deltas(done);
      await_q(q);
      fall_behind();
      issue_s(s, q.stage);
      issue_dp<false>(dp, done);
      weigh_block<true>(q.stage, done);
      let_follow();
      advance();
      const int count = steps();
      walk(*this, count - 1);
      // the last block, and dQ of the last two
      make_ds();
      issue_dk(dk, gradients);
      wgmma::wait<0>();
      keep(weights);
      keep(gradients);
      release_rows(O_EMPTY + 8 * buffer(done));
      release_rows(Q_EMPTY + 8 * q.stage);
      finish(*this, count);
    }
    await_copies();
  }
};
