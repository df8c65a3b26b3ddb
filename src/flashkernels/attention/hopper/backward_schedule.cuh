// Which tile of keys a block works on next, and which query blocks that tile has to look at.
#pragma once
#include "backward_params.cuh"
#include "mbarrier.cuh"

// One tile: KEYS keys of one key head. `id` < 0: there is none left.
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

// Tile t. Under a causal mask the first keys are seen by the most queries: heavy tiles come first. Heads are taken in
// sections whose queries, their gradients and dQ fit the L2 together. All lanes of a warp call this together.
DEVICE Work decode(const Params& p, int t, int lane) {
  Work w;
  w.id = t;
  w.q_row = w.k_row = 0;
  w.seq_q = p.seq_q;
  w.seq_k = p.seq_k;
  if (VARLEN) {
    const int rank = last_not_after(p.order, p.batch, t, lane);
    w.batch = p.order[p.batch + 1 + rank];
    w.q_row = p.cu_q[w.batch];
    w.k_row = p.cu_k[w.batch];
    w.seq_q = p.cu_q[w.batch + 1] - w.q_row;
    w.seq_k = p.cu_k[w.batch + 1] - w.k_row;
    const int r = t - p.order[rank];
    w.block = r / p.kv_heads;
    w.head = r % p.kv_heads;
    return w;
  }
  int sequence_head;
  if (BAND) {
    const int first = t / (p.section * p.key_blocks) * p.section, r = t - first * p.key_blocks;
    const int beside = min(p.section, p.batch * p.kv_heads - first);
    w.block = r / beside;
    sequence_head = first + r % beside;
  } else {
    w.block = t % p.key_blocks;
    sequence_head = t / p.key_blocks;
  }
  w.batch = sequence_head / p.kv_heads;
  w.head = sequence_head % p.kv_heads;
  return w;
}

// Query blocks [first, end) that see some key of the tile. There is always one to walk, even where nothing is visible;
// the mask then hides all of it.
struct Queries {
  int first, end;
  DEVICE int count() const { return end - first; }
};

DEVICE Queries queries_of(const Params& p, const Work& w) {
  const int shift = w.seq_k - w.seq_q, key = w.block * KEYS, last = min(key + KEYS, w.seq_k) - 1;
  const int all = ceil_div(w.seq_q, BLOCK);
  int first = 0, end = all;
  if (RIGHT) first = min(all - 1, max(0, key - shift - p.right) / BLOCK);
  if (LEFT) end = min(all, max(0, last - shift + p.left + BLOCK) / BLOCK);
  return {first, max(end, first + 1)};
}

// The first block of this query head in `level`, `delta`, `sums` and `poisoned`. A sequence of a ragged batch starts at
// a place that leaves room for the ragged ends of those before it.
DEVICE int first_block(const Params& p, int batch, int q_row, int head) {
  return VARLEN ? head * p.blocks + q_row / BLOCK + batch : (batch * p.heads + head) * p.blocks;
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
    if (lane == 0) {
      asm volatile("st.shared.v4.s32 [%0], {%1, %2, %3, %4};"
                   ::"r"(at()), "r"(w.block), "r"(w.head), "r"(w.batch), "r"(w.id) : "memory");
      if (VARLEN)
        asm volatile("st.shared.v4.s32 [%0], {%1, %2, %3, %4};"
                     ::"r"(at() + 16), "r"(w.q_row), "r"(w.seq_q), "r"(w.k_row), "r"(w.seq_k) : "memory");
      mbarrier::arrive(full());
    }
    slot.advance();
  }

  DEVICE Work get(const Params& p, int lane) {
    Work w;
    mbarrier::wait(full(), slot.phase);
    asm volatile("ld.shared.v4.s32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(w.block), "=r"(w.head), "=r"(w.batch), "=r"(w.id) : "r"(at()) : "memory");
    w.q_row = w.k_row = 0;
    w.seq_q = p.seq_q;
    w.seq_k = p.seq_k;
    if (VARLEN)
      asm volatile("ld.shared.v4.s32 {%0, %1, %2, %3}, [%4];"
                   : "=r"(w.q_row), "=r"(w.seq_q), "=r"(w.k_row), "=r"(w.seq_k) : "r"(at() + 16) : "memory");
    __syncwarp();
    if (lane == 0) mbarrier::arrive(empty());
    slot.advance();
    return w;
  }
};

// Ragged batches: the order of the sequences, by length, made on the device so that the host never waits for it.
// One thread a sequence; `order` becomes [first tile of the r-th longest, ..., all tiles, the r-th longest, ...].
// Keys of a sequence without queries have no tile: the host has set their gradients to 0.
extern "C" __global__ void order(const __grid_constant__ Params p) {
  const int mine = blockIdx.x * blockDim.x + threadIdx.x;
  if (!VARLEN || mine >= p.batch) return;
  auto queries = [&](int b) { return p.cu_q[b + 1] - p.cu_q[b]; };
  auto tiles = [&](int b) { return queries(b) ? ceil_div(p.cu_k[b + 1] - p.cu_k[b], KEYS) * p.kv_heads : 0; };
  const int length = queries(mine);
  int rank = 0, start = 0;
  for (int b = 0; b < p.batch; b++) {
    const int other = queries(b);
    if (other > length || (other == length && b < mine)) {
      rank++;
      start += tiles(b);
    }
  }
  p.order[rank] = start;
  p.order[p.batch + 1 + rank] = mine;
  if (rank == p.batch - 1) p.order[p.batch] = start + tiles(mine);
}
