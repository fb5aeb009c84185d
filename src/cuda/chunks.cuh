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

template <Layout kRows>
using ParamsFor = ParamsOf<kRows != Layout::any>;

// The chunks of a row: 16 bytes each as they lie in memory, from the one that has its first column.
template <typename T, Layout kRows>
struct Chunks {
  const T *row;
  const char *base;  // of chunk 0
  uint32_t shift;    // bytes before the row
  int columns;       // of the row
  int count;         // that have a column
  int begin, end;    // those that may be loaded whole: a row's ends where the bytes beside them are other rows'
  int inner, outer;  // those that are the row's from end to end; none if outer < inner

  template <class P>
  __device__ __forceinline__ Chunks(const P &p, int64_t at)
      : row(p.logits.template row<T>(at)), columns(static_cast<int>(p.classes)) {
    constexpr int lanes = kLanes<T>;
    if constexpr (kRows == Layout::even) {
      shift = begin = inner = 0;
      count = end = outer = columns / lanes;
    } else {
      shift = shift_of(p, row);
      count = (columns + lead() + lanes - 1) / lanes;
      inner = shift == 0 ? 0 : 1;
      outer = kRows == Layout::any && p.logits.col_stride != 1 ? 0 : (columns + lead()) / lanes;
      const bool joined = kRows == Layout::adjacent && p.logits.stride[0] == p.classes && p.classes >= int64_t{lanes};
      begin = joined && at > 0 ? 0 : inner;
      end = joined && at + 1 < p.rows ? count : outer;
    }
    base = reinterpret_cast<const char *>(row) - shift;
    // Known from here on, not computed again for each load.
    asm("" : "+l"(base));
  }
  __device__ __forceinline__ int lead() const { return static_cast<int>(shift / sizeof(T)); }
  __device__ __forceinline__ bool is_loaded(int k) const { return k >= begin && k < end; }
  __device__ __forceinline__ void load(int k, uint64_t policy, uint4 &v) const {
    if (is_loaded(k)) v = load_with(base + static_cast<int64_t>(k) * 16, policy);
  }

  // What of chunks first, first + span, ... of a team, and of `after`, the one behind the team's, in the lane that
  // `wants` it, is the row's and was not loaded, is read by element. `team_first`: of the first lane.
  template <int K, class P>
  __device__ __forceinline__ void settle(const P &p, int first, int team_first, int span, bool wants, uint4 (&v)[K],
                                         uint4 &after) const {
    if (kRows == Layout::even || (begin == 0 && end == count)) return;
    if (team_first >= begin && team_first + K * span < end) return;
#pragma unroll 1
    for (int i = 0; i < K + (wants ? 1 : 0); ++i) {
      const int k = first + i * span;
      if (k >= count) break;
      if (is_loaded(k)) continue;
      const uint4 one = gather<T>(row, kRows == Layout::any ? p.logits.col_stride : 1, p.classes,
                                  static_cast<int64_t>(k) * kLanes<T> - lead());
#pragma unroll
      for (int j = 0; j < K; ++j) {
        if (j == i) v[j] = one;
      }
      if (i == K) after = one;
    }
  }

  // Vectors first, first + span, ... of a team: -inf in columns that the row does not have.
  template <int K>
  __device__ __forceinline__ void keep_own(int first, int team_first, int span, uint4 (&v)[K]) const {
    if ((team_first + K * span) * kLanes<T> <= columns) return;
#pragma unroll
    for (int i = 0; i < K; ++i) {
      const int left = columns - (first + i * span) * kLanes<T>;
      if constexpr (kRows == Layout::even) {
        if (left <= 0) v[i] = empty_vector<T>();
      } else {
        v[i] = first_of<T>(v[i], left);
      }
    }
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

// Loads chunks first, first + span, ... of a team in place of those that are used up; those that may not be loaded are
// left to settle(). Nothing but a predicate a load: branches would keep one chunk's work from being done beside the
// next's.
template <typename T, Layout kRows, int K>
struct ChunkRefill {
  uint4 (&v)[K];
  int span;
  int lead, left;  // chunk i may be loaded if i * span >= lead and i * span < left
  const char *from;
  uint64_t policy;

  __device__ __forceinline__ ChunkRefill(const Chunks<T, kRows> &chunks, int first, int span_, uint64_t policy_,
                                         bool on, uint4 (&v_)[K])
      : v(v_),
        span(span_),
        lead(chunks.begin - first),
        left(on ? chunks.end - first : 0),
        from(chunks.base + static_cast<int64_t>(first) * 16),
        policy(policy_) {
    asm("" : "+l"(from));  // computed once
  }

  __device__ __forceinline__ void one(int i) const {
    const bool on = i * span < left && (kRows == Layout::even || i * span >= lead);
    load_if(on, from + static_cast<int64_t>(i * span) * 16, policy, v[i]);
  }
  __device__ __forceinline__ void all() const {
#pragma unroll
    for (int i = 0; i < K; ++i) one(i);
  }
  struct From {
    const ChunkRefill &refill;
    int at;
    __device__ __forceinline__ void one(int i) const { refill.one(at + i); }
  };
  __device__ __forceinline__ From from_chunk(int at) const { return {*this, at}; }
};

// Registers that no load may have filled hold anything; to say so costs nothing.
template <int K>
__device__ __forceinline__ void hold_anything(uint4 (&v)[K]) {
#pragma unroll
  for (int i = 0; i < K; ++i) asm("" : "=r"(v[i].x), "=r"(v[i].y), "=r"(v[i].z), "=r"(v[i].w));
}

struct NoRefillAt {
  __device__ __forceinline__ NoRefill from_chunk(int) const { return {}; }
};

// Adds chunks first, first + span, ... `lane`: of the team; `shifts`: of any team of the warp. `refill`: told of each
// chunk that is used up.
template <typename T, unsigned F, Layout kRows, int K, class Refill, class P>
__device__ __forceinline__ void add_chunks(Partial &part, const P &p, const Chunks<T, kRows> &chunks, uint4 (&v)[K],
                                           const uint4 &after, bool shifts, int first, int lane, int span,
                                           const Refill &refill) {
  static_assert(K % kBatch == 0);
#pragma unroll
  for (int at = 0; at < K; at += kBatch) {
    const int team_first = first - lane + at * span;
    if (K > kBatch && team_first * kLanes<T> >= chunks.columns) {
#pragma unroll
      for (int i = 0; i < kBatch; ++i) refill.from_chunk(at).one(i);
      continue;
    }
    if constexpr (kRows == Layout::even) {
      // Where they are: of the gradient, chunks that the row does not have are not stored.
      uint4(&some)[kBatch] = *reinterpret_cast<uint4(*)[kBatch]>(v + at);
      chunks.keep_own(first + at * span, team_first, span, some);
      add_batch<T, F>(part, some, first + at * span, p.classes, p.math, span, refill.from_chunk(at));
    } else {
      uint4 some[kBatch];
#pragma unroll
      for (int i = 0; i < kBatch; ++i) some[i] = v[at + i];
      if (shifts) {
        const uint4 &next = at + kBatch < K ? v[at + kBatch < K ? at + kBatch : 0] : after;
        if (span == 32) {
          to_vectors(lane, chunks.shift, some, next);
        } else {
#pragma unroll
          for (int i = 0; i < kBatch; ++i) {
            some[i] = shifted(v[at + i], i + 1 < kBatch ? v[at + i + 1] : next, chunks.shift, lane, span);
          }
        }
      }
      chunks.keep_own(first + at * span, team_first, span, some);
      add_batch<T, F>(part, some, first + at * span, p.classes, p.math, span, refill.from_chunk(at));
    }
  }
}

// The gradient of the target, which is stored over what its vector brings to its place.
struct TargetGrad {
  bool mine = false;
  float value = 0.0f;
};

template <typename T, unsigned F, int K, class P>
__device__ __forceinline__ TargetGrad target_of(const P &p, int lead, int first, int span, const uint4 (&v)[K],
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

// The columns of a row that are in no chunk from end to end, which are stored one by one: fewer than kLanes before the
// first of those, and as many behind the last. Where there is padding, what is behind them is left to put_rest().
template <typename T>
struct Ends {
  int head, tail;  // columns [0, head) and from `tail` on
  int count;       // of all
  int rest;        // the chunk that put_rest() begins with

  template <Layout kRows, class P>
  __device__ __forceinline__ Ends(const P &p, const Chunks<T, kRows> &chunks) {
    if constexpr (kRows == Layout::even) {
      head = tail = count = 0;
      rest = chunks.outer;
      return;
    }
    const bool padded = p.vocab != p.classes, has_chunks = chunks.outer >= chunks.inner;
    head = chunks.inner == 0 ? 0 : min(kLanes<T> - chunks.lead(), chunks.columns);
    tail = has_chunks ? chunks.outer * kLanes<T> - chunks.lead() : head;
    count = !padded ? head + chunks.columns - tail : has_chunks ? head : 0;
    rest = has_chunks ? chunks.outer : 0;
  }
  // The i-th of them.
  __device__ __forceinline__ int column(int i) const { return i < head ? i : tail + (i - head); }
};

template <typename G, unsigned F, class P>
__device__ __forceinline__ void put_end(const P &p, G *row, int column, float x, const GradRow &grad) {
  store_as(row + column, grad_of<F>(x, column == grad.target ? grad.shift_target : grad.shift, grad, p.math));
}

// The gradient, which must be plain, of the chunks first, first + span, ... that are the row's from end to end; it lies
// as the logits do. `team_first`: of the first lane. `refill`: told of each chunk that is used up. kTarget: with the
// target's.
template <typename T, typename G, unsigned F, bool kTarget = true, Layout kRows, int K, class Refill, class P>
__device__ __forceinline__ void put_chunks(const P &p, const Chunks<T, kRows> &chunks, int64_t row, int first,
                                           int team_first, int span, const uint4 (&v)[K], const GradRow &grad,
                                           const Refill &refill) {
  constexpr int lanes = kLanes<T>;
  const int lead = kRows == Layout::even ? 0 : chunks.lead();
  G *const out = p.grad_logits.template row<G>(row) - lead;
  const int begin = chunks.inner - first, left = chunks.outer - first;
  TargetGrad target;
  const int target_chunk = grad.target < 0 ? -1 : (static_cast<int>(grad.target) + lead) / lanes;
  if (kTarget && target_chunk >= max(team_first, chunks.inner) &&
      target_chunk < min(team_first + K * span, chunks.outer)) {
    target = target_of<T, F>(p, lead, first, span, v, grad);
  }
  G *at = out + static_cast<int64_t>(first) * lanes;
  asm("" : "+l"(at));  // computed once
#pragma unroll
  for (int i = 0; i < K; ++i) {
    // Also of what is not stored: without a branch one chunk's work is done beside the next's.
    float g[lanes];
#pragma unroll
    for (int lane = 0; lane < lanes; ++lane) g[lane] = grad_of<F>(element<T>(v[i], lane), grad.shift, grad, p.math);
    store_if<lanes>(i * span < left && (kRows == Layout::even || i * span >= begin), at + i * span * lanes, g);
    refill.one(i);
  }
  if (target.mine) store_as(out + grad.target + lead, target.value);
}

// Vectors k, k + step, ... that are before `stop` and the row's, read again: rows whose gradient is not plain, or lies
// otherwise than the logits, and the padding that is beyond the chunks of a team.
template <typename T, typename G, unsigned F, class P>
__device__ __forceinline__ void put_rest(const P &p, int64_t row, int lead, int k, int stop, int step,
                                         const GradRow &grad) {
  const GradWriter<T, G, F> writer(p, row, grad.target, lead);
  const RowReader<T> reader = writer.reader(p, row);
#pragma unroll 1
  for (; k < min(writer.vectors(p), stop); k += step) {
    uint4 one[1] = {empty_vector<T>()};
    if (!grad.zero) reader.load(k, one);
    writer.put_edge(p, k, one[0], grad);
  }
}

}  // namespace xent::cuda
