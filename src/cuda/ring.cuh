// SPDX-FileCopyrightText: the libxent authors
// SPDX-License-Identifier: Apache-2.0

// The stream of logits into a warp.
//
// A row is cut into batches of N * 32 vectors; batch b belongs to warp b % warps of the row's block. What a warp has
// used up it fetches anew at once, the next batch of its stream, which runs on into the rows to come: loads are in
// flight while it merges and writes, and no barrier stands in the stream.
//
// Forward fetches into registers, one batch of 8 vectors. (Two of 4, or stages in shared memory, gave 1 to 5 % less.)
//
// With the gradient a row's batches are needed twice, and a warp has kStages stages of shared memory, filled by
// cp.async. The last `keep` batches of a row stay in their stages from the sweep to the gradient, the others are
// fetched again, from L2, which is asked to keep them and to let go of all the rest (7 % at 128256 columns). Order of a
// row's fetches: all batches, then those that were not kept; order of use: all batches, the kept ones, the refetched
// ones. Stages are thereby freed in the order in which they were filled. Each use is one step, each step commits one
// group (an empty one where nothing was freed), and a stage is filled kStages steps or more before it is used, so that
// "at most kStages - 1 groups pending" means that it has arrived.
//
// What is fetched are 16-byte chunks as they lie in memory, aligned, with -inf in the bytes that are not the row's.
// Vector k of a row holds columns [k * kLanes, (k + 1) * kLanes) whatever the address: two neighbouring chunks and a
// shift where the row is misaligned, for which a batch has one chunk more than vectors.
#pragma once

#include "params.cuh"

namespace xent::cuda {

inline constexpr int kForwardBatch = 8;  // vectors of a lane, in registers
inline constexpr int kBatch = 4;         // in stages, and of the backward kernel
inline constexpr int kStages = 5;

// Batches of N vectors that one accumulator adds up: a segment. Few rows are cut into their segments.
__host__ __device__ constexpr int serial_of(int batch) { return 32 / batch; }
template <int N>
inline constexpr int kSerial = serial_of(N);

// Of one warp: a stage holds the chunks of a batch and one more.
template <int N>
inline constexpr int kStageBytes = (N * 32 + 1) * 16;
template <int N>
inline constexpr int kRingBytes = kStages * kStageBytes<N>;

__device__ __forceinline__ uint32_t shared_address(const void *p) {
  return static_cast<uint32_t>(__cvta_generic_to_shared(p));
}

// Policies of L2, as createpolicy makes them: what is read again later, and what is not.
inline constexpr uint64_t kReadAgain = 0x14f0000000000000u;  // evict last
inline constexpr uint64_t kReadOnce = 0x12f0000000000000u;   // evict first

__device__ __forceinline__ void copy_async(uint32_t to, const void *from, uint64_t policy) {
  asm volatile("cp.async.cg.shared.global.L2::cache_hint [%0], [%1], 16, %2;" ::"r"(to), "l"(from), "l"(policy)
               : "memory");
}
__device__ __forceinline__ void commit_group() { asm volatile("cp.async.commit_group;" ::: "memory"); }
__device__ __forceinline__ void wait_for_stage() {
  asm volatile("cp.async.wait_group %0;" ::"n"(kStages - 1) : "memory");
  __syncwarp();  // what the other lanes have copied
}
__device__ __forceinline__ uint4 load_once(const void *from) {
  uint4 v;
  asm volatile("ld.global.L1::no_allocate.v4.b32 {%0, %1, %2, %3}, [%4];"
               : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
               : "l"(from));
  return v;
}
__device__ __forceinline__ uint4 load_shared(uint32_t at) {
  uint4 v;
  asm volatile("ld.shared.v4.b32 {%0, %1, %2, %3}, [%4];" : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w) : "r"(at));
  return v;
}
__device__ __forceinline__ void store_shared(uint32_t at, const uint4 &v) {
  asm volatile("st.shared.v4.b32 [%0], {%1, %2, %3, %4};" ::"r"(at), "r"(v.x), "r"(v.y), "r"(v.z), "r"(v.w) : "memory");
}

// Vectors of a stage, shifted by `words` 4-byte words and `bits`.
template <int kWords, int N>
__device__ __forceinline__ void load_shifted(uint32_t at, uint32_t bits, uint4 (&v)[N]) {
#pragma unroll
  for (int i = 0; i < N; ++i) {
    const uint4 a = load_shared(at + i * 512);
    const uint4 b = load_shared(at + i * 512 + 16);
    const uint32_t w[8] = {a.x, a.y, a.z, a.w, b.x, b.y, b.z, b.w};
    v[i] = make_uint4(
        __funnelshift_r(w[kWords], w[kWords + 1], bits), __funnelshift_r(w[kWords + 1], w[kWords + 2], bits),
        __funnelshift_r(w[kWords + 2], w[kWords + 3], bits), __funnelshift_r(w[kWords + 3], w[kWords + 4], bits));
  }
}

// The chunks of a stage as they lie; `at` is the lane's first.
template <int N>
__device__ __forceinline__ void load_chunks(uint32_t at, uint4 (&v)[N]) {
#pragma unroll
  for (int i = 0; i < N; ++i) v[i] = load_shared(at + i * 512);
}

// The vectors of a row whose first chunk has `shift` bytes too many.
template <int N>
__device__ __forceinline__ void load_vectors(uint32_t at, uint32_t shift, uint4 (&v)[N]) {
  const uint32_t bits = (shift & 3) * 8;
  if (shift == 0) {
    load_chunks(at, v);
  } else if (shift < 4) {
    load_shifted<0>(at, bits, v);
  } else if (shift < 8) {
    load_shifted<1>(at, bits, v);
  } else if (shift < 12) {
    load_shifted<2>(at, bits, v);
  } else {
    load_shifted<3>(at, bits, v);
  }
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

  __device__ __forceinline__ Share(const Params &p, int warp_)
      : lane(static_cast<int>(threadIdx.x & 31)), warp(warp_), warps(p.geometry.warps) {
    count = warp < p.geometry.batches ? (p.geometry.batches - warp + warps - 1) / warps : 0;
    freed = count > p.geometry.keep ? count - p.geometry.keep : 0;
  }
};

// Bytes of a row's first chunk that are not the row's.
template <typename T>
__device__ __forceinline__ uint32_t shift_of(const Params &p, const T *row) {
  return p.logits.col_stride == 1 ? static_cast<uint32_t>(reinterpret_cast<uintptr_t>(row) & 15) : 0;
}

// True where the vectors that suit the gradient's stores are the chunks of the logits, so that the stages serve both.
template <typename T>
__device__ __forceinline__ bool gradient_fits(const Params &p, int64_t row) {
  if (p.logits.col_stride != 1 || p.grad_logits.col_stride != 1) return false;
  const uintptr_t logits = reinterpret_cast<uintptr_t>(p.logits.row<T>(row));
  const uintptr_t lead = (logits & 15) / sizeof(T);
  if (sizeof(T) == 2 && p.grad_logits.type == Element::f32) {
    return ((reinterpret_cast<uintptr_t>(p.grad_logits.row<float>(row)) - lead * sizeof(float)) & 15) == 0;
  }
  return ((reinterpret_cast<uintptr_t>(p.grad_logits.row<T>(row)) ^ logits) & 15) == 0;
}

// The stream of batches of N vectors of a warp, as addresses, which a Sink turns into loads.
template <typename T, int N, bool kGrad>
class Producer {
 public:
  __device__ __forceinline__ Producer(int64_t first, int step) : walk_(first, step) {}

  template <class Sink>
  __device__ __forceinline__ void fetch(const Params &p, const Share &share, Sink sink) {
    if (whole_ == 0 && !prepare(p, share, sink)) return;
    const uint64_t policy = kGrad && is_read_again_ ? kReadAgain : kReadOnce;
#pragma unroll
    for (int i = 0; i < N; ++i) sink.copy(i, from_ + i * 512, policy);
    if (one_more_) sink.copy(N, from_ + N * 512, policy);
    from_ += static_cast<int64_t>(share.warps) * (N * 512);
    batch_ += share.warps;
    --whole_;
  }

 private:
  // True where a batch of whole chunks is next. Otherwise the next one was fetched here, or there is none.
  template <class Sink>
  __device__ __forceinline__ bool prepare(const Params &p, const Share &share, Sink sink) {
    const int kept = share.warp + share.freed * share.warps;
    while (batch_ >= end_) {
      if (kGrad && again_) {
        end_ = kept;
        again_ = false;
      } else {
        if (share.count == 0) return false;
        const int64_t row = walk_.next(p);
        if (row < 0) return false;
        row_ = p.logits.row<T>(row);
        one_more_ = share.lane == 0 && shift_of(p, row_) != 0;
        end_ = p.geometry.batches;
        again_ = kGrad && share.freed > 0 && gradient_fits<T>(p, row);
      }
      batch_ = share.warp;
    }
    // Whole chunks end before the row does; those of a misaligned row begin with the second.
    const uint32_t shift = shift_of(p, row_);
    const int begin = shift == 0 ? 0 : 1;
    const int end =
        p.logits.col_stride == 1 ? static_cast<int>((shift + p.classes * static_cast<int64_t>(sizeof(T))) / 16) : 0;
    is_read_again_ = kGrad && again_ && batch_ < kept;
    const int stop = min((end - begin) / (N * 32), is_read_again_ ? kept : end_);
    const int first = batch_ * (N * 32) + share.lane;
    from_ = reinterpret_cast<const char *>(row_) - shift + static_cast<int64_t>(first) * 16;
    if (batch_ < stop && (batch_ > 0 || shift == 0)) {
      whole_ = (stop - batch_ + share.warps - 1) / share.warps;
      return true;
    }
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
    return false;
  }

  RowWalk walk_;
  const T *row_ = nullptr;
  const char *from_ = nullptr;  // the lane's first chunk of the next batch, while there are whole ones
  int whole_ = 0;               // batches of whole chunks to come before prepare() has to look
  int batch_ = 0;
  int end_ = 0;
  bool one_more_ = false;       // this lane fetches a misaligned row's chunk after the batch
  bool again_ = false;          // the batches that the sweep frees are fetched a second time
  bool is_read_again_ = false;  // the whole batches to come are some of them
};

// Stages in shared memory.
template <typename T, int N, bool kGrad>
class StageQueue {
 public:
  // `count`: batches to fetch for a start.
  __device__ __forceinline__ StageQueue(const Params &p, const Share &share, const void *ring, int64_t first, int step,
                                        int count = kStages)
      : producer_(first, step), begin_(static_cast<int>(shared_address(ring)) + share.lane * 16), at_(begin_) {
#pragma unroll 1
    for (int i = 0; i < kStages; ++i) {
      if (i < count) producer_.fetch(p, share, Stage{static_cast<uint32_t>(at_)});
      commit_group();
      advance();
    }
  }

  // The vectors of the next batch of a row whose first chunk has `shift` bytes too many. `frees`: they are not needed
  // again.
  __device__ __forceinline__ void take(const Params &p, const Share &share, uint32_t shift, bool frees, uint4 (&v)[N]) {
    wait_for_stage();
    load_vectors(static_cast<uint32_t>(at_), shift, v);
    if (frees) {
      __syncwarp();  // every lane has read its neighbour's chunks
      producer_.fetch(p, share, Stage{static_cast<uint32_t>(at_)});
    }
    commit_group();
    advance();
  }
  __device__ __forceinline__ void refill(const Params &, const Share &, uint4 (&)[N]) {}

  __device__ __forceinline__ void go_back(int batches) {
    at_ -= batches * kStageBytes<N>;
    if (at_ < begin_) at_ += kRingBytes<N>;
  }

 private:
  struct Stage {
    uint32_t at;  // the lane's first chunk
    __device__ __forceinline__ void copy(int i, const void *from, uint64_t policy) const {
      copy_async(at + static_cast<uint32_t>(i) * 512, from, policy);
    }
    __device__ __forceinline__ void put(int i, const uint4 &v) const {
      store_shared(at + static_cast<uint32_t>(i) * 512, v);
    }
  };

  __device__ __forceinline__ void advance() {
    at_ += kStageBytes<N>;
    if (at_ == begin_ + kRingBytes<N>) at_ = begin_;
  }

  Producer<T, N, kGrad> producer_;
  int begin_, at_;
};

// One batch in registers: fetched as soon as the one before is added up, so that it comes while a row is finished.
template <typename T, int N>
class RegisterQueue {
 public:
  __device__ __forceinline__ RegisterQueue(const Params &p, const Share &share, int64_t first, int step, uint4 (&v)[N])
      : producer_(first, step) {
    refill(p, share, v);
  }

  // The batch is in `v`, as chunks: brings it to vectors.
  __device__ __forceinline__ void take(const Params &, const Share &share, uint32_t shift, bool, uint4 (&v)[N]) {
    if (shift == 0) return;
    const uint32_t bits = (shift & 3) * 8;
    if (shift < 4) {
      shift_words<0>(share.lane, bits, v);
    } else if (shift < 8) {
      shift_words<1>(share.lane, bits, v);
    } else if (shift < 12) {
      shift_words<2>(share.lane, bits, v);
    } else {
      shift_words<3>(share.lane, bits, v);
    }
  }
  __device__ __forceinline__ void refill(const Params &p, const Share &share, uint4 (&v)[N]) {
    producer_.fetch(p, share, Registers{v, after_});
  }

 private:
  struct Registers {
    uint4 (&v)[N];
    uint4 &after;
    __device__ __forceinline__ void copy(int i, const void *from, uint64_t) const {
      (i < N ? v[i] : after) = load_once(from);
    }
    __device__ __forceinline__ void put(int i, const uint4 &one) const {
#pragma unroll
      for (int j = 0; j < N; ++j) {
        if (j == i) v[j] = one;
      }
      if (i == N) after = one;
    }
  };

  // The chunk after a lane's own is its neighbour's; after the last lane's, the first lane's next.
  template <int kWords>
  __device__ __forceinline__ void shift_words(int lane, uint32_t bits, uint4 (&v)[N]) {
#pragma unroll
    for (int i = 0; i < N; ++i) {
      const uint4 &next = i + 1 < N ? v[i + 1] : after_;
      uint32_t w[8] = {v[i].x, v[i].y, v[i].z, v[i].w};
#pragma unroll
      for (int j = 0; j <= kWords; ++j) {
        w[4 + j] = __shfl_sync(0xffffffffu, lane == 0 ? word_of(next, j) : w[j], (lane + 1) & 31);
      }
      v[i] = make_uint4(
          __funnelshift_r(w[kWords], w[kWords + 1], bits), __funnelshift_r(w[kWords + 1], w[kWords + 2], bits),
          __funnelshift_r(w[kWords + 2], w[kWords + 3], bits), __funnelshift_r(w[kWords + 3], w[kWords + 4], bits));
    }
  }

  Producer<T, N, false> producer_;
  uint4 after_;  // lane 0: the chunk after the batch
};

}  // namespace xent::cuda
