// SPDX-FileCopyrightText: the libxent authors
// SPDX-License-Identifier: Apache-2.0

// The forward sweep of one thread over its share of one slice of a row.
//
// Bytes: each logit once. Per batch of 8 vectors: maximum of the packed vectors, one rescale of what was there, then
// the exponentials, summed as a tree inside a vector and serially over vectors. About 6 instructions an element in the
// plain case: unpack, subtract, multiply, ex2, add, half a maximum.
#pragma once

#include "load.cuh"
#include "math.cuh"

namespace xent::cuda {

template <typename T>
__device__ __forceinline__ int64_t first_equal(const RowReader<T> &row, const uint4 (&v)[kBatch], int first, int step,
                                               float x) {
  int64_t found = INT64_MAX;
#pragma unroll
  for (int i = kBatch - 1; i >= 0; --i) {
#pragma unroll
    for (int lane = kLanes<T> - 1; lane >= 0; --lane) {
      if (element<T>(v[i], lane) == x) found = row.first_column(first + i * step) + lane;
    }
  }
  return found;
}

// Sum of a compile-time number of values as a balanced tree.
template <int N>
__device__ __forceinline__ float tree_sum(float (&a)[N]) {
#pragma unroll
  for (int width = N / 2; width > 0; width /= 2) {
#pragma unroll
    for (int i = 0; i < width; ++i) a[i] = a[i] + a[i + width];
  }
  return a[0];
}

template <typename T, unsigned F>
__device__ __forceinline__ void add_batch(Partial &part, const RowReader<T> &row, const uint4 (&v)[kBatch], int first,
                                          int step, const Constants &c) {
  constexpr int lanes = kLanes<T>;
  const float x = largest<T>(v);
  if constexpr ((F & kArgmax) != 0) {
    if (x > part.x || part.i == INT64_MAX) {
      const int64_t at = first_equal<T>(row, v, first, step, x);
      if (at < row.columns) {  // not the -inf of a column that does not exist
        part.x = x;
        part.i = at;
      }
    }
  }
  rescale<F>(part, fmaxf(value_of<F>(x, c), part.m), c);
  const float m = part.m;
  const float scaled_m = m * c.sum_scale;
#pragma unroll
  for (int i = 0; i < kBatch; ++i) {
    float d[lanes], s[lanes], e[lanes];
    int real = lanes;  // columns of the vector that exist
    if constexpr ((F & (kSum | kSoftcap)) != 0) {
      const int64_t left = row.columns - row.first_column(first + i * step);
      real = left >= lanes ? lanes : left > 0 ? static_cast<int>(left) : 0;
    }
#pragma unroll
    for (int lane = 0; lane < lanes; ++lane) {
      float value = element<T>(v[i], lane);
      if constexpr ((F & kSoftcap) != 0) {
        // A column that does not exist must not come out of the cap as -softcap.
        value = lane < real ? softcap(value, c).value : -INFINITY;
      }
      const float u = (value - m) * c.exponent;
      d[lane] = exp2_approx(u);
      if constexpr ((F & kEntropy) != 0) e[lane] = fmaxf(u, -200.0f) * d[lane];  // 0 * (-inf) is 0
      if constexpr ((F & kSum) != 0) s[lane] = lane < real ? fmaf(value, c.sum_scale, -scaled_m) : 0.0f;
    }
    part.d = part.d + tree_sum<lanes>(d);
    if constexpr ((F & kEntropy) != 0) part.e = part.e + tree_sum<lanes>(e);
    if constexpr ((F & kSum) != 0) {
      part.s = part.s + tree_sum<lanes>(s);
      part.n = part.n + static_cast<float>(real);
    }
  }
}

// Vectors [first, first + vectors * step) in steps; `row.vectors` ends the row.
template <typename T, unsigned F>
__device__ __forceinline__ Partial sweep(const RowReader<T> &row, int first, int step, int vectors, const Constants &c) {
  Partial part;
  for (int done = 0; done < vectors; done += kBatch) {
    const int at = first + done * step;
    if (at >= row.vectors) break;
    uint4 v[kBatch];
    row.load(at, step, v);
    add_batch<T, F>(part, row, v, at, step, c);
  }
  return part;
}

// Merges the partials that the warps of a block left in shared memory, [slices][warps], into lane 0 of warp 0, by the
// same tree whether the slices of a row were swept by one block or by many.
template <unsigned F>
__device__ __forceinline__ Partial merge_warps(const float *shared, int warps, const Constants &c) {
  const int lane = threadIdx.x & 31;
  Partial part;
  if (lane < warps) part = load_partial<F>(shared + lane * kPartialWords<F>);
  return warp_merge<F>(part, c);
}

template <unsigned F>
__device__ __forceinline__ Partial merge_slices(const float *slices, int count, const Constants &c) {
  Partial part;
  for (int slice = threadIdx.x & 31; slice < count; slice += 32) {
    part = merge<F>(part, load_partial<F>(slices + slice * kPartialWords<F>), c);
  }
  return warp_merge<F>(part, c);
}

}  // namespace xent::cuda
