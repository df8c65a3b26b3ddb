// Decode over a paged cache for Hopper (sm_90a): one query token a sequence, compiled at run time for one head
// dimension, format and set of features.
//
// Memory is the limit, so the design is about keeping loads in flight. Every warp is on its own: it copies the keys and
// values of its steps into its own ring, some steps ahead and across the ends of sequences, computes with mma.sync, and
// keeps its own maximum, sums and output. Warps of a block meet only where a unit (a KV head of a sequence) ends, or
// its piece of the work. Parts of units go to memory; who brings the last one joins them, in order.
//
// Copies are of 16 bytes a lane, not by TMA: that took 7 to 10 cycles for each row of a box of 16, whatever its bytes.
#include "config.cuh"
#include "decode_formats.cuh"
#include "decode_schedule.cuh"

// --- loads, ahead of their use

struct Loader {
  const Params& p;
  const Schedule& schedule;
  const Queue& queue;
  const u32 ring, scales, barriers;  // of this warp
  const int warp, lane;
  Part part;
  int turn = -1, known = 0;  // the piece that is loaded, and the last that may be asked for, as the queue counts
  int item = 0, end = 0;     // of the list: where the next part starts, and where the piece ends
  int head = 0;
  int step = 0;              // of the part, the next to load
  int stage = 0, ahead = 0;  // ahead: stages that are loaded or on their way
  int pages, next;           // of the next steps, a lane for each 16 keys: those in use, and those after them
  int used = 0;              // of `pages`, in steps
  bool inside = false;       // of a part that has a step of this warp

  static constexpr int BATCH = 32 / SUB;  // steps whose pages are looked up together

  DEVICE Loader(const Params& p, const Schedule& schedule, const Queue& queue, u32 smem, int warp, int lane)
      : p(p), schedule(schedule), queue(queue), ring(smem + warp * STAGES * LOADED),
        scales(smem + SCALES_AT + warp * STAGES * SCALE_STAGE), barriers(smem + BARRIERS_AT + 8 * warp * STAGES),
        warp(warp), lane(lane) {}

  // To the next part in which this warp has a step. False: there is none yet.
  DEVICE bool enter() {
    do {
      while (item >= end) {
        if (turn == known) return false;
        const int piece = queue.at(++turn);
        const int range = piece / p.kv_heads;
        head = piece % p.kv_heads;
        if (piece < schedule.pieces) item = schedule.begin(range), end = schedule.begin(range + 1);
        else item = end = 0;
      }
      part = schedule.part_at(item, end, head);
      item = part.begin + part.to;
      step = part.from + warp;
    } while (step >= part.to);
    pages = look_up(step);
    next = look_up(step + BATCH * WARPS);
    used = 0;
    return inside = true;
  }
  DEVICE int look_up(int from) const {
    const int key = part.key_of(from + lane / SUB * WARPS) + lane % SUB * 16;
    return p.table[part.batch * p.table_batch + min(key, part.length - 1) / p.page_size];  // never past the last page
  }

  DEVICE static void copy(u32 to, const void* from) {
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(to), "l"(from) : "memory");
  }
  // 16 rows of BYTES each, 16 bytes a lane.
  template <int BYTES, int SLOT> DEVICE void copy_rows(u32 to, const char* from) const {
    constexpr int PIECES = BYTES / 16;
#pragma unroll
    for (int i = 0; i < ceil_div(PIECES, 2); i++) {
      const int at = i * 32 + lane, row = at / PIECES, piece = at % PIECES;
      if (PIECES % 2 && row >= 16) continue;
      copy(to + piece / 8 * SUB * BOX + row * 128 + ((piece % 8 ^ row % 8) << 4), from + row * SLOT + piece * 16);
    }
  }

  DEVICE void issue() {
    const u32 to = ring + stage * LOADED;
#pragma unroll
    for (int sub = 0; sub < SUB; sub++) {
      const i64 page = __shfl_sync(~0u, pages, used * SUB + sub);
      // Keys past the end take those of the last page: nobody looks at them.
      const int slot = min(part.key_of(step) + 16 * sub, (part.length - 1) / 16 * 16) % p.page_size;
      copy_rows<ROW_BYTES, K_SLOT>(to + sub * BOX, p.k + page * p.k_page + part.head * p.k_head + (i64)slot * K_SLOT);
      copy_rows<V_ROW_BYTES, V_SLOT>(to + K_BYTES + sub * BOX,
                                     p.v + page * p.v_page + part.head * p.v_head + (i64)slot * V_SLOT);
      if constexpr (TOKEN_SCALES) {  // a lane has one key's, of K or of V
        const int row = slot + (lane & 15);
        const bool of_v = lane >= 16;
        const u16* from = of_v ? p.v_scale + page * p.v_scale_page + row * p.v_scale_slot + part.head * p.v_scale_head
                               : p.k_scale + page * p.k_scale_page + row * p.k_scale_slot + part.head * p.k_scale_head;
        const u32 place = scales + stage * SCALE_STAGE + ((of_v ? KEYS : 0) + sub * 16 + (lane & 15)) * SCALE_BYTES;
        // At least 4 bytes are copied: a scale alone comes with its neighbour.
        const u64 source = (u64)from & ~(u64)(SCALE_BYTES == 4 && KIND != INT4 ? 3 : 0);
        asm volatile("cp.async.ca.shared.global [%0], [%1], %2;" ::"r"(place), "l"(source), "n"(SCALE_BYTES) : "memory");
      }
    }
    asm volatile("cp.async.mbarrier.arrive.noinc.shared.b64 [%0];" ::"r"(barriers + 8 * stage) : "memory");
    if (++stage == STAGES) stage = 0;
    ahead++;
    step += WARPS;
    inside = step < part.to;
    if (inside && ++used == BATCH) {
      pages = next;
      next = look_up(step + BATCH * WARPS);
      used = 0;
    }
  }

  // As many steps as there are free stages.
  DEVICE void fill() {
    while (ahead < STAGES && (inside || enter())) issue();
  }
};

// --- a warp's share of a unit

struct Consumer {
  const Params& p;
  const u32 smem, ring, scales, barriers;
  const int warp, lane, t;  // t: of the four threads of a row
  int stage = 0;
  u32 phase = 0;
  u64 raw[TILES][K_STEPS];  // queries on their way
  u32 q[TILES][K_STEPS][2];
  float factor[TILES][2];            // of logits, in units of log2
  float slope[TILES][2];
  float top[TILES][2], weight[TILES][2];  // running maximum, and the sum of this thread's own keys
  float acc[TILES][V_TILES][4];      // Oᵀ

  DEVICE Consumer(const Params& p, u32 smem, int warp, int lane)
      : p(p), smem(smem), ring(smem + warp * STAGES * LOADED),
        scales(smem + SCALES_AT + warp * STAGES * SCALE_STAGE), barriers(smem + BARRIERS_AT + 8 * warp * STAGES),
        warp(warp), lane(lane), t(lane & 3) {}

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
      for (int step = 0; step < K_STEPS; step++) {
        const int column = KIND == INT4 ? step / 2 * 32 + t * 8 + step % 2 * 4 : column_of(step, t, false, 0);
        raw[tile][step] = n < GROUP && column < D ? __ldg((const u64*)(row + column)) : 0;
      }
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
  // The scale of one key; `at` is where those of all keys of the step begin. INT4: of a group.
  DEVICE float scale_at(u32 at, int key, int group, int head) const {
    u16 x;
    const u32 place = at + key * SCALE_BYTES + (KIND == INT4 ? 2 * group : head % 2 * 2);
    asm volatile("ld.shared.u16 %0, [%1];" : "=h"(x) : "r"(place) : "memory");
    float y;
    asm("cvt.f32.f16 %0, %1;" : "=f"(y) : "h"(x));
    return y;
  }
  // To a tenth, of a positive number: the maximum need not be exact, only the same for all.
  DEVICE static float roughly_log2(float x) { return fminf(__float_as_int(x) * 0x1p-23f - 127.f, 16.f); }

  // V's rows that nobody may see become 0: their weight is 0, but 0 * NaN is NaN.
  DEVICE void clear_hidden(u32 v, int key, const Part& part) {
#pragma unroll 1
    for (int i = lane; i < V_CHUNKS * KEYS * 8; i += 32) {
      const int row = key + i / 8 % KEYS;
      if (row < part.length && row >= part.lowest) continue;
      asm volatile("st.shared.v4.u32 [%0], {%1, %1, %1, %1};" ::"r"(v + i * 16), "r"(0) : "memory");
    }
    __syncwarp();
  }

  template <bool MASKED> DEVICE void compute(const Part& part, int key) {
    const u32 k = ring + stage * LOADED, v = k + K_BYTES, k_scales = scales + stage * SCALE_STAGE;
    const u32 v_scales = k_scales + KEYS * SCALE_BYTES;
    if (MASKED && (KIND == PLAIN || KIND == E4M3)) clear_hidden(v, key, part);

    float s[SUB][TILES][4];
#pragma unroll
    for (int sub = 0; sub < SUB; sub++) scores(k + sub * BOX, k_scales, sub, part.head, s[sub]);

    float v_scale[SUB][2];
#pragma unroll
    for (int sub = 0; sub < SUB; sub++)
#pragma unroll
      for (int r = 0; r < 2; r++) {
        v_scale[sub][r] = 1.f;
        if constexpr (TOKEN_SCALES) {
          const int row = sub * 16 + 8 * r + lane / 4;
          v_scale[sub][r] = scale_at(v_scales, row, 0, part.head);
#pragma unroll
          for (int g = 1; g < V_GROUPS; g++) v_scale[sub][r] = fmaxf(v_scale[sub][r], scale_at(v_scales, row, g, 0));
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
        each_of_v(v + sub * BOX, lane, [&](int i, const u32(&a)[4]) {
#pragma unroll
          for (int tile = 0; tile < TILES; tile++) mma(acc[tile][i], a, weights[sub][tile][0], weights[sub][tile][1]);
        });
      } else {
        int group = -1;
        each_of_v(v + sub * BOX, lane, [&](int i, const u32(&a)[4]) {
          if (i / 2 != group) {  // two tiles have one group: their weights take its scales
            group = i / 2;
            const float one = scale_at(v_scales, sub * 16 + lane / 4, group, 0);
            const float two = scale_at(v_scales, sub * 16 + 8 + lane / 4, group, 0);
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
      each_of_k(k, lane, [&](int step, const u32(&a)[4]) {
#pragma unroll
        for (int tile = 0; tile < TILES; tile++) {
          if (step % 2 == 0) part[tile][0] = part[tile][1] = part[tile][2] = part[tile][3] = 0.f;
          mma(part[tile], a, q[tile][step][0], q[tile][step][1]);
        }
        if (step % 2 == 1) {
          const float one = scale_at(k_scales, sub * 16 + lane / 4, step / 2, 0);
          const float two = scale_at(k_scales, sub * 16 + 8 + lane / 4, step / 2, 0);
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
        one = scale_at(k_scales, sub * 16 + lane / 4, 0, head);
        two = scale_at(k_scales, sub * 16 + 8 + lane / 4, 0, head);
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

  // All steps of a part that are this warp's. `loader` refills each stage as soon as it is read.
  DEVICE void walk(const Part& part, Loader& loader) {
#pragma unroll 1
    for (int step = part.from + warp; step < part.to; step += WARPS) {
      mbarrier::wait(barriers + 8 * stage, phase);
      const int key = part.key_of(step);
      if (key + KEYS > part.length || (LEFT && key < part.lowest)) compute<true>(part, key);
      else compute<false>(part, key);
      if (++stage == STAGES) stage = 0, phase ^= 1;
      __syncwarp();
      loader.ahead--;
      loader.fill();
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

// --- the ends of units

struct State { float top, weight; };
DEVICE State state_at(u32 at) {
  State x;
  asm volatile("ld.shared.v2.f32 {%0, %1}, [%2];" : "=f"(x.top), "=f"(x.weight) : "r"(at) : "memory");
  return x;
}
DEVICE float float_at(u32 at) {
  float x;
  asm volatile("ld.shared.f32 %0, [%1];" : "=f"(x) : "r"(at) : "memory");
  return x;
}
DEVICE void put_float(u32 at, float x) { asm volatile("st.shared.f32 [%0], %1;" ::"r"(at), "f"(x) : "memory"); }
DEVICE float weight_of(float top, float most) { return most == -INF ? 0.f : exp2_approx(top - most); }

// One element of the output, and once a row its log-sum-exp.
DEVICE void finish(const Params& p, const Part& part, int row, int column, float sum, float top, float weight) {
  const int head = part.head * GROUP + row;
  float value = 1.f;
  if (HEAD_SCALES) value = Consumer::half_at(p.v_scale + part.head);
  if (p.sinks != nullptr) {  // one more logit of the head, without a value
    const float sink = p.sinks[head] * LOG2E, most = fmaxf(top, sink), safe = most == -INF ? 0.f : most;
    const float alpha = exp2_approx(top - safe);
    weight = weight * alpha + exp2_approx(sink - safe);
    sum *= alpha;
    top = most;
  }
  sum = weight == 0.f ? 0.f : sum * value / weight;
  const i64 at = part.batch * p.out_batch + head * p.out_head + column;
  u16 bits;
  if (Q_FP16) asm("cvt.rn.f16.f32 %0, %1;" : "=h"(bits) : "f"(sum));
  else asm("cvt.rn.bf16.f32 %0, %1;" : "=h"(bits) : "f"(sum));
  ((u16*)p.out)[at] = bits;
  if (column == 0 && p.lse != nullptr)
    p.lse[part.batch * p.kv_heads * GROUP + head] = weight == 0.f ? -INF : (top + log2_approx(weight)) * LN2;
}

// The parts of a unit, in order, to its output: a factor for each part and row first, by a warp for each row.
DEVICE void join(const Params& p, const Part& part, int first, int count, u32 smem) {
  constexpr int STRIDE = DV + 2;
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  auto from = [&](int n) {
    return p.parts + (i64)(2 * ((first + n) * p.kv_heads + part.head) + (n == 0)) * GROUP * STRIDE;
  };
  for (int row = warp; row < GROUP; row += WARPS) {
    float top = -INF, weight = 0.f;
    for (int n = lane; n < count; n += 32) top = fmaxf(top, __ldcg(from(n) + row * STRIDE + DV));
#pragma unroll
    for (int distance = 16; distance; distance /= 2) top = fmaxf(top, __shfl_xor_sync(~0u, top, distance));
    for (int n = lane; n < count; n += 32) {
      const float factor = weight_of(__ldcg(from(n) + row * STRIDE + DV), top);
      weight = fmaf(__ldcg(from(n) + row * STRIDE + DV + 1), factor, weight);
      put_float(smem + MERGE_AT + (row * MOST_RANGES + n) * 4, factor);
    }
#pragma unroll
    for (int distance = 16; distance; distance /= 2) weight += __shfl_xor_sync(~0u, weight, distance);
    if (lane == 0) put_float(smem + TOPS_AT + row * 8, top), put_float(smem + TOPS_AT + row * 8 + 4, weight);
  }
  __syncthreads();
  for (int i = threadIdx.x; i < GROUP * DV; i += THREADS) {
    const int row = i / DV, column = i % DV;
    float sum = 0.f;
#pragma unroll 8
    for (int n = 0; n < count; n++)
      sum = fmaf(__ldcg(from(n) + row * STRIDE + column), float_at(smem + MERGE_AT + (row * MOST_RANGES + n) * 4), sum);
    const State x = state_at(smem + TOPS_AT + row * 8);
    finish(p, part, row, column, sum, x.top, x.weight);
  }
}

// Joins what the warps have, and writes the output, or this piece's part of it.
DEVICE void merge(const Params& p, const Schedule& schedule, const Part& part, int piece, u32 smem) {
  constexpr int STRIDE = DV + 2;
  const int place = part.from == 0 ? 1 : 0;  // a piece shares at most two units: one began before it, one ends after
  float* own = p.parts + (i64)(2 * piece + place) * GROUP * STRIDE;
  for (int i = threadIdx.x; i < GROUP * DV; i += THREADS) {
    const int row = i / DV, column = i % DV;
    float top = -INF, weight = 0.f, sum = 0.f;
#pragma unroll
    for (int w = 0; w < WARPS; w++) top = fmaxf(top, state_at(smem + TOPS_AT + (w * GROUP + row) * 8).top);
#pragma unroll
    for (int w = 0; w < WARPS; w++) {
      const State x = state_at(smem + TOPS_AT + (w * GROUP + row) * 8);
      const float factor = weight_of(x.top, top);
      weight = fmaf(x.weight, factor, weight);
      sum = fmaf(float_at(smem + MERGE_AT + ((w * GROUP + row) * PITCH + column) * 4), factor, sum);
    }
    if (part.whole()) {
      finish(p, part, row, column, sum, top, weight);
    } else {
      own[row * STRIDE + column] = sum;
      if (column == 0) own[row * STRIDE + DV] = top, own[row * STRIDE + DV + 1] = weight;
    }
  }
  if (part.whole()) return;

  const int first = schedule.range_of(part.begin), last = schedule.range_of(part.begin + part.all - 1);
  int* arrived = p.counters + 2 + first * p.kv_heads + part.head;
  __threadfence();
  __syncthreads();
  if (threadIdx.x == 0) put_int(smem + WARP_SUMS_AT, atomicAdd(arrived, 1));
  __syncthreads();
  if (int_at(smem + WARP_SUMS_AT) != last - first) return;  // others are still at it
  __threadfence();
  if (threadIdx.x == 0) *arrived = 0;
  join(p, part, first, last - first + 1, smem);
}

// Sequences without keys are in nobody's range.
DEVICE void finish_empty(const Params& p) {
  for (int b = blockIdx.x; b < p.batch; b += gridDim.x) {
    if (p.lengths[b] > 0) continue;
    Part part;
    part.batch = b;
    for (int i = threadIdx.x; i < p.kv_heads * GROUP * DV; i += THREADS) {
      part.head = i / (GROUP * DV);
      finish(p, part, i / DV % GROUP, i % DV, 0.f, -INF, 0.f);
    }
  }
}

extern "C" __global__ void __launch_bounds__(THREADS, PER_SM) decode(const __grid_constant__ Params p) {
  extern __shared__ __align__(1024) char shared_memory[];
  const u32 smem = shared_address(shared_memory);
  const int warp = __shfl_sync(~0u, (int)threadIdx.x / 32, 0), lane = threadIdx.x % 32;
  if (threadIdx.x < WARPS * STAGES) mbarrier::init(smem + BARRIERS_AT + 8 * threadIdx.x, 32);
  if constexpr (ROW_BYTES % 128 || V_ROW_BYTES % 128) {  // columns past a head's end are read too, and never written
    for (int at = threadIdx.x * 16; at < SCALES_AT; at += THREADS * 16)
      asm volatile("st.shared.v4.u32 [%0], {%1, %1, %1, %1};" ::"r"(smem + at), "r"(0) : "memory");
  }
  count_steps(p, smem, warp, lane);
  const Schedule schedule(p, smem);
  const Queue queue(p, schedule);
  Loader loader(p, schedule, queue, smem, warp, lane);
  Consumer consumer(p, smem, warp, lane);
#pragma unroll 1
  for (int turn = 0;; turn++) {
    const int piece = queue.at(turn);
    if (piece >= schedule.pieces) break;
    const int asked = threadIdx.x == 0 ? queue.ask() : 0;
    const int range = piece / p.kv_heads, end = schedule.begin(range + 1);
#pragma unroll 1
    for (int item = schedule.begin(range); item < end;) {
      const Part part = schedule.part_at(item, end, piece % p.kv_heads);
      item = part.begin + part.to;
      consumer.load_queries(part);
      loader.known = turn + 1;
      loader.fill();
      consumer.begin(part);
      consumer.walk(part, loader);
      consumer.hand_over();
      if (threadIdx.x == 0) queue.hand_on(turn, asked);
      __syncthreads();
      merge(p, schedule, part, piece, smem);
      __syncthreads();
    }
  }
  if (threadIdx.x == 0) queue.leave();
  finish_empty(p);
}
