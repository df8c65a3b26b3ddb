// From the sums of a tile to the output: bias, activation, row weights, and the turn from [feature][row] to [row][feature].
#pragma once
#include "gemm_schedule.cuh"

// A thread of the four warps that share a product of 64 features x N rows has, of each 8 rows, sums 0 and 1 of feature
// 16 * warp + lane / 4 and 2 and 3 of the feature 8 further on; rows 2 * (lane % 4) and the next one.
struct Epilogue {
  const Params& p;
  const int group, warp, lane;

  DEVICE int feature_of(int i) const { return 16 * warp + lane / 4 + 8 * i; }

  // `half`: 1 for up. Features past the width have none.
  template <int N> DEVICE void add_bias(float (&y)[N / 2], const Work& w, int feature, int half) const {
    float bias[2];
#pragma unroll
    for (int i = 0; i < 2; i++) {
      const int at = feature + feature_of(i);
      const float* row = p.bias + (i64)w.expert * p.width * (GATED ? 2 : 1);
      bias[i] = at < p.width ? row[at * p.bias_step + half * p.bias_half] : 0.f;
    }
#pragma unroll
    for (int i = 0; i < N / 2; i++) y[i] += bias[i / 2 % 2];
  }

  template <int N> DEVICE static void swiglu(float (&gate)[N / 2], const float (&up)[N / 2]) {
#pragma unroll
    for (int i = 0; i < N / 2; i++) gate[i] *= reciprocal(1.f + exp2_approx(-LOG2E * gate[i])) * up[i];
  }

  // Of rows past the tile's end, the last one's: nothing is stored of them. Both halves at once: no weight is kept.
  template <int N> DEVICE void weigh(float (&a)[N / 2], float (&b)[N / 2], const Work& w) const {
#pragma unroll
    for (int j = 0; j < N / 8; j++)
#pragma unroll
      for (int i = 0; i < 2; i++) {
        const int row = w.row + min(8 * j + 2 * (lane % 4) + i, w.count - 1);
        const float weight = p.row_weights[p.permutation[row]];
        a[4 * j + i] *= weight;
        a[4 * j + i + 2] *= weight;
        if (!GATED) b[4 * j + i] *= weight, b[4 * j + i + 2] *= weight;
      }
  }

  // Stores 64 features from `feature` on. `staging` is 16 KB that only this warpgroup uses: 128 rows of 128 bytes at a
  // time, whose 16-byte pieces are swizzled, so that neither side has bank conflicts.
  template <int N> DEVICE void store(const float (&y)[N / 2], const Work& w, int feature, u32 staging) const {
    const int thread = 32 * warp + lane, swizzled = lane % 8;
    const u32 to = staging + (lane / 16 * 8 + swizzled) * ROW_BYTES + (((2 * warp + lane / 8 % 2) ^ swizzled) << 4);
    const int row = thread / 8, column = thread % 8;
    const u32 from = staging + row * ROW_BYTES + ((column ^ (row % 8)) << 4);
    const bool there = feature + 8 * column < p.width;
    u16* out = p.out + (i64)(w.row + row) * p.width + feature + 8 * column;
#pragma unroll
    for (int first = 0; first < N; first += 128) {
      constexpr int ROWS = 128;
      named_barrier::sync(1 + group, 128);  // nobody reads the staging any more
#pragma unroll
      for (int i = 0; i < min(ROWS, N - first); i += 16) {
        const float* sums = y + (first + i) / 2;
        if (first + i + 8 < N)
          asm volatile("stmatrix.sync.aligned.m8n8.x4.trans.shared.b16 [%0], {%1, %2, %3, %4};"
                       ::"r"(to + i * ROW_BYTES), "r"(pack(sums[0], sums[1])), "r"(pack(sums[2], sums[3])),
                       "r"(pack(sums[4], sums[5])), "r"(pack(sums[6], sums[7])) : "memory");
        else
          asm volatile("stmatrix.sync.aligned.m8n8.x2.trans.shared.b16 [%0], {%1, %2};"
                       ::"r"(to + i * ROW_BYTES), "r"(pack(sums[0], sums[1])), "r"(pack(sums[2], sums[3])) : "memory");
      }
      named_barrier::sync(1 + group, 128);
#pragma unroll
      for (int i = 0; i < min(ROWS, N - first); i += 16) {
        uint4 words;
        asm volatile("ld.shared.v4.u32 {%0, %1, %2, %3}, [%4];"
                     : "=r"(words.x), "=r"(words.y), "=r"(words.z), "=r"(words.w) : "r"(from + i * ROW_BYTES) : "memory");
        if (there && first + i + row < w.count) *(uint4*)(out + (i64)(first + i) * p.width) = words;
      }
    }
  }

  // Gate and up, or two halves of this warpgroup's features, of one tile.
  template <int N> DEVICE void run(float (&a)[N / 2], float (&b)[N / 2], const Work& w, u32 staging) const {
    const int feature = w.feature + group * SHARE;
    if (BIAS) {
      add_bias<N>(a, w, feature, 0);
      add_bias<N>(b, w, GATED ? feature : feature + 64, GATED ? 1 : 0);
    }
    if (GATED) swiglu<N>(a, b);
    if (ROW_WEIGHTS) weigh<N>(a, b, w);
    store<N>(a, w, feature, staging);
    if (!GATED) store<N>(b, w, feature + 64, staging);
  }
};
