// What the host passes, and where things lie in shared memory.
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
  float* parts;   // (pieces, 2, GROUP, DV + 2): sums, maximum, weight
  int* counters;  // 0 before and after: pieces that were taken, blocks that are done, and arrivals by piece
  i64 k_page, k_head, v_page, v_head;  // bytes
  i64 q_batch, q_head, out_batch, out_head;
  i64 k_scale_page, k_scale_slot, k_scale_head, v_scale_page, v_scale_slot, v_scale_head;
  i64 table_batch, slope_batch;
  float scale, softcap;  // of logits in units of log2; with a softcap `scale` goes into the tanh
  int batch, kv_heads, page_size, left, most_pieces;
};

constexpr int PLAIN = 0, E4M3 = 1, INT8 = 2, INT4 = 3;  // KIND
constexpr int ROW_BYTES = KIND == PLAIN ? 2 * D : KIND == INT4 ? D / 2 : D;  // of a key
constexpr int V_ROW_BYTES = KIND == PLAIN ? 2 * DV : KIND == INT4 ? DV / 2 : DV;
constexpr int WIDTH = KIND == PLAIN ? 64 : KIND == INT4 ? 256 : 128;  // numbers in 128 bytes
constexpr int K_CHUNKS = ceil_div(D, WIDTH), V_CHUNKS = ceil_div(DV, WIDTH);
constexpr int KEYS = 16 * SUB;  // of a step
constexpr int THREADS = 32 * WARPS;
constexpr bool TOKEN_SCALES = SCALE_BYTES > 0;

// A warp's ring: each stage has K, V and the scales of a step.
// A row is cut into chunks of 128 bytes; 16 rows of a chunk lie together, their 16-byte pieces swizzled by row.
constexpr int BOX = 16 * 128;
constexpr int K_BYTES = K_CHUNKS * SUB * BOX, V_BYTES = V_CHUNKS * SUB * BOX;
constexpr int LOADED = K_BYTES + V_BYTES;
constexpr int SCALES_AT = WARPS * STAGES * LOADED;  // of K, then of V, for each stage of each warp
constexpr int SCALE_STAGE = 2 * KEYS * SCALE_BYTES;
constexpr int MERGE_AT = SCALES_AT + round_up(WARPS * STAGES * SCALE_STAGE, 16);
constexpr int PITCH = DV + 4;  // floats of a row of sums: no two rows that are written together share banks
constexpr int TOPS_AT = MERGE_AT + WARPS * GROUP * PITCH * 4;  // maximum and weight of each warp's rows
constexpr int STARTS_AT = TOPS_AT + WARPS * GROUP * 8;         // first step of each sequence
constexpr int LENGTHS_AT = STARTS_AT + 4 * (MOST_SEQUENCES + 1);
constexpr int WARP_SUMS_AT = LENGTHS_AT + 4 * MOST_SEQUENCES;
constexpr int QUEUE_AT = WARP_SUMS_AT + 4 * (WARPS + 1);  // pieces of this block: of four in turn
constexpr int BARRIERS_AT = round_up(QUEUE_AT + 4 * 4, 8);
constexpr int MOST_RANGES = WARPS * PITCH;  // so that a factor for each fits where the warps' sums were
static_assert(BARRIERS_AT + 8 * WARPS * STAGES == SHARED_MEMORY, "source.py counts the same bytes");
