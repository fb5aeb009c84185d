// SPDX-FileCopyrightText: the libxent authors
// SPDX-License-Identifier: Apache-2.0

// The CPU backend's 16-bit conversions, for every instruction set that this machine has, over all their values and
// every rounding boundary.

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "cpu_formats_test.cpp"
#define HWY_COMPILE_ALL_ATTAINABLE
#include "hwy/foreach_target.h"
// After foreach_target.h
#include "cpu/load-inl.hpp"

HWY_BEFORE_NAMESPACE();
namespace xent::cpu::HWY_NAMESPACE {
namespace hn = hwy::HWY_NAMESPACE;

// Even columns from `a`, odd ones from `b`, n of each.
void StorePairs(const float *a, const float *b, BF16 *to, size_t n) {
  const Tag<float> d;
  for (size_t i = 0; i < n; i += hn::Lanes(d)) {
    StorePair<false>(d, hn::LoadU(d, a + i), hn::LoadU(d, b + i), to + 2 * i);
  }
}
void LoadPairs(const BF16 *from, float *a, float *b, size_t n) {
  const Tag<float> d;
  for (size_t i = 0; i < n; i += hn::Lanes(d)) {
    hn::Vec<Tag<float>> x, y;
    LoadPair(d, from + 2 * i, x, y);
    hn::StoreU(x, d, a + i);
    hn::StoreU(y, d, b + i);
  }
}
void WidenF16(const F16 *x, float *y, size_t n) { WidenBlock(x, y, n); }
void WidenBF16(const BF16 *x, float *y, size_t n) { WidenBlock(x, y, n); }
void NarrowF16(const float *x, F16 *y, size_t n) { NarrowBlock(x, y, n); }
void NarrowBF16(const float *x, BF16 *y, size_t n) { NarrowBlock(x, y, n); }

}  // namespace xent::cpu::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#if HWY_ONCE

#include <gtest/gtest.h>

#include <bit>
#include <cmath>
#include <limits>
#include <string>
#include <vector>

#include "cpu_targets.hpp"

namespace xent::cpu {
HWY_EXPORT(WidenF16);
HWY_EXPORT(WidenBF16);
HWY_EXPORT(NarrowF16);
HWY_EXPORT(NarrowBF16);
HWY_EXPORT(StorePairs);
HWY_EXPORT(LoadPairs);

namespace {

constexpr float kInf = std::numeric_limits<float>::infinity();

class CpuFormats : public CpuTargets {};
XENT_CPU_TARGETS(CpuFormats);

// The test's own decoding, by their definition.

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
TEST_P(CpuFormats, WidenHalf) {
  check_widen<F16>(kF16, [](const F16 *x, float *y, size_t n) { HWY_DYNAMIC_DISPATCH(WidenF16)(x, y, n); });
}
TEST_P(CpuFormats, WidenBfloat) {
  check_widen<BF16>(kBF16, [](const BF16 *x, float *y, size_t n) { HWY_DYNAMIC_DISPATCH(WidenBF16)(x, y, n); });
}

struct Roundings {
  std::vector<float> x;
  std::vector<uint16_t> want;
};

// Each number itself, and the middle between it and the next with the floats on both sides of it.
Roundings roundings(const Format &format) {
  const int top = (1 << format.exponent_bits) - 1;
  const uint16_t infinity = static_cast<uint16_t>(top << format.mantissa_bits);
  Roundings all;
  auto &[x, want] = all;
  const auto add = [&x = x, &want = want](float value, uint16_t bits) {
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
  return all;
}

template <class T>
void check_narrow(const Format &format, void (*narrow)(const float *, T *, size_t)) {
  const auto [x, want] = roundings(format);
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
TEST_P(CpuFormats, NarrowHalf) {
  check_narrow<F16>(kF16, [](const float *x, F16 *y, size_t n) { HWY_DYNAMIC_DISPATCH(NarrowF16)(x, y, n); });
}
TEST_P(CpuFormats, NarrowBfloat) {
  check_narrow<BF16>(kBF16, [](const float *x, BF16 *y, size_t n) { HWY_DYNAMIC_DISPATCH(NarrowBF16)(x, y, n); });
}

TEST_P(CpuFormats, BfloatPairs) {
  Roundings all = roundings(kBF16);
  while (all.x.size() % 64 != 0) all.x.push_back(all.x.back());
  all.want.resize(all.x.size(), all.want.back());
  const size_t n = all.x.size();
  const std::vector<float> odd(all.x.rbegin(), all.x.rend());
  std::vector<BF16> out(2 * n);
  HWY_DYNAMIC_DISPATCH(StorePairs)(all.x.data(), odd.data(), out.data(), n);
  for (size_t i = 0; i < n; ++i) {
    ASSERT_EQ(out[2 * i].bits, all.want[i]) << all.x[i];
    ASSERT_EQ(out[2 * i + 1].bits, all.want[n - 1 - i]) << odd[i];
  }

  // Every pattern comes back as it was, NaN too.
  std::vector<BF16> in(1 << 16), back(1 << 16);
  for (uint32_t bits = 0; bits < 1 << 16; ++bits) in[bits].bits = static_cast<uint16_t>(bits);
  std::vector<float> a(1 << 15), b(1 << 15);
  HWY_DYNAMIC_DISPATCH(LoadPairs)(in.data(), a.data(), b.data(), a.size());
  HWY_DYNAMIC_DISPATCH(StorePairs)(a.data(), b.data(), back.data(), a.size());
  for (uint32_t bits = 0; bits < 1 << 16; ++bits) {
    const float value = bits % 2 == 0 ? a[bits / 2] : b[bits / 2];
    ASSERT_EQ(std::bit_cast<uint32_t>(value), bits << 16);
    ASSERT_EQ(back[bits].bits, bits);
  }
}

}  // namespace
}  // namespace xent::cpu

#endif
