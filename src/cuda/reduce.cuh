// SPDX-FileCopyrightText: the libxent authors
// SPDX-License-Identifier: Apache-2.0

// The launches that sum over rows. Where there are more rows than one block takes, a second kernel adds the blocks. (Of
// few rows combine_kernel does it.)
#pragma once

#include "sums.cuh"

namespace xent::cuda {

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
