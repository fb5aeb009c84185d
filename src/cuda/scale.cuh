// SPDX-FileCopyrightText: the libxent authors
// SPDX-License-Identifier: Apache-2.0

// A gradient that is there already, times the upstream gradient, in place.
//
//   scale_kernel  a warp a piece of a row. Bytes: the gradient of the rows that count and whose factor is not 1, once
//                 read and once written; of every row its factor, and its target and mask where that is not 1. A scalar
//                 factor of 1 is all that is read: what is left is a launch.
//
// As many blocks as the device holds go over all pieces with a grid's stride. Each lane of a warp looks at the row of
// one of the warp's next 32 pieces, so that rows with nothing to do cost a share of one latency. A piece is 8 vectors
// of 16 bytes a thread, aligned whatever the row's address is: neighbouring lanes hold neighbouring vectors, and all
// loads are issued before the first store. The vectors at the ends of a row, and all of a row whose columns are not
// adjacent, go by element. Every element has one thread, so the bits depend on it and its factor alone.
#pragma once

#include "gradient.cuh"
#include "scale.hpp"

namespace xent::cuda {

// Rounded to float32 as the product of float64 is: where the factor is a float32 that is a product of float32.
struct Factor {
  double wide;
  float narrow;
  bool fits;

  __device__ __forceinline__ explicit Factor(double factor)
      : wide(factor), narrow(static_cast<float>(factor)), fits(static_cast<double>(narrow) == factor) {}
  __device__ __forceinline__ float times(float x) const {
    return fits ? x * narrow : static_cast<float>(static_cast<double>(x) * wide);
  }
};

template <typename T>
__device__ __forceinline__ uint4 scaled(const uint4 &v, const Factor &factor) {
  const auto word = [&](int i) {
    if constexpr (sizeof(T) == 4) {
      return __float_as_uint(factor.times(element<T>(v, i)));
    } else {
      return pack<T>(factor.times(element<T>(v, 2 * i)), factor.times(element<T>(v, 2 * i + 1)));
    }
  };
  return make_uint4(word(0), word(1), word(2), word(3));
}

// Vectors first, first + 32, ... of the columns [0, columns) of a row.
template <typename T>
__device__ __forceinline__ void scale_piece(T *row, int64_t stride, int64_t columns, int64_t first,
                                            const Factor &factor) {
  constexpr int lanes = kLanes<T>;
  const int lead = stride == 1 ? static_cast<int>((reinterpret_cast<uintptr_t>(row) & 15) / sizeof(T)) : 0;
  const auto column_of = [&](int i) { return (first + i * 32) * lanes - lead; };
  const auto whole = [&](int i) { return stride == 1 && column_of(i) >= 0 && column_of(i) + lanes <= columns; };
  uint4 v[kScaleVectors];
#pragma unroll
  for (int i = 0; i < kScaleVectors; ++i) {
    if (whole(i)) v[i] = *reinterpret_cast<const uint4 *>(row + column_of(i));
  }
#pragma unroll
  for (int i = 0; i < kScaleVectors; ++i) {
    if (whole(i)) __stcs(reinterpret_cast<uint4 *>(row + column_of(i)), scaled<T>(v[i], factor));
  }
#pragma unroll 1
  for (int i = 0; i < kScaleVectors; ++i) {
    if (whole(i)) continue;
    const int64_t end = min(column_of(i) + lanes, columns);
#pragma unroll 1
    for (int64_t column = max(column_of(i), int64_t{0}); column < end; ++column) {
      T *const at = row + column * stride;
      store_as(at, factor.times(to_float(*at)));
    }
  }
}

// `pieces`: of a row.
template <typename T>
__global__ void __launch_bounds__(kScaleThreads, kScaleBlocks)
    scale_kernel(const __grid_constant__ Params p, const __grid_constant__ Divisor pieces) {
  if (p.grad_loss.rank == 0 && read_floating(p.grad_loss, 0) == 1.0) return;
  const int lane = static_cast<int>(threadIdx.x % 32);
  const int64_t warps = static_cast<int64_t>(gridDim.x) * (kScaleThreads / 32);
  const int64_t warp = static_cast<int64_t>(blockIdx.x) * (kScaleThreads / 32) + threadIdx.x / 32;
  const int64_t units = p.rows * pieces.d;
  for (int64_t next = warp; next < units; next += 32 * warps) {
    // Of the piece that this lane looks at.
    const int64_t unit = next + lane * warps;
    double factor = 1.0;
    if (unit < units) {
      const int64_t row = pieces.quotient(unit);
      factor = read_floating(p.grad_loss, p.grad_loss.offset(row));
      if (factor != 1.0 && read_target(p, row).kind != RowKind::counted) factor = 1.0;
    }
    for (unsigned left = __ballot_sync(0xffffffffu, factor != 1.0); left != 0; left &= left - 1) {
      const int turn = __ffs(static_cast<int>(left)) - 1;
      const int64_t todo = next + turn * warps;
      const int64_t row = pieces.quotient(todo);
      const int64_t first = (todo - row * pieces.d) * kScalePiece + lane;
      scale_piece(p.grad_logits.row<T>(row), p.grad_logits.col_stride, p.classes, first,
                  Factor(__shfl_sync(0xffffffffu, factor, turn)));
    }
  }
}

}  // namespace xent::cuda
