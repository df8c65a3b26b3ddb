// Rows rounded to 8 bits at the speed of the memory: each is read once, by as many warps as have room for it.
#include "rounding.cuh"

struct Params {
  const char* x;
  char* out;       // [rows, width]
  float* scales;   // [rows]
  i64 stride;      // bytes between rows of x
  int rows, width;
  int warps;       // that share a row
};

extern "C" __global__ void __launch_bounds__(512) round_rows(const __grid_constant__ Params p) {
  __shared__ u32 most[16];
  wait_for_previous();
  let_next_start();
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, own = blockIdx.x * (blockDim.x / 32 / p.warps) + warp / p.warps;
  // The last row first: it was written last and is still in the L2, and what is written last is what the product that
  // follows reads first.
  const int row = p.rows - 1 - own;
  const Part part = {warp % p.warps * 32 + lane, 32 * p.warps, row < 0 ? 0 : p.width / 8};
  uint4 numbers[PIECES];
  read_row(numbers, p.x + row * p.stride, part);
  const float scale = scale_of(largest(numbers, most, warp, p.warps, lane));
  round_row(numbers, scale);
  write_row(numbers, p.out + (i64)row * p.width, part);
  if (row >= 0 && part.first == 0) p.scales[row] = scale;
}
