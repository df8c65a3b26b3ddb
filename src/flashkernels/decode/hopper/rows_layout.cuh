// K and V as operands, from stages that all warps of a block share: whole rows of HEADS heads, as they lie in memory.
//
// A token's row is one bulk copy. Rows are an odd multiple of 16 bytes apart, so that the 8 that `ldmatrix` reads at a
// time lie in different banks; nothing is swizzled. Both operands come by `ldmatrix`, V transposed.
#pragma once
#include "decode_numbers.cuh"

constexpr int THREADS = 32 * (WARPS + 1);  // the last warp loads
constexpr int SPLITS = WARPS / HEADS;      // warps of a head, which take its steps in turn
constexpr int ROWS = HEADS * GROUP;        // query rows of a block

constexpr int pitch_of(int bytes) { return bytes % 32 ? bytes : bytes + 16; }
constexpr int K_WIDE = HEADS * ROW_BYTES, V_WIDE = HEADS * V_ROW_BYTES;  // a token's row of all the block's heads
constexpr int K_PITCH = pitch_of(K_WIDE), V_PITCH = pitch_of(V_WIDE);
constexpr int K_SUB = 16 * K_PITCH, V_SUB = 16 * V_PITCH;  // from 16 keys of a step to the next
constexpr int SCALE_PITCH = SCALE_HEADS * SCALE_BYTES;     // of a key, all heads: 16 keys lie together
constexpr int K_BYTES = SUB * K_SUB, V_BYTES = SUB * V_SUB, SCALE_STAGE = KEYS * SCALE_PITCH;
constexpr int STAGE = K_BYTES + V_BYTES + 2 * SCALE_STAGE;
constexpr int COPIED = KEYS * HEADS * (ROW_BYTES + V_ROW_BYTES) + 2 * SCALE_STAGE;  // bytes that arrive in one

constexpr int MERGE_AT = STAGES * STAGE;
constexpr int PITCH = DV + 4;  // floats of a row of sums: no two rows that are written together share banks
constexpr int TOPS_AT = MERGE_AT + WARPS * GROUP * PITCH * 4;  // maximum and weight of each warp's rows
constexpr int STARTS_AT = TOPS_AT + WARPS * GROUP * 8;         // first step of each sequence
constexpr int LENGTHS_AT = STARTS_AT + 4 * (MOST_SEQUENCES + 1);
constexpr int WARP_SUMS_AT = LENGTHS_AT + 4 * MOST_SEQUENCES;
constexpr int ARRIVED_AT = WARP_SUMS_AT + 4 * (WARPS + 1);
constexpr int FULL_AT = round_up(ARRIVED_AT + 4, 8);  // barriers from here on
constexpr int EMPTY_AT = FULL_AT + 8 * STAGES;
constexpr int MERGED_AT = EMPTY_AT + 8 * STAGES;
static_assert(MERGED_AT + 8 == SHARED_MEMORY, "source.py counts the same bytes");
static_assert(WARPS % HEADS == 0, "as many warps for each head");
// A wait is for a parity, and copies land out of order: who waits for a stage must know that its use before is over. So
// the uses of a stage in a part are one warp's; those in the parts before were over when the block met.
static_assert(STAGES % SPLITS == 0, "within a part, a stage belongs to one warp of each head");

// --- K: steps of 16 columns

constexpr int K_PIECES = ROW_BYTES / 16;
constexpr int K_STEPS = KIND == PLAIN ? ceil_div(K_PIECES, 2) : KIND == INT4 ? 2 * GROUPS : K_PIECES;

DEVICE void load_four(u32 (&x)[4], u32 at) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(x[0]), "=r"(x[1]), "=r"(x[2]), "=r"(x[3]) : "r"(at) : "memory");
}
DEVICE void load_two(u32 (&x)[4], u32 at) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x2.shared.b16 {%0, %1}, [%2];"
               : "=r"(x[0]), "=r"(x[1]) : "r"(at) : "memory");
  x[2] = x[3] = 0;
}

// Calls use(step, a) with the A operand of every k16 step: 16 keys from `at` on.
// Two pieces of 16 bytes a load: of the first, a thread has words of the rows lane / 4 and lane / 4 + 8 in x[0] and x[1].
template <class Use> DEVICE void each_of_k(u32 at, int lane, Use use) {
  const u32 from = at + (lane & 15) * K_PITCH + (lane >> 4) * 16;
#pragma unroll
  for (int piece = 0; piece < K_PIECES; piece += 2) {
    u32 x[4];
    if (piece + 1 < K_PIECES) load_four(x, from + piece * 16);
    else load_two(x, from + piece * 16 - (lane >> 4) * 16);
    if constexpr (KIND == PLAIN) {
      use(piece / 2, x);
    } else {
#pragma unroll
      for (int i = 0; i < 2; i++) {
        if (piece + i >= K_PIECES) continue;
        if constexpr (KIND == INT4) {  // a piece is a group
          u32 y[4], z[4];
          nibbles_to_numbers(x[2 * i], y);
          nibbles_to_numbers(x[2 * i + 1], z);
#pragma unroll
          for (int half = 0; half < 2; half++) {
            const u32 a[4] = {y[2 * half], z[2 * half], y[2 * half + 1], z[2 * half + 1]};
            use(2 * (piece + i) + half, a);
          }
        } else {
          u32 a[4];
          bytes_to_numbers<true>(x[2 * i], a[0], a[2]);
          bytes_to_numbers<true>(x[2 * i + 1], a[1], a[3]);
          use(piece + i, a);
        }
      }
    }
  }
}

// Four numbers of a query row, as k = 2t, 2t + 1 and 2t + 8, 2t + 9 of step `step` want them (INT4: of two steps).
DEVICE u64 four_queries(const u16* row, bool inside, int step, int t) {
  if constexpr (KIND == PLAIN) {
    const u32* pair = (const u32*)(row + step * 16 + 2 * t);
    const u32 low = inside ? *pair : 0, high = inside && step * 16 + 8 < D ? pair[4] : 0;
    return low | (u64)high << 32;
  } else {
    const int column = KIND == INT4 ? step / 2 * 32 + t * 8 + step % 2 * 4 : step * 16 + 4 * t;
    return inside ? *(const u64*)(row + column) : 0;
  }
}

// --- V: tiles of 16 columns

// Calls use(tile, a) with the A operand of every 16 columns over 16 keys. Bytes pass through the transposition in pairs
// of columns, nibbles in fours. An odd last piece comes with what lies behind it: columns that nobody writes.
template <class Use> DEVICE void each_of_v(u32 at, int lane, Use use) {
  const int row = (lane & 7) + (lane >> 4 & 1) * 8;
  const u32 from = at + row * V_PITCH + (lane >> 3 & 1) * 16;
#pragma unroll
  for (int pair = 0; pair < V_PAIRS; pair++) {
    u32 x[4];
    load_transposed(x, from + pair * 32);
    operands_of_v(pair, x, use);
  }
}

// V's rows that nobody may see become 0: their weight is 0, but 0 * NaN is NaN. `v` is where this head's columns begin.
DEVICE void clear_hidden(u32 v, int key, int lowest, int length, int lane) {
  constexpr int PIECES = V_ROW_BYTES / 16;
#pragma unroll 1
  for (int i = lane; i < KEYS * PIECES; i += 32) {
    const int token = i / PIECES;
    if (key + token < length && key + token >= lowest) continue;
    const u32 to = v + token * V_PITCH + i % PIECES * 16;
    asm volatile("st.shared.v4.u32 [%0], {%1, %1, %1, %1};" ::"r"(to), "r"(0) : "memory");
  }
  __syncwarp();
}

// Where the scales of a key are: `at` is where those of this head and the step's first key begin.
DEVICE u32 scale_place(u32 at, int key, int head) { return at + key * SCALE_PITCH; }
