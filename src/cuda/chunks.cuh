// SPDX-FileCopyrightText: the libxent authors
// SPDX-License-Identifier: Apache-2.0

// Chunks of a row in the registers of a team of lanes: lane l has the chunks l, l + span, ... of a stretch, as they lie
// in memory. From them come both the vectors that are added up, shifted where the row is misaligned, and the gradient,
// stored where the chunk was.
#pragma once

#include "accumulate.cuh"
#include "gradient.cuh"
#include "kernel_table.hpp"

namespace xent::cuda {

template <typename T, Layout kRows>
__device__ __forceinline__ T *row_of(const Tensor &tensor, int64_t row) {
  return kRows == Layout::any ? tensor.row<T>(row) : static_cast<T *>(tensor.data) + row * tensor.stride[0];
}

// The chunks of a row: 16 bytes each as they lie in memory, from the one that has its first column.
template <typename T, Layout kRows>
struct Chunks {
  const T *row;
  const char *base;  // of chunk 0
  uint32_t shift;    // bytes before the row
  int count;         // that have a column
  int begin, end;    // those that may be loaded whole: a row's ends where the bytes beside them are other rows'
  int inner, outer;  // those that are the row's from end to end

  __device__ __forceinline__ Chunks(const Params &p, int64_t at) : row(row_of<T, kRows>(p.logits, at)) {
    constexpr int lanes = kLanes<T>;
    if constexpr (kRows == Layout::even) {
      shift = begin = inner = 0;
      count = end = outer = static_cast<int>(p.classes / lanes);
    } else {
      shift = shift_of(p, row);
      const int columns = static_cast<int>(p.classes) + lead();
      count = (columns + lanes - 1) / lanes;
      inner = shift == 0 ? 0 : 1;
      outer = kRows == Layout::any && p.logits.col_stride != 1 ? 0 : columns / lanes;
      const bool joined = kRows == Layout::adjacent && p.logits.stride[0] == p.classes && p.classes >= int64_t{lanes};
      begin = joined && at > 0 ? 0 : inner;
      end = joined && at + 1 < p.rows ? count : outer;
    }
    base = reinterpret_cast<const char *>(row) - shift;
  }
  __device__ __forceinline__ int lead() const { return static_cast<int>(shift / sizeof(T)); }
  __device__ __forceinline__ bool is_loaded(int k) const { return k >= begin && k < end; }
  // Whether chunks [from, to) are all the row's from end to end.
  __device__ __forceinline__ bool are_inner(int from, int to) const { return from >= inner && to <= outer; }

  __device__ __forceinline__ uint4 load(int k, uint64_t policy) const {
    uint4 v = empty_vector<T>();
    if (is_loaded(k)) v = load_with(base + static_cast<int64_t>(k) * 16, policy);
    return v;
  }
  __device__ __forceinline__ uint4 by_element(const Params &p, int k) const {
    return gather<T>(row, kRows == Layout::any ? p.logits.col_stride : 1, p.classes,
                     static_cast<int64_t>(k) * kLanes<T> - lead());
  }
  // Chunk k, of which `v` was loaded: -inf in the bytes that are not the row's.
  __device__ __forceinline__ void keep_own(const Params &p, int k, uint4 &v) const {
    if (k >= inner && k < outer) return;
    v = only<T>(v, k == 0 ? lead() : 0, static_cast<int>(p.classes) + lead() - k * kLanes<T>);
  }

  // Brings chunks first, first + span, ... of a team from what was loaded to what the row has, by element where they
  // were not; and `after`, the one behind the team's, in the lane that `wants` it. `team_first`: of the first lane.
  template <int K>
  __device__ __forceinline__ void settle(const Params &p, int first, int team_first, int span, bool wants,
                                         uint4 (&v)[K], uint4 &after) const {
    if constexpr (kRows == Layout::even) {
      if (team_first + K * span <= end) return;
#pragma unroll
      for (int i = 0; i < K; ++i) {
        if (first + i * span >= end) v[i] = empty_vector<T>();
      }
      return;
    }
    if (are_inner(team_first, team_first + K * span + 1)) return;
#pragma unroll
    for (int i = 0; i < K; ++i) keep_own(p, first + i * span, v[i]);
    if (wants) keep_own(p, first + K * span, after);
    if (begin == 0 && end == count) return;
#pragma unroll 1
    for (int i = 0; i < K + (wants ? 1 : 0); ++i) {
      const int k = first + i * span;
      if (k >= count) break;
      if (is_loaded(k)) continue;
      const uint4 one = by_element(p, k);
#pragma unroll
      for (int j = 0; j < K; ++j) {
        if (j == i) v[j] = one;
      }
      if (i == K) after = one;
    }
  }

  template <int K>
  __device__ __forceinline__ void load_all(const Params &p, int first, int team_first, int span, bool wants,
                                           uint64_t policy, uint4 (&v)[K], uint4 &after) const {
#pragma unroll
    for (int i = 0; i < K; ++i) v[i] = load(first + i * span, policy);
    if (kRows != Layout::even) after = wants ? load(first + K * span, policy) : empty_vector<T>();
    settle(p, first, team_first, span, wants, v, after);
  }
};

// The vector that begins `shift` bytes into a lane's chunk `v`; what it lacks its neighbour has, and of the last lane
// the first one: in its next chunk.
__device__ __forceinline__ uint4 shifted(const uint4 &v, const uint4 &next, uint32_t shift, int lane, int span) {
  uint32_t w[4];
#pragma unroll
  for (int j = 0; j < 4; ++j) {
    w[j] = __shfl_sync(0xffffffffu, lane == 0 ? word_of(next, j) : word_of(v, j), (lane + 1) & (span - 1), span);
  }
  return funnel(v, make_uint4(w[0], w[1], w[2], w[3]), shift);
}

// Loads chunks first, first + 32, ... of a warp in place of those that are used up; those that may not be loaded are
// left to settle(). Nothing but a predicate a load: branches would keep one chunk's work from being done beside the
// next's.
template <typename T, Layout kRows, int K>
struct ChunkRefill {
  uint4 (&v)[K];
  int first;
  int begin, left;  // chunk i may be loaded if first + i * 32 >= begin and i * 32 < left
  const char *from;
  uint64_t policy;

  // `team_first`: the first lane's first chunk.
  __device__ __forceinline__ ChunkRefill(const Chunks<T, kRows> &chunks, int team_first, uint64_t policy_, bool on,
                                         uint4 (&v_)[K])
      : v(v_),
        first(team_first + static_cast<int>(threadIdx.x & 31)),
        begin(chunks.begin),
        left(on ? chunks.end - first : 0),
        from(chunks.base + static_cast<int64_t>(first) * 16),
        policy(policy_) {}

  __device__ __forceinline__ void one(int i) const {
    if (i * 32 < left && (kRows == Layout::even || first + i * 32 >= begin)) v[i] = load_with(from + i * 512, policy);
  }
  struct From {
    const ChunkRefill &all;
    int at;
    __device__ __forceinline__ void one(int i) const { all.one(at + i); }
  };
  __device__ __forceinline__ From from_chunk(int at) const { return {*this, at}; }
};

struct NoRefillAt {
  __device__ __forceinline__ NoRefill from_chunk(int) const { return {}; }
};

// Adds what load_all() or settle() has brought. `lane`: of the team; `shifts`: of any team of the warp. `refill`: told
// of each chunk that is used up.
template <typename T, unsigned F, Layout kRows, int K, class Refill>
__device__ __forceinline__ void add_chunks(Partial &part, const Params &p, const uint4 (&v)[K], const uint4 &after,
                                           uint32_t shift, bool shifts, int first, int lane, int span,
                                           const Refill &refill) {
  static_assert(K % kBatch == 0);
#pragma unroll
  for (int at = 0; at < K; at += kBatch) {
    if (K > kBatch && static_cast<int64_t>(first - lane + at * span) * kLanes<T> >= p.classes) {
#pragma unroll
      for (int i = 0; i < kBatch; ++i) refill.from_chunk(at).one(i);
      continue;
    }
    uint4 some[kBatch];
#pragma unroll
    for (int i = 0; i < kBatch; ++i) some[i] = v[at + i];
    if (kRows != Layout::even && shifts) {
      const uint4 &next = at + kBatch < K ? v[at + kBatch < K ? at + kBatch : 0] : after;
      if (span == 32) {
        to_vectors(lane, shift, some, next);
      } else {
#pragma unroll
        for (int i = 0; i < kBatch; ++i) {
          some[i] = shifted(v[at + i], i + 1 < kBatch ? v[at + i + 1] : next, shift, lane, span);
        }
      }
    }
    add_batch<T, F>(part, some, first + at * span, p.classes, p.math, span, refill.from_chunk(at));
  }
}

// The gradient of the target, which is stored over what its vector brings to its place.
struct TargetGrad {
  bool mine = false;
  float value = 0.0f;
};

template <typename T, unsigned F, int K>
__device__ __forceinline__ TargetGrad target_of(const Params &p, int lead, int first, int span, const uint4 (&v)[K],
                                                const GradRow &grad) {
  const int column = static_cast<int>(grad.target) + lead;
  const int k = column / kLanes<T> - first;
  if (k < 0 || k >= K * span || k % span != 0) return {};
  uint4 one = v[0];
#pragma unroll
  for (int j = 1; j < K; ++j) {
    if (j * span == k) one = v[j];
  }
  float x = 0.0f;
#pragma unroll
  for (int lane = 0; lane < kLanes<T>; ++lane) {
    if (lane == column % kLanes<T>) x = element<T>(one, lane);
  }
  return {true, grad_of<F>(x, grad.shift_target, grad, p.math)};
}

// The gradient of chunk k at an end of a row, of which the row has some elements, or padding: 0. `out`: of column
// -lead.
template <typename T, typename G, unsigned F>
__device__ __forceinline__ void put_end(const Params &p, G *out, int k, int lead, const uint4 &v, const GradRow &grad) {
  const int from = k * kLanes<T>, begin = lead - from, end = static_cast<int>(p.classes) + lead - from;
  const int stop = static_cast<int>(p.vocab) + lead - from;
  const int target = static_cast<int>(grad.target) + lead - from;
#pragma unroll
  for (int lane = 0; lane < kLanes<T>; ++lane) {
    if (lane < begin || lane >= stop) continue;
    const float g = grad_of<F>(element<T>(v, lane), lane == target ? grad.shift_target : grad.shift, grad, p.math);
    store_as(out + from + lane, lane < end ? g : 0.0f);
  }
}

// The gradient, which must be plain, of the chunks first, first + span, ... of a row whose gradient lies as its logits
// do. `team_first`: of the first lane. `last`: the first lane's chunk behind them, if the row has one, is nobody's: it
// is read again. `refill`: told of each chunk that is used up.
template <typename T, typename G, unsigned F, Layout kRows, int K, class Refill>
__device__ __forceinline__ void put_chunks(const Params &p, const Chunks<T, kRows> &chunks, int64_t row, int first,
                                           int team_first, int span, bool last, const uint4 (&v)[K],
                                           const GradRow &grad, const Refill &refill) {
  constexpr int lanes = kLanes<T>;
  const int lead = kRows == Layout::even ? 0 : chunks.lead();
  G *const out = row_of<G, kRows>(p.grad_logits, row) - lead;
  const int begin = chunks.inner, end = chunks.outer;
  const int stop = team_first + K * span;
  TargetGrad target;
  const int target_chunk = grad.target < 0 ? -1 : (static_cast<int>(grad.target) + lead) / lanes;
  if (target_chunk >= max(team_first, begin) && target_chunk < min(stop, end)) {
    target = target_of<T, F>(p, lead, first, span, v, grad);
  }
  if constexpr (kRows != Layout::even) {
    // What is not a whole chunk of the row: its ends, and padding.
    const int vectors = static_cast<int>((p.vocab + lead + lanes - 1) / lanes);
    if (!(team_first >= begin && min(stop + (last ? 1 : 0), vectors) <= end)) {
      const int held = last && first == team_first ? K + 1 : K;
#pragma unroll 1
      for (int k = begin == 0 ? end : 0; k < min(vectors, stop + 1); k = max(k + 1, end)) {
        const int i = (k - first) / span;
        if (k < first || i >= held || i * span != k - first) continue;
        uint4 one = v[0];
#pragma unroll
        for (int j = 1; j < K; ++j) {
          if (j == i) one = v[j];
        }
        if (i == K || !chunks.is_loaded(k)) one = chunks.by_element(p, k);
        if constexpr (kRows == Layout::adjacent) {
          put_end<T, G, F>(p, out, k, lead, one, grad);
        } else {
          GradWriter<T, G, F>(p, row, grad.target, lead).put_edge(p, k, one, grad);
        }
      }
    }
  }
  G *const at = out + static_cast<int64_t>(first) * lanes;
#pragma unroll
  for (int i = 0; i < K; ++i) {
    const int k = first + i * span;
    if (k >= begin && k < end) {
      float g[lanes];
#pragma unroll
      for (int lane = 0; lane < lanes; ++lane) g[lane] = grad_of<F>(element<T>(v[i], lane), grad.shift, grad, p.math);
      GradWriter<T, G, F>::store_vector(at + i * span * lanes, g);
    }
    refill.one(i);
  }
  if (target.mine) store_as(out + grad.target + lead, target.value);
}

// Vectors k, k + step, ... to the row's end, read again: rows whose gradient is not plain, or lies otherwise than the
// logits, and the padding that is beyond the chunks of a team.
template <typename T, typename G, unsigned F>
__device__ __forceinline__ void put_rest(const Params &p, int64_t row, int lead, int k, int step, const GradRow &grad) {
  const GradWriter<T, G, F> writer(p, row, grad.target, lead);
  const RowReader<T> reader = writer.reader(p, row);
#pragma unroll 1
  for (; k < writer.vectors(p); k += step) {
    uint4 one[1] = {empty_vector<T>()};
    if (!grad.zero) reader.load(k, one);
    writer.put_edge(p, k, one[0], grad);
  }
}

}  // namespace xent::cuda
