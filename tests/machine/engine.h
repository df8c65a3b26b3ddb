// The copy engine. Copies are done when the schedule says so: at once, as late as can be, or somewhere between.
#pragma once
#include "block.h"

class Engine {
 public:
  Engine(const Memory& memory, u32 seed) : memory(memory), random(seed), habit(seed % 3) {}

  void start(Copy copy) {
    check(copy);
    begin(copy);
    copies.push_back(std::move(copy));
    if (habit == 1) while (step()) {}
  }

  // Between the turns of warps.
  bool maybe_step() { return habit == 2 && random() % 4 == 0 && step(); }

  // Does one thing more of some copy; false where there is nothing to do.
  bool step() {
    if (copies.empty()) return false;
    size_t i = random() % copies.size();
    while (waits(i)) i = (i + 1) % copies.size();
    Copy& copy = copies[i];
    if (!copy.loads() && !copy.has_read) {
      read(copy);
      return true;
    }
    if (copy.kind == Copy::arrival) arrive(copy);
    else if (copy.loads()) deliver(copy);
    else write(copy);
    copies.erase(copies.begin() + i);  // in the order in which they were started
    return true;
  }

  // Bulk groups of a thread: those before `group` are read, or done.
  bool done(const Warp* warp, int lane, u32 group, bool reading) const {
    for (const Copy& copy : copies)
      if (copy.warp == warp && copy.lane == lane && copy.group < group && !(reading && copy.has_read) &&
          !copy.loads())
        return false;
    return true;
  }

  // No copy may still write into a block that is over.
  void leave(const Block* block) const {
    for (const Copy& copy : copies)
      if (copy.block->cluster == block->cluster && copy.blocks >> block->rank & 1 && copy.loads())
        throw Fault("a block ends while a copy into its shared memory is under way");
  }

 private:
  const Memory& memory;
  std::mt19937 random;
  const u32 habit;
  std::vector<Copy> copies;

  // An arrival, for the same thread's copies before it.
  bool waits(size_t i) const {
    if (copies[i].kind != Copy::arrival) return false;
    for (size_t j = 0; j < i; j++)
      if (copies[j].kind == Copy::thread_load && copies[j].warp == copies[i].warp && copies[j].lane == copies[i].lane)
        return true;
    return false;
  }

  static void arrive(const Copy& copy) {
    Barrier& barrier = copy.block->shared.barrier(copy.barrier);
    barrier.now.join(copy.clock);
    barrier.pending--;
    barrier.settle();
  }

  static void check(const Copy& copy) {
    if (copy.kind == Copy::arrival) return;
    const auto aligned = [](u64 x, u64 to, const char* what) {
      if (x % to) throw Fault(text("a copy's %s, %llx, is not a multiple of %llu", what, x, to));
    };
    if (copy.kind == Copy::tensor_load || copy.kind == Copy::tensor_store) {
      aligned(copy.offset, 128, "place in shared memory");
      aligned((u64)copy.at[0] * copy.map.element, 16, "first column, in bytes");
    } else {
      const u32 to = copy.kind == Copy::thread_load ? copy.bytes : 16;
      aligned(copy.offset, to, "place in shared memory");
      aligned(copy.address, to, "address");
      aligned(copy.bytes, to, "length");
    }
  }

  void begin(Copy& copy) {
    const int agent = copy.warp->agent;
    if (copy.kind == Copy::arrival) return;
    if (copy.loads()) {
      for (Block& block : copy.block->cluster->blocks)
        if (copy.blocks >> block.rank & 1) 
          block.shared.begin_write(copy.offset, copy.bytes, agent, copy.clock, copy.kind == Copy::thread_load);
    } else {
      copy.block->shared.begin_read(copy.offset, copy.bytes, agent, copy.clock);
    }
  }

  void deliver(Copy& copy) {
    std::vector<u8> data(copy.bytes, 0);
    if (copy.kind != Copy::tensor_load) {
      memory.check(copy.address, copy.bytes);
      memcpy(data.data(), (const void*)copy.address, copy.bytes);
    } else {
      each_row(copy.map, copy.at, [&](u32 offset, u64 from, u32 bytes) {
        if (!bytes) return;
        memory.check(from, bytes);
        memcpy(data.data() + offset, (const void*)from, bytes);
      });
    }
    const u32 width = copy.kind == Copy::tensor_load ? copy.map.swizzle : 0, piece = std::min(copy.bytes, 16u);
    for (Block& block : copy.block->cluster->blocks) {
      if (!(copy.blocks >> block.rank & 1)) continue;
      for (u32 i = 0; i < copy.bytes; i += piece)
        memcpy(block.shared.at(swizzled(copy.offset + i, width), piece), &data[i], piece);
      block.shared.end_write(copy.offset, copy.bytes);
      if (copy.kind == Copy::thread_load) continue;
      Barrier& barrier = block.shared.barrier(copy.barrier);
      barrier.now.join(copy.clock);
      barrier.bytes -= copy.bytes;
      barrier.settle();
    }
  }

  void read(Copy& copy) {
    Shared& shared = copy.block->shared;
    copy.data.resize(copy.bytes);
    const u32 width = copy.kind == Copy::tensor_store ? copy.map.swizzle : 0;
    for (u32 i = 0; i < copy.bytes; i += 16) memcpy(&copy.data[i], shared.at(swizzled(copy.offset + i, width), 16), 16);
    copy.has_read = true;
  }

  void write(Copy& copy) {
    if (copy.kind == Copy::bulk_reduce) {
      memory.check(copy.address, copy.bytes);
      for (u32 i = 0; i < copy.bytes; i += 4) {
        float x;
        memcpy(&x, &copy.data[i], 4);
        *(float*)(copy.address + i) += x;
      }
    } else {
      each_row(copy.map, copy.at, [&](u32 offset, u64 to, u32 bytes) {
        if (!bytes) return;
        memory.check(to, bytes);
        memcpy((void*)to, copy.data.data() + offset, bytes);
      });
    }
  }
};
