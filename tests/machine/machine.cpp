// A GPU on a CPU: runs a kernel's PTX, warp by warp, an instruction of up to 32 lanes at a time.
//
// Warps take turns of random length, and copies arrive early, late or in between, as a seed decides. So one call shows
// one of the orders that a GPU may take. Where all wait, or a warp touches what it may not yet, the kernel is at fault.
#include <memory>

#include "engine.h"
#include "tensor.h"

namespace {

struct Launch {
  const Program* program;
  const Memory* memory;
  u64 parameters;
  int grid, threads, cluster, resident;
  u32 dynamic_bytes, seed;
  bool checks;
  i64 budget;  // instructions
};

class Machine {
 public:
  explicit Machine(const Launch& launch)
      : launch(launch), program(*launch.program), engine(*launch.memory, launch.seed), random(launch.seed * 2654435761u + 1) {}

  i64 executed = 0;
  std::string where;  // of a fault
  i32 fault_at = -1;

  void run() {
    int next = 0;
    const int total = launch.grid / launch.cluster, most = std::max(1, launch.resident / launch.cluster);
    std::vector<std::unique_ptr<Cluster>> clusters;
    while (next < total || !clusters.empty()) {
      while (next < total && (int)clusters.size() < most) clusters.push_back(born(next++));
      bool progress = false;
      std::vector<Warp*> order;
      for (auto& cluster : clusters)
        for (Block& block : cluster->blocks)
          for (Warp& warp : block.warps)
            if (!warp.groups.empty()) order.push_back(&warp);
      std::shuffle(order.begin(), order.end(), random);
      for (Warp* warp : order) {
        progress |= take_turn(*warp, 1 + (int)(random() % 400));
        progress |= engine.maybe_step();
      }
      clusters.erase(std::remove_if(clusters.begin(), clusters.end(), [](auto& c) { return c->running == 0; }), clusters.end());
      if (!progress && !engine.step()) {
        if (clusters.empty()) break;
        report_deadlock(order);
      }
    }
    while (engine.step()) {}
  }

 private:
  const Launch& launch;
  const Program& program;
  Engine engine;
  std::mt19937 random;
  int lane = -1;  // whose load, store or copy is at hand

  // --- blocks

  std::unique_ptr<Cluster> born(int number) {
    auto cluster = std::make_unique<Cluster>();
    const int warps = launch.threads / 32, agents = warps * launch.cluster;
    if (launch.threads % 32 || agents > MOST_AGENTS) throw Fault("a block of so many threads has no meaning here");
    cluster->blocks.reserve(launch.cluster);
    cluster->running = agents;
    for (int rank = 0; rank < launch.cluster; rank++) {
      cluster->blocks.push_back(Block{cluster.get(), number * launch.cluster + rank, rank, launch.threads,
                                      Shared(program.shared_bytes + launch.dynamic_bytes, agents, launch.checks), {}, {}, warps});
      Block& block = cluster->blocks.back();
      block.warps.resize(warps);
      for (int i = 0; i < warps; i++) prepare(block, block.warps[i], i, rank * warps + i);
    }
    return cluster;
  }

  void prepare(Block& block, Warp& w, int number, int agent) {
    w.block = &block;
    w.number = number;
    w.agent = agent;
    w.registers.assign((size_t)program.words * 32, 0);
    w.predicates.assign(program.predicates, 0);
    w.predicates[1] = ALL;
    w.groups.push_back({ALL, 0});
    w.clock.seen[agent] = 1;
    if (program.local_bytes) w.local.assign(32, std::vector<u8>(program.local_bytes));
    auto fill = [&](i32 word, u32 x) { std::fill_n(w.word(word), 32, x); };
    for (int i = 0; i < program.constant_count; i++) fill(program.constants[i].word, program.constants[i].bits);
    for (int i = 0; i < program.symbol_count; i++) {
      const Symbol& s = program.symbols[i];
      const u64 value = (s.kind == 1 ? launch.parameters : 0) + s.offset;
      fill(s.word, (u32)value), fill(s.word + 1, (u32)(value >> 32));
    }
    for (int i = 0; i < program.special_count; i++) {
      const Special& s = program.specials[i];
      for (int lane = 0; lane < 32; lane++) w.word(s.word)[lane] = special(block, number, lane, s.kind);
    }
  }

  u32 special(const Block& block, int warp, int lane, int kind) const {  // in the order of machine.py's SPECIALS
    switch (kind) {
      case 0: return warp * 32 + lane;
      case 1: return launch.threads;
      case 2: return block.index;
      case 3: return launch.grid;
      case 4: return lane;
      case 5: return block.rank;
      case 6: return launch.cluster;
      case 7: return launch.threads;  // ALL_THREADS
      case 8: return 1;               // sizes along y and z
      case 9: return block.index % std::max(1, launch.resident);  // %smid
      case 10: return block.index / launch.cluster;
      default: return 0;
    }
  }

  // --- turns

  // Runs a warp for a while; false where it can do nothing.
  bool take_turn(Warp& w, int most) {
    bool progress = false;
    for (Group& group : w.groups) group.idle = false;
    while (most > 0 && !w.groups.empty()) {
      Group* group = runnable(w);
      if (!group) break;
      const int done = run_group(w, *group, most);
      if (!done) group->idle = true;  // others may go on
      progress |= done > 0;
      most -= done;
    }
    return progress;
  }

  // The group that is least far, of those that wait for nothing; groups that have met become one.
  Group* runnable(Warp& w) {
    for (size_t i = 0; i < w.groups.size(); i++)
      for (size_t j = i + 1; j < w.groups.size();) {
        if (w.groups[i].at == w.groups[j].at) {
          w.groups[i].mask |= w.groups[j].mask;
          w.groups[i].wait = Wait::nothing;
          w.groups[i].idle = false;
          w.groups.erase(w.groups.begin() + j);
        } else {
          j++;
        }
      }
    Group* best = nullptr;
    for (Group& g : w.groups)
      if (!g.idle && ready(w, g) && (!best || g.at < best->at)) best = &g;
    return best;
  }

  bool ready(Warp& w, const Group& g) {
    switch (g.wait) {
      case Wait::nothing: return true;
      case Wait::lanes: return false;  // until others meet it
      case Wait::mbarrier: return (w.block->shared.barrier(g.barrier).phase & 1) != g.phase;
      case Wait::named_barrier: return w.block->named[g.barrier].round != g.phase;
      case Wait::cluster: return w.block->cluster->meeting.round != g.phase;
      case Wait::warpgroup: return true;  // looks again
      case Wait::copies: return true;
    }
    return false;
  }

  u32 live(const Warp& w) const {
    u32 mask = 0;
    for (const Group& g : w.groups) mask |= g.mask;
    return mask;
  }

  // Up to `most` instructions of a group; how many were executed.
  int run_group(Warp& w, Group& group, int most) {
    const size_t groups = w.groups.size();
    int count = 0;
    while (count < most) {
      const Instruction& in = program.code[group.at];
      u32 mask = group.mask;
      if (in.guard) {
        const u32 p = w.predicates[std::abs(in.guard) - 1];
        mask &= in.guard > 0 ? p : ~p;
      }
      try {
        if (!execute(w, group, in, mask)) return count;
      } catch (const Fault&) {
        fault_at = (i32)(&in - program.code);
        where = text("block %d, warp %d, ", w.block->index, w.number);
        where += lane < 0 ? text("lanes %08x", mask) : text("lane %d", lane);
        throw;
      }
      count++;
      if (++executed > launch.budget) {
        fault_at = (i32)(&in - program.code);
        throw Fault(text("the kernel has not ended after %lld instructions", (long long)launch.budget));
      }
      // A branch or an end: whoever is least far goes next, and `group` may be gone.
      if (in.code() == Op::bra_ || in.code() == Op::ret_) return count;
      if (groups > 1) return count;
    }
    return count;
  }

  // f(lane) of each: a fault is that lane's.
  template <class F> void one_by_one(u32 mask, F f) {
    each_lane(mask, [&](int l) { f(lane = l); });
    lane = -1;
  }

  void erase(Warp& w, Group& group) { w.groups.erase(w.groups.begin() + (&group - w.groups.data())); }

  // One instruction. False where the group has to wait, and then does it again later.
  bool execute(Warp& w, Group& group, const Instruction& in, u32 mask) {
    const i32* o = program.operands + in.at;
    if (!mask) return group.at++, true;
    if (arithmetic(w, in, o, mask)) return group.at++, true;
    switch (in.code()) {
      case Op::bra_: return branch(w, group, in, mask);
      case Op::ret_: return end(w, group, mask);
      case Op::nop_: break;
      case Op::ld_: one_by_one(mask, [&](int l) { load(w, in, o, l); }); break;
      case Op::st_: one_by_one(mask, [&](int l) { store(w, in, o, l); }); break;
      case Op::atom_: case Op::red_: one_by_one(mask, [&](int l) { atomic(w, in, o, l); }); break;
      case Op::mapa_:
        each_lane(mask, [&](int l) {
          w.set<u32>(o[0], l, (w.get<u32>(o[1], l) & (RANK_STEP - 1)) + (w.get<u32>(o[2], l) + 1) * RANK_STEP);
        });
        break;
      case Op::shfl_: case Op::vote_: case Op::bar_warp_: {
        const i32 member = in.code() == Op::shfl_ ? o[5] : in.code() == Op::vote_ ? o[2] : o[0];
        if (!together(w, group, w.get<u32>(member, __builtin_ctz(mask)))) return false;
        if (in.code() == Op::shfl_) shuffle(w, in, o, mask);
        if (in.code() == Op::vote_) vote(w, in, o, mask);
        break;
      }
      case Op::bar_sync_: case Op::bar_red_: case Op::bar_arrive_:
        if (!together(w, group, ALL)) return false;
        return named_barrier(w, group, in, o, mask);
      case Op::cluster_arrive_: case Op::cluster_wait_:
        if (!together(w, group, ALL)) return false;
        return meet(w, group, in);
      case Op::mbarrier_init_:
        each_lane(mask, [&](int l) {
          Block& block = *w.block;
          const u32 at = (u32)w.address(o, l), count = w.get<u32>(o[3], l);
          block.shared.at(at, 8);
          Barrier& barrier = block.shared.barriers[at];
          barrier = Barrier();
          barrier.expected = barrier.pending = (i32)count;
        });
        break;
      case Op::mbarrier_arrive_: case Op::mbarrier_expect_: one_by_one(mask, [&](int l) { arrive(w, in, o, l); }); break;
      case Op::mbarrier_wait_: return wait_for_barrier(w, group, in, o, mask);
      case Op::fence_async_:
        w.clock.fence();
        break;
      case Op::ldmatrix_: case Op::stmatrix_: case Op::movmatrix_: case Op::mma_:
        if (!together(w, group, ALL)) return false;
        if (in.code() == Op::ldmatrix_) load_matrices(w, in, o);
        if (in.code() == Op::stmatrix_) store_matrices(w, in, o);
        if (in.code() == Op::movmatrix_) turn_matrix(w, o);
        if (in.code() == Op::mma_) warp_product(w, in, o);
        break;
      case Op::wgmma_: return product(w, group, in);
      case Op::wgmma_commit_:
        w.committed.push_back(std::move(w.open));
        w.open.clear();
        break;
      case Op::wgmma_wait_:
        if (!together(w, group, ALL)) return false;
        w.tick();
        while ((int)w.committed.size() > in.mod) {
          for (const Range& r : w.committed.front()) w.block->shared.end_read(r.offset, r.bytes, w.agent, w.clock);
          w.committed.pop_front();
        }
        break;
      case Op::tma_load_: case Op::tma_store_: case Op::bulk_load_: case Op::bulk_reduce_: case Op::copy_: case Op::copy_arrive_:
        one_by_one(mask, [&](int l) { start_copy(w, in, o, l); });
        break;
      case Op::bulk_commit_: each_lane(mask, [&](int l) { w.bulk_groups[l]++; }); break;
      case Op::bulk_wait_: {
        bool done = true;
        each_lane(mask, [&](int l) {
          const u32 most = in.mod & 15, group = w.bulk_groups[l];
          done &= group <= most || engine.done(&w, l, group - most, in.mod & 16);
        });
        if (!done) return group.wait = Wait::copies, false;
        w.tick();
        std::erase_if(w.sent, [&](const Sent& sent) {
          if (!(mask >> sent.lane & 1) || sent.group + (in.mod & 15) >= w.bulk_groups[sent.lane]) return false;
          w.block->shared.end_read(sent.range.offset, sent.range.bytes, w.agent, w.clock);
          return true;
        });
        break;
      }
      default: throw Fault("this instruction has no meaning here");
    }
    group.at++;
    group.wait = Wait::nothing;
    return true;
  }

  bool branch(Warp& w, Group& group, const Instruction& in, u32 mask) {
    const u32 stay = group.mask & ~mask;
    if (!stay) return group.at = in.target, true;
    group.mask = stay;
    const i32 target = in.target;
    group.at++;
    w.groups.push_back({mask, target});
    return true;
  }

  bool end(Warp& w, Group& group, u32 mask) {
    group.mask &= ~mask;
    if (group.mask) return group.at++, true;
    erase(w, group);
    if (!w.groups.empty()) return true;
    if (!w.open.empty() || !w.committed.empty()) throw Fault("a warp ends while a wgmma of its is in flight");
    if (!w.sent.empty()) throw Fault("a warp ends, and has not waited for a copy that reads its shared memory");
    w.block->cluster->running--;
    settle(*w.block->cluster);
    if (--w.block->running == 0) engine.leave(w.block);
    return true;
  }

  // Whether these lanes are at one instruction; those that have ended do not count.
  bool together(Warp& w, Group& group, u32 lanes) {
    if (!(lanes & live(w) & ~group.mask)) return true;
    group.wait = Wait::lanes;
    return false;
  }

  // --- memory

  // The place that a lane's address names, in the block whose shared memory it is in, or nowhere.
  struct Location { u8* at; Shared* shared; u32 offset; };

  Location locate(Warp& w, int space, u64 address, u32 bytes, int lane) {
    if (space == 0) {
      if (address >= SHARED_WINDOW) space = 2, address -= SHARED_WINDOW;
      else if (address >= LOCAL_WINDOW) space = 4, address -= LOCAL_WINDOW;
    }
    if (space == 2) {
      Shared& shared = block_of(w, (u32)address).shared;
      const u32 offset = (u32)address & (RANK_STEP - 1);
      return {shared.at(offset, bytes), &shared, offset};
    }
    if (space == 4) {
      if (address + bytes > w.local[lane].size()) throw Fault("past the end of local memory");
      return {w.local[lane].data() + address, nullptr, 0};
    }
    if (address % std::min(bytes, 16u)) throw Fault(text("%u bytes at %llx are not aligned", bytes, (unsigned long long)address));
    const bool parameter = address >= launch.parameters && address + bytes <= launch.parameters + 4096;
    if (!parameter) launch.memory->check(address, bytes);
    return {(u8*)address, nullptr, 0};
  }

  Block& block_of(Warp& w, u32 address) {
    const u32 rank = address / RANK_STEP;
    if (!rank) return *w.block;
    if (rank > w.block->cluster->blocks.size()) throw Fault(text("shared memory of block %u of a cluster", rank - 1));
    return w.block->cluster->blocks[rank - 1];
  }

  void load(Warp& w, const Instruction& in, const i32* o, int lane) {
    const u32 size = size_of(in.kind()), bytes = size * in.results;
    const Location at = locate(w, in.mod, w.address(o + in.results, lane), bytes, lane);
    if (at.shared) at.shared->note_read(at.offset, bytes, w.agent, w.clock);
    for (int i = 0; i < in.results; i++) {
      u64 x = 0;
      memcpy(&x, at.at + i * size, size);
      const bool sign = in.kind() == Type::s8 || in.kind() == Type::s16 || in.kind() == Type::s32;
      if (sign && x >> (8 * size - 1)) x |= ~0ull << 8 * size;
      if (in.type2 != (i32)Type::none) w.set<u64>(o[i], lane, x);
      else w.set<u32>(o[i], lane, (u32)x);
    }
  }

  void store(Warp& w, const Instruction& in, const i32* o, int lane) {
    const int count = in.operands - 3;
    const u32 size = size_of(in.kind()), bytes = size * count;
    const Location at = locate(w, in.mod, w.address(o, lane), bytes, lane);
    if (at.shared) at.shared->note_write(at.offset, bytes, w.agent, w.clock);
    for (int i = 0; i < count; i++) {
      const u64 x = size == 8 ? w.get<u64>(o[3 + i], lane) : w.get<u32>(o[3 + i], lane);
      memcpy(at.at + i * size, &x, size);
    }
  }

  void atomic(Warp& w, const Instruction& in, const i32* o, int lane) {
    const bool returns = in.code() == Op::atom_;
    o += returns;
    const int count = in.operands - 3, how = in.mod >> 4;
    const u32 size = size_of(in.kind());
    if (how == 7) {
      const Location at = locate(w, in.mod & 15, w.address(o, lane), size, lane);
      return exchange(w, in, o, at, lane);
    }
    const Location at = locate(w, in.mod & 15, w.address(o, lane), size * count, lane);
    for (int i = 0; i < count; i++) {
      u8* place = at.at + i * size;
      if (in.kind() == Type::f32) {
        float old;
        memcpy(&old, place, 4);
        const float made = old + w.get<float>(o[3 + i], lane);
        memcpy(place, &made, 4);
        if (returns) w.set<float>(o[-1], lane, old);
        continue;
      }
      as_integer(in.kind(), [&](auto type) {
        typedef decltype(type) T;
        T old;
        memcpy(&old, place, sizeof old);
        const T x = w.get<T>(o[3 + i], lane);
        T made = old;
        switch (how) {
          case 0: made = (T)(old + x); break;
          case 1: made = std::min(old, x); break;
          case 2: made = std::max(old, x); break;
          case 3: made = (T)(old | x); break;
          case 4: made = (T)(old & x); break;
          case 5: made = (T)(old ^ x); break;
          case 6: made = x; break;
          case 8: made = (std::make_unsigned_t<T>)old >= (std::make_unsigned_t<T>)x ? (T)0 : (T)(old + 1); break;
          default: throw Fault("this atomic operation has no meaning here");
        }
        memcpy(place, &made, sizeof made);
        if (returns) w.set<T>(o[-1], lane, old);
      });
    }
  }

  void exchange(Warp& w, const Instruction& in, const i32* o, const Location& at, int lane) {  // cas
    as_integer(in.kind(), [&](auto type) {
      typedef decltype(type) T;
      T old;
      memcpy(&old, at.at, sizeof old);
      const T made = old == w.get<T>(o[3], lane) ? w.get<T>(o[4], lane) : old;
      memcpy(at.at, &made, sizeof made);
      w.set<T>(o[-1], lane, old);
    });
  }

  // --- lanes together

  void shuffle(Warp& w, const Instruction& in, const i32* o, u32 mask) {
    u32 from[32];
    memcpy(from, w.word(o[2]), sizeof from);
    each_lane(mask, [&](int l) {
      const u32 by = w.get<u32>(o[3], l), c = w.get<u32>(o[4], l), clamp = c & 31, segment = c >> 8 & 31;
      const u32 lowest = l & segment, highest = lowest | (clamp & ~segment);
      u32 other = 0;
      bool inside = true;
      switch (in.mod) {
        case 0: other = lowest | (by & ~segment & 31); inside = other <= highest; break;
        case 1: other = l ^ by; inside = other <= highest; break;
        case 2: other = l - by; inside = (i32)other >= (i32)highest; break;
        default: other = l + by; inside = other <= highest; break;
      }
      if (!inside) other = l;
      if (!(mask >> other & 1)) throw Fault(text("lane %d shuffles with lane %u, which is not there", l, other));
      w.set<u32>(o[0], l, from[other]);
      if (o[1] >= 0) w.predicates[o[1]] = w.predicates[o[1]] & ~(1u << l) | (u32)inside << l;
    });
  }

  void vote(Warp& w, const Instruction& in, const i32* o, u32 mask) {
    const u32 yes = w.predicates[o[1]] & mask;
    if (in.mod == 2) return each_lane(mask, [&](int l) { w.set<u32>(o[0], l, yes); });
    const bool made = in.mod == 0 ? yes != 0 : in.mod == 1 ? yes == mask : yes == 0 || yes == mask;
    w.predicates[o[0]] = w.predicates[o[0]] & ~mask | (made ? mask : 0);
  }

  // --- barriers

  bool named_barrier(Warp& w, Group& group, const Instruction& in, const i32* o, u32 mask) {
    const bool red = in.code() == Op::bar_red_;
    const i32* operand = o + red;
    const int first = __builtin_ctz(mask), id = (int)w.get<u32>(operand[0], first);
    const u32 threads = w.get<u32>(operand[1], first);
    if (id > 15) throw Fault(text("bar %d: there are 16", id));
    if (threads % 32 || !threads) throw Fault(text("bar %d of %u threads", id, threads));
    Block::Named& barrier = w.block->named[id];
    if (group.wait == Wait::named_barrier) {  // it is over
      group.wait = Wait::nothing;
      w.clock.join(barrier.past);
      w.tick();
      if (red && o[0] >= 0) w.predicates[o[0]] = barrier.result ? ALL : 0;
      return group.at++, true;
    }
    barrier.clock.join(w.clock);
    w.tick();
    barrier.arrived += 32;
    if (red) barrier.any |= (w.predicates[o[3]] & mask) != 0;
    const u32 round = barrier.round;
    if (barrier.arrived > threads) throw Fault(text("bar %d: more threads than %u", id, threads));
    if (barrier.arrived == threads) {
      barrier.arrived = 0;
      barrier.round++;
      barrier.past.join(barrier.clock);
      barrier.result = barrier.any;
      barrier.any = false;
    }
    if (in.code() == Op::bar_arrive_) return group.at++, true;
    group.wait = Wait::named_barrier;
    group.barrier = id;
    group.phase = round;
    return barrier.round != round ? named_barrier(w, group, in, o, mask) : false;
  }

  // All warps of a cluster that have not ended have arrived.
  static void settle(Cluster& cluster) {
    Cluster::Meeting& meeting = cluster.meeting;
    if (!meeting.arrived || meeting.arrived < cluster.running) return;
    meeting.arrived = 0;
    meeting.round++;
    meeting.past.join(meeting.clock);
  }

  bool meet(Warp& w, Group& group, const Instruction& in) {
    Cluster::Meeting& meeting = w.block->cluster->meeting;
    if (in.code() == Op::cluster_arrive_) {
      meeting.clock.join(w.clock);
      w.tick();
      w.meeting_round = meeting.round;
      meeting.arrived++;
      settle(*w.block->cluster);
      return group.at++, true;
    }
    group.wait = Wait::cluster;
    group.phase = w.meeting_round;
    if (meeting.round == group.phase) return false;
    group.wait = Wait::nothing;
    w.clock.join(meeting.past);
    w.tick();
    return group.at++, true;
  }

  void arrive(Warp& w, const Instruction& in, const i32* o, int lane) {
    const u32 address = (u32)w.address(o, lane);
    Barrier& barrier = block_of(w, address).shared.barrier(address & (RANK_STEP - 1));
    barrier.now.join(w.clock);
    w.tick();
    if (in.code() == Op::mbarrier_expect_) barrier.bytes += w.get<u32>(o[3], lane);
    barrier.pending--;
    barrier.settle();
  }

  bool wait_for_barrier(Warp& w, Group& group, const Instruction& in, const i32* o, u32 mask) {
    const int first = __builtin_ctz(mask);
    const u32 at = (u32)w.address(o + 1, first), phase = w.get<u32>(o[4], first);
    Barrier& barrier = w.block->shared.barrier(at);
    if ((barrier.phase & 1) == (phase & 1)) {
      group.wait = Wait::mbarrier;
      group.barrier = at;
      group.phase = phase & 1;
      return false;
    }
    w.clock.join(barrier.past);
    w.tick();
    w.predicates[o[0]] |= mask;
    group.wait = Wait::nothing;
    return group.at++, true;
  }

  // --- products and copies

  // The warps of a warpgroup wait for one another here; the last one makes the product for all.
  bool product(Warp& w, Group& group, const Instruction& in) {
    if (!together(w, group, ALL)) return false;
    Block& block = *w.block;
    const int first = w.number / 4 * 4;
    if (w.released) {
      w.released = false;
      group.wait = Wait::nothing;
      return group.at++, true;
    }
    w.at_product = &in;
    group.wait = Wait::warpgroup;
    Warp* four[4];
    for (int i = 0; i < 4; i++) {
      four[i] = &block.warps[first + i];
      if (!four[i]->at_product) return false;
      if (four[i]->at_product != &in) throw Fault("the warps of a warpgroup are at different wgmmas");
    }
    warpgroup_product(four, program.operands + in.at, in);
    for (Warp* one : four) {
      one->at_product = nullptr;
      one->released = one != &w;
    }
    group.wait = Wait::nothing;
    return group.at++, true;
  }

  void start_copy(Warp& w, const Instruction& in, const i32* o, int lane) {
    Copy copy{};
    copy.block = w.block;
    copy.warp = &w;
    copy.lane = lane;
    copy.blocks = 1u << w.block->rank;
    copy.group = w.bulk_groups[lane];
    auto map = [&](const i32* operand) {
      memcpy(&copy.map, (const void*)w.address(operand, lane), sizeof copy.map);
      if (!copy.map.rank || copy.map.rank > 5) throw Fault("what a copy was given is no tensor map");
      copy.bytes = box_bytes(copy.map);
    };
    auto local = [&](const i32* operand) { return (u32)w.address(operand, lane) & (RANK_STEP - 1); };
    switch (in.code()) {
      case Op::tma_load_: {
        copy.kind = Copy::tensor_load;
        copy.offset = local(o);
        map(o + 3);
        copy.barrier = local(o + 6);
        const u32 mask = w.get<u16>(o[9], lane);
        if (mask) copy.blocks = mask;
        for (u32 i = 0; i < copy.map.rank; i++) copy.at[i] = w.get<i32>(o[10 + i], lane);
        if ((u32)in.operands != 10 + copy.map.rank) throw Fault("a box of another rank than its tensor map");
        break;
      }
      case Op::tma_store_:
        copy.kind = Copy::tensor_store;
        map(o);
        copy.offset = local(o + 3);
        for (u32 i = 0; i < copy.map.rank; i++) copy.at[i] = w.get<i32>(o[6 + i], lane);
        break;
      case Op::bulk_load_:
        copy.kind = Copy::bulk_load;
        copy.offset = local(o);
        copy.address = w.address(o + 3, lane);
        copy.barrier = local(o + 6);
        copy.bytes = w.get<u32>(o[9], lane);
        break;
      case Op::copy_:
        copy.kind = Copy::thread_load;
        copy.offset = local(o);
        copy.address = w.address(o + 3, lane);
        copy.bytes = w.get<u32>(o[6], lane);
        break;
      case Op::copy_arrive_:
        copy.kind = Copy::arrival;
        copy.barrier = local(o);
        break;
      default:
        copy.kind = Copy::bulk_reduce;
        copy.address = w.address(o, lane);
        copy.offset = local(o + 3);
        copy.bytes = w.get<u32>(o[6], lane);
        break;
    }
    if (in.code() == Op::tma_store_ || in.code() == Op::bulk_reduce_)
      w.sent.push_back({lane, copy.group, {copy.offset, copy.bytes}});
    copy.clock = w.clock;
    w.tick();
    engine.start(std::move(copy));
  }

  void report_deadlock(const std::vector<Warp*>& order) {
    static const char* names[] = {"nothing", "other lanes", "an mbarrier", "a named barrier", "the cluster", "its warpgroup", "copies"};
    std::string all;
    for (const Warp* w : order)
      for (const Group& g : w->groups) {
        if (fault_at < 0) fault_at = g.at;
        all += text("\nblock %d, warp %d, lanes %08x: instruction %d, waits for %s", w->block->index, w->number, g.mask, g.at,
                    names[(int)g.wait]);
        if (g.wait == Wait::mbarrier || g.wait == Wait::named_barrier) all += text(" %u, phase %u", g.barrier, g.phase);
      }
    throw Fault("all warps wait:" + all);
  }
};

}  // namespace

extern "C" {

const char* machine_ops() {
  return ""
#define X(name) #name " "
      EACH_OP(X)
#undef X
      ;
}

// Runs a kernel. Nothing, or what is wrong: then `at` is the instruction, and `message` has the words.
int machine_run(const Program* program, u64 parameters, const u64* spans, int span_count, int grid, int threads, int cluster,
                int resident, u32 dynamic_bytes, u32 seed, int checks, i64 budget, i64* executed, i32* at, char* message,
                int room) {
  Memory memory;
  for (int i = 0; i < span_count; i++) memory.spans.push_back({spans[2 * i], spans[2 * i + 1]});
  std::sort(memory.spans.begin(), memory.spans.end(), [](auto& a, auto& b) { return a.from < b.from; });
  std::vector<Memory::Span> merged;  // tensors may be views of one memory
  for (const auto& span : memory.spans)
    if (!merged.empty() && span.from <= merged.back().to) merged.back().to = std::max(merged.back().to, span.to);
    else merged.push_back(span);
  memory.spans = merged;
  const Launch launch{program, &memory, parameters, grid, threads, cluster, resident, dynamic_bytes, seed, checks != 0, budget};
  Machine machine(launch);
  try {
    machine.run();
    *executed = machine.executed;
    return 0;
  } catch (const std::exception& fault) {
    *executed = machine.executed;
    *at = machine.fault_at;
    snprintf(message, room, "%s%s%s", fault.what(), machine.where.empty() ? "" : "\nin ", machine.where.c_str());
    return 1;
  }
}

}
