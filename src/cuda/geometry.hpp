// SPDX-FileCopyrightText: the libxent authors
// SPDX-License-Identifier: Apache-2.0

// The shape of the launches by type, vocabulary and features: the tuning, apart from the algorithms. A shape fixes
// which accumulator a column enters, so it may depend on nothing else (not on rows, strides or addresses).
#pragma once

#include <algorithm>
#include <cstdint>

namespace xent::cuda {

inline int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }

enum class Path {
  stream,  // the batches of a row (see producer.cuh) go round `warps` warps, each of which adds up its own
  team,    // registers of `span` lanes hold the row
  block,   // registers of `warps` warps hold what they can of it
};

struct RowShape {
  Path path;
  int warps;
  int batches;  // of a row; of a block's its units, which are twice as long
  int keep;     // of a warp's batches, from the sweep to the gradient; of a block's units, in shared memory
  int cluster;  // blocks that share a row
  int span;
};

inline constexpr int kTeamVectors = 128;  // what 32 lanes hold

inline RowShape team_shape(int64_t vectors) {
  int span = 4;
  while (span * kTeamVectors / 32 < vectors) span *= 2;
  return {Path::team, 1, 0, 0, 1, span};
}

inline RowShape forward_shape(int64_t vectors, int batch_vectors) {
  if (vectors <= kTeamVectors) return team_shape(vectors);
  return {Path::stream, 1, static_cast<int>(ceil_div(vectors, batch_vectors)), 0, 1, 0};
}

// Whether forward has a block for each row that lies as usual. Of shorter rows a warp has one after the other, whose
// loads begin before the row before has ended.
inline bool has_row_blocks(int64_t vectors) { return vectors >= 400; }

// Warps of a block of forward's row kernel, of a row of `pieces`; any number gives the same bits. `resident`: warps
// that the device runs at once. Where rows do not fill it each gets as many as there are.
inline int row_warps(int64_t vectors, int pieces, int64_t rows, int64_t resident, int most) {
  const int64_t room = resident / std::max<int64_t>(rows, 1);
  if (room < 3) return vectors <= 1700 ? 1 : vectors <= 2300 ? 2 : vectors <= 3500 ? 3 : vectors <= 14000 ? 4 : 8;
  const int64_t rounds = ceil_div(pieces, std::min<int64_t>(room, most));
  return static_cast<int>(ceil_div(pieces, rounds));
}

// Blocks of forward's stream, a warp each, of which `resident` run at once. Of long rows each has one, and the hardware
// gives the next to whichever ends first; of short ones so many that to begin costs little.
inline int64_t forward_blocks(int64_t rows, int64_t row_bytes, int64_t resident) {
  const int64_t each = std::max<int64_t>(1, (128 << 10) / std::max<int64_t>(row_bytes, 1));
  return std::max(std::min(rows, resident), ceil_div(rows, each));
}

// Rows that a warp of teams takes at once, where `warps` of them run at once.
inline int team_rows(int64_t rows, int span, int64_t warps) {
  const int64_t most = span <= 8 ? 32 : 16;
  return static_cast<int>(std::clamp<int64_t>(ceil_div(rows, warps), 32 / span, most));
}

// What a block does not hold must fit L2 for all rows in flight: of longer rows it holds units in shared memory too, as
// many as fit `stash_bytes` for the 24 warps that an SM has, in one block or in several. Of rows that are longer still
// two SMs share one, and its stages. `most_warps`: whose stages fit the shared memory of a block.
inline RowShape both_shape(int64_t vectors, int batch_vectors, int unit_vectors, int most_warps, int64_t stash_bytes,
                           bool clusters) {
  if (vectors <= kTeamVectors) return team_shape(vectors);
  struct Block {
    int64_t vectors;  // up to here
    int warps, stash;
  };
  constexpr Block blocks[] = {{900, 1, 0},    {1150, 2, 0},   {1800, 3, 0},   {2300, 4, 0},   {2800, 5, 0},
                              {3500, 6, 0},   {4500, 8, 0},   {5700, 7, 2},   {6200, 12, 0},  {6800, 8, 1},
                              {13000, 12, 2}, {15000, 20, 1}, {17500, 24, 1}, {22000, 20, 2}, {34000, 24, 2}};
  for (const Block &block : blocks) {
    if (vectors > block.vectors) continue;
    const int units = static_cast<int>(ceil_div(vectors, unit_vectors));
    const int stash = static_cast<int>(std::min<int64_t>(block.stash, stash_bytes / (24 * unit_vectors * 16)));
    return {Path::block, block.warps, units, stash, 1, 0};
  }
  const int batches = static_cast<int>(ceil_div(vectors, batch_vectors));
  if (clusters && most_warps >= 16) return {Path::stream, 32, batches, 5, 2, 0};
  return {Path::stream, std::min(20, most_warps), batches, 5, 1, 0};
}

}  // namespace xent::cuda
