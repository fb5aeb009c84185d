// SPDX-FileCopyrightText: the libxent authors
// SPDX-License-Identifier: Apache-2.0

// The stream of logits into a warp, as addresses.
//
// A row is cut into batches of N * 32 vectors; batch b belongs to warp b % warps of those that share the row. What a
// warp has used up it fetches anew at once, the next batch of its stream, which runs on into the rows to come: loads
// are in flight while it merges and writes, and no barrier stands in the stream.
//
// What is fetched are 16-byte chunks as they lie in memory, aligned, with -inf in the bytes that are not the row's.
// Vector k of a row holds columns [k * kLanes, (k + 1) * kLanes) whatever the address: two neighbouring chunks and a
// shift where the row is misaligned, for which a batch has one chunk more than vectors.
#pragma once

#include "params.cuh"

namespace xent::cuda {

inline constexpr int kForwardBatch = 8;  // vectors of a lane, in registers
inline constexpr int kBatch = 4;         // in stages, and of the backward kernel

// Batches of N vectors that one accumulator adds up: a piece of a row. Pieces are merged by a tree of their own, so
// that any warp may have any of them.
__host__ __device__ constexpr int serial_of(int batch) { return 16 / batch; }
template <int N>
inline constexpr int kSerial = serial_of(N);

// Policies of L2, as createpolicy makes them: what is read again later, and what is not.
inline constexpr uint64_t kReadAgain = 0x14f0000000000000u;  // evict last
inline constexpr uint64_t kReadOnce = 0x12f0000000000000u;   // evict first

__device__ __forceinline__ uint4 load_once(const void *from) {
  uint4 v;
  asm volatile("ld.global.L1::no_allocate.v4.b32 {%0, %1, %2, %3}, [%4];"
               : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
               : "l"(from));
  return v;
}
__device__ __forceinline__ uint4 load_with(const void *from, uint64_t policy) {
  uint4 v;
  asm volatile("ld.global.L1::no_allocate.L2::cache_hint.v4.b32 {%0, %1, %2, %3}, [%4], %5;"
               : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
               : "l"(from), "l"(policy));
  return v;
}

// The same where `on`, and else `v` as it is: one instruction, which no branch surrounds.
__device__ __forceinline__ void load_if(bool on, const void *from, uint64_t policy, uint4 &v) {
  asm volatile(
      "{\n"
      ".reg .pred on;\n"
      "setp.ne.b32 on, %6, 0;\n"
      "@on ld.global.L1::no_allocate.L2::cache_hint.v4.b32 {%0, %1, %2, %3}, [%4], %5;\n"
      "}"
      : "+r"(v.x), "+r"(v.y), "+r"(v.z), "+r"(v.w)
      : "l"(from), "l"(policy), "r"(static_cast<uint32_t>(on)));
}

// Rows first, first + step, ... that count. A warp looks at 32 of them at once: a row that does not count costs nothing
// then, and no row waits for its own target.
struct RowWalk {
  int64_t base;
  int step;
  uint32_t left;  // bit i: row base + i * step is still to come

  __device__ __forceinline__ RowWalk(int64_t first, int step_)
      : base(first - int64_t{32} * step_), step(step_), left(0) {}

  // -1 after the last.
  __device__ __forceinline__ int64_t next(const Params &p) {
    while (left == 0) {
      const int64_t after = base + int64_t{32} * step;
      if (after >= p.rows) return -1;
      base = after;
      const int64_t row = base + static_cast<int64_t>(threadIdx.x & 31) * step;
      left = __ballot_sync(0xffffffffu, row < p.rows && read_target(p, row).kind != RowKind::ignored);
    }
    const int i = __ffs(static_cast<int>(left)) - 1;
    left &= left - 1;
    return base + static_cast<int64_t>(i) * step;
  }
};

// What a warp has to do in every row.
struct Share {
  int lane;
  int warp;   // its first batch
  int warps;  // the distance of its batches
  int count;  // of its batches
  int freed;  // of them, those whose stages the sweep frees; the others stay until the gradient

  template <class P>
  __device__ __forceinline__ Share(const P &p, int warp_)
      : lane(static_cast<int>(threadIdx.x & 31)), warp(warp_), warps(p.geometry.warps) {
    count = warp < p.geometry.batches ? (p.geometry.batches - warp + warps - 1) / warps : 0;
    freed = count > p.geometry.keep ? count - p.geometry.keep : 0;
  }
};

// Bytes of a row's first chunk that are not the row's.
template <typename T, class P>
__device__ __forceinline__ uint32_t shift_of(const P &p, const T *row) {
  return p.logits.col_stride == 1 ? static_cast<uint32_t>(reinterpret_cast<uintptr_t>(row) & 15) : 0;
}

// True where the vectors that suit the gradient's stores are the chunks of the logits, so that the stages serve both.
template <typename T, class P>
__device__ __forceinline__ bool gradient_fits(const P &p, int64_t row) {
  if (p.logits.col_stride != 1 || p.grad_logits.col_stride != 1) return false;
  const uintptr_t logits = reinterpret_cast<uintptr_t>(p.logits.template row<T>(row));
  const uintptr_t lead = (logits & 15) / sizeof(T);
  if (sizeof(T) == 2 && p.grad_logits.type == Element::f32) {
    return ((reinterpret_cast<uintptr_t>(p.grad_logits.template row<float>(row)) - lead * sizeof(float)) & 15) == 0;
  }
  return ((reinterpret_cast<uintptr_t>(p.grad_logits.template row<T>(row)) ^ logits) & 15) == 0;
}

// The stream of batches of N vectors of a warp, as addresses, which a Sink turns into loads.
template <typename T, int N, bool kGrad>
class Producer {
 public:
  __device__ __forceinline__ Producer(int64_t first, int step) : walk_(first, step) {}

  // Whether no row was found to fetch.
  __device__ __forceinline__ bool empty() const { return row_ == nullptr; }

  template <class Sink>
  __device__ __forceinline__ void fetch(const Params &p, const Share &share, Sink sink) {
    if (!is_whole(p, share)) return fetch_edge(p, share, sink);
#pragma unroll
    for (int i = 0; i < N; ++i) fetch_one(i, sink);
    pass(share, sink);
  }

  // Whether the next batch is one of whole chunks. It may then be fetched vector by vector, and passed.
  __device__ __forceinline__ bool is_whole(const Params &p, const Share &share) { return whole_ > 0 || seek(p, share); }
  template <class Sink>
  __device__ __forceinline__ void fetch_one(int i, Sink sink) const {
    sink.copy(i, from_ + i * 512, kGrad && is_read_again_ ? kReadAgain : kReadOnce);
  }
  template <class Sink>
  __device__ __forceinline__ void pass(const Share &share, Sink sink) {
    if (one_more_) fetch_one(N, sink);
    from_ += static_cast<int64_t>(share.warps) * (N * 512);
    batch_ += share.warps;
    --whole_;
  }

  // The next batch, which is not one of whole chunks, or nothing after the last.
  template <class Sink>
  __device__ __forceinline__ void fetch_edge(const Params &p, const Share &share, Sink sink) {
    if (batch_ >= end_) return;
    const uint32_t shift = shift_of(p, row_);
    const int begin = shift == 0 ? 0 : 1;
    const int end = whole_chunks(p, shift);
    const int first = batch_ * (N * 32) + share.lane;
#pragma unroll
    for (int i = 0; i <= N; ++i) {
      const int k = first + i * 32;
      if (i == N && !one_more_) continue;
      if (k >= begin && k < end) {
        sink.copy(i, from_ + i * 512, kReadOnce);
      } else {
        sink.put(i, empty_vector<T>());
      }
    }
    // By element: the chunks at the row's ends, or where columns are not adjacent all of them.
    const int chunks = static_cast<int>((shift / sizeof(T) + p.classes + kLanes<T> - 1) / kLanes<T>);
#pragma unroll 1
    for (int i = 0; i < N + (one_more_ ? 1 : 0); ++i) {
      const int k = first + i * 32;
      if (k >= chunks) break;
      if (k >= begin && k < end) continue;
      const int64_t column = static_cast<int64_t>(k) * kLanes<T> - static_cast<int>(shift / sizeof(T));
      sink.put(i, gather<T>(row_, p.logits.col_stride, p.classes, column));
    }
    batch_ += share.warps;
  }

 private:
  // The chunks from the first to the last that ends before the row does.
  static __device__ __forceinline__ int whole_chunks(const Params &p, uint32_t shift) {
    return p.logits.col_stride == 1 ? static_cast<int>((shift + p.classes * static_cast<int64_t>(sizeof(T))) / 16) : 0;
  }

  // Finds the next batch, and how many of whole chunks there are from it on.
  __device__ __forceinline__ bool seek(const Params &p, const Share &share) {
    const int kept = share.warp + share.freed * share.warps;
    while (batch_ >= end_) {
      if (kGrad && again_) {
        end_ = kept;
        again_ = false;
      } else {
        if (share.count == 0) return false;
        const int64_t row = walk_.next(p);
        if (row < 0) return false;
        row_ = p.logits.template row<T>(row);
        one_more_ = share.lane == 0 && shift_of(p, row_) != 0;
        end_ = p.geometry.batches;
        again_ = kGrad && share.freed > 0 && gradient_fits<T>(p, row);
      }
      batch_ = share.warp;
    }
    // Those of a misaligned row begin with the second.
    const uint32_t shift = shift_of(p, row_);
    const int begin = shift == 0 ? 0 : 1;
    is_read_again_ = kGrad && again_ && batch_ < kept;
    const int stop = min((whole_chunks(p, shift) - begin) / (N * 32), is_read_again_ ? kept : end_);
    from_ = reinterpret_cast<const char *>(row_) - shift + static_cast<int64_t>(batch_ * (N * 32) + share.lane) * 16;
    if (batch_ >= stop || (batch_ == 0 && shift != 0)) return false;
    whole_ = (stop - batch_ + share.warps - 1) / share.warps;
    return true;
  }

  RowWalk walk_;
  const T *row_ = nullptr;
  const char *from_ = nullptr;  // the lane's first chunk of the next batch, while there are whole ones
  int whole_ = 0;               // batches of whole chunks to come before seek() has to look
  int batch_ = 0;
  int end_ = 0;
  bool one_more_ = false;       // this lane fetches a misaligned row's chunk after the batch
  bool again_ = false;          // the batches that the sweep frees are fetched a second time
  bool is_read_again_ = false;  // the whole batches to come are some of them
};

}  // namespace xent::cuda
