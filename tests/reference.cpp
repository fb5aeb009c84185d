// SPDX-FileCopyrightText: the libxent authors
// SPDX-License-Identifier: Apache-2.0

#include "reference.hpp"

#include <cmath>
#include <limits>
#include <type_traits>

namespace xent_test::reference {
namespace {

template <class Real>
constexpr Real kNaN = std::numeric_limits<Real>::quiet_NaN();
template <class Real>
constexpr Real kInf = std::numeric_limits<Real>::infinity();

// long double stands for float64 problems, whose bars are smaller by this factor.
template <class Real>
constexpr Real kTighter = std::is_same_v<Real, long double> ? Real(1e-8L) : Real(1);

template <class Real>
Real relative_bar() {
  return std::is_same_v<Real, long double> ? Real(1e-13L) : Real(1e-6L);
}

template <class Real>
class Logits {
 public:
  Logits(const Options &options, const double *x) : options_(options), x_(x) {
    for (int64_t i = 0; i < options.classes; ++i) {
      if (std::isnan(x[i])) nan_ = true;
      if (i == 0 || x[i] > x[argmax_]) argmax_ = i;
    }
    if (!capped()) {
      const double top = x[argmax_];
      if (std::isinf(top)) nan_ = true;  // all -inf, or any +inf
    }
    top_ = z(argmax_);
  }

  bool has_softmax() const { return !nan_; }
  int64_t argmax() const { return argmax_; }
  bool capped() const { return options_.softcap > 0; }

  // (logit_scale * x) / softcap, the argument of tanh.
  Real argument(int64_t i) const { return Real(options_.logit_scale) * Real(x_[i]) / Real(options_.softcap); }
  Real z(int64_t i) const {
    if (capped()) return Real(options_.softcap) * std::tanh(argument(i));
    return Real(options_.logit_scale) * Real(x_[i]);
  }
  // z_i - max z, from a difference of inputs where z is linear.
  Real shifted(int64_t i) const {
    if (capped()) return z(i) - top_;
    return Real(options_.logit_scale) * (Real(x_[i]) - Real(x_[argmax_]));
  }
  Real slope(int64_t i) const {
    const Real scale = Real(options_.logit_scale);
    if (!capped()) return scale;
    const Real c = std::cosh(argument(i));
    return std::isinf(c) ? Real(0) : scale / c / c;
  }

 private:
  const Options &options_;
  const double *x_;
  bool nan_ = false;
  int64_t argmax_ = 0;
  Real top_ = 0;
};

template <class Real>
Row<Real> forward_row(const Options &options, const double *x, int64_t target, bool masked, double weight) {
  Row<Real> row;
  if (masked || (options.ignore_index && target == *options.ignore_index)) return row;
  const int64_t classes = options.classes;
  const bool in_range = target >= 0 && target < classes;
  row.kind = in_range ? Kind::kCounted : Kind::kOutOfRange;
  row.weight = Real(weight);
  const Logits<Real> logits(options, x);
  row.has_softmax = logits.has_softmax();
  if (!row.has_softmax) {
    row.maximum = row.sum = row.lse = row.entropy = row.loss = kNaN<Real>;
    return row;
  }
  row.predicted = logits.argmax();
  Real sum = 0, weighted = 0, total = 0;
  for (int64_t i = 0; i < classes; ++i) {
    const Real u = logits.shifted(i);
    const Real e = std::exp(u);
    sum += e;
    if (e != 0) weighted += u * e;  // 0 * -inf is 0
    total += u;
  }
  const Real log_sum = std::log(sum);
  row.maximum = logits.capped() ? logits.z(row.predicted) : Real(x[row.predicted]);
  row.sum = sum;
  row.lse = logits.z(row.predicted) + log_sum;
  row.entropy = log_sum - weighted / sum;
  if (!in_range) {
    row.loss = kNaN<Real>;
    return row;
  }
  const Real s = Real(options.label_smoothing);
  Real l = 0;
  if (s != 1) l += (1 - s) * (-logits.shifted(target) + log_sum);
  if (s != 0) l += s * (log_sum - total / Real(classes));
  if (options.z_loss != 0) l += Real(options.z_loss) * row.lse * row.lse;
  row.loss = row.weight * l;
  row.loss_bar = std::fabs(row.weight) * statistic_bar<Real>(options, l);
  return row;
}

}  // namespace

template <class Real>
Real statistic_bar(const Options &options, Real value) {
  const Real size = std::fabs(value);
  return relative_bar<Real>() * (size > 1 ? size : Real(1)) + Real(2.5e-7L) * kTighter<Real> * Real(options.softcap);
}

template <class Real>
Forward<Real> forward(const Options &options, const Inputs &inputs) {
  Forward<Real> out;
  long double sum = 0, bar = 0, weights = 0;
  for (int64_t r = 0; r < inputs.rows; ++r) {
    const double weight = inputs.weights != nullptr ? inputs.weights[r] : 1.0;
    const bool masked = inputs.mask != nullptr && inputs.mask[r] == 0;
    out.rows.push_back(
        forward_row<Real>(options, inputs.logits + r * options.vocab, inputs.targets[r], masked, weight));
    const Row<Real> &row = out.rows.back();
    ++out.counts[static_cast<int>(row.kind)];
    if (row.kind == Kind::kIgnored) continue;
    sum += row.loss;
    bar += row.loss_bar;
    weights += weight;
  }
  if (options.reduction == Reduction::kNone) return out;
  out.loss = Real(sum);
  out.loss_bar = Real(bar);
  out.divides = options.reduction == Reduction::kMean || inputs.denominator.has_value();
  if (!out.divides) return out;
  out.divisor = inputs.denominator ? Real(*inputs.denominator) : Real(weights);
  if (out.divisor == 0) {
    const bool empty = out.counts[0] + out.counts[2] == 0;
    out.loss = options.empty_mean_is_nan && empty && !inputs.denominator ? kNaN<Real> : Real(0);
    out.loss_bar = 0;
  } else {
    out.loss = Real(sum / (long double)(out.divisor));
    out.loss_bar = Real(bar / std::fabs((long double)(out.divisor)));
  }
  return out;
}

template <class Real>
void gradient(const Options &options, const Inputs &inputs, const Forward<Real> &fwd, int64_t r, Real *grad,
              Real *bar) {
  for (int64_t i = 0; i < options.vocab; ++i) grad[i] = bar[i] = 0;
  const Row<Real> &row = fwd.rows[static_cast<size_t>(r)];
  if (row.kind != Kind::kCounted || (fwd.divides && fwd.divisor == 0)) return;
  const int64_t classes = options.classes, target = inputs.targets[r];
  if (!row.has_softmax) {
    for (int64_t i = 0; i < classes; ++i) grad[i] = kNaN<Real>;
    return;
  }
  Real g = inputs.upstream == nullptr ? Real(1) : Real(inputs.upstream[inputs.upstream_per_row ? r : 0]);
  if (fwd.divides) g /= fwd.divisor;
  const Real gw = g * row.weight;
  const Logits<Real> logits(options, inputs.logits + r * options.vocab);
  const Real s = Real(options.label_smoothing), uniform = s / Real(classes);
  const Real factor = options.z_loss != 0 ? 1 + 2 * Real(options.z_loss) * row.lse : Real(1);
  const Real tighter = kTighter<Real>;
  for (int64_t i = 0; i < classes; ++i) {
    const Real u = logits.shifted(i);
    const Real p = std::exp(u) / row.sum;
    const Real onehot = i == target ? 1 - s : Real(0);
    const Real scaled = p == 0 ? Real(0) : p * factor;
    const Real slope = logits.slope(i);
    grad[i] = gw * slope * (scaled - uniform - onehot);
    Real tau = Real(2e-6L), base = Real(5e-7L);
    if (p != 0) tau -= Real(2e-7L) * u;
    if (logits.capped()) {
      const Real argument = std::fabs(logits.argument(i));
      // Where the slope is 0, an infinite x, the bar is 0 as well.
      const Real extra = std::isinf(argument) ? Real(0) : Real(4e-7L) * (Real(options.softcap) + argument);
      tau += extra;
      base += extra;
    }
    bar[i] = std::fabs(gw * slope) * tighter * (tau * std::fabs(scaled) + base * (uniform + onehot)) +
             std::fabs(gw) * tighter * std::ldexp(Real(1), -120);
  }
}

template double statistic_bar<double>(const Options &, double);
template long double statistic_bar<long double>(const Options &, long double);
template Forward<double> forward<double>(const Options &, const Inputs &);
template Forward<long double> forward<long double>(const Options &, const Inputs &);
template void gradient<double>(const Options &, const Inputs &, const Forward<double> &, int64_t, double *, double *);
template void gradient<long double>(const Options &, const Inputs &, const Forward<long double> &, int64_t,
                                    long double *, long double *);

}  // namespace xent_test::reference
