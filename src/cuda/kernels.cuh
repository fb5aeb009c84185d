// SPDX-FileCopyrightText: the libxent authors
// SPDX-License-Identifier: Apache-2.0

// The kernels that sweep logits.
//
//   forward_kernel   a block a row, and then the next. Bytes: logits once, then 8 a row.
//   both_kernel      the same, then the row's gradient. Bytes: logits once from memory, and once more from L2 what
//                    the stages do not keep; one write.
//   split_kernel     a warp for each segment of a warp's share of a row, for few rows: leaves the partials of its lanes
//                    in the workspace.
//   combine_kernel   a block a row: merges them and writes the row's outputs, with the bits of the first two.
//   backward_kernel  a block for each stretch of columns of a row: logits read once, gradient written once.
//
// Blocks are small, several an SM in different phases: while one merges, the others load and store.
#pragma once

#include "accumulate.cuh"
#include "gradient.cuh"

namespace xent::cuda {

template <typename T, unsigned F>
__device__ __forceinline__ float target_value(const Params &p, int64_t row, const RowTarget &target) {
  if (target.kind != RowKind::counted || target.target < 0) return 0.0f;
  const T x = p.logits.row<T>(row)[target.target * p.logits.col_stride];
  return value_of<F>(to_float(x), p.math);
}

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

template <typename T, typename G>
__device__ __forceinline__ void write_zeros_as(const Params &p, int64_t row, const Share &share) {
  const GradWriter<T, G, kPlain> writer(p, row, 0);
  for (int batch = share.warp; batch * (kBatch * 32) < writer.vectors(p); batch += share.warps) {
    writer.put_zero(p, batch, share.lane);
  }
}

// A warp's share of the gradient of a row that does not count.
template <typename T>
__device__ __forceinline__ void write_zeros(const Params &p, int64_t row, const Share &share) {
  if (sizeof(T) == 4 || p.grad_logits.type != Element::f32) {
    write_zeros_as<T, T>(p, row, share);
  } else {
    write_zeros_as<T, float>(p, row, share);
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

// Where the warps of a block leave their partials of a row: kSlots rows at once, for warps to run ahead.
inline constexpr int kSlots = 8;

struct Slot {
  int arrived;  // warps
  int merged;   // rows that were merged here
};

// The same place in the shared memory of the other block of a cluster of two.
__device__ __forceinline__ float *of_other_block(float *p) {
#if __CUDA_ARCH__ >= 900
  uint32_t rank;
  asm("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
  uint64_t other;
  asm("mapa.u64 %0, %1, %2;" : "=l"(other) : "l"(p), "r"(rank ^ 1));
  return reinterpret_cast<float *>(other);
#else
  return p;
#endif
}

__device__ __forceinline__ void cluster_barrier() {
#if __CUDA_ARCH__ >= 900
  asm volatile("barrier.cluster.arrive.release;" ::: "memory");
  asm volatile("barrier.cluster.wait.acquire;" ::: "memory");
#endif
}

// The partial of the block's `turn`-th row, in lane 0. With the gradient every warp waits for it and gets it; without,
// the last warp to arrive gets it (and true), and nobody waits.
template <unsigned F, bool kGrad>
__device__ __forceinline__ bool merge_block(Partial &part, const Share &share, int turn, void *shared, int cluster,
                                            const Constants &c) {
  const int at = turn % kSlots;
  Slot *const slots = static_cast<Slot *>(shared);
  float *const partials = reinterpret_cast<float *>(slots + kSlots) + at * share.warps * kPartialWords<F>;
  bool merges = true;
  if (kGrad) {
    if (share.lane == 0) store_partial<F>(partials + share.warp * kPartialWords<F>, 1, part);
    if (cluster > 1) {
      if (share.lane == 0) store_partial<F>(of_other_block(partials) + share.warp * kPartialWords<F>, 1, part);
      cluster_barrier();
    } else {
      __syncthreads();
    }
  } else {
    volatile Slot *const slot = slots + at;
    if (share.lane == 0) {
      while (slot->merged < turn / kSlots) {  // the row before in this slot
      }
      __threadfence_block();
      store_partial<F>(partials + share.warp * kPartialWords<F>, 1, part);
      __threadfence_block();
      merges = atomicAdd(&slots[at].arrived, 1) == share.warps - 1;
      __threadfence_block();
    }
    merges = __shfl_sync(0xffffffffu, merges, 0);
    if (!merges) return false;
  }
  part = merge_warps<F>(partials, share.warps, c);
  if (!kGrad) {
    __syncwarp();
    if (share.lane == 0) {
      slots[at].arrived = 0;
      __threadfence_block();
      static_cast<volatile Slot *>(slots)[at].merged = turn / kSlots + 1;
    }
  }
  return merges;
}

// The rows of a block. `queue` holds the first batches already.
template <typename T, unsigned F, bool kGrad, int N, class Queue>
__device__ __forceinline__ void walk_rows(const Params &p, const Share &share, Queue &queue, uint4 (&v)[N],
                                          void *slots) {
  const int cluster = kGrad ? p.geometry.cluster : 1;
  const int step = static_cast<int>(gridDim.x) / cluster;
  int turn = 0;
  for (int64_t base = static_cast<int>(blockIdx.x) / cluster; base < p.rows; base += int64_t{32} * step) {
    // A lane a row. In place, the targets' logits of all of them are read before the first is overwritten.
    const int64_t mine = base + static_cast<int64_t>(share.lane) * step;
    RowTarget target = {RowKind::ignored, 0};
    if (mine < p.rows) target = read_target(p, mine);
    const float value = target_value<T, F>(p, mine, target);
    RowFactor factor = {true, 0.0};
    if (kGrad) factor = row_factor(p, mine, target.kind);
    const bool ignored = mine < p.rows && target.kind == RowKind::ignored;
    if (ignored && share.warp == 0) write_ignored<!kGrad>(p, mine);
    if constexpr (kGrad) {
      for (uint32_t left = __ballot_sync(0xffffffffu, ignored); left != 0; left &= left - 1) {
        const int64_t row = base + static_cast<int64_t>(__ffs(static_cast<int>(left)) - 1) * step;
        write_zeros<T>(p, row, share);
      }
    }
    // Short rows, of one warp each: a lane keeps what its row came to, and the lanes write their rows at once.
    const bool alone = !kGrad && share.warps == 1;
    Partial finished;
    for (uint32_t left = __ballot_sync(0xffffffffu, target.kind != RowKind::ignored); left != 0; left &= left - 1) {
      const int i = __ffs(static_cast<int>(left)) - 1;
      const int64_t row = base + static_cast<int64_t>(i) * step;
      const bool keeps = kGrad && gradient_fits<T>(p, row);
      Partial part = sweep<T, F>(p, row, keeps ? share.freed : share.count, share, queue, v);
      if (alone) {
        part = from_first_lane<F>(part);
        if (share.lane == i) finished = part;
        continue;
      }
      bool writes = true;
      if (share.warps > 1) writes = merge_block<F, kGrad>(part, share, turn, slots, cluster, p.math);
      if (kGrad) writes = turn % share.warps == share.warp;
      ++turn;
      if (writes) {
        const auto kind = static_cast<RowKind>(__shfl_sync(0xffffffffu, static_cast<int>(target.kind), i));
        const float row_value = __shfl_sync(0xffffffffu, value, i);
        if (share.lane == 0) write_counted<F, !kGrad>(p, row, kind, row_value, part);
      }
      if constexpr (kGrad) {
        const RowStats stats = stats_of(__shfl_sync(0xffffffffu, part.m, 0), __shfl_sync(0xffffffffu, part.d, 0));
        const RowFactor factor_of_row = {__shfl_sync(0xffffffffu, static_cast<int>(factor.zero), i) != 0,
                                         __shfl_sync(0xffffffffu, factor.value, i)};
        const GradRow grad = grad_row(p.math, factor_of_row, __shfl_sync(0xffffffffu, target.target, i), stats);
        write_any_share<T, F>(p, row, grad, keeps, share, queue);
      }
    }
    if (alone && mine < p.rows && target.kind != RowKind::ignored) {
      write_counted<F, !kGrad>(p, mine, target.kind, value, finished);
    }
  }
}

// Of an SM. Forward: 128 registers, so that nothing is spilled (with 640 threads, 4 to 7 % slower where the rows are a
// multiple of those in flight). With the gradient 96: a spill is dear where shared memory has taken L1, but fewer warps
// are dearer.
inline constexpr int kForwardThreads = 512;
inline constexpr int kBothThreads = 640;

// What a block of `warps` warps shares, but for the stages.
__host__ __device__ inline int slot_bytes(int warps, int words) {
  return warps > 1 ? kSlots * (static_cast<int>(sizeof(Slot)) + warps * words * static_cast<int>(sizeof(float))) : 0;
}

template <typename T, unsigned F>
__global__ void __launch_bounds__(kForwardThreads, 1) forward_kernel(const __grid_constant__ Params p) {
  extern __shared__ uint4 shared[];
  start_in_chain();
  const Share share(p, static_cast<int>(threadIdx.x) / 32);
  if (share.warps > 1) {
    if (threadIdx.x < kSlots) reinterpret_cast<Slot *>(shared)[threadIdx.x] = {0, 0};
    __syncthreads();
  }
  uint4 v[kForwardBatch];
  RegisterQueue<T, kForwardBatch> queue(p, share, blockIdx.x, static_cast<int>(gridDim.x), v);
  walk_rows<T, F, false>(p, share, queue, v, shared);
}

template <typename T, unsigned F>
__global__ void __launch_bounds__(kBothThreads, 1) both_kernel(const __grid_constant__ Params p) {
  extern __shared__ uint4 shared[];
  start_in_chain();
  char *const memory = reinterpret_cast<char *>(shared);
  const int warps = static_cast<int>(blockDim.x) / 32;
  const int warp = static_cast<int>(threadIdx.x) / 32;
  const int cluster = p.geometry.cluster;
  const Share share(p, static_cast<int>(blockIdx.x) % cluster * warps + warp);
  if (cluster > 1) cluster_barrier();  // the other block runs: its shared memory may be written
  StageQueue<T, kBatch, true> queue(p, share, memory + warp * kRingBytes<kBatch>,
                                    static_cast<int>(blockIdx.x) / cluster, static_cast<int>(gridDim.x) / cluster);
  uint4 v[kBatch];
  walk_rows<T, F, true>(p, share, queue, v, memory + warps * kRingBytes<kBatch>);
}

inline constexpr int kSplitWarps = 4;
inline constexpr int kCombineWarps = 8;

// Of every warp's share of a row, the most segments.
__host__ __device__ inline int segments_of(const Geometry &g, int serial) {
  return (g.batches + g.warps * serial - 1) / (g.warps * serial);
}

// N: the batch of the kernel whose bits it gives.
template <typename T, unsigned F, int N>
__global__ void __launch_bounds__(kSplitWarps * 32) split_kernel(const __grid_constant__ Params p) {
  extern __shared__ uint4 shared[];
  start_in_chain();
  const int warp = static_cast<int>(threadIdx.x) / 32;
  const int64_t piece = static_cast<int64_t>(blockIdx.x) * kSplitWarps + warp;
  const int pieces = p.geometry.warps * segments_of(p.geometry, kSerial<N>);
  const int64_t row = piece / pieces;
  if (row >= p.rows) return;
  // Piece s * warps + w of a row is segment s of warp w's share.
  const int at = static_cast<int>(piece - row * pieces);
  Share share(p, at / p.geometry.warps * kSerial<N> * p.geometry.warps + at % p.geometry.warps);
  share.count = min(share.count, kSerial<N>);
  // Nothing is fetched of an ignored row, and nobody reads its partials.
  StageQueue<T, N, false> queue(p, share, reinterpret_cast<char *>(shared) + warp * kRingBytes<N>, row,
                                static_cast<int>(p.rows), share.count);
  uint4 v[N];
  const uint32_t shift = shift_of(p, p.logits.row<T>(row));
  const int freed = max(0, share.count - kStages);
  const Partial part = add_segment<T, F>(p, shift, 0, share.count, freed, share, queue, v);
  constexpr int words = 32 * kPartialWords<F>;  // of the lanes' partials
  store_partial<F>(p.partials + piece * words + share.lane, 32, part);
}

template <typename T, unsigned F, int N>
__global__ void __launch_bounds__(kCombineWarps * 32) combine_kernel(const __grid_constant__ Params p) {
  __shared__ float shared[32 * kPartialWords<F>];
  start_in_chain();
  const int64_t row = blockIdx.x;
  const RowTarget target = read_target(p, row);
  if (target.kind == RowKind::ignored) {
    if (threadIdx.x == 0) write_ignored(p, row);
    return;
  }
  constexpr int words = 32 * kPartialWords<F>;  // of the lanes' partials
  const int warps = p.geometry.warps;
  const int64_t pieces = int64_t{warps} * segments_of(p.geometry, kSerial<N>);
  Partial total;
  for (int warp = static_cast<int>(threadIdx.x) / 32; warp < warps; warp += kCombineWarps) {
    const Share share(p, warp);
    const float *partials = p.partials + (row * pieces + warp) * words + share.lane;
    total = Partial();
    for (int done = 0; done < share.count; done += kSerial<N>) {
      total = add_up<F>(total, load_partial<F>(partials, 32), p.math);
      partials += warps * words;
    }
    total = merge_lanes<F>(total, 32, p.math);
    if (share.lane == 0) store_partial<F>(shared + warp * kPartialWords<F>, 1, total);
  }
  __syncthreads();
  if (threadIdx.x >= 32) return;
  if (warps > 1) total = merge_warps<F>(shared, warps, p.math);
  if (threadIdx.x == 0) write_counted<F>(p, row, target.kind, target_value<T, F>(p, row, target), total);
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
