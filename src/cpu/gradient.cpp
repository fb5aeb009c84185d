// SPDX-FileCopyrightText: the libxent authors
// SPDX-License-Identifier: Apache-2.0

#include "cpu/gradient.hpp"

#include <algorithm>
#include <climits>
#include <cstring>

namespace xent::cpu {
namespace {

using Wide = long double;

int exponent(Wide value, int otherwise = 0) {
  return std::isfinite(value) && value != 0 ? std::ilogb(value) : otherwise;
}

// value * 2^-by; a number stays one.
double shrunk(Wide value, int by, bool acc_is_double) {
  if (!std::isfinite(value)) return static_cast<double>(value);
  const Wide largest = acc_is_double ? std::numeric_limits<double>::max() : std::numeric_limits<float>::max();
  return static_cast<double>(std::clamp(std::ldexp(value, -by), -largest, largest));
}

// Of the target, whose logit is x.
double target_gradient(const Plan &plan, double x, Wide f, Wide factor, Wide offset, double max) {
  const RowMath &math = plan.math;
  const Wide eps = plan.options->label_smoothing;
  double v = x, slope = 1;
  if (math.softcap != 0) {
    const double q = std::exp(-2 * std::fabs(x * math.cap_ratio));
    v = plan.squash(math, x);  // of the same rounding as the maximum: the difference is never above 0
    slope = 4 * q / ((1 + q) * (1 + q));
  }
  const Wide e = std::exp(static_cast<double>(math.scale * (Wide{v} - max)));
  return static_cast<double>((e * factor - offset - (eps != 1 ? f * (1 - eps) : 0)) * slope);
}

}  // namespace

Gradient::Gradient(const Plan &plan, const xent_problem &problem)
    : plan_(plan), math_(plan.math), options_(*plan.options), problem_(problem) {
  const xent_view &grad = problem.grad_logits;
  if (!present(grad)) return;
  const int64_t bytes = problem.rows * options_.vocab * static_cast<int64_t>(element_size(grad.dtype));
  stream_ = grad.col_stride == 1 && grad.data != problem.logits.data && bytes > plan.streamed;
  kernel_ = same_dtype(grad.dtype, options_.logits_dtype) ? plan.grad : plan.grad_f32;
}

// For the columns [begin, end). False: the row's gradient is 0.
bool Gradient::coefficients(int64_t row, const Stats &stats, int64_t begin, int64_t end, GradRow *out) const {
  if (divisor_.divides && divisor_.value == 0) return false;
  const Row what = read_target(problem_, row);
  if (what.kind != RowKind::kCounted) return false;
  const double eps = options_.label_smoothing;
  Wide f = Wide{read_row(problem_.grad_loss, row, 1)} * read_row(problem_.row_weights, row, 1) * options_.logit_scale;
  if (divisor_.divides) f /= divisor_.value;
  Wide loss_slope = 1;
  if (options_.z_loss != 0)
    loss_slope += 2 * Wide{options_.z_loss} * (Wide{math_.scale} * stats.max + std::log(stats.sum));
  const Wide factor = f * loss_slope / stats.sum;
  out->max = stats.max;
  const Wide offset = eps != 0 ? f * eps / static_cast<Wide>(options_.classes) : 0;
  // Beside a small upstream gradient a large slope must not magnify what the exponential flushes to 0, as far as the
  // gradient's type shows it.
  const Wide slope = loss_slope * options_.logit_scale / stats.sum;
  const int shown = std::min(exponent(slope), exponent(factor) + (plan_.acc_is_double ? 60 : 30));
  const int most = plan_.acc_is_double ? 1022 : 126;
  out->lift = std::clamp(std::max(exponent(factor), shown), 0, most);
  out->post = std::clamp(std::max(exponent(factor), exponent(offset)) - most, 0, most);
  // No factor is subnormal, nor with softcap what its slope multiplies: a gradient that is one is rounded once.
  const int least = plan_.acc_is_double ? -900 : math_.softcap != 0 ? -24 : -100;
  const int size = std::max(exponent(factor, INT_MIN), exponent(offset, INT_MIN));
  if (size < least && size != INT_MIN) out->post = std::max(size, -most);
  out->factor = shrunk(factor, out->lift + out->post, plan_.acc_is_double);
  out->offset = shrunk(offset, out->post, plan_.acc_is_double);
  out->target = what.target - options_.class_begin;  // may be no column of this rank
  if (out->target >= begin && out->target < end) {
    const double x = read_logit(problem_, row, out->target);  // before any of its piece is overwritten
    out->target_grad = target_gradient(plan_, x, f, factor, offset, stats.max);
  }
  return true;
}

void Gradient::zero(int64_t row, int64_t begin, int64_t end) const {
  if (begin == end) return;
  const xent_view &grad = problem_.grad_logits;
  const size_t element = element_size(grad.dtype);
  char *const to = static_cast<char *>(grad.data) +
                   (row_offset(grad, row) + begin * grad.col_stride) * static_cast<int64_t>(element);
  if (stream_) {
    stream_zeros(to, static_cast<size_t>(end - begin) * element);
    return;
  }
  if (grad.col_stride == 1) {
    std::memset(to, 0, static_cast<size_t>(end - begin) * element);
    return;
  }
  for (int64_t i = 0; i < end - begin; ++i) {
    std::memset(to + i * grad.col_stride * static_cast<int64_t>(element), 0, element);
  }
}

}  // namespace xent::cpu
