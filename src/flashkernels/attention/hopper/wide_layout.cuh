// What lies where in shared memory for wide heads, in bytes: layout.cuh of wide.cu.
#pragma once

// Both consumer warpgroups have the same 64 rows. Of each pair of key tiles each takes one for its scores, and of O and
// V its own O_COLUMNS.
constexpr int CONSUMERS = 2;
constexpr int THREADS = 128 * (CONSUMERS + 1);

// The ring of a warpgroup. A slot is GRAIN chunks of K (64 keys x 64 columns), or 16 * GRAIN keys of V.
constexpr int V_ROWS = 16 * GRAIN;
constexpr int K_SLOTS = ceil_div(K_CHUNKS, GRAIN);  // of one key tile
constexpr int V_SLOTS = BLOCK_N / V_ROWS;
constexpr int CHUNK = BLOCK_N * 128;
constexpr int SLOT = CHUNK * GRAIN;
constexpr int V_BYTES = V_ROWS * 128 * V_CHUNKS;
// Slots that a warpgroup holds because their products still run: SHORT while it waits for more, LAG while it makes
// exponentials. By then its own P must be free, so LAG is at most what the other's P takes.
constexpr int LAG = V_SLOTS;
constexpr int SHORT = K_SLOTS < 2 / GRAIN ? K_SLOTS : 2 / GRAIN;

constexpr int K_ROWS = BLOCK_N / CLUSTER;  // that one block of a cluster loads of a tile of K
constexpr int Q_TILE = K_CHUNKS * CHUNK, Q_BYTES = QUERIES * PACK * 128 * K_CHUNKS;
constexpr int Q_AT = 0;
constexpr int P_AT = Q_TILE;  // [warpgroup], 64 rows x 64 keys
constexpr int RING_AT = P_AT + CONSUMERS * CHUNK;
constexpr int Q_FULL = RING_AT + CONSUMERS * STAGES * SLOT;  // barriers, 8 bytes each
constexpr int Q_EMPTY = Q_FULL + 8;
constexpr int SLOT_FULL = Q_EMPTY + 8;  // [warpgroup][STAGES]
constexpr int SLOT_EMPTY = SLOT_FULL + 8 * CONSUMERS * STAGES;
constexpr int WORK_FULL = SLOT_EMPTY + 8 * CONSUMERS * STAGES;
constexpr int WORK_EMPTY = WORK_FULL + 16;
constexpr int WORK_AT = WORK_EMPTY + 16;            // two tiles, 32 bytes each
constexpr int MAXIMA_AT = WORK_AT + 64;             // [warpgroup][64 rows], floats that they exchange
constexpr int TOTALS_AT = MAXIMA_AT + 256 * CONSUMERS;
constexpr int POISONED_AT = TOTALS_AT + 256 * CONSUMERS;  // one int for each consumer warp
constexpr int SHARED_BYTES = POISONED_AT + 16 * CONSUMERS;
static_assert(SHARED_BYTES == SHARED_MEMORY, "wide_source.py and wide_layout.cuh disagree about shared memory");
static_assert(V_BYTES <= SLOT && V_CHUNKS * 64 >= O_COLUMNS, "V does not fit its slot");
static_assert(STAGES > LAG, "a warpgroup would wait for a slot that it holds itself");
static_assert(BLOCK_N == 64 && GROUPS == 1 && Q_STAGES == 1 && !(FP8 || SPLIT), "what wide heads do not have");
static_assert(WORK_AT % 16 == 0 && RING_AT % 1024 == 0, "alignment");
