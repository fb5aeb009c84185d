// SPDX-FileCopyrightText: the libxent authors
// SPDX-License-Identifier: Apache-2.0

// Forward of rows that lie as usual: a block a row, as many blocks as rows.
//
// Bytes: logits once, then 8 a row. A warp of the block has pieces of the row, one batch in registers, each vector
// of which is loaded anew as soon as it is added up. The pieces are those of forward_kernel, and merged as it does.
// Against that, whose warps stay and have a row each, 3 to 6 % faster from 4096 to 262144 columns: there is less
// than half of the code, no stream that runs on from row to row, and rows end in finer steps. (64 registers, and with
// them a third more warps: the same. 96: 1 to 3 % slower. Whole lines a load where rows are misaligned, by shifting
// chunks between lanes: 5 % slower.)
#pragma once

#include "chunks.cuh"

namespace xent::cuda {

// Of an SM, and of a block at most; 80 registers a thread.
inline constexpr int kRowThreads = 768;

// A warp's pieces of a row: `piece`, piece + step, ... Leaves their partials in `partials`, an array of the row's.
template <typename T, unsigned F, Layout kRows, class P>
__device__ __forceinline__ void sweep_pieces(const P &p, const Chunks<T, kRows> &chunks, int piece, int step,
                                             float *partials) {
  constexpr int N = kForwardBatch, kSpan = N * 32, kEach = kSerial<N>;
  const int lane = static_cast<int>(threadIdx.x & 31), batches = p.geometry.batches;
  const bool one_more = kRows != Layout::even && lane == 0 && chunks.shift != 0;
  int batch = piece * kEach;
  if (batch >= batches) return;
  uint4 v[N], after = {};
  hold_anything(v);
  ChunkRefill<T, kRows, N>(chunks, batch * kSpan + lane, 32, kReadOnce, true, v).all();
  Partial part;
#pragma unroll 1
  while (true) {
    const int first = batch * kSpan + lane;
    if (one_more) chunks.load(first + kSpan, kReadOnce, after);
    chunks.settle(p, first, batch * kSpan, 32, one_more, v, after);
    const bool ends = (batch + 1) % kEach == 0 || batch + 1 == batches;
    const int next = ends ? (batch / kEach + step) * kEach : batch + 1;
    if (kRows != Layout::even && chunks.shift != 0) to_vectors(lane, chunks.shift, v, after);
    chunks.keep_own(first, batch * kSpan, 32, v);
    const ChunkRefill<T, kRows, N> refill(chunks, next * kSpan + lane, 32, kReadOnce, next < batches, v);
    add_batch<T, F>(part, v, first, p.classes, p.math, 32, refill);
    if (ends) {
      part = merge_lanes<F>(part, 32, p.math);
      if (lane == 0) store_partial<F>(partials + batch / kEach * kPartialWords<F>, 1, part);
      part = Partial();
    }
    if (next >= batches) break;
    batch = next;
  }
}

template <typename T, unsigned F, Layout kRows>
__global__ void __launch_bounds__(kRowThreads, 1) row_kernel(const __grid_constant__ ParamsFor<kRows> p) {
  extern __shared__ float partials[];  // of the row's pieces
  start_in_chain();
  const int lane = static_cast<int>(threadIdx.x & 31), warp = warp_of_block();
  const int pieces = share_pieces(p.geometry, kSerial<kForwardBatch>);
#pragma unroll 1
  for (int64_t row = blockIdx.x; row < p.rows; row += gridDim.x) {
    const RowTarget target = read_target(p, row);
    if (target.kind == RowKind::ignored) {
      if (threadIdx.x == 0) write_ignored(p, row);
      continue;
    }
    const float value = threadIdx.x == 0 ? target_value<T, F>(p, row, target) : 0.0f;
    sweep_pieces<T, F>(p, Chunks<T, kRows>(p, row), warp, static_cast<int>(blockDim.x / 32), partials);
    __syncthreads();
    if (warp == 0) {
      Partial total;
      for (int piece = lane; piece < pieces; piece += 32) {
        const Partial part = load_partial<F>(partials + piece * kPartialWords<F>, 1);
        total = piece < 32 ? part : add_up<F>(total, part, p.math);
      }
      if (pieces > 1) total = merge_lanes<F>(total, 32, p.math);
      if (lane == 0) write_counted<F>(p, row, target.kind, value, total);
    }
    if (row + gridDim.x < p.rows) __syncthreads();
  }
}

// For few rows: a block of one warp for each piece. Leaves their partials in the workspace, for combine_kernel.
template <typename T, unsigned F, Layout kRows>
__global__ void __launch_bounds__(32) row_pieces_kernel(const __grid_constant__ ParamsFor<kRows> p) {
  start_in_chain();
  const int pieces = share_pieces(p.geometry, kSerial<kForwardBatch>);
  const int64_t row = blockIdx.x / pieces;
  const int piece = static_cast<int>(blockIdx.x % pieces);
  if (read_target(p, row).kind == RowKind::ignored) return;  // nobody reads its partials
  sweep_pieces<T, F>(p, Chunks<T, kRows>(p, row), piece, pieces, p.partials + row * pieces * kPartialWords<F>);
}

}  // namespace xent::cuda
