// SPDX-FileCopyrightText: the libxent authors
// SPDX-License-Identifier: Apache-2.0

// The gradient kernels: one read of the columns, one write of the gradient.
//
// A block of 2048 columns is computed in acc and rounded once, when it is stored. A packed row of acc or bfloat16 goes
// from memory to memory; any other input or output, and the block that holds the target, pass through L1. The target's
// column is given by the caller and replaces the block's value before the store.
//
// In loss_and_grad forward has just computed the exponentials, and what of them it could keep is not computed again.

#include <algorithm>

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "cpu/backward.cpp"
#include "hwy/foreach_target.h"
// After foreach_target.h
#include "cpu/load-inl.hpp"
#include "cpu/math-inl.hpp"

HWY_BEFORE_NAMESPACE();
namespace xent::cpu::HWY_NAMESPACE {
namespace hn = hwy::HWY_NAMESPACE;

// NaN as arithmetic makes it: rounding to bfloat16 by an integer addition must not carry through its low bits.
template <class A>
A Clean(double value) {
  return value == value ? static_cast<A>(value) : std::numeric_limits<A>::quiet_NaN();
}

template <class A>
struct GradConsts {
  GradConsts(const RowMath &math, const GradRow &row)
      : half(static_cast<A>(math.half)),
        max_half(Clean<A>(row.max) * half),
        rest(static_cast<A>(math.scale / math.half)),
        factor(Clean<A>(row.factor)),
        offset(Clean<A>(row.offset)),
        lift(row.lift),
        up(static_cast<A>(std::ldexp(1.0, std::max(row.post, 0)))),
        down(static_cast<A>(std::ldexp(1.0, std::min(row.post, 0)))),
        cap(static_cast<A>(math.softcap)),
        ratio(static_cast<A>(math.cap_ratio)) {}
  A half, max_half, rest, factor, offset;
  Lift<A> lift;
  A up, down, cap, ratio;
};

// kPlain: scale is 1, as it always is with softcap, and multiplications by 1 are left out, by 2^post = 1 too.
template <bool kPlain, class D, class V = hn::Vec<D>>
HWY_INLINE V Down(D d, const GradConsts<hn::TFromD<D>> &c, V v) {
  if constexpr (kPlain) return hn::Sub(hn::Set(d, c.max_half), v);
  return hn::Mul(hn::NegMulAdd(v, hn::Set(d, c.half), hn::Set(d, c.max_half)), hn::Set(d, c.rest));
}

template <bool kPlain, class D, class V = hn::Vec<D>>
HWY_INLINE V Finish(D d, const GradConsts<hn::TFromD<D>> &c, V e) {
  const V grad = hn::MulSub(e, hn::Set(d, c.factor), hn::Set(d, c.offset));
  return kPlain ? grad : hn::Mul(grad, hn::Set(d, c.up * c.down));
}

template <bool kSoftcap, bool kPlain, class D, class V = hn::Vec<D>>
HWY_INLINE V GradVector(D d, const GradConsts<hn::TFromD<D>> &c, V v) {
  V slope;
  if constexpr (kSoftcap) v = Squash(d, v, hn::Set(d, c.cap), hn::Set(d, c.ratio), &slope);
  const V e = ExpDown(d, Down<kPlain>(d, c, v), hn::Set(d, c.lift.round), hn::Set(d, c.lift.deepest));
  const V grad = Finish<kPlain>(d, c, e);
  if constexpr (kSoftcap) return hn::Mul(hn::Mul(grad, hn::Mul(slope, hn::Set(d, c.up))), hn::Set(d, c.down));
  return grad;
}

// Columns of S, acc or bfloat16, into columns of the same type; `to` may be `from`. kStream: past the caches.
template <class S, bool kSoftcap, bool kPlain, bool kStream, class A = Acc<S>>
void GradColumns(const RowMath &math, const GradRow &row, const S *from, S *to, size_t n, Fetch fetch) {
  const Tag<A> d;
  using V = hn::Vec<Tag<A>>;
  const size_t pair = 2 * hn::Lanes(d);
  const GradConsts<A> c(math, row);
  const auto some = [&](size_t i, size_t count) {
    V a, b;
    LoadPairTail(d, from + i, count, A{0}, a, b);
    a = GradVector<kSoftcap, kPlain>(d, c, a);
    b = GradVector<kSoftcap, kPlain>(d, c, b);
    StorePairTail(d, a, b, to + i, count);
  };
  size_t i = 0;
  if constexpr (kStream) {
    const size_t vector = hn::Lanes(d) * sizeof(A);
    i = (vector - reinterpret_cast<uintptr_t>(to) % vector) % vector / sizeof(S);
    if (i > n) i = n;
    if (i > 0) some(0, i);
  }
  if constexpr (!kSoftcap) {
    for (; i + 2 * pair <= n; i += 2 * pair) {
      FetchLines<3>(fetch.near, fetch.near_step);
      FetchLines<2>(fetch.far, fetch.far_step);
      fetch.near += fetch.near_step, fetch.far += fetch.far_step;
      V v0, v1, v2, v3;
      LoadPair(d, from + i, v0, v1);
      LoadPair(d, from + i + pair, v2, v3);
      v0 = Down<kPlain>(d, c, v0), v1 = Down<kPlain>(d, c, v1);
      v2 = Down<kPlain>(d, c, v2), v3 = Down<kPlain>(d, c, v3);
      ExpDown4(d, v0, v1, v2, v3, hn::Set(d, c.lift.round), hn::Set(d, c.lift.deepest));
      StorePair<kStream>(d, Finish<kPlain>(d, c, v0), Finish<kPlain>(d, c, v1), to + i);
      StorePair<kStream>(d, Finish<kPlain>(d, c, v2), Finish<kPlain>(d, c, v3), to + i + pair);
    }
  }
  for (; i + pair <= n; i += pair) {
    V a, b;
    LoadPair(d, from + i, a, b);
    a = GradVector<kSoftcap, kPlain>(d, c, a);
    b = GradVector<kSoftcap, kPlain>(d, c, b);
    StorePair<kStream>(d, a, b, to + i);
  }
  if (i < n) some(i, n - i);
}

template <class S>
using Columns = void (*)(const RowMath &, const GradRow &, const S *, S *, size_t, Fetch);

template <class S, bool kStream>
Columns<S> ColumnsFor(const RowMath &math, const GradRow &row) {
  if (math.softcap != 0) return &GradColumns<S, true, true, kStream>;
  if (math.scale == 1 && math.half == 1 && row.post == 0) return &GradColumns<S, false, true, kStream>;
  return &GradColumns<S, false, false, kStream>;
}

// ---- From what forward kept

// What the block's exponentials, taken against its own maximum, are to be multiplied by; 0 where those against the
// row's do better: beside a lift or a post, and where a product of a number and this one may be lost or is NaN.
template <class A>
A BlockFactor(const RowMath &math, const GradRow &row, double max) {
  if (row.lift != 0 || row.post != 0) return 0;
  const A factor = static_cast<A>(row.factor * std::exp((max - row.max) * math.scale));
  return std::fabs(factor) >= std::ldexp(A{1}, sizeof(A) == 4 ? -100 : -900) ? factor : A{0};
}

// kPaired: as LoadPair has bfloat16, and `to`, unless it is bfloat16 too, gets them in order.
template <bool kPaired, class O, bool kStream, class A = Acc<O>>
void KeptColumns(const A *terms, A factor, A offset, O *to, size_t n, Fetch fetch) {
  const Tag<A> d;
  using V = hn::Vec<Tag<A>>;
  const size_t lanes = hn::Lanes(d), pair = 2 * lanes;
  const V f = hn::Set(d, factor), o = hn::Set(d, offset);
  const auto store = [&](V a, V b, O *at) {
    if constexpr (kPaired && std::is_same_v<O, A>) {
      hn::StoreInterleaved2(a, b, d, at);
    } else {
      StorePair<kStream>(d, a, b, at);
    }
  };
  const auto grad = [&](size_t i) { return hn::MulSub(hn::LoadU(d, terms + i), f, o); };
  size_t i = 0;
  for (; i + 2 * pair <= n; i += 2 * pair) {
    FetchLines<3>(fetch.near, fetch.near_step);
    FetchLines<2>(fetch.far, fetch.far_step);
    fetch.near += fetch.near_step, fetch.far += fetch.far_step;
    const V v0 = grad(i), v1 = grad(i + lanes), v2 = grad(i + pair), v3 = grad(i + pair + lanes);
    store(v0, v1, to + i), store(v2, v3, to + i + pair);
  }
  for (; i + pair <= n; i += pair) store(grad(i), grad(i + lanes), to + i);
  if (i < n) {
    HWY_ALIGN O columns[128];
    if constexpr (kPaired && std::is_same_v<O, A>) {
      hn::StoreInterleaved2(grad(i), grad(i + lanes), d, columns);
    } else {
      StorePair<false>(d, grad(i), grad(i + lanes), columns);
    }
    std::memcpy(to + i, columns, (n - i) * sizeof(O));
  }
}

// A block's gradient from its exponentials.
template <class T, class O, class A = Acc<T>>
void GradOfTerms(const RowMath &math, const GradRow &row, const A *terms, const GradOut &out, int64_t begin, size_t n,
                 bool holds_target, Fetch fetch) {
  const A factor = static_cast<A>(row.factor), offset = static_cast<A>(row.offset);
  const bool paired = IsPaired<T>(math);
  // Past the caches only whole vectors go, so what lies otherwise goes through L1.
  constexpr bool kAsOutput = std::is_same_v<O, A> || (std::is_same_v<T, BF16> && std::is_same_v<O, BF16>);
  if constexpr (kAsOutput) {
    constexpr bool kPairs = std::is_same_v<O, BF16>;
    O *const to = static_cast<O *>(out.row) + begin;
    const bool aligned = reinterpret_cast<uintptr_t>(to) % (hn::Lanes(Tag<A>()) * sizeof(A)) == 0;
    if (paired == kPairs && out.stride == 1 && !holds_target) {
      if (!out.stream) {
        KeptColumns<kPairs, O, false>(terms, factor, offset, to, n, fetch);
      } else if (aligned) {
        KeptColumns<kPairs, O, true>(terms, factor, offset, to, n, fetch);
      } else {
        HWY_ALIGN O packed[kBlock];
        KeptColumns<kPairs, O, false>(terms, factor, offset, packed, n, fetch);
        StreamBytes(packed, to, n * sizeof(O));
      }
      return;
    }
  }
  HWY_ALIGN A block[kBlock];
  if (paired) {
    KeptColumns<true, A, false>(terms, factor, offset, block, n, fetch);
  } else {
    KeptColumns<false, A, false>(terms, factor, offset, block, n, fetch);
  }
  if (holds_target) block[row.target - begin] = static_cast<A>(row.target_grad);
  StoreBlock<O>(static_cast<const A *>(block), out, begin, n);
}

template <class T, class O, class A = Acc<T>>
void Grad(const RowMath &math, const GradRow &whole, const Span &span, const GradOut &out) {
  constexpr bool kDirect = std::is_same_v<T, O> && (std::is_same_v<T, A> || std::is_same_v<T, BF16>);
  const bool direct = kDirect && span.stride == 1 && out.stride == 1;
  const Columns<A> grad = ColumnsFor<A, false>(math, whole);
  [[maybe_unused]] Columns<O> straight = nullptr;
  if constexpr (kDirect) straight = out.stream ? ColumnsFor<O, true>(math, whole) : ColumnsFor<O, false>(math, whole);
  HWY_ALIGN A block[kBlock];
  const Blocks<T> blocks(span, out.backwards);
  for (int64_t i = 0; i < blocks.count(); ++i) {
    const int64_t begin = blocks.begin(i);
    const size_t n = blocks.size(i);
    Fetch fetch = blocks.template fetch<A>(i, 1);
    const bool holds_target = whole.target >= begin && whole.target < begin + static_cast<int64_t>(n);
    GradRow row = whole;
    if (span.kept != nullptr) {
      const double max = span.kept->maxima[begin / kBlock];
      if (const A factor = BlockFactor<A>(math, whole, max); factor != 0) {
        row.max = max, row.factor = factor;
        if (const A *const terms = KeptTerms<A>(span, begin)) {
          fetch.near_step = 0;  // no logits are read
          GradOfTerms<T, O>(math, row, terms, out, begin, n, holds_target, fetch);
          continue;
        }
      }
    }
    if constexpr (kDirect) {
      if (direct && !holds_target) {
        straight(math, row, static_cast<const T *>(span.row) + begin, static_cast<O *>(out.row) + begin, n, fetch);
        continue;
      }
    }
    grad(math, row, PackedBlock<T>(span, begin, n, block), block, n, fetch);
    if (holds_target) block[row.target - begin] = static_cast<A>(row.target_grad);
    StoreBlock<O>(static_cast<const A *>(block), out, begin, n);
  }
}

void GradF32(const RowMath &math, const GradRow &row, const Span &span, const GradOut &out) {
  Grad<float, float>(math, row, span, out);
}
void GradF64(const RowMath &math, const GradRow &row, const Span &span, const GradOut &out) {
  Grad<double, double>(math, row, span, out);
}
void GradF16(const RowMath &math, const GradRow &row, const Span &span, const GradOut &out) {
  Grad<F16, F16>(math, row, span, out);
}
void GradBF16(const RowMath &math, const GradRow &row, const Span &span, const GradOut &out) {
  Grad<BF16, BF16>(math, row, span, out);
}
void GradF16F32(const RowMath &math, const GradRow &row, const Span &span, const GradOut &out) {
  Grad<F16, float>(math, row, span, out);
}
void GradBF16F32(const RowMath &math, const GradRow &row, const Span &span, const GradOut &out) {
  Grad<BF16, float>(math, row, span, out);
}

void StreamZeros(void *to, size_t bytes) { StreamBytes(nullptr, to, bytes); }

}  // namespace xent::cpu::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace xent::cpu {

HWY_EXPORT(GradF32);
HWY_EXPORT(GradF64);
HWY_EXPORT(GradF16);
HWY_EXPORT(GradBF16);
HWY_EXPORT(GradF16F32);
HWY_EXPORT(GradBF16F32);
HWY_EXPORT(StreamZeros);

void grad_f32(const RowMath &math, const GradRow &row, const Span &span, const GradOut &out) {
  HWY_DYNAMIC_DISPATCH(GradF32)(math, row, span, out);
}
void grad_f64(const RowMath &math, const GradRow &row, const Span &span, const GradOut &out) {
  HWY_DYNAMIC_DISPATCH(GradF64)(math, row, span, out);
}
void grad_f16(const RowMath &math, const GradRow &row, const Span &span, const GradOut &out) {
  HWY_DYNAMIC_DISPATCH(GradF16)(math, row, span, out);
}
void grad_bf16(const RowMath &math, const GradRow &row, const Span &span, const GradOut &out) {
  HWY_DYNAMIC_DISPATCH(GradBF16)(math, row, span, out);
}
void grad_f16_f32(const RowMath &math, const GradRow &row, const Span &span, const GradOut &out) {
  HWY_DYNAMIC_DISPATCH(GradF16F32)(math, row, span, out);
}
void grad_bf16_f32(const RowMath &math, const GradRow &row, const Span &span, const GradOut &out) {
  HWY_DYNAMIC_DISPATCH(GradBF16F32)(math, row, span, out);
}

void stream_zeros(void *to, size_t bytes) { HWY_DYNAMIC_DISPATCH(StreamZeros)(to, bytes); }
void stream_fence() { hwy::FlushStream(); }

}  // namespace xent::cpu
#endif
