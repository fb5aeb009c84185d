// SPDX-FileCopyrightText: the libxent authors
// SPDX-License-Identifier: Apache-2.0

// What one rank tells the others of a row, in float32: m, or with both softcap and predicted the largest x (which of
// two equal z has the larger x is not to be told from z); d, 0 where the shard has no logit above -inf; v at the
// target, +0 where another rank has it; then s where there is smoothing, e where entropy is asked for, and the bits of
// the column of the largest x where predicted is.
#pragma once

#include "params.cuh"

namespace xent::cuda {

template <class P>
__device__ __forceinline__ int partial_width(const P &p) {
  return 3 + (p.math.smoothing != 0.0f) + p.entropy_asked + p.predicted_asked;
}

template <unsigned F>
inline constexpr bool kKeepsLargest = (F & kSoftcap) != 0 && (F & kArgmax) != 0;

template <unsigned F, class P>
__device__ __noinline__ void write_partial(const P &p, int64_t row, float target_value, Partial part) {
  float first = part.m;
  if constexpr (kKeepsLargest<F>) {
    if (p.predicted_asked) {
      first = part.x;
      if (part.d > 0.0f) rescale<F>(part, value_of<F>(part.x, p.math), p.math);
    }
  }
  float *at = p.partial.template row<float>(row);
  const int64_t step = p.partial.col_stride;
  at[0] = first;
  at[step] = part.d;
  at[2 * step] = target_value;
  at += 3 * step;
  if constexpr ((F & kSum) != 0) {
    if (p.math.smoothing != 0.0f) {
      *at = part.s;
      at += step;
    }
  }
  if constexpr ((F & kEntropy) != 0) {
    if (p.entropy_asked) {
      *at = part.e;
      at += step;
    }
  }
  if constexpr ((F & kArgmax) != 0) {
    if (p.predicted_asked) *reinterpret_cast<int32_t *>(at) = static_cast<int32_t>(part.i);
  }
}

// A row that does not count: zeros.
template <class P>
__device__ __forceinline__ void write_ignored_partial(const P &p, int64_t row) {
  float *at = p.partial.template row<float>(row);
  for (int i = 0; i < partial_width(p); ++i) at[i * p.partial.col_stride] = 0.0f;
}

}  // namespace xent::cuda
