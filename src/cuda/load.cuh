// SPDX-FileCopyrightText: the libxent authors
// SPDX-License-Identifier: Apache-2.0

// Reading a row in vectors of 16 bytes. A misaligned row is read through two aligned loads (the second hits L1) and a
// funnel shift; the vectors at the ends of a row, and every vector of a row whose columns are not adjacent, are read by
// element: no byte outside the row is touched. Neighbouring vectors of one thread are a warp's width apart, a constant,
// so that a batch of them needs one address and immediate offsets, and what a warp reads at once is contiguous.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cstdint>

namespace xent::cuda {

using bf16 = __nv_bfloat16;
using f16 = __half;

template <typename T>
inline constexpr int kLanes = 16 / static_cast<int>(sizeof(T));

__device__ __forceinline__ float to_float(float x) { return x; }
__device__ __forceinline__ float to_float(f16 x) { return __half2float(x); }
__device__ __forceinline__ float to_float(bf16 x) { return __bfloat162float(x); }

__device__ __forceinline__ uint32_t word_of(const uint4 &v, int i) {
  return i == 0 ? v.x : i == 1 ? v.y : i == 2 ? v.z : v.w;
}

// Element `lane` of a vector; `lane` is a compile-time constant after unrolling.
template <typename T>
__device__ __forceinline__ float element(const uint4 &v, int lane);
template <>
__device__ __forceinline__ float element<float>(const uint4 &v, int lane) {
  return __uint_as_float(word_of(v, lane));
}
template <>
__device__ __forceinline__ float element<bf16>(const uint4 &v, int lane) {
  const uint32_t word = word_of(v, lane / 2);
  return __uint_as_float(lane % 2 == 0 ? word << 16 : word & 0xffff0000u);
}
template <>
__device__ __forceinline__ float element<f16>(const uint4 &v, int lane) {
  const uint32_t word = word_of(v, lane / 2);
  return __half2float(__ushort_as_half(static_cast<unsigned short>(lane % 2 == 0 ? word & 0xffffu : word >> 16)));
}

// A vector of -inf: columns that do not exist.
template <typename T>
__device__ __forceinline__ uint4 empty_vector();
template <>
__device__ __forceinline__ uint4 empty_vector<float>() {
  return make_uint4(0xff800000u, 0xff800000u, 0xff800000u, 0xff800000u);
}
template <>
__device__ __forceinline__ uint4 empty_vector<bf16>() {
  return make_uint4(0xff80ff80u, 0xff80ff80u, 0xff80ff80u, 0xff80ff80u);
}
template <>
__device__ __forceinline__ uint4 empty_vector<f16>() {
  return make_uint4(0xfc00fc00u, 0xfc00fc00u, 0xfc00fc00u, 0xfc00fc00u);
}

__device__ __forceinline__ uint32_t max_pair(uint32_t a, uint32_t b, bf16) {
  const __nv_bfloat162 m =
      __hmax2(*reinterpret_cast<const __nv_bfloat162 *>(&a), *reinterpret_cast<const __nv_bfloat162 *>(&b));
  return *reinterpret_cast<const uint32_t *>(&m);
}
__device__ __forceinline__ uint32_t max_pair(uint32_t a, uint32_t b, f16) {
  const __half2 m = __hmax2(*reinterpret_cast<const __half2 *>(&a), *reinterpret_cast<const __half2 *>(&b));
  return *reinterpret_cast<const uint32_t *>(&m);
}
__device__ __forceinline__ uint32_t max_pair(uint32_t a, uint32_t b, float) {
  return __float_as_uint(fmaxf(__uint_as_float(a), __uint_as_float(b)));
}

// Largest element of a batch; NaN only where all are NaN.
template <typename T, int N>
__device__ __forceinline__ float largest(const uint4 (&v)[N]) {
  uint4 m = v[0];
#pragma unroll
  for (int i = 1; i < N; ++i) {
    m.x = max_pair(m.x, v[i].x, T());
    m.y = max_pair(m.y, v[i].y, T());
    m.z = max_pair(m.z, v[i].z, T());
    m.w = max_pair(m.w, v[i].w, T());
  }
  m.x = max_pair(max_pair(m.x, m.y, T()), max_pair(m.z, m.w, T()), T());
  if constexpr (sizeof(T) == 4) return element<T>(m, 0);
  return fmaxf(element<T>(m, 0), element<T>(m, 1));
}

// The 16 bytes that begin `bytes` into the 32 bytes of a, b.
__device__ __forceinline__ uint4 funnel(const uint4 &a, const uint4 &b, uint32_t bytes) {
  uint32_t w[6] = {a.x, a.y, a.z, a.w, b.x, b.y};
  if (bytes & 8) {
    w[0] = a.z, w[1] = a.w, w[2] = b.x, w[3] = b.y, w[4] = b.z, w[5] = b.w;
  }
  if (bytes & 4) {
    w[0] = w[1], w[1] = w[2], w[2] = w[3], w[3] = w[4], w[4] = w[5];
  }
  const uint32_t bits = (bytes & 3) * 8;
  return make_uint4(__funnelshift_r(w[0], w[1], bits), __funnelshift_r(w[1], w[2], bits),
                    __funnelshift_r(w[2], w[3], bits), __funnelshift_r(w[3], w[4], bits));
}

// Columns first .. first + kLanes - 1 by element; those outside the row are -inf.
template <typename T>
__device__ __forceinline__ uint4 gather(const T *row, int64_t stride, int64_t columns, int64_t first) {
  const uint4 v = empty_vector<T>();
  uint32_t words[4] = {v.x, v.y, v.z, v.w};
#pragma unroll
  for (int lane = 0; lane < kLanes<T>; ++lane) {
    const int64_t column = first + lane;
    if (column < 0 || column >= columns) continue;
    if constexpr (sizeof(T) == 4) {
      words[lane] = *reinterpret_cast<const uint32_t *>(row + column * stride);
    } else {
      const uint32_t bits = *reinterpret_cast<const unsigned short *>(row + column * stride);
      words[lane / 2] =
          lane % 2 == 0 ? (words[lane / 2] & 0xffff0000u) | bits : (words[lane / 2] & 0xffffu) | (bits << 16);
    }
  }
  return make_uint4(words[0], words[1], words[2], words[3]);
}

// The first `count` elements of a vector (any number, also below 0); the others become -inf.
template <typename T>
__device__ __forceinline__ uint4 first_of(const uint4 &v, int count) {
  const uint4 empty = empty_vector<T>();
  uint32_t words[4];
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const int bits = max(count * static_cast<int>(sizeof(T) * 8) - 32 * i, 0);
    const uint32_t mask = __funnelshift_lc(0xffffffffu, 0u, static_cast<uint32_t>(bits));  // of 32 bits at most
    words[i] = (word_of(v, i) & mask) | (word_of(empty, i) & ~mask);
  }
  return make_uint4(words[0], words[1], words[2], words[3]);
}

// Columns [0, columns) of one row, seen as vectors that begin at column -lead (lead < kLanes, chosen so that the stores
// of a gradient are aligned).
template <typename T>
struct RowReader {
  const T *row;
  int64_t stride;
  int64_t columns;
  const uint4 *base;  // aligned; vector k begins `shift` bytes into base[k]
  uint32_t shift;
  int lead;
  int begin, end;  // vectors that aligned loads inside the row can give
  int vectors;     // that hold any column

  __device__ __forceinline__ RowReader(const T *row_, int64_t stride_, int64_t columns_, int lead_)
      : row(row_), stride(stride_), columns(columns_), base(nullptr), shift(0), lead(lead_), begin(0), end(0) {
    constexpr int lanes = kLanes<T>;
    vectors = static_cast<int>((columns + lead + lanes - 1) / lanes);
    if (stride != 1) return;
    const uintptr_t start = reinterpret_cast<uintptr_t>(row) - static_cast<uintptr_t>(lead) * sizeof(T);
    shift = static_cast<uint32_t>(start & 15);
    base = reinterpret_cast<const uint4 *>(start & ~static_cast<uintptr_t>(15));
    begin = lead == 0 ? 0 : 1;
    if (shift == 0) {
      end = static_cast<int>((columns + lead) / lanes);
    } else {
      begin = lead * static_cast<int>(sizeof(T)) + static_cast<int>(shift) <= 16 ? 1 : 2;
      // base[k + 1] must end inside the row: 16 (k + 2) - shift <= (columns + lead) * sizeof(T)
      end = static_cast<int>(((columns + lead) * static_cast<int64_t>(sizeof(T)) + shift) / 16 - 1);
    }
    if (end < begin) end = begin;
  }

  __device__ __forceinline__ bool inside(int k) const { return k >= begin && k < end; }
  __device__ __forceinline__ int64_t first_column(int k) const { return static_cast<int64_t>(k) * kLanes<T> - lead; }

  __device__ __forceinline__ uint4 by_element(int k) const { return gather<T>(row, stride, columns, first_column(k)); }

  template <int N>
  __device__ __forceinline__ bool all_inside(int first) const {
    return first >= begin && first + (N - 1) * 32 < end;
  }

  // Vectors first, first + 32, ...: all loads are issued before the first is used. Columns outside the row are -inf.
  template <int N>
  __device__ __forceinline__ void load(int first, uint4 (&v)[N]) const {
    const uint4 *at = base + first;
    if (all_inside<N>(first)) {
#pragma unroll
      for (int i = 0; i < N; ++i) v[i] = at[i * 32];
      if (shift != 0) {
#pragma unroll
        for (int i = 0; i < N; ++i) v[i] = funnel(v[i], at[i * 32 + 1], shift);
      }
      return;
    }
#pragma unroll
    for (int i = 0; i < N; ++i) {
      v[i] = empty_vector<T>();
      if (!inside(first + i * 32)) continue;
      v[i] = at[i * 32];
      if (shift != 0) v[i] = funnel(v[i], at[i * 32 + 1], shift);
    }
#pragma unroll 1
    for (int i = 0; i < N; ++i) {
      const int k = first + i * 32;
      if (k >= vectors || inside(k)) continue;
      const uint4 other = by_element(k);
#pragma unroll
      for (int j = 0; j < N; ++j) {
        if (j == i) v[j] = other;
      }
    }
  }
};

}  // namespace xent::cuda
