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

// Of the lanes of a warp: teams of `span`, each of which has a row at once.
struct Team {
  int lane, span, teams;  // in the warp
  int team, first;        // the lane's, and its number there
  int rows;               // that the warp takes before it goes on, one a lane at most
  int64_t begin, step;    // of the warp's rows

  template <class P>
  __device__ __forceinline__ explicit Team(const P &p)
      : lane(static_cast<int>(threadIdx.x & 31)),
        span(p.geometry.span),
        teams(32 / span),
        team(lane / span),
        first(lane % span),
        rows(p.geometry.rows),
        begin((static_cast<int64_t>(blockIdx.x) * (kTeamThreads / 32) + warp_of_block()) * rows),
        step(static_cast<int64_t>(gridDim.x) * (kTeamThreads / 32) * rows) {}
};

// The rows base, base + 1, ... of a warp, as many as its teams at once. The next ones are loaded in place of what is
// used up, so that they come while these are finished: without that half of the time is spent waiting for them.
template <typename T, Layout kRows, class P>
struct TeamRows {
  const P &p;
  const Team &team;
  int64_t base;
  int count;
  uint32_t wanted;  // bit i: row base + i is loaded

  __device__ __forceinline__ bool wants(int i) const { return i < count && (wanted >> i & 1) != 0; }
  // The row of a team that has none is the last one.
  __device__ __forceinline__ int64_t row(int i) const { return base + min(i, count - 1); }
  __device__ __forceinline__ ChunkRefill<T, kRows, kTeamHeld> refill(const Chunks<T, kRows> &chunks, int i,
                                                                     uint4 (&v)[kTeamHeld]) const {
    return {chunks, team.first, team.span, kReadOnce, wants(i), v};
  }
  __device__ __forceinline__ void load_after(const Chunks<T, kRows> &chunks, int i, uint4 &after) const {
    if (kRows != Layout::even && wants(i) && wants_after(chunks)) chunks.load(team.span * kTeamHeld, kReadOnce, after);
  }
  __device__ __forceinline__ bool wants_after(const Chunks<T, kRows> &chunks) const {
    return kRows != Layout::even && team.first == 0 && chunks.shift != 0;
  }
};

// The gradient of a row that a team of `span` lanes holds. `x`: its target's logit.
template <typename T, typename G, unsigned F, Layout kRows, class P, class Refill>
__device__ __forceinline__ void put_team_row_as(const P &p, const Chunks<T, kRows> &chunks, int64_t row, float x,
                                                const Team &team, const uint4 (&v)[kTeamHeld], const GradRow &grad,
                                                const Refill &refill) {
  const bool fits = kRows != Layout::any || gradient_fits<T>(p, row);
  const int lead = fits ? chunks.lead() : GradWriter<T, G, F>::lead_of(p, p.grad_logits.template row<G>(row));
  int from = 0;
  if (fits && !grad.zero && grad.plain()) {
    const Ends<T> ends(p, chunks);
#pragma unroll 1
    for (int i = team.first; kRows != Layout::even && i < ends.count; i += team.span) {
      const int column = ends.column(i);
      put_end<G, F>(p, p.grad_logits.template row<G>(row), column, to_float(chunks.row[column]), grad);
    }
    put_chunks<T, G, F, false>(p, chunks, row, team.first, 0, team.span, v, grad, refill);
    // Over what its vector has brought to its place, by the lane that stored that. (Once for all the rows of a warp, a
    // lane a row: a sixth slower at 128 columns, for by then the sectors have left L2.)
    const int chunk = (static_cast<int>(grad.target) + lead) / kLanes<T>;
    if (grad.target >= 0 && team.first == (chunk & (team.span - 1))) {
      store_as(p.grad_logits.template row<G>(row) + grad.target, grad_of<F>(x, grad.shift_target, grad, p.math));
    }
    if (p.vocab == p.classes) return;
    from = ends.rest;
  } else {
    refill.all();
  }
  put_rest<T, G, F>(p, row, lead, from + team.first, INT32_MAX, team.span, grad);
}

// `mine`: whether the team has a row.
template <typename T, unsigned F, Layout kRows, class P, class Refill>
__device__ __forceinline__ void put_team_row(const P &p, const Chunks<T, kRows> &chunks, int64_t row, float x,
                                             bool mine, const Team &team, const uint4 (&v)[kTeamHeld],
                                             const GradRow &grad, const Refill &refill) {
  if (!mine) return;
  if (kRows != Layout::any || sizeof(T) == 4 || p.grad_logits.type != Element::f32) {
    put_team_row_as<T, T, F>(p, chunks, row, x, team, v, grad, refill);
  } else {
    put_team_row_as<T, float, F>(p, chunks, row, x, team, v, grad, refill);
  }
}

// `span` lanes a row; a warp takes `rows` of them, as many as its lanes or fewer, before it goes on.
template <typename T, unsigned F, bool kGrad, Layout kRows>
__global__ void __launch_bounds__(kTeamThreads, kTeamBlocks) team_kernel(const __grid_constant__ ParamsFor<kRows> p) {
  start_in_chain();
  const Team team(p);
  const int lane = team.lane, span = team.span;
#pragma unroll 1
  for (int64_t base = team.begin; base < p.rows; base += team.step) {
    // A lane a row. In place, the targets' logits of all of them are read before the first is overwritten.
    const int64_t mine = base + lane;
    const bool has = lane < team.rows && mine < p.rows;
    RowTarget target = {RowKind::ignored, 0};
    if (has) target = read_target(p, mine);
    const float x = target_logit<T>(p, mine, target);
    RowFactor factor = {true, 0.0};
    if (kGrad) factor = row_factor(p, mine, target.kind);
    if (has && target.kind == RowKind::ignored) write_ignored<!kGrad>(p, mine);
    const uint32_t counts = __ballot_sync(0xffffffffu, target.kind != RowKind::ignored);
    const int count = static_cast<int>(min(static_cast<int64_t>(team.rows), p.rows - base));
    const TeamRows<T, kRows, ParamsFor<kRows>> rows = {p, team, base, count, counts};
    Partial finished;
    Chunks<T, kRows> chunks(p, rows.row(team.team));
    uint4 v[kTeamHeld], after = {};
    hold_anything(v);
    rows.refill(chunks, team.team, v).all();
    rows.load_after(chunks, team.team, after);
#pragma unroll 1
    for (int at = 0; at < count; at += team.teams) {
      const int i = at + team.team;
      const int64_t row = rows.row(i);
      if (rows.wants(i)) chunks.settle(p, team.first, 0, span, rows.wants_after(chunks), v, after);
      const Chunks<T, kRows> next(p, rows.row(i + team.teams));
      const auto refill = rows.refill(next, i + team.teams, v);
      Partial part;
      const bool shifts = kRows != Layout::even && __ballot_sync(0xffffffffu, chunks.shift != 0) != 0;
      if constexpr (kGrad) {
        add_chunks<T, F>(part, p, chunks, v, after, shifts, team.first, team.first, span, NoRefillAt());
      } else {
        add_chunks<T, F>(part, p, chunks, v, after, shifts, team.first, team.first, span, refill);
      }
      rows.load_after(next, i + team.teams, after);
      part = merge_lanes<F>(part, span, p.math);
      const Partial theirs = from_lane<F>(part, (lane - at) * span & 31);
      if (lane >= at && lane < at + team.teams) finished = theirs;
      if constexpr (kGrad) {
        const int leader = team.team * span;
        const RowStats stats =
            stats_of(__shfl_sync(0xffffffffu, part.m, leader), __shfl_sync(0xffffffffu, part.d, leader));
        const RowFactor row_factor = {__shfl_sync(0xffffffffu, static_cast<int>(factor.zero), i & 31) != 0,
                                      __shfl_sync(0xffffffffu, factor.value, i & 31)};
        const GradRow grad = grad_row(p.math, row_factor, __shfl_sync(0xffffffffu, target.target, i & 31), stats);
        put_team_row<T, F>(p, chunks, row, __shfl_sync(0xffffffffu, x, i & 31), i < count, team, v, grad, refill);
      }
      chunks = next;
    }
    if (has && target.kind != RowKind::ignored) {
      write_counted<F, !kGrad>(p, mine, target.kind, value_of<F>(x, p.math), finished);
    }
  }
}

// The gradient of short rows from what forward has kept: a lane computes the coefficients of a row.
template <typename T, unsigned F, Layout kRows>
__global__ void __launch_bounds__(kTeamThreads, kTeamBlocks)
    team_backward_kernel(const __grid_constant__ ParamsFor<kRows> p) {
  start_in_chain();
  const Team team(p);
#pragma unroll 1
  for (int64_t base = team.begin; base < p.rows; base += team.step) {
    const int64_t mine = base + team.lane;
    GradRow own = {true};
    float x = 0.0f;
    if (team.lane < team.rows && mine < p.rows) {
      const RowTarget target = read_target(p, mine);
      if (target.kind == RowKind::counted) {
        const float *stats = p.stats.template row<const float>(mine);
        x = target_logit<T>(p, mine, target);
        own = grad_row(p.math, row_factor(p, mine, target.kind), target.target, {stats[0], stats[p.stats.col_stride]});
      }
    }
    const int count = static_cast<int>(min(static_cast<int64_t>(team.rows), p.rows - base));
    const TeamRows<T, kRows, ParamsFor<kRows>> rows = {p, team, base, count, __ballot_sync(0xffffffffu, !own.zero)};
    Chunks<T, kRows> chunks(p, rows.row(team.team));
    uint4 v[kTeamHeld];
    hold_anything(v);
    rows.refill(chunks, team.team, v).all();
#pragma unroll 1
    for (int at = 0; at < count; at += team.teams) {
      const int i = at + team.team;
      const GradRow grad = from_lane(own, i & 31);
      const Chunks<T, kRows> next(p, rows.row(i + team.teams));
      put_team_row<T, F>(p, chunks, rows.row(i), __shfl_sync(0xffffffffu, x, i & 31), i < count, team, v, grad,
                         rows.refill(next, i + team.teams, v));
      chunks = next;
    }
  }
}

}  // namespace xent::cuda
