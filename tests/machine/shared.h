// Shared memory of a block: its bytes, its barriers, and who touched each word of it last.
#pragma once
#include <cstdio>
#include <map>
#include <stdexcept>
#include <string>
#include <vector>

#include "clocks.h"

struct Fault : std::runtime_error {
  using std::runtime_error::runtime_error;
};

template <class... T> std::string text(const char* format, T... values) {
  char buffer[512];
  snprintf(buffer, sizeof buffer, format, values...);
  return buffer;
}

// An mbarrier. What arrives belongs to the phase under way; waiters of a phase that is over take over `past`.
struct Barrier {
  i32 expected = 0, pending = 0;
  i64 bytes = 0;
  u32 phase = 0;
  Clock now, past;

  void settle() {
    if (pending < 0) throw Fault("an mbarrier has more arrivals than it was made for");
    if (pending || bytes) return;
    phase ^= 1;
    pending = expected;
    past.join(now);
  }
};

// Times of one warp's reads are kept apart from those that are still under way: wgmma's and bulk copies'.
constexpr u32 UNDER_WAY = ~0u;

class Shared {
 public:
  Shared(u32 bytes, int agents, bool checks)
      : data(bytes, 0xff), agents(agents), checks(checks), words((bytes + 3) / 4), written(words), writer(words),
        arriving(words), read((size_t)words * agents) {}

  std::vector<u8> data;
  std::map<u32, Barrier> barriers;

  u8* at(u32 offset, u32 bytes) {
    if (offset + (u64)bytes > data.size())
      throw Fault(text("%u bytes at %u of shared memory, which has %zu", bytes, offset, data.size()));
    if (offset % std::min(bytes, 16u)) throw Fault(text("%u bytes at %u of shared memory are not aligned", bytes, offset));
    return data.data() + offset;
  }

  Barrier& barrier(u32 offset) {
    const auto found = barriers.find(offset);
    if (found == barriers.end()) throw Fault(text("no mbarrier at %u of shared memory", offset));
    return found->second;
  }

  // An ordinary load.
  void note_read(u32 offset, u32 bytes, int agent, const Clock& clock) {
    if (checks) each(offset, bytes, [&](u32 w) {
      after_write(w, agent, clock, "read");
      seen_by(agent, w) = std::max(seen_by(agent, w), clock.seen[agent]);
    });
  }
  // An ordinary store.
  void note_write(u32 offset, u32 bytes, int agent, const Clock& clock) {
    if (checks) each(offset, bytes, [&](u32 w) {
      after_write(w, agent, clock, "written");
      after_reads(w, agent, clock);
      written[w] = clock.seen[agent];
      writer[w] = (u8)(agent | ORDINARY);
    });
  }
  // The tensor cores or the copy engine begin to read; `end_read` says when they have.
  void begin_read(u32 offset, u32 bytes, int agent, const Clock& clock) {
    if (checks) each(offset, bytes, [&](u32 w) {
      after_write(w, agent, clock, "read by the async proxy");
      published(w, clock);
      seen_by(agent, w) = UNDER_WAY;
    });
  }
  void end_read(u32 offset, u32 bytes, int agent, const Clock& clock) {
    if (checks) each(offset, bytes, [&](u32 w) { seen_by(agent, w) = clock.seen[agent]; });
  }
  // A copy is to write, of the copy engine or (`ordinary`) a thread's own. What is there is lost at once: whoever looks
  // before it arrives must not find anything.
  void begin_write(u32 offset, u32 bytes, int agent, const Clock& clock, bool ordinary) {
    if (checks) each(offset, bytes, [&](u32 w) {
      after_write(w, agent, clock, "overwritten by a copy");
      after_reads(w, agent, clock);
      if (!ordinary) published(w, clock);
      written[w] = clock.seen[agent];
      writer[w] = (u8)(ordinary ? agent | ORDINARY : agent);
      arriving[w] = true;
    });
    memset(at(offset, bytes), 0xff, bytes);
  }
  void end_write(u32 offset, u32 bytes) {
    if (checks) each(offset, bytes, [&](u32 w) { arriving[w] = false; });
  }

 private:
  static constexpr u8 ORDINARY = 0x80;  // written by a store, not by the copy engine
  const int agents;
  const bool checks;
  const u32 words;
  std::vector<u32> written;
  std::vector<u8> writer, arriving;
  std::vector<u32> read;

  u32& seen_by(int agent, u32 word) { return read[(size_t)agent * words + word]; }
  template <class F> void each(u32 offset, u32 bytes, F f) {
    at(offset, bytes);
    for (u32 w = offset / 4; w < (offset + bytes + 3) / 4; w++) f(w);
  }
  void after_write(u32 w, int agent, const Clock& clock, const char* what) {
    if (arriving[w]) throw Fault(text("race: word %u of shared memory is %s while a copy into it is under way", 4 * w, what));
    const int by = writer[w] & ~ORDINARY;
    if (by != agent && written[w] > clock.seen[by])
      throw Fault(text("race: word %u of shared memory is %s by warp %d, and nothing says that warp %d's write to it is over",
                       4 * w, what, agent, by));
  }
  void after_reads(u32 w, int agent, const Clock& clock) {
    for (int by = 0; by < agents; by++) {
      const u32 time = seen_by(by, w);
      if (time == UNDER_WAY)
        throw Fault(text("race: word %u of shared memory is overwritten while an asynchronous read of warp %d's is under way",
                         4 * w, by));
      if (by != agent && time > clock.seen[by])
        throw Fault(text("race: word %u of shared memory is overwritten by warp %d, and nothing says that warp %d has read it",
                         4 * w, agent, by));
    }
  }
  void published(u32 w, const Clock& clock) {
    const int by = writer[w] & ~ORDINARY;
    if (writer[w] & ORDINARY && written[w] > clock.fenced[by])
      throw Fault(text("word %u of shared memory, stored by warp %d, goes to the async proxy without fence.proxy.async",
                       4 * w, by));
  }
};
