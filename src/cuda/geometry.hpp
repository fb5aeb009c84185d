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
  int keep;     // of a warp's batches, from the sweep to the gradient
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
  if (room < 3) return vectors <= 2300 ? 1 : vectors <= 3900 ? 2 : vectors <= 14000 ? 4 : 8;
  const int64_t rounds = ceil_div(pieces, std::min<int64_t>(room, most));
  return static_cast<int>(ceil_div(pieces, rounds));
}

// Blocks of forward's stream, a warp each, of which `resident` run at once. Of long rows each has one, and the hardware
// gives the next to whichever ends first; of short ones so many that to begin costs little.
inline int64_t forward_blocks(int64_t rows, int64_t row_bytes, int64_t resident) {
  const int64_t each = std::max<int64_t>(1, (128 << 10) / std::max<int64_t>(row_bytes, 1));
  return std::max(std::min(rows, resident), ceil_div(rows, each));
}

// A piece of a row for a block of backward.
struct PieceShape {
  int warps;
  int repeats;  // units of each
};

inline PieceShape piece_shape(int64_t vectors, int unit_vectors, int most_warps) {
  const int64_t units = ceil_div(vectors, unit_vectors);
  const int64_t repeats = 2;
  return {static_cast<int>(std::min<int64_t>(most_warps, ceil_div(units, repeats))), static_cast<int>(repeats)};
}

// Rows that a warp of teams takes at once, where `warps` of them run at once.
inline int team_rows(int64_t rows, int span, int64_t warps) {
  const int64_t most = span <= 8 ? 32 : 16;
  return static_cast<int>(std::clamp<int64_t>(ceil_div(rows, warps), 32 / span, most));
}

// `even`: the vocabulary is of whole vectors. Others' rows begin anywhere: their kernel has more registers, and fewer
// warps an SM; the longer ones stages take better.
//
// What a block does not hold must fit L2 for all rows in flight, and of a stream's rows what the stages do not keep. Of
// longer rows that is too much for a row an SM, so that two SMs share one. `most_warps`: whose stages fit the shared
// memory of a block.
inline RowShape both_shape(int64_t vectors, bool even, int batch_vectors, int unit_vectors, int most_warps,
                           bool clusters) {
  if (vectors <= kTeamVectors) return team_shape(vectors);
  const int64_t batches = ceil_div(vectors, batch_vectors);
  const int units = static_cast<int>(ceil_div(vectors, unit_vectors));
  if (even && vectors <= 20000) {
    const int warps = vectors <= 900     ? 1
                      : vectors <= 1400  ? 2
                      : vectors <= 1700  ? 3
                      : vectors <= 2900  ? 4
                      : vectors <= 3500  ? 5
                      : vectors <= 5700  ? 8
                      : vectors <= 11000 ? 12
                                         : 24;
    return {Path::block, warps, units, 0, 1, 0};
  }
  if (!even && vectors <= 10000) {
    const int warps = vectors <= 900 ? 1 : vectors <= 1400 ? 2 : vectors <= 4500 ? 5 : 10;
    return {Path::block, warps, units, 0, 1, 0};
  }
  if (batches > 180 && clusters && most_warps >= 16) return {Path::stream, 32, static_cast<int>(batches), 5, 2, 0};
  const int warps = batches <= 5     ? 1
                    : batches <= 10  ? 2
                    : batches <= 20  ? 4
                    : batches <= 40  ? 8
                    : batches <= 60  ? 10
                    : batches <= 130 ? 16
                                     : 20;
  return {Path::stream, std::min(warps, most_warps), static_cast<int>(batches), warps == 16 ? 4 : 5, 1, 0};
}

}  // namespace xent::cuda
