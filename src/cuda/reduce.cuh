// SPDX-FileCopyrightText: the libxent authors
// SPDX-License-Identifier: Apache-2.0

// Sums over rows: the loss, the divisor and the row counts. A block has kRowsPerBlock rows, its threads fixed ones of
// them; losses and weights are added in double, along trees that depend on the number of rows alone. The blocks of a
// cluster are added by its first one, and where there are more than that, by a second kernel. Bytes: 8 a row of losses,
// the targets, and mask and weights where they are given.
//
// Forward waits for these sums to end, so what they cost is latency: rows are dealt to many SMs (one block for 8192
// rows took 8 us, most of them instructions), and what the inputs alone say is added up while the launch before still
// runs.
#pragma once

#include "cluster.cuh"
#include "rows.cuh"

namespace xent::cuda {

struct RowSums {
  double loss;
  double weight;
  int64_t counted;
  int64_t out_of_range;
};

inline constexpr int kReduceThreads = 256;
inline constexpr int kReduceRows = 4;  // of a thread; their loads are in flight at once
inline constexpr int kReduceCluster = 8;
inline constexpr int64_t kRowsPerBlock = int64_t{kReduceThreads} * kReduceRows;

enum ReduceWhat : int {
  kReduceLoss = 1,     // row_loss -> loss
  kReduceWeights = 2,  // weights of the rows -> the divisor of MEAN
  kReduceCounts = 4,   // -> row_counts
  kReduceDivisor = 8,  // write what was divided by to p.divisor and p.own_divisor
};

__device__ __forceinline__ RowSums add(const RowSums &a, const RowSums &b) {
  return {a.loss + b.loss, a.weight + b.weight, a.counted + b.counted, a.out_of_range + b.out_of_range};
}

// Over the first `lanes` (a power of two) of a warp, in lane 0.
__device__ __forceinline__ RowSums warp_sum(RowSums sums, int lanes) {
#pragma unroll 1
  for (int distance = lanes / 2; distance > 0; distance /= 2) {
    sums = add(
        sums, {__shfl_down_sync(0xffffffffu, sums.loss, distance), __shfl_down_sync(0xffffffffu, sums.weight, distance),
               __shfl_down_sync(0xffffffffu, sums.counted, distance),
               __shfl_down_sync(0xffffffffu, sums.out_of_range, distance)});
  }
  return sums;
}

__device__ __forceinline__ double warp_sum(double x) {
#pragma unroll
  for (int distance = 16; distance > 0; distance /= 2) x += __shfl_down_sync(0xffffffffu, x, distance);
  return x;
}

// What the targets, the mask and the weights say of a thread's rows row, row + kReduceThreads, ...; lane 0 gets the
// warp's sum. One row after the other: of four at once the code, which is run once, takes longer to fetch.
__device__ __forceinline__ RowSums count_rows(const Params &p, int what, int64_t row) {
  RowSums sums = {};
  uint32_t counted = 0, out_of_range = 0;
#pragma unroll 1
  for (int i = 0; i < kReduceRows; ++i) {
    const int64_t at = row + i * kReduceThreads;
    if (at >= p.rows) break;
    const RowKind kind = read_target(p, at).kind;
    if (kind == RowKind::ignored) continue;
    ++(kind == RowKind::counted ? counted : out_of_range);
    if ((what & kReduceWeights) != 0) sums.weight += static_cast<double>(read_weight(p, at));
  }
  sums.counted = __reduce_add_sync(0xffffffffu, counted);
  sums.out_of_range = __reduce_add_sync(0xffffffffu, out_of_range);
  if ((what & kReduceWeights) != 0) sums.weight = warp_sum(sums.weight);
  return sums;
}

// Of the same rows, in lane 0.
__device__ __forceinline__ double sum_losses(const Params &p, int64_t row) {
  double losses[kReduceRows];
#pragma unroll
  for (int i = 0; i < kReduceRows; ++i) {
    const int64_t at = row + i * kReduceThreads;
    losses[i] = at < p.rows ? __ldcg(p.row_loss + at) : 0.0;  // once, and past L1; 0 where the row is ignored
  }
#pragma unroll
  for (int i = 1; i < kReduceRows; ++i) losses[0] += losses[i];
  return warp_sum(losses[0]);
}

// `own`: what *p.own_divisor held before, where it is used.
__device__ __forceinline__ void finish_sums(const Params &p, int what, const RowSums &sums, float own) {
  // Where loss_and_grad has computed the divisor before its gradient, the same value serves the loss.
  const bool mean = p.reduction == XENT_REDUCTION_MEAN;
  double divisor = 1.0;
  const bool divided = mean || p.denominator.data != nullptr;
  if (p.denominator.data != nullptr) {
    divisor = static_cast<double>(read_denominator(p));
  } else if (mean) {
    divisor = static_cast<double>((what & kReduceWeights) != 0 ? static_cast<float>(sums.weight) : own);
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
    write_int(p.row_counts, stride, p.rows - sums.counted - sums.out_of_range);
    write_int(p.row_counts, 2 * stride, sums.out_of_range);
  }
}

// What *p.own_divisor holds, where finish_sums() uses it.
__device__ __forceinline__ float read_own_divisor(const Params &p, int what) {
  const bool used = p.own_divisor != nullptr && (what & kReduceWeights) == 0;
  return used ? __ldcg(p.own_divisor) : 1.0f;
}

// `cluster` blocks, a power of two, form one.
__global__ void __launch_bounds__(kReduceThreads)
    reduce_rows_kernel(const __grid_constant__ Params p, int what, int cluster) {
  constexpr int warps = kReduceThreads / 32;
  __shared__ RowSums of_warps[warps], of_blocks[kReduceCluster];
  let_next_start();
  if (cluster > 1) cluster_arrive();
  const int lane = static_cast<int>(threadIdx.x) % 32, warp = static_cast<int>(threadIdx.x) / 32;
  const int64_t row = static_cast<int64_t>(blockIdx.x) * kRowsPerBlock + threadIdx.x;
  RowSums sums = {};
  if ((what & (kReduceWeights | kReduceCounts)) != 0 || p.empty_mean_is_nan != 0) sums = count_rows(p, what, row);
  wait_for_previous();
  const float own = read_own_divisor(p, what);
  if ((what & kReduceLoss) != 0) sums.loss = sum_losses(p, row);
  if (lane == 0) of_warps[warp] = sums;
  __syncthreads();
  if (warp == 0) sums = warp_sum(lane < warps ? of_warps[lane] : RowSums{}, warps);
  if (cluster > 1) {
    cluster_wait();  // the first block runs: its shared memory may be written
    const uint32_t rank = cluster_rank();
    if (threadIdx.x == 0) *of_block(&of_blocks[rank], 0) = sums;
    cluster_arrive();
    cluster_wait();
    if (rank != 0) return;
    if (warp == 0) sums = warp_sum(lane < cluster ? of_blocks[lane] : RowSums{}, kReduceCluster);
  }
  if (threadIdx.x != 0) return;
  if (gridDim.x == static_cast<unsigned>(cluster)) {
    finish_sums(p, what, sums, own);
  } else {
    static_cast<RowSums *>(p.chunks)[static_cast<int>(blockIdx.x) / cluster] = sums;
  }
}

// The sums of `chunks` clusters.
__global__ void __launch_bounds__(kReduceThreads)
    reduce_chunks_kernel(const __grid_constant__ Params p, int what, int64_t chunks) {
  constexpr int warps = kReduceThreads / 32;
  __shared__ RowSums shared[warps];
  start_in_chain();
  const float own = read_own_divisor(p, what);
  const int lane = static_cast<int>(threadIdx.x) % 32;
  RowSums sums = {};
  for (int64_t chunk = threadIdx.x; chunk < chunks; chunk += kReduceThreads) {
    sums = add(sums, static_cast<const RowSums *>(p.chunks)[chunk]);
  }
  sums = warp_sum(sums, 32);
  if (lane == 0) shared[threadIdx.x / 32] = sums;
  __syncthreads();
  if (threadIdx.x >= 32) return;
  sums = warp_sum(lane < warps ? shared[lane] : RowSums{}, warps);
  if (threadIdx.x == 0) finish_sums(p, what, sums, own);
}

}  // namespace xent::cuda
