// SPDX-FileCopyrightText: the libxent authors
// SPDX-License-Identifier: Apache-2.0

// The gradient kernels: one read of the columns, one write of the gradient.
//
// A block of 1024 columns is computed in acc and rounded once, when it is stored. A packed acc row goes from memory to
// memory; any other input or output, a streamed output and the block that holds the target pass through L1. The
// target's column is given by the caller and replaces the block's value before the store.

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

template <class A>
struct GradConsts {
  GradConsts(const RowMath &math, const GradRow &row)
      : half(static_cast<A>(math.half)),
        max_half(static_cast<A>(row.max) * half),
        rest(static_cast<A>(math.scale / math.half)),
        factor(static_cast<A>(row.factor)),
        offset(static_cast<A>(row.offset)),
        round(ExpConst<A>::kRound + static_cast<A>(row.lift)),
        lowest(static_cast<A>(ExpConst<A>::kLowest - row.lift * 0.69314718055994531)),
        up(static_cast<A>(std::ldexp(1.0, std::max(row.post, 0)))),
        down(static_cast<A>(std::ldexp(1.0, std::min(row.post, 0)))),
        cap(static_cast<A>(math.softcap)),
        ratio(static_cast<A>(math.cap_ratio)) {}
  A half, max_half, rest, factor, offset, round, lowest, up, down, cap, ratio;
};

// kPlain: scale is 1, as it always is with softcap, and multiplications by 1 are left out, by 2^post = 1 too.
template <class D, bool kSoftcap, bool kPlain, class V = hn::Vec<D>>
HWY_INLINE V GradVector(D d, const GradConsts<hn::TFromD<D>> &c, V v) {
  V slope;
  if constexpr (kSoftcap) v = Squash(d, v, hn::Set(d, c.cap), hn::Set(d, c.ratio), &slope);
  V u;
  if constexpr (kPlain) {
    u = hn::Sub(v, hn::Set(d, c.max_half));
  } else {
    u = hn::Mul(hn::MulSub(v, hn::Set(d, c.half), hn::Set(d, c.max_half)), hn::Set(d, c.rest));
  }
  const V e = ExpLifted(d, u, hn::Set(d, c.round), hn::Set(d, c.lowest));
  const V grad = hn::MulSub(e, hn::Set(d, c.factor), hn::Set(d, c.offset));
  if constexpr (kSoftcap) return hn::Mul(hn::Mul(grad, hn::Mul(slope, hn::Set(d, c.up))), hn::Set(d, c.down));
  if constexpr (!kPlain) return hn::Mul(grad, hn::Set(d, c.up * c.down));
  return grad;
}

// `out` may be `v`.
template <class A, bool kSoftcap, bool kPlain>
void GradBlock(const RowMath &math, const GradRow &row, const A *v, A *out, size_t n) {
  const Tag<A> d;
  using D = Tag<A>;
  const size_t lanes = hn::Lanes(d);
  const GradConsts<A> c(math, row);
  size_t i = 0;
  for (; i + 2 * lanes <= n; i += 2 * lanes) {
    const auto a = GradVector<D, kSoftcap, kPlain>(d, c, hn::LoadU(d, v + i));
    const auto b = GradVector<D, kSoftcap, kPlain>(d, c, hn::LoadU(d, v + i + lanes));
    hn::StoreU(a, d, out + i);
    hn::StoreU(b, d, out + i + lanes);
  }
  for (; i + lanes <= n; i += lanes) hn::StoreU(GradVector<D, kSoftcap, kPlain>(d, c, hn::LoadU(d, v + i)), d, out + i);
  if (i < n) StoreTail(GradVector<D, kSoftcap, kPlain>(d, c, LoadTail(d, v + i, n - i, A{0})), d, out + i, n - i);
}

template <class T, class O, class A = Acc<T>>
void Grad(const RowMath &math, const GradRow &row, const Span &span, const GradOut &out) {
  const bool plain = math.scale == 1 && math.half == 1 && row.post == 0;
  const auto grad = math.softcap != 0 ? &GradBlock<A, true, true>
                    : plain           ? &GradBlock<A, false, true>
                                      : &GradBlock<A, false, false>;
  HWY_ALIGN A block[kBlock];
  for (int64_t begin = span.begin; begin < span.end; begin += kBlock) {
    const int64_t left = span.end - begin;
    const size_t n = static_cast<size_t>(left < kBlock ? left : kBlock);
    const A *v = PackedBlock<T>(span, begin, n, block);
    const bool holds_target = row.target >= begin && row.target < begin + static_cast<int64_t>(n);
    if constexpr (std::is_same_v<O, A>) {
      if (out.stride == 1 && !out.stream && !holds_target) {
        grad(math, row, v, static_cast<O *>(out.row) + begin, n);
        continue;
      }
    }
    grad(math, row, v, block, n);
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

void stream_fence() { hwy::FlushStream(); }

}  // namespace xent::cpu
#endif
