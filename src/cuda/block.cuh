// SPDX-FileCopyrightText: the libxent authors
// SPDX-License-Identifier: Apache-2.0

// Loss and gradient of rows beyond the short ones: a block a row, as many blocks as rows. The hardware gives the next
// row to whichever SM is done with one, and rows that do not count end at once (blocks that stay: 8 % slower).
//
// Bytes: logits once from memory, and once more from L2 what neither registers nor shared memory hold, of most rows
// about a third; one write.
//
// A warp has units of the row, 8 vectors a lane in registers. It adds up one after the other and keeps the last of
// them; writes the gradient of that, and then of the others. As soon as a vector is used up the next unit's is loaded
// in its place, so that loads are in flight in both sweeps. Of longer rows one or two units before the last are put
// away in shared memory, each vector as it is used up, and taken from there: beyond 60000 columns 2 to 8 % faster,
// beyond 150000 up to 13 %, for L2 then holds the rest of all rows in flight. (All of a row through stages in shared
// memory, as both_kernel, is a sixth slower.) Blocks are small, so that an SM has several in different phases: while
// one adds up, the others load and store.
//
// Short rows wait for instructions: the code that runs once a row is kept small. Loads and stores carry a predicate,
// not a branch, what is known to be the same in all lanes is told so, no tensor has loops over dimensions (FlatParams),
// and the ends of a misaligned row are a lane's each: together 30 to 60 % faster at 5003 and 10007 columns, 5 % at
// 5000.
//
// Slower: two blocks a row in a cluster, 1 to 5 %. To keep the row's first units, not its last, 5 to 10 %. To load the
// next unit only when one is used up, 4 to 9 %. With one block an SM, blocks that stay and fetch their next row while
// they write this one, 20 %. Whole lines a load and store where rows are misaligned (half stores of a sector do not
// meet in L2, so that 12 % more is written to memory than need be): a gain of 1 % only.
#pragma once

#include "chunks.cuh"

namespace xent::cuda {

inline constexpr int kHeld = 8;
inline constexpr int kUnit = kHeld * 32;   // vectors
inline constexpr int kHeldThreads = 768;   // of an SM, and of a block at most, with 80 registers
inline constexpr int kBlockShared = 2048;  // bytes of shared memory beside the units that are in it, at most

// The units of a warp w of W: of the first `front` of a row w, w + W, ...; and front + w, which stays in registers. Of
// the others the last `stash` wait in shared memory, where the kernel has that; those before them are read again.
struct Units {
  int warp, warps, kept;
  int others, again;

  template <class P>
  __device__ __forceinline__ Units(const P &p, int warp_, int stash) : warp(warp_), warps(p.geometry.warps) {
    const int front = max(0, p.geometry.batches - warps);
    kept = front + warp;
    others = warp < front ? (front - warp + warps - 1) / warps : 0;
    again = max(0, others - stash);
  }
  // In the order of the sweep, and in that of the gradient.
  __device__ __forceinline__ int swept(int i) const { return i < others ? warp + i * warps : kept; }
  __device__ __forceinline__ int put(int i) const {
    if (i == 0) return kept;
    const int stashed = others - again;
    return warp + (i <= stashed ? again + i - 1 : i - 1 - stashed) * warps;
  }
  __device__ __forceinline__ int slot_put(int i) const { return i > 0 && i <= others - again ? i - 1 : -1; }
  __device__ __forceinline__ int slot_swept(int i) const { return i >= again && i < others ? i - again : -1; }
};

// What a lane has of the warp's units in shared memory.
struct Stash {
  uint32_t at;

  // Not for slot -1.
  __device__ __forceinline__ void store(int slot, int i, const uint4 &v) const {
    asm volatile(
        "{\n"
        ".reg .pred on;\n"
        "setp.ge.s32 on, %5, 0;\n"
        "@on st.shared.v4.b32 [%0], {%1, %2, %3, %4};\n"
        "}" ::"r"(at + static_cast<uint32_t>(slot * kUnit + i * 32) * 16),
        "r"(v.x), "r"(v.y), "r"(v.z), "r"(v.w), "r"(slot)
        : "memory");
  }
  __device__ __forceinline__ void load(int slot, int i, uint4 &v) const {
    asm volatile(
        "{\n"
        ".reg .pred on;\n"
        "setp.ge.s32 on, %5, 0;\n"
        "@on ld.shared.v4.b32 {%0, %1, %2, %3}, [%4];\n"
        "}"
        : "+r"(v.x), "+r"(v.y), "+r"(v.z), "+r"(v.w)
        : "r"(at + static_cast<uint32_t>(slot * kUnit + i * 32) * 16), "r"(slot));
  }
};

// Puts away what is used up, before the next unit comes in its place.
template <class Refill>
struct StoreThen {
  const Refill &refill;
  const Stash &stash;
  int slot;
  __device__ __forceinline__ void one(int i) const {
    stash.store(slot, i, refill.v[i]);
    refill.one(i);
  }
  struct From {
    const StoreThen &all;
    int at;
    __device__ __forceinline__ void one(int i) const { all.one(at + i); }
  };
  __device__ __forceinline__ From from_chunk(int at) const { return {*this, at}; }
};
// Takes the next unit from there, or from memory.
template <class Refill>
struct LoadElse {
  const Refill &refill;
  const Stash &stash;
  int slot;
  __device__ __forceinline__ void one(int i) const {
    stash.load(slot, i, refill.v[i]);
    refill.one(i);
  }
};

// The row's gradient, which must be plain, but for its ends. The kept unit is in `v`.
template <typename T, typename G, unsigned F, bool kStash, Layout kRows, class P>
__device__ __forceinline__ void put_units(const P &p, const Chunks<T, kRows> &chunks, int64_t row, const Units &units,
                                          const Stash &stash, uint4 (&v)[kHeld], const GradRow &grad) {
  const int lane = static_cast<int>(threadIdx.x & 31);
#pragma unroll 1
  for (int i = 0; i <= units.others; ++i) {
    const int unit = units.put(i), next = units.put(i + 1), slot = kStash ? units.slot_put(i + 1) : -1;
    const ChunkRefill<T, kRows, kHeld> refill(chunks, next * kUnit + lane, 32, kReadOnce, i < units.others && slot < 0,
                                              v);
    if constexpr (kStash) {
      put_chunks<T, G, F>(p, chunks, row, unit * kUnit + lane, unit * kUnit, 32, v, grad,
                          LoadElse<ChunkRefill<T, kRows, kHeld>>{refill, stash, slot});
    } else {
      put_chunks<T, G, F>(p, chunks, row, unit * kUnit + lane, unit * kUnit, 32, v, grad, refill);
    }
  }
}

// `end`: the logit of the lane's column of the row's ends, in warp 0.
template <typename T, typename G, unsigned F, bool kStash, Layout kRows, class P>
__device__ __forceinline__ void put_block_row(const P &p, const Chunks<T, kRows> &chunks, const Ends<T> &ends,
                                              float end, int64_t row, const Units &units, const Stash &stash,
                                              uint4 (&v)[kHeld], const GradRow &grad) {
  const bool fits = kRows != Layout::any || gradient_fits<T>(p, row);
  const int lead = fits ? chunks.lead() : GradWriter<T, G, F>::lead_of(p, p.grad_logits.template row<G>(row));
  int from = 0;
  if (fits && !grad.zero && grad.plain()) {
    const int lane = static_cast<int>(threadIdx.x & 31);
    if (kRows != Layout::even && units.warp == 0 && lane < ends.count) {
      put_end<G, F>(p, p.grad_logits.template row<G>(row), ends.column(lane), end, grad);
    }
    put_units<T, G, F, kStash>(p, chunks, row, units, stash, v, grad);
    if (p.vocab == p.classes) return;
    from = ends.rest;
  }
  put_rest<T, G, F>(p, row, lead, from + static_cast<int>(threadIdx.x), INT32_MAX, p.geometry.warps * 32, grad);
}

// A warp's units of a row, lanes not merged; `v` holds the kept one at the end. load_first_unit() has come before.
template <typename T, unsigned F, bool kStash, Layout kRows, class P>
__device__ __forceinline__ Partial sweep_units(const P &p, const Chunks<T, kRows> &chunks, const Units &units,
                                               const Stash &stash, uint4 (&v)[kHeld]) {
  const int lane = static_cast<int>(threadIdx.x & 31);
  const bool one_more = kRows != Layout::even && lane == 0 && chunks.shift != 0;
  uint4 after = {};
  Partial part;
#pragma unroll 1
  for (int i = 0;; ++i) {
    const int unit = units.swept(i), first = unit * kUnit + lane;
    if (one_more) chunks.load(first + kUnit, kReadOnce, after);
    chunks.settle(p, first, unit * kUnit, 32, one_more, v, after);
    const ChunkRefill<T, kRows, kHeld> refill(chunks, units.swept(i + 1) * kUnit + lane, 32,
                                              i + 1 < units.again ? kReadAgain : kReadOnce, i < units.others, v);
    if constexpr (kStash) {
      add_chunks<T, F>(part, p, chunks, v, after, chunks.shift != 0, first, lane, 32,
                       StoreThen<ChunkRefill<T, kRows, kHeld>>{refill, stash, units.slot_swept(i)});
    } else {
      add_chunks<T, F>(part, p, chunks, v, after, chunks.shift != 0, first, lane, 32, refill);
    }
    if (i == units.others) return part;
  }
}

template <typename T, Layout kRows>
__device__ __forceinline__ void load_first_unit(const Chunks<T, kRows> &chunks, const Units &units, uint4 (&v)[kHeld]) {
  const int first = units.swept(0) * kUnit + static_cast<int>(threadIdx.x & 31);
  hold_anything(v);
  ChunkRefill<T, kRows, kHeld>(chunks, first, 32, units.again > 0 ? kReadAgain : kReadOnce, true, v).all();
}

// A block of `warps` warps a row. kStash: with geometry.keep units of each warp in shared memory.
template <typename T, unsigned F, Layout kRows, bool kStash>
__global__ void __launch_bounds__(kHeldThreads, 1) block_kernel(const __grid_constant__ ParamsFor<kRows> p) {
  __shared__ float shared[2][kHeldThreads / 32 * kPartialWords<F>];
  static_assert(sizeof(shared) <= kBlockShared);
  extern __shared__ uint4 stashes[];
  let_next_start();
  const int lane = static_cast<int>(threadIdx.x & 31), warp = warp_of_block(), warps = p.geometry.warps;
  const int stashed = kStash ? p.geometry.keep : 0;
  const Units units(p, warp, stashed);
  const Stash stash = {kStash ? shared_address(stashes + warp * stashed * kUnit + lane) : 0u};
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
    load_first_unit(chunks, units, v);
    const float value = threadIdx.x == 0 ? target_value<T, F>(p, row, target) : 0.0f;
    const Ends<T> ends(p, chunks);
    float end = 0.0f;
    if (kRows != Layout::even && warp == 0 && lane < ends.count && (kRows != Layout::any || p.logits.col_stride == 1)) {
      end = to_float(chunks.row[ends.column(lane)]);
    }
    Partial part = sweep_units<T, F, kStash>(p, chunks, units, stash, v);
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
      put_block_row<T, T, F, kStash>(p, chunks, ends, end, row, units, stash, v, grad);
    } else {
      put_block_row<T, float, F, kStash>(p, chunks, ends, end, row, units, stash, v, grad);
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
  const Units units(p, warp, 0);
  load_first_unit(chunks, units, v);
  const Partial part = merge_lanes<F>(sweep_units<T, F, false>(p, chunks, units, Stash{0u}, v), 32, p.math);
  if ((threadIdx.x & 31) == 0) store_partial<F>(p.partials + blockIdx.x * kPartialWords<F>, 1, part);
}

}  // namespace xent::cuda
