// FP8: V transposed, once per call, before the attention itself.
//
// The wgmma of 8-bit types takes operands along their rows only, so P·V wants rows of keys. Inside each group of 32, the
// keys are in the order in which the registers of P hold them (softmax.cuh), so that P needs no shuffling.
#pragma once
#include "params.cuh"

// The key, of a group of 32, at this place of the operand.
__host__ __device__ constexpr int key_at(int place) {
  return place / 16 * 16 + (place % 4 / 2) * 8 + place % 16 / 4 * 2 + place % 2;
}

// A block of 128 threads turns 128 keys x 64 columns; 4 columns x 16 places a thread.
extern "C" __global__ void __launch_bounds__(128) values(const __grid_constant__ Params p) {
  if constexpr (FP8) {
    constexpr int KEYS = 128, COLUMNS = 64, PITCH = COLUMNS / 4 + 1, PARTS = ceil_div(DV, COLUMNS);
    __shared__ u32 tile[KEYS * PITCH];
    const int blocks = p.values_row / KEYS, kv_heads = p.heads / p.group;
    const int block = blockIdx.x % blocks, part = blockIdx.x / blocks % PARTS, row = blockIdx.x / blocks / PARTS;
    const int batch = row / kv_heads, head = row % kv_heads, first = block * KEYS, column = part * COLUMNS;
    const unsigned char* from =
        (const unsigned char*)p.v_data + batch * p.v_strides.batch + head * p.v_strides.head + column;
    for (int i = threadIdx.x; i < KEYS * COLUMNS / 16; i += 128) {
      const int key = i / (COLUMNS / 16), at = i % (COLUMNS / 16) * 16;
      uint4 bytes = {0, 0, 0, 0};
      if (first + key < p.seq_k && column + at < DV) bytes = *(const uint4*)(from + (first + key) * p.v_strides.seq + at);
      u32* to = tile + key * PITCH + at / 4;
      to[0] = bytes.x, to[1] = bytes.y, to[2] = bytes.z, to[3] = bytes.w;
    }
    __syncthreads();
    const int four = threadIdx.x % 16, places = threadIdx.x / 16 * 16;  // 4 columns, 16 places
    u32 out[4][4];
#pragma unroll
    for (int group = 0; group < 4; group++) {
      u32 key[4];
#pragma unroll
      for (int i = 0; i < 4; i++) {
        const int place = places % 32 + group * 4 + i;
        key[i] = tile[(places / 32 * 32 + key_at(place)) * PITCH + four];
      }
      // a 4 x 4 transpose of bytes
      const u32 a = __byte_perm(key[0], key[1], 0x5140), b = __byte_perm(key[0], key[1], 0x7362);
      const u32 c = __byte_perm(key[2], key[3], 0x5140), d = __byte_perm(key[2], key[3], 0x7362);
      out[0][group] = __byte_perm(a, c, 0x5410);
      out[1][group] = __byte_perm(a, c, 0x7632);
      out[2][group] = __byte_perm(b, d, 0x5410);
      out[3][group] = __byte_perm(b, d, 0x7632);
    }
    unsigned char* to = p.values + ((i64)row * DV + column + four * 4) * p.values_row + first + places;
#pragma unroll
    for (int i = 0; i < 4; i++)
      if (column + four * 4 + i < DV)
        *(uint4*)(to + (i64)i * p.values_row) = {out[i][0], out[i][1], out[i][2], out[i][3]};
  }
}
