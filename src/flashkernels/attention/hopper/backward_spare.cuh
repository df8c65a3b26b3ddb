// A job of the three warps beside the producer, which the launch has anyway: dQ from its sums, where all tiles of a
// head have added theirs. It runs under the products of the consumers, while the sums are in the L2. `queries` turns the
// last section of heads, so that no block waits here for the last tiles of another.
//
// Nobody waits for one who waits: dQ of a head waits for its tiles, which blocks draw in order, so all before the first
// that is not made are at work in a block that runs. Parts of tiles come last, and wait for dQ of heads without parts.
#pragma once
#include "backward_tile.cuh"

DEVICE int load_acquire(const int* from) {
  int x;
  asm volatile("ld.acquire.gpu.global.s32 %0, [%1];" : "=r"(x) : "l"(from) : "memory");
  return x;
}
// All that this thread has seen done is done for whoever sees the new count.
DEVICE void count_release(int* counter) {
  asm volatile("fence.acq_rel.gpu;\nred.relaxed.gpu.global.add.s32 [%0], 1;" ::"l"(counter) : "memory");
}
// For all lanes of a warp. Polls seldom: hundreds of warps may wait for the same number.
DEVICE void await_count(const int* counter, int least, int lane) {
  if (lane == 0)
    while (load_acquire(counter) < least) __nanosleep(1000);
  __syncwarp();
}
DEVICE int draw(int* counter, int lane) {
  int number = 0;
  if (lane == 0) number = atomicAdd(counter, 1);
  return broadcast(number);
}
DEVICE int blocks_of_key_head(const Params& p) { return p.group * p.blocks; }

// One warp: counts the tiles of this block whose dQ is added. Consumers would have to wait for their additions.
DEVICE void count_tiles(const Params& p, u32 smem, int lane) {
  Mailbox mail(smem, 0);
  while (true) {
    mbarrier::wait(mail.full(), mail.slot.phase);
    const uint4 x = load_shared(mail.at());  // block, head, batch, id
    if (broadcast((int)x.w) < 0) return;
    mbarrier::wait(smem + ADDED + 8 * mail.slot.stage, mail.slot.phase);
    __syncwarp();
    if (lane == 0) {
      count_release(tiles_added(p, (int)x.z * p.kv_heads + (int)x.y));
      mbarrier::arrive(mail.empty());  // not earlier: the slot's next tile uses the same ADDED
    }
    mail.slot.advance();
  }
}

// dQ of query blocks, one after the other.
DEVICE void make_dq(const Params& p, int lane) {
  const int end = p.turned * blocks_of_key_head(p);
#pragma unroll 1
  for (int place; (place = draw(p.progress + NEXT_DQ, lane)) < end;) {
    await_count(tiles_added(p, place / blocks_of_key_head(p)), p.key_blocks, lane);
    const QueryBlock b = query_block(p, place);
#pragma unroll 1
    for (int slab = 0; slab < BLOCK / 16; slab++)
      turn_slab<16>(p, b, place, slab, lane);  // as many columns at a time as 24 registers hold
    if (PARTS && place < p.room) {
      __syncwarp();
      if (lane == 0) count_release(p.progress + ROOM_MADE);
    }
  }
}

DEVICE void spare(const Params& p, u32 smem, int warp, int lane) {
  if (!SPARE_DQ) return;
  if (warp == 1) count_tiles(p, smem, lane);
  make_dq(p, lane);
}
