// Which keys the two rows of a thread may see, and how scores become logits.
//
// A wgmma accumulator gives each thread two rows, 8 apart: element 4j + e of S is in row e / 2 and key 8j + e % 2,
// counted from the key 2 * (lane % 4) of the tile.
#pragma once
#include "schedule.cuh"

// Where row `row` (0 to 63) of a warpgroup belongs. With PACK > 1, neighbouring rows are heads of the same query.
struct Place {
  int query, head;
  bool exists;
};

DEVICE Place place_of(const Work& w, int group, int row) {
  const int query = first_query(w, group) + row / PACK;
  return {query, w.head * PACK + row % PACK, query < w.seq_q && row < QUERIES * PACK};
}

// The scales of FP8 inputs: of each head, or of each 128 rows of it. 1 for other types.
constexpr int SCALED_ROWS = 128;

DEVICE float query_scale(const Params& p, const Work& w, int query, int head) {
  if (!FP8) return 1.f;
  const i64 row = (i64)w.batch * p.heads * PACK + head;
  return p.q_blocks ? p.q_scale[row * p.q_blocks + min(query, w.seq_q - 1) / SCALED_ROWS] : p.q_scale[row];
}
DEVICE i64 key_scale_row(const Params& p, const Work& w) {
  return (i64)w.batch * (p.heads / p.group) + w.head / p.group;
}
DEVICE float key_scale(const Params& p, const Work& w, int key) {
  if (!FP8) return 1.f;
  return p.k_scale[key_scale_row(p, w) * max(1, p.k_blocks) + (p.k_blocks ? key / SCALED_ROWS : 0)];
}
DEVICE float value_scale(const Params& p, const Work& w) { return FP8 ? p.v_scale[key_scale_row(p, w)] : 1.f; }

struct Rows {
  int begin[2], end[2];  // visible keys: begin <= key < end
  int diagonal[2];       // ALiBi: the key at distance 0,
  float slope[2];        // and the slope in units of log2
  float scale[2];        // FP8: of the queries

  DEVICE void look(const Params& p, const Work& w, const Keys& keys, int group, int warp, int lane) {
#pragma unroll
    for (int r = 0; r < 2; r++) {
      const Place place = place_of(w, group, warp * 16 + lane / 4 + 8 * r);
      diagonal[r] = place.query + w.seq_k - w.seq_q;
      end[r] = RIGHT ? min(w.seq_k, diagonal[r] + p.right + 1) : w.seq_k;
      begin[r] = LEFT ? diagonal[r] - p.left : 0;
      if (SPLIT && keys.none) end[r] = 0;
      if (FP8) scale[r] = query_scale(p, w, place.query, place.head);
      if (ALIBI) slope[r] = p.slopes[w.batch * p.slope_batch + place.head] * LOG2E;
    }
  }
};

// N scores of a tile, from its key `first` on.
template <int N> DEVICE void hide(float (&s)[N], const Rows& rows, int tile, int lane, int first = 0) {
  const int key = tile * BLOCK_N + 2 * (lane & 3);
#pragma unroll
  for (int i = 0; i < N; i++) {
    const int r = (i >> 1) & 1, at = first + (i >> 2) * 8 + (i & 1);
    if (at >= rows.end[r] - key || (LEFT && at < rows.begin[r] - key)) s[i] = -INF;
  }
}

// Scores to logits in units of log2, where a feature asks for more than a positive scale (that one is folded into the
// exponential).
template <int N>
DEVICE void transform(const Params& p, float (&s)[N], const Rows& rows, float of_keys, int tile, int lane,
                      int first = 0) {
  if (!TRANSFORMED) return;
  const int key = tile * BLOCK_N + 2 * (lane & 3);
  const float away[2] = {(float)(rows.diagonal[0] - key), (float)(rows.diagonal[1] - key)};
#pragma unroll
  for (int i = 0; i < N; i++) {
    const int r = (i >> 1) & 1, at = first + (i >> 2) * 8 + (i & 1);
    const float scale = FP8 ? p.scale * rows.scale[r] * of_keys : p.scale;
    s[i] = SOFTCAP ? p.softcap * tanh_approx(s[i] * scale) : s[i] * scale;
    if (ALIBI) s[i] = fmaf(-rows.slope[r], fabsf(away[r] - at), s[i]);
  }
}
