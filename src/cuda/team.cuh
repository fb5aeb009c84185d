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
  int64_t begin;          // of the warp's rows

  template <class P>
  __device__ __forceinline__ explicit Team(const P &p)
      : lane(static_cast<int>(threadIdx.x & 31)),
        span(p.geometry.span),
        teams(32 / span),
        team(lane / span),
        first(lane % span),
        rows(p.geometry.rows),
        begin((static_cast<int64_t>(blockIdx.x) * (kTeamThreads / 32) + warp_of_block()) * rows) {}
  __device__ __forceinline__ int64_t step() const {
    return static_cast<int64_t>(gridDim.x) * (kTeamThreads / 32) * rows;
  }
};

// The rows base, base + 1, ... of a warp, as many as its teams at once. In forward the next ones are loaded in place of
// what is used up: else half of the time is spent waiting for them. (With a gradient that is slower: 4 % at 128
// columns, and a quarter over the logits at 1000, where rows share sectors.)
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
  __device__ __forceinline__ void load(const Chunks<T, kRows> &chunks, int i, uint4 (&v)[kTeamHeld],
                                       uint4 &after) const {
    refill(chunks, i, v).all();
    load_after(chunks, i, after);
  }
  __device__ __forceinline__ void load_after(const Chunks<T, kRows> &chunks, int i, uint4 &after) const {
    if (kRows != Layout::even && wants(i) && wants_after(chunks)) chunks.load(team.span * kTeamHeld, kReadOnce, after);
  }
  // What row i comes to, in the first lane of its team.
  template <unsigned F, class Refill>
  __device__ __forceinline__ Partial add(const Chunks<T, kRows> &chunks, int i, uint4 (&v)[kTeamHeld], uint4 &after,
                                         const Refill &refill) const {
    if (wants(i)) chunks.settle(p, team.first, 0, team.span, wants_after(chunks), v, after);
    const bool shifts = kRows != Layout::even && __ballot_sync(0xffffffffu, chunks.shift != 0) != 0;
    Partial part;
    add_chunks<T, F>(part, p, chunks, v, after, shifts, team.first, team.first, team.span, refill);
    return merge_lanes<F>(part, team.span, p.math);
  }
  __device__ __forceinline__ bool wants_after(const Chunks<T, kRows> &chunks) const {
    return kRows != Layout::even && team.first == 0 && chunks.shift != 0;
  }
};

// The gradient of a row that a team of `span` lanes holds. kKnown: `x` is its target's logit.
template <typename T, typename G, unsigned F, bool kKnown, Layout kRows, class P>
__device__ __forceinline__ void put_team_row_as(const P &p, const Chunks<T, kRows> &chunks, int64_t row, float x,
                                                const Team &team, const uint4 (&v)[kTeamHeld], const GradRow &grad) {
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
    put_chunks<T, G, F, !kKnown>(p, chunks, row, team.first, 0, team.span, v, grad, NoRefill());
    // Over what its vector has brought to its place, by the lane that stored that. (Once for all the rows of a warp, a
    // lane a row: a tenth slower at 128 columns, for by then the sectors have left L2.)
    // Not where put_rest() has the vector, which would read it as a logit.
    const int chunk = grad.target < 0 ? -1 : (static_cast<int>(grad.target) + lead) / kLanes<T>;
    if (kKnown && chunk >= chunks.inner && chunk < chunks.outer && team.first == (chunk & (team.span - 1))) {
      store_as(p.grad_logits.template row<G>(row) + grad.target, grad_of<F>(x, grad.shift_target, grad, p.math));
    }
    if (p.vocab == p.classes) return;
    from = ends.rest;
  }
  put_rest<T, G, F>(p, row, lead, from + team.first, INT32_MAX, team.span, grad);
}

// `mine`: whether the team has a row.
template <typename T, unsigned F, bool kKnown, Layout kRows, class P>
__device__ __forceinline__ void put_team_row(const P &p, const Chunks<T, kRows> &chunks, int64_t row, float x,
                                             bool mine, const Team &team, const uint4 (&v)[kTeamHeld],
                                             const GradRow &grad) {
  if (!mine) return;
  if (kRows != Layout::any || sizeof(T) == 4 || p.grad_logits.type != Element::f32) {
    put_team_row_as<T, T, F, kKnown>(p, chunks, row, x, team, v, grad);
  } else {
    put_team_row_as<T, float, F, kKnown>(p, chunks, row, x, team, v, grad);
  }
}

// `span` lanes a row; a warp takes `rows` of them, as many as its lanes or fewer, before it goes on.
template <typename T, unsigned F, bool kGrad, Layout kRows>
__global__ void __launch_bounds__(kTeamThreads, kTeamBlocks) team_kernel(const __grid_constant__ ParamsFor<kRows> p) {
  start_in_chain();
  const Team team(p);
  const int lane = team.lane, span = team.span;
#pragma unroll 1
  for (int64_t base = team.begin; base < p.rows; base += team.step()) {
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
    // What the team of the lane whose row it is has found.
    const auto finish = [&](int at, const Partial &part) {
      const Partial theirs = from_lane<F>(part, (lane - at) * span & 31);
      if (lane >= at && lane < at + team.teams) finished = theirs;
    };
    if constexpr (kGrad) {
#pragma unroll 1
      for (int at = 0; at < count; at += team.teams) {
        const int i = at + team.team;
        const Chunks<T, kRows> chunks(p, rows.row(i));
        uint4 v[kTeamHeld], after = {};
        hold_anything(v);
        rows.load(chunks, i, v, after);
        const Partial part = rows.template add<F>(chunks, i, v, after, NoRefillAt());
        finish(at, part);
        const int leader = team.team * span;
        const RowStats stats =
            stats_of(__shfl_sync(0xffffffffu, part.m, leader), __shfl_sync(0xffffffffu, part.d, leader));
        const RowFactor row_factor = {__shfl_sync(0xffffffffu, static_cast<int>(factor.zero), i & 31) != 0,
                                      __shfl_sync(0xffffffffu, factor.value, i & 31)};
        const GradRow grad = grad_row(p.math, row_factor, __shfl_sync(0xffffffffu, target.target, i & 31), stats);
        put_team_row<T, F, true>(p, chunks, rows.row(i), __shfl_sync(0xffffffffu, x, i & 31), i < count, team, v, grad);
      }
    } else {
      Chunks<T, kRows> chunks(p, rows.row(team.team));
      uint4 v[kTeamHeld], after = {};
      hold_anything(v);
      rows.load(chunks, team.team, v, after);
#pragma unroll 1
      for (int at = 0; at < count; at += team.teams) {
        const int i = at + team.team, next_i = i + team.teams;
        const Chunks<T, kRows> next(p, rows.row(next_i));
        const Partial part = rows.template add<F>(chunks, i, v, after, rows.refill(next, next_i, v));
        rows.load_after(next, next_i, after);
        finish(at, part);
        chunks = next;
      }
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
  for (int64_t base = team.begin; base < p.rows; base += team.step()) {
    const int64_t mine = base + team.lane;
    GradRow own = {true};
    if (team.lane < team.rows && mine < p.rows) {
      const RowTarget target = read_target(p, mine);
      if (target.kind == RowKind::counted) {
        const float *stats = p.stats.template row<const float>(mine);
        own = grad_row(p.math, row_factor(p, mine, target.kind), target.target, {stats[0], stats[p.stats.col_stride]});
      }
    }
    const int count = static_cast<int>(min(static_cast<int64_t>(team.rows), p.rows - base));
    const TeamRows<T, kRows, ParamsFor<kRows>> rows = {p, team, base, count, __ballot_sync(0xffffffffu, !own.zero)};
#pragma unroll 1
    for (int at = 0; at < count; at += team.teams) {
      const int i = at + team.team;
      const GradRow grad = from_lane(own, i & 31);
      const Chunks<T, kRows> chunks(p, rows.row(i));
      uint4 v[kTeamHeld];
      hold_anything(v);
      rows.refill(chunks, i, v).all();
      put_team_row<T, F, false>(p, chunks, rows.row(i), 0.0f, i < count, team, v, grad);
    }
  }
}

}  // namespace xent::cuda
