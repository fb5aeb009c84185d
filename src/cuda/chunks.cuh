// SPDX-FileCopyrightText: the libxent authors
// SPDX-License-Identifier: Apache-2.0

// Chunks of a row in the registers of a team of lanes: lane l has the chunks l, l + span, ... of a stretch, as they lie
// in memory. From them come both the vectors that are added up, shifted where the row is misaligned, and the gradient,
// stored where the chunk was.
#pragma once

#include "accumulate.cuh"
#include "gradient.cuh"

namespace xent::cuda {

// kEven: rows one stride apart, of whole aligned chunks, without padding, and with a gradient of their type that lies
// so too: nearly every call.
template <typename T, bool kEven>
__device__ __forceinline__ T *row_of(const Tensor &tensor, int64_t row) {
  return kEven ? static_cast<T *>(tensor.data) + row * tensor.stride[0] : tensor.row<T>(row);
}

// Chunks first, first + span, ... as they lie, -inf in the bytes that are not the row's. `after`: where the first lane
// of a team needs one more, the chunk behind the team's.
template <typename T, bool kEven, int K>
__device__ __forceinline__ void load_chunks_of(const Params &p, int64_t row, uint32_t shift, int first, int span,
                                               bool one_more, uint64_t policy, uint4 (&v)[K], uint4 &after) {
  const T *const at = row_of<T, kEven>(p.logits, row);
  if constexpr (kEven) {
    const uint4 *const from = reinterpret_cast<const uint4 *>(at) + first;
    const int left = static_cast<int>(p.classes / kLanes<T>) - first;
#pragma unroll
    for (int i = 0; i < K; ++i) {
      v[i] = empty_vector<T>();
      if (i * span < left) v[i] = load_with(from + i * span, policy);
    }
    return;
  }
  const int begin = shift == 0 ? 0 : 1;
  const int end =
      p.logits.col_stride == 1 ? static_cast<int>((shift + p.classes * static_cast<int64_t>(sizeof(T))) / 16) : 0;
  const char *const from = reinterpret_cast<const char *>(at) - shift + static_cast<int64_t>(first) * 16;
#pragma unroll
  for (int i = 0; i < K; ++i) {
    const int k = first + i * span;
    v[i] = empty_vector<T>();
    if (k >= begin && k < end) v[i] = load_with(from + static_cast<int64_t>(i * span) * 16, policy);
  }
  after = empty_vector<T>();
  const int last = first + K * span;
  if (one_more && last >= begin && last < end) after = load_with(from + static_cast<int64_t>(K * span) * 16, policy);
  // By element: the chunks at the row's ends, or where columns are not adjacent all of them.
  const int chunks = static_cast<int>((shift / sizeof(T) + p.classes + kLanes<T> - 1) / kLanes<T>);
  if (begin == 0 && end == chunks) return;
#pragma unroll 1
  for (int i = 0; i < K + (one_more ? 1 : 0); ++i) {
    const int k = first + i * span;
    if (k >= chunks) break;
    if (k >= begin && k < end) continue;
    const int64_t column = static_cast<int64_t>(k) * kLanes<T> - static_cast<int>(shift / sizeof(T));
    const uint4 one = gather<T>(at, p.logits.col_stride, p.classes, column);
#pragma unroll
    for (int j = 0; j < K; ++j) {
      if (j == i) v[j] = one;
    }
    if (i == K) after = one;
  }
}

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

// `lane`: of the team; `shifts`: of any team of the warp.
template <typename T, unsigned F, int K>
__device__ __forceinline__ void add_chunks(Partial &part, const Params &p, const uint4 (&v)[K], const uint4 &after,
                                           uint32_t shift, bool shifts, int first, int lane, int span) {
  static_assert(K % kBatch == 0);
#pragma unroll
  for (int at = 0; at < K; at += kBatch) {
    if (K > kBatch && static_cast<int64_t>(first - lane + at * span) * kLanes<T> >= p.classes) break;
    uint4 some[kBatch];
#pragma unroll
    for (int i = 0; i < kBatch; ++i) some[i] = v[at + i];
    if (shifts) {
#pragma unroll
      for (int i = 0; i < kBatch; ++i) {
        some[i] = shifted(v[at + i], at + i + 1 < K ? v[at + i + 1 < K ? at + i + 1 : 0] : after, shift, lane, span);
      }
    }
    add_batch<T, F>(part, some, first + at * span, p.classes, p.math, span, NoRefill());
  }
}

// A target's gradient, over what its vector has brought to its place.
template <typename T, unsigned F, int K, typename G>
__device__ __forceinline__ void put_target_of(const Params &p, G *out, int lead, int first, int span,
                                              const uint4 (&v)[K], const GradRow &grad) {
  const int column = static_cast<int>(grad.target) + lead;
  const int k = column / kLanes<T> - first;
  if (grad.target < 0 || k < 0 || k >= K * span || k % span != 0) return;
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
  store_as(out + column, grad_of<F>(x, grad.shift_target, grad, p.math));
}

// The gradient of the chunks first, first + span, ... of a row of whole chunks.
template <typename T, unsigned F, int K>
__device__ __forceinline__ void put_even(const Params &p, int64_t row, int first, int span, const uint4 (&v)[K],
                                         const GradRow &grad) {
  T *const out = row_of<T, true>(p.grad_logits, row);
  T *const at = out + first * kLanes<T>;
  const int left = static_cast<int>(p.classes / kLanes<T>) - first;
  if (grad.zero || !grad.plain()) {
    const GradWriter<T, T, F> writer(p, row, grad.target, 0);
#pragma unroll 1
    for (int i = 0; i * span < left && i < K; ++i) {
      uint4 one = v[0];
#pragma unroll
      for (int j = 1; j < K; ++j) {
        if (j == i) one = v[j];
      }
      writer.put_edge(p, first + i * span, one, grad);
    }
    return;
  }
#pragma unroll
  for (int i = 0; i < K; ++i) {
    if (i * span >= left) break;
    float g[kLanes<T>];
#pragma unroll
    for (int lane = 0; lane < kLanes<T>; ++lane) g[lane] = grad_of<F>(element<T>(v[i], lane), grad.shift, grad, p.math);
    GradWriter<T, T, F>::store_vector(at + i * span * kLanes<T>, g);
  }
  put_target_of<T, F>(p, out, 0, first, span, v, grad);
}

// The gradient of the chunks first, first + span, ... of a row whose gradient lies as its logits do. `team_first`: of
// the first lane.
template <typename T, typename G, unsigned F, int K>
__device__ __forceinline__ void put_chunks(const Params &p, int64_t row, uint32_t shift, int first, int team_first,
                                           int span, const uint4 (&v)[K], const GradRow &grad) {
  constexpr int lanes = kLanes<T>;
  const int lead = static_cast<int>(shift / sizeof(T));
  G *const out = p.grad_logits.row<G>(row) - lead;
  const int begin = lead == 0 ? 0 : 1;
  const int end = grad.plain() ? static_cast<int>((p.classes + lead) / lanes) : begin;
  G *const at = out + static_cast<int64_t>(first) * lanes;
  if (!grad.zero) {
#pragma unroll
    for (int i = 0; i < K; ++i) {
      const int k = first + i * span;
      if (k < begin || k >= end) continue;
      float g[lanes];
#pragma unroll
      for (int lane = 0; lane < lanes; ++lane) g[lane] = grad_of<F>(element<T>(v[i], lane), grad.shift, grad, p.math);
      GradWriter<T, G, F>::store_vector(at + i * span * lanes, g);
    }
    if (grad.target + lead >= begin * lanes && grad.target + lead < static_cast<int64_t>(end) * lanes) {
      put_target_of<T, F>(p, out, lead, first, span, v, grad);
    }
  }
  // The row's ends, and rows that are not plain.
  const int vectors = static_cast<int>((p.vocab + lead + lanes - 1) / lanes);
  const bool zero = grad.zero;
  if (!zero && (team_first > 0 || begin == 0) && min(team_first + K * span, vectors) <= end) return;
  const GradWriter<T, G, F> writer(p, row, grad.target, lead);
#pragma unroll 1
  for (int i = 0; i < K; ++i) {
    const int k = first + i * span;
    if (k >= vectors) break;
    if (!zero && k >= begin && k < end) continue;
    uint4 one = v[0];
#pragma unroll
    for (int j = 1; j < K; ++j) {
      if (j == i) one = v[j];
    }
    writer.put_edge(p, k, one, grad);
  }
}

// Vectors k, k + step, ... to the row's end, read again: where the gradient lies otherwise than the logits, and what is
// beyond the chunks of a team (padding, and the chunk that a misaligned row has more than vectors).
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
