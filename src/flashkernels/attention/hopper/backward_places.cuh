// Where each query row has its statistics and its sums of dQ, and which sequence of a ragged batch a block is of.
#pragma once
#include "backward_params.cuh"

// The place of this query head's first row in `level`, `delta` and `sums`; a multiple of BLOCK. A sequence of a ragged
// batch starts at a place that leaves room for the ragged ends of those before it.
DEVICE int first_place(const Params& p, int batch, int q_row, int head) {
  return (VARLEN ? head * p.blocks + q_row / BLOCK + batch : (batch * p.heads + head) * p.blocks) * BLOCK;
}

// The sums of dQ from a place on, a multiple of 16: [16 queries][8 columns][lane][4]. Of dQ on its side each part of 16
// columns is apart, [8 queries][lane][4]: so the rows of any block follow one another.
DEVICE float* sums_at(const Params& p, int place, int part) {
  return p.sums + (TALL ? ((i64)part * p.places + place) * 16 : (i64)place * D);
}

// Blocks of `size` rows of a ragged batch: sequence b starts at block starts[b] / size + b. The last one that starts at
// or before this block.
DEVICE int last_sequence(const int* starts, int count, int block, int size) {
  int low = 0;
  while (count > 1) {
    const int half = count / 2;
    if (starts[low + half] / size + low + half <= block) low += half, count -= half;
    else count = half;
  }
  return low;
}

// Statistics of two neighbours, in shared memory.
DEVICE float2 load_pair(u32 at) {
  float2 x;
  asm volatile("ld.shared.v2.f32 {%0, %1}, [%2];" : "=f"(x.x), "=f"(x.y) : "r"(at) : "memory");
  return x;
}
