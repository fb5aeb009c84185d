// SPDX-FileCopyrightText: the libxent authors
// SPDX-License-Identifier: Apache-2.0

// The shape of the launches by type, vocabulary and features: the tuning, apart from the algorithms. A shape fixes
// which accumulator a column enters, so it may depend on nothing else (not on rows, strides or addresses).
#pragma once

#include <algorithm>
#include <cstdint>

namespace xent::cuda {

inline int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }

// The batches of a row (see ring.cuh) go round `warps` warps, each of which adds up its own; then the warps are merged.
struct RowShape {
  int warps;
  int batches;
  int keep;     // of a warp's batches, from the sweep to the gradient
  int cluster;  // blocks that share a row
};

inline RowShape forward_shape(int64_t vectors, int batch_vectors) {
  const int64_t batches = ceil_div(vectors, batch_vectors);
  const int warps = batches <= 2 ? 1 : batches <= 32 ? 2 : batches <= 48 ? 4 : 8;
  return {warps, static_cast<int>(batches), 0, 1};
}

// What the stages do not keep of the rows in flight must fit L2. Of longer rows that is too much for a row an SM, so
// that two SMs share one. `most_warps`: whose stages fit the shared memory of a block.
inline RowShape both_shape(int64_t vectors, int batch_vectors, int most_warps, bool clusters) {
  const int64_t batches = ceil_div(vectors, batch_vectors);
  if (batches > 180 && clusters && most_warps >= 16) return {32, static_cast<int>(batches), 5, 2};
  const int warps = batches <= 5     ? 1
                    : batches <= 10  ? 2
                    : batches <= 20  ? 4
                    : batches <= 40  ? 8
                    : batches <= 60  ? 10
                    : batches <= 130 ? 16
                                     : 20;
  return {std::min(warps, most_warps), static_cast<int>(batches), warps == 16 ? 4 : 5, 1};
}

}  // namespace xent::cuda
