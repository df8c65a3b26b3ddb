// Who computes what. The list of all steps is cut into equal shares, and HEADS KV heads of a share are a piece of work:
// one for each block. The heads of a share come one after the other, so that blocks which run side by side read the same
// pages. Where there are more groups of heads than blocks, blocks take several in turn. What is summed with what depends
// on the shares alone, so the result is the same in every run.
#pragma once
#include "decode_steps.cuh"

struct Shares {
  int total, groups, size, pieces;  // steps, groups of heads, steps of a share

  DEVICE Shares(const Params& p, u32 smem) {
    total = int_at(smem + STARTS_AT + 4 * p.batch);
    groups = p.kv_heads / HEADS;
    size = max(1, ceil_div(total, max(1, (int)gridDim.x / groups)));
    pieces = ceil_div(total, size) * groups;
  }
  DEVICE int begin(int piece) const { return piece / groups * size; }
  DEVICE int end(int piece) const { return min(total, begin(piece) + size); }
  DEVICE int head(int piece) const { return piece % groups * HEADS; }  // its first
  DEVICE int share_of(int step) const { return step / size; }
};
