// Stored numbers as operands of the tensor cores.
//
// Products are on their side: Sᵀ = K·Qᵀ and Oᵀ = Vᵀ·Pᵀ with m16n8k16, so that stored numbers are the A operand and 8
// query rows, not 16, are the least. Which column of a head is which k of a product is free as long as K and Q agree:
// each thread takes 16 contiguous bytes of a key's row at a time, wherever they are, and Q is loaded to match.
#pragma once
#include "decode_params.cuh"

DEVICE void mma(float (&d)[4], const u32 (&a)[4], u32 b0, u32 b1) {
  if (FP16)
    asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
                 : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
  else
    asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
                 : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}
DEVICE u32 transposed(u32 x) {  // of 8 x 8 elements of 16 bits, a row in four lanes
  u32 y;
  asm volatile("movmatrix.sync.aligned.m8n8.trans.b16 %0, %1;" : "=r"(y) : "r"(x));
  return y;
}
DEVICE uint4 load_shared(u32 at) {
  uint4 x;
  asm volatile("ld.shared.v4.u32 {%0, %1, %2, %3}, [%4];"
               : "=r"(x.x), "=r"(x.y), "=r"(x.z), "=r"(x.w) : "r"(at) : "memory");
  return x;
}
DEVICE u32 load_word(u32 at) {
  u32 x;
  asm volatile("ld.shared.u32 %0, [%1];" : "=r"(x) : "r"(at) : "memory");
  return x;
}
DEVICE void load_transposed(u32 (&x)[4], u32 at) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(x[0]), "=r"(x[1]), "=r"(x[2]), "=r"(x[3]) : "r"(at) : "memory");
}

// --- numbers of fp16 from bytes and nibbles

DEVICE u32 subtracted(u32 x, u32 y) {
  u32 z;
  asm("sub.rn.f16x2 %0, %1, %2;" : "=r"(z) : "r"(x), "r"(y));
  return z;
}
DEVICE u32 multiplied_added(u32 x, u32 y, u32 z) {
  u32 r;
  asm("fma.rn.f16x2 %0, %1, %2, %3;" : "=r"(r) : "r"(x), "r"(y), "r"(z));
  return r;
}
template <int MASK> DEVICE u32 low_bits_of_1024(u32 x) {  // (x & MASK) | 1024.0 twice
  u32 r;
  asm("lop3.b32 %0, %1, %2, %3, 0xea;" : "=r"(r) : "r"(x), "n"(MASK), "r"(0x64006400));
  return r;
}
// Two of the four bytes of a word, chosen by SELECT as prmt does: their sign bits are flipped by the caller.
template <u32 SELECT> DEVICE u32 from_int8(u32 x) {  // 1024 + 128 + n, less 1152
  return subtracted(__byte_perm(x, 0x64646464, SELECT), 0x64806480);
}
DEVICE u32 from_e4m3(u16 x) {
  u32 r;
  asm("cvt.rn.f16x2.e4m3x2 %0, %1;" : "=r"(r) : "h"(x));
  return r;
}

// Four bytes as two pairs of numbers. ALONG: bytes 0 and 1, then 2 and 3; else 0 and 2, then 1 and 3.
template <bool ALONG> DEVICE void bytes_to_numbers(u32 x, u32& first, u32& second) {
  if (KIND == INT8) {
    x ^= 0x80808080;
    first = from_int8<ALONG ? 0x4140 : 0x4240>(x);
    second = from_int8<ALONG ? 0x4342 : 0x4341>(x);
  } else {
    if (!ALONG) x = __byte_perm(x, 0, 0x3120);
    first = from_e4m3((u16)x);
    second = from_e4m3((u16)(x >> 16));
  }
}
// Eight nibbles as four pairs: nibble i with nibble i + 4, which of two words of 16 bits is the same nibble.
DEVICE void nibbles_to_numbers(u32 x, u32 (&to)[4]) {
  constexpr u32 SIXTEENTH = 0x2c002c00, MINUS_72 = 0xd480d480, FROM_1032 = 0x64086408;
  x ^= 0x88888888;
  to[0] = subtracted(low_bits_of_1024<0x000f000f>(x), FROM_1032);
  to[1] = multiplied_added(low_bits_of_1024<0x00f000f0>(x), SIXTEENTH, MINUS_72);
  x >>= 8;
  to[2] = subtracted(low_bits_of_1024<0x000f000f>(x), FROM_1032);
  to[3] = multiplied_added(low_bits_of_1024<0x00f000f0>(x), SIXTEENTH, MINUS_72);
}

// --- K: steps of 16 columns

// 16-byte pieces that each of the four threads of a row takes of a chunk: two, or one where half of it is empty.
DEVICE constexpr int pieces(int bytes, int chunk) {
  return bytes - chunk * 128 > 64 ? 2 : 1;
}
constexpr int GROUPS = KIND == INT4 ? ceil_div(D, 32) : 1;  // that have a scale of their own
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

// --- V: tiles of 16 columns

constexpr int V_PAIRS = ceil_div(V_ROW_BYTES, 32);         // of 16-byte pieces
constexpr int PER_PAIR = KIND == PLAIN ? 1 : KIND == INT4 ? 4 : 2;  // tiles that they give
constexpr int V_TILES = V_PAIRS * PER_PAIR;
constexpr int V_GROUPS = KIND == INT4 && TOKEN_SCALES ? ceil_div(DV, 32) : 1;

// The column of row `row` (0 to 15) of tile `tile` of Oᵀ.
DEVICE int column_of_output(int tile, int row) {
  const int pair = tile / PER_PAIR, phase = tile % PER_PAIR;
  if (KIND == PLAIN) return pair * 16 + row;
  if (KIND == INT4) return (2 * pair + phase / 2) * 32 + (row & 7) * 4 + phase % 2 * 2 + (row >> 3);
  return pair * 32 + (row >> 3) * 16 + (row & 7) * 2 + phase;
}

// Calls use(tile, a) with the A operand of every 16 columns over 16 keys. Bytes pass through the transposition in pairs
// of columns, nibbles in fours.
template <class Use> DEVICE void each_of_v(u32 at, int lane, Use use) {
  const int key = (lane & 7) + (lane >> 4 & 1) * 8, second = lane >> 3 & 1;
#pragma unroll
  for (int pair = 0; pair < V_PAIRS; pair++) {
    const int piece = 2 * (pair % 4) + second;
    u32 x[4];
    load_transposed(x, at + pair / 4 * SUB * BOX + key * 128 + ((piece ^ (key & 7)) << 4));
    if constexpr (KIND == PLAIN) {
      use(pair, x);
    } else if constexpr (KIND == INT4) {
      u32 n[4][4];
#pragma unroll
      for (int i = 0; i < 4; i++) nibbles_to_numbers(x[i], n[i]);
#pragma unroll
      for (int phase = 0; phase < 4; phase++) {  // both phases of a tile are of one group: piece 2 * pair + phase / 2
        const int i = phase / 2, low = phase % 2 * 2;
        const u32 a[4] = {n[i][low], n[i][low + 1], n[i + 2][low], n[i + 2][low + 1]};
        use(pair * 4 + phase, a);
      }
    } else {
      u32 even[4], odd[4];
#pragma unroll
      for (int i = 0; i < 4; i++) bytes_to_numbers<false>(x[i], even[i], odd[i]);
      use(2 * pair, even);
      use(2 * pair + 1, odd);
    }
  }
}
