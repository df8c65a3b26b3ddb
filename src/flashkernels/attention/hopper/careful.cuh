// NaN and Inf in V behind a mask.
//
// A hidden key has P = 0, but 0 * Inf and 0 * NaN are NaN: a NaN or Inf in a hidden row of V would reach queries that
// may not see it. That is rare and shows as NaN in the output. The epilogue then only takes a note; when the block has
// no tiles left, each warp makes the output of its noted rows again, with plain arithmetic over the visible keys.
//
// The notes form a list: its head is in shared memory, and each entry's link is stored in the first output row of the
// tile it stands for, which is going to be overwritten anyway.
#pragma once
#include "mask.cuh"

DEVICE i64 output_at(const Params& p, const Work& w, int query, int head) {
  return w.batch * p.out_strides.batch + (w.q_row + query) * p.out_strides.seq + head * p.out_strides.head;
}

// No branch: this runs while a wgmma is in flight.
DEVICE void note_poisoned(bool poisoned, u32 list, u16* first_row, int tile) {
  asm volatile(
      "{.reg .pred p; .reg .b32 link; setp.ne.s32 p, %0, 0;\n"
      "@p ld.shared.b32 link, [%1];\n@p st.global.b32 [%2], link;\n@p st.shared.b32 [%1], %3;}"
      ::"r"((int)poisoned), "r"(list), "l"(first_row), "r"(tile) : "memory");
}

// Where row `key` of K or V starts.
DEVICE i64 row_of(const Params& p, const Work& w, const Strides& strides, int key) {
  const int kv_head = w.head / p.group;
  i64 batch = w.batch, row = w.k_row + key;
  if (PAGED) {
    batch = p.pages[(i64)w.batch * p.max_pages + key / p.page_size];
    row = key % p.page_size;
  }
  return batch * strides.batch + row * strides.seq + kv_head * strides.head;
}

// One output row, O_COLUMNS of it from `column` on, by a whole warp.
DEVICE void careful_row(const Params& p, const Work& w, int query, int head, int lane, int column) {
  const int diagonal = query + w.seq_k - w.seq_q;
  const int begin = LEFT ? max(0, diagonal - p.left) : 0;
  const int end = RIGHT ? min(w.seq_k, diagonal + p.right + 1) : w.seq_k;
  const i64 q = w.batch * p.q_strides.batch + (w.q_row + query) * p.q_strides.seq + head * p.q_strides.head;
  auto logit = [&](int key) {
    const i64 k = row_of(p, w, p.k_strides, key);
    const float scale = p.scale * query_scale(p, w, query, head) * key_scale(p, w, key);
    float s = 0.f;
    for (int d = 0; d < D; d++) s = fmaf(element(p.q_data, q + d), element(p.k_data, k + d), s);
    s = SOFTCAP ? p.softcap * tanh_approx(s * scale) : s * scale;
    if (ALIBI) s -= p.slopes[w.batch * p.slope_batch + head] * LOG2E * fabsf((float)(diagonal - key));
    return s;
  };
  float most = SINKS ? p.sinks[head] * LOG2E : -INF;
  for (int key = begin + lane; key < end; key += 32) most = fmaxf(most, logit(key));
#pragma unroll
  for (int step = 16; step; step /= 2) most = fmaxf(most, __shfl_xor_sync(~0u, most, step));
  if (most == -INF) most = 0.f;

  float total = SINKS && lane == 0 ? exp2_approx(p.sinks[head] * LOG2E - most) : 0.f;
  const int columns = O_COLUMNS == DV ? DV : min(O_COLUMNS, DV - column);
  float o[ceil_div(O_COLUMNS, 32)] = {};
  for (int first = begin; first < end; first += 32) {
    const float mine = first + lane < end ? exp2_approx(logit(first + lane) - most) : 0.f;
    total += mine;
    for (int i = 0; i < min(32, end - first); i++) {
      const float weight = __shfl_sync(~0u, mine, i);
      const i64 v = row_of(p, w, p.v_strides, first + i) + column;
#pragma unroll
      for (int c = 0; c < ceil_div(O_COLUMNS, 32); c++) {
        if (c * 32 + lane >= columns) continue;
        const float x = element(p.v_data, v + c * 32 + lane);
        o[c] += x - x == 0.f ? weight * x : x;  // a visible Inf or NaN stays one, however small its weight
      }
    }
  }
#pragma unroll
  for (int step = 16; step; step /= 2) total += __shfl_xor_sync(~0u, total, step);
  const float inverse = total == 0.f ? 0.f : value_scale(p, w) * reciprocal(total);
  u16* out = p.out + output_at(p, w, query, head) + column;
#pragma unroll
  for (int c = 0; c < ceil_div(O_COLUMNS, 32); c++)
    if (c * 32 + lane < columns) out[c * 32 + lane] = (u16)pack(o[c] * inverse, 0.f);
}

DEVICE void careful_rows(const Params& p, const Work& w, int group, int warp, int lane, int column = 0) {
  for (int row = warp * 16; row < warp * 16 + 16; row++) {
    const Place place = place_of(w, group, row);
    if (place.exists) careful_row(p, w, place.query, place.head, lane, column);
  }
}

// The list is read and written by the first lane of its warp alone.
DEVICE void make_noted_again(const Params& p, u32 list, int group, int warp, int lane, u32 rank = 0, int column = 0) {
  while (true) {
    int tile = -1;
    if (lane == 0) asm volatile("ld.shared.b32 %0, [%1];" : "=r"(tile) : "r"(list) : "memory");
    tile = __shfl_sync(~0u, tile, 0);
    if (tile < 0) return;
    Work w = decode(p, tile, lane);
    w.block = w.block * CLUSTER + rank;
    const Place place = place_of(w, group, warp * 16);
    if (lane == 0) {
      const int link = *(const volatile int*)(p.out + output_at(p, w, place.query, place.head) + column);
      asm volatile("st.shared.b32 [%0], %1;" ::"r"(list), "r"(link) : "memory");
    }
    __syncwarp();
    careful_rows(p, w, group, warp, lane, column);
  }
}
