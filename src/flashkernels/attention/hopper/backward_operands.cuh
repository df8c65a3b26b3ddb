// Consumers that split the keys of a tile: K and V of a warpgroup's 64 keys are operands of S and dP, from shared memory
// or, where there is room, in registers, so that they are read once a tile.
#pragma once
#include "backward_tile.cuh"

struct Operands : Tile {
  const u32 k_rows, v_rows;  // descriptors (lower halves)
  u32 k_words[K_IN_REGISTERS ? K_STEPS * 4 : 1], v_words[V_IN_REGISTERS ? V_STEPS * 4 : 1];

  DEVICE Operands(const Params& p, u32 smem, int group, int warp, int lane)
      : Tile(p, smem, group, warp, lane), k_rows(wgmma::by_row(smem + K_AT + group * 64 * ROW)),
        v_rows(wgmma::by_row(smem + V_AT + group * 64 * ROW)) {}

  // Of a tile whose K and V are there.
  DEVICE void load_operands() {
#pragma unroll
    for (int k = 0; k < (K_STEPS > V_STEPS ? K_STEPS : V_STEPS); k++) {
      u32 at = (group * 64 + warp * 16 + (lane & 15)) * ROW + k % 4 * 32 + (lane >> 4) * 16;
      at = (at ^ (at >> 7 & 7) << 4) + k / 4 * KEYS * ROW;
      if (K_IN_REGISTERS && k < K_STEPS) load_matrix(k_words + 4 * k, smem + K_AT + at);
      if (V_IN_REGISTERS && k < V_STEPS) load_matrix(v_words + 4 * k, smem + V_AT + at);
    }
  }
  DEVICE static void load_matrix(u32* to, u32 at) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(to[0]), "=r"(to[1]), "=r"(to[2]), "=r"(to[3]) : "r"(at) : "memory");
  }

  DEVICE void issue_s(float (&s)[SCORES], int stage) {  // Sᵀ = K·Qᵀ
    const u32 rows = wgmma::by_row(smem + Q_AT + Q_TILE * stage);
    if constexpr (K_IN_REGISTERS) issue_words<K_STEPS, true>(s, k_words, rows);
    else issue_scores<K_STEPS>(s, k_rows, rows);
  }
  template <bool FRESH> DEVICE void issue_dp(float (&dp)[SCORES], u32 n) {  // dPᵀ = V·dOᵀ; not FRESH: +=
    const u32 rows = wgmma::by_row(smem + O_AT + O_TILE * buffer(n));
    if constexpr (V_IN_REGISTERS) issue_words<V_STEPS, FRESH>(dp, v_words, rows);
    else issue_scores<V_STEPS, FRESH>(dp, v_rows, rows);
  }
  template <int STEPS, bool FRESH> DEVICE static void issue_words(float (&to)[SCORES], const u32* words, u32 rows) {
    wgmma::fence();
#pragma unroll
    for (int k = 0; k < STEPS; k++) {
      const u64 b = wgmma::descriptor(rows + (column_step(k, BLOCK) >> 4), ROW);
      if (FRESH && k == 0) mma_scores_registers_first(to, words, b);
      else mma_scores_registers(to, words + 4 * k, b);
    }
    wgmma::commit();
  }
};
