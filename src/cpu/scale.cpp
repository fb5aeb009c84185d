// SPDX-FileCopyrightText: the libxent authors
// SPDX-License-Identifier: Apache-2.0

// A gradient that is there already, times the upstream gradient: one read and one write of the rows whose factor is not
// 1, none of the others.
//
// A block of 2048 columns becomes acc, is multiplied and is rounded back, where it lies or through L1. The product is
// that of float64, rounded to acc: what float32 would give where the factor is one, and right where it is not.

#include <algorithm>

#include "common/dtype.hpp"
#include "cpu/plan.hpp"
#include "cpu/rows.hpp"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "cpu/scale.cpp"
#include "hwy/foreach_target.h"
// After foreach_target.h
#include "cpu/load-inl.hpp"

HWY_BEFORE_NAMESPACE();
namespace xent::cpu::HWY_NAMESPACE {
namespace hn = hwy::HWY_NAMESPACE;

// n > 0. `to` may be `from`.
template <class A>
void Multiply(A factor, const A *from, A *to, size_t n) {
  const Tag<A> d;
  const auto by = hn::Set(d, factor);
  const size_t lanes = hn::Lanes(d);
  size_t i = 0;
  for (; i + lanes <= n; i += lanes) hn::StoreU(hn::Mul(hn::LoadU(d, from + i), by), d, to + i);
  if (i < n) StoreTail(hn::Mul(LoadTail(d, from + i, n - i, A{0}), by), d, to + i, n - i);
}

// Columns of T in place: `out` is `span`.
template <class T, class A = Acc<T>>
void Scale(double factor, const Span &span, const GradOut &out) {
  const A narrow = static_cast<A>(factor);
  const bool fits = static_cast<double>(narrow) == factor;
  HWY_ALIGN A block[kBlock];
  for (int64_t begin = span.begin; begin < span.end; begin += kBlock) {
    const size_t n = static_cast<size_t>(std::min(span.end - begin, kBlock));
    const A *const from = PackedBlock<T>(span, begin, n, block);
    A *const to = const_cast<A *>(from);  // the caller's own memory, or `block`
    if (fits) {
      Multiply(narrow, from, to, n);
    } else {
      for (size_t i = 0; i < n; ++i) to[i] = static_cast<A>(static_cast<double>(from[i]) * factor);
    }
    StoreBlock<T>(from, out, begin, n);
  }
}

void ScaleF32(double factor, const Span &span, const GradOut &out) { Scale<float>(factor, span, out); }
void ScaleF64(double factor, const Span &span, const GradOut &out) { Scale<double>(factor, span, out); }
void ScaleF16(double factor, const Span &span, const GradOut &out) { Scale<F16>(factor, span, out); }
void ScaleBF16(double factor, const Span &span, const GradOut &out) { Scale<BF16>(factor, span, out); }

}  // namespace xent::cpu::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace xent::cpu {
namespace {

HWY_EXPORT(ScaleF32);
HWY_EXPORT(ScaleF64);
HWY_EXPORT(ScaleF16);
HWY_EXPORT(ScaleBF16);

constexpr int64_t kSmallBytes = int64_t{64} << 10;  // less than this is not worth a second thread

void scale_columns(const DLDataType &type, double factor, const Span &span, const GradOut &out) {
  if (is_f64(type)) return HWY_DYNAMIC_DISPATCH(ScaleF64)(factor, span, out);
  if (is_f16(type)) return HWY_DYNAMIC_DISPATCH(ScaleF16)(factor, span, out);
  if (is_bf16(type)) return HWY_DYNAMIC_DISPATCH(ScaleBF16)(factor, span, out);
  HWY_DYNAMIC_DISPATCH(ScaleF32)(factor, span, out);
}

}  // namespace

void run_scale_grad(const Plan &plan, Pool &pool, const xent_problem &problem) {
  const xent_view &grad = problem.grad_logits, &upstream = problem.grad_loss;
  const int64_t columns = plan.options->columns, rows = problem.rows;
  if (!present(grad) || (upstream.rank == 0 && read_number(upstream, 0) == 1)) return;
  const int64_t row_bytes = std::max<int64_t>(1, columns * static_cast<int64_t>(element_size(grad.dtype)));
  const int64_t slices = row_bytes * rows < kSmallBytes ? 1 : std::max<int64_t>(1, plan.slices);
  const int64_t slice = slices == 1 ? columns : plan.slice;
  // Tasks are neighbouring slices of rows, large enough each to be worth one.
  const int64_t units = rows * slices, unit_bytes = std::max<int64_t>(1, row_bytes / slices);
  const int64_t piece = std::max((kSmallBytes + unit_bytes - 1) / unit_bytes, units / (8 * pool.threads()));
  pool.run((units + piece - 1) / piece, [&](int64_t task) {
    const int64_t end = std::min(units, (task + 1) * piece);
    for (int64_t unit = task * piece; unit < end; ++unit) {
      const int64_t row = unit / slices, begin = unit % slices * slice;
      const double factor = read_number(upstream, row_offset(upstream, row));
      if (factor == 1 || read_target(problem, row).kind != RowKind::kCounted) continue;
      void *const at = const_cast<void *>(row_address(grad, row));
      scale_columns(grad.dtype, factor, {at, grad.col_stride, begin, std::min(columns, begin + slice)},
                    {at, grad.col_stride, false, false});
    }
  });
}

}  // namespace xent::cpu
#endif
