// What is written where a unit ends.
#pragma once
#include "decode_warp.cuh"

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
DEVICE float4 four_floats_at(u32 at) {
  float4 x;
  asm volatile("ld.shared.v4.f32 {%0, %1, %2, %3}, [%4];"
               : "=f"(x.x), "=f"(x.y), "=f"(x.z), "=f"(x.w) : "r"(at) : "memory");
  return x;
}
DEVICE float weight_of(float top, float most) { return most == -INF ? 0.f : exp2_approx(top - most); }

// Four columns of a row: sums, and the row's maximum and weight.
struct Cell {
  float top = -INF, weight = 0.f, sum[4] = {};

  DEVICE void scale_to(float most) {
    const float factor = weight_of(top, most);
    top = most;
    weight *= factor;
#pragma unroll
    for (int e = 0; e < 4; e++) sum[e] *= factor;
  }
  DEVICE void add(float other_top, float other_weight, float4 x) {  // `top` is the maximum of both
    const float factor = weight_of(other_top, top);
    weight = fmaf(other_weight, factor, weight);
    sum[0] = fmaf(x.x, factor, sum[0]), sum[1] = fmaf(x.y, factor, sum[1]);
    sum[2] = fmaf(x.z, factor, sum[2]), sum[3] = fmaf(x.w, factor, sum[3]);
  }
};

constexpr int FOURS = DV / 4;  // cells of a row
static_assert(DV % 4 == 0, "a row is a whole number of cells");

DEVICE u32 two_numbers(float low, float high) {
  u32 r;
  if (Q_FP16) asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(r) : "f"(high), "f"(low));
  else asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(r) : "f"(high), "f"(low));
  return r;
}

// Four elements of the output, and once a row its log-sum-exp. Rows may go on into the heads after the part's.
DEVICE void finish(const Params& p, const Part& part, int row, int column, const Cell& cell) {
  const int head = part.head * GROUP + row;
  float value = 1.f, top = cell.top, weight = cell.weight;
  if (HEAD_SCALES) value = Consumer::half_at(p.v_scale + part.head + row / GROUP);
  if (p.sinks != nullptr) {  // one more logit of the head, without a value
    const float sink = p.sinks[head] * LOG2E, most = fmaxf(top, sink), safe = most == -INF ? 0.f : most;
    const float alpha = exp2_approx(top - safe);
    weight = weight * alpha + exp2_approx(sink - safe);
    value *= alpha;
    top = most;
  }
  float out[4];
#pragma unroll
  for (int e = 0; e < 4; e++) out[e] = weight == 0.f ? 0.f : cell.sum[e] * value / weight;
  const i64 at = part.batch * p.out_batch + head * p.out_head + column;
  *(uint2*)((u16*)p.out + at) = make_uint2(two_numbers(out[0], out[1]), two_numbers(out[2], out[3]));
  if (column == 0 && p.lse != nullptr)
    p.lse[part.batch * p.kv_heads * GROUP + head] = weight == 0.f ? -INF : (top + log2_approx(weight)) * LN2;
}

// Sequences without keys are in nobody's range.
DEVICE void finish_empty(const Params& p, u32 smem) {
  for (int b = blockIdx.x; b < p.batch; b += gridDim.x) {
    if (int_at(smem + LENGTHS_AT + 4 * b) > 0) continue;
    Part part;
    part.batch = b;
    for (int i = threadIdx.x; i < p.kv_heads * GROUP * FOURS; i += THREADS) {
      part.head = i / (GROUP * FOURS);
      finish(p, part, i / FOURS % GROUP, i % FOURS * 4, Cell());
    }
  }
}
