// SPDX-FileCopyrightText: the libxent authors
// SPDX-License-Identifier: Apache-2.0

// From sums to outputs: a row's, from the sums over its columns, and the call's, from those of all its rows. Apart from
// the driver, for which they are the same however the sums came about: by one thread, by many, or by other ranks.
#pragma once

#include "cpu/plan.hpp"
#include "cpu/rows.hpp"

namespace xent::cpu {

// By what the loss and the gradient are divided, 0 giving 0.
struct Divisor {
  bool divides = false;
  double value = 1;
};

class Loss {
 public:
  Loss(const Plan &plan, const xent_problem &problem);

  // Before all rows. What the rows' scalars alone decide: the divisor, and of the outputs the counts.
  Divisor begin();
  // The outputs of a row, on any thread. `total`: its sums, NULL where the row is ignored.
  Stats row(int64_t row, const Row &what, const Partial *total) {
    return total == nullptr ? ignored(row) : counted(row, what, *total, target_value(row, what));
  }
  // The same where target_value() is not this rank's alone.
  Stats counted(int64_t row, const Row &what, const Partial &total, double target_value);
  Stats ignored(int64_t row);
  // After all rows: their sum.
  void end();

  // v at the target, 0 where it is no column of this rank.
  double target_value(int64_t row, const Row &what) const {
    const int64_t column = what.target - options_.class_begin;
    if (what.kind != RowKind::kCounted || column < 0 || column >= options_.columns) return 0;
    const double x = read_logit(problem_, row, column);
    return math_.softcap != 0 ? plan_.squash(math_, x) : x;
  }
  Stats stats_of(const Partial &total) const;

 private:
  Stats write(int64_t row, Stats stats, double lse, double entropy, int64_t predicted, double loss);
  double acc(double value) const;

  const Plan &plan_;
  const RowMath &math_;
  const xent_options &options_;
  const xent_problem &problem_;
  double *losses_;  // of the rows, where they are reduced
  Divisor divisor_;
  bool nan_mean_ = false;
};

}  // namespace xent::cpu
