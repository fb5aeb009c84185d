// SPDX-FileCopyrightText: the libxent authors
// SPDX-License-Identifier: Apache-2.0

// Kernels of a split vocabulary, besides the forward ones, which write partials where p.partial is set.
//
//   ranks_kernel  a thread a row: merges the partials of all ranks, in rank order and in double, and writes the row's
//                 outputs. Bytes: 12 to 24 a row and rank.
//   empty_kernel  the partials of a rank without columns.
#pragma once

#include "ranks.hpp"
#include "rows.cuh"

namespace xent::cuda {

template <unsigned F>
struct RankPartial {
  float first, d, target_value, s, e;
  int32_t column;

  __device__ __forceinline__ RankPartial(const Params &p, const Tensor &partials, int64_t row) {
    const float *at = partials.row<const float>(row);
    const int64_t step = partials.col_stride;
    first = at[0];
    d = at[step];
    target_value = at[2 * step];
    at += 3 * step;
    s = e = 0.0f;
    column = 0;
    if constexpr ((F & kSum) != 0) {
      if (p.math.smoothing != 0.0f) {
        s = *at;
        at += step;
      }
    }
    if constexpr ((F & kEntropy) != 0) {
      if (p.entropy_asked) {
        e = *at;
        at += step;
      }
    }
    if constexpr ((F & kArgmax) != 0) {
      if (p.predicted_asked) column = *reinterpret_cast<const int32_t *>(at);
    }
  }

  // Where d is 0 there is no logit above -inf.
  __device__ __forceinline__ float maximum(const Params &p) const {
    if (d == 0.0f) return -FLT_MAX;
    if constexpr (kKeepsLargest<F>) {
      if (p.predicted_asked) return value_of<F>(first, p.math);
    }
    return first;
  }
};

template <unsigned F>
__global__ void __launch_bounds__(kRanksThreads)
    ranks_kernel(const __grid_constant__ Params p, const __grid_constant__ Shards shards) {
  const Constants &c = p.math;
  const int64_t step = static_cast<int64_t>(gridDim.x) * kRanksThreads;
  for (int64_t row = static_cast<int64_t>(blockIdx.x) * kRanksThreads + threadIdx.x; row < p.rows; row += step) {
    const RowTarget target = read_target(p, row);
    if (target.kind == RowKind::ignored) {
      write_ignored<false>(p, row);
      continue;
    }
    const int64_t id = read_int(p.targets, p.targets.offset(row));  // `target` has a column of this rank
    Partial total;
    for (int rank = 0; rank < shards.count; ++rank) {
      total.m = fmaxf(total.m, RankPartial<F>(p, shards.partials, rank * p.rows + row).maximum(p));
    }
    double d = 0.0, s = 0.0, e = 0.0;
    float value = 0.0f;
    for (int rank = 0; rank < shards.count; ++rank) {
      const RankPartial<F> part(p, shards.partials, rank * p.rows + row);
      const int64_t begin = shards.offsets[rank], end = shards.offsets[rank + 1];
      const double gap = static_cast<double>(part.maximum(p)) - static_cast<double>(total.m);
      const double delta = gap * static_cast<double>(c.exponent);
      const double factor = exp2(delta);
      d += static_cast<double>(part.d) * factor;
      if constexpr ((F & kSum) != 0) {
        if (end > begin) {
          s += static_cast<double>(part.s) + static_cast<double>(end - begin) * gap * static_cast<double>(c.sum_scale);
        }
      }
      if constexpr ((F & kEntropy) != 0) {
        e += factor * (static_cast<double>(part.e) + delta * static_cast<double>(part.d));
      }
      if constexpr ((F & kArgmax) != 0) {
        // The lowest class of the largest x: a later rank needs a larger one.
        if (part.d != 0.0f && (part.first > total.x || total.i == INT64_MAX)) {
          total.x = part.first;
          total.i = begin + part.column;
        }
      }
      if (id >= begin && id < end) value = part.target_value;
    }
    total.d = static_cast<float>(d);
    total.s = static_cast<float>(s);
    total.e = static_cast<float>(e);
    write_counted<F, false>(p, row, target.kind, value, total);
  }
}

__global__ void __launch_bounds__(kRanksThreads) empty_kernel(const __grid_constant__ Params p) {
  const int64_t step = static_cast<int64_t>(gridDim.x) * kRanksThreads;
  for (int64_t row = static_cast<int64_t>(blockIdx.x) * kRanksThreads + threadIdx.x; row < p.rows; row += step) {
    write_ignored_partial(p, row);
  }
}

}  // namespace xent::cuda
