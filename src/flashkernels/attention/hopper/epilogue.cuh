// From the accumulators of a tile to the output and its log-sum-exp; and the combination of a cut tile's parts.
#pragma once
#include "careful.cuh"
#include "softmax.cuh"

struct Epilogue {
  const Params& p;
  int group, warp, lane;
  int column = 0;            // the first of this warpgroup's O_COLUMNS
  u32 words[O_COLUMNS / 4];  // the output of both rows, 16 bits an element

  // The factor that normalises each row. Also writes the log-sum-exp. No branches: a wgmma is in flight.
  DEVICE void normalise(const Work& w, const Softmax& softmax, float (&factor)[2]) const {
#pragma unroll
    for (int r = 0; r < 2; r++) {
      const Place place = place_of(w, group, warp * 16 + lane / 4 + 8 * r);
      float total = softmax.total[r], reference = softmax.reference[r], rescale = 1.f;
      total += __shfl_xor_sync(~0u, total, 1);
      total += __shfl_xor_sync(~0u, total, 2);
      if (SINKS) {  // one more logit, without a value
        const float sink = p.sinks[place.head] * LOG2E, most = fmaxf(fmaxf(reference, sink), UNSEEN);
        rescale = exp2_approx(reference - most);
        total = total * rescale + exp2_approx(sink - most);
        reference = most;
      }
      factor[r] = total == 0.f ? 0.f : rescale * value_scale(p, w) * reciprocal(total);
      const float lse = total == 0.f ? -INF : (reference + log2_approx(total)) * LN2;
      if (p.lse != nullptr && (lane & 3) == 0 && place.exists && column == 0)
        p.lse[w.batch * p.lse_batch + place.head * p.lse_head + w.q_row + place.query] = lse;
    }
  }

  // Reads the accumulators; right after the wait for them.
  DEVICE void round(const float (&o)[O_COLUMNS / 2], const float (&factor)[2]) {
#pragma unroll
    for (int i = 0; i < O_COLUMNS / 4; i++) words[i] = pack(o[2 * i] * factor[i & 1], o[2 * i + 1] * factor[i & 1]);
    keep(words);
  }

  // Whether the head has these 8 columns: of two equal shares, the second may have 8 too many.
  DEVICE bool is_there(int at) const { return O_COLUMNS == DV || column + at < DV; }

  // The columns from FIRST on. Pairs of lanes exchange halves so that each stores 8 bytes, and four lanes 32 contiguous
  // ones.
  template <int FIRST = 0> DEVICE void store(const Work& w) const {
    const int quarter = lane & 3, odd = quarter & 1;
#pragma unroll
    for (int r = 0; r < 2; r++) {
      const Place place = place_of(w, group, warp * 16 + lane / 4 + 8 * r);
      u16* row = p.out + output_at(p, w, place.query, place.head) + column;
#pragma unroll
      for (int j = FIRST / 8; j + 1 < O_COLUMNS / 8; j += 2) {
        const u32 x = words[2 * j + r], y = words[2 * j + 2 + r];
        const u32 given = __shfl_xor_sync(~0u, odd ? x : y, 1);
        uint2 both;
        both.x = odd ? given : x;
        both.y = odd ? y : given;
        if (place.exists && is_there((j + odd) * 8)) *(uint2*)(row + (j + odd) * 8 + (quarter >> 1) * 4) = both;
      }
      if ((O_COLUMNS / 8) % 2 && place.exists && is_there(O_COLUMNS - 8))
        *(u32*)(row + O_COLUMNS - 8 + quarter * 2) = words[O_COLUMNS / 4 - 2 + r];
    }
  }

  // The same by the copy engine, which writes whole lines beside the next tile's work: as many columns as this warp has
  // shared memory for, from `from` on. Of rows that are made again it writes none, as it may come later than those.
  DEVICE void send(const Work& w, u32 from, bool again) const {
    constexpr int SENT = O_COLUMNS < 64 * OUT_CHUNKS ? O_COLUMNS : 64 * OUT_CHUNKS;
    if (lane == 0) await_reads();  // of the tile before
    __syncwarp();
    put_rows<SENT>(from + (lane & 15) * 128, ((lane & 7) ^ lane >> 4) << 4,
                   [&](int j, int r) { return words[2 * j + r]; });
    publish_shared();
    __syncwarp();
    if (lane == 0 && !again)
      send_chunks<OUT_CHUNKS>(from, p.o, first_query(w, group) + warp * 16, w.head, w.batch);
    if constexpr (SENT < O_COLUMNS) store<SENT>(w);
  }

  // Whether this warp has to make its rows again, without the keys that a mask hides (see careful.cuh).
  DEVICE bool poisoned(const float (&o)[O_COLUMNS / 2]) const {
    bool nan = false;
#pragma unroll
    for (int i = 0; i < O_COLUMNS / 2; i++) nan |= o[i] != o[i];
    return (BAND || RAGGED) && __any_sync(~0u, nan);
  }

  DEVICE void note(bool poisoned, u32 list, const Work& w) const {
    if (!(BAND || RAGGED) || SPLIT) return;
    const Place place = place_of(w, group, warp * 16);
    u16* first_row = p.out + output_at(p, w, place.query, place.head) + column;
    note_poisoned(poisoned && lane == 0 && place.exists, list, first_row, w.id);
  }

  // --- cut tiles: every part leaves its accumulators; whoever comes last adds them up, in a fixed order

  // Parts of one warpgroup's rows: [part][block of a cluster][group][2 references, 2 sums, accumulators][thread].
  static constexpr int FLOATS = DV / 2 + 4;

  DEVICE float* left_by(const Work& w, int id) const {
    const u32 rows = ((id - p.whole) * CLUSTER + w.block % CLUSTER) * GROUPS + group;
    return p.partial + (rows * FLOATS * 128 + warp * 32 + lane);
  }

  // Shares that have a part of a tile.
  struct Shares { int first, last; };
  DEVICE Shares shares_of(int tile) const { return {tile * p.shares / p.cut, ((tile + 1) * p.shares - 1) / p.cut}; }

  DEVICE bool leave(const Work& w, const Softmax& softmax, const float (&o)[DV / 2]) const {
    float* to = left_by(w, w.id);
#pragma unroll
    for (int r = 0; r < 2; r++) {
      to[r * 128] = softmax.reference[r];
      to[(2 + r) * 128] = softmax.total[r];
    }
#pragma unroll
    for (int i = 0; i < DV / 2; i++) to[(4 + i) * 128] = o[i];
    __threadfence();
    const int tile = part_of(p, w.id).tile;
    const Shares shares = shares_of(tile);
    int* done = p.counters + 2 + (tile * CLUSTER + w.block % CLUSTER) * GROUPS + group;
    named_barrier::sync(1 + GROUPS + group, 128);
    int before = 0;
    if (warp == 0 && lane == 0) {
      before = atomicAdd(done, 1);
      if (before == shares.last - shares.first) *done = 0;  // for the next launch
    }
    return named_barrier::any(1 + GROUPS + group, 128, before == shares.last - shares.first);
  }

  DEVICE void combine(const Work& w, Softmax& softmax, float (&o)[DV / 2]) const {
    __threadfence();
    const int tile = part_of(p, w.id).tile;
    const Shares shares = shares_of(tile);
    auto left = [&](int share) -> const volatile float* {
      return left_by(w, p.whole + 2 * share + (share * p.cut / p.shares < tile));
    };
#pragma unroll
    for (int r = 0; r < 2; r++) {
      softmax.reference[r] = UNSEEN;
      softmax.total[r] = 0.f;
    }
    for (int s = shares.first; s <= shares.last; s++) {
      const volatile float* from = left(s);
#pragma unroll
      for (int r = 0; r < 2; r++) softmax.reference[r] = fmaxf(softmax.reference[r], from[r * 128]);
    }
#pragma unroll
    for (int i = 0; i < DV / 2; i++) o[i] = 0.f;
    for (int s = shares.first; s <= shares.last; s++) {
      const volatile float* from = left(s);
      float factor[2];
#pragma unroll
      for (int r = 0; r < 2; r++) {
        factor[r] = exp2_approx(from[r * 128] - softmax.reference[r]);
        softmax.total[r] = fmaf(from[(2 + r) * 128], factor[r], softmax.total[r]);
      }
#pragma unroll
      for (int i = 0; i < DV / 2; i++) o[i] = fmaf(from[(4 + i) * 128], factor[(i >> 1) & 1], o[i]);
    }
  }
};
