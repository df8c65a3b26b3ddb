// Which tile a block works on next, and which query blocks that tile has to look at. A tile is KEYS keys of one key
// head.
#pragma once
#include "backward_layout.cuh"
#include "backward_places.cuh"
#include "work.cuh"

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

// Rows [first, end) of the blocks that see some key of the tile. They start where the first such query is, at a multiple
// of 16: with blocks at multiples of their size, 80 queries and a causal mask, a tile would have 0.8 blocks more to
// walk, of 27 at S=4096. There is always one, even where nothing is visible; the mask then hides all of it. The last
// one ends where the sequence's last block at a multiple of its size does, or before.
struct Queries {
  int first, end;
  DEVICE int count() const { return (end - first) / BLOCK; }
};

DEVICE Queries queries_of(const Params& p, const Work& w) {
  const int shift = w.seq_k - w.seq_q, key = w.block * KEYS, last = min(key + KEYS, w.seq_k) - 1;
  int first = 0, end = w.seq_q;
  if (RIGHT) first = min(w.seq_q - 1, max(0, key - shift - p.right)) / 16 * 16;
  if (LEFT) end = min(end, last - shift + p.left + 1);
  const int rows = max(1, ceil_div(end - first, BLOCK)) * BLOCK;
  first = min(first, round_up(w.seq_q, BLOCK) - rows);
  return {first, first + rows};
}

// Ragged batches: the order of the sequences, by length, made on the device so that the host never waits for it.
// One thread a sequence; `order` becomes [first tile of the r-th longest, ..., all tiles, the r-th longest, ...].
// Keys of a sequence without queries have no tile: the host has set their gradients to 0.
extern "C" __global__ void order(const __grid_constant__ Params p) {
  wait_for_previous();
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
