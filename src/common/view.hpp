// SPDX-FileCopyrightText: the libxent authors
// SPDX-License-Identifier: Apache-2.0

// Addressing of checked tensors, for the core and for every backend, on the host and on the device.
#pragma once

#include <xent/xent_plugin.h>

#if defined(__CUDACC__)
#define XENT_HOST_DEVICE __host__ __device__ __forceinline__
#else
#define XENT_HOST_DEVICE inline
#endif

namespace xent {

inline bool present(const xent_view &view) { return view.data != nullptr; }

// Element offset of row `row`. int64 throughout: one stride product may pass 2^32.
XENT_HOST_DEVICE int64_t row_offset(int32_t rank, const int64_t *shape, const int64_t *stride, int64_t row) {
  if (rank == 0) return 0;
  int64_t offset = 0;
  for (int32_t dim = rank - 1; dim > 0; --dim) {
    const int64_t outer = row / shape[dim];
    offset += (row - outer * shape[dim]) * stride[dim];
    row = outer;
  }
  return offset + row * stride[0];
}

XENT_HOST_DEVICE int64_t row_offset(const xent_view &view, int64_t row) {
  return row_offset(view.rank, view.shape, view.stride, row);
}

}  // namespace xent
