// Wide heads: what lies where in shared memory, in bytes.
#pragma once
#include "backward_wide_place.cuh"

constexpr int CHUNK = 64 * ROW;  // 64 rows of 64 columns
constexpr int BOX = 16;          // rows that one load brings

template <int OF> struct Layout {
  static constexpr bool TWO = OF != OF_V;  // dP is wanted, too
  static constexpr int GRAIN = OF == OF_Q ? Q_GRAIN : OF == OF_K ? K_GRAIN : V_GRAIN;
  static constexpr int STAGES = OF == OF_Q ? Q_STAGES : OF == OF_K ? K_STAGES : V_STAGES;

  // Of the gradient's columns each warpgroup has one half; the second's may be 8 more than there are.
  static constexpr int ALL = OF == OF_V ? DV : D, COLUMNS = ceil_div(ALL, 16) * 8;

  // The ring of a warpgroup. A slot is GRAIN chunks of an operand of scores, or SUM_ROWS rows of one half of what is
  // summed up.
  static constexpr int SLOT = CHUNK * GRAIN;
  static constexpr int SUM_ROWS = 16 * GRAIN, SUM_CHUNKS = ceil_div(COLUMNS, 64), SUM_SLOTS = 64 / SUM_ROWS;
  static constexpr int SUM_BYTES = SUM_ROWS * ROW * SUM_CHUNKS;
  static_assert(SUM_BYTES <= SLOT, "a slot is too small");
  // Slots that a warpgroup holds because their products still run: SHORT while it waits for more, LAG while it makes
  // weights.
  static constexpr int SHORT = 2 / GRAIN, LAG = SHORT + 1;
  static_assert(STAGES > LAG && LAG <= 2 * SUM_SLOTS, "a warpgroup would wait for a slot that it holds itself");
  // Statistics of a step are overwritten two steps later, with its first slot: all warps have read them when they hand
  // back the slots of the sums between.
  static_assert(STAGES <= 2 * SUM_SLOTS, "statistics may be overwritten early");

  static constexpr int OWN_BYTES = CHUNK * (TWO ? K_CHUNKS + V_CHUNKS : K_CHUNKS);
  static constexpr int OWN_AT = 0;                      // the rows' operands: Q and dO, K and V, or K
  static constexpr int WEIGHTS_AT = OWN_AT + OWN_BYTES; // [warpgroup], 64 rows x 64 columns
  static constexpr int RING_AT = WEIGHTS_AT + 2 * CHUNK;
  static constexpr int STATISTICS_AT = RING_AT + 2 * STAGES * SLOT;  // [warpgroup][2], levels and deltas of 64 columns
  static constexpr int STATISTICS = OF == OF_Q ? 0 : 512;
  static constexpr int OWN_FULL = STATISTICS_AT + 4 * STATISTICS;  // barriers, 8 bytes each
  static constexpr int FULL = OWN_FULL + 8;                        // [warpgroup][STAGES],
  static constexpr int EMPTY = FULL + 16 * STAGES;                 // likewise,
  static constexpr int RAW = EMPTY + 16 * STAGES;                  // and of slots that the producer looks through first
  static constexpr int BYTES = RAW + 16 * STAGES;
};
static_assert(Layout<OF_Q>::BYTES == Q_SHARED && Layout<OF_K>::BYTES == K_SHARED && Layout<OF_V>::BYTES == V_SHARED,
              "backward_wide_source.py and backward_wide_layout.cuh disagree about shared memory");
