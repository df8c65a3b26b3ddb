// What the host passes to the kernels (gemm.py packs the same struct), and what lies where in shared memory.
#pragma once
#include "tma.cuh"

struct Params {
  TensorMap w, x;              // (depth, features, halves, experts) and (depth, rows, 1, 1), innermost first
  u16* out;                    // [rows, width]
  const char* tokens;          // gather: what is copied,
  char* gathered;              // and to where
  const int *offsets, *permutation, *inverse;  // of the plan
  const float *bias, *row_weights;
  const float* token_scales;   // gather: those of tokens,
  float* x_scales;             // and of the rows of x, where they end up
  const float* w_scales;       // [experts, features]
  int* counters;               // zero at launch, and zero again at its end
  i64 stride_tokens;           // bytes
  int experts, width, depth, of_token;
  int features;                // tiles of features of a cluster
  int step, half;              // from one feature of bias and scales to the next, and from gate to up
  int token_count, row_warps;  // rows of x that are rounded, and warps that share one
};

constexpr int THREADS = 384;          // a producer warpgroup and two consumers
constexpr int CONSUMERS = 8 * CLUSTER;  // warps that multiply
constexpr int GRANULE = 8;            // rows: tiles have a multiple of them, MOST at most
constexpr int STEP = INT8 ? 2 : 1;    // granules: INT8's N is 16, 32, 48 and so on, and what is too much is not stored
constexpr int TOGETHER = 8;           // row tiles that walk over the features side by side
constexpr int ROW_BYTES = 128;        // of a stage: a swizzled row
constexpr int ELEMENT = FP8 || INT8 ? 1 : 2;  // bytes
constexpr int DEPTH = ROW_BYTES / ELEMENT;
constexpr bool SCALED = FP8 || INT8;  // rows of x and of the weights have scales
constexpr int SHARE = GATED ? 64 : 128;  // columns of the output that a consumer makes; 64 need 64 of gate and 64 of up
constexpr int WEIGHTS = 128 * ROW_BYTES;  // bytes of a stage, of each consumer
constexpr int BOX_ROWS = 16;          // that one load brings
constexpr int BOX = BOX_ROWS * ROW_BYTES;
constexpr int STAGE = 2 * WEIGHTS + MOST * GRANULE * ROW_BYTES;
constexpr int FULL = STAGE * STAGES;  // barriers, 8 bytes each
constexpr int EMPTY = FULL + 8 * STAGES;
constexpr int WORK_FULL = EMPTY + 8 * STAGES;
constexpr int WORK_EMPTY = WORK_FULL + 16;
constexpr int WORK_AT = WORK_EMPTY + 16;  // two tiles, 32 bytes each
constexpr int SUMS_AT = WORK_AT + 64;     // 16 ints
constexpr int TABLE_AT = SUMS_AT + 64;    // row tiles before those of each expert
constexpr int SHARED_BYTES = TABLE_AT + 4 * MOST_EXPERTS;
static_assert(SHARED_BYTES == SHARED_MEMORY, "gemm_source.py and gemm_params.cuh disagree about shared memory");
static_assert(WORK_AT % 16 == 0 && MOST % 4 == 0 && MOST <= 24 && !(FUSED && (CLUSTER > 1 || AHEAD)));
