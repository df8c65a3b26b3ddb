// Stored numbers as operands of the tensor cores: the instructions.
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
// The bits MASK of x in 1024.0 twice, their sign bits flipped: -8 becomes 0.
template <int MASK, u32 SIGNS> DEVICE u32 low_bits_of_1024(u32 x) {
  u32 r;
  asm("lop3.b32 %0, %1, %2, %3, 0x6a;" : "=r"(r) : "r"(x), "n"(MASK), "r"(0x64006400 | SIGNS));
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
#pragma unroll
  for (int i = 0; i < 4; i += 2, x >>= 8) {
    to[i] = subtracted(low_bits_of_1024<0x000f000f, 0x00080008>(x), FROM_1032);
    to[i + 1] = multiplied_added(low_bits_of_1024<0x00f000f0, 0x00800080>(x), SIXTEENTH, MINUS_72);
  }
}

// --- tiles and groups

constexpr int GROUPS = KIND == INT4 ? ceil_div(D, 32) : 1;  // that have a scale of their own
// V comes in tiles of 16 columns.
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

// The A operands that a pair of V's 16-byte pieces gives, transposed: two halves of the keys for each piece.
template <class Use> DEVICE void operands_of_v(int pair, const u32 (&x)[4], Use use) {
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
