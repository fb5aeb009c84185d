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
  int keep;    // of a warp's batches, from the sweep to the gradient
  int blocks;  // an SM at most, for what was read to stay in L2 until it is read again
};

inline RowShape forward_shape(int64_t vectors, int batch_vectors) {
  const int64_t batches = ceil_div(vectors, batch_vectors);
  const int warps = batches <= 2 ? 1 : batches <= 8 ? 2 : batches <= 20 ? 4 : batches <= 48 ? 5 : 10;
  return {warps, static_cast<int>(batches), 0, 32};
}

inline RowShape both_shape(int64_t vectors, int batch_vectors) {
  const int64_t batches = ceil_div(vectors, batch_vectors);
  const int warps = batches <= 5     ? 1
                    : batches <= 10  ? 2
                    : batches <= 20  ? 4
                    : batches <= 40  ? 8
                    : batches <= 60  ? 10
                    : batches <= 130 ? 16
                                     : 20;
  return {warps, static_cast<int>(batches), warps == 16 ? 4 : 5, 32};
}

}  // namespace xent::cuda
