// SPDX-FileCopyrightText: the libxent authors
// SPDX-License-Identifier: Apache-2.0

// Rows that registers hold, whole or in part.
//
//   team_kernel   short rows: 4 to 32 lanes a row, so that a warp has 8 to 1 of them at once, and up to 32 one after
//                 the other. What a row costs besides its columns (target, factors, outputs) a lane does for a row, and
//                 so 32 rows at once; there is no barrier. Bytes: logits once, with the gradient one write.
//   team_backward_kernel  the same for the gradient alone.
//   block_kernel  loss and gradient of longer rows, a block a row, as many blocks as rows: the hardware gives the next
//                 row to whichever SM is done with one, and rows that do not count end at once (blocks that stay: 8 %
//                 slower). Every thread has all its loads in flight before it uses the first. Bytes: logits once from
//                 memory, and once more from L2 what the registers do not hold, about half; one write.
//
// A stage in shared memory would cost an instruction in and one out, and a wait, for every 16 bytes of a thread: at
// 32000 columns that is a sixth slower. Blocks are small, so that an SM has several in different phases: while one adds
// up, the others load and store. Holding all of a row in fewer, larger blocks is no better than reading half again.
//
// A row is a few hundred instructions, run once: what else rows can be (misaligned, strided, padded) has kernels of its
// own, with the same bits. In one kernel, where that code stood between, warps waited for instructions more than for
// anything else, and it was a quarter slower at 1000 columns as at 32000.
#pragma once

#include "chunks.cuh"

namespace xent::cuda {

// A lane's place in the team that has a row.
struct TeamPlace {
  int lane;        // of the team
  int size;        // lanes of the team
  int span;        // of a warp's part of it
  int warp;        // of the team
  int front;       // batches of the row that nobody holds
  int first;       // vector that the lane holds, the next one is `span` further
  int warp_first;  // of the warp's first lane
};

// A team's lane holds 4 vectors, with 64 registers; a block's 8, with 80.
inline constexpr int kTeamHeld = 4;
inline constexpr int kTeamThreads = 256;
inline constexpr int kTeamBlocks = 4;  // an SM
inline constexpr int kHeld = 8;
inline constexpr int kHeldThreads = 768;  // of an SM, and of a block at most

// The gradient of a row: of what the team holds, of the batches before, which are read again, and of what is behind.
template <typename T, typename G, unsigned F, int K>
__device__ __forceinline__ void put_row_as(const Params &p, int64_t row, uint32_t shift, const TeamPlace &place,
                                           const uint4 (&v)[K], const GradRow &grad) {
  if (!gradient_fits<T>(p, row)) {
    return put_rest<T, G, F>(p, row, GradWriter<T, G, F>::lead_of(p, p.grad_logits.row<G>(row)), place.lane, place.size,
                             grad);
  }
  put_chunks<T, G, F>(p, row, shift, place.first, place.warp_first, place.span, v, grad);
#pragma unroll 1
  for (int batch = place.warp; batch < place.front; batch += place.size / 32) {
    uint4 some[kBatch], after;
    const int first = batch * (kBatch * 32);
    load_chunks_of<T, false>(p, row, shift, first + (place.lane & 31), 32, false, kReadOnce, some, after);
    put_chunks<T, G, F>(p, row, shift, first + (place.lane & 31), first, 32, some, grad);
  }
  put_rest<T, G, F>(p, row, static_cast<int>(shift / sizeof(T)),
                    place.front * (kBatch * 32) + place.size * K + place.lane, place.size, grad);
}

template <typename T, unsigned F, bool kEven, int K>
__device__ __forceinline__ void put_row(const Params &p, int64_t row, uint32_t shift, const TeamPlace &place,
                                        const uint4 (&v)[K], const GradRow &grad) {
  if constexpr (kEven) {
    put_even<T, F>(p, row, place.first, place.span, v, grad);
#pragma unroll 1
    for (int batch = place.warp; batch < place.front; batch += place.size / 32) {
      uint4 some[kBatch], after;
      const int first = batch * (kBatch * 32) + (place.lane & 31);
      load_chunks_of<T, true>(p, row, 0, first, 32, false, kReadOnce, some, after);
      put_even<T, F>(p, row, first, 32, some, grad);
    }
    return;
  }
  if (sizeof(T) == 4 || p.grad_logits.type != Element::f32) {
    put_row_as<T, T, F>(p, row, shift, place, v, grad);
  } else {
    put_row_as<T, float, F>(p, row, shift, place, v, grad);
  }
}

// `span` lanes a row; a warp takes `rows` of them, as many as its lanes or fewer, before it goes on.
template <typename T, unsigned F, bool kGrad, bool kEven>
__global__ void __launch_bounds__(kTeamThreads, kTeamBlocks) team_kernel(const __grid_constant__ Params p) {
  constexpr int K = kTeamHeld;
  start_in_chain();
  const int lane = static_cast<int>(threadIdx.x & 31);
  const int span = p.geometry.span;
  const int teams = 32 / span, team = lane / span, first = lane % span;
  const TeamPlace place = {first, span, span, 0, 0, first, 0};
  const int rows = p.geometry.rows;
  const int64_t warps = static_cast<int64_t>(gridDim.x) * (kTeamThreads / 32);
  const int64_t warp = static_cast<int64_t>(blockIdx.x) * (kTeamThreads / 32) + threadIdx.x / 32;
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
      const uint32_t shift = kEven ? 0 : shift_of(p, p.logits.row<T>(row));
      uint4 v[K], after;
      if (counted) {
        load_chunks_of<T, kEven>(p, row, shift, first, span, first == 0 && shift != 0, kReadOnce, v, after);
      } else {
#pragma unroll
        for (int j = 0; j < K; ++j) v[j] = empty_vector<T>();
        after = v[0];
      }
      Partial part;
      add_chunks<T, F>(part, p, v, after, shift, !kEven && __ballot_sync(0xffffffffu, shift != 0) != 0, first, first,
                       span);
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
        if (i < count) put_row<T, F, kEven>(p, row, shift, place, v, grad);
      }
    }
    if (has && target.kind != RowKind::ignored) write_counted<F, !kGrad>(p, mine, target.kind, value, finished);
  }
}

// The gradient of short rows from what forward has kept: a lane computes the coefficients of a row.
template <typename T, unsigned F, bool kEven>
__global__ void __launch_bounds__(kTeamThreads, kTeamBlocks) team_backward_kernel(const __grid_constant__ Params p) {
  start_in_chain();
  const int lane = static_cast<int>(threadIdx.x & 31);
  const int span = p.geometry.span;
  const int teams = 32 / span, team = lane / span, first = lane % span;
  const TeamPlace place = {first, span, span, 0, 0, first, 0};
  const int rows = p.geometry.rows;
  const int64_t warps = static_cast<int64_t>(gridDim.x) * (kTeamThreads / 32);
  const int64_t warp = static_cast<int64_t>(blockIdx.x) * (kTeamThreads / 32) + threadIdx.x / 32;
#pragma unroll 1
  for (int64_t base = warp * rows; base < p.rows; base += warps * rows) {
    const int64_t mine = base + lane;
    GradRow own = {true};
    if (lane < rows && mine < p.rows) {
      const RowTarget target = read_target(p, mine);
      if (target.kind == RowKind::counted) {
        const float *stats = p.stats.row<const float>(mine);
        own = grad_row(p.math, row_factor(p, mine, target.kind), target.target, {stats[0], stats[p.stats.col_stride]});
      }
    }
    const int count = static_cast<int>(min(static_cast<int64_t>(rows), p.rows - base));
#pragma unroll 1
    for (int at = 0; at < count; at += teams) {
      const int i = at + team;
      const int64_t row = base + min(i, count - 1);
      const GradRow grad = from_lane(own, i & 31);
      const uint32_t shift = kEven ? 0 : shift_of(p, p.logits.row<T>(row));
      uint4 v[kTeamHeld], after;
      if (!grad.zero) {
        load_chunks_of<T, kEven>(p, row, shift, first, span, false, kReadOnce, v, after);
      } else {
#pragma unroll
        for (int j = 0; j < kTeamHeld; ++j) v[j] = empty_vector<T>();
      }
      if (i < count) put_row<T, F, kEven>(p, row, shift, place, v, grad);
    }
  }
}

// A block of `warps` warps a row. The last warps * K * 32 vectors are held; of the batches before them batch b is warp
// b % warps's, and read twice. (Two blocks a row in a cluster: 1 to 5 % slower.)
template <typename T, unsigned F, bool kEven>
__global__ void __launch_bounds__(kHeldThreads, 1) block_kernel(const __grid_constant__ Params p) {
  constexpr int K = kHeld;
  __shared__ float shared[2][kHeldThreads / 32 * kPartialWords<F>];
  start_in_chain();
  const int lane = static_cast<int>(threadIdx.x & 31), warp = static_cast<int>(threadIdx.x / 32);
  const int warps = p.geometry.warps, step = static_cast<int>(gridDim.x);
  const int front = max(0, p.geometry.batches - warps * (K / kBatch));
  const int begin = front * (kBatch * 32) + warp * (K * 32);
  const TeamPlace place = {static_cast<int>(threadIdx.x), warps * 32, 32, warp, front, begin + lane, begin};
  int turn = 0;
#pragma unroll 1
  for (int64_t base = blockIdx.x; base < p.rows; base += int64_t{32} * step) {
    // A lane a row. In place, the targets' logits of all of them are read before the first is overwritten.
    const int64_t mine = base + static_cast<int64_t>(lane) * step;
    RowTarget target = {RowKind::ignored, 0};
    if (mine < p.rows) target = read_target(p, mine);
    const bool ignored = mine < p.rows && target.kind == RowKind::ignored;
    float value = 0.0f;
    RowFactor factor = {true, 0.0};
    bool begun = false;
#pragma unroll 1
    for (uint32_t left = __ballot_sync(0xffffffffu, target.kind != RowKind::ignored); left != 0; left &= left - 1) {
      const int i = __ffs(static_cast<int>(left)) - 1;
      const int64_t row = base + static_cast<int64_t>(i) * step;
      const uint32_t shift = kEven ? 0 : shift_of(p, p.logits.row<T>(row));
      const bool one_more = lane == 0 && shift != 0;
      Partial part;
#pragma unroll 1
      for (int batch = warp; batch < front; batch += warps) {
        uint4 some[kBatch], after;
        const int first = batch * (kBatch * 32) + lane;
        load_chunks_of<T, kEven>(p, row, shift, first, 32, one_more, kReadAgain, some, after);
        add_chunks<T, F>(part, p, some, after, shift, shift != 0, first, lane, 32);
      }
      uint4 v[K], after;
      load_chunks_of<T, kEven>(p, row, shift, begin + lane, 32, one_more, kReadOnce, v, after);
      if (!begun) {
        // Behind the loads, which do not wait for it.
        begun = true;
        if (warp == 0) value = target_value<T, F>(p, mine, target);
        factor = row_factor(p, mine, target.kind);
      }
      add_chunks<T, F>(part, p, v, after, shift, shift != 0, begin + lane, lane, 32);
      part = merge_lanes<F>(part, 32, p.math);
      if (warps > 1) {
        if (lane == 0) store_partial<F>(shared[turn] + warp * kPartialWords<F>, 1, part);
        __syncthreads();
        part = merge_warps<F>(shared[turn], warps, p.math);
        turn ^= 1;
      }
      const RowStats stats = stats_of(__shfl_sync(0xffffffffu, part.m, 0), __shfl_sync(0xffffffffu, part.d, 0));
      const RowFactor factor_of_row = {__shfl_sync(0xffffffffu, static_cast<int>(factor.zero), i) != 0,
                                       __shfl_sync(0xffffffffu, factor.value, i)};
      const GradRow grad = grad_row(p.math, factor_of_row, __shfl_sync(0xffffffffu, target.target, i), stats);
      const auto kind = static_cast<RowKind>(__shfl_sync(0xffffffffu, static_cast<int>(target.kind), i));
      const float row_value = __shfl_sync(0xffffffffu, value, i);
      put_row<T, F, kEven>(p, row, shift, place, v, grad);
      if (threadIdx.x == 0) write_counted<F, false>(p, row, kind, row_value, part);
    }
    if (ignored && warp == 0) write_ignored<false>(p, mine);
#pragma unroll 1
    for (uint32_t zeros = __ballot_sync(0xffffffffu, ignored); zeros != 0; zeros &= zeros - 1) {
      write_zeros<T>(p, base + static_cast<int64_t>(__ffs(static_cast<int>(zeros)) - 1) * step, Share(p, warp));
    }
  }
}

}  // namespace xent::cuda
