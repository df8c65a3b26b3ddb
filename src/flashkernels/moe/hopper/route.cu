// Routing: the k best experts of every token, their weights, and a stable counting sort of the choices, in one launch.
//
// A warp takes one token at a time. A lane has the logits of OWN experts as integers of the same order, sorted; a round
// is the maximum over the heads of 32 lists, and one list loses its head. Experts go from the last lane to the first:
// of equal ones the highest bit of a vote is the lowest expert, and to find it takes no instruction of the slow kind.
//
// Tokens of a warp follow one another, and so do warps and blocks: the rank of a choice among those of its expert is
// counted by adding one, without a running sum over tokens. Each block writes one row of counts; when all have done so,
// every block adds up the rows (those before its own, and all) and knows the place of each of its choices, which have
// been waiting in shared memory.
//
// Columns of counts in shared memory are *slots*: the i-th expert of a lane is slot i * 32 + lane, so that lanes meet
// no bank twice.
#include "config.cuh"
#include "route_machine.cuh"

struct Params {
  const void *logits, *bias;
  const int* used;
  float* weights;
  int *ids, *counts, *offsets, *permutation, *inverse, *tiles, *tile_offsets;
  u16* table;      // (blocks, COLUMNS)
  u32* arrivals;   // of blocks, and of those that have seen all arrive: 0 before and after
  i64 stride;      // elements between tokens
  float scale;
  int tokens, of_warp, first, last, shift, most;  // rows of a tile are 1 << shift, tiles at most `most`
};

constexpr int COLUMNS = 32 * OWN;
constexpr int GROUP = 32 / K2;  // tokens whose weights are computed at once: lane t * K2 + j has choice j of token t
constexpr int ROOM = BIAS && TOKENS > 1 ? TOKENS / 2 : TOKENS;  // a bias takes registers, too
constexpr int AHEAD = ROOM < GROUP ? ROOM : GROUP;  // tokens whose logits a warp loads at once
constexpr int LIST = K < OWN ? K : OWN;
constexpr int HIDDEN = -0x7fffffff - 1;  // a key below that of -inf
constexpr int SLOT = 1023;               // of a choice; above it is the rank
constexpr bool PACKED = SIZE == 2 && !BIAS;  // a 16-bit number leaves 10 bits of its key for the column
constexpr bool SUMMED = !SIGMOID && (BIAS || !RENORMALISE);  // powers of all experts; else the chosen ones are enough
constexpr int WORDS = SIZE == 4 || VECTOR == 1 ? OWN : OWN / 2;  // a lane's logits of a token

// Without a plan, or how blocks wait for one another. config.cuh has the WAY of this variant.
enum { CHOICE, CLUSTER, GRID };

DEVICE constexpr int first_expert(int lane) { return (31 - lane) * OWN; }
DEVICE constexpr int slot_of(int expert) { return expert % OWN * 32 + 31 - expert / OWN; }

// --- numbers and keys

DEVICE int ordered(float x) {
  int bits = __float_as_int(canonical(x));
  return bits ^ ((bits >> 31) & 0x7fffffff);
}

DEVICE float number_of(int key) {
  int bits = key ^ ((key >> 31) & 0x7fffffff);
  return __int_as_float(PACKED ? bits & ~SLOT : bits);
}

// Element i of a type: 0 is fp32, 1 bf16, 2 fp16, 3 fp64.
DEVICE float element(const void* data, i64 i, int type) {
  if (type == 0) return ((const float*)data)[i];
  if (type == 3) return (float)((const double*)data)[i];
  u32 bits = ((const u16*)data)[i];
  return type == 1 ? bf16_number(bits) : fp16_number(bits);
}

DEVICE float logit(const u32 (&raw)[WORDS], int i) {
  if (SIZE == 4) return __int_as_float(raw[i]);
  u32 bits = VECTOR == 1 ? raw[i] : (i & 1) ? raw[i / 2] >> 16 : raw[i / 2] & 0xffff;
  return TYPE == 1 ? bf16_number(bits) : fp16_number(bits);
}

// What the scores of a token follow from.
struct Scale {
  float top, total;
};

DEVICE float score_of(float x, Scale scale) {
  if (SIGMOID) return divide(1.0f, 1.0f + power(-x));
  float y = power(x - (scale.top == -INF ? 0.0f : scale.top));
  if (SUMMED) y = divide(y, scale.total);
  return scale.top == -INF ? 0.0f : y;
}

// The sum of this lane's and all later ones', whose experts come before.
DEVICE int sum_from_here(int x, int lane) {
#pragma unroll
  for (int by = 1; by < 32; by *= 2) {
    int y = from_later(x, by);
    if (lane + by < 32) x += y;
  }
  return x;
}

// --- the choice

struct Chosen {
  int key, slot;
};

DEVICE void load_logits(u32 (&raw)[WORDS], const Params& p, int token, int lane, bool there) {
  constexpr int BYTES = VECTOR * SIZE, STEP = VECTOR == 1 ? 1 : BYTES / 4;
  const char* at = (const char*)p.logits + (token * p.stride + first_expert(lane)) * SIZE;
#pragma unroll
  for (int i = 0; i < OWN / VECTOR; i++) {
    if (there && first_expert(lane) + i * VECTOR < EXPERTS) read_once<BYTES>(raw + i * STEP, at + i * BYTES);
  }
}

// The K best of a token, each written by the lane whose expert it is.
DEVICE Scale choose(Chosen* chosen, const u32 (&raw)[WORDS], const float (&bias)[OWN], int lane) {
  const int expert = first_expert(lane);
  int key[OWN], from[OWN];
  float top = 0.0f, total = 1.0f;
#pragma unroll
  for (int i = 0; i < OWN; i++) {
    key[i] = ordered(logit(raw, i)), from[i] = i;
    if (PACKED) key[i] = (key[i] & ~SLOT) | (SLOT - (expert + i));
    if (expert + i >= EXPERTS) key[i] = HIDDEN;
  }
  if (SUMMED) {
    int most = key[0];
#pragma unroll
    for (int i = 1; i < OWN; i++) most = max(most, key[i]);
    top = number_of(warp_max(most));  // unlike a maximum of floats it may be NaN
    total = 0.0f;
#pragma unroll
    for (int i = 0; i < OWN; i++) {
      if (expert + i < EXPERTS) total += power(logit(raw, i) - (top == -INF ? 0.0f : top));
    }
#pragma unroll
    for (int mask = 16; mask; mask /= 2) total += across(total, mask);
  }
  if (BIAS) {
#pragma unroll
    for (int i = 0; i < OWN; i++) {
      if (expert + i < EXPERTS) key[i] = ordered(score_of(logit(raw, i), {top, total}) + bias[i]);
    }
  }
  // The first LIST of the lane's keys in order. Neighbours change places only where the second is larger, so equal ones
  // keep their order.
#pragma unroll
  for (int done = 0; done < LIST; done++) {
#pragma unroll
    for (int i = OWN - 1; i > done; i--) {
      bool swap = key[i] > key[i - 1];
      int high = max(key[i], key[i - 1]), low = min(key[i], key[i - 1]);
      int first = swap ? from[i] : from[i - 1], second = swap ? from[i - 1] : from[i];
      key[i - 1] = high, key[i] = low, from[i - 1] = first, from[i] = second;
    }
  }
  u32 order = 0;  // of up to 8 keys, 4 bits each
  if (OWN <= 8) {
#pragma unroll
    for (int i = 0; i < LIST; i++) order |= (u32)from[i] << (4 * i);
  }
#pragma unroll
  for (int j = 0; j < K; j++) {
    int best = warp_max(key[0]);
    bool mine = key[0] == best;
    if (!PACKED) mine = ballot(mine) >> lane == 1;
    if (mine) {
      if (PACKED) chosen[j].key = key[0];
      else chosen[j] = {key[0], (int)(OWN == 1 ? 0 : OWN <= 8 ? order & 15 : from[0]) << 5 | lane};
#pragma unroll
      for (int i = 0; i < LIST - 1; i++) {
        key[i] = key[i + 1];
        if (OWN > 8) from[i] = from[i + 1];
      }
      key[LIST - 1] = HIDDEN;
      order >>= 4;
    }
  }
  return {top, total};
}

// Weights and ids that are computed and not yet stored: the last ones of a block go out while it waits for the others.
struct Pending {
  int item, id;
  float weight;
};

DEVICE void store(Pending& pending, const Params& p) {
  if (pending.item >= 0) p.weights[pending.item] = pending.weight, p.ids[pending.item] = pending.id;
  pending.item = -1;
}

// Ends a group of tokens from `token` on, of which the warp's last is before `end`: weights, ids and ranks.
DEVICE void finish_group(
    Pending& pending, const Chosen* chosen, Scale scale, const Params& p, int token, int end, int used, u32* row,
    int* items, int lane) {
  int mine = token + lane / K2, j = lane % K2;
  bool inside = mine < end && j < K, there = inside && mine < used;
  warp_barrier();
  const Chosen own = chosen[lane];
  const int slot = PACKED ? slot_of(SLOT - (own.key & SLOT)) : own.slot, id = first_expert(slot & 31) + (slot >> 5);
  float x = number_of(own.key);
  if (BIAS && there) x = element(p.logits, mine * p.stride + id, TYPE);
  if (!SUMMED && !SIGMOID) scale.top = number_of(chosen[lane / K2 * K2].key);  // the first choice
  warp_barrier();  // before the next group's are written
  float weight = there ? score_of(x, scale) : 0.0f;
  if (RENORMALISE) {
    float total = weight;
#pragma unroll
    for (int mask = K2 / 2; mask; mask /= 2) total += across(total, mask);
    weight = divide(weight, total == 0.0f ? 1.0f : total);
  }
  store(pending, p);
  pending.item = inside ? mine * K + j : -1;
  pending.id = there ? id : -1;
  pending.weight = there ? weight * p.scale : 0.0f;
  if (WAY == CHOICE) return;
  bool counted = there && id >= p.first && id < p.last;
  int rank = 0;
  for (int t = 0; t < GROUP && token + t < end; t++) {  // tokens in their order; one names no expert twice
    if (counted && lane / K2 == t) rank = take_number(row + slot);
    warp_barrier();
  }
  if (inside) items[lane / K2 * K + j] = counted ? rank << 10 | slot : -1;
}

// --- the plan

DEVICE int clamped(const int* used, int tokens) {
  int n = used ? *used : tokens;
  return n < 0 ? 0 : n < tokens ? n : tokens;
}

constexpr int PAIRS = OWN == 1 ? 1 : OWN / 2;  // words that have two counts each

DEVICE u32 half_of(const u32* pairs, int step, int i) {
  return i & 1 ? pairs[i / 2 * step] >> 16 : pairs[i / 2 * step] & 0xffff;
}

// Sums of the table: of all rows, and of those before this block's. What a warp adds up stays below 65536; where all
// sums do (`narrow`), they stay two in a word.
DEVICE void add_rows(const Params& p, u32* all, u32* before, bool narrow, int blocks, int block, int warp, int lane) {
  constexpr int BYTES = OWN > 8 ? 16 : 2 * OWN;
  constexpr int ROWS = PAIRS > 8 ? 1 : PAIRS > 4 ? 2 : 5;  // loaded at once: 132 blocks are 5 rows for each of 32 warps
  u32 sum[PAIRS] = {}, sum_before[PAIRS] = {};
#pragma unroll 1
  for (int from = warp; from < blocks; from += ROWS * WARPS) {
    u32 counts[ROWS][PAIRS] = {};
#pragma unroll
    for (int r = 0; r < ROWS; r++) {
      const char* at = (const char*)(p.table + (i64)(from + r * WARPS) * COLUMNS + lane * OWN);
#pragma unroll
      for (int i = 0; i < 2 * OWN / BYTES; i++) {
        if (from + r * WARPS < blocks) read_shared_by_blocks<BYTES>(counts[r] + i * 4, at + i * BYTES);
      }
    }
#pragma unroll
    for (int r = 0; r < ROWS; r++) {
#pragma unroll
      for (int i = 0; i < PAIRS; i++) {
        sum[i] += counts[r][i];
        if (from + r * WARPS < block) sum_before[i] += counts[r][i];
      }
    }
  }
#pragma unroll
  for (int i = 0; i < OWN; i++) {
    bool once = narrow && i >= PAIRS;
    if (!once) add_shared(all + i * 32 + lane, narrow ? sum[i < PAIRS ? i : 0] : half_of(sum, 1, i));
    if (!once && warp < block) {
      add_shared(before + i * 32 + lane, narrow ? sum_before[i < PAIRS ? i : 0] : half_of(sum_before, 1, i));
    }
  }
}

// Where the plan's experts begin; row[slot] grows by the place of this block's first item of the slot's expert. Every
// warp does it for itself. Returns how many items have a place.
DEVICE int begin_places(
    const Params& p, u32* row, const u32* all, const u32* before, bool narrow, int worker, int workers, int lane) {
  int count[OWN], items = 0, tiles = 0, round = (1 << p.shift) - 1;
#pragma unroll
  for (int i = 0; i < OWN; i++) {
    count[i] = narrow ? half_of(all + lane, 32, i) : all[i * 32 + lane];
    items += count[i], tiles += (count[i] + round) >> p.shift;
  }
  int place = sum_from_here(items, lane), tile = sum_from_here(tiles, lane);
  int placed = from_lane(place, 0), used_tiles = from_lane(tile, 0);
  place -= items, tile -= tiles;
#pragma unroll
  for (int i = 0; i < OWN; i++) {
    int need = (count[i] + round) >> p.shift, id = first_expert(lane) + i;
    row[i * 32 + lane] += place + (narrow ? half_of(before + lane, 32, i) : before[i * 32 + lane]);
    if (worker == 0 && id >= p.first && id < p.last) {
      p.counts[id - p.first] = count[i], p.offsets[id - p.first] = place, p.tile_offsets[id - p.first] = tile;
    }
    for (int j = worker; j < need; j += workers) p.tiles[tile + j] = id - p.first + 1024 * j;
    place += count[i], tile += need;
  }
  if (worker == 0 && lane == 0) p.offsets[p.last - p.first] = placed, p.tile_offsets[p.last - p.first] = used_tiles;
  for (int i = used_tiles + worker * 32 + lane; i < p.most; i += workers * 32) p.tiles[i] = -1;
  warp_barrier();
  return placed;
}

DEVICE void place_item(const Params& p, int item, int place, int placed) {
  p.inverse[item] = place;
  if (place >= 0) p.permutation[place] = item;
  if (item >= placed) p.permutation[item] = -1;
}

// --- kernels

#define KERNEL extern "C" __global__ void __launch_bounds__(32 * WARPS, PER_SM)

KERNEL route_tokens(const __grid_constant__ Params p) {
  extern __shared__ u32 memory[];
  __shared__ Chosen all_chosen[WARPS][32];  // of a group: entry t * K2 + j is choice j of token t
  constexpr bool PLANNED = WAY != CHOICE;
  const int block = blockIdx.x, blocks = gridDim.x, warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  u32 *counts = memory, *row = counts + warp * COLUMNS;  // [WARPS][COLUMNS]
  u32 *all = counts + WARPS * COLUMNS, *before = all + COLUMNS;
  const int begin = (block * WARPS + warp) * p.of_warp, end = min(begin + p.of_warp, p.tokens);
  int* items = (int*)(before + COLUMNS) + warp * p.of_warp * K;
  Chosen* chosen = all_chosen[warp];
  if (PLANNED) {
    for (int i = lane; i < COLUMNS; i += 32) row[i] = 0;
    for (int i = threadIdx.x; i < 2 * COLUMNS; i += 32 * WARPS) all[i] = 0;
    warp_barrier();
  }
  wait_for_previous();
  const int used = clamped(p.used, p.tokens);
  float bias[OWN] = {};
  if (BIAS) {
#pragma unroll
    for (int i = 0; i < OWN; i++) {
      int expert = first_expert(lane) + i;
      if (expert < EXPERTS) bias[i] = element(p.bias, expert, BIAS - 1);
    }
  }
  Pending pending = {-1, 0, 0.0f};
  Scale scale = {};
  u32 raw[AHEAD][WORDS] = {}, next[AHEAD][WORDS] = {};
#pragma unroll
  for (int a = 0; a < AHEAD; a++) load_logits(next[a], p, begin + a, lane, begin + a < min(end, used));
#pragma unroll 1  // twice the code would save a few moves
  for (int token = begin; token < end; token += AHEAD) {
#pragma unroll
    for (int a = 0; a < AHEAD; a++) {
#pragma unroll
      for (int i = 0; i < WORDS; i++) raw[a][i] = next[a][i];
      int later = token + AHEAD + a;
      load_logits(next[a], p, later, lane, later < min(end, used));
    }
    int in_group = (token - begin) % GROUP;
#pragma unroll
    for (int a = 0; a < AHEAD; a++) {
      if (token + a < min(end, used)) {
        Scale of_token = choose(chosen + (in_group + a) * K2, raw[a], bias, lane);
        if (lane / K2 == in_group + a) scale = of_token;
      }
    }
    if (in_group + AHEAD == GROUP || token + AHEAD >= end) {
      int start = token - in_group;
      finish_group(pending, chosen, scale, p, start, end, used, row, items + (start - begin) * K, lane);
    }
  }
  if (!PLANNED) {
    store(pending, p);
    return;
  }
  block_barrier();
  // Each warp's counts become the sum of the warps before it; the block's go into the table.
  for (int slot = threadIdx.x; slot < COLUMNS; slot += 32 * WARPS) {
    u32 sum = 0, mine[WARPS];
#pragma unroll
    for (int w = 0; w < WARPS; w++) mine[w] = counts[w * COLUMNS + slot];
#pragma unroll
    for (int w = 0; w < WARPS; w++) counts[w * COLUMNS + slot] = sum, sum += mine[w];
    if (blocks == 1) all[slot] = sum;
    else p.table[(i64)block * COLUMNS + (slot & 31) * OWN + (slot >> 5)] = sum;
  }
  u32 gone = 0;  // blocks that saw all arrive before this one did: asked for here, and known by the end
  if (blocks == 1) {
    store(pending, p);
  } else if (WAY == CLUSTER) {
    cluster_arrive();
    store(pending, p);
    cluster_wait();
  } else {
    block_barrier();
    if (threadIdx.x == 0) grid_arrive(p.arrivals);
    store(pending, p);
    if (threadIdx.x == 0) {
      grid_wait(p.arrivals, blocks);
      gone = add_one(p.arrivals + 1);
    }
    block_barrier();
  }
  let_next_start();
  const bool narrow = blocks > 1 && p.tokens < 65536;
  if (blocks > 1) add_rows(p, all, before, narrow, blocks, block, warp, lane);
  block_barrier();
  int placed = begin_places(p, row, all, before, narrow, block * WARPS + warp, blocks * WARPS, lane);
  for (int i = lane; i < (end - begin) * K; i += 32) {
    int item = items[i];
    place_item(p, begin * K + i, item < 0 ? -1 : (item >> 10) + (int)row[item & SLOT], placed);
  }
  if (WAY == GRID && blocks > 1 && threadIdx.x == 0 && gone == blocks - 1) p.arrivals[0] = 0, p.arrivals[1] = 0;
}
