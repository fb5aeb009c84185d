// SPDX-FileCopyrightText: the libxent authors
// SPDX-License-Identifier: Apache-2.0

// The kernels that sweep logits.
//
//   forward_kernel   a warp a row of any layout, and then the next. Bytes: logits once, then 8 a row. (For rows that
//                    lie as usual see forward.cuh.)
//   both_kernel      a block a row, and then the next: sweep and gradient of rows too long for block.cuh. Bytes: logits
//                    once from memory, once more from L2 what the stages do not keep; one write.
//   split_kernel     a warp for each piece of a row, for few rows of any layout: leaves its partial in the workspace.
//   combine_kernel   a block a row: merges them and writes the row's outputs, with the bits of the first two. (With the
//                    sums over rows done by its last block, 3 us slower than with a launch for them.)
//
// Blocks are small, several an SM in different phases: while one merges, the others load and store.
#pragma once

#include "accumulate.cuh"
#include "cluster.cuh"
#include "gradient.cuh"

namespace xent::cuda {

// A warp's share of a row's gradient: from the queue where `keeps`, else from memory.
template <typename T, typename G, unsigned F>
__device__ __forceinline__ void write_share(const Params &p, int64_t row, const GradRow &grad, bool keeps,
                                            const Share &share, StageQueue<T, kBatch, true> &queue) {
  using Writer = GradWriter<T, G, F>;
  const int lead = keeps ? static_cast<int>(shift_of(p, p.logits.row<T>(row)) / sizeof(T))
                         : Writer::lead_of(p, p.grad_logits.row<G>(row));
  const Writer writer(p, row, grad.target, lead);
  int batch = share.warp;
  if (keeps) {
    queue.go_back(share.count - share.freed);
    batch += share.freed * share.warps;
#pragma unroll 1
    for (int left = share.count; left > 0; --left) {
      if (batch >= p.geometry.batches) batch = share.warp;  // the kept ones are done
      uint4 v[kBatch];
      queue.take(p, share, 0, true, v);
      if (grad.zero) {
        writer.put_zero(p, batch, share.lane);
      } else {
        writer.put(p, batch, share.lane, v, grad);
      }
      batch += share.warps;
    }
    batch = p.geometry.batches + share.warp;  // padding, and the chunk that a misaligned row has more than vectors
  }
#pragma unroll 1
  for (; batch * (kBatch * 32) < writer.vectors(p); batch += share.warps) {
    writer.write(p, row, batch, share.lane, grad);
  }
}

template <typename T, unsigned F>
__device__ __forceinline__ void write_any_share(const Params &p, int64_t row, const GradRow &grad, bool keeps,
                                                const Share &share, StageQueue<T, kBatch, true> &queue) {
  if (sizeof(T) == 4 || p.grad_logits.type != Element::f32) {
    write_share<T, T, F>(p, row, grad, keeps, share, queue);
  } else {
    write_share<T, float, F>(p, row, grad, keeps, share, queue);
  }
}

// Rows that the partials of a block's warps have room for: the barrier of one keeps the next but one away.
inline constexpr int kSlots = 2;

// The partial of the block's `turn`-th row, in lane 0 of every warp.
template <unsigned F>
__device__ __forceinline__ Partial merge_block(const Partial &part, const Share &share, int turn, float *slots,
                                               int cluster, const Constants &c) {
  float *const partials = slots + turn % kSlots * share.warps * kPartialWords<F>;
  float *const mine = partials + share.warp * kPartialWords<F>;
  if (share.lane == 0) store_partial<F>(mine, 1, part);
  if (cluster > 1) {
    if (share.lane == 0) store_partial<F>(of_block(mine, cluster_rank() ^ 1), 1, part);
    cluster_barrier();
  } else {
    __syncthreads();
  }
  return merge_warps<F>(partials, share.warps, c);
}

// Forward sweep of the rows of a warp. A lane does what a row costs besides its columns: up to 32 rows at once.
template <typename T, unsigned F, int N, class Queue>
__device__ __forceinline__ void forward_rows(const Params &p, const Share &share, Queue &queue, uint4 (&v)[N]) {
  const int step = static_cast<int>(gridDim.x);
  for (int64_t base = blockIdx.x; base < p.rows; base += int64_t{32} * step) {
    const int64_t mine = base + static_cast<int64_t>(share.lane) * step;
    RowTarget target = {RowKind::ignored, 0};
    if (mine < p.rows) target = read_target(p, mine);
    const float value = target_value<T, F>(p, mine, target);
    Partial finished;
    for (uint32_t left = __ballot_sync(0xffffffffu, target.kind != RowKind::ignored); left != 0; left &= left - 1) {
      const int i = __ffs(static_cast<int>(left)) - 1;
      const int64_t row = base + static_cast<int64_t>(i) * step;
      const Partial part = from_lane<F>(sweep<T, F>(p, row, share.count, share, queue, v), 0);
      if (share.lane == i) finished = part;
    }
    if (mine >= p.rows) continue;
    if (target.kind == RowKind::ignored) {
      write_ignored(p, mine);
    } else {
      write_counted<F>(p, mine, target.kind, value, finished);
    }
  }
}

// Sweep and gradient of the rows of a block. `queue` holds the first batches already.
template <typename T, unsigned F, int N, class Queue>
__device__ __forceinline__ void both_rows(const Params &p, const Share &share, Queue &queue, uint4 (&v)[N],
                                          float *slots) {
  const int cluster = p.geometry.cluster;
  const int step = static_cast<int>(gridDim.x) / cluster;
  int turn = 0;
  for (int64_t base = static_cast<int>(blockIdx.x) / cluster; base < p.rows; base += int64_t{32} * step) {
    // A lane a row. In place, the targets' logits of all of them are read before the first is overwritten.
    const int64_t mine = base + static_cast<int64_t>(share.lane) * step;
    RowTarget target = {RowKind::ignored, 0};
    if (mine < p.rows) target = read_target(p, mine);
    const float value = target_value<T, F>(p, mine, target);
    RowFactor factor = {};
    bool has_factor = false;
    const bool ignored = mine < p.rows && target.kind == RowKind::ignored;
    if (ignored && share.warp == 0) write_ignored<false>(p, mine);
    for (uint32_t left = __ballot_sync(0xffffffffu, ignored); left != 0; left &= left - 1) {
      const int64_t row = base + static_cast<int64_t>(__ffs(static_cast<int>(left)) - 1) * step;
      write_zeros<T>(p, row, share);
    }
    for (uint32_t left = __ballot_sync(0xffffffffu, target.kind != RowKind::ignored); left != 0; left &= left - 1) {
      const int i = __ffs(static_cast<int>(left)) - 1;
      const int64_t row = base + static_cast<int64_t>(i) * step;
      const bool keeps = gradient_fits<T>(p, row);
      Partial part = sweep<T, F>(p, row, keeps ? share.freed : share.count, share, queue, v);
      if (!has_factor) {
        // Behind a sweep, which needs nothing of the launch before.
        wait_for_previous();
        factor = row_factor(p, mine, target.kind);
        has_factor = true;
      }
      if (share.warps > 1) part = merge_block<F>(part, share, turn, slots, cluster, p.math);
      const bool writes = turn % share.warps == share.warp;
      ++turn;
      if (writes) {
        const auto kind = static_cast<RowKind>(__shfl_sync(0xffffffffu, static_cast<int>(target.kind), i));
        const float row_value = __shfl_sync(0xffffffffu, value, i);
        if (share.lane == 0) write_counted<F, false>(p, row, kind, row_value, part);
      }
      const RowStats stats = stats_of(__shfl_sync(0xffffffffu, part.m, 0), __shfl_sync(0xffffffffu, part.d, 0));
      const RowFactor factor_of_row = {__shfl_sync(0xffffffffu, static_cast<int>(factor.zero), i) != 0,
                                       __shfl_sync(0xffffffffu, factor.value, i)};
      const GradRow grad = grad_row(p.math, factor_of_row, __shfl_sync(0xffffffffu, target.target, i), stats);
      write_any_share<T, F>(p, row, grad, keeps, share, queue);
    }
  }
}

// Of an SM. Forward: 16 blocks of a warp, with 128 registers, so that nothing is spilled. With the gradient 96: a spill
// is dear where shared memory has taken L1, but fewer warps are dearer.
inline constexpr int kForwardBlocks = 16;
inline constexpr int kBothThreads = 640;

// What a block of `warps` warps shares, but for the stages.
__host__ __device__ inline int slot_bytes(int warps, int words) {
  return warps > 1 ? kSlots * warps * words * static_cast<int>(sizeof(float)) : 0;
}

template <typename T, unsigned F>
__global__ void __launch_bounds__(32, kForwardBlocks) forward_kernel(const __grid_constant__ Params p) {
  start_in_chain();
  const Share share(p, 0);
  uint4 v[kForwardBatch];
  RegisterQueue<T, kForwardBatch> queue(p, share, blockIdx.x, static_cast<int>(gridDim.x), v);
  forward_rows<T, F>(p, share, queue, v);
}

template <typename T, unsigned F>
__global__ void __launch_bounds__(kBothThreads, 1) both_kernel(const __grid_constant__ Params p) {
  extern __shared__ uint4 shared[];
  let_next_start();
  char *const memory = reinterpret_cast<char *>(shared);
  const int warps = static_cast<int>(blockDim.x) / 32;
  const int warp = warp_of_block();
  const int cluster = p.geometry.cluster;
  const Share share(p, static_cast<int>(blockIdx.x) % cluster * warps + warp);
  if (cluster > 1) cluster_barrier();  // the other block runs: its shared memory may be written
  StageQueue<T, kBatch, true> queue(p, share, memory + warp * kRingBytes<kBatch>,
                                    static_cast<int>(blockIdx.x) / cluster, static_cast<int>(gridDim.x) / cluster);
  uint4 v[kBatch];
  both_rows<T, F>(p, share, queue, v, reinterpret_cast<float *>(memory + warps * kRingBytes<kBatch>));
  wait_for_previous();  // where all rows were ignored
}

inline constexpr int kSplitWarps = 4;
inline constexpr int kCombineWarps = 8;

// N: the batch of the kernel whose bits it gives.
template <typename T, unsigned F, int N>
__global__ void __launch_bounds__(kSplitWarps * 32) split_kernel(const __grid_constant__ Params p) {
  extern __shared__ uint4 shared[];
  start_in_chain();
  const int warp = warp_of_block();
  const int64_t piece = static_cast<int64_t>(blockIdx.x) * kSplitWarps + warp;
  const int pieces = p.geometry.warps * share_pieces(p.geometry, kSerial<N>);
  const int64_t row = piece / pieces;
  if (row >= p.rows) return;
  // Piece s * warps + w of a row is the s-th of warp w's share.
  const int at = static_cast<int>(piece - row * pieces);
  Share share(p, at / p.geometry.warps * kSerial<N> * p.geometry.warps + at % p.geometry.warps);
  share.count = min(share.count, kSerial<N>);
  // Nothing is fetched of an ignored row, and nobody reads its partial.
  StageQueue<T, N, false> queue(p, share, reinterpret_cast<char *>(shared) + warp * kSerial<N> * kStageBytes<N>, row,
                                static_cast<int>(p.rows), share.count);
  if (queue.empty()) return;
  uint4 v[N];
  const uint32_t shift = shift_of(p, p.logits.row<T>(row));
  static_assert(kSerial<N> <= kStages);
  const Partial part = add_piece<T, F>(p, shift, 0, share.count, 0, share, queue, v);
  if (share.lane == 0) store_partial<F>(p.partials + piece * kPartialWords<F>, 1, part);
}

// `serial`: batches, or units, of a warp's share that are one piece.
template <typename T, unsigned F>
__global__ void __launch_bounds__(kCombineWarps * 32) combine_kernel(const __grid_constant__ Params p, int serial) {
  __shared__ float shared[32 * kPartialWords<F>];
  start_in_chain();
  const int64_t row = blockIdx.x;
  const RowTarget target = read_target(p, row);
  if (target.kind == RowKind::ignored) {
    if (threadIdx.x == 0) write_ignored(p, row);
    return;
  }
  const float value = threadIdx.x == 0 ? target_value<T, F>(p, row, target) : 0.0f;
  const int warps = p.geometry.warps, most = share_pieces(p.geometry, serial);
  const float *const partials = p.partials + row * warps * most * kPartialWords<F>;
  Partial total;
  if (most == 1) {
    if (threadIdx.x >= 32) return;
    total = merge_warps<F>(partials, min(warps, p.geometry.batches), p.math);
  } else {
    for (int warp = static_cast<int>(threadIdx.x) / 32; warp < warps; warp += static_cast<int>(blockDim.x) / 32) {
      const Share share(p, warp);
      const int pieces = (share.count + serial - 1) / serial;
      total = Partial();
      for (int piece = share.lane; piece < pieces; piece += 32) {
        const Partial part = load_partial<F>(partials + (piece * warps + warp) * kPartialWords<F>, 1);
        total = piece < 32 ? part : add_up<F>(total, part, p.math);
      }
      if (pieces > 1) total = merge_lanes<F>(total, 32, p.math);
      if (share.lane == 0) store_partial<F>(shared + warp * kPartialWords<F>, 1, total);
    }
    if (warps > 1) {
      __syncthreads();
      if (threadIdx.x >= 32) return;
      total = merge_warps<F>(shared, warps, p.math);
    }
  }
  if (threadIdx.x == 0) write_counted<F>(p, row, target.kind, value, total);
}

}  // namespace xent::cuda
