// SPDX-FileCopyrightText: the libxent authors
// SPDX-License-Identifier: Apache-2.0

// The gradient from what forward has kept. Bytes: logits once, the gradient one write.
//
//   piece_kernel     rows that lie as usual: a block for each piece of a row, `repeats` units of 8 vectors a lane for
//   each
//                    of its warps. The first unit is loaded before the row's coefficients are known, and each vector of
//                    the next one as soon as one is stored.
//   backward_kernel  rows of any layout: a block for each stretch of columns of a row.
#pragma once

#include "block.cuh"

namespace xent::cuda {

inline constexpr int kPieceThreads = 256;
inline constexpr int kPieceBlocks = 3;  // of an SM, with 80 registers

// A warp's units `unit`, `unit` + warps, ... of a row, which are before `stop`. The first is in `v`.
template <typename T, unsigned F, Layout kRows, class P>
__device__ __forceinline__ void put_piece(const P &p, const Chunks<T, kRows> &chunks, int64_t row, int unit, int warps,
                                          int stop, uint4 (&v)[kHeld], const GradRow &grad) {
  const int lane = static_cast<int>(threadIdx.x & 31);
#pragma unroll 1
  while (unit < stop) {
    const int next = unit + warps;
    const ChunkRefill<T, kRows, kHeld> refill(chunks, next * kUnit + lane, 32, kReadOnce, next < stop, v);
    put_chunks<T, T, F>(p, chunks, row, unit * kUnit + lane, unit * kUnit, 32, v, grad, refill);
    unit = next;
  }
}

// `pieces`: of a row, of `repeats` units for each warp of the block.
template <typename T, unsigned F, Layout kRows>
__global__ void __launch_bounds__(kPieceThreads, kPieceBlocks)
    piece_kernel(const __grid_constant__ ParamsFor<kRows> p, Divisor pieces, int repeats) {
  static_assert(kRows != Layout::any);
  let_next_start();
  const int lane = static_cast<int>(threadIdx.x & 31), warp = warp_of_block();
  const int warps = static_cast<int>(blockDim.x / 32), units = p.geometry.batches;
#pragma unroll 1
  for (int64_t at = blockIdx.x; at < p.rows * pieces.d; at += gridDim.x) {
    const int64_t row = pieces.quotient(at);
    const int begin = static_cast<int>(at - row * pieces.d) * warps * repeats;
    const int stop = min(begin + warps * repeats, units), unit = begin + warp;
    const RowTarget target = read_target(p, row);
    const Chunks<T, kRows> chunks(p, row);
    const bool counts = target.kind == RowKind::counted;
    uint4 v[kHeld];
    hold_anything(v);
    ChunkRefill<T, kRows, kHeld>(chunks, unit * kUnit + lane, 32, kReadOnce, counts && unit < stop, v).all();
    const Ends<T> ends(p, chunks);
    const bool has_end = kRows != Layout::even && unit == 0 && lane < ends.count;
    const float end = has_end && counts ? to_float(chunks.row[ends.column(lane)]) : 0.0f;
    wait_for_previous();
    GradRow grad = {true};
    if (counts) {
      const float *stats = p.stats.template row<const float>(row);
      grad = grad_row(p.math, row_factor(p, row, target.kind), target.target, {stats[0], stats[p.stats.col_stride]});
    }
    const bool plain = !grad.zero && grad.plain();
    if (plain) {
      if (has_end) put_end<T, F>(p, p.grad_logits.template row<T>(row), ends.column(lane), end, grad);
      put_piece<T, F>(p, chunks, row, unit, warps, stop, v, grad);
    }
    // What is not: a row that does not count, or whose coefficients need care; and padding.
    const int from = plain ? ends.rest : begin * kUnit;
    const int to = stop == units ? INT32_MAX : plain ? 0 : stop * kUnit;
    if (plain && p.vocab == p.classes) continue;
    put_rest<T, T, F>(p, row, chunks.lead(), from + static_cast<int>(threadIdx.x), to, warps * 32, grad);
  }
}

inline constexpr int kBackwardThreads = 256;
inline constexpr int kRepeats = 4;  // batches a warp: the coefficients of a row cost as much as a batch

// `warps` (a power of two up to the block's) write one piece of a row: warps * kRepeats batches.
template <typename T, typename G, unsigned F>
__global__ void __launch_bounds__(kBackwardThreads, 3)
    backward_kernel(const __grid_constant__ Params p, int pieces, int warps) {
  start_in_chain();
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
      grad = grad_row(p.math, row_factor(p, row, target.kind), target.target, {stats[0], stats[p.stats.col_stride]});
    }
#pragma unroll 1
    for (int repeat = 0; repeat < kRepeats; ++repeat) {
      const int batch = (piece * kRepeats + repeat) * warps + warp;
      if (batch * (kBatch * 32) >= writer.vectors(p)) break;
      writer.write(p, row, batch, static_cast<int>(threadIdx.x & 31), grad);
    }
  }
}

}  // namespace xent::cuda
