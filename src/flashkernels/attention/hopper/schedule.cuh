// Which tile a block works on next, and which keys that tile has to look at.
#pragma once
#include "mbarrier.cuh"
#include "params.cuh"

// One tile: BLOCK_Q queries of one (pack of) head(s) for each block of a cluster. `id` < 0: there is none left.
struct Work {
  int block, head, batch, id;
  int q_row, seq_q, k_row, seq_k;  // of its sequence
};

DEVICE int total_tiles(const Params& p) { return VARLEN ? p.order[p.batch] : p.tiles; }

// Largest i with starts[i] <= t, found by a whole warp: 32 probes at a time.
DEVICE int last_not_after(const int* starts, int count, int t, int lane) {
  int low = 0;
  for (int width = count; width > 1;) {
    const int step = ceil_div(width, 32), at = low + lane * step;
    const u32 hits = __ballot_sync(~0u, at < min(low + width, count) && starts[at] <= t);
    low += (31 - __clz(hits | 1)) * step;
    width = min(step, count - low);
  }
  return low;
}

// Tile t. Heavy tiles come first, so that no block is left with a long one at the end; heads are taken in sections
// whose keys and values fit the L2 together. All lanes of a warp call this together.
DEVICE Work decode(const Params& p, int t, int lane) {
  Work w;
  w.id = t;
  if (SPLIT) t /= p.splits;
  w.q_row = w.k_row = 0;
  w.seq_q = p.seq_q;
  w.seq_k = p.seq_k;
  if (VARLEN) {
    const int rank = last_not_after(p.order, p.batch, t, lane);
    w.batch = p.order[p.batch + 1 + rank];
    w.q_row = p.cu_q[w.batch];
    w.k_row = PAGED ? 0 : p.cu_k[w.batch];
    w.seq_q = p.cu_q[w.batch + 1] - w.q_row;
    w.seq_k = p.cu_k[w.batch + 1] - p.cu_k[w.batch];
    const int r = t - p.order[rank];
    w.block = ceil_div(w.seq_q, BLOCK_Q * CLUSTER) - 1 - r / p.heads;
    w.head = r % p.heads;
    return w;
  }
  int sequence_head;
  if (BAND) {
    const int first = t / (p.section * p.blocks) * p.section, r = t - first * p.blocks;
    const int beside = min(p.section, p.batch * p.heads - first);
    w.block = p.blocks - 1 - r / beside;
    sequence_head = first + r % beside;
  } else {
    w.block = t % p.blocks;
    sequence_head = t / p.blocks;
  }
  w.batch = sequence_head / p.heads;
  w.head = sequence_head % p.heads;
  return w;
}

// Key tiles [first, end) that some of `count` queries from `query` on see. There is always one to walk, even where
// nothing is visible; then `none` is set and the mask hides all of it.
struct Keys {
  int first, end;
  bool none;
};

DEVICE Keys keys_of(const Params& p, const Work& w, int query, int count) {
  const int shift = w.seq_k - w.seq_q, last = min(query + count, w.seq_q) - 1;
  const int all = ceil_div(w.seq_k, BLOCK_N);
  int first = 0, end = all;
  if (RIGHT) end = min(end, ceil_div(max(0, last + shift + p.right + 1), BLOCK_N));
  if (LEFT) first = max(0, query + shift - p.left) / BLOCK_N;
  if (SPLIT) {
    const int part = w.id % p.splits, n = max(0, end - first);
    end = first + n * (part + 1) / p.splits;
    first += n * part / p.splits;
  }
  const bool none = end <= first;
  first = max(0, min(first, all - 1));
  return {first, none ? first + 1 : end, none};
}

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
    if (lane == 0) {
      if (CLUSTER == 1) mbarrier::arrive(empty());
      else mbarrier::arrive_in(empty(), 0);
    }
    slot.advance();
    return w;
  }
};

// Ragged batches: the order of the sequences, by length, made on the device so that the host never waits for it.
// One thread a sequence; `order` becomes [first tile of the r-th longest, ..., all tiles, the r-th longest, ...].
extern "C" __global__ void order(const __grid_constant__ Params p) {
  const int mine = blockIdx.x * blockDim.x + threadIdx.x;
  if (!VARLEN || mine >= p.batch) return;
  auto tiles = [&](int b) { return ceil_div(p.cu_q[b + 1] - p.cu_q[b], BLOCK_Q * CLUSTER) * p.heads; };
  const int length = p.cu_k[mine + 1] - p.cu_k[mine];
  int rank = 0, start = 0;
  for (int b = 0; b < p.batch; b++) {
    const int other = p.cu_k[b + 1] - p.cu_k[b];
    if (other > length || (other == length && b < mine)) {
      rank++;
      start += tiles(b);
    }
  }
  p.order[rank] = start;
  p.order[p.batch + 1 + rank] = mine;
  if (rank == p.batch - 1) p.order[p.batch] = start + tiles(mine);
}
