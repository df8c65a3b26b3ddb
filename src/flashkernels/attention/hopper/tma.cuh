// The copy engine: boxes of a tensor into shared memory, and back. What lies past the tensor's end arrives as zeros, and
// is not written.
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

// From shared memory, by one thread, which also commits and waits. What it stores was written by ordinary stores, so
// `publish_shared` comes first.
DEVICE void store(const TensorMap& map, u32 from, int c0, int c1, int c2, int c3) {
  asm volatile("cp.async.bulk.tensor.4d.global.shared::cta.bulk_group [%0, {%2, %3, %4, %5}], [%1];"
               ::"l"(&map), "r"(from), "r"(c0), "r"(c1), "r"(c2), "r"(c3) : "memory");
}
DEVICE void commit() { asm volatile("cp.async.bulk.commit_group;" ::: "memory"); }
// All that this thread has committed is read: shared memory may be written again.
DEVICE void await_reads() { asm volatile("cp.async.bulk.wait_group.read 0;" ::: "memory"); }

}  // namespace tma

// Before the copy engine or a wgmma may read what ordinary stores wrote.
DEVICE void publish_shared() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }

// Four 8 x 8 matrices of 16 bits, as accumulators have them, to shared memory. Each lane has the address of one row:
// the first eight those of the first matrix, and so on. Of two matrices, half of the lanes.
DEVICE void store_matrices(u32 to, u32 a, u32 b, u32 c, u32 d) {
  asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1, %2, %3, %4};"
               ::"r"(to), "r"(a), "r"(b), "r"(c), "r"(d) : "memory");
}
DEVICE void store_matrices(u32 to, u32 a, u32 b) {
  asm volatile("stmatrix.sync.aligned.m8n8.x2.shared.b16 [%0], {%1, %2};" ::"r"(to), "r"(a), "r"(b) : "memory");
}
