// SPDX-FileCopyrightText: the libxent authors
// SPDX-License-Identifier: Apache-2.0

// From a row's partial to its outputs, and from its statistics to the coefficients of its gradient.
#pragma once

#include "params.cuh"

namespace xent::cuda {

// Outputs of a row that is ignored.
__device__ __forceinline__ void write_ignored(const Params &p, int64_t row) {
  if (p.row_loss != nullptr) p.row_loss[row] = 0.0f;
  if (p.reduction == XENT_REDUCTION_NONE) write_row(p.loss, row, 0.0f);
  if (p.stats.data != nullptr) {
    float *stats = p.stats.row<float>(row);
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

// `target_value` is v at the target, or anything where the row is out of range.
template <unsigned F>
__device__ __forceinline__ RowStats write_counted(const Params &p, int64_t row, RowKind kind, float target_value,
                                                  const Partial &part) {
  const Constants &c = p.math;
  const RowStats stats = {part.m, part.d == 0.0f ? NAN : part.d};  // d = 0: every logit is -inf
  const float log_d = logf(stats.d);
  const float lse = fmaf(c.unit, stats.m, log_d);
  float loss = NAN;
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
    loss = static_cast<float>(static_cast<double>(read_weight(p, row)) * sum);
  }
  if (p.row_loss != nullptr) p.row_loss[row] = loss;
  if (p.reduction == XENT_REDUCTION_NONE) write_row(p.loss, row, loss);
  if (p.stats.data != nullptr) {
    float *out = p.stats.row<float>(row);
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
  return stats;
}

// dx_i = factor_i * (2^((v_i - m) * exponent + lift) * scale + shift), `shift_target` in place of `shift` at the
// target; factor_i is 1, or 1 - tanh^2 with softcap. `lift` takes the exponent of a large slope (z-loss, logit_scale)
// out of `scale`, so that the slope does not magnify what the exponential flushes to 0.
struct GradRow {
  bool zero;  // the whole row is exactly 0
  float m;
  float lift;
  float scale;
  float shift;
  float shift_target;
  int64_t target;
};

// What the loss was divided by; 1 where by nothing. `divisor` is a tensor that forward or the caller has filled.
__device__ __forceinline__ float read_divisor(const Params &p) {
  if (p.own_divisor != nullptr) return *p.own_divisor;
  if (p.denominator.data != nullptr) return read_float(p.denominator, 0);
  if (p.divisor.data != nullptr) return read_float(p.divisor, 0);
  return 1.0f;
}

// What the gradient of a row is multiplied by, whatever its statistics.
struct RowFactor {
  bool zero;
  float factor;  // g * w * logit_scale
};

__device__ __forceinline__ RowFactor row_factor(const Params &p, int64_t row, RowKind kind) {
  if (kind != RowKind::counted) return {true, 0.0f};
  float upstream = 1.0f;
  if (p.grad_loss.data != nullptr) upstream = read_float(p.grad_loss, p.grad_loss.offset(row));
  const float divisor = read_divisor(p);
  return {divisor == 0.0f, upstream / divisor * read_weight(p, row) * p.math.chain};
}

__device__ __forceinline__ GradRow grad_row(const Constants &c, const RowFactor &factor, int64_t target,
                                            const RowStats &stats) {
  GradRow grad = {};
  grad.zero = factor.zero;
  grad.target = target;
  if (grad.zero) return grad;
  const float f = factor.factor;
  const float lse = fmaf(c.unit, stats.m, logf(stats.d));
  const float peak = c.z_loss != 0.0f ? fmaf(2.0f * c.z_loss, lse, 1.0f) : 1.0f;
  const float slope = fabsf(peak * c.chain / stats.d);
  const int lift = slope > 1.0f ? min(ilogbf(slope), 100) : 0;  // 0 for NaN
  grad.m = stats.m;
  grad.lift = static_cast<float>(lift);
  grad.scale = scalbnf(f * peak / stats.d, -lift);
  grad.shift = c.smoothing_per_class != 0.0f ? -(f * c.smoothing_per_class) : 0.0f;
  grad.shift_target = c.one_minus_smoothing != 0.0f ? grad.shift - f * c.one_minus_smoothing : grad.shift;
  return grad;
}

__device__ __forceinline__ GradRow grad_row(const Params &p, int64_t row, const RowTarget &target,
                                            const RowStats &stats) {
  return grad_row(p.math, row_factor(p, row, target.kind), target.target, stats);
}

}  // namespace xent::cuda
