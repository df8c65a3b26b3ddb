// Consumers that work as a pair on the same 64 keys: for heads over 128, whose dK and dV do not fit the registers of
// one warpgroup, and for softcaps, where dS is made of other weights than dV.
//
// The first makes the weights, P = exp(S - L), and dV; the second dP, dS and dK. The weights go from one to the other
// through shared memory, thread to thread: Sᵀ and dPᵀ are spread over threads in the same way. dQ = dS·K is made a
// block later, the first chunks of its columns by the first warpgroup and the others by the second. Where dQ is made
// here, nothing stays in flight from one step to the next; else dV and dK do, and run on under S and dP of the next.
#pragma once
#include "backward_tile.cuh"

struct Pair : Tile {
  const u32 k_columns;  // descriptor (lower half)
  u32 words[WORDS];     // P of the first, dS of the second
  static_assert(DQ_FIRST % 64 == 0, "the columns of each start at a chunk");

  DEVICE Pair(const Params& p, u32 smem, int group, int warp, int lane)
      : Tile(p, smem, group, warp, lane),
        k_columns(wgmma::by_column(smem + K_AT + group * (DQ_FIRST / 64) * KEYS * ROW, ROW, KEYS)) {}

  // N columns of dQ of the n-th block are added to that at `to`. Afterwards nothing is in flight: with dK or dV behind
  // it, heads from 224 on would not fit the registers.
  template <int N> DEVICE void make_dq(u32 n, int to) {
    float dq[N / 2];
    issue_dq(dq, k_columns, n);
    wgmma::wait<0>();
    keep(dq);
    release(DS_EMPTY + 8 * buffer(n));
    add_dq<N>(dq, to, group * DQ_FIRST);
  }

  // Where this thread's 16 words of weights pass.
  DEVICE u32 passage(int i) const { return smem + P_AT + i * 2048 + (warp * 32 + lane) * 16; }
};

// P and dV.
struct Weights : Pair {
  float s[SCORES], dv[DV / 2];
  u32 capped[SOFTCAP ? WORDS : 1];
  static constexpr bool ADDS = WANT_Q && DQ_FIRST > 0;

  DEVICE Weights(const Params& p, u32 smem, int warp, int lane) : Pair(p, smem, 0, warp, lane) {}

  // The weights to the other warpgroup.
  DEVICE void pass() {
    mbarrier::wait(smem + P_EMPTY, (done & 1) ^ 1);
#pragma unroll
    for (int i = 0; i < WORDS / 4; i++) {
      const u32* from = SOFTCAP ? capped : words;
      store_shared(passage(i), {from[4 * i], from[4 * i + 1], from[4 * i + 2], from[4 * i + 3]});
    }
    __syncwarp();
    release(P_FULL);
  }

  template <bool MASKED, bool FIRST> DEVICE void step() {
    await_q(q);
    issue_scores<K_STEPS>(s, wgmma::by_row(smem + K_AT), wgmma::by_row(smem + Q_AT + Q_TILE * q.stage));
    wgmma::wait<0>();
    keep(s);
    if constexpr (!ADDS && !FIRST) finish_dv();
    weigh<MASKED>(s, q.stage, words, capped);
    keep(words);
    pass();
    release_rows(Q_EMPTY + 8 * q.stage);
    q.advance();
    advance();
    await(O_FULL, done);
    issue_dv(dv, words, done);
    if constexpr (ADDS && FIRST) wgmma::wait<0>();
    if constexpr (ADDS && !FIRST) make_dq<DQ_FIRST>(done - 1, previous);
    done++;
    if constexpr (ADDS) finish_dv();
  }
  // dV of the last block is complete.
  DEVICE void finish_dv() {
    keep(words);
    release_rows(O_EMPTY + 8 * buffer(done - 1));
  }

  DEVICE void run() {
    while (begin()) {
#pragma unroll
      for (int i = 0; i < DV / 2; i++) dv[i] = 0.f;
      const int count = steps();
      step<true, true>();
#pragma unroll 1
      for (int i = 1; i < count; i++) {
        if (is_clear(row)) step<false, false>();
        else step<true, false>();
      }
      if constexpr (ADDS) {
        make_dq<DQ_FIRST>(done - 1, current());
      } else {
        wgmma::wait<0>();
        finish_dv();
      }
      end();
      if constexpr (WANT_V) store<DV>(dv, p.dv, p.dv_strides, 1.f, p.dv_rows);
    }
  }
};

// dS and dK.
struct Gradients : Pair {
  float dp[SCORES], dk[D / 2];

  DEVICE Gradients(const Params& p, u32 smem, int warp, int lane) : Pair(p, smem, 1, warp, lane) {}

  template <bool FIRST> DEVICE void step() {
    await(O_FULL, done);
    issue_scores<V_STEPS>(dp, wgmma::by_row(smem + V_AT), wgmma::by_row(smem + O_AT + O_TILE * buffer(done)));
    wgmma::wait<0>();
    keep(dp);
    if constexpr (!WANT_Q && !FIRST) finish_dk();
    mbarrier::wait(smem + P_FULL, done & 1);
#pragma unroll
    for (int i = 0; i < WORDS / 4; i++) {
      const uint4 x = load_shared(passage(i));
      words[4 * i] = x.x, words[4 * i + 1] = x.y, words[4 * i + 2] = x.z, words[4 * i + 3] = x.w;
    }
    differentiate(dp, words, words);
    keep(words);
    __syncwarp();
    release(P_EMPTY);
    release_rows(O_EMPTY + 8 * buffer(done));
    if constexpr (WANT_Q) put_ds(words);
    advance();
    await_q(q);
    issue_dk(dk, words);
    if constexpr (WANT_Q && FIRST) wgmma::wait<0>();
    if constexpr (WANT_Q && !FIRST) make_dq<DQ_COLUMNS>(done - 1, previous);
    if constexpr (WANT_Q) finish_dk();
    done++;
  }
  // dK of the last block is complete.
  DEVICE void finish_dk() {
    keep(words);
    release_rows(Q_EMPTY + 8 * q.stage);
    q.advance();
  }

  DEVICE void run() {
    while (begin()) {
#pragma unroll
      for (int i = 0; i < D / 2; i++) dk[i] = 0.f;
      const int count = steps();
      step<true>();
#pragma unroll 1
      for (int i = 1; i < count; i++) step<false>();
      if constexpr (WANT_Q) {
        make_dq<DQ_COLUMNS>(done - 1, current());
      } else {
        wgmma::wait<0>();
        finish_dk();
      }
      end();
      if constexpr (WANT_K) store<D>(dk, p.dk, p.dk_strides, p.grad_scale, p.dk_rows);
    }
  }
};
