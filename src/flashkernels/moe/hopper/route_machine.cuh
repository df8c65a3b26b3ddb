// What the routing needs of the machine beside plain C++. Tests put a version for the CPU in its place.
#pragma once

typedef unsigned short u16;
typedef unsigned int u32;
typedef long long i64;

#define DEVICE __device__ __forceinline__
#define INF __int_as_float(0x7f800000)

// --- within a warp

DEVICE int warp_max(int x) { return __reduce_max_sync(~0u, x); }
DEVICE u32 ballot(bool x) { return __ballot_sync(~0u, x); }
DEVICE int from_lane(int x, int lane) { return __shfl_sync(~0u, x, lane); }
DEVICE int from_later(int x, int by) { return __shfl_down_sync(~0u, x, by); }
DEVICE float across(float x, int mask) { return __shfl_xor_sync(~0u, x, mask); }
DEVICE void warp_barrier() { __syncwarp(); }

// --- within a block, a cluster and a grid

DEVICE void block_barrier() { __syncthreads(); }

DEVICE void cluster_arrive() { asm volatile("barrier.cluster.arrive.release;" ::: "memory"); }
DEVICE void cluster_wait() { asm volatile("barrier.cluster.wait.acquire;" ::: "memory"); }

// By one thread of each block, after a barrier of the block, so that what the others wrote is released, too, and before
// one, so that they see what it acquired. All blocks run at once (cooperative launch).
DEVICE void grid_arrive(u32* arrivals) {
  asm volatile("red.release.gpu.global.add.u32 [%0], 1;" ::"l"(arrivals) : "memory");
}
DEVICE void grid_wait(u32* arrivals, u32 blocks) {
  u32 there;
  do asm volatile("ld.acquire.gpu.global.u32 %0, [%1];" : "=r"(there) : "l"(arrivals) : "memory");
  while (there < blocks);
}
DEVICE u32 add_one(u32* counter) { return atomicAdd(counter, 1); }

// A kernel that was launched early waits here for the one before it. The next one may be launched early.
DEVICE void wait_for_previous() { asm volatile("griddepcontrol.wait;" ::: "memory"); }
DEVICE void let_next_start() { asm volatile("griddepcontrol.launch_dependents;" ::: "memory"); }

// --- memory

// The count before it was increased; in shared memory.
DEVICE u32 take_number(u32* counter) { return atomicAdd(counter, 1); }
DEVICE void add_shared(u32* sum, u32 x) { atomicAdd(sum, x); }

// BYTES from global memory into words, by one load. Logits are read once: they need no place in the L1.
template <int BYTES> DEVICE void read_once(u32* to, const void* from) {
  if constexpr (BYTES == 16) {
    asm volatile("ld.global.nc.L1::no_allocate.v4.u32 {%0, %1, %2, %3}, [%4];"
        : "=r"(to[0]), "=r"(to[1]), "=r"(to[2]), "=r"(to[3]) : "l"(from));
  } else if constexpr (BYTES == 8) {
    asm volatile("ld.global.nc.L1::no_allocate.v2.u32 {%0, %1}, [%2];" : "=r"(to[0]), "=r"(to[1]) : "l"(from));
  } else if constexpr (BYTES == 4) {
    asm volatile("ld.global.nc.L1::no_allocate.u32 %0, [%1];" : "=r"(to[0]) : "l"(from));
  } else {
    u16 half;
    asm volatile("ld.global.nc.L1::no_allocate.u16 %0, [%1];" : "=h"(half) : "l"(from));
    to[0] = half;
  }
}

// The same of what other blocks have just written.
template <int BYTES> DEVICE void read_shared_by_blocks(u32* to, const void* from) {
  if constexpr (BYTES == 16) {
    uint4 x = __ldcg((const uint4*)from);
    to[0] = x.x, to[1] = x.y, to[2] = x.z, to[3] = x.w;
  } else if constexpr (BYTES == 8) {
    uint2 x = __ldcg((const uint2*)from);
    to[0] = x.x, to[1] = x.y;
  } else if constexpr (BYTES == 4) {
    to[0] = __ldcg((const u32*)from);
  } else {
    to[0] = __ldcg((const u16*)from);
  }
}

// --- numbers

DEVICE float bf16_number(u32 bits) { return __int_as_float(bits << 16); }
DEVICE float fp16_number(u32 bits) {
  float y;
  asm("cvt.f32.f16 %0, %1;" : "=f"(y) : "h"((u16)bits));
  return y;
}

// x, but 0 for -0 and 0x7fffffff for every NaN: what the machine's addition returns.
DEVICE float canonical(float x) {
  float y;
  asm("add.rn.f32 %0, %1, 0f00000000;" : "=f"(y) : "f"(x));
  return y;
}

DEVICE float power(float x) {  // of e
  float y;
  asm("ex2.approx.f32 %0, %1;" : "=f"(y) : "f"(x * 1.4426950408889634f));
  return y;
}

DEVICE float divide(float a, float b) {
  float y;
  asm("div.full.f32 %0, %1, %2;" : "=f"(y) : "f"(a), "f"(b));
  return y;
}
