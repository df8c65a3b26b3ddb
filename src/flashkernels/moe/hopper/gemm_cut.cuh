// How an expert's rows are cut into tiles, and in which order tiles are taken. Arithmetic alone: tests compile it for
// the host.
#pragma once
#include "prelude.cuh"

// Rows count in granules. An expert has as few tiles as `most` granules a tile allow; they differ by one granule at
// most, so that 257 rows are 136 + 128, not 192 + 72.
DEVICE int granules_of(int rows, int granule) { return ceil_div(rows, granule); }
DEVICE int tiles_of(int granules, int most) { return ceil_div(granules, most); }

struct Piece {
  int first, count;  // granules
};
DEVICE Piece piece(int granules, int tiles, int i) {
  const int each = granules / tiles, more = granules % tiles;
  return {i * each + (i < more ? i : more), each + (i < more)};
}

// Tile `index` of an expert: `together` row tiles walk over the features side by side, so that blocks which run at the
// same time share weights as well as rows.
struct Place {
  int row, feature;
};
DEVICE Place place(int index, int rows, int features, int together) {
  const int first = index / (together * features) * together, rest = index - first * features;
  const int beside = rows - first < together ? rows - first : together;
  return {first + rest % beside, rest / beside};
}

// What it takes, in rows that a block multiplies: whole rounds of average tiles. A tile's weights cost as much as
// `fixed` rows.
DEVICE float rounds_cost(int tiles, int granules, int granule, int features, int blocks, float fixed) {
  return ceil_div(tiles * features, blocks) * ((float)(granules * granule) / tiles + fixed);
}
