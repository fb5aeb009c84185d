// SPDX-FileCopyrightText: the libxent authors
// SPDX-License-Identifier: Apache-2.0

// Where the stream of a warp waits until it is used.
//
// Forward fetches into registers, one batch of 8 vectors, each as soon as the one before it is used up. (Two of 4, two
// of 8, or stages in shared memory, gave 1 to 5 % less.)
//
// With the gradient a row's batches are needed twice, and a warp has kStages stages of shared memory, filled by
// cp.async. The last `keep` batches of a row stay in their stages from the sweep to the gradient, the others are
// fetched again, from L2, which is asked to keep them and to let go of all the rest (7 % at 128256 columns). Order of a
// row's fetches: all batches, then those that were not kept; order of use: all batches, the kept ones, the refetched
// ones. Stages are thereby freed in the order in which they were filled. Each use is one step, each step commits one
// group (an empty one where nothing was freed), and a stage is filled kStages steps or more before it is used, so that
// "at most kStages - 1 groups pending" means that it has arrived.
#pragma once

#include "producer.cuh"

namespace xent::cuda {

inline constexpr int kStages = 5;

// Of one warp: a stage holds the chunks of a batch and one more.
template <int N>
inline constexpr int kStageBytes = (N * 32 + 1) * 16;
template <int N>
inline constexpr int kRingBytes = kStages * kStageBytes<N>;

__device__ __forceinline__ uint32_t shared_address(const void *p) {
  return static_cast<uint32_t>(__cvta_generic_to_shared(p));
}

__device__ __forceinline__ void copy_async(uint32_t to, const void *from, uint64_t policy) {
  asm volatile("cp.async.cg.shared.global.L2::cache_hint [%0], [%1], 16, %2;" ::"r"(to), "l"(from), "l"(policy)
               : "memory");
}
__device__ __forceinline__ void commit_group() { asm volatile("cp.async.commit_group;" ::: "memory"); }
__device__ __forceinline__ void wait_for_stage() {
  asm volatile("cp.async.wait_group %0;" ::"n"(kStages - 1) : "memory");
  __syncwarp();  // what the other lanes have copied
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
  // How what is used up is fetched anew where it was not when it was taken: not at all.
  struct Refill {
    __device__ __forceinline__ void one(int) const {}
    __device__ __forceinline__ void end() const {}
  };
  __device__ __forceinline__ Refill refill(const Params &, const Share &, uint4 (&)[N]) { return {}; }

  __device__ __forceinline__ bool empty() const { return producer_.empty(); }

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

// Chunks of a warp's lanes shifted by `words` 4-byte words and `bits`. The chunk after a lane's own is its neighbour's;
// after the last lane's, the first lane's next, and `after` its last one.
template <int kWords, int N>
__device__ __forceinline__ void shift_words(int lane, uint32_t bits, uint4 (&v)[N], const uint4 &after) {
#pragma unroll
  for (int i = 0; i < N; ++i) {
    const uint4 &next = i + 1 < N ? v[i + 1 < N ? i + 1 : 0] : after;
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

// From chunks in a warp's registers to the vectors of a row whose first chunk has `shift` bytes too many.
template <int N>
__device__ __forceinline__ void to_vectors(int lane, uint32_t shift, uint4 (&v)[N], const uint4 &after) {
  const uint32_t bits = (shift & 3) * 8;
  if (shift < 4) {
    shift_words<0>(lane, bits, v, after);
  } else if (shift < 8) {
    shift_words<1>(lane, bits, v, after);
  } else if (shift < 12) {
    shift_words<2>(lane, bits, v, after);
  } else {
    shift_words<3>(lane, bits, v, after);
  }
}

// One batch in registers: fetched as soon as the one before is added up, so that it comes while a row is finished.
template <typename T, int N>
class RegisterQueue {
 public:
  __device__ __forceinline__ RegisterQueue(const Params &p, const Share &share, int64_t first, int step, uint4 (&v)[N])
      : producer_(first, step) {
    producer_.fetch(p, share, Registers{v, after_});
  }

  // The batch is in `v`, as chunks: brings it to vectors.
  __device__ __forceinline__ void take(const Params &, const Share &share, uint32_t shift, bool, uint4 (&v)[N]) {
    if (shift != 0) to_vectors(share.lane, shift, v, after_);
  }
  // Each vector as soon as it is used up, so that loads are in flight while the others are.
  struct Refill {
    const Params &p;
    const Share &share;
    RegisterQueue &queue;
    uint4 (&v)[N];
    bool whole;

    __device__ __forceinline__ void one(int i) const {
      if (whole) queue.producer_.fetch_one(i, Registers{v, queue.after_});
    }
    __device__ __forceinline__ void end() const {
      const Registers sink{v, queue.after_};
      if (whole) {
        queue.producer_.pass(share, sink);
      } else {
        queue.producer_.fetch_edge(p, share, sink);
      }
    }
  };
  __device__ __forceinline__ Refill refill(const Params &p, const Share &share, uint4 (&v)[N]) {
    return {p, share, *this, v, producer_.is_whole(p, share)};
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

  Producer<T, N, false> producer_;
  uint4 after_;  // lane 0: the chunk after the batch
};

}  // namespace xent::cuda
