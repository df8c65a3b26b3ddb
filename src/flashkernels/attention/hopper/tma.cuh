// Loads into shared memory by the copy engine: boxes of a tensor, of which columns past its end arrive as zeros.
#pragma once
#include "prelude.cuh"

struct alignas(64) TensorMap { u64 opaque[16]; };

// Which block of its cluster this is.
DEVICE u32 cluster_rank() {
  u32 rank = 0;
  if (CLUSTER > 1) asm volatile("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
  return rank;
}

namespace tma {

DEVICE void load(u32 to, const TensorMap& map, u32 barrier, int c0, int c1, int c2, int c3) {
  asm volatile(
      "cp.async.bulk.tensor.4d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1, {%3, %4, %5, %6}], [%2];"
      ::"r"(to), "l"(&map), "r"(barrier), "r"(c0), "r"(c1), "r"(c2), "r"(c3) : "memory");
}

DEVICE void load(u32 to, const TensorMap& map, u32 barrier, int c0, int c1, int c2, int c3, int c4) {
  asm volatile(
      "cp.async.bulk.tensor.5d.shared::cluster.global.mbarrier::complete_tx::bytes"
      " [%0], [%1, {%3, %4, %5, %6, %7}], [%2];"
      ::"r"(to), "l"(&map), "r"(barrier), "r"(c0), "r"(c1), "r"(c2), "r"(c3), "r"(c4) : "memory");
}

// To the same place of every block of the cluster; each block's own barrier counts the bytes.
DEVICE void multicast(u32 to, const TensorMap& map, u32 barrier, int c0, int c1, int c2, int c3) {
  if (CLUSTER == 1) return load(to, map, barrier, c0, c1, c2, c3);
  asm volatile(
      "cp.async.bulk.tensor.4d.shared::cluster.global.mbarrier::complete_tx::bytes.multicast::cluster"
      " [%0], [%1, {%3, %4, %5, %6}], [%2], %7;"
      ::"r"(to), "l"(&map), "r"(barrier), "r"(c0), "r"(c1), "r"(c2), "r"(c3), "h"((u16)((1 << CLUSTER) - 1))
      : "memory");
}

// Contiguous bytes, from and to multiples of 16.
DEVICE void copy(u32 to, const void* from, u32 bytes, u32 barrier) {
  asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];"
               ::"r"(to), "l"(from), "r"(bytes), "r"(barrier) : "memory");
}

}  // namespace tma
