// What the host passes to the kernels of the backward (backward.py packs the same struct), and what operands are cut
// into.
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

constexpr int THREADS = 384;
constexpr int ROW = 128;  // bytes of a chunk's row: 64 columns, swizzled; columns past the head's end are zeros
constexpr int K_CHUNKS = ceil_div(D, 64), V_CHUNKS = ceil_div(DV, 64);
constexpr int K_STEPS = ceil_div(D, 16), V_STEPS = ceil_div(DV, 16);  // one wgmma reduces over 16
constexpr int SUMS = BLOCK * (TALL ? round_up(D, 16) : D);  // of a block's dQ

// The k-th step along the columns of a tile of `rows` rows, in bytes; and along its rows.
__host__ __device__ constexpr int column_step(int k, int rows) { return k / 4 * rows * ROW + k % 4 * 32; }
__host__ __device__ constexpr int row_step(int k) { return k * 16 * ROW; }
