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
// What rows that are not even need besides would be spilled: 96. Their largest blocks are of kernels of any layout.
constexpr int held_threads(Layout rows) { return rows == Layout::adjacent ? 640 : kHeldThreads; }

// The row's gradient, which must be plain. The kept unit is in `v`.
template <typename T, typename G, unsigned F, Layout kRows>
__device__ __forceinline__ void put_units(const Params &p, const Chunks<T, kRows> &chunks, int64_t row,
                                          uint4 (&v)[kHeld], const GradRow &grad) {
  const int lane = static_cast<int>(threadIdx.x & 31), warps = p.geometry.warps, units = p.geometry.batches;
  const int warp = static_cast<int>(threadIdx.x / 32), front = max(0, units - warps);
  int unit = front + warp;
#pragma unroll 1
  while (true) {
    const int next = unit == front + warp ? warp : unit + warps;
    const ChunkRefill<T, kRows, kHeld> refill(chunks, next * kUnit, kReadOnce, next < front, v);
    put_chunks<T, G, F>(p, chunks, row, unit * kUnit + lane, unit * kUnit, 32, unit == units - 1, v, grad, refill);
    if (next >= front) return;
    unit = next;
  }
}

template <typename T, typename G, unsigned F, Layout kRows>
__device__ __forceinline__ void put_block_row(const Params &p, const Chunks<T, kRows> &chunks, int64_t row,
                                              uint4 (&v)[kHeld], const GradRow &grad) {
  const bool fits = kRows != Layout::any || gradient_fits<T>(p, row);
  const int lead = fits ? chunks.lead() : GradWriter<T, G, F>::lead_of(p, p.grad_logits.row<G>(row));
  int from = 0;
  if (fits && !grad.zero && grad.plain()) {
    put_units<T, G, F>(p, chunks, row, v, grad);
    if (p.vocab == p.classes) return;
    from = p.geometry.batches * kUnit + 1;
  }
  put_rest<T, G, F>(p, row, lead, from + static_cast<int>(threadIdx.x), p.geometry.warps * 32, grad);
}

// A block of `warps` warps a row.
template <typename T, unsigned F, Layout kRows>
__global__ void __launch_bounds__(held_threads(kRows), 1) block_kernel(const __grid_constant__ Params p) {
  __shared__ float shared[2][kHeldThreads / 32 * kPartialWords<F>];
  let_next_start();
  const int lane = static_cast<int>(threadIdx.x & 31), warp = static_cast<int>(threadIdx.x / 32);
  // Unit u of the first `front` ones is warp u % warps's; and warp w keeps unit front + w.
  const int warps = p.geometry.warps, front = max(0, p.geometry.batches - warps), kept = front + warp;
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
    const bool one_more = kRows != Layout::even && lane == 0 && chunks.shift != 0;
    int unit = warp < front ? warp : kept;
    uint4 v[kHeld], after;
    chunks.load_all(p, unit * kUnit + lane, unit * kUnit, 32, one_more, unit == kept ? kReadOnce : kReadAgain, v,
                    after);
    const float value = threadIdx.x == 0 ? target_value<T, F>(p, row, target) : 0.0f;
    Partial part;
#pragma unroll 1
    while (true) {
      const int next = unit + warps < front ? unit + warps : kept;
      const uint64_t policy = next == kept ? kReadOnce : kReadAgain;
      const ChunkRefill<T, kRows, kHeld> refill(chunks, next * kUnit, policy, unit != kept, v);
      add_chunks<T, F, kRows>(part, p, v, after, chunks.shift, chunks.shift != 0, unit * kUnit + lane, lane, 32,
                              refill);
      if (unit == kept) break;
      if (one_more) after = chunks.load(refill.first + kUnit, policy);
      chunks.settle(p, refill.first, next * kUnit, 32, one_more, v, after);
      unit = next;
    }
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
      put_block_row<T, T, F>(p, chunks, row, v, grad);
    } else {
      put_block_row<T, float, F>(p, chunks, row, v, grad);
    }
    if (threadIdx.x == 0) write_counted<F, false>(p, row, target.kind, value, part);
  }
}

}  // namespace xent::cuda
