// SPDX-FileCopyrightText: the libxent authors
// SPDX-License-Identifier: Apache-2.0

// The CPU backend's vector functions, for every instruction set that this machine has: exp and tanh against long
// double.

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "cpu_math_test.cpp"
#define HWY_COMPILE_ALL_ATTAINABLE
#include "hwy/foreach_target.h"
// After foreach_target.h
#include "cpu/kernels.hpp"
#include "cpu/math-inl.hpp"

HWY_BEFORE_NAMESPACE();
namespace xent::cpu::HWY_NAMESPACE {
namespace hn = hwy::HWY_NAMESPACE;

// y[i] = exp(x[i]) * 2^lift; `n` a multiple of 64.
template <class A>
void ExpAll(const A *x, A *y, size_t n, int lift) {
  using C = ExpConst<A>;
  const Tag<A> d;
  const auto round = hn::Set(d, C::kRound + static_cast<A>(lift));
  const auto lowest = hn::Set(d, static_cast<A>(C::kLowest - lift * 0.69314718055994531));
  for (size_t i = 0; i < n; i += hn::Lanes(d)) {
    const auto v = hn::LoadU(d, x + i);
    hn::StoreU(lift == 0 ? Exp(d, v) : ExpLifted(d, v, round, lowest), d, y + i);
  }
}
// y[i] = exp(x[i]) * 2^lift by ExpDown, four vectors at once or one by one.
template <class A>
void DownAll(const A *x, A *y, size_t n, int lift, bool four) {
  const Tag<A> d;
  const size_t lanes = hn::Lanes(d);
  const Lift<A> c(lift);
  const auto round = hn::Set(d, c.round), deepest = hn::Set(d, c.deepest);
  for (size_t i = 0; i < n; i += 4 * lanes) {
    hn::Vec<Tag<A>> v[4];
    for (size_t k = 0; k < 4; ++k) v[k] = hn::Neg(hn::LoadU(d, x + i + k * lanes));
    if (four) {
      ExpDown4(d, v[0], v[1], v[2], v[3], round, deepest);
    } else {
      for (auto &one : v) one = ExpDown(d, one, round, deepest);
    }
    for (size_t k = 0; k < 4; ++k) hn::StoreU(v[k], d, y + i + k * lanes);
  }
}
void DownF32(const float *x, float *y, size_t n, int lift, bool four) { DownAll(x, y, n, lift, four); }
void DownF64(const double *x, double *y, size_t n, int lift, bool four) { DownAll(x, y, n, lift, four); }
bool IsShort() { return Lift<float>::kShort; }
template <class A>
void TanhAll(const A *x, A *y, A *slope, size_t n) {
  const Tag<A> d;
  const auto one = hn::Set(d, A{1});
  for (size_t i = 0; i < n; i += hn::Lanes(d)) {
    hn::Vec<Tag<A>> s;
    hn::StoreU(Squash(d, hn::LoadU(d, x + i), one, one, &s), d, y + i);
    hn::StoreU(s, d, slope + i);
  }
}
void ExpF32(const float *x, float *y, size_t n, int lift) { ExpAll(x, y, n, lift); }
void ExpF64(const double *x, double *y, size_t n, int lift) { ExpAll(x, y, n, lift); }
void TanhF32(const float *x, float *y, float *slope, size_t n) { TanhAll(x, y, slope, n); }
void TanhF64(const double *x, double *y, double *slope, size_t n) { TanhAll(x, y, slope, n); }

}  // namespace xent::cpu::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#if HWY_ONCE

#include <gtest/gtest.h>

#include <algorithm>
#include <bit>
#include <cmath>
#include <limits>
#include <string>
#include <vector>

#include "cpu_targets.hpp"

namespace xent::cpu {
HWY_EXPORT(ExpF32);
HWY_EXPORT(ExpF64);
HWY_EXPORT(DownF32);
HWY_EXPORT(DownF64);
HWY_EXPORT(IsShort);
HWY_EXPORT(TanhF32);
HWY_EXPORT(TanhF64);

namespace {

// Measured: exp 1.020 over every float in [-87.33, -0] with AVX2, 0.960 in double; tanh 2.49, its slope 3.58.
constexpr double kExpUlps = 1.03, kTanhUlps = 3, kSlopeUlps = 4;

constexpr float kInf = std::numeric_limits<float>::infinity();
constexpr float kNan = std::numeric_limits<float>::quiet_NaN();

void exp_all(const std::vector<float> &x, std::vector<float> &y, int lift) {
  HWY_DYNAMIC_DISPATCH(ExpF32)(x.data(), y.data(), x.size(), lift);
}
void exp_all(const std::vector<double> &x, std::vector<double> &y, int lift) {
  HWY_DYNAMIC_DISPATCH(ExpF64)(x.data(), y.data(), x.size(), lift);
}
void tanh_all(const std::vector<float> &x, std::vector<float> &y, std::vector<float> &slope) {
  HWY_DYNAMIC_DISPATCH(TanhF32)(x.data(), y.data(), slope.data(), x.size());
}
void tanh_all(const std::vector<double> &x, std::vector<double> &y, std::vector<double> &slope) {
  HWY_DYNAMIC_DISPATCH(TanhF64)(x.data(), y.data(), slope.data(), x.size());
}

// In units in the last place of A at the reference.
template <class A>
double ulps(A got, long double want) {
  int exponent;
  std::frexp(want, &exponent);
  exponent = std::max(exponent, std::numeric_limits<A>::min_exponent);
  return static_cast<double>(std::fabs((got - want) / std::ldexp(1.0L, exponent - std::numeric_limits<A>::digits)));
}

template <class A>
void pad(std::vector<A> &values) {
  while (values.size() % 256 != 0) values.push_back(values.back());
}

// Numbers from -|lowest| to -0 by steps of their bit pattern, so that every binade is met alike.
std::vector<float> negative(float lowest, uint32_t step) {
  std::vector<float> values;
  for (uint32_t bits = 0x80000000u; bits <= std::bit_cast<uint32_t>(lowest); bits += step) {
    values.push_back(std::bit_cast<float>(bits));
  }
  values.push_back(lowest);
  pad(values);
  return values;
}
std::vector<double> negative(double lowest, uint64_t step) {
  std::vector<double> values;
  for (uint64_t bits = std::bit_cast<uint64_t>(-1e-20); bits <= std::bit_cast<uint64_t>(lowest); bits += step) {
    values.push_back(std::bit_cast<double>(bits));
  }
  values.push_back(lowest);
  pad(values);
  return values;
}

class CpuMath : public CpuTargets {};
XENT_CPU_TARGETS(CpuMath);

template <class A>
void check_exp(const std::vector<A> &x, int lift, double bar) {
  std::vector<A> y(x.size());
  exp_all(x, y, lift);
  double worst = 0;
  A at = 0;
  for (size_t i = 0; i < x.size(); ++i) {
    const double error = ulps(y[i], std::ldexp(std::exp(static_cast<long double>(x[i])), lift));
    if (!(error <= worst)) worst = error, at = x[i];
  }
  ::testing::Test::RecordProperty("worst_ulps", std::to_string(worst));
  EXPECT_LE(worst, bar) << "at " << at;
}

TEST_P(CpuMath, ExpFloat) { check_exp(negative(-87.33f, 1009), 0, kExpUlps); }
TEST_P(CpuMath, ExpFloatLifted) {
  for (int lift : {1, 37, 100}) check_exp(negative(-87.33f - 0.6931f * static_cast<float>(lift), 5003), lift, kExpUlps);
}
TEST_P(CpuMath, ExpDouble) { check_exp(negative(-708.39, uint64_t{1} << 40), 0, kExpUlps); }
TEST_P(CpuMath, ExpDoubleLifted) { check_exp(negative(-708.39 - 0.6931 * 100, uint64_t{1} << 42), 100, kExpUlps); }

void down_all(const std::vector<float> &x, std::vector<float> &y, int lift, bool four) {
  HWY_DYNAMIC_DISPATCH(DownF32)(x.data(), y.data(), x.size(), lift, four);
}
void down_all(const std::vector<double> &x, std::vector<double> &y, int lift, bool four) {
  HWY_DYNAMIC_DISPATCH(DownF64)(x.data(), y.data(), x.size(), lift, four);
}

// What the head of cpu/math-inl.hpp states, as a part of the stated error.
template <class A>
void check_down(const std::vector<A> &x, int lift) {
  const bool is_short = sizeof(A) == 4 && HWY_DYNAMIC_DISPATCH(IsShort)();
  std::vector<A> y(x.size()), four(x.size());
  down_all(x, y, lift, false);
  down_all(x, four, lift, true);
  double worst = 0;
  A at = 0;
  for (size_t i = 0; i < x.size(); ++i) {
    ASSERT_EQ(y[i], four[i]) << x[i];
    const long double want = std::ldexp(std::exp(static_cast<long double>(x[i])), lift);
    const double error = is_short ? static_cast<double>(std::fabs(y[i] / want - 1) / (1.7e-7L - 1.4e-8L * x[i]))
                                  : ulps(y[i], want) / kExpUlps;
    if (!(error <= worst)) worst = error, at = x[i];
  }
  ::testing::Test::RecordProperty("worst_of_stated", std::to_string(worst));
  EXPECT_LE(worst, 1) << "at " << at;
}
TEST_P(CpuMath, ExpDownFloat) {
  for (int lift : {0, 1, 37, 100}) check_down(negative(-87.33f - 0.6931f * static_cast<float>(lift), 1009), lift);
}
TEST_P(CpuMath, ExpDownDouble) {
  for (int lift : {0, 100}) check_down(negative(-708.39 - 0.6931 * lift, uint64_t{1} << 42), lift);
}

template <class A>
void check_exp_specials() {
  const A inf = std::numeric_limits<A>::infinity();
  const A largest = std::numeric_limits<A>::max();
  std::vector<A> x = {
      A{0},     -A{0},    -inf,    std::numeric_limits<A>::quiet_NaN(),  -std::numeric_limits<A>::quiet_NaN(),
      -largest, A{-1000}, A{-1e6}, -std::numeric_limits<A>::denorm_min()};
  const size_t count = x.size();
  pad(x);
  std::vector<A> y(x.size());
  for (const int way : {0, 1, 2})
    for (const int lift : {0, 100}) {
      if (way == 0) {
        exp_all(x, y, lift);
      } else {
        down_all(x, y, lift, way == 2);
      }
      const A one = std::ldexp(A{1}, lift);
      const A want[] = {one, one, 0, inf, inf, 0, 0, 0, one};
      for (size_t i = 0; i < count; ++i) {
        if (std::isnan(x[i])) {
          EXPECT_TRUE(std::isnan(y[i])) << i;
        } else {
          EXPECT_EQ(y[i], want[i]) << i;
          EXPECT_FALSE(std::signbit(y[i])) << i;
        }
      }
    }
}
TEST_P(CpuMath, ExpSpecials) {
  check_exp_specials<float>();
  check_exp_specials<double>();
}

TEST_P(CpuMath, NanStaysNan) {
  std::vector<float> x;
  for (uint32_t bits : {0x7F800001u, 0x7FFFFFFFu, 0xFF800001u, 0xFFFFFFFFu, 0x7FC001FFu, 0xFFA00000u}) {
    x.push_back(std::bit_cast<float>(bits));
  }
  pad(x);
  std::vector<float> y(x.size());
  for (const bool four : {false, true}) {
    down_all(x, y, 0, four);
    for (size_t i = 0; i < x.size(); ++i) EXPECT_TRUE(std::isnan(y[i])) << i;
  }
}

template <class A>
void check_tanh(std::vector<A> x, double bar, double slope_bar) {
  const size_t half = x.size();
  for (size_t i = 0; i < half; ++i) x.push_back(-x[i]);
  std::vector<A> y(x.size()), slope(x.size());
  tanh_all(x, y, slope);
  double worst = 0, worst_slope = 0;
  for (size_t i = 0; i < x.size(); ++i) {
    const long double v = x[i];
    worst = std::max(worst, ulps(y[i], std::tanh(v)));
    if (std::signbit(y[i]) != std::signbit(x[i])) worst = 1e9;
    // 4q / (1 + q)^2 with q = exp(-2|v|); exp's relative error grows with its argument's rounding, which is exact here.
    const long double q = std::exp(-2 * std::fabs(v));
    // Below the normal range it counts in the subnormals' unit.
    if (q > std::numeric_limits<A>::min() / (1 << 20))
      worst_slope = std::max(worst_slope, ulps(slope[i], 4 * q / ((1 + q) * (1 + q))));
  }
  EXPECT_LE(worst, bar);
  EXPECT_LE(worst_slope, slope_bar);
}
TEST_P(CpuMath, TanhFloat) { check_tanh(negative(-60.0f, 2003), kTanhUlps, kSlopeUlps); }
TEST_P(CpuMath, TanhDouble) { check_tanh(negative(-400.0, uint64_t{1} << 41), kTanhUlps, kSlopeUlps); }

TEST_P(CpuMath, TanhSpecials) {
  std::vector<float> x = {kInf, -kInf, kNan, 0.0f, -0.0f, 1e30f, -1e30f};
  pad(x);
  std::vector<float> y(x.size()), slope(x.size());
  tanh_all(x, y, slope);
  EXPECT_EQ(y[0], 1.0f);
  EXPECT_EQ(y[1], -1.0f);
  EXPECT_EQ(slope[0], 0.0f);
  EXPECT_EQ(slope[1], 0.0f);
  EXPECT_TRUE(std::isnan(y[2]));
  EXPECT_TRUE(std::isnan(slope[2]));
  EXPECT_EQ(y[3], 0.0f);
  EXPECT_TRUE(std::signbit(y[4]));
  EXPECT_EQ(slope[3], 1.0f);
  EXPECT_EQ(y[5], 1.0f);
  EXPECT_EQ(slope[6], 0.0f);
}

}  // namespace
}  // namespace xent::cpu

#endif
