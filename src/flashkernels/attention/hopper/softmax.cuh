// The online softmax with a lazy maximum.
//
// exp2(s - m) may use any reference m that neither overflows nor underflows: fp32 and bf16 are scale-free. So the
// reference of a row is the maximum over its first key tile (rounded up to an integer: changing it later multiplies by
// an exact power of two), and later tiles compute no maximum and rescale nothing. A row whose logits outgrow its
// reference shows in its sum; the warp then takes a new reference for this tile, with S still in registers.
#pragma once
#include "mask.cuh"

// P must fit its 16-bit type, and P·V must not overflow where the true weights (at most 1) would not: 65504 is the end
// of fp16; bf16 reaches as far as fp32, and 2^16 leaves all but V's last 16 powers of two.
// FP8 ends at 448 and has few bits below 1, so its weights start at 2^HEADROOM instead of 1.
constexpr float LIMIT = FP8 ? 448.f : FP16 ? 32768.f : 65536.f;
constexpr float HEADROOM = FP8 ? 4.f : 0.f;
// The reference of a row that has seen no key: hidden logits (-inf) still give 0, any visible one exceeds LIMIT.
constexpr float UNSEEN = -1e38f;

// The registers of P: two sets for the first steps of P·V, so that the next tile's P is made while this one's is read,
// and one for the LATE last steps, which leaves room for more keys. P·V begins with those, in groups of LATE_GROUP
// steps: behind each, its registers are free for the next P, while the rest still runs.
constexpr int EARLY = PV_STEPS - LATE;
constexpr int LATE_GROUP = 2;  // the shorter, the sooner the next exponentials start
constexpr int LATE_GROUPS = ceil_div(LATE, LATE_GROUP);
static_assert(EARLY > 0, "the exponentials of the last late steps would have no product to run under");
static_assert(LATE_GROUPS <= 6, "wgmma.wait_group counts no further than 7 groups in flight");
typedef u32 Weights[4 * EARLY];
typedef u32 LateWeights[LATE ? 4 * LATE : 1];

struct Softmax {
  float reference[2], total[2];  // in units of log2; total: this thread's part of the sum
  float scale[2];                // of the scores, log2(e) included; 1 where they are logits already

  DEVICE static void row_max(const float (&s)[BLOCK_N / 2], float (&most)[2]) {
    float part[2][2];  // two chains a row
#pragma unroll
    for (int r = 0; r < 2; r++)
#pragma unroll
      for (int c = 0; c < 2; c++) part[r][c] = fmaxf(s[4 * c + 2 * r], s[4 * c + 2 * r + 1]);
#pragma unroll
    for (int i = 8; i < BLOCK_N / 2; i++) {
      float& chain = part[(i >> 1) & 1][(i >> 2) & 1];
      chain = fmaxf(chain, s[i]);
    }
#pragma unroll
    for (int r = 0; r < 2; r++) {
      const float a = fmaxf(part[r][0], part[r][1]);
      const float b = fmaxf(a, __shfl_xor_sync(~0u, a, 1));
      most[r] = fmaxf(b, __shfl_xor_sync(~0u, b, 2));
    }
  }

  // P = 2^(S - reference) in 16 bits, of as many steps of P·V as `p` has room for, from step FIRST on; and this
  // thread's part of the row sums, two chains a row.
  template <int FIRST, int WORDS>
  DEVICE void exponentials(const float (&s)[BLOCK_N / 2], u32 (&p)[WORDS], float (&part)[2][2]) const {
    constexpr int PAIRS = BLOCK_N / 4 / PV_STEPS;  // of a step
#pragma unroll
    for (int i = FIRST * PAIRS; i < (FIRST + WORDS / 4) * PAIRS; i++) {
      const int r = i & 1;
      const float x = s[2 * i], y = s[2 * i + 1];
      const float a = exp2_approx(TRANSFORMED ? x - reference[r] : fmaf(x, scale[r], -reference[r]));
      const float b = exp2_approx(TRANSFORMED ? y - reference[r] : fmaf(y, scale[r], -reference[r]));
      part[r][0] += a;
      part[r][1] += b;
      if constexpr (FP8) {
        // A thread holds keys 8j + 2t and the next, the operand wants 4t to 4t + 3: pairs of two groups j share a
        // register, and V's keys are in the order that results (values.cuh).
        const int j = i >> 1, word = j / 4 * 4 + (j >> 1 & 1) * 2 + r - 4 * FIRST;
        p[word] = j & 1 ? p[word] | pack_bytes(a, b) << 16 : pack_bytes(a, b);
      } else {
        p[i - 4 * FIRST] = pack(a, b);
      }
    }
  }

  // All of a tile's.
  DEVICE void exponentials(const float (&s)[BLOCK_N / 2], Weights& p, LateWeights& late, float (&sum)[2]) const {
    float part[2][2] = {{0.f, 0.f}, {0.f, 0.f}};
    exponentials<0>(s, p, part);
    exponentials<EARLY>(s, late, part);
    sum[0] = part[0][0] + part[0][1];
    sum[1] = part[1][0] + part[1][1];
  }

  // The first key tile of a row sets its reference.
  DEVICE void begin(const float (&s)[BLOCK_N / 2], Weights& p, LateWeights& late) {
    float most[2];
    row_max(s, most);
#pragma unroll
    for (int r = 0; r < 2; r++) reference[r] = fmaxf(ceilf(most[r] * scale[r]) - HEADROOM, UNSEEN);
    exponentials(s, p, late, total);
  }

  DEVICE static bool outgrown(const float (&sum)[2]) {
    return __any_sync(~0u, !(sum[0] < LIMIT) || !(sum[1] < LIMIT));  // also where a sum is NaN
  }

  // A new reference from this tile; what was accumulated so far is rescaled, and P made again.
  DEVICE void renew(const float (&s)[BLOCK_N / 2], Weights& p, LateWeights& late, float (&sum)[2],
                    float (&o)[DV / 2]) {
    float most[2];
    row_max(s, most);
#pragma unroll
    for (int r = 0; r < 2; r++) {
      const float next = fmaxf(reference[r], ceilf(most[r] * scale[r]) - HEADROOM);
      const float factor = exp2_approx(reference[r] - next);
      reference[r] = next;
      total[r] *= factor;
#pragma unroll
      for (int j = 0; j < DV / 8; j++) {
        o[4 * j + 2 * r] *= factor;
        o[4 * j + 2 * r + 1] *= factor;
      }
    }
    exponentials(s, p, late, sum);
  }
};
