// From the sums of a tile to the output: scales, bias, activation, row weights, and the turn from [feature][row] to
// [row][feature].
#pragma once
#include "gemm_schedule.cuh"

// What a thread brings of a tile's factors: those of rows `thread` and 128 further on, and scales of its own features,
// two of each half.
struct Factors {
  float scale[2], weight[2], feature[2][2];
};

// A thread of the four warps that share a product of 64 features x N rows has, of each 8 rows, sums 0 and 1 of feature
// 16 * warp + lane / 4 and 2 and 3 of the feature 8 further on; rows 2 * (lane % 4) and the next one.
struct Epilogue {
  const Params& p;
  const int group, warp, lane;

  DEVICE int feature_of(int i) const { return 16 * warp + lane / 4 + 8 * i; }

  // Of bias or scales [experts, features], those of this thread's two features. `half`: gate and up, or the first and
  // last 64 features of this warpgroup. Features past the width have none.
  DEVICE void of_features(float (&to)[2], const float* from, const Work& w, int half) const {
    const float* row = from + (i64)w.expert * p.width * (GATED ? 2 : 1);
#pragma unroll
    for (int i = 0; i < 2; i++) {
      const int at = w.feature + group * SHARE + feature_of(i) + (GATED ? 0 : 64 * half);
      to[i] = at < p.width ? row[at * p.step + (GATED ? half * p.half : 0)] : 0.f;
    }
  }

  // Loaded before the tile's products, and waited for behind them. Rows past the tile's end have the last one's: nothing
  // is stored of them.
  template <int N> DEVICE Factors factors(const Work& w) const {
    Factors f = {};
#pragma unroll
    for (int i = 0; i < ceil_div(N, 128); i++) {
      const int row = w.row + min(32 * warp + lane + 128 * i, w.count - 1);
      if (SCALED) f.scale[i] = p.x_scales[FUSED ? p.permutation[row] / p.of_token : row];
      if (ROW_WEIGHTS) f.weight[i] = p.row_weights[p.permutation[row]];
    }
    if (SCALED) {
      of_features(f.feature[0], p.w_scales, w, 0);
      of_features(f.feature[1], p.w_scales, w, 1);
    }
    return f;
  }

  // Factors of rows go to all threads by way of `staging`.
  template <int N> DEVICE void share(const float (&rows)[2], u32 staging) const {
    named_barrier::sync(1 + group, 128);  // nobody reads what is there any more, no product either
#pragma unroll
    for (int i = 0; i < ceil_div(N, 128); i++)
      asm volatile("st.shared.f32 [%0], %1;"
                   ::"r"(staging + 4 * (32 * warp + lane + 128 * i)), "f"(rows[i]) : "memory");
    named_barrier::sync(1 + group, 128);
  }

  template <int N> DEVICE void scale(float (&y)[N / 2], float first, float second, u32 staging) const {
    u32 from = staging + 8 * (lane % 4);
    asm volatile("" : "+r"(from));  // one address with offsets: nvcc would keep one for each of them
#pragma unroll
    for (int j = 0; j < N / 8; j++) {
      float row[2];
      asm volatile("ld.shared.v2.f32 {%0, %1}, [%2];" : "=f"(row[0]), "=f"(row[1]) : "r"(from + 32 * j) : "memory");
#pragma unroll
      for (int i = 0; i < 4; i++) y[4 * j + i] = y[4 * j + i] * row[i % 2] * (i < 2 ? first : second);
    }
  }

  template <int N> DEVICE void add_bias(float (&y)[N / 2], const Work& w, int half) const {
    float bias[2];
    of_features(bias, p.bias, w, half);
#pragma unroll
    for (int i = 0; i < N / 2; i++) y[i] += bias[i / 2 % 2];
  }

  template <int N> DEVICE static void swiglu(float (&gate)[N / 2], const float (&up)[N / 2]) {
#pragma unroll
    for (int i = 0; i < N / 2; i++) gate[i] *= reciprocal(1.f + exp2_approx(-LOG2E * gate[i])) * up[i];
  }

  // Stores 64 features from `feature` on. `staging` is 16 KB that only this warpgroup uses: 128 rows of 128 bytes at a
  // time, whose 16-byte pieces are swizzled, so that neither side has bank conflicts.
  template <int N> DEVICE void store(const float (&y)[N / 2], const Work& w, int feature, u32 staging) const {
    const int thread = 32 * warp + lane, swizzled = lane % 8;
    const u32 to = staging + (lane / 16 * 8 + swizzled) * ROW_BYTES + (((2 * warp + lane / 8 % 2) ^ swizzled) << 4);
    const int row = thread / 8, column = thread % 8;
    const u32 from = staging + row * ROW_BYTES + ((column ^ (row % 8)) << 4);
    const int left = feature + 8 * column < p.width ? w.count - row : 0;  // rows from this thread's first one on
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
        if (first + i < left)  // not *(uint4*)out: of most of these nvcc makes four stores
          asm volatile("st.global.v4.u32 [%0], {%1, %2, %3, %4};"
                       ::"l"(out), "r"(words.x), "r"(words.y), "r"(words.z), "r"(words.w) : "memory");
        out += 16 * p.width;
      }
    }
  }

  template <int N>
  DEVICE void dress(float (&y)[N / 2], const Work& w, const Factors& f, int half, u32 staging) const {
    if (SCALED) scale<N>(y, f.feature[half][0], f.feature[half][1], staging);
    if (BIAS) add_bias<N>(y, w, half);
  }

  template <int N>
  DEVICE void weigh_and_store(float (&y)[N / 2], const Work& w, const Factors& f, int half, u32 staging) const {
    if (ROW_WEIGHTS) {
      share<N>(f.weight, staging);
      scale<N>(y, 1.f, 1.f, staging);
    }
    store<N>(y, w, w.feature + group * SHARE + 64 * half, staging);
  }

  // Gate and up, or two halves of this warpgroup's features, of one tile.
  template <int N>
  DEVICE void run(float (&a)[N / 2], float (&b)[N / 2], const Work& w, const Factors& f, u32 staging) const {
    if (SCALED) share<N>(f.scale, staging);
    dress<N>(a, w, f, 0, staging);
    if (GATED) {
      dress<N>(b, w, f, 1, staging);
      swiglu<N>(a, b);
    }
    weigh_and_store<N>(a, w, f, 0, staging);
    if (GATED) return;
    if (SCALED) share<N>(f.scale, staging);  // the first half was stored over them
    dress<N>(b, w, f, 1, staging);
    weigh_and_store<N>(b, w, f, 1, staging);
  }
};
