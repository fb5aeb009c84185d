// SPDX-FileCopyrightText: the libxent authors
// SPDX-License-Identifier: Apache-2.0

// Writing the gradient of a row: read a vector of logits, write a vector of gradients, rounded once.
//
// Vectors are laid so that the stores are aligned; the loads are shifted where logits and gradient are aligned
// differently. Over the logits both are the same vector of the same thread, so nothing is read after it was
// overwritten. Loads of kBatch vectors are in flight before the first store; stores are streaming, as nobody here
// reads them again.
#pragma once

#include "producer.cuh"
#include "rows.cuh"

namespace xent::cuda {

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

// 2^(x * exponent + lift). kAny: with a lift beyond kExactLift too, which is then added only where p is far from 1.
template <bool kAny>
__device__ __forceinline__ float lifted_exp2(float x, float exponent, float lift) {
  if (kAny && lift > kExactLift) {
    const float u = x * exponent;
    if (u > -64.0f) return exp2_approx(u) * exp2_approx(lift);
  }
  return exp2_approx(fmaf(x, exponent, lift));
}

template <unsigned F, bool kAny = false>
__device__ __forceinline__ float grad_of(float x, float shift, const GradRow &grad, const Constants &c) {
  if constexpr ((F & kSoftcap) != 0) {
    const Softcap v = softcap(x, c);
    return v.slope * fmaf(lifted_exp2<kAny>(v.value - grad.m, c.exponent, grad.lift), grad.scale, shift);
  }
  return fmaf(lifted_exp2<kAny>(x - grad.m, c.exponent, grad.lift), grad.scale, shift);
}

// Streaming stores of the gradient of 16 bytes of logits, where `on`: no branch surrounds them.
__device__ __forceinline__ void store_16_if(bool on, void *at, uint32_t a, uint32_t b, uint32_t c, uint32_t d) {
  asm volatile(
      "{\n"
      ".reg .pred on;\n"
      "setp.ne.b32 on, %5, 0;\n"
      "@on st.global.cs.v4.b32 [%0], {%1, %2, %3, %4};\n"
      "}" ::"l"(at),
      "r"(a), "r"(b), "r"(c), "r"(d), "r"(static_cast<uint32_t>(on))
      : "memory");
}
template <int kLanes, typename G>
__device__ __forceinline__ void store_if(bool on, G *at, const float (&g)[kLanes]) {
  if constexpr (sizeof(G) == 2) {
    store_16_if(on, at, pack<G>(g[0], g[1]), pack<G>(g[2], g[3]), pack<G>(g[4], g[5]), pack<G>(g[6], g[7]));
  } else {
#pragma unroll
    for (int i = 0; i < kLanes; i += 4) {
      store_16_if(on, at + i, __float_as_uint(g[i]), __float_as_uint(g[i + 1]), __float_as_uint(g[i + 2]),
                  __float_as_uint(g[i + 3]));
    }
  }
}

// T: logits, G: gradient (T, or float). Few words, for they stay in registers beside the loads: what the ends of a row
// need is computed there.
template <typename T, typename G, unsigned F>
struct GradWriter {
  G *out;            // of column -lead: where the vectors begin
  int lead;          // columns of the first vector before the row
  int begin, count;  // batches that lie in the row from end to end
  int target_batch;

  // With a lead that makes the stores aligned: what the address asks for, or what gradient_fits() has found to suit.
  template <class P>
  __device__ __forceinline__ GradWriter(const P &p, int64_t row, int64_t target)
      : GradWriter(p, row, target, lead_of(p, p.grad_logits.template row<G>(row))) {}
  template <class P>
  __device__ __forceinline__ GradWriter(const P &p, int64_t row, int64_t target, int lead_)
      : out(p.grad_logits.template row<G>(row) - lead_), lead(lead_) {
    const RowReader<T> in = reader(p, row);
    begin = (in.begin + (kBatch * 32) - 1) / (kBatch * 32);
    count = p.grad_logits.col_stride == 1 ? max(0, in.end / (kBatch * 32) - begin) : 0;
    target_batch = static_cast<int>((target + lead) / (kLanes<T> * kBatch * 32));
  }

  template <class P>
  static __device__ __forceinline__ int lead_of(const P &p, const G *at) {
    return p.grad_logits.col_stride == 1 ? static_cast<int>((reinterpret_cast<uintptr_t>(at) & 15) / sizeof(G)) : 0;
  }

  template <class P>
  __device__ __forceinline__ RowReader<T> reader(const P &p, int64_t row) const {
    return RowReader<T>(p.logits.template row<T>(row), p.logits.col_stride, p.classes, lead);
  }
  // Vectors that hold any column, padding included.
  template <class P>
  __device__ __forceinline__ int vectors(const P &p) const {
    return static_cast<int>((p.vocab + lead + kLanes<T> - 1) / kLanes<T>);
  }

  static __device__ __forceinline__ void store_vector(G *at, const float (&g)[kLanes<T>]) {
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

  // A vector that the row may not fill, or whose columns are not adjacent. Columns beyond the classes are padding: 0.
  template <class P>
  __device__ __forceinline__ void put_edge(const P &p, int k, const uint4 &v, const GradRow &grad) const {
    const int64_t first = static_cast<int64_t>(k) * kLanes<T> - lead;
    if (first >= p.vocab) return;
    const bool adjacent = p.logits.col_stride == 1 && p.grad_logits.col_stride == 1;
    if (grad.zero && p.grad_logits.col_stride == 1 && first >= 0 && first + kLanes<T> <= p.vocab) {
      const float g[kLanes<T>] = {};
      store_vector(out + lead + first, g);
      return;
    }
    if (adjacent && first >= 0 && first + kLanes<T> <= p.classes && !grad.zero && grad.plain() &&
        (grad.target < first || grad.target >= first + kLanes<T>)) {
      put_vector(out + lead + first, v, grad, p.math);
      return;
    }
#pragma unroll
    for (int lane = 0; lane < kLanes<T>; ++lane) {
      const int64_t column = first + lane;
      if (column < 0 || column >= p.vocab) continue;
      float g = 0.0f;
      if (column < p.classes && !grad.zero) {
        const float shift = column == grad.target ? grad.shift_target : grad.shift;
        g = grad_of<F, true>(element<T>(v, lane), shift, grad, p.math) * grad.drop;
      }
      store_as(out + lead + column * p.grad_logits.col_stride, g);
    }
  }

  __device__ __forceinline__ void put_vector(G *at, const uint4 &v, const GradRow &grad, const Constants &c) const {
    float g[kLanes<T>];
#pragma unroll
    for (int lane = 0; lane < kLanes<T>; ++lane) g[lane] = grad_of<F>(element<T>(v, lane), grad.shift, grad, c);
    store_vector(at, g);
  }

  // The gradient of a batch whose vectors are in `v`.
  template <class P>
  __device__ __forceinline__ void put(const P &p, int batch, int lane, const uint4 (&v)[kBatch],
                                      const GradRow &grad) const {
    const int first = batch * (kBatch * 32) + lane;
    if (static_cast<unsigned>(batch - begin) < static_cast<unsigned>(count) && grad.plain()) {
      G *const at = out + static_cast<int64_t>(first) * kLanes<T>;
#pragma unroll
      for (int i = 0; i < kBatch; ++i) put_vector(at + i * (32 * kLanes<T>), v[i], grad, p.math);
      if (batch == target_batch) put_target(p, first, v, grad);
    } else {
#pragma unroll 1
      for (int i = 0; i < kBatch; ++i) {
        uint4 one = v[0];
#pragma unroll
        for (int j = 1; j < kBatch; ++j) {
          if (j == i) one = v[j];
        }
        put_edge(p, first + i * 32, one, grad);
      }
    }
  }

  // One element of the row, stored after its vector by the same thread: cheaper than a select in all of them.
  template <class P>
  __device__ __forceinline__ void put_target(const P &p, int first, const uint4 (&v)[kBatch],
                                             const GradRow &grad) const {
    const int64_t at = grad.target + lead - static_cast<int64_t>(first) * kLanes<T>;
    float x = 0.0f;
    bool mine = false;
#pragma unroll
    for (int i = 0; i < kBatch; ++i) {
#pragma unroll
      for (int lane = 0; lane < kLanes<T>; ++lane) {
        if (at != i * 32 * kLanes<T> + lane) continue;
        x = element<T>(v[i], lane);
        mine = true;
      }
    }
    if (mine) store_as(out + lead + grad.target, grad_of<F>(x, grad.shift_target, grad, p.math));
  }

  template <class P>
  __device__ __forceinline__ void put_zero(const P &p, int batch, int lane) const {
    const int first = batch * (kBatch * 32) + lane;
#pragma unroll 1
    for (int k = first; k < first + (kBatch * 32) && k < vectors(p); k += 32) {
      const int64_t column = static_cast<int64_t>(k) * kLanes<T> - lead;
      if (p.grad_logits.col_stride == 1 && column >= 0 && column + kLanes<T> <= p.vocab) {
        const float g[kLanes<T>] = {};
        store_vector(out + lead + column, g);
        continue;
      }
#pragma unroll 1
      for (int64_t i = max(column, int64_t{0}); i < min(column + kLanes<T>, p.vocab); ++i) {
        store_as(out + lead + i * p.grad_logits.col_stride, 0.0f);
      }
    }
  }

  // Reads the logits, unless the gradient is zero.
  template <class P>
  __device__ __forceinline__ void write(const P &p, int64_t row, int batch, int lane, const GradRow &grad) const {
    if (grad.zero) {
      put_zero(p, batch, lane);
    } else {
      uint4 v[kBatch];
      reader(p, row).load(batch * (kBatch * 32) + lane, v);
      put(p, batch, lane, v, grad);
    }
  }
};

template <typename T, typename G, class P>
__device__ __forceinline__ void write_zeros_as(const P &p, int64_t row, const Share &share) {
  const GradWriter<T, G, kPlain> writer(p, row, 0);
  for (int batch = share.warp; batch * (kBatch * 32) < writer.vectors(p); batch += share.warps) {
    writer.put_zero(p, batch, share.lane);
  }
}

// A warp's share of the gradient of a row that does not count.
template <typename T, class P>
__device__ __forceinline__ void write_zeros(const P &p, int64_t row, const Share &share) {
  if (sizeof(T) == 4 || p.grad_logits.type != Element::f32) {
    write_zeros_as<T, T>(p, row, share);
  } else {
    write_zeros_as<T, float>(p, row, share);
  }
}

}  // namespace xent::cuda
