// SPDX-FileCopyrightText: the libxent authors
// SPDX-License-Identifier: Apache-2.0

// The CPU backend's vector functions, for every instruction set that this machine has: exp and tanh against long
// double, the 16-bit conversions over all their values and every rounding boundary.

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "cpu_math_test.cpp"
#define HWY_COMPILE_ALL_ATTAINABLE
#include "hwy/foreach_target.h"
// After foreach_target.h
#include "cpu/load-inl.hpp"
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
void WidenF16(const F16 *x, float *y, size_t n) { WidenBlock(x, y, n); }
void WidenBF16(const BF16 *x, float *y, size_t n) { WidenBlock(x, y, n); }
void NarrowF16(const float *x, F16 *y, size_t n) { NarrowBlock(x, y, n); }
void NarrowBF16(const float *x, BF16 *y, size_t n) { NarrowBlock(x, y, n); }

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

namespace xent::cpu {
HWY_EXPORT(ExpF32);
HWY_EXPORT(ExpF64);
HWY_EXPORT(TanhF32);
HWY_EXPORT(TanhF64);
HWY_EXPORT(WidenF16);
HWY_EXPORT(WidenBF16);
HWY_EXPORT(NarrowF16);
HWY_EXPORT(NarrowBF16);

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
  while (values.size() % 64 != 0) values.push_back(values.back());
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

// Runs the body once for each instruction set that was compiled and that the processor has.
class CpuMath : public ::testing::TestWithParam<int64_t> {
 protected:
  void SetUp() override {
    hwy::SetSupportedTargetsForTest(GetParam());
    hwy::GetChosenTarget().Update(hwy::SupportedTargets());
  }
  void TearDown() override {
    hwy::SetSupportedTargetsForTest(0);
    hwy::GetChosenTarget().Update(hwy::SupportedTargets());
  }
};
INSTANTIATE_TEST_SUITE_P(Targets, CpuMath, ::testing::ValuesIn(hwy::SupportedAndGeneratedTargets()),
                         [](const auto &target) { return std::string(hwy::TargetName(target.param)); });

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
  for (int lift : {0, 100}) {
    exp_all(x, y, lift);
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

// ---- 16-bit types: the test's own decoding, by their definition

struct Format {
  int exponent_bits, mantissa_bits;
};
constexpr Format kF16 = {5, 10}, kBF16 = {8, 7};

double decode(const Format &format, uint16_t bits) {
  const int bias = (1 << (format.exponent_bits - 1)) - 1;
  const int top = (1 << format.exponent_bits) - 1;
  const int exponent = (bits >> format.mantissa_bits) & top;
  const int mantissa = bits & ((1 << format.mantissa_bits) - 1);
  double value;
  if (exponent == top) {
    value = mantissa != 0 ? std::numeric_limits<double>::quiet_NaN() : std::numeric_limits<double>::infinity();
  } else if (exponent == 0) {
    value = std::ldexp(mantissa, 1 - bias - format.mantissa_bits);
  } else {
    value = std::ldexp(mantissa + (1 << format.mantissa_bits), exponent - bias - format.mantissa_bits);
  }
  return (bits & 0x8000) != 0 ? -value : value;
}

template <class T>
void check_widen(const Format &format, void (*widen)(const T *, float *, size_t)) {
  std::vector<T> all(65536);
  for (size_t i = 0; i < all.size(); ++i) all[i].bits = static_cast<uint16_t>(i);
  // Every vector, then every length of the last one.
  std::vector<float> wide(all.size() + 1, -7.0f);
  widen(all.data(), wide.data(), all.size());
  for (size_t i = 0; i < all.size(); ++i) {
    const double want = decode(format, static_cast<uint16_t>(i));
    if (std::isnan(want)) {
      ASSERT_TRUE(std::isnan(wide[i])) << i;
    } else {
      ASSERT_EQ(wide[i], want) << i;
      ASSERT_EQ(std::signbit(wide[i]), std::signbit(want)) << i;
    }
  }
  for (size_t n = 1; n < 70; ++n) {
    std::vector<float> some(n + 64, -7.0f);
    widen(all.data() + 1000, some.data(), n);
    for (size_t i = 0; i < some.size(); ++i) ASSERT_EQ(some[i], i < n ? wide[1000 + i] : -7.0f) << n << ' ' << i;
  }
}
TEST_P(CpuMath, WidenHalf) {
  check_widen<F16>(kF16, [](const F16 *x, float *y, size_t n) { HWY_DYNAMIC_DISPATCH(WidenF16)(x, y, n); });
}
TEST_P(CpuMath, WidenBfloat) {
  check_widen<BF16>(kBF16, [](const BF16 *x, float *y, size_t n) { HWY_DYNAMIC_DISPATCH(WidenBF16)(x, y, n); });
}

// Each number itself, and the middle between it and the next with the floats on both sides of it.
template <class T>
void check_narrow(const Format &format, void (*narrow)(const float *, T *, size_t)) {
  const int top = (1 << format.exponent_bits) - 1;
  const uint16_t infinity = static_cast<uint16_t>(top << format.mantissa_bits);
  std::vector<float> x;
  std::vector<uint16_t> want;
  const auto add = [&](float value, uint16_t bits) {
    x.push_back(value), want.push_back(bits);
    x.push_back(-value), want.push_back(static_cast<uint16_t>(bits | 0x8000));
  };
  for (uint16_t bits = 0; bits < infinity; ++bits) {
    const double low = decode(format, bits);
    // Beyond the largest number the next would be twice its power of two.
    const double high =
        bits + 1 == infinity ? std::ldexp(1.0, 1 << (format.exponent_bits - 1)) : decode(format, bits + 1);
    const float middle = static_cast<float>((low + high) / 2);
    add(static_cast<float>(low), bits);
    add(middle, static_cast<uint16_t>(bits + (bits & 1)));
    add(std::nextafter(middle, 0.0f), bits);
    add(std::nextafter(middle, kInf), static_cast<uint16_t>(bits + 1));
  }
  add(kInf, infinity);
  add(std::numeric_limits<float>::max(), infinity);
  add(std::numeric_limits<float>::denorm_min(), 0);
  std::vector<T> y(x.size());
  narrow(x.data(), y.data(), x.size());
  for (size_t i = 0; i < x.size(); ++i) ASSERT_EQ(y[i].bits, want[i]) << x[i];

  // NaN of every kind stays NaN and becomes quiet.
  std::vector<float> nans;
  for (uint32_t low : {1u, 0x1000u, 0x1FFFu, 0x2000u, 0xFFFFu, 0x10000u, 0x3FFFFFu, 0x400000u, 0x7FFFFFu}) {
    nans.push_back(std::bit_cast<float>(0x7F800000u | low));
    nans.push_back(std::bit_cast<float>(0xFF800000u | low));
  }
  std::vector<T> out(nans.size());
  narrow(nans.data(), out.data(), nans.size());
  const int quiet = 1 << (format.mantissa_bits - 1);
  for (size_t i = 0; i < nans.size(); ++i) {
    EXPECT_TRUE(std::isnan(decode(format, out[i].bits))) << i;
    EXPECT_NE(out[i].bits & quiet, 0) << i;
    EXPECT_EQ(out[i].bits >> 15, static_cast<int>(i & 1)) << i;
  }

  for (size_t n = 1; n < 70; ++n) {
    std::vector<T> some(n + 64, T{0x1234});
    narrow(x.data() + 1000, some.data(), n);
    for (size_t i = 0; i < some.size(); ++i) ASSERT_EQ(some[i].bits, i < n ? want[1000 + i] : 0x1234) << n << ' ' << i;
  }
}
TEST_P(CpuMath, NarrowHalf) {
  check_narrow<F16>(kF16, [](const float *x, F16 *y, size_t n) { HWY_DYNAMIC_DISPATCH(NarrowF16)(x, y, n); });
}
TEST_P(CpuMath, NarrowBfloat) {
  check_narrow<BF16>(kBF16, [](const float *x, BF16 *y, size_t n) { HWY_DYNAMIC_DISPATCH(NarrowBF16)(x, y, n); });
}

}  // namespace
}  // namespace xent::cpu

#endif
