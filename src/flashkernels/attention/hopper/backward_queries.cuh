// dQ in 16 bits from its sums, by the blocks that made them: parts of the list of query blocks are tiles too, behind
// those of keys. So blocks that find no keys left have something to do while the last ones are at work. A part waits
// until every tile of its keys has been added; a block that draws a tile is running, so none waits for ever.
#pragma once
#include "backward_rows.cuh"

static_assert(PART == 256, "twice 16 queries for each of eight warps");

DEVICE int parts(const Params& p) { return ceil_div(p.blocks * p.heads * (VARLEN ? 1 : p.batch), PART / BLOCK); }

// N columns of two rows of an accumulator to memory, 16 bits an element. Pairs of lanes exchange halves so that each
// stores 8 bytes, and four lanes 32 contiguous ones.
template <int N>
DEVICE void store_rows(const float (&x)[N / 2], float factor, u16* first, i64 stride, int rows, int lane) {
  const int quarter = lane & 3, odd = quarter & 1;
#pragma unroll
  for (int r = 0; r < 2; r++) {
    u16* row = first + r * 8 * stride;
    const bool exists = 8 * r < rows;
    auto word = [&](int j) { return pack(x[4 * j + 2 * r] * factor, x[4 * j + 2 * r + 1] * factor); };
#pragma unroll
    for (int j = 0; j + 1 < N / 8; j += 2) {
      const u32 mine = word(j), next = word(j + 1);
      const u32 given = __shfl_xor_sync(~0u, odd ? mine : next, 1);
      uint2 both;
      both.x = odd ? given : mine;
      both.y = odd ? next : given;
      if (exists) *(uint2*)(row + (j + odd) * 8 + (quarter >> 1) * 4) = both;
    }
    if ((N / 8) % 2 && exists) *(u32*)(row + N - 8 + quarter * 2) = word(N / 8 - 1);
  }
}

// Counts the tiles whose additions are complete. For a warp of its own: the release waits for all additions of the
// block to reach the L2, a microsecond that the consumers do not have.
DEVICE void count_added(const Params& p, u32 smem, int lane) {
  Mailbox mail(smem, 0);
  while (true) {
    const Work w = mail.look(p);
    if (w.id < 0) return;
    if (!is_part(w)) {
      mbarrier::wait(smem + ADDED + 8 * mail.slot.stage, mail.slot.phase);
      const int* added = p.added + w.batch * p.kv_heads + w.head;
      if (lane == 0) asm volatile("red.release.gpu.global.add.s32 [%0], 1;" ::"l"(added) : "memory");
    }
    mail.give_back(lane);
  }
}

DEVICE int load_acquire(const int* at) {
  int x;
  asm volatile("ld.acquire.gpu.global.s32 %0, [%1];" : "=r"(x) : "l"(at) : "memory");
  return x;
}

// 16 queries of a block, and their sums, which are in fragment order: [16 queries][8 columns][lane][4].
struct Sums {
  QueryBlock b;
  float x[D / 2];

  DEVICE void load(const Params& p, int sixteen, int lane) {
    const int place = sixteen / 4, first = sixteen % 4 * 16;
    b.rows = 0;
    if (place >= p.blocks * p.heads * (VARLEN ? 1 : p.batch)) return;
    b = query_block(p, place);
    b.first += first;
    b.rows -= first;
    if (b.rows <= 0) return;
    const int keys = VARLEN ? p.cu_k[b.batch + 1] - p.cu_k[b.batch] : p.seq_k, tiles = ceil_div(keys, KEYS);
    const int* added = p.added + b.batch * p.kv_heads + b.head / p.group;
    while (load_acquire(added) < tiles) __nanosleep(200);
    __syncwarp();
    const float4* sums = (const float4*)(p.sums + (i64)place * BLOCK * D + first * D) + lane;
#pragma unroll
    for (int j = 0; j < D / 8; j++) {
      const float4 four = __ldcg(sums + j * 32);
      x[4 * j] = four.x, x[4 * j + 1] = four.y, x[4 * j + 2] = four.z, x[4 * j + 3] = four.w;
    }
  }
  DEVICE void store(const Params& p, int lane) const {
    if (b.rows <= 0) return;
    const int row = lane / 4;
    u16* to = p.dq + b.batch * p.dq_strides.batch + b.head * p.dq_strides.head +
              (i64)(b.q_row + b.first + row) * p.dq_strides.seq;
    store_rows<D>(x, p.grad_scale, to, p.dq_strides.seq, b.rows - row, lane);
  }
};

// For eight warps, each with 16 queries at a time, or twice 16: enough loads on their way to wait for the memory only.
DEVICE void make_part(const Params& p, int part, int warp, int lane) {
  constexpr int AT_ONCE = D <= 64 ? 2 : 1;
  Sums sums[AT_ONCE];
#pragma unroll 1
  for (int first = part * (PART / 16) + warp; first < (part + 1) * (PART / 16); first += 8 * AT_ONCE) {
#pragma unroll
    for (int i = 0; i < AT_ONCE; i++) sums[i].load(p, first + 8 * i, lane);
#pragma unroll
    for (int i = 0; i < AT_ONCE; i++) sums[i].store(p, lane);
  }
}
