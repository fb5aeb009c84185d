// SPDX-FileCopyrightText: the libxent authors
// SPDX-License-Identifier: Apache-2.0

#include "cpu/ranks.hpp"

#include <cmath>

namespace xent::cpu {
namespace {

bool keeps_largest(const Plan &plan) { return plan.math.softcap != 0 && plan.math.predicted; }

// The same numbers as integers: a conversion might change what is no number.
xent_view as_integers(const Plan &plan, const xent_view &view) {
  xent_view out = view;
  out.dtype = DLDataType{kDLInt, static_cast<uint8_t>(plan.acc_is_double ? 64 : 32), 1};
  return out;
}

void store_bits(const Plan &plan, const xent_view &view, int64_t offset, int64_t column) {
  write_integer(as_integers(plan, view), offset, column);
}

int64_t load_bits(const Plan &plan, const xent_view &view, int64_t offset) {
  return read_integer(as_integers(plan, view), offset);
}

// `part` with another maximum, whose difference is of rounding.
Partial moved(const Partial &part, double max, const RowMath &math) {
  Partial out = part;
  const double delta = (part.max - max) * math.scale;
  const double factor = std::exp(delta);
  out.max = max;
  out.sum = part.sum * factor;
  out.shift = part.shift + static_cast<double>(part.count) * (part.max - max) * math.shift_unit;
  out.entropy = factor * (part.entropy + delta * part.sum);
  return out;
}

}  // namespace

Partial empty_partial(const Plan &plan) {
  Partial part = {};
  part.max = plan.acc_is_double ? std::numeric_limits<double>::lowest()
                                : static_cast<double>(std::numeric_limits<float>::lowest());
  part.best = -std::numeric_limits<double>::infinity();
  part.index = -1;
  return part;
}

void store_partial(const Plan &plan, const xent_view &view, int64_t row, const Partial &given, double target_value) {
  const RowMath &math = plan.math;
  Partial part = given;
  double first = part.max;
  if (keeps_largest(plan)) {
    first = part.best;
    if (part.sum > 0) part = moved(part, plan.squash(math, part.best), math);
  }
  int64_t at = row_offset(view, row);
  const auto next = [&](double value) {
    write_number(view, at, value);
    at += view.col_stride;
  };
  next(first);
  next(part.sum);
  next(target_value);
  if (math.smoothing) next(part.shift);
  if (math.entropy) next(part.entropy);
  if (math.predicted) store_bits(plan, view, at, part.index);
}

void store_ignored(const Plan &plan, const xent_view &view, int64_t row) {
  const int64_t width = 3 + plan.math.smoothing + plan.math.entropy + plan.math.predicted;
  const int64_t at = row_offset(view, row);
  for (int64_t i = 0; i < width; ++i) write_number(view, at + i * view.col_stride, 0);
}

Gathered load_partials(const Plan &plan, const xent_view &view, int64_t rows, int64_t row, int64_t target) {
  const RowMath &math = plan.math;
  const xent_options &options = *plan.options;
  PartialTree tree(math);
  Gathered out = {};
  for (int64_t rank = 0; rank < options.ranks; ++rank) {
    const int64_t begin = options.class_offsets[rank], end = options.class_offsets[rank + 1];
    int64_t at = row_offset(view, rank * rows + row);
    const auto next = [&] {
      const double value = read_number(view, at);
      at += view.col_stride;
      return value;
    };
    Partial part = empty_partial(plan);
    const double first = next();
    part.sum = next();
    const double target_value = next();
    if (target >= begin && target < end) out.target_value = target_value;
    if (math.smoothing) part.shift = next();
    if (math.entropy) part.entropy = next();
    part.count = end - begin;
    // A shard without a logit above -inf has nothing but its count, and a shift that may be -inf.
    if (part.sum != 0) {
      part.max = keeps_largest(plan) ? plan.squash(math, first) : first;
      part.best = first;
      if (math.predicted) part.index = begin + load_bits(plan, view, at);
    }
    tree.push(part);
  }
  out.total = tree.total();
  return out;
}

}  // namespace xent::cpu
