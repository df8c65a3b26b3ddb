// A warp's share of a unit: scores, running maximum and output of the keys that it is shown.
#pragma once
#include "decode_numbers.cuh"
#include "decode_steps.cuh"

struct Loaded { u32 k, v, k_scales, v_scales; };  // of a step, in shared memory

// The scales of all groups of a key (INT4), by one load.
struct GroupScales {
  u32 words[ceil_div(GROUPS, 2)];

  DEVICE void load(u32 at) {
    if constexpr (GROUPS == 8)
      asm volatile("ld.shared.v4.u32 {%0, %1, %2, %3}, [%4];"
                   : "=r"(words[0]), "=r"(words[1]), "=r"(words[2]), "=r"(words[3]) : "r"(at) : "memory");
    else if constexpr (GROUPS == 4)
      asm volatile("ld.shared.v2.u32 {%0, %1}, [%2];" : "=r"(words[0]), "=r"(words[1]) : "r"(at) : "memory");
    else words[0] = load_word(at);
  }
  DEVICE float operator[](int group) const {
    float y;
    asm("cvt.f32.f16 %0, %1;" : "=f"(y) : "h"((u16)(words[group / 2] >> group % 2 * 16)));
    return y;
  }
  DEVICE float most() const {
    float x = (*this)[0];
#pragma unroll
    for (int g = 1; g < GROUPS; g++) x = fmaxf(x, (*this)[g]);
    return x;
  }
};

struct Consumer {
  const Params& p;
  const u32 smem;
  const int warp, lane, t;  // t: of the four threads of a row
  u64 raw[TILES][K_STEPS];  // queries on their way
  u32 q[TILES][K_STEPS][2];
  float factor[TILES][2];            // of logits, in units of log2
  float slope[TILES][2];
  float top[TILES][2], weight[TILES][2];  // running maximum, and the sum of this thread's own keys
  float acc[TILES][V_TILES][4];      // Oᵀ

  DEVICE Consumer(const Params& p, u32 smem, int warp, int lane)
      : p(p), smem(smem), warp(warp), lane(lane), t(lane & 3) {}

  DEVICE static float number(u64 four, int i) {
    const u16 bits = (u16)(four >> 16 * i);
    if (!Q_FP16) return __uint_as_float((u32)bits << 16);
    float y;
    asm("cvt.f32.f16 %0, %1;" : "=f"(y) : "h"(bits));
    return y;
  }

  // Query rows are heads of the group: row n belongs to lanes 4n to 4n + 3 as an operand, and to the threads with
  // 2t = n or 2t + 1 = n in the results. Loads are begun here and waited for in `begin`.
  DEVICE void load_queries(const Part& part) {
#pragma unroll
    for (int tile = 0; tile < TILES; tile++) {
      const int n = tile * 8 + lane / 4;
      const u16* row = (const u16*)p.q + part.batch * p.q_batch + (part.head * GROUP + n) * p.q_head;
#pragma unroll
      for (int step = 0; step < K_STEPS; step++) raw[tile][step] = four_queries(row, n < GROUP, step, t);
    }
  }
  DEVICE void begin(const Part& part) {
#pragma unroll
    for (int tile = 0; tile < TILES; tile++) {
      float power = 1.f;
      if (KIND != PLAIN && !Q_FP16) {  // bf16 as fp16: divided by a power of two for each row, which loses nothing
        float most = 0.f;
#pragma unroll
        for (int step = 0; step < K_STEPS; step++)
#pragma unroll
          for (int i = 0; i < 4; i++) most = fmaxf(most, fabsf(number(raw[tile][step], i)));
        most = fmaxf(most, __shfl_xor_sync(~0u, most, 1));
        most = fmaxf(most, __shfl_xor_sync(~0u, most, 2));
        power = __uint_as_float(max(__float_as_uint(most) & 0x7f800000u, 0x0d800000u));
        if (!(most < INF)) power = 1.f;
      }
      const float inverse = 1.f / power;
#pragma unroll
      for (int step = 0; step < K_STEPS; step++)
#pragma unroll
        for (int upper = 0; upper < 2; upper++) {
          if constexpr (KIND == PLAIN) {
            q[tile][step][upper] = (u32)(raw[tile][step] >> 32 * upper);
          } else if constexpr (KIND == INT4) {
            const int i = step % 2 * 2 + upper, pair = step & ~1;
            q[tile][step][upper] = pack(number(raw[tile][pair], i) * inverse, number(raw[tile][pair + 1], i) * inverse);
          } else {
            const u64 four = raw[tile][step];
            q[tile][step][upper] = pack(number(four, 2 * upper) * inverse, number(four, 2 * upper + 1) * inverse);
          }
        }
#pragma unroll
      for (int e = 0; e < 2; e++) {
        const int mine = tile * 8 + 2 * t + e, head = part.head * GROUP + min(mine, GROUP - 1);
        factor[tile][e] = p.scale * __shfl_sync(~0u, power, 4 * (2 * t + e));
        if (HEAD_SCALES) factor[tile][e] *= half_at(p.k_scale + part.head);
        if (ALIBI) slope[tile][e] = p.slopes[part.batch * p.slope_batch + head] * LOG2E;
        top[tile][e] = -INF;
        weight[tile][e] = 0.f;
      }
#pragma unroll
      for (int i = 0; i < V_TILES; i++)
#pragma unroll
        for (int e = 0; e < 4; e++) acc[tile][i][e] = 0.f;
    }
  }

  DEVICE static float half_at(const u16* at) {
    float y;
    asm("cvt.f32.f16 %0, %1;" : "=f"(y) : "h"(*at));
    return y;
  }
  DEVICE static float scale_at(u32 at, int key, int head) {
    u16 x;
    asm volatile("ld.shared.u16 %0, [%1];" : "=h"(x) : "r"(scale_place(at, key, head)) : "memory");
    float y;
    asm("cvt.f32.f16 %0, %1;" : "=f"(y) : "h"(x));
    return y;
  }
  // To a tenth, of |x|, -24 of 0: the maximum need not be exact, only the same for all.
  DEVICE static float roughly_log2(float x) {
    return fmaxf(fminf(__float_as_int(fabsf(x)) * 0x1p-23f - 127.f, 16.f), -24.f);
  }

  template <bool MASKED> DEVICE void compute(const Part& part, int key, const Loaded& from) {
    const u32 k = from.k, v = from.v, k_scales = from.k_scales, v_scales = from.v_scales;
    if (MASKED && (KIND == PLAIN || KIND == E4M3)) clear_hidden(v, key, part.lowest, part.length, lane);

    float s[SUB][TILES][4];
#pragma unroll
    for (int sub = 0; sub < SUB; sub++) scores(k + sub * K_SUB, k_scales, sub, part.head, s[sub]);

    float v_scale[SUB][2];
    GroupScales v_groups[SUB][2];
#pragma unroll
    for (int sub = 0; sub < SUB; sub++)
#pragma unroll
      for (int r = 0; r < 2; r++) {
        v_scale[sub][r] = 1.f;
        if constexpr (TOKEN_SCALES) {
          const int row = sub * 16 + 8 * r + lane / 4;
          if constexpr (V_GROUPS > 1) {
            v_groups[sub][r].load(scale_place(v_scales, row, 0));
            v_scale[sub][r] = v_groups[sub][r].most();
          } else {
            v_scale[sub][r] = scale_at(v_scales, row, part.head);
          }
        }
      }

    u32 weights[SUB][TILES][2];
#pragma unroll
    for (int tile = 0; tile < TILES; tile++)
#pragma unroll
      for (int e = 0; e < 2; e++) {
        float most = top[tile][e];
#pragma unroll
        for (int sub = 0; sub < SUB; sub++)
#pragma unroll
          for (int r = 0; r < 2; r++) {
            float& x = s[sub][tile][2 * r + e];
            const int row = key + sub * 16 + 8 * r + lane / 4;
            x *= factor[tile][e];
            if (SOFTCAP) x = p.softcap * tanh_approx(x);
            if (ALIBI) x = fmaf(-slope[tile][e], (float)(part.length - 1 - row), x);
            if (MASKED && (row >= part.length || row < part.lowest)) x = -INF;
            most = fmaxf(most, TOKEN_SCALES ? x + roughly_log2(v_scale[sub][r]) : x);
          }
        most = fmaxf(most, __shfl_xor_sync(~0u, most, 4));
        most = fmaxf(most, __shfl_xor_sync(~0u, most, 8));
        most = fmaxf(most, __shfl_xor_sync(~0u, most, 16));
        const float safe = most == -INF ? 0.f : most, old = top[tile][e];
        if (__any_sync(~0u, most != old)) {
          const float alpha = exp2_approx(old - safe);
          weight[tile][e] *= alpha;
#pragma unroll
          for (int i = 0; i < V_TILES; i++) acc[tile][i][e] *= alpha, acc[tile][i][2 + e] *= alpha;
        }
        top[tile][e] = most;
#pragma unroll
        for (int sub = 0; sub < SUB; sub++)
#pragma unroll
          for (int r = 0; r < 2; r++) {
            float& x = s[sub][tile][2 * r + e];
            x = exp2_approx(x - safe);
            weight[tile][e] += x;
            if (V_GROUPS == 1 && TOKEN_SCALES && !(MASKED && x == 0.f)) x *= v_scale[sub][r];  // a hidden one may be NaN
          }
      }

#pragma unroll
    for (int sub = 0; sub < SUB; sub++) {
      if constexpr (V_GROUPS == 1) {
#pragma unroll
        for (int tile = 0; tile < TILES; tile++)
#pragma unroll
          for (int r = 0; r < 2; r++)
            weights[sub][tile][r] = transposed(pack(s[sub][tile][2 * r], s[sub][tile][2 * r + 1]));
        each_of_v(v + sub * V_SUB, lane, [&](int i, const u32(&a)[4]) {
#pragma unroll
          for (int tile = 0; tile < TILES; tile++) mma(acc[tile][i], a, weights[sub][tile][0], weights[sub][tile][1]);
        });
      } else {
        int group = -1;
        each_of_v(v + sub * V_SUB, lane, [&](int i, const u32(&a)[4]) {
          if (i / 2 != group) {  // two tiles have one group: their weights take its scales
            group = i / 2;
            const float one = v_groups[sub][0][group], two = v_groups[sub][1][group];
#pragma unroll
            for (int tile = 0; tile < TILES; tile++) {
              float x[4];
#pragma unroll
              for (int e = 0; e < 4; e++) {
                x[e] = s[sub][tile][e] * (e < 2 ? one : two);
                if (MASKED && s[sub][tile][e] == 0.f) x[e] = 0.f;
              }
              weights[sub][tile][0] = transposed(pack(x[0], x[1]));
              weights[sub][tile][1] = transposed(pack(x[2], x[3]));
            }
          }
#pragma unroll
          for (int tile = 0; tile < TILES; tile++) mma(acc[tile][i], a, weights[sub][tile][0], weights[sub][tile][1]);
        });
      }
    }
  }

  // 16 keys by the query rows, times the keys' own scales.
  DEVICE void scores(u32 k, u32 k_scales, int sub, int head, float (&s)[TILES][4]) {
    if constexpr (KIND == INT4 && TOKEN_SCALES) {
#pragma unroll
      for (int tile = 0; tile < TILES; tile++)
#pragma unroll
        for (int e = 0; e < 4; e++) s[tile][e] = 0.f;
      float part[TILES][4];
      GroupScales upper, lower;
      upper.load(scale_place(k_scales, sub * 16 + lane / 4, 0));
      lower.load(scale_place(k_scales, sub * 16 + 8 + lane / 4, 0));
      each_of_k(k, lane, [&](int step, const u32(&a)[4]) {
#pragma unroll
        for (int tile = 0; tile < TILES; tile++) {
          if (step % 2 == 0) part[tile][0] = part[tile][1] = part[tile][2] = part[tile][3] = 0.f;
          mma(part[tile], a, q[tile][step][0], q[tile][step][1]);
        }
        if (step % 2 == 1) {
          const float one = upper[step / 2], two = lower[step / 2];
#pragma unroll
          for (int tile = 0; tile < TILES; tile++)
#pragma unroll
            for (int e = 0; e < 4; e++) s[tile][e] = fmaf(part[tile][e], e < 2 ? one : two, s[tile][e]);
        }
      });
    } else {
      float half[2][TILES][4] = {};  // two chains: a product waits for the one before it
      each_of_k(k, lane, [&](int step, const u32(&a)[4]) {
#pragma unroll
        for (int tile = 0; tile < TILES; tile++) mma(half[step % 2][tile], a, q[tile][step][0], q[tile][step][1]);
      });
      float one = 1.f, two = 1.f;
      if constexpr (TOKEN_SCALES) {
        one = scale_at(k_scales, sub * 16 + lane / 4, head);
        two = scale_at(k_scales, sub * 16 + 8 + lane / 4, head);
      }
#pragma unroll
      for (int tile = 0; tile < TILES; tile++)
#pragma unroll
        for (int e = 0; e < 4; e++) {
          s[tile][e] = half[0][tile][e] + half[1][tile][e];
          if (TOKEN_SCALES) s[tile][e] *= e < 2 ? one : two;
        }
    }
  }

  // Sums, maximum and weight of each row to shared memory.
  DEVICE void hand_over() {
#pragma unroll
    for (int tile = 0; tile < TILES; tile++)
#pragma unroll
      for (int e = 0; e < 2; e++) {
        const int row = tile * 8 + 2 * t + e;
        float sum = weight[tile][e];
        sum += __shfl_xor_sync(~0u, sum, 4);
        sum += __shfl_xor_sync(~0u, sum, 8);
        sum += __shfl_xor_sync(~0u, sum, 16);
        if (row >= GROUP) continue;
        if (lane < 4)
          asm volatile("st.shared.v2.f32 [%0], {%1, %2};"
                       ::"r"(smem + TOPS_AT + (warp * GROUP + row) * 8), "f"(top[tile][e]), "f"(sum) : "memory");
        const u32 to = smem + MERGE_AT + (warp * GROUP + row) * PITCH * 4;
#pragma unroll
        for (int i = 0; i < V_TILES; i++)
#pragma unroll
          for (int r = 0; r < 2; r++) {
            const int column = column_of_output(i, lane / 4 + 8 * r);
            if (column < DV)
              asm volatile("st.shared.f32 [%0], %1;" ::"r"(to + column * 4), "f"(acc[tile][i][2 * r + e]) : "memory");
          }
      }
  }
};
