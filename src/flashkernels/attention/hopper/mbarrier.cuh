// Barriers in shared memory between the producer warp (TMA) and the consumer warpgroups (wgmma), and named barriers.
#pragma once
#include "prelude.cuh"

namespace mbarrier {

DEVICE void init(u32 barrier, u32 arrivals) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(barrier), "r"(arrivals));
}

// After all inits, before any thread or TMA uses them.
DEVICE void publish() {
  asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
  asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
}

// Arrives, and announces bytes that TMA will bring.
DEVICE void expect(u32 barrier, u32 bytes) {
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(barrier), "r"(bytes) : "memory");
}

DEVICE void arrive(u32 barrier) {
  asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(barrier) : "memory");
}

// The same address in the shared memory of another block of the cluster.
DEVICE u32 address_in(u32 address, u32 rank) {
  u32 mapped;
  asm volatile("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(mapped) : "r"(address), "r"(rank));
  return mapped;
}

// No release at cluster scope here: it would flush the caches on every key block (333 instead of 516 TFLOPS at D=128).
// The consumers have only read what they hand back, and their wgmmas are complete.
DEVICE void arrive_in(u32 barrier, u32 rank) {
  asm volatile("mbarrier.arrive.shared::cluster.b64 _, [%0];" ::"r"(address_in(barrier, rank)) : "memory");
}

// With release at cluster scope: for data written by ordinary stores, once per tile.
DEVICE void arrive_after_writes_in(u32 barrier, u32 rank) {
  asm volatile("mbarrier.arrive.release.cluster.shared::cluster.b64 _, [%0];" ::"r"(address_in(barrier, rank))
               : "memory");
}

DEVICE void wait(u32 barrier, u32 phase) {
  asm volatile(
      "{\n.reg .pred done;\nagain_%=:\n"
      "mbarrier.try_wait.parity.shared::cta.b64 done, [%0], %1;\n"
      "@done bra.uni end_%=;\nbra.uni again_%=;\nend_%=:\n}" ::"r"(barrier), "r"(phase) : "memory");
}

DEVICE void wait_for_cluster(u32 barrier, u32 phase) {
  asm volatile(
      "{\n.reg .pred done;\nagain_%=:\n"
      "mbarrier.try_wait.parity.acquire.cluster.shared::cta.b64 done, [%0], %1;\n"
      "@done bra.uni end_%=;\nbra.uni again_%=;\nend_%=:\n}" ::"r"(barrier), "r"(phase) : "memory");
}

// A position in a ring of N buffers, and the parity of the round. Producers start with phase 1: all buffers are empty.
template <int N> struct Ring {
  int stage = 0;
  u32 phase;
  DEVICE Ring(u32 phase) : phase(phase) {}
  DEVICE void advance() {
    if (++stage == N) {
      stage = 0;
      phase ^= 1;
    }
  }
};

}  // namespace mbarrier

// Hardware barriers by number, among `threads` threads. 0 belongs to __syncthreads.
namespace named_barrier {
DEVICE void sync(int id, int threads) { asm volatile("bar.sync %0, %1;" ::"r"(id), "r"(threads) : "memory"); }
DEVICE void arrive(int id, int threads) { asm volatile("bar.arrive %0, %1;" ::"r"(id), "r"(threads) : "memory"); }
// Waits like sync, and says whether it is `mine` for any of the threads.
DEVICE bool any(int id, int threads, bool mine) {
  int found;
  asm volatile(
      "{.reg .pred p, q; setp.ne.s32 p, %1, 0; bar.red.or.pred q, %2, %3, p; selp.s32 %0, 1, 0, q;}"
      : "=r"(found) : "r"((int)mine), "r"(id), "r"(threads) : "memory");
  return found;
}
}  // namespace named_barrier

DEVICE void cluster_sync() {
  asm volatile("barrier.cluster.arrive.release;\nbarrier.cluster.wait.acquire;" ::: "memory");
}
