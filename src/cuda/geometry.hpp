// SPDX-FileCopyrightText: the libxent authors
// SPDX-License-Identifier: Apache-2.0

// The shape of the launches by type and vocabulary: the tuning, apart from the algorithms. A shape fixes which
// accumulator a column enters, so it may depend on nothing else (not on rows, strides or addresses).
#pragma once

#include <cstdint>

namespace xent::cuda {

struct RowShape {
  int threads;  // of one row: 32, or a block
  int vectors;  // a thread and slice
  int slices;
};

// Slices that one block sweeps by itself; a row of more is always given to several blocks.
inline constexpr int kMaxSlicesPerBlock = 32;

// `vectors` of 16 bytes a row.
inline RowShape row_shape(int64_t vectors, int widest) {
  constexpr int batch = 8;
  constexpr int most = 64;  // serial additions of one accumulator
  RowShape shape = {32, batch, 1};
  if (vectors > 32 * batch) {
    shape.threads = 128;
    while (shape.threads < widest && shape.threads * batch < vectors) shape.threads *= 2;
    while (shape.vectors < most && int64_t{shape.threads} * shape.vectors * kMaxSlicesPerBlock < vectors) {
      shape.vectors += batch;
    }
    const int64_t slice = int64_t{shape.threads} * shape.vectors;
    shape.slices = static_cast<int>((vectors + slice - 1) / slice);
  }
  return shape;
}

// Forward: two blocks of 512 threads an SM, so that one loads while the other merges.
inline RowShape forward_shape(int64_t vectors) { return row_shape(vectors, 512); }

// Loss and gradient: few rows in flight, for the second read to hit L2 (about 34 MB of rows on an H200): one block of
// 1024 threads an SM for long rows, two of 512 for rows of up to 128 KiB.
inline RowShape one_pass_shape(int64_t vectors) { return row_shape(vectors, vectors > 8192 ? 1024 : 512); }

}  // namespace xent::cuda
