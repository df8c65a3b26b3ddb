// Warpgroup matrix instructions: groups of them, and the descriptors of operands in shared memory.
// The instructions themselves, for the exact N of this kernel, are generated into "mma.cuh".
#pragma once
#include "mma.cuh"
#include "prelude.cuh"

namespace wgmma {

DEVICE void fence() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
DEVICE void commit() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }
// Waits until at most N groups are in flight.
template <int N> DEVICE void wait() { asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(N) : "memory"); }
// The same, in other words: ptxas would merge two equal waits at the ends of two branches, and hoist the one it gets
// above everything that does not depend on it.
template <int N> DEVICE void wait_rare() {
  asm volatile("wgmma.wait_group.sync.aligned %0; // rare" ::"n"(N) : "memory");
}

// Operands lie in chunks: a chunk's row is `width` bytes, 128, 64 or 32, and swizzled over as many.
//
// A descriptor has an upper half that is known at compile time, and a lower half with the address, which steps and
// stages only add to. Both halves are kept apart: 64-bit additions and ORs before each wgmma would keep the tensor
// cores waiting.
__host__ __device__ constexpr u32 swizzle(int width) { return width == 128 ? 1 : width == 64 ? 2 : 3; }
__host__ __device__ constexpr u32 upper(int width) { return (swizzle(width) << 30) | ((8 * width) >> 4); }

// The lower half. Only 14 address bits belong in it: in a cluster, addresses of other blocks carry more.
// Reduction along the row (Q and K): 8-row groups follow one another.
DEVICE u32 by_row(u32 address) { return ((address >> 4) & 0x3fff) + (1u << 16); }
// Reduction along the column (V): chunks of columns are `rows` rows apart.
DEVICE u32 by_column(u32 address, int width, int rows) {
  return ((address >> 4) & 0x3fff) + ((u32)((rows * width) >> 4) << 16);
}

// The same lower half, of which ptxas does not know that. Of an operand that stays in place it would keep one for each
// step of a loop's products, in registers that it then spills, or moves to uniform ones before each wgmma (R2UR).
DEVICE u32 anew(u32 lower) {
  asm volatile("" : "+r"(lower));
  return lower;
}

DEVICE u64 descriptor(u32 lower, int width) {
  u64 whole;
  asm("mov.b64 %0, {%1, %2};" : "=l"(whole) : "r"(lower), "r"(upper(width)));
  return whole;
}

}  // namespace wgmma
