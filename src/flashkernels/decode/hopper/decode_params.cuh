// What the host passes, and the sizes of a row.
#pragma once
#include "mbarrier.cuh"

struct Params {
  const char *k, *v;  // pages
  const void* q;
  const u16 *k_scale, *v_scale;  // fp16
  const int *table, *lengths;
  const float *slopes, *sinks;
  void* out;
  float* lse;
  float* parts;   // two a piece: sums, maximum and weight of each row
  int* counters;  // 0 before and after: pieces that were taken, blocks that are done, and arrivals by piece
  i64 k_page, k_head, v_page, v_head;  // bytes
  i64 q_batch, q_head, out_batch, out_head;
  i64 k_scale_page, k_scale_slot, k_scale_head, v_scale_page, v_scale_slot, v_scale_head;
  i64 table_batch, slope_batch;
  float scale, softcap;  // of logits in units of log2; with a softcap `scale` goes into the tanh
  int batch, kv_heads, page_size, left, most_pieces, table_width;
};

constexpr int PLAIN = 0, E4M3 = 1, INT8 = 2, INT4 = 3;  // KIND
constexpr int ROW_BYTES = KIND == PLAIN ? 2 * D : KIND == INT4 ? D / 2 : D;  // of a key
constexpr int V_ROW_BYTES = KIND == PLAIN ? 2 * DV : KIND == INT4 ? DV / 2 : DV;
constexpr int KEYS = 16 * SUB;  // of a step
constexpr bool TOKEN_SCALES = SCALE_BYTES > 0;
