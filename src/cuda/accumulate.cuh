// SPDX-FileCopyrightText: the libxent authors
// SPDX-License-Identifier: Apache-2.0

// The forward sweep of one warp over its batches of a row, and the merge of what they come to.
//
// Bytes: each logit once. Per batch: maximum of the packed vectors, one rescale of what was there, then the
// exponentials, summed as a tree inside a vector and serially over the vectors. About 6 instructions an element in the
// plain case: unpack, subtract, multiply, ex2, add, half a maximum.
#pragma once

#include "ring.cuh"

namespace xent::cuda {

template <typename T, int N>
__device__ __forceinline__ int64_t first_equal(const uint4 (&v)[N], int first, int span, float x) {
  int64_t found = INT64_MAX;
#pragma unroll
  for (int i = N - 1; i >= 0; --i) {
#pragma unroll
    for (int lane = kLanes<T> - 1; lane >= 0; --lane) {
      if (element<T>(v[i], lane) == x) found = static_cast<int64_t>(first + i * span) * kLanes<T> + lane;
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

struct NoRefill {
  __device__ __forceinline__ void one(int) const {}
};

// Vectors first, first + span, ... of a row with `columns` columns; what lies beyond them is -inf.
// `refill`: told of each vector that is used up.
template <typename T, unsigned F, int N, class Refill>
__device__ __forceinline__ void add_batch(Partial &part, uint4 (&v)[N], int first, int64_t columns, const Constants &c,
                                          int span, const Refill &refill) {
  constexpr int lanes = kLanes<T>;
  const float x = largest<T>(v);
  if constexpr ((F & kArgmax) != 0) {
    if (x > part.x || part.i == INT64_MAX) {
      const int64_t at = first_equal<T>(v, first, span, x);
      if (at < columns) {  // not the -inf of a column that does not exist
        part.x = x;
        part.i = at;
      }
    }
  }
  rescale<F>(part, fmaxf(value_of<F>(x, c), part.m), c);
  const float m = part.m;
  const float scaled_m = m * c.sum_scale;
  float batch_d = 0.0f, batch_s = 0.0f, batch_e = 0.0f;
  // The second half of a batch that a short row does not reach would add zeros.
  const bool whole =
      N < 8 || columns > static_cast<int64_t>(first - static_cast<int>(threadIdx.x & 31) + N / 2 * 32) * lanes;
#pragma unroll
  for (int i = 0; i < N; ++i) {
    if (i == N / 2 && !whole) {
#pragma unroll
      for (int j = N / 2; j < N; ++j) refill.one(j);
      break;
    }
    float d[lanes], s[lanes], e[lanes];
    int real = lanes;  // columns of the vector that exist
    if constexpr ((F & (kSum | kSoftcap)) != 0) {
      const int64_t left = columns - static_cast<int64_t>(first + i * span) * lanes;
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
    batch_d = batch_d + tree_sum<lanes>(d);
    if constexpr ((F & kEntropy) != 0) batch_e = batch_e + tree_sum<lanes>(e);
    if constexpr ((F & kSum) != 0) {
      batch_s = batch_s + tree_sum<lanes>(s);
      part.n = part.n + static_cast<float>(real);
    }
    refill.one(i);
  }
  part.d = part.d + batch_d;
  if constexpr ((F & kEntropy) != 0) part.e = part.e + batch_e;
  if constexpr ((F & kSum) != 0) part.s = part.s + batch_s;
}

// Batches [done, stop) of a warp's share: a piece of the row, its lanes merged, in lane 0. Batches from `freed` on stay
// in the queue. `v` is where the queue puts a batch.
template <typename T, unsigned F, int N, class Queue>
__device__ __forceinline__ Partial add_piece(const Params &p, uint32_t shift, int done, int stop, int freed,
                                             const Share &share, Queue &queue, uint4 (&v)[N]) {
  Partial part;
  int first = (share.warp + done * share.warps) * (N * 32) + share.lane;
#pragma unroll 1
  for (; done < stop; ++done) {
    queue.take(p, share, shift, done < freed, v);
    const auto refill = queue.refill(p, share, v);
    add_batch<T, F>(part, v, first, p.classes, p.math, 32, refill);
    refill.end();
    first += share.warps * (N * 32);
  }
  return merge_lanes<F>(part, 32, p.math);
}

template <unsigned F>
__device__ __forceinline__ Partial add_up(const Partial &a, const Partial &b, const Constants &c) {
  Partial pair[2] = {a, b};
  return merge_all<F>(pair, c);
}

// A warp's share of one row, in lane 0: lane l adds up the pieces l, l + 32, ... of it, then the lanes are merged.
template <typename T, unsigned F, int N, class Queue>
__device__ __forceinline__ Partial sweep(const Params &p, int64_t row, int freed, const Share &share, Queue &queue,
                                         uint4 (&v)[N]) {
  const uint32_t shift = shift_of(p, p.logits.row<T>(row));
  if (share.count <= kSerial<N>) return add_piece<T, F>(p, shift, 0, share.count, freed, share, queue, v);
  Partial mine;
  int piece = 0;
#pragma unroll 1
  for (int done = 0; done < share.count; done += kSerial<N>) {
    const int stop = min(done + kSerial<N>, share.count);
    const Partial part = from_lane<F>(add_piece<T, F>(p, shift, done, stop, freed, share, queue, v), 0);
    if ((piece & 31) == share.lane) mine = piece < 32 ? part : add_up<F>(mine, part, p.math);
    ++piece;
  }
  return merge_lanes<F>(mine, 32, p.math);
}

// Of every warp's share of a row, the most pieces.
__host__ __device__ inline int share_pieces(const Geometry &g, int serial) {
  return (g.batches + g.warps * serial - 1) / (g.warps * serial);
}

// By one warp; lane 0 gets the sum of `count` <= 32 partials.
template <unsigned F>
__device__ __forceinline__ Partial merge_warps(const float *partials, int count, const Constants &c) {
  const int lane = static_cast<int>(threadIdx.x & 31);
  Partial part;
  if (lane < count) part = load_partial<F>(partials + lane * kPartialWords<F>, 1);
  return merge_lanes<F>(part, 32, c);
}

}  // namespace xent::cuda
