// Blocks and clusters, global memory, and the copies that are under way.
#pragma once
#include <random>

#include "warp.h"

// Memory that kernels may touch: the tensors of a call.
struct Memory {
  struct Span { u64 from, to; };
  std::vector<Span> spans;  // sorted

  void check(u64 address, u64 bytes) const {
    auto after = std::upper_bound(spans.begin(), spans.end(), address, [](u64 a, const Span& s) { return a < s.from; });
    if (after != spans.begin() && address + bytes <= (after - 1)->to) return;
    std::string near = after == spans.begin() ? "" : text("; the nearest tensor below ends at %llx", (after - 1)->to);
    throw Fault(text("%llu bytes at %llx belong to no tensor", bytes, address) + near);
  }
};

// How the copy engine finds the boxes of a tensor; hopper.py writes it in the place of a CUtensorMap.
struct TensorMap {
  u64 address;
  u32 element, rank;  // bytes of an element
  u64 sizes[5];
  u64 strides[4];  // bytes; the innermost is one element
  u32 box[5];
  u32 swizzle;     // bytes: 0, 32, 64 or 128
};
static_assert(sizeof(TensorMap) <= 128, "fits a CUtensorMap");

inline u32 swizzled(u32 at, u32 width) { return at ^ (width ? (at >> 7 & (width / 16 - 1)) << 4 : 0); }

struct Cluster;

struct Block {
  Cluster* cluster;
  int index, rank, threads;
  Shared shared;
  std::vector<Warp> warps;
  struct Named { u32 arrived = 0; u32 round = 0; bool any = false; Clock clock, past; bool result = false; };
  Named named[16];
  int running = 0;  // warps
};

// Something that the copy engine has been told to do, by lane 0 of a warp or any other.
struct Copy {
  // the last two: of a thread by itself, and its arrival at a barrier when those before have come
  enum Kind { tensor_load, tensor_store, bulk_load, bulk_reduce, thread_load, arrival } kind;
  Block* block;
  Warp* warp;
  int lane;
  TensorMap map;
  i32 at[5];
  u64 address;
  u32 offset, bytes, barrier;
  u32 blocks;          // of the cluster, a bit each
  u32 group;           // of bulk stores: the thread's, counted from 0
  Clock clock;         // of who started it
  std::vector<u8> data;
  bool has_read = false;  // stores: shared memory may be written again

  bool loads() const { return kind != tensor_store && kind != bulk_reduce; }
};

struct Cluster {
  std::vector<Block> blocks;
  struct Meeting { int arrived = 0; u32 round = 0; Clock clock, past; } meeting;
  int running = 0;  // warps
};

inline u32 box_bytes(const TensorMap& map) {
  u32 bytes = map.element;
  for (u32 i = 0; i < map.rank; i++) bytes *= map.box[i];
  return bytes;
}

// f(offset in the box, address in memory, how many bytes there are of the tensor) for each row of a box.
template <class F> void each_row(const TensorMap& map, const i32* at, F f) {
  const u32 row_bytes = map.box[0] * map.element;
  u32 rows = 1;
  for (u32 i = 1; i < map.rank; i++) rows *= map.box[i];
  for (u32 r = 0; r < rows; r++) {
    u64 address = map.address;
    bool inside = true;
    u32 left = r;
    for (u32 i = 1; i < map.rank; i++) {
      const i64 x = at[i] + (i64)(left % map.box[i]);
      left /= map.box[i];
      inside &= x >= 0 && (u64)x < map.sizes[i];
      address += x * map.strides[i - 1];
    }
    const i64 have = ((i64)map.sizes[0] - at[0]) * map.element;
    const u32 bytes = !inside || have <= 0 ? 0 : (u32)std::min<i64>(have, row_bytes);
    if (at[0] < 0) throw Fault("a box begins before its tensor's first column");
    f(r * row_bytes, address + (u64)at[0] * map.element, bytes);
  }
}
