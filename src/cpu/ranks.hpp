// SPDX-FileCopyrightText: the libxent authors
// SPDX-License-Identifier: Apache-2.0

// What one rank tells the others of a row: numbers of acc,
//   0      max v, or with both softcap and predicted the largest x: which of two equal z has the larger x is not to be
//          told from z
//   1      the sum of exponentials; 0 where the shard has no logit above -inf
//   2      v at the target; +0 where another rank has it
//   3 ..   the shift where there is smoothing, the entropy's sum where it is asked for, and the bits of the column of
//          the largest x where predicted is.
#pragma once

#include "cpu/plan.hpp"
#include "cpu/rows.hpp"

namespace xent::cpu {

// The partial of no columns.
Partial empty_partial(const Plan &plan);

void store_partial(const Plan &plan, const xent_view &view, int64_t row, const Partial &part, double target_value);
// A row that does not count: zeros.
void store_ignored(const Plan &plan, const xent_view &view, int64_t row);

struct Gathered {
  Partial total;        // `index` is a class
  double target_value;  // 0 where no rank has the target
};
// Row `row` of `rows` of the partials of all ranks.
Gathered load_partials(const Plan &plan, const xent_view &view, int64_t rows, int64_t row, int64_t target);

}  // namespace xent::cpu
