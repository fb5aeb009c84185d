// SPDX-FileCopyrightText: the libxent authors
// SPDX-License-Identifier: Apache-2.0

// Results against the reference.

#include <cmath>
#include <string>

#include "harness.hpp"

namespace xent_test {
namespace {

template <class Real>
std::string text(Real v) {
  char buffer[64];
  std::snprintf(buffer, sizeof(buffer), "%.12Lg", static_cast<long double>(v));
  return buffer;
}

// `bar` leaves out the rounding to `stored`, which is allowed on top of it when `rounded` is set.
template <class Real>
bool near(Real want, double got, Real bar, const DLDataType &stored, bool rounded, double *ratio) {
  if (std::isnan(want)) return std::isnan(got);
  const Real size = std::fabs(want);
  const Real half = ulp_at(stored, max_finite(stored)) / 2;
  // The value, or what the bar allows around it, may lie beyond the type.
  if (std::isinf(want) || size - bar >= Real(max_finite(stored)) + half) {
    return std::isinf(got) && std::signbit(got) == std::signbit(want);
  }
  if (std::isinf(got)) return size + bar >= Real(max_finite(stored)) + half && std::signbit(got) == std::signbit(want);
  if (std::isnan(got)) return false;
  const Real error = std::fabs(Real(got) - want);
  if (error <= bar && ratio == nullptr) return true;
  Real allowed = bar;
  if (rounded) {
    const long double larger = std::fabs(got) > size ? std::fabs(got) : static_cast<long double>(size);
    allowed += Real(ulp_at(stored, larger) / 2);
  }
  if (ratio != nullptr && allowed > 0) {
    // Against the bar without the rounding, which no implementation can avoid.
    const Real rounding = allowed - bar;
    const Real beyond = error > rounding ? error - rounding : Real(0);
    if (bar > 0 && beyond / bar > *ratio) *ratio = static_cast<double>(beyond / bar);
  }
  return error <= allowed;
}

template <class Real>
class Checker {
 public:
  Checker(const Problem &p, Worst *worst) : p_(p), worst_(worst) {
    options_.vocab = p.vocab;
    options_.classes = p.real_classes();
    options_.ignore_index = p.ignore_index;
    options_.reduction = static_cast<reference::Reduction>(p.reduction);
    options_.empty_mean_is_nan = p.empty_mean_is_nan;
    options_.label_smoothing = p.label_smoothing;
    options_.z_loss = p.z_loss;
    options_.softcap = p.softcap;
    options_.logit_scale = p.logit_scale == 0 ? 1 : p.logit_scale;
    inputs_.rows = p.rows();
    inputs_.logits = p.logits.data();
    inputs_.targets = p.targets.data();
    inputs_.mask = p.mask ? p.mask->v.data() : nullptr;
    inputs_.weights = p.weights.empty() ? nullptr : p.weights.data();
    if (p.denominator) inputs_.denominator = p.denominator->v[0];
    inputs_.upstream = p.upstream ? p.upstream->v.data() : nullptr;
    inputs_.upstream_per_row = p.per_row_upstream;
    want_ = reference::forward<Real>(options_, inputs_);
  }

  bool all(const std::vector<Outcome> &outcomes) {
    for (const Outcome &o : outcomes) {
      select(o);
      scalars();
    }
    for (int64_t r = 0; r < inputs_.rows && failures_ == 0; ++r) {
      bool wanted = false;
      for (const Outcome &o : outcomes) {
        select(o);
        row(r);
        wanted = wanted || o.mode != Mode::kForward;
      }
      if (!wanted || failures_ != 0) continue;
      grad_.resize(static_cast<size_t>(p_.vocab));
      bar_.resize(grad_.size());
      reference::gradient<Real>(options_, inputs_, want_, r, grad_.data(), bar_.data());
      for (const Outcome &o : outcomes) {
        select(o);
        if (o.mode != Mode::kForward) gradient(r);
      }
    }
    return failures_ == 0;
  }

 private:
  void select(const Outcome &o) {
    r_ = o.result;
    mode_ = o.mode;
  }

  void fail(const std::string &what, long double want, long double got, long double bar) {
    static const char *const modes[] = {"forward", "forward, backward", "loss_and_grad"};
    ++failures_;
    ADD_FAILURE() << modes[static_cast<int>(mode_)] << ": " << what << ": got " << text(got) << ", want " << text(want)
                  << ", off by " << text(got - want) << ", bar " << text(bar);
  }

  void real(const char *name, int64_t index, Real want, Real bar, uint64_t bits, double *ratio) {
    const double got = decode_float(p_.acc(), bits);
    // A weight may take the result where the type's own spacing is wider than the bar.
    const Real spacing = bar == 0 ? Real(0) : Real(ulp_at(p_.acc(), 0));
    if (near<Real>(want, got, bar + spacing, p_.acc(), false, ratio)) return;
    fail(std::string(name) + (index < 0 ? "" : " of row " + std::to_string(index)), want, got, bar);
  }

  void integer(const std::string &name, int64_t want, int64_t got) {
    if (want != got) fail(name, want, got, 0);
  }

  void scalars() {
    if (p_.reduction != XENT_REDUCTION_NONE) {
      real("loss", -1, want_.loss, want_.loss_bar, r_->loss[0], worst_ ? &worst_->loss : nullptr);
    }
    if (want_.divides) {
      // float32 weights are summed wider than they are stored; float64 ones are not.
      const Real bar = p_.acc() == kF64 ? Real(1e-13L) * std::fabs(want_.divisor) : Real(ulp_at(kF32, want_.divisor));
      real("divisor", -1, want_.divisor, bar, r_->divisor[0], nullptr);
    }
    if (p_.row_counts) {
      static const char *const names[] = {"counted rows", "ignored rows", "rows out of range"};
      for (size_t i = 0; i < 3; ++i) integer(names[i], want_.counts[i], decode_int(p_.counts_dtype, r_->counts[i]));
    }
  }

  void row(int64_t r) {
    const auto i = static_cast<size_t>(r);
    const reference::Row<Real> &want = want_.rows[i];
    if (p_.reduction == XENT_REDUCTION_NONE) {
      real("loss", r, want.loss, want.loss_bar, r_->loss[i], worst_ ? &worst_->loss : nullptr);
    }
    const auto bar = [&](Real v) { return reference::statistic_bar<Real>(options_, v); };
    const bool ignored = want.kind == reference::Kind::kIgnored;
    if (p_.lse) real("lse", r, want.lse, ignored ? 0 : bar(want.lse), r_->lse[i], worst_ ? &worst_->lse : nullptr);
    if (p_.entropy) {
      real("entropy", r, want.entropy, ignored ? 0 : bar(want.entropy), r_->entropy[i],
           worst_ ? &worst_->entropy : nullptr);
    }
    if (p_.predicted) {
      integer("predicted of row " + std::to_string(r), want.predicted,
              decode_int(p_.predicted_dtype, r_->predicted[i]));
    }
    if (ignored || want.has_softmax) {
      // The maximum is exact where it is an input; z and the sum have the relative bar of a probability.
      const Real exact = ignored || options_.softcap == 0 ? Real(0) : bar(want.maximum);
      real("kept maximum", r, want.maximum, exact, r_->stats[2 * i], nullptr);
      const Real tau = (std::is_same_v<Real, long double> ? Real(1e-8L) : Real(1)) *
                       (Real(2e-6L) + Real(4e-7L) * Real(options_.softcap));
      real("kept sum", r, want.sum, ignored ? 0 : tau * want.sum, r_->stats[2 * i + 1], nullptr);
    }
  }

  void gradient(int64_t r) {
    const DLDataType stored = p_.overwrite || p_.interleave > 0 ? p_.dtype : p_.grad_dtype;
    for (int64_t c = 0; c < p_.vocab; ++c) {
      const auto i = static_cast<size_t>(c);
      const uint64_t bits = r_->grad[static_cast<size_t>(r * p_.vocab + c)];
      const double got = decode_float(stored, bits);
      const bool padding = c >= options_.classes;
      const bool good = padding ? bits == 0
                                : near<Real>(grad_[i], got, bar_[i], stored, grad_[i] != 0 || bar_[i] != 0,
                                             worst_ ? &worst_->grad : nullptr);
      if (good) continue;
      fail("gradient at row " + std::to_string(r) + " column " + std::to_string(c) + (padding ? " (padding)" : "") +
               " target " + std::to_string(inputs_.targets[r]),
           grad_[i], got, bar_[i]);
      return;
    }
  }

  const Problem &p_;
  const Result *r_ = nullptr;
  Mode mode_ = Mode::kForward;
  Worst *worst_;
  reference::Options options_;
  reference::Inputs inputs_;
  reference::Forward<Real> want_;
  std::vector<Real> grad_, bar_;
  int failures_ = 0;
};

}  // namespace

bool check(const Problem &problem, const std::vector<Outcome> &outcomes, Worst *worst) {
  if (problem.dtype == kF64) return Checker<long double>(problem, worst).all(outcomes);
  return Checker<double>(problem, worst).all(outcomes);
}

bool check(const Problem &problem, const Result &result, Mode mode, Worst *worst) {
  return check(problem, {{mode, &result}}, worst);
}

}  // namespace xent_test
