// What lies where in shared memory, in bytes. Included by params.cuh; wide heads have wide_layout.cuh in its place.
#pragma once

constexpr int THREADS = 128 * (GROUPS + 1);

// Swizzled tiles start at multiples of 1024.
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
constexpr int OUT_AT = V_AT + V_TILE * STAGES;  // outputs on their way to memory, warp by warp
constexpr int Q_FULL = OUT_AT + ROWS_CHUNK * OUT_CHUNKS * 4 * GROUPS;  // barriers, 8 bytes each
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
static_assert(!OUT_CHUNKS || (PACK == 1 && !VARLEN), "a box of outputs is of one head, and ends with the tensor");
static_assert(CLUSTER == 1 || !(LEFT || RAGGED), "only dense attention without a left end runs in clusters");

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
