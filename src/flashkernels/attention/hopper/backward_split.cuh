// Consumers that split the keys of a tile: 64 each, with dK and dV of these in registers. For heads up to 128.
//
// A query block takes five products. Pipelined: while dP of block i and S of block i + 1 run, dV of block i is
// finished; then dS of i, and under dK of i and dQ of i - 1 the exponentials of i + 1. Only dV is in flight from one
// step to the next: an accumulator that ordinary instructions read would be serialised there.
//
// dQ = dS·K needs the keys of both warpgroups. dS goes through shared memory, double buffered, and dQ is made a block
// later, so that the two need not meet. Each makes one half of its columns (HALVES), or all of every other block's.
#pragma once
#include "backward_operands.cuh"

struct Consumer : Operands {
  const u32 k_columns;  // descriptor (lower half)
  float dk[D / 2], dv[DV / 2], s[SCORES], dp[SCORES], dq[DQ_COLUMNS / 2];
  u32 weights[WORDS];
  u32 gradients[SEPARATE ? WORDS : 1];  // dS; it takes the place of P where it is not separate
  static_assert(!SOFTCAP, "dS would need more registers than P has: softcaps are for pairs");

  DEVICE Consumer(const Params& p, u32 smem, int group, int warp, int lane)
      : Operands(p, smem, group, warp, lane),
        k_columns(wgmma::by_column(smem + K_AT + first_column() / 64 * KEYS * ROW + first_column() % 64 * 2, ROW,
                                   KEYS)) {}

  // Of dQ, of this warpgroup.
  DEVICE int first_column() const { return HALVES ? group * DQ_COLUMNS : 0; }

  // --- steps

  DEVICE u32* gradient_words() { return SEPARATE ? gradients : weights; }
  DEVICE void keep_gradients() {
    if constexpr (SEPARATE) keep(gradients);
    else keep(weights);
  }
  DEVICE void make_ds() {
    differentiate(dp, weights, gradient_words());
    keep_gradients();
    if constexpr (WANT_Q) put_ds(gradient_words());
    else __syncwarp();
    release_rows(O_EMPTY + 8 * buffer(done));
  }
  // dQ of block n to its place in the sums.
  DEVICE void add(u32 n, int to) {
    keep(dq);
    release(DS_EMPTY + 8 * buffer(n));
    add_dq<DQ_COLUMNS>(dq, to, first_column());
  }

  // One query block, not a tile's last. Before and after it only dV of a block is in flight.
  template <bool MASKED, bool OURS_TO_ADD> DEVICE void step() {
    constexpr bool OURS = OURS_TO_ADD && WANT_Q;
    u32 none[1];
    issue_dp<true>(dp, done);
    mbarrier::Ring<Q_STAGES> next = q;
    next.advance();
    await_q(next);
    issue_s(s, next.stage);
    wgmma::wait<1>();
    keep(weights);
    keep(dp);
    make_ds();
    issue_dk(dk, gradient_words());
    if constexpr (OURS) {
      issue_dq(dq, k_columns, done - 1);
      wgmma::wait<SEPARATE ? 2 : 1>();
    } else {
      wgmma::wait<SEPARATE ? 1 : 0>();
    }
    if constexpr (!SEPARATE) {
      keep(weights);
      release_rows(Q_EMPTY + 8 * q.stage);
    }
    keep(s);
    weigh<MASKED>(s, next.stage, weights, none);
    keep(weights);
    await(O_FULL, done + 1);
    issue_dv(dv, weights, done + 1);
    if constexpr (OURS || SEPARATE) wgmma::wait<1>();
    if constexpr (SEPARATE) {
      keep(gradients);
      release_rows(Q_EMPTY + 8 * q.stage);
    }
    if constexpr (OURS) add(done - 1, previous);
    q = next;
    done++;
    advance();
  }

  DEVICE void run() {
    u32 none[1];
    while (begin()) {
#pragma unroll
      for (int i = 0; i < D / 2; i++) dk[i] = 0.f;
#pragma unroll
      for (int i = 0; i < DV / 2; i++) dv[i] = 0.f;
      load_operands();
      await_q(q);
      fall_behind();
      const int passed = sees_nothing_of_the_first();
      if (passed) pass_over();
      issue_s(s, q.stage);
      wgmma::wait<0>();
      keep(s);
      weigh<true>(s, q.stage, weights, none);
      keep(weights);
      let_follow();
      advance();
      await(O_FULL, done);
      issue_dv(dv, weights, done);
      const int count = steps();
      walk(*this, count - 1 - passed, passed);
      // the last block, and dQ of the last two
      issue_dp<true>(dp, done);
      wgmma::wait<0>();
      keep(weights);
      keep(dp);
      make_ds();
      issue_dk(dk, gradient_words());
      wgmma::wait<0>();
      keep_gradients();
      release_rows(Q_EMPTY + 8 * q.stage);
      finish(*this, count);
    }
    await_copies();
  }
};
