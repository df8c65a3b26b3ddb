// A warpgroup's 64 rows of Q: queries of one head, or of PACK heads that share a key head.
#pragma once
#include "params.cuh"

// A chunk of columns of them. A fifth dimension, for the heads of a pack, only where there is one: it slows the copy
// engine down.
DEVICE void load_queries(u32 to, const TensorMap& map, u32 barrier, int column, int query, int head, int batch) {
  if (PACK == 1) tma::load(to, map, barrier, column, query, head, batch);
  else tma::load(to, map, barrier, column, 0, query, head, batch);
}

// Packs that do not divide 64 leave rows of Q that no load fills. Whatever was there before could overflow the softmax
// and make its warp take another reference: still right, but not the same bits in every run.
DEVICE void clear_rows_of_nobody(u32 smem) {
  for (int slot = 0; slot < GROUPS * Q_STAGES; slot++)
    for (int chunk = 0; chunk < K_CHUNKS + (K_REST > 0); chunk++) {
      const int width = chunk < K_CHUNKS ? K_WIDTH : K_REST;
      const u32 at = smem + Q_AT + Q_TILE * slot + chunk * 64 * K_WIDTH;
      for (int i = QUERIES * PACK * width + 4 * threadIdx.x; i < 64 * width; i += 4 * THREADS)
        asm volatile("st.shared.b32 [%0], %1;" ::"r"(at + i), "r"(0) : "memory");
    }
  asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
}
