// SPDX-FileCopyrightText: the libxent authors
// SPDX-License-Identifier: Apache-2.0

// Softmax cross-entropy straight from its definition: plain loops in float64, in extended precision for float64
// problems. Shares no code with the library. It also says how far from it a result may be.
#pragma once

#include <dlpack/dlpack.h>

#include <cstdint>
#include <optional>
#include <vector>

namespace xent_test::reference {

enum class Reduction { kNone, kSum, kMean };

struct Options {
  int64_t vocab = 0;
  int64_t classes = 0;
  std::optional<int64_t> ignore_index;
  Reduction reduction = Reduction::kMean;
  bool empty_mean_is_nan = false;
  double label_smoothing = 0;
  double z_loss = 0;
  double softcap = 0;  // 0: off
  double logit_scale = 1;
};

// Row-major values, exactly those that the library reads.
struct Inputs {
  int64_t rows = 0;
  const double *logits = nullptr;    // [rows, vocab]
  const int64_t *targets = nullptr;  // [rows]
  const double *mask = nullptr;      // [rows], optional
  const double *weights = nullptr;   // [rows], optional
  std::optional<double> denominator;
  const double *upstream = nullptr;  // grad_loss, optional: 1
  bool upstream_per_row = false;
};

enum class Kind { kCounted, kIgnored, kOutOfRange };

template <class Real>
struct Row {
  Kind kind = Kind::kIgnored;
  bool has_softmax = false;  // false: ignored, or no finite softmax exists
  Real maximum = 0;          // of x without softcap, of z with
  Real sum = 1;              // of exp(z - max z)
  Real lse = 0;
  Real entropy = 0;
  Real loss = 0;      // w * l
  Real loss_bar = 0;  // how far the library's may be
  Real weight = 1;
  int64_t predicted = -1;
};

template <class Real>
struct Forward {
  std::vector<Row<Real>> rows;
  Real loss = 0;  // SUM and MEAN
  Real loss_bar = 0;
  Real divisor = 1;
  bool divides = false;
  int64_t counts[3] = {0, 0, 0};
};

template <class Real>
Forward<Real> forward(const Options &options, const Inputs &inputs);

// One row of the gradient and, for each element, its bar without the rounding of the stored type.
template <class Real>
void gradient(const Options &options, const Inputs &inputs, const Forward<Real> &forward, int64_t row, Real *grad,
              Real *bar);

// The bar of lse and entropy. For loss see Row::loss_bar.
template <class Real>
Real statistic_bar(const Options &options, Real value);

}  // namespace xent_test::reference
