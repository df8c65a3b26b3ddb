// Wide heads: which rows a block makes the gradient of, and which rows of the other side pass by.
//
// dQ has queries for rows and keys for columns; dK and dV have keys for rows and queries for columns. Either way a row
// sees the columns from row + shift - back to row + shift + ahead.
#pragma once
#include "backward_places.cuh"

enum Gradient { OF_Q, OF_K, OF_V };

constexpr int PAIR = 128;  // columns that pass by in a step: a tile of 64 for each of two warpgroups
static_assert(BLOCK == PAIR, "a step has the queries of one block");
constexpr int OWN = 64 * CLUSTER;  // rows of the blocks of a cluster

template <int OF> struct Side {
  static constexpr bool QUERIES = OF == OF_Q;
  static constexpr bool BACK = QUERIES ? LEFT : RIGHT, AHEAD = QUERIES ? RIGHT : LEFT;  // whether there is such an end
  DEVICE static int back(const Params& p) { return QUERIES ? p.left : p.right; }
  DEVICE static int ahead(const Params& p) { return QUERIES ? p.right : p.left; }
};

struct Place {
  int batch, head;         // of the rows
  int row, rows;           // where their sequence starts in its tensor, and its length;
  int column, columns;     // that of the columns likewise
  int first;               // of this block, counted from its sequence's start
  int shift;
  int begin, end;          // pairs of tiles that some row of the cluster sees
};

template <int OF> DEVICE Place place_of(const Params& p, int cluster, u32 rank) {
  using S = Side<OF>;
  Place x;
  const int blocks = S::QUERIES ? p.own_blocks : p.key_blocks, heads = S::QUERIES ? p.heads : p.kv_heads;
  const int line = cluster / blocks;
  int at = cluster % blocks;
  if (S::QUERIES) at = blocks - 1 - at;  // under a causal mask the last queries and the first keys see the most
  if (VARLEN) {
    const int* starts = S::QUERIES ? p.cu_q : p.cu_k;
    const int* others = S::QUERIES ? p.cu_k : p.cu_q;
    x.batch = broadcast(last_sequence(starts, p.batch, at, OWN));
    x.head = line;
    x.row = broadcast(starts[x.batch]);
    x.rows = broadcast(starts[x.batch + 1]) - x.row;
    x.column = broadcast(others[x.batch]);
    x.columns = broadcast(others[x.batch + 1]) - x.column;
    at -= x.row / OWN + x.batch;
  } else {
    x.batch = line / heads;
    x.head = line % heads;
    x.row = x.column = 0;
    x.rows = S::QUERIES ? p.seq_q : p.seq_k;
    x.columns = S::QUERIES ? p.seq_k : p.seq_q;
  }
  const int first = at * OWN, last = min(first + OWN, x.rows) - 1;
  x.first = first + rank * 64;
  x.shift = x.columns - x.rows;
  x.begin = S::BACK ? max(0, first + x.shift - S::back(p)) / PAIR : 0;
  x.end = ceil_div(S::AHEAD ? min(x.columns, max(0, last + x.shift + S::ahead(p) + 1)) : x.columns, PAIR);
  return x;
}

// The steps of a block, from the last pair to the first: the last one may go past the sequence's end. Keys meet the
// queries of every head that shares them.
struct Step {
  int pair, head;  // head: of the columns
};

template <int OF> DEVICE int count_steps(const Params& p, const Place& x) {
  return max(0, x.end - x.begin) * (Side<OF>::QUERIES ? 1 : p.group);
}
template <int OF> DEVICE Step first_step(const Params& p, const Place& x) {
  return {x.end - 1, Side<OF>::QUERIES ? x.head / p.group : x.head * p.group};
}
DEVICE void advance(const Place& x, Step& at) {
  if (--at.pair >= x.begin) return;
  at.pair = x.end - 1;
  at.head++;
}
