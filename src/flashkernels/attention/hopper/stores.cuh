// Rows of a warp's accumulators to memory, through shared memory, by the copy engine: it writes whole lines, while the
// warp goes on.
#pragma once
#include "tma.cuh"

constexpr int ROWS_CHUNK = 16 * 128;  // bytes: 64 columns of a warp's 16 rows, of 16 bits, swizzled

// Before the copy engine or a wgmma may read what ordinary stores wrote.
DEVICE void publish_shared() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }

// All copies that this thread has started have read their shared memory: it may be written again.
DEVICE void await_reads() { asm volatile("cp.async.bulk.wait_group.read 0;" ::: "memory"); }

// Four 8 x 8 matrices of 16 bits, as accumulators have them, to shared memory. Each lane has the address of one row:
// the first eight those of the first matrix, and so on. Of two matrices, half of the lanes.
DEVICE void store_matrices(u32 to, u32 a, u32 b, u32 c, u32 d) {
  asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1, %2, %3, %4};"
               ::"r"(to), "r"(a), "r"(b), "r"(c), "r"(d) : "memory");
}
DEVICE void store_matrices(u32 to, u32 a, u32 b) {
  asm volatile("stmatrix.sync.aligned.m8n8.x2.shared.b16 [%0], {%1, %2};" ::"r"(to), "r"(a), "r"(b) : "memory");
}

// N columns of a warp's rows, of which `words` has columns 8j and on, to chunks of shared memory. `row`: where this lane's
// row begins. `swizzle`: which of a chunk's 16-byte parts its first ones are in, in bytes.
template <int N, class Words> DEVICE void put_rows(u32 row, u32 swizzle, Words words) {
#pragma unroll
  for (int j = 0; j < N / 8; j += 2) {
    const u32 to = row + j / 8 * ROWS_CHUNK + (j % 8 << 4 ^ swizzle);
    if (j + 1 < N / 8) store_matrices(to, words(j, 0), words(j, 1), words(j + 1, 0), words(j + 1, 1));
    else store_matrices(to, words(j, 0), words(j, 1));
  }
}

// Starts the copies of a warp's chunks at `from` to the rows from `row` on: by one lane, when all have published what
// they stored. What lies past the tensor's end is not written.
template <int CHUNKS> DEVICE void send_chunks(u32 from, const TensorMap& map, int row, int head, int batch) {
#pragma unroll
  for (int c = 0; c < CHUNKS; c++)
    asm volatile("cp.async.bulk.tensor.4d.global.shared::cta.bulk_group [%0, {%2, %3, %4, %5}], [%1];"
                 ::"l"(&map), "r"(from + c * ROWS_CHUNK), "r"(c * 64), "r"(row), "r"(head), "r"(batch) : "memory");
  asm volatile("cp.async.bulk.commit_group;" ::: "memory");
}
