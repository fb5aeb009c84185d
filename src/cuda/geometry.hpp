// SPDX-FileCopyrightText: the libxent authors
// SPDX-License-Identifier: Apache-2.0

// The shape of the launches by type, vocabulary and features: the tuning, apart from the algorithms. A shape fixes
// which accumulator a column enters, so it may depend on nothing else (not on rows, strides or addresses).
#pragma once

#include <algorithm>
#include <cstdint>

namespace xent::cuda {

// A row is cut into slices of slice_vectors vectors (of 16 bytes), each swept by `threads` threads.
struct RowShape {
  int threads;  // 32: a warp sweeps the row, four rows a block. Else a block sweeps a slice
  int slice_vectors;
  int slices;
  int stashed;  // slices whose partials wait in shared memory until a block merges them, then one group after the other
  int stash;    // partials of one of them there
  int shared_bytes(int words) const {  // of a block that sweeps a whole row; a partial has `words` floats
    return threads > 32 ? stashed * (stash + 1) * words * 4 : 0;
  }
};

inline constexpr int kMostSerial = 64;        // additions that one accumulator may take in a row
inline constexpr int64_t kWarpVectors = 256;  // a row up to this is one warp's

inline int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }

inline RowShape warp_shape(int64_t vectors) { return {32, static_cast<int>(vectors), 1, 1, 1}; }

// Forward: small blocks, five an SM, so that most of them load while some merge. Slices are short, for few rows to
// spread over many SMs; they grow where the stash of a row would not leave room for the other blocks.
inline RowShape forward_shape(int64_t vectors, int words) {
  if (vectors <= kWarpVectors) return warp_shape(vectors);
  constexpr int threads = 128, batch = 8, stash_bytes = 32 * 1024;
  const int stashed = stash_bytes / (threads * words * 4);
  int64_t slice = threads * batch;
  while (slice < threads * kMostSerial && slice * stashed < vectors) slice += threads * batch;
  const int slices = static_cast<int>(ceil_div(vectors, slice));
  return {threads, static_cast<int>(slice), slices, std::min(stashed, slices), threads};
}

// Loss and gradient: few rows in flight, for the second read to hit L2 (about 34 MB of rows on an H200): one block of
// 1024 threads an SM for long rows, four of 256 for rows of up to 128 KiB.
inline RowShape one_pass_shape(int64_t vectors) {
  if (vectors <= kWarpVectors) return warp_shape(vectors);
  const int threads = vectors <= 1024 ? 128 : vectors <= 8192 ? 256 : 1024;
  const int64_t slice = std::min(vectors, int64_t{threads} * kMostSerial);
  const int slices = static_cast<int>(ceil_div(vectors, slice));
  return {threads, static_cast<int>(slice), slices, std::min(32, slices), threads / 32};
}

}  // namespace xent::cuda
