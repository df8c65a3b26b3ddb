// Matrix instructions. Products are made at once, with operands as they are then; what they read of shared memory
// counts as being read until the warp waits.
#pragma once
#include "block.h"

// An operand in shared memory: `rows` rows of 32 bytes along the reduction, as a descriptor says.
struct Descriptor {
  u32 start, leading, stride, width;
  explicit Descriptor(u64 d)
      : start((u32)(d & 0x3fff) << 4), leading((u32)(d >> 16 & 0x3fff) << 4), stride((u32)(d >> 32 & 0x3fff) << 4) {
    static const u32 widths[] = {0, 128, 64, 32};
    width = widths[d >> 62];
    if (!width) throw Fault("a wgmma operand without a swizzle has no meaning here");
    if (d >> 49 & 7) throw Fault("a wgmma operand with a base offset has no meaning here");
  }
};

inline float operand_value(Type t, const u8* at) {
  if (t == Type::e4m3) return from_e4m3(*at);
  u16 x;
  memcpy(&x, at, 2);
  return t == Type::f16 ? from_f16(x) : from_bf16(x);
}

// `rows` x `depth` numbers of it, and the pieces of shared memory they lie in.
inline void fetch(Shared& shared, u64 descriptor, bool by_column, Type t, int rows, int depth, float* to,
                  std::vector<Range>& ranges) {
  const Descriptor d(descriptor);
  const int element = t == Type::e4m3 ? 1 : 2;
  if (!by_column) {
    for (int r = 0; r < rows; r++) {
      const u32 row = d.start + r / 8 * d.stride + r % 8 * d.width;
      for (int part = 0; part < 2; part++) {
        const u32 at = swizzled(row + 16 * part, d.width);
        const u8* from = shared.at(at, 16);
        ranges.push_back({at, 16});
        for (int i = 0; i < 16 / element; i++) to[r * depth + part * 16 / element + i] = operand_value(t, from + i * element);
      }
    }
    return;
  }
  const int chunk = d.width / 2;  // rows side by side
  for (int k = 0; k < depth; k++)
    for (int r = 0; r < rows; r += 8) {
      const u32 at = swizzled(d.start + r / chunk * d.leading + k / 8 * d.stride + k % 8 * d.width + r % chunk * 2, d.width);
      const u8* from = shared.at(at, 16);
      ranges.push_back({at, 16});
      for (int i = 0; i < 8; i++) to[(r + i) * depth + k] = operand_value(t, from + i * 2);
    }
}

// 16 rows of A as a warp holds them in four registers.
inline void from_registers(Warp& w, const i32* slots, Type t, int depth, float* to) {
  for (int lane = 0; lane < 32; lane++)
    for (int i = 0; i < 4; i++) {
      const u32 x = w.get<u32>(slots[i], lane);
      const int row = lane / 4 + i % 2 * 8, per = t == Type::e4m3 ? 4 : 2, first = i / 2 * 4 * per + lane % 4 * per;
      for (int j = 0; j < per; j++) {
        const u16 part = (u16)(x >> j * (32 / per));
        u8 raw[2] = {(u8)part, (u8)(part >> 8)};
        to[row * depth + first + j] = operand_value(t, raw);
      }
    }
}

// A wgmma of a warpgroup: each of its four warps has 16 of 64 rows.
inline void warpgroup_product(Warp* warps[4], const i32* sums_at, const Instruction& in) {
  const int n = in.mod & 0xfff, depth = in.kind() == Type::e4m3 ? 32 : 16, count = in.results;
  const bool a_by_column = in.mod >> 12 & 1, b_by_column = in.mod >> 13 & 1, registers = in.operands == 6;
  const i32* o = sums_at + count;
  Shared& shared = warps[0]->block->shared;
  std::vector<float> a(64 * depth), b((size_t)n * depth), turned((size_t)n * depth), sums(n);
  std::vector<Range> of_a, of_b;
  if (!registers) fetch(shared, warps[0]->get<u64>(o[0], 0), a_by_column, in.kind(), 64, depth, a.data(), of_a);
  fetch(shared, warps[0]->get<u64>(o[registers ? 4 : 1], 0), b_by_column, in.kind(), n, depth, b.data(), of_b);
  for (int j = 0; j < n; j++)
    for (int k = 0; k < depth; k++) turned[(size_t)k * n + j] = b[(size_t)j * depth + k];
  for (int g = 0; g < 4; g++) {
    Warp& w = *warps[g];
    if (registers) from_registers(w, o, in.kind(), depth, a.data() + g * 16 * depth);
    const bool add = w.predicates[o[registers ? 5 : 2]] & 1;
    for (int row = 0; row < 16; row++) {
      for (int j = 0; j < n; j++) sums[j] = 0.f;
      const float* left = a.data() + (g * 16 + row) * depth;
      for (int k = 0; k < depth; k++) {
        const float x = left[k], *right = turned.data() + (size_t)k * n;
        for (int j = 0; j < n; j++) sums[j] += x * right[j];
      }
      for (int j = 0; j < n; j++) {
        const int lane = row % 8 * 4 + j % 8 / 2, i = j / 8 * 4 + row / 8 * 2 + j % 2;
        const i32 slot = sums_at[i];
        w.set<float>(slot, lane, add ? w.get<float>(slot, lane) + sums[j] : sums[j]);
      }
    }
    for (const std::vector<Range>* ranges : {&of_a, &of_b})
      for (const Range& r : *ranges) {
        shared.begin_read(r.offset, r.bytes, w.agent, w.clock);
        w.open.push_back(r);
      }
  }
}

// mma.sync m16n8k16: d = a * b + c, all in registers.
inline void warp_product(Warp& w, const Instruction& in, const i32* o) {
  float a[16 * 16], b[8 * 16];
  from_registers(w, o + 4, in.kind(), 16, a);
  for (int lane = 0; lane < 32; lane++)
    for (int i = 0; i < 2; i++)
      for (int j = 0; j < 2; j++) {
        const u16 x = (u16)(w.get<u32>(o[8 + i], lane) >> 16 * j);
        b[lane / 4 * 16 + i * 8 + lane % 4 * 2 + j] = in.kind() == Type::f16 ? from_f16(x) : from_bf16(x);
      }
  float made[4][32];
  for (int lane = 0; lane < 32; lane++)
    for (int i = 0; i < 4; i++) {
      const int row = lane / 4 + i / 2 * 8, column = lane % 4 * 2 + i % 2;
      float sum = 0.f;
      for (int k = 0; k < 16; k++) sum += a[row * 16 + k] * b[column * 16 + k];
      made[i][lane] = sum + w.get<float>(o[10 + i], lane);
    }
  for (int i = 0; i < 4; i++)
    for (int lane = 0; lane < 32; lane++) w.set<float>(o[i], lane, made[i][lane]);
}

// Matrices of 8 x 8 elements of 16 bits; a lane has two of a row, or, turned, of a column.
inline void load_matrices(Warp& w, const Instruction& in, const i32* o) {
  const i32* address = o + in.results;
  Shared& shared = w.block->shared;
  for (int m = 0; m < in.results; m++)
    for (int row = 0; row < 8; row++) {
      const u32 at = (u32)w.address(address, 8 * m + row);
      const u8* from = shared.at(at, 16);
      shared.note_read(at, 16, w.agent, w.clock);
      for (int i = 0; i < 8; i++) {
        u16 x;
        memcpy(&x, from + 2 * i, 2);
        const int lane = in.mod ? i * 4 + row / 2 : row * 4 + i / 2, half = in.mod ? row % 2 : i % 2;
        u32& to = w.word(o[m])[lane];
        to = half ? (to & 0xffff) | (u32)x << 16 : (to & 0xffff0000u) | x;
      }
    }
}
inline void store_matrices(Warp& w, const Instruction& in, const i32* o) {
  Shared& shared = w.block->shared;
  for (int m = 0; m < in.operands - 3; m++)
    for (int row = 0; row < 8; row++) {
      const u32 at = (u32)w.address(o, 8 * m + row);
      u8* to = shared.at(at, 16);
      shared.note_write(at, 16, w.agent, w.clock);
      for (int i = 0; i < 8; i++) {
        const int lane = in.mod ? i * 4 + row / 2 : row * 4 + i / 2, half = in.mod ? row % 2 : i % 2;
        const u16 x = (u16)(w.word(o[3 + m])[lane] >> 16 * half);
        memcpy(to + 2 * i, &x, 2);
      }
    }
}
inline void turn_matrix(Warp& w, const i32* o) {
  u16 x[8][8];
  for (int lane = 0; lane < 32; lane++)
    for (int i = 0; i < 2; i++) x[lane / 4][lane % 4 * 2 + i] = (u16)(w.word(o[1])[lane] >> 16 * i);
  for (int lane = 0; lane < 32; lane++)
    w.word(o[0])[lane] = x[lane % 4 * 2][lane / 4] | (u32)x[lane % 4 * 2 + 1][lane / 4] << 16;
}
