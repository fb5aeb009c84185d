// SPDX-FileCopyrightText: the libxent authors
// SPDX-License-Identifier: Apache-2.0

// The gradient from what forward has kept. Bytes: logits once, the gradient one write.
//
//   unit_kernel      rows that lie as usual: a block of one warp for each 8 vectors a lane of a row, which are loaded
//                    before the row's coefficients are known.
//   backward_kernel  rows of any layout: a block for each stretch of columns of a row.
#pragma once

#include "block.cuh"

namespace xent::cuda {

inline constexpr int kUnitBlocks = 24;  // of an SM, with 80 registers

// `units`: of a row, that many blocks. More work for a warp, and its next unit loaded while it stores this one, or more
// warps for a block, are 1 to 2 % slower.
template <typename T, unsigned F, Layout kRows>
__global__ void __launch_bounds__(32, kUnitBlocks)
    unit_kernel(const __grid_constant__ ParamsFor<kRows> p, Divisor units) {
  static_assert(kRows != Layout::any);
  let_next_start();
  const int lane = static_cast<int>(threadIdx.x);
#pragma unroll 1
  for (int64_t at = blockIdx.x; at < p.rows * units.d; at += gridDim.x) {
    const int64_t row = units.quotient(at);
    const int unit = static_cast<int>(at - row * units.d), first = unit * kUnit + lane;
    const RowTarget target = read_target(p, row);
    const Chunks<T, kRows> chunks(p, row);
    const bool counts = target.kind == RowKind::counted;
    uint4 v[kHeld];
    hold_anything(v);
    ChunkRefill<T, kRows, kHeld>(chunks, first, 32, kReadOnce, counts, v).all();
    const Ends<T> ends(p, chunks);
    const bool has_end = kRows != Layout::even && unit == 0 && lane < ends.count;
    const float end = has_end && counts ? to_float(chunks.row[ends.column(lane)]) : 0.0f;
    wait_for_previous();
    GradRow grad = {true};
    if (counts) {
      const float *stats = p.stats.template row<const float>(row);
      grad = grad_row(p.math, row_factor(p, row, target.kind), target.target, {stats[0], stats[p.stats.col_stride]});
    }
    const bool plain = !grad.zero && grad.plain(), last = unit + 1 == units.d;
    if (plain) {
      if (has_end) put_end<T, F>(p, p.grad_logits.template row<T>(row), ends.column(lane), end, grad);
      put_chunks<T, T, F>(p, chunks, row, first, unit * kUnit, 32, v, grad, NoRefill());
      if (!last || p.vocab == p.classes) continue;
    }
    // What is not: a row that does not count, or whose coefficients need care; and padding.
    put_rest<T, T, F>(p, row, chunks.lead(), plain ? ends.rest + lane : first, last ? INT32_MAX : (unit + 1) * kUnit,
                      32, grad);
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
