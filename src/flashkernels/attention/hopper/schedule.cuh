// Which tile a block works on next, and which keys that tile has to look at. A tile is BLOCK_Q queries of one (pack of)
// head(s) for each block of a cluster.
#pragma once
#include "params.cuh"
#include "work.cuh"

// The last p.cut tiles are cut along their keys, so that they fill the machine too: p.shares blocks take an equal share
// each, as their last work. A share may end in the tile behind the one it begins in; it then has two parts.
struct Part {
  int tile;      // behind the whole ones
  int from, to;  // of its keys, in parts of p.shares
  bool last;     // of its share
};

// What blocks draw are whole tiles, then shares. A share has two ids, one for each part.
DEVICE bool is_part(const Params& p, int id) { return SPLIT && id >= p.whole; }
DEVICE int id_of(const Params& p, int drawn) { return is_part(p, drawn) ? 2 * drawn - p.whole : drawn; }

DEVICE Part part_of(const Params& p, int id) {
  const int shares = p.shares, share = (id - p.whole) >> 1, tile = share * p.cut / shares;
  const int from = share * p.cut - tile * shares, to = from + p.cut;
  if ((id - p.whole) & 1) return {tile + 1, 0, to - shares, true};
  return {tile, from, min(to, shares), to <= shares};
}

// The tile of an id. Heavy tiles come first, so that no block is left with a long one at the end; heads are taken in
// sections whose keys and values fit the L2 together. All lanes of a warp call this together.
DEVICE Work decode(const Params& p, int id, int lane) {
  Work w;
  w.id = id;
  const int t = is_part(p, id) ? p.whole + part_of(p, id).tile : id;
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

// Of a warpgroup. Those of a cluster's blocks alternate, so that under a causal mask each block has as many keys to see.
DEVICE int first_query(const Work& w, int group) {
  if (GROUPS == 1 || CLUSTER == 1) return w.block * BLOCK_Q + group * QUERIES;
  return w.block / CLUSTER * CLUSTER * BLOCK_Q + (group * CLUSTER + w.block % CLUSTER) * QUERIES;
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
  if (is_part(p, w.id)) {
    const Part part = part_of(p, w.id);
    const int n = max(0, end - first);
    end = first + n * part.to / p.shares;
    first += n * part.from / p.shares;
  }
  const bool none = end <= first;
  first = max(0, min(first, all - 1));
  return {first, none ? first + 1 : end, none};
}

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
