// SPDX-FileCopyrightText: the libxent authors
// SPDX-License-Identifier: Apache-2.0

// Writing the gradient of a row: read a vector of logits, write a vector of gradients, rounded once.
//
// Vectors are laid so that the stores are aligned; the loads are shifted where logits and gradient are aligned
// differently. Over the logits both are the same vector of the same thread, so nothing is read after it was
// overwritten. Loads of kDepth vectors are in flight before the first store; stores are streaming, as nobody here
// reads them again.
#pragma once

#include "rows.cuh"

namespace xent::cuda {

inline constexpr int kDepth = 4;

template <typename T>
__device__ __forceinline__ uint32_t pack(float low, float high);
template <>
__device__ __forceinline__ uint32_t pack<bf16>(float low, float high) {
  const __nv_bfloat162 pair = __floats2bfloat162_rn(low, high);
  return *reinterpret_cast<const uint32_t *>(&pair);
}
template <>
__device__ __forceinline__ uint32_t pack<f16>(float low, float high) {
  const __half2 pair = __floats2half2_rn(low, high);
  return *reinterpret_cast<const uint32_t *>(&pair);
}

__device__ __forceinline__ void store_as(float *out, float value) { *out = value; }
__device__ __forceinline__ void store_as(bf16 *out, float value) { *out = __float2bfloat16_rn(value); }
__device__ __forceinline__ void store_as(f16 *out, float value) { *out = __float2half_rn(value); }

template <unsigned F>
__device__ __forceinline__ float grad_of(float x, float shift, const GradRow &grad, const Constants &c) {
  if constexpr ((F & kSoftcap) != 0) {
    const Softcap v = softcap(x, c);
    return v.factor * fmaf(exp2_approx(fmaf(v.value - grad.m, c.exponent, grad.lift)), grad.scale, shift);
  }
  return fmaf(exp2_approx(fmaf(x - grad.m, c.exponent, grad.lift)), grad.scale, shift);
}

// T: logits, G: gradient (T, or float).
template <typename T, typename G, unsigned F>
struct GradWriter {
  G *out;
  int64_t out_stride;
  int64_t vocab;
  RowReader<T> in;
  int vectors;  // that hold any column, padding included

  int target_vector, target_lane;

  __device__ __forceinline__ GradWriter(const Params &p, int64_t row, int64_t target)
      : out(p.grad_logits.row<G>(row)),
        out_stride(p.grad_logits.col_stride),
        vocab(p.vocab),
        in(p.logits.row<T>(row), out_stride == 1 ? p.logits.col_stride : 0, p.classes, lead_of(out, out_stride)) {
    in.stride = p.logits.col_stride;
    vectors = static_cast<int>((vocab + in.lead + kLanes<T> - 1) / kLanes<T>);
    aim(target);
  }

  __device__ __forceinline__ void aim(int64_t target) {
    target_vector = static_cast<int>((target + in.lead) / kLanes<T>);
    target_lane = static_cast<int>((target + in.lead) % kLanes<T>);
  }

  static __device__ __forceinline__ int lead_of(const G *out, int64_t stride) {
    return stride == 1 ? static_cast<int>((reinterpret_cast<uintptr_t>(out) & 15) / sizeof(G)) : 0;
  }

  __device__ __forceinline__ void store_vector(int k, const float (&g)[kLanes<T>]) const {
    G *at = out + in.first_column(k);
    if constexpr (sizeof(G) == 2) {
      __stcs(reinterpret_cast<uint4 *>(at),
             make_uint4(pack<G>(g[0], g[1]), pack<G>(g[2], g[3]), pack<G>(g[4], g[5]), pack<G>(g[6], g[7])));
    } else {
#pragma unroll
      for (int lane = 0; lane < kLanes<T>; lane += 4) {
        __stcs(reinterpret_cast<float4 *>(at + lane), make_float4(g[lane], g[lane + 1], g[lane + 2], g[lane + 3]));
      }
    }
  }

  __device__ __forceinline__ void by_element(int k, const GradRow &grad, const Constants &c) const {
#pragma unroll 1
    for (int lane = 0; lane < kLanes<T>; ++lane) {
      const int64_t column = in.first_column(k) + lane;
      if (column < 0 || column >= vocab) continue;
      float g = 0.0f;
      if (column < in.columns && !grad.zero) {
        g = grad_of<F>(to_float(in.row[column * in.stride]), column == grad.target ? grad.shift_target : grad.shift,
                       grad, c);
      }
      store_as(out + column * out_stride, g);
    }
  }

  // Vectors first, first + kStep, ... (kDepth of them) of a row whose gradient is not all zero.
  __device__ __forceinline__ void write(int first, const GradRow &grad, const Constants &c) const {
    uint4 v[kDepth];
    const bool all_inside = in.load_inside(first, v);
#pragma unroll
    for (int i = 0; i < kDepth; ++i) {
      const int k = first + i * kStep;
      if (all_inside || in.inside(k)) {
        float g[kLanes<T>];
#pragma unroll
        for (int lane = 0; lane < kLanes<T>; ++lane) g[lane] = grad_of<F>(element<T>(v[i], lane), grad.shift, grad, c);
        if (k == target_vector) {  // one vector of the row: cheaper than a select in every element
#pragma unroll
          for (int lane = 0; lane < kLanes<T>; ++lane) {
            if (lane == target_lane) g[lane] = grad_of<F>(element<T>(v[i], lane), grad.shift_target, grad, c);
          }
        }
        store_vector(k, g);
      } else if (k < vectors) {
        by_element(k, grad, c);
      }
    }
  }

  __device__ __forceinline__ void write_zero(int first, const Constants &c) const {
    const GradRow zero = {true};
#pragma unroll
    for (int i = 0; i < kDepth; ++i) {
      const int k = first + i * kStep;
      const int64_t column = in.first_column(k);
      if (out_stride == 1 && column >= 0 && column + kLanes<T> <= vocab) {
        const float g[kLanes<T>] = {};
        store_vector(k, g);
      } else if (k < vectors) {
        by_element(k, zero, c);
      }
    }
  }
};

}  // namespace xent::cuda
