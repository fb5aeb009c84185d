// SPDX-FileCopyrightText: the libxent authors
// SPDX-License-Identifier: Apache-2.0

// Vector functions of the kernels: exp and tanh. Included once an instruction set, between HWY_BEFORE_NAMESPACE and
// HWY_AFTER_NAMESPACE.
//
// exp(y) = 2^n (1 + p(r)), n = round(y / ln 2), r = y - n ln 2 in two steps of which the first is exact.
//   float:  p = r + r^2 q(r), q of degree 4, minimax in the relative error of exp: 4.2e-9 with rounded coefficients.
//   double: Taylor to r^13 / 13!, 4e-18.
// Within 1.03 units in the last place: 1.020 measured over every float in [-87.33, -0] with fused multiply-add.
//
// ExpDown, the exponential of the sums and of the gradient, is cheaper in float where a fused multiply-add is native:
// n + f = -down * log2(e) with f rounded once, 2^f = 1 + f q(f), q of degree 4, minimax 9.4e-8. With AVX-512 n is a
// multiple of 1/32, q of degree 1, and 2^n a table in two registers and an instruction that scales: 10 operations
// instead of 13. The relative error of both is at most 1.7e-7 + 1.4e-8 |down|, the second part that of log2(e) as a
// float: of what section 8 of the specification leaves to an exponential (2e-6 + 2e-7 |down| in a gradient, 1e-6 in a
// sum, where terms of a size that matters have |down| < 20) a tenth and a half.
//
// NaN gives NaN, anything below the normal range +0, -inf included. Arguments above 88 (709) are outside the domain.

#if defined(XENT_CPU_MATH_INL_HPP) == defined(HWY_TARGET_TOGGLE)
#ifdef XENT_CPU_MATH_INL_HPP
#undef XENT_CPU_MATH_INL_HPP
#else
#define XENT_CPU_MATH_INL_HPP
#endif

#include "hwy/highway.h"

HWY_BEFORE_NAMESPACE();
namespace xent::cpu::HWY_NAMESPACE {
namespace hn = hwy::HWY_NAMESPACE;

// Lanes for the type, at most 64: four vectors never pass kBlock.
template <class A>
using Tag = hn::CappedTag<A, 64>;

template <class A>
struct ExpConst;
template <>
struct ExpConst<float> {
  static constexpr float kLog2e = 1.44269504088896341f;
  static constexpr float kLn2Hi = 0.693359375f;  // 9 bits: n * kLn2Hi is exact
  static constexpr float kLn2Lo = -2.12194440054690583e-4f;
  // 1.5 * 2^23 + 127: adding it rounds to an integer and leaves the biased exponent in the low bits.
  static constexpr float kRound = 12583039.0f;
  static constexpr float kLowest = -87.33f;
  static constexpr int kMantissa = 23;
};
template <>
struct ExpConst<double> {
  static constexpr double kLog2e = 1.44269504088896340736;
  static constexpr double kLn2Hi = 6.93145751953125e-1;
  static constexpr double kLn2Lo = 1.42860682030941723212e-6;
  static constexpr double kRound = 6755399441055744.0 + 1023.0;
  static constexpr double kLowest = -708.39;
  static constexpr int kMantissa = 52;
};

template <class D, class V = hn::Vec<D>>
HWY_INLINE V ExpTail(D d, V r, V r2, float) {
  // Not Horner's order: as many operations, a shorter chain.
  const V low = hn::MulAdd(hn::Set(d, 0.1666651964187622f), r, hn::Set(d, 0.4999999403953552f));
  V high = hn::MulAdd(hn::Set(d, 0.008368851616978645f), r, hn::Set(d, 0.041668400168418884f));
  high = hn::MulAdd(hn::Set(d, 0.0013814339181408286f), r2, high);
  return hn::MulAdd(high, r2, low);
}
template <class D, class V = hn::Vec<D>>
HWY_INLINE V ExpTail(D d, V r, V, double) {
  V q = hn::Set(d, 1.0 / 6227020800.0);
  q = hn::MulAdd(q, r, hn::Set(d, 1.0 / 479001600.0));
  q = hn::MulAdd(q, r, hn::Set(d, 1.0 / 39916800.0));
  q = hn::MulAdd(q, r, hn::Set(d, 1.0 / 3628800.0));
  q = hn::MulAdd(q, r, hn::Set(d, 1.0 / 362880.0));
  q = hn::MulAdd(q, r, hn::Set(d, 1.0 / 40320.0));
  q = hn::MulAdd(q, r, hn::Set(d, 1.0 / 5040.0));
  q = hn::MulAdd(q, r, hn::Set(d, 1.0 / 720.0));
  q = hn::MulAdd(q, r, hn::Set(d, 1.0 / 120.0));
  q = hn::MulAdd(q, r, hn::Set(d, 1.0 / 24.0));
  q = hn::MulAdd(q, r, hn::Set(d, 1.0 / 6.0));
  return hn::MulAdd(q, r, hn::Set(d, 0.5));
}

// power = 2^n and minus1 = exp(r) - 1. `round` is kRound, or kRound + lift for power = 2^(n + lift).
template <class D, class V = hn::Vec<D>>
HWY_INLINE void ExpParts(D d, V y, V round, V &power, V &minus1) {
  using A = hn::TFromD<D>;
  using C = ExpConst<A>;
  const hn::RebindToSigned<D> di;
  const V rounded = hn::MulAdd(y, hn::Set(d, C::kLog2e), round);
  const V n = hn::Sub(rounded, round);
  power = hn::BitCast(d, hn::ShiftLeft<C::kMantissa>(hn::BitCast(di, rounded)));
  V r = hn::NegMulAdd(n, hn::Set(d, C::kLn2Hi), y);
  r = hn::NegMulAdd(n, hn::Set(d, C::kLn2Lo), r);
  const V r2 = hn::Mul(r, r);
  minus1 = hn::MulAdd(r2, ExpTail(d, r, r2, A{}), r);
}

// exp(y) * 2^lift for the constants of `lift`: round = kRound + lift, lowest = kLowest - lift * ln 2.
template <class D, class V = hn::Vec<D>>
HWY_INLINE V ExpLifted(D d, V y, V round, V lowest) {
  V power, minus1;
  ExpParts(d, y, round, power, minus1);
  return hn::IfThenZeroElse(hn::Lt(y, lowest), hn::MulAdd(power, minus1, power));
}

template <class D, class V = hn::Vec<D>>
HWY_INLINE V Exp(D d, V y) {
  using C = ExpConst<hn::TFromD<D>>;
  return ExpLifted(d, y, hn::Set(d, C::kRound), hn::Set(d, C::kLowest));
}

// Whether ExpDown takes a table.
template <class A>
inline constexpr bool kTable = sizeof(A) == 4 && HWY_TARGET <= HWY_AVX3 && HWY_ARCH_X86;

// The constants of ExpDown for 2^lift * exp.
template <class A>
struct Lift {
  explicit Lift(int lift)
      : round((kTable<A> ? kTableRound : ExpConst<A>::kRound) + static_cast<A>(lift)),
        deepest(static_cast<A>(lift * 0.69314718055994531 - ExpConst<A>::kLowest)) {}
  static constexpr bool kShort = HWY_NATIVE_FMA && sizeof(A) == 4;
  static constexpr A kTableRound = A(393216);  // 1.5 * 2^18: adding it rounds to multiples of 1/32
  A round, deepest;
};

// q(f) = kQ0 + kQ1 f + ...
template <class A>
struct ShortExp {
  static constexpr A kQ0 = A(0x1.62e42ap-1), kQ1 = A(0x1.ebf9c0p-3), kQ2 = A(0x1.c6b6d8p-5), kQ3 = A(0x1.3ce986p-7),
                     kQ4 = A(0x1.5bdb9ap-10);
};

#if HWY_ARCH_X86 && HWY_TARGET <= HWY_AVX3
// 2^(j / 32)
HWY_ALIGN inline constexpr float kRoots[32] = {
    0x1p+0f,        0x1.059b0ep+0f, 0x1.0b5586p+0f, 0x1.11301ep+0f, 0x1.172b84p+0f, 0x1.1d4874p+0f, 0x1.2387a6p+0f,
    0x1.29e9ep+0f,  0x1.306fep+0f,  0x1.371a74p+0f, 0x1.3dea64p+0f, 0x1.44e086p+0f, 0x1.4bfdaep+0f, 0x1.5342b6p+0f,
    0x1.5ab07ep+0f, 0x1.6247ecp+0f, 0x1.6a09e6p+0f, 0x1.71f75ep+0f, 0x1.7a1148p+0f, 0x1.82589ap+0f, 0x1.8ace54p+0f,
    0x1.93737cp+0f, 0x1.9c4918p+0f, 0x1.a5503cp+0f, 0x1.ae89fap+0f, 0x1.b7f77p+0f,  0x1.c199bep+0f, 0x1.cb720ep+0f,
    0x1.d5818ep+0f, 0x1.dfc974p+0f, 0x1.ea4afap+0f, 0x1.f50766p+0f};
#endif

// exp(-down) * 2^lift. `down` is not below 0: it is what a logit lies under the maximum.
template <class D, class V = hn::Vec<D>, class A = hn::TFromD<D>>
XENT_CPU_INLINE V ExpDown(D d, V down, V round, V deepest) {
  if constexpr (kTable<A>) {
#if HWY_ARCH_X86 && HWY_TARGET <= HWY_AVX3
    // The table is lifted, once before a loop.
    const V lifted = V{_mm512_scalef_ps(hn::Set(d, 1.0f).raw, hn::Sub(round, hn::Set(d, Lift<A>::kTableRound)).raw)};
    const V low = hn::Mul(hn::Load(d, kRoots), lifted), high = hn::Mul(hn::Load(d, kRoots + 16), lifted);
    const V log2e = hn::Set(d, ExpConst<A>::kLog2e);
    const V rounded = hn::NegMulAdd(down, log2e, round);  // the table's index in its low bits
    const V n = hn::Sub(rounded, round);
    const V f = hn::NegMulSub(down, log2e, n);
    const V root = V{_mm512_permutex2var_ps(low.raw, _mm512_castps_si512(rounded.raw), high.raw)};
    const V q = hn::MulAdd(hn::Set(d, A(0x1.ebedp-3)), f, hn::Set(d, A(0x1.62e574p-1)));
    const V p = hn::MulAdd(hn::Mul(root, f), q, root);
    const __mmask16 shown = _mm512_cmp_ps_mask(down.raw, deepest.raw, _CMP_NGT_UQ);
    return V{_mm512_maskz_scalef_ps(shown, p.raw, n.raw)};
#endif
  } else if constexpr (Lift<A>::kShort) {
    const hn::RebindToSigned<D> di;
    const V log2e = hn::Set(d, ExpConst<A>::kLog2e);
    const V rounded = hn::NegMulAdd(down, log2e, round);  // the biased exponent in its low bits
    const V f = hn::NegMulAdd(down, log2e, hn::Sub(round, rounded));
    V p = hn::MulAdd(hn::Set(d, ShortExp<A>::kQ4), f, hn::Set(d, ShortExp<A>::kQ3));
    p = hn::MulAdd(p, f, hn::Set(d, ShortExp<A>::kQ2));
    p = hn::MulAdd(p, f, hn::Set(d, ShortExp<A>::kQ1));
    p = hn::MulAdd(p, f, hn::Set(d, ShortExp<A>::kQ0));
    p = hn::MulAdd(p, f, hn::Set(d, A{1}));
    // Multiplied, not added to the exponent: NaN must stay NaN whatever its low bits are.
    const V power = hn::BitCast(d, hn::ShiftLeft<ExpConst<A>::kMantissa>(hn::BitCast(di, rounded)));
    return hn::IfThenZeroElse(hn::Gt(down, deepest), hn::Mul(p, power));
  } else {
    return ExpLifted(d, hn::Neg(down), round, hn::Neg(deepest));
  }
}

// The same of four vectors, in lockstep: one after the other their long chains fill a processor's schedulers.
template <class D, class V = hn::Vec<D>, class A = hn::TFromD<D>>
XENT_CPU_INLINE void ExpDown4(D d, V &x0, V &x1, V &x2, V &x3, V round, V deepest) {
  if constexpr (Lift<A>::kShort && !kTable<A>) {
    const hn::RebindToSigned<D> di;
    const V log2e = hn::Set(d, ExpConst<A>::kLog2e);
    const V r0 = hn::NegMulAdd(x0, log2e, round), r1 = hn::NegMulAdd(x1, log2e, round);
    const V r2 = hn::NegMulAdd(x2, log2e, round), r3 = hn::NegMulAdd(x3, log2e, round);
    V f0 = hn::Sub(round, r0), f1 = hn::Sub(round, r1), f2 = hn::Sub(round, r2), f3 = hn::Sub(round, r3);
    f0 = hn::NegMulAdd(x0, log2e, f0), f1 = hn::NegMulAdd(x1, log2e, f1);
    f2 = hn::NegMulAdd(x2, log2e, f2), f3 = hn::NegMulAdd(x3, log2e, f3);
    V q = hn::Set(d, ShortExp<A>::kQ4);
    V p0 = q, p1 = q, p2 = q, p3 = q;
    const auto step = [&](A coefficient) {
      q = hn::Set(d, coefficient);
      p0 = hn::MulAdd(p0, f0, q), p1 = hn::MulAdd(p1, f1, q), p2 = hn::MulAdd(p2, f2, q), p3 = hn::MulAdd(p3, f3, q);
    };
    step(ShortExp<A>::kQ3), step(ShortExp<A>::kQ2), step(ShortExp<A>::kQ1), step(ShortExp<A>::kQ0), step(A{1});
    const auto scaled = [&](V x, V p, V r) {
      const V power = hn::BitCast(d, hn::ShiftLeft<ExpConst<A>::kMantissa>(hn::BitCast(di, r)));
      return hn::IfThenZeroElse(hn::Gt(x, deepest), hn::Mul(p, power));
    };
    x0 = scaled(x0, p0, r0), x1 = scaled(x1, p1, r1), x2 = scaled(x2, p2, r2), x3 = scaled(x3, p3, r3);
  } else {
    x0 = ExpDown(d, x0, round, deepest), x1 = ExpDown(d, x1, round, deepest);
    x2 = ExpDown(d, x2, round, deepest), x3 = ExpDown(d, x3, round, deepest);
  }
}

// z = softcap * tanh(ratio * x). With q = exp(-2|y|) and e = q - 1, tanh|y| = -e / (2 + e): e keeps its relative error
// for small y because only the last addition forms it. *slope = 4q / (1 + q)^2. q is lifted by 2^24, so that the slope
// goes down to the smallest subnormal before it is 0: a large logit_scale magnifies what is missing.
template <class D, class V = hn::Vec<D>>
HWY_INLINE V Squash(D d, V x, V softcap, V ratio, V *slope) {
  using A = hn::TFromD<D>;
  using C = ExpConst<A>;
  constexpr A kLowest = C::kLowest - A(24 * 0.69314718055994531), kDrop = A{1} / (1 << 24);
  const V y = hn::Mul(x, ratio);
  const V minus2y = hn::Mul(hn::Abs(y), hn::Set(d, A{-2}));
  V lifted, minus1;
  ExpParts(d, minus2y, hn::Set(d, C::kRound + A{24}), lifted, minus1);
  const auto tiny = hn::Lt(minus2y, hn::Set(d, kLowest));
  const V power = hn::Mul(lifted, hn::Set(d, kDrop));
  const V minus_one = hn::Set(d, A{-1});
  const V e = hn::IfThenElse(tiny, minus_one, hn::MulAdd(power, minus1, hn::Add(power, minus_one)));
  if (slope != nullptr) {
    const V q = hn::IfThenZeroElse(tiny, hn::MulAdd(lifted, minus1, lifted));
    const V sum = hn::MulAdd(hn::Set(d, kDrop), q, hn::Set(d, A{1}));
    *slope = hn::Div(hn::Mul(hn::Set(d, 4 * kDrop), q), hn::Mul(sum, sum));
  }
  const V tanh_abs = hn::Div(hn::Neg(e), hn::Add(hn::Set(d, A{2}), e));
  return hn::CopySign(hn::Mul(tanh_abs, softcap), x);
}

}  // namespace xent::cpu::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#endif
