// SPDX-FileCopyrightText: the libxent authors
// SPDX-License-Identifier: Apache-2.0

// Element types of the tests: names, exact decoding, rounding to nearest even, units in the last place.
// Written for the tests alone, so that a mistake in the library's conversions is not repeated here.
#pragma once

#include <dlpack/dlpack.h>

#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>

namespace xent_test {

inline constexpr DLDataType kF32 = {kDLFloat, 32, 1};
inline constexpr DLDataType kF16 = {kDLFloat, 16, 1};
inline constexpr DLDataType kBf16 = {kDLBfloat, 16, 1};
inline constexpr DLDataType kF64 = {kDLFloat, 64, 1};
inline constexpr DLDataType kI32 = {kDLInt, 32, 1};
inline constexpr DLDataType kI64 = {kDLInt, 64, 1};
inline constexpr DLDataType kU8 = {kDLUInt, 8, 1};
inline constexpr DLDataType kBool = {6, 8, 1};

inline constexpr double kInf = std::numeric_limits<double>::infinity();
inline constexpr double kNaN = std::numeric_limits<double>::quiet_NaN();

inline bool operator==(const DLDataType &a, const DLDataType &b) {
  return a.code == b.code && a.bits == b.bits && a.lanes == b.lanes;
}
inline bool operator!=(const DLDataType &a, const DLDataType &b) { return !(a == b); }

inline bool is_float(const DLDataType &t) { return t.code == kDLFloat || t.code == kDLBfloat; }
inline int64_t size_of(const DLDataType &t) { return t.bits / 8; }

inline const char *name_of(const DLDataType &t) {
  if (t == kF32) return "float32";
  if (t == kF16) return "float16";
  if (t == kBf16) return "bfloat16";
  if (t == kF64) return "float64";
  if (t == kI32) return "int32";
  if (t == kI64) return "int64";
  if (t == kU8) return "uint8";
  if (t == kBool) return "bool";
  return "?";
}

// A binary floating-point format: precision with the hidden bit, exponents of the largest and smallest normal.
struct Format {
  int precision;
  int max_exponent;  // values below 2^(max_exponent + 1)
  int min_exponent;
};

inline Format format_of(const DLDataType &t) {
  if (t == kF16) return {11, 15, -14};
  if (t == kBf16) return {8, 127, -126};
  if (t == kF64) return {53, 1023, -1022};
  return {24, 127, -126};
}

inline double max_finite(const DLDataType &t) {
  const Format f = format_of(t);
  return std::ldexp(2.0 - std::ldexp(1.0, 1 - f.precision), f.max_exponent);
}

// The unit in the last place of the format at magnitude |v|, the subnormal spacing at least.
inline long double ulp_at(const DLDataType &t, long double v) {
  const Format f = format_of(t);
  int exponent = f.min_exponent;
  const long double magnitude = std::fabs(v);
  if (magnitude > 0 && std::isfinite(magnitude)) {
    int e;
    std::frexp(magnitude, &e);
    if (e - 1 > exponent) exponent = e - 1;
    if (exponent > f.max_exponent) exponent = f.max_exponent;
  }
  return std::ldexp(1.0L, exponent - (f.precision - 1));
}

// Rounds to nearest even in the format; beyond its range infinity.
inline double round_to(const DLDataType &t, double v) {
  if (t == kF64 || v == 0 || !std::isfinite(v)) return v;
  if (t == kF32) return static_cast<double>(static_cast<float>(v));
  const double unit = static_cast<double>(ulp_at(t, v));
  const double rounded = std::nearbyint(v / unit) * unit;  // unit is a power of two: both steps exact
  if (std::fabs(rounded) > max_finite(t)) return std::copysign(kInf, v);
  return rounded == 0 ? std::copysign(0.0, v) : rounded;
}

inline double decode_float(const DLDataType &t, uint64_t bits) {
  if (t == kF64) {
    double v;
    std::memcpy(&v, &bits, 8);
    return v;
  }
  if (t == kF32) {
    float v;
    const auto low = static_cast<uint32_t>(bits);
    std::memcpy(&v, &low, 4);
    return static_cast<double>(v);
  }
  const Format f = format_of(t);
  const int fraction_bits = f.precision - 1;
  const int exponent_bits = t.bits - 1 - fraction_bits;
  const uint64_t fraction = bits & ((uint64_t{1} << fraction_bits) - 1);
  const int biased = static_cast<int>((bits >> fraction_bits) & ((uint64_t{1} << exponent_bits) - 1));
  const bool negative = ((bits >> (t.bits - 1)) & 1) != 0;
  double v;
  if (biased == (1 << exponent_bits) - 1) {
    v = fraction != 0 ? kNaN : kInf;
  } else if (biased == 0) {
    v = std::ldexp(static_cast<double>(fraction), f.min_exponent - fraction_bits);
  } else {
    const auto exponent = static_cast<uint64_t>(biased - 1 + f.min_exponent + 1023);
    const uint64_t wide = (exponent << 52) | (fraction << (52 - fraction_bits));
    std::memcpy(&v, &wide, 8);
  }
  return negative ? -v : v;
}

inline uint64_t encode_float(const DLDataType &t, double v) {
  if (t == kF64) {
    uint64_t bits;
    std::memcpy(&bits, &v, 8);
    return bits;
  }
  if (t == kF32) {
    const auto single = static_cast<float>(v);
    uint32_t bits;
    std::memcpy(&bits, &single, 4);
    return bits;
  }
  const Format f = format_of(t);
  const int fraction_bits = f.precision - 1;
  const int exponent_bits = t.bits - 1 - fraction_bits;
  const uint64_t sign = std::signbit(v) ? uint64_t{1} << (t.bits - 1) : 0;
  const uint64_t infinity = ((uint64_t{1} << exponent_bits) - 1) << fraction_bits;
  if (std::isnan(v)) return sign | infinity | (uint64_t{1} << (fraction_bits - 1));
  const double magnitude = std::fabs(v);
  if (magnitude < std::ldexp(1.0, f.min_exponent)) {  // the spacing is constant, and a carry gives the least normal
    return sign | static_cast<uint64_t>(std::nearbyint(std::ldexp(magnitude, fraction_bits - f.min_exponent)));
  }
  // Nearest even among float64's bits: add just less than half a unit, or half of it where the kept part is odd.
  uint64_t wide;
  std::memcpy(&wide, &magnitude, 8);
  const int dropped = 52 - fraction_bits;
  wide += (uint64_t{1} << (dropped - 1)) - 1 + ((wide >> dropped) & 1);
  const uint64_t narrow = (wide >> dropped) - (static_cast<uint64_t>(1022 + f.min_exponent) << fraction_bits);
  return sign | (narrow < infinity ? narrow : infinity);
}

inline uint64_t load_bits(const uint8_t *p, int64_t bytes) {
  uint64_t bits = 0;
  std::memcpy(&bits, p, static_cast<size_t>(bytes));
  return bits;
}

inline int64_t decode_int(const DLDataType &t, uint64_t bits) {
  if (t == kI32) return static_cast<int32_t>(bits);
  return static_cast<int64_t>(bits);
}

}  // namespace xent_test
