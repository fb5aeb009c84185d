// SPDX-FileCopyrightText: the libxent authors
// SPDX-License-Identifier: Apache-2.0

// The shape of the launches by type and vocabulary: the tuning, apart from the algorithms. A shape fixes which
// accumulator a column enters, so it may depend on nothing else (not on rows, strides or addresses).
#pragma once

#include <cstdint>

namespace xent::cuda {

struct RowShape {
  int threads;  // of one row: 32, or a block of 128 to 768
  int vectors;  // a thread and slice
  int slices;
  bool one_block;  // one block can sweep the row; else its slices are always given to several
  int shared_bytes(int words) const {  // of a block that sweeps the whole row
    return threads > 32 ? slices * (threads + 1) * words * 4 : 0;
  }
};

// `vectors` of 16 bytes a row, partials of `words` floats. A slice is as short as it can be, for few rows to spread
// over many SMs, as long as the stash of a row's partials leaves room for other blocks of the SM.
inline RowShape row_shape(int64_t vectors, int threads, int words) {
  constexpr int batch = 8;
  constexpr int most = 64;  // serial additions of one accumulator
  if (vectors <= 32 * batch) return {32, batch, 1, true};
  RowShape shape = {threads, batch, 1, true};
  const int slices = (threads > 256 ? 96 : 48) * 1024 / (threads * words * 4);
  while (shape.vectors < most && int64_t{threads} * shape.vectors * slices < vectors) shape.vectors += batch;
  const int64_t slice = int64_t{threads} * shape.vectors;
  shape.slices = static_cast<int>((vectors + slice - 1) / slice);
  shape.one_block = shape.slices <= slices;
  return shape;
}

// Forward: small blocks, six an SM, so that most of them load while some merge.
inline RowShape forward_shape(int64_t vectors, int words) { return row_shape(vectors, 128, words); }

// Loss and gradient: few rows in flight, for the second read to hit L2 (about 34 MB of rows on an H200): one block of
// 768 threads an SM for long rows, three of 256 for rows of up to 128 KiB.
inline RowShape one_pass_shape(int64_t vectors, int words) {
  return row_shape(vectors, vectors > 8192 ? 768 : vectors > 1024 ? 256 : 128, words);
}

}  // namespace xent::cuda
