// SPDX-FileCopyrightText: the libxent authors
// SPDX-License-Identifier: Apache-2.0

// The yardstick itself: the reference against closed forms and finite differences, the formats against their own
// definitions, the comparison and the guards against results that are wrong on purpose.

#include "reference.hpp"

#include <gtest/gtest-spi.h>

#include <algorithm>
#include <cmath>

#include "generate.hpp"

namespace xent_test {
namespace {

reference::Options options(int64_t classes) {
  reference::Options o;
  o.vocab = o.classes = classes;
  o.reduction = reference::Reduction::kNone;
  return o;
}

TEST(Reference, UniformLogitsCostTheLogarithmOfTheClasses) {
  const std::vector<double> x(100, 3.0);
  const int64_t target = 7;
  const auto f = reference::forward<double>(options(100), {1, x.data(), &target, nullptr, nullptr, {}, nullptr, false});
  EXPECT_NEAR(f.rows[0].loss, std::log(100.0), 1e-14);
  EXPECT_NEAR(f.rows[0].entropy, std::log(100.0), 1e-14);
  EXPECT_NEAR(f.rows[0].lse, 3 + std::log(100.0), 1e-14);
  EXPECT_EQ(f.rows[0].predicted, 0);
}

TEST(Reference, TwoLogitsByHand) {
  const double x[] = {1, 3};
  const int64_t target = 0;
  auto o = options(2);
  o.label_smoothing = 0.2;
  o.z_loss = 0.5;
  const auto f = reference::forward<double>(o, {1, x, &target, nullptr, nullptr, {}, nullptr, false});
  const double log_sum = std::log1p(std::exp(-2.0)), lse = 3 + log_sum;
  EXPECT_NEAR(f.rows[0].loss, 0.8 * (2 + log_sum) + 0.2 * (log_sum + 1) + 0.5 * lse * lse, 1e-14);
}

TEST(Reference, TheGradientIsTheSlopeOfTheLoss) {
  Rng rng = test_rng();
  for (const double softcap : {0.0, 3.0}) {
    for (const double smoothing : {0.0, 0.3}) {
      for (const double z_loss : {0.0, 0.1}) {
        auto o = options(9);
        o.softcap = softcap;
        o.label_smoothing = smoothing;
        o.z_loss = z_loss;
        o.logit_scale = 0.7;
        o.classes = 8;
        std::vector<double> x = draw_normal(rng, 9, 2);
        const int64_t target = pick(rng, 0, 7);
        const double weight = 1.3, upstream = -0.6;
        const reference::Inputs in = {1, x.data(), &target, nullptr, &weight, {}, &upstream, false};
        std::vector<long double> grad(9), bar(9);
        reference::gradient<long double>(o, in, reference::forward<long double>(o, in), 0, grad.data(), bar.data());
        for (size_t i = 0; i < 9; ++i) {
          const double h = 0x1p-20, at = x[i];
          x[i] = at + h;
          const long double up = reference::forward<long double>(o, in).rows[0].loss;
          x[i] = at - h;
          const long double down = reference::forward<long double>(o, in).rows[0].loss;
          x[i] = at;
          EXPECT_NEAR(static_cast<double>(grad[i]), static_cast<double>(upstream * (up - down) / (2 * h)), 1e-10);
        }
      }
    }
  }
}

TEST(Reference, ReductionsAndCounts) {
  const double x[] = {0, 1, 2, 3, 4, 5, 6, 7};
  const int64_t targets[] = {0, 1, -100, 9};
  const double weights[] = {2, 0.5, 7, 3};
  auto o = options(2);
  o.ignore_index = -100;
  o.reduction = reference::Reduction::kMean;
  const auto f = reference::forward<double>(o, {4, x, targets, nullptr, weights, {}, nullptr, false});
  EXPECT_EQ(f.counts[0], 2);
  EXPECT_EQ(f.counts[1], 1);
  EXPECT_EQ(f.counts[2], 1);
  EXPECT_EQ(f.divisor, 5.5);
  EXPECT_TRUE(std::isnan(f.loss));
}

TEST(Formats, EveryHalfPrecisionValueSurvives) {
  for (const DLDataType t : {kF16, kBf16}) {
    for (uint64_t bits = 0; bits < 65536; ++bits) {
      const double v = decode_float(t, bits);
      if (std::isnan(v)) continue;
      ASSERT_EQ(encode_float(t, v), bits);
      ASSERT_EQ(round_to(t, v), v);
    }
  }
  EXPECT_EQ(decode_float(kF16, 0x3C00), 1.0);
  EXPECT_EQ(decode_float(kF16, 0x0001), 0x1p-24);
  EXPECT_EQ(decode_float(kBf16, 0x3F80), 1.0);
  EXPECT_EQ(decode_float(kBf16, 0x0001), 0x1p-133);
}

TEST(Formats, RoundingIsToNearestEven) {
  EXPECT_EQ(round_to(kBf16, 1 + 0x1p-8), 1.0);
  EXPECT_EQ(round_to(kBf16, 1 + 0x3p-8), 1 + 0x1p-6);
  EXPECT_EQ(round_to(kBf16, 1 + 0x1p-8 + 0x1p-30), 1 + 0x1p-7);
  EXPECT_EQ(round_to(kF16, 65519.0), 65504.0);
  EXPECT_EQ(round_to(kF16, 65520.0), kInf);
  Rng rng = test_rng();
  for (int i = 0; i < 20000; ++i) {
    const double v =
        std::ldexp(std::uniform_real_distribution<double>(-1, 1)(rng), static_cast<int>(pick(rng, -140, 128)));
    for (const DLDataType t : {kF16, kBf16, kF32}) ASSERT_EQ(decode_float(t, encode_float(t, v)), round_to(t, v)) << v;
  }
  for (const float f : {1.0f / 3, -1e-40f, 3e38f, 0x1p-149f}) {
    EXPECT_EQ(decode_float(kF32, encode_float(kF32, f)), f);
  }
  EXPECT_EQ(encode_float(kF32, 0.1), 0x3DCCCCCDu);
}

TEST(Check, SeesAGradientOffByTwiceItsBar) {
  Rng rng = test_rng();
  Problem p = plain(rng, Backend::kCpu, kF32, {3}, 40);
  p.reduction = XENT_REDUCTION_NONE;
  const auto good = run(p, Mode::kForwardBackward);
  ASSERT_TRUE(good);
  EXPECT_TRUE(check(p, *good, Mode::kForwardBackward));
  const auto fails = [&](Result bad) {
    ::testing::TestPartResultArray failures;
    const ::testing::ScopedFakeTestPartResultReporter reporter(
        ::testing::ScopedFakeTestPartResultReporter::INTERCEPT_ONLY_CURRENT_THREAD, &failures);
    return !check(p, bad, Mode::kForwardBackward);
  };
  for (const size_t i : {size_t{0}, size_t{57}, size_t{119}}) {
    Result bad = *good;
    bad.grad[i] = encode_float(kF32, decode_float(kF32, bad.grad[i]) * (1 + 3e-5) + 1e-30);
    EXPECT_TRUE(fails(bad)) << i;
  }
  Result bad = *good;
  const double loss = decode_float(kF32, bad.loss[1]);
  bad.loss[1] = encode_float(kF32, loss + 1e-5 * std::max(1.0, std::abs(loss)));  // the bar is relative above 1
  EXPECT_TRUE(fails(bad));
  bad = *good;
  bad.lse[2] = encode_float(kF32, kNaN);
  EXPECT_TRUE(fails(bad));
  bad = *good;
  ++bad.counts[0];
  EXPECT_TRUE(fails(bad));
  bad = *good;
  bad.stats[3] = encode_float(kF32, decode_float(kF32, bad.stats[3]) * 1.00001);
  EXPECT_TRUE(fails(bad));
}

TEST(Guards, SeeAWriteBesideATensor) {
  std::string why;
  Device *host = device_for(Backend::kCpu, &why);
  for (const int64_t byte : {int64_t{-1}, int64_t{-512}, int64_t{9}, int64_t{20}, int64_t{531}}) {
    Tensor t(host, kF32, {2}, Layout{{4}});  // bytes 0 to 3 and 16 to 19
    t.allow_writes();
    t.memory().upload();
    t.memory().address()[0] = 1;
    EXPECT_EQ(t.memory().download(), "");
    t.memory().upload();
    t.memory().address()[byte] = 1;
    EXPECT_NE(t.memory().download(), "") << byte;
  }
  Tensor input(host, kF32, {2}, {});
  input.memory().upload();
  input.memory().address()[0] = 1;
  EXPECT_NE(input.memory().download(), "");
}

}  // namespace
}  // namespace xent_test
