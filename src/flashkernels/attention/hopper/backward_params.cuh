// What the host passes to the kernels of the backward (backward.py packs the same struct), and what lies where in
// shared memory.
#pragma once
#include "stores.cuh"

struct Strides { i64 batch, seq, head; };  // in elements

struct Params {
  TensorMap q, k, v, grad_out;  // boxes of 64 columns
  TensorMap dk_rows, dv_rows;   // where the copy engine writes them: of a warp's 16 keys
  const void *q_data, *k_data, *v_data, *out, *grad_out_data;
  const float *lse, *grad_lse;  // grad_lse may be null
  u16 *dq, *dk, *dv;            // null: not wanted
  float* row_delta;             // delta, laid out like lse: for the gradient of the sinks; null: not wanted
  float *level, *delta, *sums;  // of each place: made by `rows`, read by `backward`; sums: dQ, in fragment order
  int* poisoned;                // query blocks whose Q or dO may have a NaN or Inf,
  void* bad_keys;               // and keys whose K has one: by `keys`, for `gradient_of_queries`
  int* counters;                // zero at launch, and zero again at its end
  // what only some variants have
  const float* slopes;
  const int *cu_q, *cu_k;       // ragged batch,
  int* order;                   // first tile of each sequence, longest first, and which sequence that is
  Strides q_strides, k_strides, v_strides, out_strides, grad_out_strides, dq_strides, dk_strides, dv_strides;
  i64 lse_batch, lse_head, slope_batch;
  i64 grad_lse_batch, grad_lse_head, grad_lse_seq;
  float scale, softcap;  // in units of log2: scale * log2(e); softcap likewise, with scale / softcap in `scale`
  float grad_scale;      // what dQ and dK are still to be multiplied by
  int batch, heads, group, kv_heads;  // heads of q; group: how many share a key head
  int seq_q, seq_k, total_q, total_k_rows;  // total_k_rows: in a sequence, or of a ragged batch
  int left, right;              // window
  int blocks, key_blocks;       // query blocks of a head, and its key blocks, or clusters of them
  int places;                   // rows of all heads' query blocks
  int tiles, section;           // all tiles; key heads that are worked on side by side
  int own_blocks, bad_blocks;   // blocks of a head: of 128 queries in `gradient_of_queries`, of 64 keys in `bad_keys`
  int has_sinks;
};

constexpr bool BAND = LEFT || RIGHT;
constexpr bool HIDES = BAND || VARLEN;  // some loaded rows may not see some loaded keys
constexpr bool LOOKS_LATE = HIDES && LATE_LOOK;
static_assert(!PAIRED || !LATE_LOOK, "a pair looks at a tile's start");

constexpr int THREADS = 384;
// Arrivals that give back a block of Q or dO: of a cluster, from each block's warps.
constexpr int ROWS_RELEASES = CLUSTER == 1 ? 8 * RELEASES : 8 * CLUSTER;
static_assert(CLUSTER == 1 || !HIDES, "under a mask, the blocks of a cluster would not see the same queries");
static_assert(BLOCK / CLUSTER % 8 == 0, "a part of a swizzled tile starts at a multiple of 1024 bytes");
constexpr int ROW = 128;  // bytes of a chunk's row: 64 columns, swizzled; columns past the head's end are zeros
constexpr int K_CHUNKS = ceil_div(D, 64), V_CHUNKS = ceil_div(DV, 64);
constexpr int K_STEPS = ceil_div(D, 16), V_STEPS = ceil_div(DV, 16);  // one wgmma reduces over 16

// Shared memory, in bytes. Swizzled tiles start at multiples of 1024.
constexpr int K_TILE = KEYS * ROW * K_CHUNKS, V_TILE = KEYS * ROW * V_CHUNKS;
constexpr int Q_TILE = BLOCK * ROW * K_CHUNKS, O_TILE = BLOCK * ROW * V_CHUNKS;
constexpr int DS_TILE = BLOCK * KEYS * 2;
constexpr int STATISTICS = BLOCK * 4;
constexpr int SUMS = BLOCK * (TALL ? round_up(D, 16) : D);  // of a block's dQ
constexpr int K_AT = 0;
constexpr int V_AT = K_AT + K_TILE;
constexpr int Q_AT = V_AT + V_TILE;
constexpr int O_AT = Q_AT + Q_TILE * Q_STAGES;  // two buffers of dO,
constexpr int DS_AT = O_AT + O_TILE * 2;        // and of dS
constexpr int P_AT = DS_AT + DS_TILE * 2;       // paired: P on its way from one warpgroup to the other
constexpr int STAGE_AT = P_AT + (PAIRED ? 128 * BLOCK : 0);  // staged: dQ on its way to memory
constexpr int STAGED_BYTES = 64 * DQ_COLUMNS;                // of a warp
constexpr int LEVEL_AT = STAGE_AT + (STAGED ? 8 * STAGED_BYTES : 0);
constexpr int DELTA_AT = LEVEL_AT + STATISTICS * Q_STAGES;
constexpr int K_FULL = DELTA_AT + STATISTICS * 2;  // barriers, 8 bytes each
constexpr int V_FULL = K_FULL + 8;
constexpr int KV_EMPTY = V_FULL + 8;
constexpr int RAW = KV_EMPTY + 8;  // a block that the producer has to look through first
constexpr int P_FULL = RAW + 8;
constexpr int P_EMPTY = P_FULL + 8;
constexpr int Q_FULL = P_EMPTY + 8;
constexpr int Q_EMPTY = Q_FULL + 8 * Q_STAGES;
constexpr int O_FULL = Q_EMPTY + 8 * Q_STAGES;
constexpr int O_EMPTY = O_FULL + 16;
constexpr int DS_FULL = O_EMPTY + 16;
constexpr int DS_EMPTY = DS_FULL + 16;
constexpr int WORK_FULL = DS_EMPTY + 16;
constexpr int WORK_EMPTY = WORK_FULL + 16;
constexpr int WORK_AT = round_up(WORK_EMPTY + 16, 16);  // two tiles, 32 bytes each
constexpr int BAD_AT = WORK_AT + 64;                    // a bit for each key
constexpr int SHARED_BYTES = BAD_AT + 16;
static_assert(SHARED_BYTES == SHARED_MEMORY, "backward_source.py and backward_params.cuh disagree about shared memory");

// The k-th step along the columns of a tile of `rows` rows, in bytes; and along its rows.
__host__ __device__ constexpr int column_step(int k, int rows) { return k / 4 * rows * ROW + k % 4 * 32; }
__host__ __device__ constexpr int row_step(int k) { return k * 16 * ROW; }
