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
__device__ __forceinline__ int64_t first_equal(const RowReader<T> &row, const uint4 (&v)[kBatch], int first,
                                               float x) {
  int64_t found = INT64_MAX;
#pragma unroll
  for (int i = kBatch - 1; i >= 0; --i) {
#pragma unroll
    for (int lane = kLanes<T> - 1; lane >= 0; --lane) {
      if (element<T>(v[i], lane) == x) found = row.first_column(first + i * kStep) + lane;
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
                                          const Constants &c) {
  constexpr int lanes = kLanes<T>;
  const float x = largest<T>(v);
  if constexpr ((F & kArgmax) != 0) {
    if (x > part.x || part.i == INT64_MAX) {
      const int64_t at = first_equal<T>(row, v, first, x);
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
      const int64_t left = row.columns - row.first_column(first + i * kStep);
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

// The share of thread `member` of `threads` in one slice of a row. A warp takes kBatch * 32 vectors in a stretch, the
// warps of the group follow each other.
template <typename T, unsigned F>
__device__ __forceinline__ Partial sweep(const RowReader<T> &row, int slice, int threads, int vectors, int member,
                                         const Constants &c) {
  Partial part;
  int first = slice * threads * vectors + (member & ~31) * kBatch + (member & 31);
  for (int done = 0; done < vectors; done += kBatch, first += threads * kBatch) {
    if (first >= row.vectors) break;
    uint4 v[kBatch];
    row.load(first, v);
    add_batch<T, F>(part, row, v, first, c);
  }
  return part;
}

// How the partials of a row are merged, the same whether one block swept its slices or one each. A thread's partial of
// a slice waits in shared memory, [slice][word][thread], until the row is read: merging between slices would keep the
// next loads waiting. Then `groups` threads a slice take the partials of threads / groups threads each, their sums go
// by shuffles, and one warp adds the slices.
template <unsigned F>
__device__ __forceinline__ void stash(float *shared, int slice, int threads, int member, const Partial &part) {
  store_partial<F>(shared + slice * threads * kPartialWords<F> + member, threads, part);
}

// By all threads of a block; the sum of slice s goes to out + s * kPartialWords.
template <unsigned F>
__device__ __forceinline__ void merge_stashed(const float *shared, int slices, int threads, float *out, const Constants &c) {
  constexpr int together = (F & (kEntropy | kArgmax)) != 0 ? 4 : 8;  // what registers hold
  const int groups = threads < 512 ? threads / 16 : 16;
  for (int base = 0; base < slices * groups; base += threads) {  // whole warps, for the shuffles
    const int at = base + static_cast<int>(threadIdx.x);
    const int slice = at / groups;
    const int group = at - slice * groups;
    Partial sum;
    if (slice < slices) {
      const float *in = shared + slice * threads * kPartialWords<F> + group;
#pragma unroll 1
      for (int first = 0; first < threads / groups; first += together) {
        Partial parts[together];
#pragma unroll
        for (int i = 0; i < together; ++i) parts[i] = load_partial<F>(in + (first + i) * groups, threads);
        Partial pair[2] = {sum, merge_all<F>(parts, c)};
        sum = merge_all<F>(pair, c);
      }
    }
    sum = merge_lanes<F>(sum, groups, c);
    if (slice < slices && group == 0) store_partial<F>(out + slice * kPartialWords<F>, 1, sum);
  }
}

// By one warp; lane 0 gets the sum of `count` partials.
template <unsigned F>
__device__ __forceinline__ Partial merge_slices(const float *slices, int count, const Constants &c) {
  Partial sum;
  for (int slice = threadIdx.x & 31; slice < count; slice += 32) {
    Partial pair[2] = {sum, load_partial<F>(slices + slice * kPartialWords<F>, 1)};
    sum = merge_all<F>(pair, c);
  }
  return merge_lanes<F>(sum, 32, c);
}

}  // namespace xent::cuda
