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
DEVICE float weight_of(float top, float most) { return most == -INF ? 0.f : exp2_approx(top - most); }

// One element of the output, and once a row its log-sum-exp. Rows may go on into the heads after the part's.
DEVICE void finish(const Params& p, const Part& part, int row, int column, float sum, float top, float weight) {
  const int head = part.head * GROUP + row;
  float value = 1.f;
  if (HEAD_SCALES) value = Consumer::half_at(p.v_scale + part.head + row / GROUP);
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

// Sequences without keys are in nobody's range.
DEVICE void finish_empty(const Params& p, u32 smem) {
  for (int b = blockIdx.x; b < p.batch; b += gridDim.x) {
    if (int_at(smem + LENGTHS_AT + 4 * b) > 0) continue;
    Part part;
    part.batch = b;
    for (int i = threadIdx.x; i < p.kv_heads * GROUP * DV; i += THREADS) {
      part.head = i / (GROUP * DV);
      finish(p, part, i / DV % GROUP, i % DV, 0.f, -INF, 0.f);
    }
  }
}
