// What lies where in the shared memory of `backward`, in bytes. Swizzled tiles start at multiples of 1024.
#pragma once
#include "backward_params.cuh"

// Arrivals that give back a block of Q or dO: of a cluster, from each block's warps.
constexpr int ROWS_RELEASES = CLUSTER == 1 ? 8 * RELEASES : 8 * CLUSTER;
static_assert(!SKIPS || (RIGHT && !PAIRED), "only of warpgroups with other keys does one see less");
static_assert(CLUSTER == 1 || !HIDES, "under a mask, the blocks of a cluster would not see the same queries");
static_assert(BLOCK / CLUSTER % 8 == 0, "a part of a swizzled tile starts at a multiple of 1024 bytes");

constexpr int K_TILE = KEYS * ROW * K_CHUNKS, V_TILE = KEYS * ROW * V_CHUNKS;
constexpr int Q_TILE = BLOCK * ROW * K_CHUNKS, O_TILE = BLOCK * ROW * V_CHUNKS;
constexpr int DS_TILE = BLOCK * KEYS * 2;
constexpr int STATISTICS = BLOCK * 4;
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
static_assert(SHARED_BYTES == SHARED_MEMORY, "backward_source.py and backward_layout.cuh disagree about shared memory");
