// SPDX-FileCopyrightText: the libxent authors
// SPDX-License-Identifier: Apache-2.0

#include "core/overlap.hpp"

#include <algorithm>
#include <cstdlib>
#include <numeric>
#include <utility>

#include "common/dtype.hpp"

namespace xent {
namespace {

constexpr int kMaximumAxes = XENT_MAX_LEADING_DIMS + 1;
constexpr int kMaximumTerms = 2 * (kMaximumAxes + 1);
constexpr int64_t kWorkLimit = int64_t{1} << 16;

// A handful of items: an insertion sort.
template <class Item, class Before>
void sort_few(Item *items, int count, Before before) {
  for (int i = 1; i < count; ++i) {
    for (int j = i; j > 0 && before(items[j], items[j - 1]); --j) std::swap(items[j], items[j - 1]);
  }
}

// Is there an integer solution of  sum step_k * x_k = target,  0 <= x_k <= count_k,  all steps positive?
// Branch and bound from the largest step down. A suffix of the sorted terms bounds what it can still reach and
// fixes the remainder modulo its gcd; where a suffix reaches every multiple of its gcd up to its sum, no search is
// needed below it. Memory layouts are nearly always of that kind, so the search stays at a few steps.
class BoundedEquation {
 public:
  void add(int64_t step, int64_t count) {
    if (count > 0) terms_[size_++] = Term{step, count};
  }

  Overlap solve(int64_t target) {
    prepare();
    work_ = kWorkLimit;
    return search(0, target);
  }

 private:
  struct Term {
    int64_t step;
    int64_t count;
  };
  struct Suffix {
    int64_t reach;  // the sum of all its terms
    int64_t gcd;
    bool dense;  // it reaches every multiple of gcd in [0, reach]
  };

  void prepare() {
    sort_few(terms_, size_, [](const Term &a, const Term &b) { return a.step > b.step; });
    int kept = 0;
    for (int i = 0; i < size_; ++i) {
      if (kept > 0 && terms_[kept - 1].step == terms_[i].step) {
        terms_[kept - 1].count += terms_[i].count;
      } else {
        terms_[kept++] = terms_[i];
      }
    }
    size_ = kept;
    suffixes_[size_] = Suffix{0, 0, true};
    for (int i = size_ - 1; i >= 0; --i) {
      const Term &term = terms_[i];
      const Suffix &rest = suffixes_[i + 1];
      Suffix &suffix = suffixes_[i];
      suffix.reach = rest.reach + term.step * term.count;
      suffix.gcd = std::gcd(term.step, rest.gcd);
      suffix.dense = rest.dense && (i == size_ - 1 || (suffix.gcd == rest.gcd && term.step <= rest.reach + rest.gcd));
    }
  }

  Overlap search(int k, int64_t target) {
    const Suffix &suffix = suffixes_[k];
    if (target < 0 || target > suffix.reach) return Overlap::kNone;
    if (k == size_) return Overlap::kSome;  // reach is 0
    if (target % suffix.gcd != 0) return Overlap::kNone;
    if (suffix.dense) return Overlap::kSome;

    const Term &term = terms_[k];
    const Suffix &rest = suffixes_[k + 1];
    const int64_t most = std::min(term.count, target / term.step);
    const int64_t excess = target - rest.reach;
    const int64_t least = excess <= 0 ? 0 : (excess - 1) / term.step + 1;
    // Only every period-th x leaves a multiple of the rest's gcd.
    const int64_t period = rest.gcd / suffix.gcd;
    bool aligned = false;
    for (int64_t x = most; x >= least;) {
      if (--work_ < 0) return Overlap::kUndecided;
      const int64_t left = target - term.step * x;
      aligned = aligned || left % rest.gcd == 0;
      if (aligned) {
        const Overlap found = search(k + 1, left);
        if (found != Overlap::kNone) return found;
      }
      x -= aligned ? period : 1;
    }
    return Overlap::kNone;
  }

  Term terms_[kMaximumTerms];
  Suffix suffixes_[kMaximumTerms + 1];
  int size_ = 0;
  int64_t work_ = 0;
};

struct Axis {
  int64_t extent;
  int64_t stride;  // in elements, not negative: an axis walked backwards covers the same addresses
};

int list_axes(const Region &region, Axis *axes) {
  int count = 0;
  for (int32_t dim = 0; dim < region.view->rank; ++dim) {
    axes[count++] = Axis{region.view->shape[dim], std::abs(region.view->stride[dim])};
  }
  if (region.columns > 1) axes[count++] = Axis{region.columns, std::abs(region.view->col_stride)};
  return count;
}

void add_axes(const Region &region, int64_t element, BoundedEquation *equation) {
  Axis axes[kMaximumAxes];
  const int count = list_axes(region, axes);
  for (int i = 0; i < count; ++i) {
    if (axes[i].stride != 0) equation->add(axes[i].stride * element, axes[i].extent - 1);
  }
}

}  // namespace

ByteRange byte_range(const Region &region) {
  const xent_view &view = *region.view;
  int64_t low = 0;
  int64_t high = 0;
  const auto extend = [&](int64_t extent, int64_t stride) { (stride < 0 ? low : high) += (extent - 1) * stride; };
  for (int32_t dim = 0; dim < view.rank; ++dim) extend(view.shape[dim], view.stride[dim]);
  if (region.columns > 1) extend(region.columns, view.col_stride);
  const auto address = reinterpret_cast<uintptr_t>(view.data);
  const auto element = static_cast<int64_t>(element_size(view.dtype));
  return ByteRange{address - static_cast<uint64_t>(-low * element),
                   address + static_cast<uint64_t>((high + 1) * element)};
}

Overlap find_overlap(const Region &a, const Region &b) {
  const ByteRange range_a = byte_range(a);
  const ByteRange range_b = byte_range(b);
  if (!range_a.meets(range_b)) return Overlap::kNone;
  // first_a + offset_a = first_b + offset_b; with offset_b counted down from the end of b all terms are positive.
  const auto element_a = static_cast<int64_t>(element_size(a.view->dtype));
  const auto element_b = static_cast<int64_t>(element_size(b.view->dtype));
  BoundedEquation equation;
  add_axes(a, element_a, &equation);
  add_axes(b, element_b, &equation);
  equation.add(1, element_a - 1);
  equation.add(1, element_b - 1);
  return equation.solve(static_cast<int64_t>(range_b.end - 1 - range_a.first));
}

Overlap find_self_overlap(const Region &region) {
  Axis axes[kMaximumAxes];
  const int count = list_axes(region, axes);
  sort_few(axes, count, [](const Axis &a, const Axis &b) { return a.stride < b.stride; });
  if (count > 0 && axes[0].stride == 0) return Overlap::kSome;  // axes of extent 1 were dropped
  // Axis k is the largest that two overlapping elements differ in: it moves d >= 1 steps, and the smaller ones,
  // each by -(extent - 1) to extent - 1, must undo it.
  int64_t inner = 0;  // how far the smaller axes move
  for (int k = 0; k < count; ++k) {
    if (axes[k].stride <= inner) {
      BoundedEquation equation;
      for (int i = 0; i < k; ++i) equation.add(axes[i].stride, 2 * (axes[i].extent - 1));
      equation.add(axes[k].stride, axes[k].extent - 2);
      const Overlap found = equation.solve(inner - axes[k].stride);
      if (found != Overlap::kNone) return found;
    }
    inner += axes[k].stride * (axes[k].extent - 1);
  }
  return Overlap::kNone;
}

bool same_storage(const xent_view &a, const xent_view &b) {
  if (a.data != b.data || !same_dtype(a.dtype, b.dtype) || a.rank != b.rank || a.col_stride != b.col_stride) {
    return false;
  }
  return std::equal(a.shape, a.shape + a.rank, b.shape) && std::equal(a.stride, a.stride + a.rank, b.stride);
}

}  // namespace xent
