// SPDX-FileCopyrightText: the libxent authors
// SPDX-License-Identifier: Apache-2.0

// What loss and gradient are multiplied and divided by: products that leave the type on the way to a result that does
// not, results at the type's end, denominators that float32 does not hold.

#include <cmath>

#include "generate.hpp"

namespace xent_test {
namespace {

class Factors : public BackendTest {
 protected:
  // Weights of about `weight`; 0: none. A denominator of 0: none.
  Problem start(DLDataType dtype, double upstream, double weight, double denominator, double scale = 0) {
    Problem p = plain(rng_, backend(), dtype, {5}, 77, choose(rng_, kFamilies));
    p.reduction = denominator != 0 ? XENT_REDUCTION_SUM : XENT_REDUCTION_NONE;
    p.logit_scale = scale;
    if (scale != 0) {
      draw_logits(rng_, p, Family::kRandom);
      for (double &x : p.logits) x /= scale;
    }
    if (denominator != 0) p.denominator = Values{kF32, {denominator}};
    p.upstream = Values{dtype == kF64 ? kF64 : kF32, {upstream}};
    if (weight != 0) {
      for (int64_t r = 0; r < 5; ++r) p.weights.push_back(weight * static_cast<double>(pick(rng_, 50, 200)) / 100);
    }
    p.quantize();
    return p;
  }
  // With what else enters the factors.
  void verify_with_options(Problem p) {
    verify(p);
    p.label_smoothing = 0.1;
    verify(p);
    p.z_loss = 1e-3;
    verify(p);
    if (p.logit_scale != 0) return;
    p.softcap = 20;
    verify(p);
  }
};

TEST_P(Factors, SmallProductsThatLeaveTheTypeOnTheWay) {
  // {upstream, weight, denominator, logit_scale}: any order of multiplying in float32 fails in one of them.
  const std::vector<std::vector<double>> cases = {
      {1e-30, 1e30, 0},           {1e30, 1e-30, 0},        {1e30, 1e30, 1e35},          {1e-30, 1e-30, 1e-35},
      {1e-30, 1e38, 1e20},        {1e30, 1e-30, 1e-20},    {1e20, 1e-30, 1e-30},        {1e-20, 1e30, 1e30},
      {1e30, 1e30, 0, 1e-30},     {1e-30, 1e-30, 0, 1e30}, {1e25, 1e-25, 1e-25, 1e-20}, {1e-25, 1e30, 1e30, 1e25},
      {1e-38, 1e-38, 1e-38, 1e20}};
  for (const DLDataType dtype : {kF32, kBf16, kF64}) {
    if (dtype == kF64 && backend() != Backend::kCpu) continue;
    for (const auto &c : cases) verify_with_options(start(dtype, c[0], c[1], c[2], c.size() > 3 ? c[3] : 0));
  }
}

TEST_P(Factors, SmallUpstreamOfAWiderType) {
  // What float32 does not hold as a factor.
  for (const double upstream : {1e-60, 1e60}) {
    Problem p = start(kF32, 1, 1 / std::sqrt(upstream), 0);
    p.weights.assign(5, upstream < 1 ? 1e37 : 1e-37);
    p.upstream = Values{kF64, {upstream}};
    p.quantize();
    verify_with_options(p);
  }
}

TEST_P(Factors, SmallLossesBeyondTheTypeBeforeTheDenominator) {
  for (const DLDataType dtype : {kF32, kBf16, kF16}) {
    verify_with_options(start(dtype, 1e-30, 1.7e38, 1e30));
    Problem p = start(dtype, 1, 0, 1e10);
    p.z_loss = 1e38;  // and the z-loss' slope
    verify(p);
  }
}

TEST_P(Factors, SmallGradientsOfSubnormalFactors) {
  // On both classes the probability is near 1 in some row: what a factor loses there is in the result.
  for (const DLDataType dtype : {kF32, kBf16, kF64}) {
    if (dtype == kF64 && backend() != Backend::kCpu) continue;
    const double lowest = static_cast<double>(ulp_at(dtype == kF64 ? kF64 : kF32, 0));
    for (int64_t round = 0; round < 50; ++round) {
      Problem p = plain(rng_, backend(), dtype, {8}, 9);
      p.reduction = XENT_REDUCTION_NONE;
      p.grad_dtype = dtype == kF64 ? kF64 : kF32;
      for (double &x : p.logits) x = round_to(dtype, x * 3);
      for (int64_t r = 0; r < 8; ++r) p.weights.push_back(lowest * static_cast<double>(pick(rng_, 1, 400)));
      p.upstream = Values{kF32, {choose<double>(rng_, {1, 0.3, -1.7})}};
      p.quantize();
      verify(p);
      p.label_smoothing = 0.1;
      verify(p);
      p.softcap = 20;
      verify(p);
    }
  }
}

TEST_P(Factors, SmallProbabilitiesTimesLargeSlopes) {
  // z-loss and logit_scale bring probabilities that are 0 in the type, from 2^-80 to 2^-260, back into it.
  for (const DLDataType dtype : dtypes_of(backend())) {
    for (const double slope : {1e10, 1e17, 1e19, 1e25, 1e36}) {
      for (const double upstream : {1.0, 1e-9}) {
        Problem p = plain(rng_, backend(), dtype, {3}, 65);
        p.reduction = XENT_REDUCTION_NONE;
        p.grad_dtype = dtype == kF64 ? kF64 : kF32;
        p.upstream = Values{kF32, {upstream}};
        for (double &x : p.logits) x = 50 - static_cast<double>(pick(rng_, 55, 180));
        for (size_t r = 0; r < 3; ++r) p.logits[r * 65 + static_cast<size_t>(pick(rng_, 0, 64))] = 50;
        p.z_loss = slope / 100;
        p.quantize();
        verify(p);
        p.label_smoothing = 0.1;
        verify(p);
        if (dtype == kF16) continue;  // does not hold the logits of such a scale
        p.z_loss = 0;
        p.logit_scale = slope;
        for (double &x : p.logits) x /= slope;
        p.quantize();
        verify(p);
      }
    }
  }
}

TEST_P(Factors, SmallDenominatorsThatFloat32DoesNotHold) {
  for (const DLDataType dtype : dtypes_of(backend())) {
    for (const int32_t reduction : {XENT_REDUCTION_SUM, XENT_REDUCTION_MEAN}) {
      for (const double value : {16777217.0, -33554435.0, 2147483647.0, -2147483648.0, 1099511627779.0,
                                 9007199254740991.0, -4611686018427389952.0}) {
        for (const DLDataType type : {kI32, kI64}) {
          if (type == kI32 && std::fabs(value) > 2147483648.0) continue;
          Problem p = start(dtype, std::fabs(value), 0, 1);
          p.reduction = reduction;
          p.denominator = Values{type, {value}};
          verify(p);
        }
      }
    }
  }
}

XENT_BACKENDS(Factors);

}  // namespace
}  // namespace xent_test
