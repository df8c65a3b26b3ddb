// Runs the kernels of a variant. route.inc is route.cu with its shared memory taken from `blocks_memory`.
#include "fibers.h"
#include <cstring>

static std::vector<std::vector<unsigned>> blocks_memory;
#include "route.inc"

constexpr size_t STACK = 1 << 16;
constexpr unsigned GUARD = 0xcdcdcdcd;  // behind the shared memory, and in it at first
static void (*kernel)(Params);
static Params parameters;

static void enter() {
  kernel(parameters);
  fibers::all[fibers::now].done = true, fibers::progress++;
  for (;;) fibers::yield();
}

// 0, or 1 where all wait for one another, or 2 where shared memory was too small.
static int launch(void (*entry)(Params), int blocks, int threads, int shared) {
  using namespace fibers;
  kernel = entry, gridDim.x = blocks, fibers::threads = threads, grid = {};
  all.assign(blocks * threads, {}), values.assign(blocks * threads, 0);
  warps.assign(blocks * threads / 32, {}), fibers::blocks.assign(blocks, {});
  blocks_memory.assign(blocks, std::vector<unsigned>(shared / 4 + 16, GUARD));
  std::vector<std::vector<char>> stacks(all.size(), std::vector<char>(STACK));
  for (size_t i = 0; i < all.size(); i++) {
    Fiber& one = all[i];
    one.block = i / threads, one.thread = i % threads;
    getcontext(&one.context);
    one.context.uc_stack.ss_sp = stacks[i].data(), one.context.uc_stack.ss_size = STACK;
    makecontext(&one.context, enter, 0);
  }
  for (size_t left = 1; left;) {
    long before = progress;
    left = 0;
    for (now = (int)all.size() - 1; now >= 0; now--) {  // last first: what depends on the order of threads shows
      if (all[now].done) continue;
      left++, blockIdx.x = all[now].block, threadIdx.x = all[now].thread;
      swapcontext(&scheduler, &all[now].context);
    }
    if (left && progress == before) return 1;
  }
  for (auto& memory : blocks_memory) {
    for (int i = 0; i < 16; i++) {
      if (memory[shared / 4 + i] != GUARD) return 2;
    }
  }
  return 0;
}

extern "C" int run(const Params* given, int blocks, int threads, int shared) {
  parameters = *given;
  return launch(route_tokens, blocks, threads, shared);
}
