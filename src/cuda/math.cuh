// SPDX-FileCopyrightText: the libxent authors
// SPDX-License-Identifier: Apache-2.0

// Scalar arithmetic of the CUDA kernels. Compiled with -fmad=false: a fused multiply-add stands only where it is
// written, so that the same function gives the same bits in whichever kernel it is inlined.
#pragma once

#include <cuda_runtime.h>

#include <cfloat>
#include <cstdint>

namespace xent::cuda {

// What an accumulation tracks besides the maximum and the sum of exponentials.
enum Feature : unsigned {
  kPlain = 0,
  kSum = 1,      // sum of (v - m), for label smoothing
  kEntropy = 2,  // sum of u * exp(u)
  kArgmax = 4,   // lowest index of the largest logit
  kSoftcap = 8,  // v = softcap(x) instead of x
};

// Per-call constants. v is x, or softcap(x) with softcap; z = unit * v.
struct Constants {
  float exponent;    // unit * log2(e): exp(z_i - m) = 2^((v_i - max v) * exponent)
  float unit;        // logit_scale, or 1 with softcap
  float sum_scale;   // power of two <= 1 / classes: keeps the sum of (v - m) finite whatever the logits
  float mean_scale;  // unit / (classes * sum_scale)
  float softcap;
  float softcap_in;  // logit_scale / softcap
  float chain;       // logit_scale: dz/dx, with softcap also times 1 - tanh^2
  float chain_rest;  // what is left of it to the row's coefficients: with softcap 4 * chain * 2^-slope_lift
  float slope_lift;  // exponent of a large logit_scale that softcap()'s slope carries, not to flush to 0; else 0
  float slope_drop;  // 2^-slope_lift
  float smoothing;
  float one_minus_smoothing;
  float smoothing_per_class;
  float z_loss;
};

inline constexpr float kLn2 = 0.693147180559945309417f;
inline constexpr float kLog2e = 1.44269504088896340736f;

// 2 units in the last place, results below 2^-126 flushed to 0 (the bar leaves 2^-120 of the upstream gradient).
__device__ __forceinline__ float exp2_approx(float x) {
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

__device__ __forceinline__ float reciprocal(float x) {
  float y;
  asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return fmaf(y, fmaf(-x, y, 1.0f), y);
}

struct Softcap {
  float value;  // softcap * tanh(logit_scale * x / softcap)
  float slope;  // (1 - tanh^2) / 4 * 2^slope_lift, as q / (1 + q)^2: 1 - value^2 would cancel near the cap
};

// tanh |y| = 1 - 2q / (1 + q), q = exp(-2 |y|), loses digits of a small y; there the Taylor series is exact to 1e-8.
__device__ __forceinline__ Softcap softcap(float x, const Constants &c) {
  const float y = x * c.softcap_in;
  const float magnitude = fabsf(y);
  const float lifted_q = exp2_approx(fmaf(magnitude, -2.0f * kLog2e, c.slope_lift));
  const float q = lifted_q * c.slope_drop;
  const float r = reciprocal(1.0f + q);
  const float far = fmaf(-2.0f * q, r, 1.0f);
  const float y2 = magnitude * magnitude;
  float series = fmaf(y2, 62.0f / 2835.0f, -17.0f / 315.0f);
  series = fmaf(y2, series, 2.0f / 15.0f);
  series = fmaf(y2, series, -1.0f / 3.0f);
  const float near = fmaf(magnitude * y2, series, magnitude);
  const float tanh = magnitude < 0.25f ? near : far;  // NaN takes `far`, which is NaN
  return {c.softcap * copysignf(tanh, y), lifted_q * r * r};
}

template <unsigned F>
__device__ __forceinline__ float value_of(float x, const Constants &c) {
  if constexpr ((F & kSoftcap) != 0) return softcap(x, c).value;
  return x;
}

// A part of a row. m is -FLT_MAX, not -inf, where nothing finite was seen, so that no difference of maxima is NaN;
// such a part has d = 0 unless a logit really was -FLT_MAX.
struct Partial {
  float m = -FLT_MAX;
  float d = 0.0f;
  float s = 0.0f;  // sum of (v - m) * sum_scale
  float n = 0.0f;  // columns in s
  float e = 0.0f;  // sum of u * 2^u, u = (v - m) * exponent
  float x = -INFINITY;
  int64_t i = INT64_MAX;
};

template <unsigned F>
inline constexpr int kPartialWords = 2 + ((F & kSum) ? 2 : 0) + ((F & kEntropy) ? 1 : 0) + ((F & kArgmax) ? 3 : 0);

// Brings `part` to the maximum m >= part.m.
template <unsigned F>
__device__ __forceinline__ void rescale(Partial &part, float m, const Constants &c) {
  const float delta = (part.m - m) * c.exponent;
  const float factor = exp2_approx(delta);
  if constexpr ((F & kEntropy) != 0) {
    part.e = factor == 0.0f ? 0.0f : factor * fmaf(delta, part.d, part.e);  // 0 * inf is 0
  }
  if constexpr ((F & kSum) != 0) {
    const float shift = fmaf(part.m, c.sum_scale, -(m * c.sum_scale));
    if (part.n != 0.0f) part.s = fmaf(part.n, shift, part.s);
  }
  part.d = part.d * factor;
  part.m = m;
}

// a += b, both rescaled to one maximum. The argmax of equal logits is the lower index, whatever the order.
template <unsigned F>
__device__ __forceinline__ void add_rescaled(Partial &a, const Partial &b) {
  a.d = a.d + b.d;
  if constexpr ((F & kSum) != 0) {
    a.s = a.s + b.s;
    a.n = a.n + b.n;
  }
  if constexpr ((F & kEntropy) != 0) a.e = a.e + b.e;
  if constexpr ((F & kArgmax) != 0) {
    if (b.x > a.x || (b.x == a.x && b.i < a.i)) {
      a.x = b.x;
      a.i = b.i;
    }
  }
}

// Sum of a compile-time number of partials: one maximum, one rescale of each, then balanced trees.
template <unsigned F, int N>
__device__ __forceinline__ Partial merge_all(Partial (&parts)[N], const Constants &c) {
  float m = parts[0].m;
#pragma unroll
  for (int i = 1; i < N; ++i) m = fmaxf(m, parts[i].m);
#pragma unroll
  for (int i = 0; i < N; ++i) rescale<F>(parts[i], m, c);
#pragma unroll
  for (int width = N / 2; width > 0; width /= 2) {
#pragma unroll
    for (int i = 0; i < width; ++i) add_rescaled<F>(parts[i], parts[i + width]);
  }
  return parts[0];
}

// Sum over `width` neighbouring lanes (a power of two), left in the first of them, always by the same tree.
template <unsigned F>
__device__ __forceinline__ Partial merge_lanes(Partial part, int width, const Constants &c) {
  float m = part.m;
  for (int distance = width / 2; distance > 0; distance /= 2) {
    m = fmaxf(m, __shfl_xor_sync(0xffffffffu, m, distance));
  }
  rescale<F>(part, m, c);
  for (int distance = width / 2; distance > 0; distance /= 2) {
    Partial other;
    other.d = __shfl_down_sync(0xffffffffu, part.d, distance);
    if constexpr ((F & kSum) != 0) {
      other.s = __shfl_down_sync(0xffffffffu, part.s, distance);
      other.n = __shfl_down_sync(0xffffffffu, part.n, distance);
    }
    if constexpr ((F & kEntropy) != 0) other.e = __shfl_down_sync(0xffffffffu, part.e, distance);
    if constexpr ((F & kArgmax) != 0) {
      other.x = __shfl_down_sync(0xffffffffu, part.x, distance);
      other.i = __shfl_down_sync(0xffffffffu, part.i, distance);
    }
    add_rescaled<F>(part, other);
  }
  return part;
}

// What that lane has.
template <unsigned F>
__device__ __forceinline__ Partial from_lane(const Partial &part, int lane) {
  Partial all;
  all.m = __shfl_sync(0xffffffffu, part.m, lane);
  all.d = __shfl_sync(0xffffffffu, part.d, lane);
  if constexpr ((F & kSum) != 0) {
    all.s = __shfl_sync(0xffffffffu, part.s, lane);
    all.n = __shfl_sync(0xffffffffu, part.n, lane);
  }
  if constexpr ((F & kEntropy) != 0) all.e = __shfl_sync(0xffffffffu, part.e, lane);
  if constexpr ((F & kArgmax) != 0) {
    all.x = __shfl_sync(0xffffffffu, part.x, lane);
    all.i = __shfl_sync(0xffffffffu, part.i, lane);
  }
  return all;
}

// Words of one partial, `pitch` apart.
template <unsigned F>
__device__ __forceinline__ void store_partial(float *out, int pitch, const Partial &part) {
  out[0] = part.m;
  out[pitch] = part.d;
  int at = 2;
  if constexpr ((F & kSum) != 0) {
    out[pitch * at++] = part.s;
    out[pitch * at++] = part.n;
  }
  if constexpr ((F & kEntropy) != 0) out[pitch * at++] = part.e;
  if constexpr ((F & kArgmax) != 0) {
    out[pitch * at++] = part.x;
    out[pitch * at++] = __int_as_float(static_cast<int>(part.i & 0xffffffff));
    out[pitch * at++] = __int_as_float(static_cast<int>(part.i >> 32));
  }
}

template <unsigned F>
__device__ __forceinline__ Partial load_partial(const float *in, int pitch) {
  Partial part;
  part.m = in[0];
  part.d = in[pitch];
  int at = 2;
  if constexpr ((F & kSum) != 0) {
    part.s = in[pitch * at++];
    part.n = in[pitch * at++];
  }
  if constexpr ((F & kEntropy) != 0) part.e = in[pitch * at++];
  if constexpr ((F & kArgmax) != 0) {
    part.x = in[pitch * at++];
    const int64_t low = static_cast<uint32_t>(__float_as_int(in[pitch * at++]));
    part.i = (static_cast<int64_t>(__float_as_int(in[pitch * at++])) << 32) | low;
  }
  return part;
}

}  // namespace xent::cuda
