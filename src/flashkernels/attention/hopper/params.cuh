// What the host passes to the kernel (forward.py packs the same struct), and sizes that follow from the variant.
#pragma once
#include "stores.cuh"

struct Strides { i64 batch, seq, head; };  // in elements

struct Params {
  TensorMap q, q_rest, k, k_rest, v;  // *_rest: the last, narrower chunk of columns
  TensorMap o;                        // where outputs go through shared memory
  u16* out;
  float* lse;                               // null: not wanted
  int* counters;                            // zero at launch, and zero again at its end
  const void *q_data, *k_data, *v_data;     // for the careful path alone
  // what only some variants have
  const float *slopes, *sinks;
  const int *cu_q, *cu_k;                   // ragged batch,
  int* order;                               // first tile of each sequence, longest first, and which sequence that is
  const int* pages;                         // block table of a paged cache
  float* partial;                           // cut tiles: unnormalised outputs, reference maxima and sums
  const float *q_scale, *k_scale, *v_scale; // FP8,
  unsigned char* values;                    // whose V is transposed first
  Strides q_strides, k_strides, v_strides, out_strides;
  i64 lse_batch, lse_head, slope_batch;
  int q_blocks, k_blocks;  // FP8: scales of a head, one for each 128 rows; 0: one for all
  int values_row;  // keys of a row of `values`
  float scale, softcap;  // in units of log2: scale * log2(e); softcap likewise, with scale / softcap in `scale`
  int batch, heads, group;  // heads: of q, in packs of PACK; group: packs that share a key head
  int seq_q, seq_k;
  int left, right;  // window
  int blocks, tiles, section;  // query blocks of a head, what blocks draw, heads that are worked on side by side
  int whole, cut, shares;  // tiles of one block each; tiles that are cut along their keys, and blocks that share them
  int page_size, max_pages;
};

constexpr bool BAND = LEFT || RIGHT;
constexpr bool RAGGED = VARLEN || PAGED;
constexpr bool TRANSFORMED = SOFTCAP || ALIBI || NEGATIVE;  // scores are turned into logits before the softmax

constexpr int ELEMENT = FP8 ? 1 : 2;  // bytes
// One wgmma reduces over 32 bytes: 16 elements, or 32 of FP8.
constexpr int QK_STEPS = ceil_div(D * ELEMENT, 32);
constexpr int PV_STEPS = BLOCK_N * ELEMENT / 32;
constexpr int P_WORDS = BLOCK_N * ELEMENT / 8;  // registers of P
constexpr int QUERIES = 64 / PACK;  // query positions of a warpgroup's 64 rows: PACK heads of each
constexpr int BLOCK_Q = QUERIES * GROUPS;
constexpr int BOX = PAGED ? gcd(BLOCK_N, 64) : BLOCK_N / CLUSTER;  // key rows that one load brings

#include "layout.cuh"
