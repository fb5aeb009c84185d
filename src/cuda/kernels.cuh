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

// One stretch of a warp's vectors of a row's gradient, or zeros.
template <typename T, typename G, unsigned F>
__device__ __forceinline__ void write_stretch(const Params &p, const GradWriter<T, G, F> &writer, int stretch,
                                              const GradRow &grad) {
  const int first = stretch * 32 * kDepth + static_cast<int>(threadIdx.x & 31);
  if (grad.zero) {
    writer.write_zero(first, p.math);
  } else {
    writer.write(first, grad, p.math);
  }
}

// All of a row's gradient, from its end to its beginning, by the warps of its group.
template <typename T, typename G, unsigned F>
__device__ __forceinline__ void write_row_gradient(const Params &p, int64_t row, const GradRow &grad, int member) {
  const GradWriter<T, G, F> writer(p, row, grad.target);
  const int warps = p.geometry.threads / 32;
  const int stretches = (writer.vectors + 32 * kDepth - 1) / (32 * kDepth);
#pragma unroll 1
  for (int stretch = stretches - 1 - member / 32; stretch >= 0; stretch -= warps) {
    write_stretch<T, G, F>(p, writer, stretch, grad);
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

// 96 registers a thread: with the 64 that full occupancy leaves, the compiler spills around the batch and forward
// loses 8 % (0.263 against 0.243 ms at 4096 x 128256 bfloat16 on an H200).
inline constexpr int kForwardThreads = 128;
inline constexpr int kOnePassThreads = 1024;

// Vectors in flight of one thread: eight where forward alone has the registers, four where a row takes 1024 threads.
inline constexpr int kForwardBatch = 8;
inline constexpr int kOnePassBatch = 4;

template <typename T, unsigned F, int N>
__device__ __forceinline__ Partial sweep_slice(const Params &p, const RowReader<T> &reader, int slice, int member) {
  const int begin = slice * p.geometry.slice_vectors;
  const int end = begin + p.geometry.slice_vectors;
  return sweep<T, F, N>(reader, begin, end < reader.vectors ? end : reader.vectors, p.geometry.threads, member, p.math);
}

template <typename T, unsigned F, bool kGrad>
__global__ void __launch_bounds__(kGrad ? kOnePassThreads : kForwardThreads, kGrad ? 1 : 5)
    rows_kernel(const __grid_constant__ Params p) {
  constexpr int N = kGrad ? kOnePassBatch : kForwardBatch;
  extern __shared__ float shared[];
  const int threads = p.geometry.threads;
  const int slices = p.geometry.slices;
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
    if (threads == 32) {
      part = sweep<T, F, N>(reader, 0, reader.vectors, threads, member, p.math);
      part = merge_lanes<F>(part, 32, p.math);
    } else {
      const int pitch = (kGrad ? threads / 32 : threads) * kPartialWords<F>;
      float *merged = shared + p.geometry.stashed * pitch;
      Partial total;
      for (int base = 0; base < slices; base += p.geometry.stashed) {
        const int count = slices - base < p.geometry.stashed ? slices - base : p.geometry.stashed;
        for (int i = 0; i < count; ++i) {
          part = sweep_slice<T, F, N>(p, reader, base + i, member);
          if constexpr (kGrad) {
            stash_warp<F>(shared + i * pitch, part, p.math);
          } else {
            stash<F>(shared, i, threads, member, part);
          }
        }
        __syncthreads();
        if constexpr (kGrad) {
          for (int i = member / 32; i < count; i += threads / 32) {
            const Partial sum = merge_slices<F>(shared + i * pitch, threads / 32, p.math);
            if (member % 32 == 0) store_partial<F>(merged + i * kPartialWords<F>, 1, sum);
          }
        } else {
          merge_stashed<F>(shared, count, threads, merged, p.math);
        }
        __syncthreads();
        if (member < 32) add_slices<F>(total, merged, count, p.math);
      }
      part = total;
    }
    RowStats stats = {};
    if (member == 0) stats = write_counted<F>(p, row, target.kind, target_v, part);
    if constexpr (kGrad) {
      __shared__ RowStats row_stats;
      if (threads > 32) {
        if (member == 0) row_stats = stats;
        __syncthreads();
        stats = row_stats;
      } else {
        stats.m = __shfl_sync(0xffffffffu, stats.m, 0);
        stats.d = __shfl_sync(0xffffffffu, stats.d, 0);
        __syncwarp();  // the target's logit has been read
      }
      write_any_gradient<T, F>(p, row, grad_row(p, row, target, stats), member);
    }
    if (threads > 32) __syncthreads();  // the next row writes the shared memory that this one reads
  }
}

template <typename T, unsigned F>
__global__ void __launch_bounds__(kForwardThreads) slices_kernel(const __grid_constant__ Params p) {
  extern __shared__ float shared[];
  const int threads = p.geometry.threads;
  const int slices = p.geometry.slices;
  for (int64_t piece = blockIdx.x; piece < p.rows * slices; piece += gridDim.x) {
    const int64_t row = piece / slices;
    const int slice = static_cast<int>(piece - row * slices);
    if (read_target(p, row).kind == RowKind::ignored) continue;
    const RowReader<T> reader(p.logits.row<T>(row), p.logits.col_stride, p.classes, 0);
    const int member = static_cast<int>(threadIdx.x);
    const Partial part = sweep_slice<T, F, kForwardBatch>(p, reader, slice, member);
    stash<F>(shared, 0, threads, member, part);
    __syncthreads();
    merge_stashed<F>(shared, 1, threads, p.slice_partials + piece * kPartialWords<F>, p.math);
    __syncthreads();
  }
}

template <typename T, unsigned F>
__global__ void __launch_bounds__(128) combine_kernel(const __grid_constant__ Params p) {
  const int64_t step = static_cast<int64_t>(gridDim.x) * (blockDim.x / 32);
  for (int64_t row = static_cast<int64_t>(blockIdx.x) * (blockDim.x / 32) + threadIdx.x / 32; row < p.rows;
       row += step) {
    const RowTarget target = read_target(p, row);
    const bool leader = threadIdx.x % 32 == 0;
    if (target.kind == RowKind::ignored) {
      if (leader) write_ignored(p, row);
      continue;
    }
    const float *partials = p.slice_partials + row * p.geometry.slices * kPartialWords<F>;
    const Partial part = merge_row<F>(partials, p.geometry, p.math);
    if (leader) write_counted<F>(p, row, target.kind, target_value<T, F>(p, row, target), part);
  }
}

inline constexpr int kBackwardThreads = 256;
inline constexpr int kRepeats = 4;  // stretches a warp: the coefficients of a row cost as much as a stretch

// `warps` (a power of two up to the block's) write one piece of a row: warps * kRepeats stretches.
template <typename T, typename G, unsigned F>
__global__ void __launch_bounds__(kBackwardThreads, 3)
    backward_kernel(const __grid_constant__ Params p, int pieces, int warps) {
  const int group = static_cast<int>(threadIdx.x) / (warps * 32);
  const int warp = static_cast<int>(threadIdx.x) / 32 - group * warps;
  const int groups = kBackwardThreads / 32 / warps;
  const int64_t step = static_cast<int64_t>(gridDim.x) * groups;
  for (int64_t at = static_cast<int64_t>(blockIdx.x) * groups + group; at < p.rows * pieces; at += step) {
    const int64_t row = at / pieces;
    const int piece = static_cast<int>(at - row * pieces);
    const RowTarget target = read_target(p, row);
    const GradWriter<T, G, F> writer(p, row, target.target);
    GradRow grad = {true};
    if (target.kind == RowKind::counted) {
      const float *stats = p.stats.row<const float>(row);
      grad = grad_row(p, row, target, {stats[0], stats[p.stats.col_stride]});
    }
#pragma unroll 1
    for (int repeat = 0; repeat < kRepeats; ++repeat) {
      const int stretch = (piece * kRepeats + repeat) * warps + warp;
      if (stretch * 32 * kDepth >= writer.vectors) break;
      write_stretch<T, G, F>(p, writer, stretch, grad);
    }
  }
}

}  // namespace xent::cuda
