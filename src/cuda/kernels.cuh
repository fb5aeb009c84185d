// SPDX-FileCopyrightText: the libxent authors
// SPDX-License-Identifier: Apache-2.0

// The kernels that sweep logits.
//
//   rows_kernel      a group of threads a row: forward; with kGrad the gradient too, while the row is still in L2.
//                    Bytes: logits once, then 8 a row. With kGrad the second read comes from L2 (walked backwards, so
//                    that it begins with what was read last) as long as the rows in flight fit it; one write.
//   slices_kernel    a block a slice, for few rows: leaves partials in the workspace.
//   combine_kernel   a warp a row: merges them and writes the row's outputs, with the bits of rows_kernel.
//   backward_kernel  a block for each stretch of columns of a row: logits read once, gradient written once.
#pragma once

#include "accumulate.cuh"
#include "gradient.cuh"

namespace xent::cuda {

template <typename T, unsigned F>
__device__ __forceinline__ float target_value(const Params &p, int64_t row, const RowTarget &target) {
  if (target.kind != RowKind::counted) return 0.0f;
  const T x = p.logits.row<T>(row)[target.target * p.logits.col_stride];
  return value_of<F>(to_float(x), p.math);
}

// All vectors of a row's gradient, from its end to its beginning, by the threads of its group.
template <typename T, typename G, unsigned F>
__device__ __forceinline__ void write_row_gradient(const Params &p, int64_t row, const GradRow &grad, int member) {
  const GradWriter<T, G, F> writer(p, row);
  const int threads = p.geometry.threads;
  const int stretch = threads * kDepth;
  const int last = (writer.vectors + stretch - 1) / stretch * stretch - threads + member;
  for (int k = last; k >= 0; k -= stretch) {
    if (grad.zero) {
      writer.write_zero(k, -threads, p.math);
    } else {
      writer.write(k, -threads, grad, p.math);
    }
  }
}

template <typename T, unsigned F>
__device__ __forceinline__ void write_any_gradient(const Params &p, int64_t row, const GradRow &grad, int member) {
  if (sizeof(T) == 4 || p.grad_logits.type != Element::f32) {
    write_row_gradient<T, T, F>(p, row, grad, member);
  } else {
    write_row_gradient<T, float, F>(p, row, grad, member);
  }
}

template <typename T, unsigned F, bool kGrad>
__global__ void __launch_bounds__(kGrad ? 1024 : 512, kGrad ? 1 : 2) rows_kernel(const __grid_constant__ Params p) {
  extern __shared__ float shared[];
  const int threads = p.geometry.threads;
  const int slices = p.geometry.slices;
  const int warps = threads / 32;
  const int group = static_cast<int>(threadIdx.x) / threads;  // 0 unless a row is one warp's
  const int member = static_cast<int>(threadIdx.x) - group * threads;
  const int64_t step = static_cast<int64_t>(gridDim.x) * (blockDim.x / threads);
  for (int64_t row = static_cast<int64_t>(blockIdx.x) * (blockDim.x / threads) + group; row < p.rows; row += step) {
    const RowTarget target = read_target(p, row);
    if (target.kind == RowKind::ignored) {
      if (member == 0) write_ignored(p, row);
      if constexpr (kGrad) {
        const GradRow zero = {true};
        write_any_gradient<T, F>(p, row, zero, member);
      }
      continue;
    }
    const RowReader<T> reader(p.logits.row<T>(row), p.logits.col_stride, p.classes, 0);
    float target_v = 0.0f;
    if (member == 0) target_v = target_value<T, F>(p, row, target);  // before anything is overwritten
    Partial part;
    for (int slice = 0; slice < slices; ++slice) {
      part = sweep<T, F>(reader, slice * threads * p.geometry.vectors + member, threads, p.geometry.vectors, p.math);
      part = warp_merge<F>(part, p.math);
      if (warps > 1 && member % 32 == 0) {
        store_partial<F>(shared + (slice * warps + member / 32) * kPartialWords<F>, part);
      }
    }
    if (warps > 1) {
      __syncthreads();
      float *merged = shared + slices * warps * kPartialWords<F>;
      for (int slice = member / 32; slice < slices; slice += warps) {
        part = merge_warps<F>(shared + slice * warps * kPartialWords<F>, warps, p.math);
        if (member % 32 == 0) store_partial<F>(merged + slice * kPartialWords<F>, part);
      }
      __syncthreads();
      if (member < 32) part = merge_slices<F>(merged, slices, p.math);
    }
    RowStats stats = {};
    if (member == 0) stats = write_counted<F>(p, row, target.kind, target_v, part);
    if constexpr (kGrad) {
      __shared__ RowStats row_stats[4];
      if (warps > 1) {
        if (member == 0) row_stats[0] = stats;
        __syncthreads();
        stats = row_stats[0];
      } else {
        stats.m = __shfl_sync(0xffffffffu, stats.m, 0);
        stats.d = __shfl_sync(0xffffffffu, stats.d, 0);
        __syncwarp();  // the target's logit has been read
      }
      write_any_gradient<T, F>(p, row, grad_row(p, row, target, stats), member);
    }
    if (warps > 1) __syncthreads();  // the next row writes the shared memory that this one reads
  }
}

template <typename T, unsigned F>
__global__ void __launch_bounds__(1024, 1) slices_kernel(const __grid_constant__ Params p) {
  extern __shared__ float shared[];
  const int threads = p.geometry.threads;
  const int slices = p.geometry.slices;
  for (int64_t piece = blockIdx.x; piece < p.rows * slices; piece += gridDim.x) {
    const int64_t row = piece / slices;
    const int slice = static_cast<int>(piece - row * slices);
    if (read_target(p, row).kind == RowKind::ignored) continue;
    const RowReader<T> reader(p.logits.row<T>(row), p.logits.col_stride, p.classes, 0);
    Partial part = sweep<T, F>(reader, slice * threads * p.geometry.vectors + static_cast<int>(threadIdx.x), threads,
                               p.geometry.vectors, p.math);
    part = warp_merge<F>(part, p.math);
    if (threadIdx.x % 32 == 0) store_partial<F>(shared + threadIdx.x / 32 * kPartialWords<F>, part);
    __syncthreads();
    if (threadIdx.x < 32) {
      part = merge_warps<F>(shared, threads / 32, p.math);
      if (threadIdx.x == 0) store_partial<F>(p.slice_partials + piece * kPartialWords<F>, part);
    }
    __syncthreads();
  }
}

template <typename T, unsigned F>
__global__ void __launch_bounds__(128) combine_kernel(const __grid_constant__ Params p) {
  const int64_t step = static_cast<int64_t>(gridDim.x) * (blockDim.x / 32);
  for (int64_t row = static_cast<int64_t>(blockIdx.x) * (blockDim.x / 32) + threadIdx.x / 32; row < p.rows; row += step) {
    const RowTarget target = read_target(p, row);
    const bool leader = threadIdx.x % 32 == 0;
    if (target.kind == RowKind::ignored) {
      if (leader) write_ignored(p, row);
      continue;
    }
    const int slices = p.geometry.slices;
    const Partial part = merge_slices<F>(p.slice_partials + row * slices * kPartialWords<F>, slices, p.math);
    if (leader) write_counted<F>(p, row, target.kind, target_value<T, F>(p, row, target), part);
  }
}

inline constexpr int kBackwardThreads = 512;

// `width` threads (a power of two that divides the block) write one stretch of width * kDepth vectors.
template <typename T, typename G, unsigned F>
__global__ void __launch_bounds__(kBackwardThreads, 2)
    backward_kernel(const __grid_constant__ Params p, int stretches, int width) {
  const int group = static_cast<int>(threadIdx.x) / width;
  const int member = static_cast<int>(threadIdx.x) - group * width;
  const int groups = kBackwardThreads / width;
  const int64_t step = static_cast<int64_t>(gridDim.x) * groups;
  for (int64_t piece = static_cast<int64_t>(blockIdx.x) * groups + group; piece < p.rows * stretches; piece += step) {
    const int64_t row = piece / stretches;
    const int stretch = static_cast<int>(piece - row * stretches);
    const RowTarget target = read_target(p, row);
    const GradWriter<T, G, F> writer(p, row);
    const int first = stretch * width * kDepth + member;
    GradRow grad = {true};
    if (target.kind == RowKind::counted) {
      const float *stats = p.stats.row<const float>(row);
      grad = grad_row(p, row, target, {stats[0], stats[p.stats.col_stride]});
    }
    if (grad.zero) {
      writer.write_zero(first, width, p.math);
    } else {
      writer.write(first, width, grad, p.math);
    }
  }
}

}  // namespace xent::cuda
