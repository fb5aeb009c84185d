// SPDX-FileCopyrightText: the libxent authors
// SPDX-License-Identifier: Apache-2.0

// Loss and gradient of rows beyond the short ones: a block a row, as many blocks as rows. The hardware gives the next
// row to whichever SM is done with one, and rows that do not count end at once (blocks that stay: 8 % slower).
//
// Bytes: logits once from memory, and once more from L2 what the registers do not hold, about half; one write.
//
// A warp has units of the row, 8 vectors a lane in registers. It adds up one after the other and keeps the last of
// them; writes the gradient of that, and then of the others, read again in the same order. As soon as a vector is used
// up the next unit's is loaded in its place, so that loads are in flight in both sweeps. A stage in shared memory would
// cost an instruction in and one out, and a wait, for every 16 bytes of a thread: at 32000 columns that is a sixth
// slower. Blocks are small, so that an SM has several in different phases: while one adds up, the others load and
// store.
//
// Slower: two blocks a row in a cluster, 1 to 5 %. To keep the row's first units, not its last, 5 to 10 %. To load the
// next unit only when one is used up, 4 to 9 %. With one block an SM, blocks that stay and fetch their next row while
// they write this one, 20 %. Whole lines a load and store where rows are misaligned (half stores of a sector do not
// meet in L2, so that 12 % more is written to memory than need be): a gain of 1 % only.
#pragma once

#include "chunks.cuh"

namespace xent::cuda {

inline constexpr int kHeld = 8;
inline constexpr int kUnit = kHeld * 32;  // vectors
inline constexpr int kHeldThreads = 768;  // of an SM, and of a block at most, with 80 registers

// The row's gradient, which must be plain, but for its ends. The kept unit is in `v`.
template <typename T, typename G, unsigned F, Layout kRows, class P>
__device__ __forceinline__ void put_units(const P &p, const Chunks<T, kRows> &chunks, int64_t row, int warp,
                                          uint4 (&v)[kHeld], const GradRow &grad) {
  const int lane = static_cast<int>(threadIdx.x & 31), warps = p.geometry.warps;
  const int front = max(0, p.geometry.batches - warps);
  int unit = front + warp;
#pragma unroll 1
  while (true) {
    const int next = unit == front + warp ? warp : unit + warps;
    const ChunkRefill<T, kRows, kHeld> refill(chunks, next * kUnit + lane, 32, kReadOnce, next < front, v);
    put_chunks<T, G, F>(p, chunks, row, unit * kUnit + lane, unit * kUnit, 32, v, grad, refill);
    if (next >= front) return;
    unit = next;
  }
}

// `end`: the logit of the lane's column of the row's ends, in warp 0.
template <typename T, typename G, unsigned F, Layout kRows, class P>
__device__ __forceinline__ void put_block_row(const P &p, const Chunks<T, kRows> &chunks, const Ends<T> &ends,
                                              float end, int64_t row, int warp, uint4 (&v)[kHeld],
                                              const GradRow &grad) {
  const bool fits = kRows != Layout::any || gradient_fits<T>(p, row);
  const int lead = fits ? chunks.lead() : GradWriter<T, G, F>::lead_of(p, p.grad_logits.template row<G>(row));
  int from = 0;
  if (fits && !grad.zero && grad.plain()) {
    const int lane = static_cast<int>(threadIdx.x & 31);
    if (kRows != Layout::even && warp == 0 && lane < ends.count) {
      put_end<G, F>(p, p.grad_logits.template row<G>(row), ends.column(lane), end, grad);
    }
    put_units<T, G, F>(p, chunks, row, warp, v, grad);
    if (p.vocab == p.classes) return;
    from = ends.rest;
  }
  put_rest<T, G, F>(p, row, lead, from + static_cast<int>(threadIdx.x), INT32_MAX, p.geometry.warps * 32, grad);
}

// A warp's units of a row, lanes not merged; `v` holds the kept one at the end. load_first_unit() has come before.
template <typename T, unsigned F, Layout kRows, class P>
__device__ __forceinline__ Partial sweep_units(const P &p, const Chunks<T, kRows> &chunks, int warp,
                                               uint4 (&v)[kHeld]) {
  const int lane = static_cast<int>(threadIdx.x & 31), warps = p.geometry.warps;
  // Unit u of the first `front` ones is warp u % warps's; and warp w keeps unit front + w.
  const int front = max(0, p.geometry.batches - warps), kept = front + warp;
  const bool one_more = kRows != Layout::even && lane == 0 && chunks.shift != 0;
  int unit = warp < front ? warp : kept;
  uint4 after = {};
  Partial part;
#pragma unroll 1
  while (true) {
    const int first = unit * kUnit + lane;
    if (one_more) chunks.load(first + kUnit, kReadOnce, after);
    chunks.settle(p, first, unit * kUnit, 32, one_more, v, after);
    const int next = unit + warps < front ? unit + warps : kept;
    const ChunkRefill<T, kRows, kHeld> refill(chunks, next * kUnit + lane, 32, next == kept ? kReadOnce : kReadAgain,
                                              unit != kept, v);
    add_chunks<T, F>(part, p, chunks, v, after, chunks.shift != 0, first, lane, 32, refill);
    if (unit == kept) return part;
    unit = next;
  }
}

template <typename T, Layout kRows, class P>
__device__ __forceinline__ void load_first_unit(const P &p, const Chunks<T, kRows> &chunks, int warp,
                                                uint4 (&v)[kHeld]) {
  const int front = max(0, p.geometry.batches - p.geometry.warps);
  const bool again = warp < front;
  const int first = (again ? warp : front + warp) * kUnit + static_cast<int>(threadIdx.x & 31);
  hold_anything(v);
  ChunkRefill<T, kRows, kHeld>(chunks, first, 32, again ? kReadAgain : kReadOnce, true, v).all();
}

// A block of `warps` warps a row.
template <typename T, unsigned F, Layout kRows>
__global__ void __launch_bounds__(kHeldThreads, 1) block_kernel(const __grid_constant__ ParamsFor<kRows> p) {
  __shared__ float shared[2][kHeldThreads / 32 * kPartialWords<F>];
  let_next_start();
  const int lane = static_cast<int>(threadIdx.x & 31), warp = warp_of_block(), warps = p.geometry.warps;
  int turn = 0;
#pragma unroll 1
  for (int64_t row = blockIdx.x; row < p.rows; row += gridDim.x) {
    const RowTarget target = read_target(p, row);
    if (target.kind == RowKind::ignored) {
      wait_for_previous();
      if (threadIdx.x == 0) write_ignored<false>(p, row);
      write_zeros<T>(p, row, Share(p, warp));
      continue;
    }
    const Chunks<T, kRows> chunks(p, row);
    uint4 v[kHeld];
    load_first_unit(p, chunks, warp, v);
    const float value = threadIdx.x == 0 ? target_value<T, F>(p, row, target) : 0.0f;
    const Ends<T> ends(p, chunks);
    float end = 0.0f;
    if (kRows != Layout::even && warp == 0 && lane < ends.count && (kRows != Layout::any || p.logits.col_stride == 1)) {
      end = to_float(chunks.row[ends.column(lane)]);
    }
    Partial part = sweep_units<T, F>(p, chunks, warp, v);
    // Behind the sweep, which needs nothing of the launch before.
    wait_for_previous();
    const RowFactor factor = row_factor(p, row, target.kind);
    part = merge_lanes<F>(part, 32, p.math);
    if (warps > 1) {
      if (lane == 0) store_partial<F>(shared[turn] + warp * kPartialWords<F>, 1, part);
      __syncthreads();
      part = merge_warps<F>(shared[turn], warps, p.math);
      turn ^= 1;
    } else {
      __syncwarp();  // the target's logit is read, also where the gradient goes over it
    }
    const RowStats stats = stats_of(__shfl_sync(0xffffffffu, part.m, 0), __shfl_sync(0xffffffffu, part.d, 0));
    const GradRow grad = grad_row(p.math, factor, target.target, stats);
    if (kRows != Layout::any || sizeof(T) == 4 || p.grad_logits.type != Element::f32) {
      put_block_row<T, T, F>(p, chunks, ends, end, row, warp, v, grad);
    } else {
      put_block_row<T, float, F>(p, chunks, ends, end, row, warp, v, grad);
    }
    if (threadIdx.x == 0) write_counted<F, false>(p, row, target.kind, value, part);
  }
}

// For few rows: a block of one warp for each of a row's. Leaves their partials in the workspace, for combine_kernel;
// the gradient is another launch.
template <typename T, unsigned F, Layout kRows>
__global__ void __launch_bounds__(32) block_shares_kernel(const __grid_constant__ ParamsFor<kRows> p) {
  start_in_chain();
  const int warps = p.geometry.warps;
  const int64_t row = blockIdx.x / warps;
  const int warp = static_cast<int>(blockIdx.x % warps);
  if (read_target(p, row).kind == RowKind::ignored) return;  // nobody reads its partials
  const Chunks<T, kRows> chunks(p, row);
  uint4 v[kHeld];
  load_first_unit(p, chunks, warp, v);
  const Partial part = merge_lanes<F>(sweep_units<T, F>(p, chunks, warp, v), 32, p.math);
  if ((threadIdx.x & 31) == 0) store_partial<F>(p.partials + blockIdx.x * kPartialWords<F>, 1, part);
}

}  // namespace xent::cuda
