// SPDX-FileCopyrightText: the libxent authors
// SPDX-License-Identifier: Apache-2.0

#include "generate.hpp"

#include <cmath>

namespace xent_test {
namespace {

double uniform(Rng &rng, double low, double high) { return std::uniform_real_distribution<double>(low, high)(rng); }
bool chance(Rng &rng, double p) { return uniform(rng, 0, 1) < p; }

}  // namespace

const char *name_of(Family family) {
  switch (family) {
    case Family::kRandom:
      return "random";
    case Family::kPeaked:
      return "peaked";
    case Family::kFlat:
      return "flat";
    case Family::kOffset:
      return "offset";
    case Family::kHeavyTailed:
      return "heavy-tailed";
  }
  return "?";
}

std::vector<double> draw_normal(Rng &rng, int64_t count, double scale, double mean) {
  std::normal_distribution<double> normal(mean, scale);
  std::vector<double> v(static_cast<size_t>(count));
  for (double &x : v) x = normal(rng);
  return v;
}

void draw_targets(Rng &rng, Problem &p) {
  p.targets.resize(static_cast<size_t>(p.rows()));
  for (int64_t &t : p.targets) t = pick(rng, 0, p.real_classes() - 1);
}

void draw_logits(Rng &rng, Problem &p, Family family) {
  const int64_t rows = p.rows();
  p.logits = draw_normal(rng, rows * p.vocab, family == Family::kFlat ? 1e-3 : 2);
  for (int64_t r = 0; r < rows; ++r) {
    double *x = p.logits.data() + r * p.vocab;
    if (family == Family::kPeaked && p.real_classes() > 1) {
      // p_t between 0.5 and 1 - 1e-12, or the peak on a wrong class.
      const double miss = std::pow(10.0, -uniform(rng, 0.3, 12));
      double sum = 0;
      int64_t t = p.targets[static_cast<size_t>(r)];
      if (t < 0 || t >= p.real_classes() || chance(rng, 0.2)) t = pick(rng, 0, p.real_classes() - 1);
      for (int64_t c = 0; c < p.real_classes(); ++c) {
        if (c != t) sum += std::exp(x[c]);
      }
      x[t] = std::log(sum * (1 - miss) / miss);
    } else if (family == Family::kOffset) {
      const double size = p.dtype == kF16 ? 6e4 : 1e4;
      const double offset = (chance(rng, 0.5) ? -1 : 1) * uniform(rng, 0.1, 1) * size;
      for (int64_t c = 0; c < p.vocab; ++c) x[c] += offset;
    } else if (family == Family::kHeavyTailed) {
      for (int64_t c = 0; c < p.vocab; ++c) x[c] = std::tan(3.14 * (uniform(rng, 0, 1) - 0.5)) * 3;
    }
  }
  for (double &v : p.logits) v = round_to(p.dtype, v);
}

Problem plain(Rng &rng, Backend backend, DLDataType dtype, std::vector<int64_t> shape, int64_t vocab, Family family) {
  Problem p;
  p.backend = backend;
  p.dtype = p.grad_dtype = dtype;
  p.shape = std::move(shape);
  p.vocab = vocab;
  draw_targets(rng, p);
  draw_logits(rng, p, family);
  return p;
}

void add_weights(Rng &rng, Problem &p) {
  const bool divides = p.reduction == XENT_REDUCTION_MEAN && !p.denominator;
  p.weights.resize(static_cast<size_t>(p.rows()));
  for (double &w : p.weights) {
    w = round_to(p.acc(), uniform(rng, 0.1, 2));
    if (chance(rng, 0.15)) w = 0;
    // A sum of weights that cancels would measure the inputs, not the library.
    if (!divides && chance(rng, 0.2)) w = -w;
  }
}

void add_mask(Rng &rng, Problem &p, DLDataType dtype) {
  Values mask{dtype, {}};
  for (int64_t r = 0; r < p.rows(); ++r) {
    if (chance(rng, 0.25)) {
      mask.v.push_back(is_float(dtype) && chance(rng, 0.5) ? -0.0 : 0.0);
    } else if (dtype == kBool) {
      mask.v.push_back(1);
    } else if (dtype == kU8) {
      mask.v.push_back(static_cast<double>(pick(rng, 1, 255)));
    } else if (is_float(dtype)) {
      mask.v.push_back(choose<double>(rng, {1, -1, 0.25, 1e-40, kNaN, kInf}));
    } else {
      mask.v.push_back(choose<double>(rng, {1, -1, 65536, dtype == kI64 ? 4294967296.0 : 256.0}));
    }
  }
  p.mask = mask;
  p.quantize();
}

void add_upstream(Rng &rng, Problem &p, DLDataType dtype, bool per_row) {
  Values g{dtype, {}};
  p.per_row_upstream = per_row;
  const int64_t count = per_row ? p.rows() : 1;
  for (int64_t i = 0; i < count; ++i) {
    g.v.push_back(choose<double>(rng, {1, 0, -1, 0.37, -2.5, 1024, 65504, 3e-5, uniform(rng, -3, 3)}));
  }
  p.upstream = g;
  p.quantize();
}

void add_ignored(Rng &rng, Problem &p, int64_t index) {
  p.ignore_index = index;
  for (int64_t &t : p.targets) {
    if (chance(rng, 0.25)) t = index;
  }
}

std::vector<DLDataType> dtypes_of(Backend backend) {
  if (backend == Backend::kCpu) return {kF32, kF16, kBf16, kF64};
  return {kF32, kF16, kBf16};
}

Problem random_problem(Rng &rng, Backend backend, DLDataType dtype, int64_t rows, int64_t vocab) {
  Problem p;
  p.backend = backend;
  p.dtype = dtype;
  p.grad_dtype = dtype == kF64 || chance(rng, 0.7) ? dtype : kF32;
  p.vocab = vocab;
  p.shape = {rows};
  if (chance(rng, 0.3) && rows % 2 == 0) p.shape = {2, rows / 2};
  if (chance(rng, 0.4)) p.classes = pick(rng, vocab / 2 + 1, vocab);
  p.target_dtype = chance(rng, 0.5) ? kI32 : kI64;
  p.reduction = static_cast<int32_t>(pick(rng, 0, 2));
  if (chance(rng, 0.5)) p.label_smoothing = choose<double>(rng, {0.1, 0.01, 0.5, 1});
  if (chance(rng, 0.5)) p.softcap = choose<double>(rng, {30, 5, 50, 1.5});
  if (chance(rng, 0.4)) p.logit_scale = choose<double>(rng, {0.25, 0.0625, 1.7, 3});
  Family family = choose(rng, kFamilies);
  if (chance(rng, 0.5)) {
    p.z_loss = choose<double>(rng, {1e-4, 1e-3, 1e-2});
    // 1 + 2 z_loss lse must not cancel, or the bar becomes 0 while the inputs' own rounding does not.
    if (family == Family::kOffset || family == Family::kHeavyTailed) family = Family::kRandom;
  }
  p.entropy = chance(rng, 0.5);
  p.predicted = chance(rng, 0.5);
  p.lse = chance(rng, 0.7);
  p.row_counts = chance(rng, 0.7);
  p.predicted_dtype = chance(rng, 0.5) ? kI32 : kI64;
  p.counts_dtype = chance(rng, 0.5) ? kI32 : kI64;
  p.spare_rows = chance(rng, 0.3) ? pick(rng, 1, 100) : 0;
  p.scalar_as_one_element = chance(rng, 0.3);
  p.overwrite = p.grad_dtype == dtype && chance(rng, 0.3);
  draw_targets(rng, p);
  draw_logits(rng, p, family);
  if (p.reduction != XENT_REDUCTION_NONE && chance(rng, 0.3)) {
    p.denominator = Values{choose<DLDataType>(rng, {kF32, kI32, kI64}), {}};
    p.denominator->v.push_back(static_cast<double>(choose<int>(rng, {1, 3, 1000, -7, 0})));
  }
  p.empty_mean_is_nan = p.reduction == XENT_REDUCTION_MEAN && chance(rng, 0.2);
  if (chance(rng, 0.4)) add_weights(rng, p);
  if (chance(rng, 0.4)) add_mask(rng, p, choose<DLDataType>(rng, {kBool, kU8, kI32, kI64, kF32}));
  if (chance(rng, 0.7)) {
    const bool per_row = p.reduction == XENT_REDUCTION_NONE && chance(rng, 0.7);
    add_upstream(rng, p, choose<DLDataType>(rng, {kF32, kF16, kBf16, kF64}), per_row);
  }
  if (chance(rng, 0.4)) add_ignored(rng, p, choose<int64_t>(rng, {-100, -1, 0, p.real_classes(), 2147483647}));
  if (chance(rng, 0.1)) p.targets[static_cast<size_t>(pick(rng, 0, rows - 1))] = -5;
  for (int64_t r = 0; r < rows; ++r) {
    for (int64_t c = p.real_classes(); c < vocab; ++c) p.logits[static_cast<size_t>(r * vocab + c)] = kNaN;
  }
  return p;
}

}  // namespace xent_test
