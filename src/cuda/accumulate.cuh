// SPDX-FileCopyrightText: the libxent authors
// SPDX-License-Identifier: Apache-2.0

// The forward sweep of one thread over its share of one slice of a row.
//
// Bytes: each logit once. Per batch of vectors: maximum of the packed vectors, one rescale of what was there, then
// the exponentials, summed as a tree inside a vector and serially over vectors. About 6 instructions an element in the
// plain case: unpack, subtract, multiply, ex2, add, half a maximum.
#pragma once

#include "params.cuh"

namespace xent::cuda {

template <typename T, int N>
__device__ __forceinline__ int64_t first_equal(const RowReader<T> &row, const uint4 (&v)[N], int first, float x) {
  int64_t found = INT64_MAX;
#pragma unroll
  for (int i = N - 1; i >= 0; --i) {
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

template <typename T, unsigned F, int N>
__device__ __forceinline__ void add_batch(Partial &part, const RowReader<T> &row, const uint4 (&v)[N], int first,
                                          int64_t columns, const Constants &c) {
  constexpr int lanes = kLanes<T>;
  const float x = largest<T>(v);
  if constexpr ((F & kArgmax) != 0) {
    if (x > part.x || part.i == INT64_MAX) {
      const int64_t at = first_equal<T>(row, v, first, x);
      if (at < columns) {  // not the -inf of a column that does not exist
        part.x = x;
        part.i = at;
      }
    }
  }
  rescale<F>(part, fmaxf(value_of<F>(x, c), part.m), c);
  const float m = part.m;
  const float scaled_m = m * c.sum_scale;
#pragma unroll
  for (int i = 0; i < N; ++i) {
    float d[lanes], s[lanes], e[lanes];
    int real = lanes;  // columns of the vector that exist
    if constexpr ((F & (kSum | kSoftcap)) != 0) {
      const int64_t left = columns - row.first_column(first + i * kStep);
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

// The share of thread `member` of `threads` in vectors [begin, end) of a row. A warp takes N * 32 vectors in a stretch,
// the warps of the group follow each other.
template <typename T, unsigned F, int N>
__device__ __forceinline__ Partial sweep(const RowReader<T> &row, int begin, int end, int threads, int member,
                                         const Constants &c) {
  Partial part;
  const int64_t last = static_cast<int64_t>(end) * kLanes<T>;
  const int64_t columns = row.columns < last ? row.columns : last;
  for (int first = begin + (member & ~31) * N + (member & 31); first < end; first += threads * N) {
    uint4 v[N];
    row.load(first, end, v);
    add_batch<T, F, N>(part, row, v, first, columns, c);
  }
  return part;
}

// How the partials of a row are merged in forward, the same whether one block swept its slices or one each. A thread's
// partial of a slice waits in shared memory, [slice][word][thread], until the row is read: merging between slices would
// keep the next loads waiting. Then threads / 16 threads a slice take 16 partials each, their sums go by shuffles, and
// one warp adds the slices.
template <unsigned F>
__device__ __forceinline__ void stash(float *shared, int slice, int threads, int member, const Partial &part) {
  store_partial<F>(shared + slice * threads * kPartialWords<F> + member, threads, part);
}

// By all threads of a block; the sum of slice s goes to out + s * kPartialWords.
template <unsigned F>
__device__ __forceinline__ void merge_stashed(const float *shared, int slices, int threads, float *out,
                                              const Constants &c) {
  constexpr int together = (F & (kEntropy | kArgmax)) != 0 ? 4 : 8;  // what registers hold
  const int groups = threads / 16;
  for (int base = 0; base < slices * groups; base += threads) {  // whole warps, for the shuffles
    const int at = base + static_cast<int>(threadIdx.x);
    const int slice = at / groups;
    const int group = at - slice * groups;
    Partial sum;
    if (slice < slices) {
      const float *in = shared + slice * threads * kPartialWords<F> + group;
#pragma unroll 1
      for (int first = 0; first < 16; first += together) {
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

// Where the sweeps of a block do not follow each other at once, each warp merges its own: fewer bytes to stash.
template <unsigned F>
__device__ __forceinline__ void stash_warp(float *slice, const Partial &part, const Constants &c) {
  const Partial sum = merge_lanes<F>(part, 32, c);
  if (threadIdx.x % 32 == 0) store_partial<F>(slice + threadIdx.x / 32 * kPartialWords<F>, 1, sum);
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

// total += the sum of `count` slices that were stashed together; in lane 0.
template <unsigned F>
__device__ __forceinline__ void add_slices(Partial &total, const float *slices, int count, const Constants &c) {
  Partial pair[2] = {total, merge_slices<F>(slices, count, c)};
  total = merge_all<F>(pair, c);
}

// All slices of a row, in the groups in which one block would have stashed them.
template <unsigned F>
__device__ __forceinline__ Partial merge_row(const float *slices, const Geometry &geometry, const Constants &c) {
  Partial total;
  for (int base = 0; base < geometry.slices; base += geometry.stashed) {
    const int left = geometry.slices - base;
    add_slices<F>(total, slices + base * kPartialWords<F>, left < geometry.stashed ? left : geometry.stashed, c);
  }
  return total;
}

}  // namespace xent::cuda
