// SPDX-FileCopyrightText: the libxent authors
// SPDX-License-Identifier: Apache-2.0

// The forward kernels: one read of the columns, one Partial out.
//
// A block of 1024 columns (in L1: where it lies when it is packed acc, else a converted copy) is passed over twice: its
// maximum, then the sums against that maximum in four accumulators. While the second pass computes, the next block is
// fetched. Columns enter accumulators by their position in the block alone.
//
// An accumulator takes few additions before it is added, error-free, to the block's: where one logit dominates, its 1
// is in one lane, and the equal small terms of a flat tail would all be rounded the same way against it.

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
constexpr size_t kSerial = 4;  // additions an accumulator

// No less than `least`. Max(value, so_far) may drop or keep a NaN: the sum sees it in any case.
template <class A>
A BlockMax(const A *v, size_t n, A least) {
  const Tag<A> d;
  const size_t lanes = hn::Lanes(d);
  auto m0 = hn::Set(d, least), m1 = m0, m2 = m0, m3 = m0;
  size_t i = 0;
  for (; i + 4 * lanes <= n; i += 4 * lanes) {
    m0 = hn::Max(hn::LoadU(d, v + i), m0);
    m1 = hn::Max(hn::LoadU(d, v + i + lanes), m1);
    m2 = hn::Max(hn::LoadU(d, v + i + 2 * lanes), m2);
    m3 = hn::Max(hn::LoadU(d, v + i + 3 * lanes), m3);
  }
  for (; i + lanes <= n; i += lanes) m0 = hn::Max(hn::LoadU(d, v + i), m0);
  if (i < n) m1 = hn::Max(LoadTail(d, v + i, n - i, least), m1);
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
        max_unit(max * unit) {}
  A half, max_half, rest, unit, max_unit;
};

// kPlain: scale is 1, and two multiplications by 1 are left out.
template <class D, bool kPlain, bool kShift, bool kEntropy, class V = hn::Vec<D>>
HWY_INLINE void Accumulate(D d, const SumConsts<hn::TFromD<D>> &c, V v, V &sum, V &shift, V &entropy) {
  V u;
  if constexpr (kPlain) {
    u = hn::Sub(v, hn::Set(d, c.max_half));
  } else {
    u = hn::Mul(hn::MulSub(v, hn::Set(d, c.half), hn::Set(d, c.max_half)), hn::Set(d, c.rest));
  }
  const V e = Exp(d, u);
  sum = hn::Add(sum, e);
  if constexpr (kShift) shift = hn::Add(shift, hn::MulSub(v, hn::Set(d, c.unit), hn::Set(d, c.max_unit)));
  if constexpr (kEntropy) entropy = hn::Add(entropy, hn::IfThenZeroElse(hn::Eq(e, hn::Zero(d)), hn::Mul(u, e)));
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

// `ahead`, `ahead_bytes`: the next block, of `width` bytes a column.
template <class A, bool kPlain, bool kShift, bool kEntropy>
void BlockSums(const RowMath &math, const A *v, size_t n, A max, const char *ahead, size_t ahead_bytes, size_t width,
               Partial *out) {
  const Tag<A> d;
  using V = hn::Vec<Tag<A>>;
  const size_t lanes = hn::Lanes(d);
  const SumConsts<A> c(math, max);
  const V zero = hn::Zero(d);
  V sum = zero, shift = zero, entropy = zero, sum_rest = zero, shift_rest = zero, entropy_rest = zero;
  const size_t piece = 4 * kSerial * lanes;
  for (size_t begin = 0; begin < n; begin += piece) {
    const size_t end = n - begin < piece ? n : begin + piece;
    for (size_t b = begin * width; b < end * width && b < ahead_bytes; b += 64) hwy::Prefetch(ahead + b);
    V s0 = zero, s1 = zero, s2 = zero, s3 = zero;
    V h0 = zero, h1 = zero, h2 = zero, h3 = zero;
    V e0 = zero, e1 = zero, e2 = zero, e3 = zero;
    size_t i = begin;
    for (; i + 4 * lanes <= end; i += 4 * lanes) {
      Accumulate<Tag<A>, kPlain, kShift, kEntropy>(d, c, hn::LoadU(d, v + i), s0, h0, e0);
      Accumulate<Tag<A>, kPlain, kShift, kEntropy>(d, c, hn::LoadU(d, v + i + lanes), s1, h1, e1);
      Accumulate<Tag<A>, kPlain, kShift, kEntropy>(d, c, hn::LoadU(d, v + i + 2 * lanes), s2, h2, e2);
      Accumulate<Tag<A>, kPlain, kShift, kEntropy>(d, c, hn::LoadU(d, v + i + 3 * lanes), s3, h3, e3);
    }
    for (; i + lanes <= end; i += lanes) {
      Accumulate<Tag<A>, kPlain, kShift, kEntropy>(d, c, hn::LoadU(d, v + i), s0, h0, e0);
    }
    if (i < end) {
      V s = zero, h = zero, e = zero;
      Accumulate<Tag<A>, kPlain, kShift, kEntropy>(d, c, LoadTail(d, v + i, end - i, max), s, h, e);
      const auto in_row = hn::FirstN(d, end - i);
      s1 = hn::Add(s1, hn::IfThenElseZero(in_row, s));
      h1 = hn::Add(h1, hn::IfThenElseZero(in_row, h));
      e1 = hn::Add(e1, hn::IfThenElseZero(in_row, e));
    }
    AddExactly(d, hn::Add(hn::Add(s0, s1), hn::Add(s2, s3)), sum, sum_rest);
    if constexpr (kShift) AddExactly(d, hn::Add(hn::Add(h0, h1), hn::Add(h2, h3)), shift, shift_rest);
    if constexpr (kEntropy) AddExactly(d, hn::Add(hn::Add(e0, e1), hn::Add(e2, e3)), entropy, entropy_rest);
  }
  out->sum = SumOf(d, sum, sum_rest);
  if constexpr (kShift) out->shift = SumOf(d, shift, shift_rest);
  if constexpr (kEntropy) out->entropy = SumOf(d, entropy, entropy_rest);
}

template <class T, class A = Acc<T>>
void Forward(const RowMath &math, const Span &span, Partial *out) {
  using Sums = void (*)(const RowMath &, const A *, size_t, A, const char *, size_t, size_t, Partial *);
  constexpr Sums kSums[2][2] = {{&BlockSums<A, false, false, false>, &BlockSums<A, false, false, true>},
                                {&BlockSums<A, false, true, false>, &BlockSums<A, false, true, true>}};
  const bool plain = math.scale == 1 && math.half == 1 && !math.smoothing && !math.entropy;
  const Sums sums = plain ? &BlockSums<A, true, false, false> : kSums[math.smoothing][math.entropy];
  HWY_ALIGN A block[kBlock];
  PartialTree tree(math);
  A best = -std::numeric_limits<A>::infinity();
  int64_t index = -1;
  for (int64_t begin = span.begin; begin < span.end; begin += kBlock) {
    const int64_t left = span.end - begin;
    const size_t n = static_cast<size_t>(left < kBlock ? left : kBlock);
    const A *v = PackedBlock<T>(span, begin, n, block);
    A max = kLowest<A>;
    if (math.predicted) {
      // From -inf: with softcap a row of nothing else has a largest logit too.
      const A largest = BlockMax(v, n, -std::numeric_limits<A>::infinity());
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
    if (math.softcap != 0 || !math.predicted) max = BlockMax(v, n, kLowest<A>);
    const int64_t next = left - static_cast<int64_t>(n) < kBlock ? left - static_cast<int64_t>(n) : kBlock;
    const bool fetch = span.stride == 1 && next > 0;
    const char *ahead = reinterpret_cast<const char *>(static_cast<const T *>(span.row) + begin * span.stride) +
                        (fetch ? n * sizeof(T) : 0);
    Partial part = {};
    part.max = max;
    part.index = -1;
    part.count = static_cast<int64_t>(n);
    sums(math, v, n, max, ahead, fetch ? static_cast<size_t>(next) * sizeof(T) : 0, sizeof(T), &part);
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
