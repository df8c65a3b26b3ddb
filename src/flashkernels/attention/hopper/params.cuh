// What the host passes to the kernel (forward.py packs the same struct), and what lies where in shared memory.
#pragma once
#include "tma.cuh"

struct Strides { i64 batch, seq, head; };  // in elements

struct Params {
  TensorMap q, q_rest, k, k_rest, v;  // *_rest: the last, narrower chunk of columns
  u16* out;
  float* lse;                               // null: not wanted
  int* counters;                            // zero at launch, and zero again at its end
  const void *q_data, *k_data, *v_data;     // for the careful path alone
  // what only some variants have
  const float *slopes, *sinks;
  const int *cu_q, *cu_k;                   // ragged batch,
  int* order;                               // first tile of each sequence, longest first, and which sequence that is
  const int* pages;                         // block table of a paged cache
  float* partial;                           // split: unnormalised outputs, reference maxima and sums
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
  int blocks, tiles, section;  // query blocks of a head, all tiles, heads that are worked on side by side
  int splits;
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
constexpr int THREADS = 128 * (GROUPS + 1);
constexpr int BOX = PAGED ? gcd(BLOCK_N, 64) : BLOCK_N / CLUSTER;  // key rows that one load brings

// Shared memory, in bytes. Swizzled tiles start at multiples of 1024.
// A chunk is K_WIDTH or V_WIDTH bytes wide. V lies as it is in memory; of FP8, whose wgmma has no transposing operand,
// it is the transpose: DV rows of keys.
constexpr int K_ROW = K_WIDTH * K_CHUNKS + K_REST;
constexpr int V_ROWS = FP8 ? DV : BLOCK_N;
constexpr int Q_BYTES = QUERIES * PACK * K_ROW;
constexpr int Q_TILE = round_up(64 * K_ROW, 1024);
constexpr int K_BYTES = BLOCK_N * K_ROW;
constexpr int K_TILE = round_up(K_BYTES, 1024);
constexpr int V_BYTES = V_ROWS * V_WIDTH * V_CHUNKS;
constexpr int V_TILE = round_up(V_BYTES, 1024);
constexpr int Q_AT = 0;
constexpr int K_AT = Q_TILE * GROUPS * Q_STAGES;
constexpr int V_AT = K_AT + K_TILE * STAGES;
constexpr int Q_FULL = V_AT + V_TILE * STAGES;  // barriers, 8 bytes each
constexpr int Q_EMPTY = Q_FULL + 8 * GROUPS * Q_STAGES;
constexpr int K_FULL = Q_EMPTY + 8 * GROUPS * Q_STAGES;
constexpr int K_EMPTY = K_FULL + 8 * STAGES;
constexpr int V_FULL = K_EMPTY + 8 * STAGES;
constexpr int V_EMPTY = V_FULL + 8 * STAGES;
constexpr int WORK_FULL = V_EMPTY + 8 * STAGES;
constexpr int WORK_EMPTY = WORK_FULL + 16;
constexpr int WORK_AT = round_up(WORK_EMPTY + 16, 16);  // two tiles, 32 bytes each
constexpr int POISONED_AT = WORK_AT + 64;               // one int for each consumer warp
constexpr int SHARED_BYTES = POISONED_AT + 16 * GROUPS;
static_assert(SHARED_BYTES == SHARED_MEMORY, "forward.py and params.cuh disagree about shared memory");
static_assert(CLUSTER == 1 || !(BAND || RAGGED || SPLIT), "only full, dense attention runs in clusters");

// The k-th step of Q·Kᵀ in a Q or K tile of `rows` rows: where its chunk starts, at which byte of a row it is, and how
// wide the chunk is.
__host__ __device__ constexpr int step_chunk(int k, int rows) {
  return k * 32 < K_WIDTH * K_CHUNKS ? k * 32 / K_WIDTH * rows * K_WIDTH : K_CHUNKS * rows * K_WIDTH;
}
__host__ __device__ constexpr int step_byte(int k) {
  return k * 32 < K_WIDTH * K_CHUNKS ? k * 32 % K_WIDTH : k * 32 - K_WIDTH * K_CHUNKS;
}
__host__ __device__ constexpr int step_width(int k) { return k * 32 < K_WIDTH * K_CHUNKS ? K_WIDTH : K_REST; }
// The same of P·V.
__host__ __device__ constexpr int value_step(int k) {
  return FP8 ? k * 32 / V_WIDTH * V_ROWS * V_WIDTH + k * 32 % V_WIDTH : k * 16 * V_WIDTH;
}
