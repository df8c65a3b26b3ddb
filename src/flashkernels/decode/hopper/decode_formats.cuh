// K and V as operands, from a warp's ring: chunks of 128 bytes of a row, swizzled.
#pragma once
#include "decode_numbers.cuh"

constexpr int THREADS = 32 * WARPS;
constexpr int HEADS = 1, SPLITS = WARPS, ROWS = GROUP;  // of a block: KV heads, warps of a head, query rows
constexpr int WIDTH = KIND == PLAIN ? 64 : KIND == INT4 ? 256 : 128;  // numbers in 128 bytes
constexpr int K_CHUNKS = ceil_div(D, WIDTH), V_CHUNKS = ceil_div(DV, WIDTH);

// A warp's ring: each stage has K, V and the scales of a step.
// A row is cut into chunks of 128 bytes; 16 rows of a chunk lie together, their 16-byte pieces swizzled by row.
constexpr int BOX = 16 * 128;
constexpr int K_SUB = BOX, V_SUB = BOX;  // from 16 keys of a step to the next
constexpr int K_BYTES = K_CHUNKS * SUB * BOX, V_BYTES = V_CHUNKS * SUB * BOX;
constexpr int LOADED = K_BYTES + V_BYTES;
constexpr int SCALES_AT = WARPS * STAGES * LOADED;  // of K, then of V, for each stage of each warp
constexpr int SCALE_STAGE = 2 * KEYS * SCALE_BYTES;
constexpr int MERGE_AT = SCALES_AT + round_up(WARPS * STAGES * SCALE_STAGE, 16);
constexpr int PITCH = DV + 4;  // floats of a row of sums: no two rows that are written together share banks
constexpr int TOPS_AT = MERGE_AT + WARPS * GROUP * PITCH * 4;  // maximum and weight of each warp's rows
constexpr int STARTS_AT = TOPS_AT + WARPS * GROUP * 8;         // first step of each sequence
constexpr int LENGTHS_AT = STARTS_AT + 4 * (MOST_SEQUENCES + 1);
constexpr int WARP_SUMS_AT = LENGTHS_AT + 4 * MOST_SEQUENCES, ARRIVED_AT = WARP_SUMS_AT;  // one after the other
constexpr int QUEUE_AT = WARP_SUMS_AT + 4 * (WARPS + 1);  // pieces of this block: of four in turn
constexpr int BARRIERS_AT = round_up(QUEUE_AT + 4 * 4, 8);
static_assert(BARRIERS_AT + 8 * WARPS * STAGES == SHARED_MEMORY, "source.py counts the same bytes");

// --- K: steps of 16 columns

// 16-byte pieces that each of the four threads of a row takes of a chunk: two, or one where half of it is empty.
DEVICE constexpr int pieces(int bytes, int chunk) {
  return bytes - chunk * 128 > 64 ? 2 : 1;
}
// k16 steps of a head: a piece of 16 bytes is 2, 4 (bytes) or, of all four threads, 8 (nibbles).
DEVICE constexpr int k_steps() {
  int n = 0;
  for (int c = 0; c < K_CHUNKS; c++) n += pieces(ROW_BYTES, c) * (KIND == PLAIN ? 2 : 4);
  return KIND == INT4 ? 2 * GROUPS : n;
}
constexpr int K_STEPS = k_steps();

// The column of k = 2t + `pair` (k = 2t + 8 + `pair` where UPPER) in step `step`.
DEVICE int column_of(int step, int t, bool upper, int pair) {
  if (KIND == INT4) return step / 2 * 32 + t * 8 + (step & 1) * 2 + upper + 4 * pair;
  constexpr int EACH = KIND == PLAIN ? 2 : 4, PER_PIECE = KIND == PLAIN ? 8 : 16;
  int chunk = 0;
  while (chunk + 1 < K_CHUNKS && step >= 2 * EACH) step -= 2 * EACH, chunk++;
  const int piece = pieces(ROW_BYTES, chunk) * t + step / EACH;
  return chunk * WIDTH + piece * PER_PIECE + step % EACH * 4 + 2 * upper + pair;
}

// Calls use(step, a) with the A operand of every k16 step: 16 keys from `at` on, chunks `SUB * BOX` apart.
template <class Use> DEVICE void each_of_k(u32 at, int lane, Use use) {
  const int row = lane >> 2, t = lane & 3;
  const u32 upper = at + row * 128, lower = upper + 8 * 128;
  if constexpr (KIND == INT4) {
#pragma unroll
    for (int g = 0; g < GROUPS; g++) {  // word t of piece g: a step has columns of one group alone
      const u32 place = (g / 8 * SUB * BOX) + ((g % 8 ^ (row & 7)) << 4) + t * 4;
      u32 x[4], y[4];
      nibbles_to_numbers(load_word(upper + place), x);
      nibbles_to_numbers(load_word(lower + place), y);
#pragma unroll
      for (int half = 0; half < 2; half++) {
        const u32 a[4] = {x[2 * half], y[2 * half], x[2 * half + 1], y[2 * half + 1]};
        use(2 * g + half, a);
      }
    }
  } else {
    int step = 0;
#pragma unroll
    for (int c = 0; c < K_CHUNKS; c++) {
      constexpr int MOST = 2;
      const int own = pieces(ROW_BYTES, c);
#pragma unroll
      for (int i = 0; i < MOST; i++) {
        if (i >= own) continue;
        const u32 place = c * SUB * BOX + (((own * t + i) ^ (row & 7)) << 4);
        const uint4 four = load_shared(upper + place), below = load_shared(lower + place);
        const u32 x[4] = {four.x, four.y, four.z, four.w}, y[4] = {below.x, below.y, below.z, below.w};
        if constexpr (KIND == PLAIN) {
#pragma unroll
          for (int half = 0; half < 2; half++) {
            const u32 a[4] = {x[2 * half], y[2 * half], x[2 * half + 1], y[2 * half + 1]};
            use(step++, a);
          }
        } else {
#pragma unroll
          for (int word = 0; word < 4; word++) {
            u32 a[4];
            bytes_to_numbers<true>(x[word], a[0], a[2]);
            bytes_to_numbers<true>(y[word], a[1], a[3]);
            use(step++, a);
          }
        }
      }
    }
  }
}

// --- V

// Calls use(tile, a) with the A operand of every 16 columns over 16 keys. Bytes pass through the transposition in pairs
// of columns, nibbles in fours.
template <class Use> DEVICE void each_of_v(u32 at, int lane, Use use) {
  const int key = (lane & 7) + (lane >> 4 & 1) * 8, second = lane >> 3 & 1;
#pragma unroll
  for (int pair = 0; pair < V_PAIRS; pair++) {
    const int piece = 2 * (pair % 4) + second;
    u32 x[4];
    load_transposed(x, at + pair / 4 * SUB * BOX + key * 128 + ((piece ^ (key & 7)) << 4));
    operands_of_v(pair, x, use);
  }
}

// --- what a warp asks of the layout

// Where the scales of a key are: `at` is where those of all keys of the step begin.
DEVICE u32 scale_place(u32 at, int key, int head) { return at + key * SCALE_BYTES + (KIND == INT4 ? 0 : head % 2 * 2); }
// Four numbers of a query row, as k = 2t, 2t + 1 and 2t + 8, 2t + 9 of step `step` want them (INT4: of two steps).
DEVICE u64 four_queries(const u16* row, bool inside, int step, int t) {
  const int column = KIND == INT4 ? step / 2 * 32 + t * 8 + step % 2 * 4 : column_of(step, t, false, 0);
  return inside && column < D ? *(const u64*)(row + column) : 0;
}
// V's rows that nobody may see become 0: their weight is 0, but 0 * NaN is NaN.
DEVICE void clear_hidden(u32 v, int key, int lowest, int length, int lane) {
#pragma unroll 1
  for (int i = lane; i < V_CHUNKS * KEYS * 8; i += 32) {
    const int row = key + i / 8 % KEYS;
    if (row < length && row >= lowest) continue;
    asm volatile("st.shared.v4.u32 [%0], {%1, %1, %1, %1};" ::"r"(v + i * 16), "r"(0) : "memory");
  }
  __syncwarp();
}
