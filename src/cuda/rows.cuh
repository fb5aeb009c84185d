// SPDX-FileCopyrightText: the libxent authors
// SPDX-License-Identifier: Apache-2.0

// From a row's partial to its outputs, and from its statistics to the coefficients of its gradient.
#pragma once

#include "partial.cuh"

namespace xent::cuda {

// 0 where the row has none here.
template <typename T, class P>
__device__ __forceinline__ float target_logit(const P &p, int64_t row, const RowTarget &target) {
  if (target.kind != RowKind::counted || target.target < 0) return 0.0f;
  return to_float(p.logits.template row<T>(row)[target.target * p.logits.col_stride]);
}
template <typename T, unsigned F, class P>
__device__ __forceinline__ float target_value(const P &p, int64_t row, const RowTarget &target) {
  return value_of<F>(target_logit<T>(p, row, target), p.math);
}

// Outputs of a row that is ignored. kPartials, here and below: in a kernel that may be asked for partials. Elsewhere
// the call alone would cost registers.
template <bool kPartials = true, class P>
__device__ __forceinline__ void write_ignored(const P &p, int64_t row) {
  if (kPartials && p.partial.data != nullptr) return write_ignored_partial(p, row);
  if (p.row_loss != nullptr) p.row_loss[row] = 0.0;
  if (p.reduction == XENT_REDUCTION_NONE) write_row(p.loss, row, 0.0f);
  if (p.stats.data != nullptr) {
    float *stats = p.stats.template row<float>(row);
    stats[0] = 0.0f;
    stats[p.stats.col_stride] = 1.0f;
  }
  write_row(p.lse, row, 0.0f);
  write_row(p.entropy, row, 0.0f);
  if (p.predicted.data != nullptr) write_int(p.predicted, p.predicted.offset(row), -1);
}

struct RowStats {
  float m;
  float d;
};

// d = 0: every logit is -inf.
__device__ __forceinline__ RowStats stats_of(float m, float d) { return {m, d == 0.0f ? NAN : d}; }

// `target_value` is v at the target, or anything where the row is out of range.
template <unsigned F, bool kPartials = true, class P>
__device__ __forceinline__ void write_counted(const P &p, int64_t row, RowKind kind, float target_value,
                                              const Partial &part) {
  if constexpr (kPartials) {
    if (p.partial.data != nullptr) return write_partial<F>(p, row, target_value, part);
  }
  const Constants &c = p.math;
  const RowStats stats = stats_of(part.m, part.d);
  const float log_d = logf(stats.d);
  const float lse = fmaf(c.unit, stats.m, log_d);
  double loss = static_cast<double>(NAN);
  if (kind == RowKind::counted) {
    // In double, for a z-loss beyond float32 may be weighted down again, by 0 too. A term whose coefficient is 0 is not
    // evaluated: it may be infinite.
    double sum = 0.0;
    if (c.one_minus_smoothing != 0.0f) {
      const double gap = static_cast<double>(stats.m) - static_cast<double>(target_value);
      sum =
          static_cast<double>(c.one_minus_smoothing) * (static_cast<double>(c.unit) * gap + static_cast<double>(log_d));
    }
    if constexpr ((F & kSum) != 0) {
      if (c.smoothing != 0.0f) {
        const double mean = static_cast<double>(part.s) * static_cast<double>(c.mean_scale);
        sum += static_cast<double>(c.smoothing) * (static_cast<double>(log_d) - mean);
      }
    }
    if (c.z_loss != 0.0f) {
      const double wide_lse = static_cast<double>(c.unit) * static_cast<double>(stats.m) + static_cast<double>(log_d);
      sum += static_cast<double>(c.z_loss) * wide_lse * wide_lse;
    }
    // The terms left out may have been the only ones to carry a NaN of the row.
    if (isnan(stats.d)) sum = NAN;
    loss = static_cast<double>(read_weight(p, row)) * sum;
  }
  if (p.row_loss != nullptr) p.row_loss[row] = loss;
  if (p.reduction == XENT_REDUCTION_NONE) write_row(p.loss, row, static_cast<float>(loss));
  if (p.stats.data != nullptr) {
    float *out = p.stats.template row<float>(row);
    out[0] = stats.m;
    out[p.stats.col_stride] = stats.d;
  }
  write_row(p.lse, row, isnan(stats.d) ? NAN : lse);
  if constexpr ((F & kEntropy) != 0) {
    write_row(p.entropy, row, fmaf(-kLn2, part.e / stats.d, log_d));
  }
  if constexpr ((F & kArgmax) != 0) {
    if (p.predicted.data != nullptr) write_int(p.predicted, p.predicted.offset(row), isnan(stats.d) ? -1 : part.i);
  }
}

// A lift beyond this would round the exponential's argument so much that its largest values show it.
inline constexpr float kExactLift = 63.0f;
// Up to here 2^lift is a float32 number.
inline constexpr int kMostLift = 126;

// dx_i = slope_i * (2^((v_i - m) * exponent + lift) * scale + shift) * drop, `shift_target` in place of `shift` at the
// target; slope_i is 1, or softcap()'s. `lift` takes the exponent of a large coefficient (z-loss, logit_scale) out of
// `scale`, so that it does not magnify what the exponential flushes to 0. `drop` is 1, or a power of two that keeps
// small coefficients normal: then the gradient is rounded once, and slowly.
struct GradRow {
  bool zero;  // the whole row is exactly 0
  float m;
  float lift;
  float scale;
  float shift;
  float shift_target;
  float drop;
  int64_t target;

  // Whether its elements can take the fast way.
  __device__ __forceinline__ bool plain() const { return drop == 1.0f && lift <= kExactLift; }
};

__device__ __forceinline__ GradRow from_lane(const GradRow &grad, int lane) {
  GradRow all;
  all.zero = __shfl_sync(0xffffffffu, static_cast<int>(grad.zero), lane) != 0;
  all.m = __shfl_sync(0xffffffffu, grad.m, lane);
  all.lift = __shfl_sync(0xffffffffu, grad.lift, lane);
  all.scale = __shfl_sync(0xffffffffu, grad.scale, lane);
  all.shift = __shfl_sync(0xffffffffu, grad.shift, lane);
  all.shift_target = __shfl_sync(0xffffffffu, grad.shift_target, lane);
  all.drop = __shfl_sync(0xffffffffu, grad.drop, lane);
  all.target = __shfl_sync(0xffffffffu, grad.target, lane);
  return all;
}

// What the loss was divided by; 1 where by nothing. `divisor` is a tensor that forward or the caller has filled.
template <class P>
__device__ __forceinline__ float read_divisor(const P &p) {
  if (p.own_divisor != nullptr) return *p.own_divisor;
  if (p.denominator.data != nullptr) return read_denominator(p);
  if (p.divisor.data != nullptr) return *static_cast<const float *>(p.divisor.data);
  return 1.0f;
}

// To float32, a finite value to a finite one: infinity times a p of 0 would be NaN.
__device__ __forceinline__ float narrow(double x) {
  const double most = static_cast<double>(FLT_MAX);
  return static_cast<float>(isinf(x) ? x : fabs(x) > most ? copysign(most, x) : x);
}

// What the gradient of a row is multiplied by, whatever its statistics: g * w * chain_rest.
struct RowFactor {
  bool zero;
  double value;
};

// In double, like all coefficients: their product may lie in float32 where its factors and steps do not.
template <class P>
__device__ __forceinline__ RowFactor row_factor(const P &p, int64_t row, RowKind kind) {
  if (kind != RowKind::counted) return {true, 0.0};
  const float divisor = read_divisor(p);
  double f = static_cast<double>(read_weight(p, row)) * static_cast<double>(p.math.chain_rest);
  if (p.grad_loss.data != nullptr) f *= read_floating(p.grad_loss, p.grad_loss.offset(row));
  if (divisor != 1.0f) f /= static_cast<double>(divisor);
  return {divisor == 0.0f, f};
}

__device__ __forceinline__ GradRow grad_row(const Constants &c, const RowFactor &factor, int64_t target,
                                            const RowStats &stats) {
  GradRow grad = {};
  grad.target = target;
  grad.zero = factor.zero;
  if (grad.zero) return grad;
  const double f = factor.value;
  const float one_class = static_cast<float>(f) * c.smoothing_per_class;
  const auto usual = [](float x, bool can_be_zero) {
    return (can_be_zero && x == 0.0f) || (fabsf(x) > 0x1p-60f && fabsf(x) < 0x1p60f);
  };
  if (c.z_loss == 0.0f && c.chain <= 1.0f && usual(static_cast<float>(f), false) &&
      usual(one_class, c.smoothing_per_class == 0.0f)) {
    // What follows, where nothing of it can leave float32: a tenth of the time.
    grad.m = stats.m;
    grad.scale = static_cast<float>(f) * reciprocal(stats.d);
    grad.shift = c.smoothing_per_class != 0.0f ? -one_class : 0.0f;
    grad.shift_target = grad.shift - static_cast<float>(f) * c.one_minus_smoothing;
    grad.drop = 1.0f;
    return grad;
  }
  double peak = 1.0;
  if (c.z_loss != 0.0f) {
    const double lse = static_cast<double>(c.unit) * static_cast<double>(stats.m) + static_cast<double>(logf(stats.d));
    peak += 2.0 * static_cast<double>(c.z_loss) * lse;
  }
  peak /= static_cast<double>(stats.d);
  const double slope = fmax(fabs(peak * static_cast<double>(c.chain)), fabs(f * peak) * 0x1p-100);
  const int lift = slope > 1.0 ? min(ilogb(slope), kMostLift) : 0;  // 0 for NaN
  grad.m = stats.m;
  grad.lift = static_cast<float>(lift);
  double scale = scalbn(f * peak, -lift);
  double shift = -f * static_cast<double>(c.smoothing_per_class);
  double shift_target = shift - f * static_cast<double>(c.one_minus_smoothing);
  grad.drop = 1.0f;
  const auto small = [](double x) { return x != 0.0 && fabs(x) < 0x1p-100; };
  if (small(scale) || small(shift) || small(shift_target)) {
    const double most = fmax(fabs(scale), fmax(fabs(shift), fabs(shift_target)));
    const int raise = max(0, min(-ilogb(most), 126));
    grad.drop = scalbnf(1.0f, -raise);
    scale = scalbn(scale, raise);
    shift = scalbn(shift, raise);
    shift_target = scalbn(shift_target, raise);
  }
  grad.scale = narrow(scale);
  grad.shift = c.smoothing_per_class != 0.0f ? narrow(shift) : 0.0f;
  grad.shift_target = c.one_minus_smoothing != 0.0f ? narrow(shift_target) : grad.shift;
  return grad;
}

}  // namespace xent::cuda
