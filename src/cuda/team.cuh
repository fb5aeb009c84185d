// SPDX-FileCopyrightText: the libxent authors
// SPDX-License-Identifier: Apache-2.0

// Short rows, which registers hold.
//
//   team_kernel   4 to 32 lanes a row, so that a warp has 8 to 1 of them at once, and up to 32 one after the other.
//                 What a row costs besides its columns (target, factors, outputs) a lane does for a row, and so 32 rows
//                 at once; there is no barrier. Bytes: logits once, with the gradient one write.
//   team_backward_kernel  the same for the gradient alone.
//
// A row is a few hundred instructions, run once: what else rows can be (misaligned, strided, padded) has kernels of its
// own, with the same bits. In one kernel, where that code stood between, warps waited for instructions more than for
// anything else, and it was a quarter slower at 1000 columns as at 32000.
#pragma once

#include "chunks.cuh"

namespace xent::cuda {

inline constexpr int kTeamHeld = 4;  // vectors of a lane, with 64 registers
inline constexpr int kTeamThreads = 256;
inline constexpr int kTeamBlocks = 4;  // an SM

// The gradient of a row that a team of `span` lanes holds. `first`: the lane's.
template <typename T, typename G, unsigned F, Layout kRows, class P>
__device__ __forceinline__ void put_team_row_as(const P &p, const Chunks<T, kRows> &chunks, int64_t row, int first,
                                                int span, const uint4 (&v)[kTeamHeld], const GradRow &grad) {
  const bool fits = kRows != Layout::any || gradient_fits<T>(p, row);
  const int lead = fits ? chunks.lead() : GradWriter<T, G, F>::lead_of(p, p.grad_logits.template row<G>(row));
  int from = 0;
  if (fits && !grad.zero && grad.plain()) {
    const Ends<T> ends(p, chunks);
#pragma unroll 1
    for (int i = first; kRows != Layout::even && i < ends.count; i += span) {
      const int column = ends.column(i);
      put_end<G, F>(p, p.grad_logits.template row<G>(row), column, to_float(chunks.row[column]), grad);
    }
    put_chunks<T, G, F>(p, chunks, row, first, 0, span, v, grad, NoRefill());
    if (p.vocab == p.classes) return;
    from = ends.rest;
  }
  put_rest<T, G, F>(p, row, lead, from + first, INT32_MAX, span, grad);
}

template <typename T, unsigned F, Layout kRows, class P>
__device__ __forceinline__ void put_team_row(const P &p, const Chunks<T, kRows> &chunks, int64_t row, int first,
                                             int span, const uint4 (&v)[kTeamHeld], const GradRow &grad) {
  if (kRows != Layout::any || sizeof(T) == 4 || p.grad_logits.type != Element::f32) {
    put_team_row_as<T, T, F>(p, chunks, row, first, span, v, grad);
  } else {
    put_team_row_as<T, float, F>(p, chunks, row, first, span, v, grad);
  }
}

// `span` lanes a row; a warp takes `rows` of them, as many as its lanes or fewer, before it goes on.
template <typename T, unsigned F, bool kGrad, Layout kRows>
__global__ void __launch_bounds__(kTeamThreads, kTeamBlocks) team_kernel(const __grid_constant__ ParamsFor<kRows> p) {
  constexpr int K = kTeamHeld;
  start_in_chain();
  const int lane = static_cast<int>(threadIdx.x & 31);
  const int span = p.geometry.span;
  const int teams = 32 / span, team = lane / span, first = lane % span;
  const int rows = p.geometry.rows;
  const int64_t warps = static_cast<int64_t>(gridDim.x) * (kTeamThreads / 32);
  const int64_t warp = static_cast<int64_t>(blockIdx.x) * (kTeamThreads / 32) + warp_of_block();
#pragma unroll 1
  for (int64_t base = warp * rows; base < p.rows; base += warps * rows) {
    // A lane a row. In place, the targets' logits of all of them are read before the first is overwritten.
    const int64_t mine = base + lane;
    const bool has = lane < rows && mine < p.rows;
    RowTarget target = {RowKind::ignored, 0};
    if (has) target = read_target(p, mine);
    const float value = target_value<T, F>(p, mine, target);
    RowFactor factor = {true, 0.0};
    if (kGrad) factor = row_factor(p, mine, target.kind);
    if (has && target.kind == RowKind::ignored) write_ignored<!kGrad>(p, mine);
    const uint32_t counts = __ballot_sync(0xffffffffu, target.kind != RowKind::ignored);
    const int count = static_cast<int>(min(static_cast<int64_t>(rows), p.rows - base));
    Partial finished;
#pragma unroll 1
    for (int at = 0; at < count; at += teams) {
      const int i = at + team;
      const bool counted = (counts >> i & 1) != 0;
      if (!kGrad && __ballot_sync(0xffffffffu, counted) == 0) continue;
      const int64_t row = base + min(i, count - 1);
      const Chunks<T, kRows> chunks(p, row);
      uint4 v[K], after = {};
      if (counted) {
        const bool one_more = kRows != Layout::even && first == 0 && chunks.shift != 0;
        hold_anything(v);
        ChunkRefill<T, kRows, K>(chunks, first, span, kReadOnce, true, v).all();
        if (one_more) chunks.load(span * K, kReadOnce, after);
        chunks.settle(p, first, 0, span, one_more, v, after);
      } else {
#pragma unroll
        for (int j = 0; j < K; ++j) v[j] = empty_vector<T>();
      }
      Partial part;
      const bool shifts = kRows != Layout::even && __ballot_sync(0xffffffffu, chunks.shift != 0) != 0;
      add_chunks<T, F>(part, p, chunks, v, after, shifts, first, first, span, NoRefillAt());
      part = merge_lanes<F>(part, span, p.math);
      const Partial theirs = from_lane<F>(part, (lane - at) * span & 31);
      if (lane >= at && lane < at + teams) finished = theirs;
      if constexpr (kGrad) {
        const int leader = team * span;
        const RowStats stats =
            stats_of(__shfl_sync(0xffffffffu, part.m, leader), __shfl_sync(0xffffffffu, part.d, leader));
        const RowFactor row_factor = {__shfl_sync(0xffffffffu, static_cast<int>(factor.zero), i & 31) != 0,
                                      __shfl_sync(0xffffffffu, factor.value, i & 31)};
        const GradRow grad = grad_row(p.math, row_factor, __shfl_sync(0xffffffffu, target.target, i & 31), stats);
        if (i < count) put_team_row<T, F>(p, chunks, row, first, span, v, grad);
      }
    }
    if (has && target.kind != RowKind::ignored) write_counted<F, !kGrad>(p, mine, target.kind, value, finished);
  }
}

// The gradient of short rows from what forward has kept: a lane computes the coefficients of a row.
template <typename T, unsigned F, Layout kRows>
__global__ void __launch_bounds__(kTeamThreads, kTeamBlocks)
    team_backward_kernel(const __grid_constant__ ParamsFor<kRows> p) {
  start_in_chain();
  const int lane = static_cast<int>(threadIdx.x & 31);
  const int span = p.geometry.span;
  const int teams = 32 / span, team = lane / span, first = lane % span;
  const int rows = p.geometry.rows;
  const int64_t warps = static_cast<int64_t>(gridDim.x) * (kTeamThreads / 32);
  const int64_t warp = static_cast<int64_t>(blockIdx.x) * (kTeamThreads / 32) + warp_of_block();
#pragma unroll 1
  for (int64_t base = warp * rows; base < p.rows; base += warps * rows) {
    const int64_t mine = base + lane;
    GradRow own = {true};
    if (lane < rows && mine < p.rows) {
      const RowTarget target = read_target(p, mine);
      if (target.kind == RowKind::counted) {
        const float *stats = p.stats.template row<const float>(mine);
        own = grad_row(p.math, row_factor(p, mine, target.kind), target.target, {stats[0], stats[p.stats.col_stride]});
      }
    }
    const int count = static_cast<int>(min(static_cast<int64_t>(rows), p.rows - base));
#pragma unroll 1
    for (int at = 0; at < count; at += teams) {
      const int i = at + team;
      const int64_t row = base + min(i, count - 1);
      const GradRow grad = from_lane(own, i & 31);
      const Chunks<T, kRows> chunks(p, row);
      uint4 v[kTeamHeld];
      hold_anything(v);
      if (!grad.zero) ChunkRefill<T, kRows, kTeamHeld>(chunks, first, span, kReadOnce, true, v).all();
      if (i < count) put_team_row<T, F>(p, chunks, row, first, span, v, grad);
    }
  }
}

}  // namespace xent::cuda
