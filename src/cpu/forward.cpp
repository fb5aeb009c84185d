// SPDX-FileCopyrightText: the libxent authors
// SPDX-License-Identifier: Apache-2.0

// The forward kernels: one read of the columns, one Partial out.
//
// A block of 2048 columns (in L1: where it lies when it is packed acc or bfloat16, else a converted copy) is passed
// over twice: its maximum, then the sums against that maximum. Meanwhile blocks ahead are fetched. Columns enter
// accumulators by their position in the block alone, as the type and the options say.
//
// Eight vectors are added as a tree, four trees in an accumulator, and that is added, error-free, to the block's: where
// one logit dominates, its 1 is in one lane, and the equal small terms of a flat tail would all be rounded the same way
// against it.

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "cpu/forward.cpp"
#include "hwy/foreach_target.h"
// After foreach_target.h
#include "cpu/load-inl.hpp"
#include "cpu/math-inl.hpp"

HWY_BEFORE_NAMESPACE();
namespace xent::cpu::HWY_NAMESPACE {
namespace hn = hwy::HWY_NAMESPACE;

template <class A>
inline constexpr A kLowest = std::numeric_limits<A>::lowest();

// No less than `least`. Max(value, so_far) may drop or keep a NaN: the sum sees it in any case.
template <class S, class A = Acc<S>>
A BlockMax(const S *from, size_t n, A least, Fetch fetch) {
  const Tag<A> d;
  const size_t pair = 2 * hn::Lanes(d);
  auto m0 = hn::Set(d, least), m1 = m0, m2 = m0, m3 = m0;
  hn::Vec<Tag<A>> a, b;
  size_t i = 0;
  for (; i + 2 * pair <= n; i += 2 * pair) {
    FetchLines<2>(fetch.far, fetch.far_step);
    fetch.far += fetch.far_step;
    LoadPair(d, from + i, a, b);
    m0 = hn::Max(a, m0), m1 = hn::Max(b, m1);
    LoadPair(d, from + i + pair, a, b);
    m2 = hn::Max(a, m2), m3 = hn::Max(b, m3);
  }
  for (; i < n; i += pair) {
    if (n - i < pair) {
      LoadPairTail(d, from + i, n - i, -std::numeric_limits<A>::infinity(), a, b);
    } else {
      LoadPair(d, from + i, a, b);
    }
    m0 = hn::Max(a, m0), m1 = hn::Max(b, m1);
  }
  return hn::GetLane(hn::MaxOfLanes(d, hn::Max(hn::Max(m0, m1), hn::Max(m2, m3))));
}

template <class A>
int64_t FirstEqual(const A *v, size_t n, A wanted) {
  const Tag<A> d;
  const size_t lanes = hn::Lanes(d);
  const auto w = hn::Set(d, wanted);
  size_t i = 0;
  for (; i + lanes <= n; i += lanes) {
    const intptr_t at = hn::FindFirstTrue(d, hn::Eq(hn::LoadU(d, v + i), w));
    if (at >= 0) return static_cast<int64_t>(i) + at;
  }
  for (; i < n; ++i) {
    if (v[i] == wanted) return static_cast<int64_t>(i);
  }
  return -1;
}

template <class A>
void SquashBlock(const RowMath &math, const A *x, A *z, size_t n) {
  const Tag<A> d;
  using V = hn::Vec<Tag<A>>;
  const size_t lanes = hn::Lanes(d);
  const V cap = hn::Set(d, static_cast<A>(math.softcap)), ratio = hn::Set(d, static_cast<A>(math.cap_ratio));
  V *const no_slope = nullptr;
  size_t i = 0;
  for (; i + lanes <= n; i += lanes) hn::StoreU(Squash(d, hn::LoadU(d, x + i), cap, ratio, no_slope), d, z + i);
  if (i < n) StoreTail(Squash(d, LoadTail(d, x + i, n - i, A{0}), cap, ratio, no_slope), d, z + i, n - i);
}

template <class A>
struct SumConsts {
  explicit SumConsts(const RowMath &math, A max)
      : half(static_cast<A>(math.half)),
        max_half(max * half),
        rest(static_cast<A>(math.scale / math.half)),
        unit(static_cast<A>(math.shift_unit)),
        max_unit(max * unit),
        lift(0) {}
  A half, max_half, rest, unit, max_unit;
  Lift<A> lift;
};

// What a column adds to the three sums, or many columns; `entropy` with the other sign.
template <class V>
struct Terms {
  V sum, shift, entropy;
};

template <bool kShift, bool kEntropy, class V>
HWY_INLINE Terms<V> Plus(const Terms<V> &x, const Terms<V> &y) {
  Terms<V> out;
  out.sum = hn::Add(x.sum, y.sum);
  if constexpr (kShift) out.shift = hn::Add(x.shift, y.shift);
  if constexpr (kEntropy) out.entropy = hn::Add(x.entropy, y.entropy);
  return out;
}

// kPlain: scale is 1, and two multiplications by 1 are left out.
template <bool kPlain, class D, class V = hn::Vec<D>>
HWY_INLINE V Down(D d, const SumConsts<hn::TFromD<D>> &c, V v) {
  if constexpr (kPlain) return hn::Sub(hn::Set(d, c.max_half), v);
  return hn::Mul(hn::NegMulAdd(v, hn::Set(d, c.half), hn::Set(d, c.max_half)), hn::Set(d, c.rest));
}

template <bool kShift, bool kEntropy, class D, class V = hn::Vec<D>>
HWY_INLINE Terms<V> TermsOf(D d, const SumConsts<hn::TFromD<D>> &c, V v, V down, V e) {
  Terms<V> out;
  out.sum = e;
  if constexpr (kShift) out.shift = hn::MulSub(v, hn::Set(d, c.unit), hn::Set(d, c.max_unit));
  if constexpr (kEntropy) out.entropy = hn::IfThenZeroElse(hn::Eq(e, hn::Zero(d)), hn::Mul(down, e));
  return out;
}

template <class A>
HWY_INLINE A *After(A *keep, size_t columns) {
  return keep == nullptr ? nullptr : keep + columns;
}

// Of one vector, whose exponentials go to `keep` too, unless that is NULL.
template <bool kPlain, bool kShift, bool kEntropy, class D, class V = hn::Vec<D>, class A = hn::TFromD<D>>
XENT_CPU_INLINE Terms<V> OneOf(D d, const SumConsts<A> &c, V v, A *keep) {
  const V down = Down<kPlain>(d, c, v);
  const V e = ExpDown(d, down, hn::Set(d, c.lift.round), hn::Set(d, c.lift.deepest));
  if (keep != nullptr) hn::StoreU(e, d, keep);
  return TermsOf<kShift, kEntropy>(d, c, v, down, e);
}

// Of the two vectors at `from`, added.
template <bool kPlain, bool kShift, bool kEntropy, class D, class S, class V = hn::Vec<D>, class A = hn::TFromD<D>>
XENT_CPU_INLINE Terms<V> TwoOf(D d, const SumConsts<A> &c, const S *from, A *keep) {
  V a, b;
  LoadPair(d, from, a, b);
  return Plus<kShift, kEntropy>(OneOf<kPlain, kShift, kEntropy>(d, c, a, keep),
                                OneOf<kPlain, kShift, kEntropy>(d, c, b, After(keep, hn::Lanes(d))));
}

// Of the four vectors at `from`, added as a tree.
template <bool kPlain, bool kShift, bool kEntropy, class D, class S, class V = hn::Vec<D>, class A = hn::TFromD<D>>
XENT_CPU_INLINE Terms<V> FourOf(D d, const SumConsts<A> &c, const S *from, A *keep) {
  V v0, v1, v2, v3;
  LoadPair(d, from, v0, v1);
  LoadPair(d, from + 2 * hn::Lanes(d), v2, v3);
  const V d0 = Down<kPlain>(d, c, v0), d1 = Down<kPlain>(d, c, v1), d2 = Down<kPlain>(d, c, v2),
          d3 = Down<kPlain>(d, c, v3);
  V e0 = d0, e1 = d1, e2 = d2, e3 = d3;
  ExpDown4(d, e0, e1, e2, e3, hn::Set(d, c.lift.round), hn::Set(d, c.lift.deepest));
  if (keep != nullptr) {
    const size_t lanes = hn::Lanes(d);
    hn::StoreU(e0, d, keep), hn::StoreU(e1, d, keep + lanes);
    hn::StoreU(e2, d, keep + 2 * lanes), hn::StoreU(e3, d, keep + 3 * lanes);
  }
  return Plus<kShift, kEntropy>(
      Plus<kShift, kEntropy>(TermsOf<kShift, kEntropy>(d, c, v0, d0, e0), TermsOf<kShift, kEntropy>(d, c, v1, d1, e1)),
      Plus<kShift, kEntropy>(TermsOf<kShift, kEntropy>(d, c, v2, d2, e2), TermsOf<kShift, kEntropy>(d, c, v3, d3, e3)));
}

// total + rest += s, without an error: what the addition loses goes to `rest`.
template <class D, class V = hn::Vec<D>>
HWY_INLINE void AddExactly(D, V s, V &total, V &rest) {
  const V sum = hn::Add(total, s);
  const V virtual_s = hn::Sub(sum, total);
  const V lost = hn::Add(hn::Sub(total, hn::Sub(sum, virtual_s)), hn::Sub(s, virtual_s));
  total = sum;
  rest = hn::Add(rest, lost);
}

template <class D, class V = hn::Vec<D>>
HWY_INLINE double SumOf(D d, V total, V rest) {
  HWY_ALIGN hn::TFromD<D> totals[64], rests[64];
  hn::Store(total, d, totals);
  // An infinite total has no rest.
  hn::Store(hn::IfThenElseZero(hn::Eq(rest, rest), rest), d, rests);
  double sum = 0, low = 0;
  for (size_t i = 0; i < hn::Lanes(d); ++i) sum += totals[i], low += rests[i];
  return sum + low;
}

constexpr int kSerial = 4;  // eights of vectors an accumulator

template <class S, bool kPlain, bool kShift, bool kEntropy, class A = Acc<S>>
void BlockSums(const RowMath &math, const S *from, size_t n, A max, Fetch fetch, A *keep, Partial *out) {
  const Tag<A> d;
  using V = hn::Vec<Tag<A>>;
  const size_t lanes = hn::Lanes(d), pair = 2 * lanes, eight = 8 * lanes, piece = kSerial * eight;
  const SumConsts<A> c(math, max);
  const V zero = hn::Zero(d);
  V sum = zero, shift = zero, entropy = zero, sum_rest = zero, shift_rest = zero, entropy_rest = zero;
  for (size_t begin = 0; begin < n; begin += piece) {
    const size_t end = n - begin < piece ? n : begin + piece;
    Terms<V> t = {zero, zero, zero};
    size_t i = begin;
    for (; i + eight <= end; i += eight) {
      const auto fetch_some = [&] {
        FetchLines<3>(fetch.near, fetch.near_step);
        FetchLines<2>(fetch.far, fetch.far_step);
        fetch.near += fetch.near_step, fetch.far += fetch.far_step;
      };
      fetch_some();
      const Terms<V> x = FourOf<kPlain, kShift, kEntropy>(d, c, from + i, After(keep, i));
      fetch_some();
      const Terms<V> y = FourOf<kPlain, kShift, kEntropy>(d, c, from + i + 4 * lanes, After(keep, i + 4 * lanes));
      t = Plus<kShift, kEntropy>(t, Plus<kShift, kEntropy>(x, y));
    }
    for (; i + pair <= end; i += pair) {
      t = Plus<kShift, kEntropy>(t, TwoOf<kPlain, kShift, kEntropy>(d, c, from + i, After(keep, i)));
    }
    if (i < end) {
      V a, b;
      LoadPairTail(d, from + i, end - i, max, a, b);
      const auto in_a = FirstOfPair<S>(d, end - i), in_b = SecondOfPair<S>(d, end - i);
      Terms<V> x = OneOf<kPlain, kShift, kEntropy>(d, c, a, After(keep, i));
      const Terms<V> y = OneOf<kPlain, kShift, kEntropy>(d, c, b, After(keep, i + lanes));
      const auto both = [&](V p, V q) { return hn::Add(hn::IfThenElseZero(in_a, p), hn::IfThenElseZero(in_b, q)); };
      x.sum = both(x.sum, y.sum);
      if constexpr (kShift) x.shift = both(x.shift, y.shift);
      if constexpr (kEntropy) x.entropy = both(x.entropy, y.entropy);
      t = Plus<kShift, kEntropy>(t, x);
    }
    AddExactly(d, t.sum, sum, sum_rest);
    if constexpr (kShift) AddExactly(d, t.shift, shift, shift_rest);
    if constexpr (kEntropy) AddExactly(d, t.entropy, entropy, entropy_rest);
  }
  out->sum = SumOf(d, sum, sum_rest);
  if constexpr (kShift) out->shift = SumOf(d, shift, shift_rest);
  if constexpr (kEntropy) out->entropy = -SumOf(d, entropy, entropy_rest);
}

template <class S, class A = Acc<S>>
using Sums = void (*)(const RowMath &, const S *, size_t, A, Fetch, A *keep, Partial *);

template <class S>
Sums<S> SumsFor(const RowMath &math) {
  if (math.scale == 1 && math.half == 1 && !math.smoothing && !math.entropy) {
    return &BlockSums<S, true, false, false>;
  }
  if (math.smoothing) return math.entropy ? &BlockSums<S, false, true, true> : &BlockSums<S, false, true, false>;
  return math.entropy ? &BlockSums<S, false, false, true> : &BlockSums<S, false, false, false>;
}

inline void KeepMaximum(const Span &span, int64_t begin, double max) {
  if (span.kept != nullptr) span.kept->maxima[begin / kBlock] = max;
}

template <class T, class A = Acc<T>>
void Forward(const RowMath &math, const Span &span, Partial *out) {
  constexpr bool kWidens = std::is_same_v<T, BF16>;
  const bool direct = IsPaired<T>(math);
  const Sums<A> sums = SumsFor<A>(math);
  [[maybe_unused]] const auto direct_sums = SumsFor<std::conditional_t<kWidens, T, A>>(math);
  HWY_ALIGN A block[kBlock];
  PartialTree tree(math);
  A best = -std::numeric_limits<A>::infinity();
  int64_t index = -1;
  const Blocks<T> blocks(span, false);
  for (int64_t i = 0; i < blocks.count(); ++i) {
    const int64_t begin = blocks.begin(i);
    const size_t n = blocks.size(i);
    const Fetch first = blocks.template fetch<A>(i, 2);
    Fetch second = first;
    second.far += kBlock * sizeof(T) / 2;
    Partial part = {};
    part.index = -1;
    part.count = static_cast<int64_t>(n);
    A *const keep = KeptTerms<A>(span, begin);
    if constexpr (kWidens) {
      if (direct) {
        HWY_ALIGN T packed[kBlock];
        const T *from = PackedColumns(span, begin, n, packed);
        const A max = BlockMax(from, n, kLowest<A>, first);
        part.max = max;
        direct_sums(math, from, n, max, second, keep, &part);
        KeepMaximum(span, begin, max);
        tree.push(part);
        continue;
      }
    }
    const A *v = PackedBlock<T>(span, begin, n, block);
    A max = kLowest<A>;
    if (math.predicted) {
      // From -inf: with softcap a row of nothing else has a largest logit too.
      const A largest = BlockMax(v, n, -std::numeric_limits<A>::infinity(), first);
      if (largest > best || index < 0) {
        const int64_t at = FirstEqual(v, n, largest);
        if (at >= 0) best = largest, index = begin + at;
      }
      if (largest > max) max = largest;
    }
    if (math.softcap != 0) {
      SquashBlock(math, v, block, n);
      v = block;
    }
    if (math.softcap != 0 || !math.predicted) max = BlockMax(v, n, kLowest<A>, first);
    part.max = max;
    sums(math, v, n, max, second, keep, &part);
    KeepMaximum(span, begin, max);
    tree.push(part);
  }
  *out = tree.total();
  out->best = best;
  out->index = index;
}

void ForwardF32(const RowMath &math, const Span &span, Partial *out) { Forward<float>(math, span, out); }
void ForwardF64(const RowMath &math, const Span &span, Partial *out) { Forward<double>(math, span, out); }
void ForwardF16(const RowMath &math, const Span &span, Partial *out) { Forward<F16>(math, span, out); }
void ForwardBF16(const RowMath &math, const Span &span, Partial *out) { Forward<BF16>(math, span, out); }

template <class A>
double SquashOne(const RowMath &math, double x) {
  A value = static_cast<A>(x);
  SquashBlock(math, &value, &value, 1);
  return value;
}
double SquashF32(const RowMath &math, double x) { return SquashOne<float>(math, x); }
double SquashF64(const RowMath &math, double x) { return SquashOne<double>(math, x); }

}  // namespace xent::cpu::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace xent::cpu {

HWY_EXPORT(ForwardF32);
HWY_EXPORT(ForwardF64);
HWY_EXPORT(ForwardF16);
HWY_EXPORT(ForwardBF16);
HWY_EXPORT(SquashF32);
HWY_EXPORT(SquashF64);

void forward_f32(const RowMath &math, const Span &span, Partial *out) {
  HWY_DYNAMIC_DISPATCH(ForwardF32)(math, span, out);
}
void forward_f64(const RowMath &math, const Span &span, Partial *out) {
  HWY_DYNAMIC_DISPATCH(ForwardF64)(math, span, out);
}
void forward_f16(const RowMath &math, const Span &span, Partial *out) {
  HWY_DYNAMIC_DISPATCH(ForwardF16)(math, span, out);
}
void forward_bf16(const RowMath &math, const Span &span, Partial *out) {
  HWY_DYNAMIC_DISPATCH(ForwardBF16)(math, span, out);
}
double squash_f32(const RowMath &math, double x) { return HWY_DYNAMIC_DISPATCH(SquashF32)(math, x); }
double squash_f64(const RowMath &math, double x) { return HWY_DYNAMIC_DISPATCH(SquashF64)(math, x); }

}  // namespace xent::cpu
#endif
