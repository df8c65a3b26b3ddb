// The tiles that blocks draw from a counter, and how a producer hands them to its consumers. Included behind the Params
// of a kernel, forward or backward, by the header that says what a tile is.
#pragma once
#include "counter.cuh"
#include "mbarrier.cuh"
#include "tma.cuh"

// One tile. `id` < 0: there is none left.
struct Work {
  int block, head, batch, id;
  int q_row, seq_q, k_row, seq_k;  // of its sequence
};

DEVICE int total_tiles(const Params& p) { return VARLEN ? p.order[p.batch] : p.tiles; }

// The producer hands tiles to the consumers through two slots in shared memory.
struct Mailbox {
  u32 smem;
  mbarrier::Ring<2> slot;

  DEVICE Mailbox(u32 smem, u32 phase) : smem(smem), slot(phase) {}
  DEVICE u32 at() { return smem + WORK_AT + 32 * slot.stage; }
  DEVICE u32 full() { return smem + WORK_FULL + 8 * slot.stage; }
  DEVICE u32 empty() { return smem + WORK_EMPTY + 8 * slot.stage; }

  DEVICE void put(const Work& w, int lane) {
    mbarrier::wait(empty(), slot.phase);
    if (lane < CLUSTER) {
      const u32 to = CLUSTER == 1 ? at() : mbarrier::address_in(at(), lane);
      asm volatile("st.shared::cluster.v4.s32 [%0], {%1, %2, %3, %4};"
                   ::"r"(to), "r"(w.block), "r"(w.head), "r"(w.batch), "r"(w.id) : "memory");
      if (VARLEN)
        asm volatile("st.shared::cluster.v4.s32 [%0], {%1, %2, %3, %4};"
                     ::"r"(to + 16), "r"(w.q_row), "r"(w.seq_q), "r"(w.k_row), "r"(w.seq_k) : "memory");
      if (CLUSTER == 1) mbarrier::arrive(full());
      else mbarrier::arrive_after_writes_in(full(), lane);
    }
    slot.advance();
  }

  DEVICE Work get(const Params& p, int lane) {
    Work w;
    if (CLUSTER == 1) mbarrier::wait(full(), slot.phase);
    else mbarrier::wait_for_cluster(full(), slot.phase);
    asm volatile("ld.shared.v4.s32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(w.block), "=r"(w.head), "=r"(w.batch), "=r"(w.id) : "r"(at()) : "memory");
    w.q_row = w.k_row = 0;
    w.seq_q = p.seq_q;
    w.seq_k = p.seq_k;
    if (VARLEN)
      asm volatile("ld.shared.v4.s32 {%0, %1, %2, %3}, [%4];"
                   : "=r"(w.q_row), "=r"(w.seq_q), "=r"(w.k_row), "=r"(w.seq_k) : "r"(at() + 16) : "memory");
    __syncwarp();
    if (RELEASES > 1 || lane == 0) {
      if (CLUSTER == 1) mbarrier::arrive(empty());
      else mbarrier::arrive_in(empty(), 0);
    }
    slot.advance();
    return w;
  }
};
