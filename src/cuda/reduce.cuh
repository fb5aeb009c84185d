// SPDX-FileCopyrightText: the libxent authors
// SPDX-License-Identifier: Apache-2.0

// Sums over rows: the loss, the divisor and the row counts. A thread adds fixed rows in double, a block adds its
// threads as a tree, and where there are more rows than one block takes, a second kernel adds the blocks. The order
// depends on the number of rows alone. Bytes: 8 a row of losses, the targets, and mask and weights where they are
// given.
#pragma once

#include "rows.cuh"

namespace xent::cuda {

struct RowSums {
  double loss;
  double weight;
  int64_t counted;
  int64_t ignored;
  int64_t out_of_range;
};

inline constexpr int kReduceThreads = 512;
inline constexpr int64_t kRowsPerChunk = 8192;

enum ReduceWhat : int {
  kReduceLoss = 1,     // row_loss -> loss
  kReduceWeights = 2,  // weights of the rows -> the divisor of MEAN
  kReduceCounts = 4,   // -> row_counts
  kReduceDivisor = 8,  // write what was divided by to p.divisor and p.own_divisor
};

__device__ __forceinline__ RowSums add(const RowSums &a, const RowSums &b) {
  return {a.loss + b.loss, a.weight + b.weight, a.counted + b.counted, a.ignored + b.ignored,
          a.out_of_range + b.out_of_range};
}

// Over the lanes of a warp, in lane 0.
__device__ __forceinline__ RowSums warp_sum(RowSums sums) {
  for (int distance = 16; distance > 0; distance /= 2) {
    sums = add(
        sums,
        {__shfl_down_sync(0xffffffffu, sums.loss, distance), __shfl_down_sync(0xffffffffu, sums.weight, distance),
         __shfl_down_sync(0xffffffffu, sums.counted, distance), __shfl_down_sync(0xffffffffu, sums.ignored, distance),
         __shfl_down_sync(0xffffffffu, sums.out_of_range, distance)});
  }
  return sums;
}

// Rows row, row + step, ... of them kAhead at most, those before `end`. Their loads are in flight at once.
inline constexpr int kAhead = 8;
__device__ __forceinline__ void add_rows(RowSums &sums, const Params &p, int what, int64_t row, int64_t end, int step) {
  int64_t targets[kAhead];
  double losses[kAhead];
#pragma unroll
  for (int i = 0; i < kAhead; ++i) {
    const int64_t at = row + i * step;
    targets[i] = at < end ? read_int(p.targets, p.targets.offset(at)) : 0;
    // Once, and past L1.
    losses[i] = at < end && (what & kReduceLoss) != 0 ? __ldcg(p.row_loss + at) : 0.0;
  }
#pragma unroll
  for (int i = 0; i < kAhead; ++i) {
    const int64_t at = row + i * step;
    if (at >= end) break;
    const RowKind kind = classify(p, at, targets[i]).kind;
    if (kind == RowKind::ignored) {
      ++sums.ignored;
      continue;
    }
    ++(kind == RowKind::counted ? sums.counted : sums.out_of_range);
    sums.loss += losses[i];
    if ((what & kReduceWeights) != 0) sums.weight += static_cast<double>(read_weight(p, at));
  }
}

// Rows [begin, end) of a block of any size, as kReduceThreads threads add them. Thread 0 gets the sum.
__device__ __forceinline__ RowSums block_sum(const Params &p, int what, int64_t begin, int64_t end) {
  constexpr int warps = kReduceThreads / 32;
  __shared__ RowSums shared[warps];
  const int lane = static_cast<int>(threadIdx.x) % 32;
  for (int warp = static_cast<int>(threadIdx.x) / 32; warp < warps; warp += static_cast<int>(blockDim.x) / 32) {
    RowSums sums = {};
    if (begin + warp * 32 < end) {
#pragma unroll 1
      for (int64_t row = begin + warp * 32 + lane; row < end; row += kAhead * kReduceThreads) {
        add_rows(sums, p, what, row, end, kReduceThreads);
      }
      sums = warp_sum(sums);
    }
    if (lane == 0) shared[warp] = sums;
  }
  __syncthreads();
  if (threadIdx.x >= 32) return {};
  return warp_sum(lane < warps ? shared[lane] : RowSums{});
}

__device__ __forceinline__ void finish_sums(const Params &p, int what, const RowSums &sums) {
  // Where loss_and_grad has computed the divisor before its gradient, the same value serves the loss.
  const bool mean = p.reduction == XENT_REDUCTION_MEAN;
  double divisor = 1.0;
  const bool divided = mean || p.denominator.data != nullptr;
  if (p.denominator.data != nullptr) {
    divisor = static_cast<double>(read_denominator(p));
  } else if (mean) {
    divisor = (what & kReduceWeights) != 0 ? static_cast<double>(static_cast<float>(sums.weight))
                                           : static_cast<double>(*p.own_divisor);
  }
  if ((what & kReduceDivisor) != 0 && divided) {
    if (p.own_divisor != nullptr) *p.own_divisor = static_cast<float>(divisor);
    if (p.divisor.data != nullptr) *static_cast<float *>(p.divisor.data) = static_cast<float>(divisor);
  }
  if ((what & kReduceLoss) != 0) {
    double loss = sums.loss;
    if (divided) loss = divisor == 0.0 ? 0.0 : loss / divisor;
    if (mean && p.empty_mean_is_nan && p.denominator.data == nullptr && sums.counted + sums.out_of_range == 0) {
      loss = NAN;
    }
    *static_cast<float *>(p.loss.data) = static_cast<float>(loss);
  }
  if ((what & kReduceCounts) != 0) {
    const int64_t stride = p.row_counts.col_stride;
    write_int(p.row_counts, 0, sums.counted);
    write_int(p.row_counts, stride, sums.ignored);
    write_int(p.row_counts, 2 * stride, sums.out_of_range);
  }
}

__global__ void __launch_bounds__(kReduceThreads) reduce_rows_kernel(const __grid_constant__ Params p, int what) {
  start_in_chain();
  const int64_t begin = static_cast<int64_t>(blockIdx.x) * kRowsPerChunk;
  const RowSums sums = block_sum(p, what, begin, min(begin + kRowsPerChunk, p.rows));
  if (threadIdx.x != 0) return;
  if (gridDim.x == 1) {
    finish_sums(p, what, sums);
  } else {
    static_cast<RowSums *>(p.chunks)[blockIdx.x] = sums;
  }
}

__global__ void __launch_bounds__(kReduceThreads)
    reduce_chunks_kernel(const __grid_constant__ Params p, int what, int64_t chunks) {
  constexpr int warps = kReduceThreads / 32;
  __shared__ RowSums shared[warps];
  start_in_chain();
  const int lane = static_cast<int>(threadIdx.x) % 32;
  RowSums sums = {};
  for (int64_t chunk = threadIdx.x; chunk < chunks; chunk += kReduceThreads) {
    sums = add(sums, static_cast<const RowSums *>(p.chunks)[chunk]);
  }
  sums = warp_sum(sums);
  if (lane == 0) shared[threadIdx.x / 32] = sums;
  __syncthreads();
  if (threadIdx.x >= 32) return;
  sums = warp_sum(lane < warps ? shared[lane] : RowSums{});
  if (threadIdx.x == 0) finish_sums(p, what, sums);
}

}  // namespace xent::cuda
