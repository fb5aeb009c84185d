// SPDX-FileCopyrightText: the libxent authors
// SPDX-License-Identifier: Apache-2.0

// One row's scalars: what kind of row it is, its weight, a logit, its statistics, and the row outputs.
#pragma once

#include <xent/xent_plugin.h>

#include "common/dtype.hpp"
#include "common/view.hpp"
#include "cpu/kernels.hpp"

namespace xent::cpu {

// A number at element `offset` of a view, of any type that xent.h allows.
double read_number(const xent_view &view, int64_t offset);
// Rounded once, to float32 or float64: an int64 fits neither.
double read_rounded(const xent_view &view, int64_t offset, bool to_double);
int64_t read_integer(const xent_view &view, int64_t offset);               // int32 or int64
void write_number(const xent_view &view, int64_t offset, double value);    // float32 or float64
void write_integer(const xent_view &view, int64_t offset, int64_t value);  // int32 or int64

inline double read_row(const xent_view &view, int64_t row, double absent) {
  return present(view) ? read_number(view, row_offset(view, row)) : absent;
}
inline void write_row(const xent_view &view, int64_t row, double value) {
  if (present(view)) write_number(view, row_offset(view, row), value);
}

// Element `offset` of the row `row`, as a byte address.
const void *row_address(const xent_view &view, int64_t row);

enum class RowKind { kCounted, kIgnored, kOutOfRange };

struct Row {
  RowKind kind;
  int64_t target;  // a class
};
Row read_target(const xent_problem &problem, int64_t row);
inline double read_logit(const xent_problem &problem, int64_t row, int64_t column) {
  const xent_view &logits = problem.logits;
  return read_number(logits, row_offset(logits, row) + column * logits.col_stride);
}

// What forward leaves for backward: the maximum, and the sum of exponentials as a number of acc, NaN instead of 0.
struct Stats {
  double max, sum;
};
inline Stats read_stats(const xent_problem &problem, int64_t row) {
  const xent_view &stats = problem.stats;
  const int64_t at = row_offset(stats, row);
  return {read_number(stats, at), read_number(stats, at + stats.col_stride)};
}

// Sum of value(i) for 0 <= i < count in a fixed order: runs of 64, then pairwise.
template <class Value>
double pairwise_sum(int64_t begin, int64_t end, const Value &value) {
  if (end - begin <= 64) {
    double sum = 0;
    for (int64_t i = begin; i < end; ++i) sum += value(i);
    return sum;
  }
  const int64_t half = static_cast<int64_t>(std::bit_floor(static_cast<uint64_t>(end - begin - 1)));
  return pairwise_sum(begin, begin + half, value) + pairwise_sum(begin + half, end, value);
}

}  // namespace xent::cpu
