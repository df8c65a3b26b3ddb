// Loads of boxes of a tensor into shared memory by the copy engine. Columns past the tensor's end arrive as zeros.
#pragma once
#include "prelude.cuh"

struct alignas(64) TensorMap { u64 opaque[16]; };

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

}  // namespace tma
