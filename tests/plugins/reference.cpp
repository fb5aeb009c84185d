// SPDX-FileCopyrightText: the libxent authors
// SPDX-License-Identifier: Apache-2.0

// A backend of the CPU that computes with tests/reference.hpp: what a third party's plugin looks like to conformance.
// XENT_TEST_FAULT, read at every call, makes it wrong in one way:
//   smoothing   the gradient spreads the smoothing over the columns, padding included
//   neighbour   the kept sum is one unit off in a batch
//   repeat      the first loss is off by none, one or two units, in turns
//   input       the first target is changed
//   type        refuses bfloat16

#include "../reference.hpp"

#include <xent/xent_plugin.h>

#include <cmath>
#include <cstdlib>
#include <cstring>
#include <type_traits>
#include <vector>

#include "../formats.hpp"
#include "common/error.hpp"

namespace {

using namespace xent_test;

bool fault(const char *name) {
  const char *given = std::getenv("XENT_TEST_FAULT");
  return given != nullptr && std::strcmp(given, name) == 0;
}

uint8_t *element(const xent_view &v, int64_t row, int64_t column) {
  int64_t at = column * v.col_stride;
  for (int32_t d = v.rank; d-- > 0; row /= v.shape[d]) at += row % v.shape[d] * v.stride[d];
  return static_cast<uint8_t *>(v.data) + at * size_of(v.dtype);
}

double load(const xent_view &v, int64_t row, int64_t column = 0) {
  const uint64_t bits = load_bits(element(v, row, column), size_of(v.dtype));
  if (is_float(v.dtype)) return decode_float(v.dtype, bits);
  return v.dtype.bits == 8 ? static_cast<double>(bits) : static_cast<double>(decode_int(v.dtype, bits));
}

void store(const xent_view &v, int64_t row, int64_t column, double value) {
  if (v.data == nullptr) return;
  const uint64_t bits = is_float(v.dtype) ? encode_float(v.dtype, value) : static_cast<uint64_t>(std::llround(value));
  std::memcpy(element(v, row, column), &bits, static_cast<size_t>(size_of(v.dtype)));
}

template <class Real>
class Call {
 public:
  explicit Call(const xent_problem &p) : p_(p) {
    const xent_options &o = *p.options;
    options_.vocab = o.vocab;
    options_.classes = o.classes;
    if (o.has_ignore_index) options_.ignore_index = o.ignore_index;
    options_.reduction = static_cast<reference::Reduction>(o.reduction);
    options_.empty_mean_is_nan = o.empty_mean_is_nan != 0;
    options_.label_smoothing = o.label_smoothing;
    options_.z_loss = o.z_loss;
    options_.softcap = o.softcap;
    options_.logit_scale = o.logit_scale;
    for (int64_t r = 0; r < p.rows; ++r) {
      for (int64_t c = 0; c < o.vocab; ++c) logits_.push_back(c < o.classes ? load(p.logits, r, c) : 0);
      targets_.push_back(decode_int(p.targets.dtype, load_bits(element(p.targets, r, 0), size_of(p.targets.dtype))));
      if (p.mask.data != nullptr) mask_.push_back(load(p.mask, r));
      if (p.row_weights.data != nullptr) weights_.push_back(load(p.row_weights, r));
      if (p.grad_loss.data != nullptr) upstream_.push_back(load(p.grad_loss, r));
    }
    inputs_.rows = p.rows;
    inputs_.logits = logits_.data();
    inputs_.targets = targets_.data();
    inputs_.mask = mask_.empty() ? nullptr : mask_.data();
    inputs_.weights = weights_.empty() ? nullptr : weights_.data();
    inputs_.upstream = upstream_.empty() ? nullptr : upstream_.data();
    inputs_.upstream_per_row = true;
  }

  void forward() {
    if (p_.denominator.data != nullptr) inputs_.denominator = load(p_.denominator, 0);
    result_ = reference::forward<Real>(options_, inputs_);
    if (options_.reduction != reference::Reduction::kNone) store(p_.loss, 0, 0, double(result_.loss));
    store(p_.divisor, 0, 0, double(result_.divisor));
    for (int i = 0; i < 3; ++i) store(p_.row_counts, 0, i, static_cast<double>(result_.counts[i]));
    for (int64_t r = 0; r < p_.rows; ++r) {
      const auto &row = result_.rows[static_cast<size_t>(r)];
      if (options_.reduction == reference::Reduction::kNone) store(p_.loss, r, 0, double(row.loss));
      const double step = fault("neighbour") && p_.rows > 1 ? 1 + kUnit : 1;
      store(p_.stats, r, 0, double(row.maximum));
      store(p_.stats, r, 1, double(row.sum) * step);
      store(p_.lse, r, 0, double(row.lse));
      store(p_.entropy, r, 0, double(row.entropy));
      store(p_.predicted, r, 0, static_cast<double>(row.predicted));
    }
    static int calls = 0;
    if (fault("repeat") && p_.rows > 0) store(p_.loss, 0, 0, load(p_.loss, 0) * (1 + kUnit * (++calls % 3)));
  }

  void backward() {
    if (p_.divisor.data != nullptr) inputs_.denominator = load(p_.divisor, 0);
    result_ = reference::forward<Real>(options_, inputs_);
    gradient();
  }

  void gradient() {
    std::vector<Real> grad(static_cast<size_t>(options_.vocab)), bar(grad.size());
    const Real eps = Real(options_.label_smoothing);
    const Real wrong = eps / Real(options_.classes) - eps / Real(options_.vocab);
    for (int64_t r = 0; r < p_.rows; ++r) {
      reference::gradient<Real>(options_, inputs_, result_, r, grad.data(), bar.data());
      for (int64_t c = 0; c < options_.vocab; ++c) {
        Real v = grad[static_cast<size_t>(c)];
        if (fault("smoothing") && c < options_.classes && v != 0) v += wrong;
        store(p_.grad_logits, r, c, double(v));
      }
    }
    if (fault("input") && options_.vocab > 2 && p_.rows > 0) *element(p_.targets, 0, 0) ^= 1;
  }

 private:
  // More than half a unit in the last place, less than any bar.
  static constexpr double kUnit = std::is_same_v<Real, double> ? 1.3e-7 : 2.5e-16;

  const xent_problem &p_;
  reference::Options options_;
  reference::Inputs inputs_;
  reference::Forward<Real> result_;
  std::vector<double> logits_, mask_, weights_, upstream_;
  std::vector<int64_t> targets_;
};

// The accuracy of float64 asks for more than float64.
template <class F>
xent_status with_call(const xent_problem *p, F &&f) {
  if (p->options->logits_dtype == kF64) {
    Call<long double> call(*p);
    f(call);
  } else {
    Call<double> call(*p);
    f(call);
  }
  return XENT_OK;
}

int32_t probe(void *, const xent_options *options, char *, size_t) {
  return fault("type") && options->logits_dtype == kBf16 ? 0 : 1000;  // before the built-in backend
}
xent_status plan_create(void *self, const xent_options *, void **plan, xent_plan_info *info, xent_error *) {
  *plan = self;
  info->alignment = 1;
  info->saved_bytes = 0;
  return XENT_OK;
}
void plan_destroy(void *, void *) {}
xent_status forward(void *, void *, const xent_problem *p, xent_error *) {
  return with_call(p, [](auto &call) { call.forward(); });
}
xent_status backward(void *, void *, const xent_problem *p, xent_error *) {
  return with_call(p, [](auto &call) { call.backward(); });
}
xent_status loss_and_grad(void *, void *, const xent_problem *p, xent_error *) {
  return with_call(p, [](auto &call) {
    call.forward();
    call.gradient();
  });
}

}  // namespace

extern "C" XENT_API xent_status xent_plugin_entry_v1(const xent_host_api *host, xent_backend_api *out, xent_error *err);
extern "C" XENT_API xent_status xent_plugin_entry_v1(const xent_host_api *, xent_backend_api *out, xent_error *) {
  static int self;
  *out = xent_backend_api{sizeof *out,  0,       kDLCPU,   "reference.cpu", "1.0",   &self,   probe,   plan_create,
                          plan_destroy, forward, backward, loss_and_grad,   nullptr, nullptr, nullptr, nullptr};
  return XENT_OK;
}
