// SPDX-FileCopyrightText: the libxent authors
// SPDX-License-Identifier: Apache-2.0

#include "cpu/loss.hpp"

namespace xent::cpu {
namespace {

using Wide = long double;
constexpr double kNan = std::numeric_limits<double>::quiet_NaN();

}  // namespace

Loss::Loss(const Plan &plan, const xent_problem &problem)
    : plan_(plan),
      math_(plan.math),
      options_(*plan.options),
      problem_(problem),
      losses_(static_cast<double *>(problem.workspace)) {}

Divisor Loss::begin() {
  const bool mean = options_.reduction == XENT_REDUCTION_MEAN && !present(problem_.denominator);
  int64_t ignored_rows = 0, out_of_range = 0;
  if (mean || present(problem_.row_counts)) {
    const auto weight = [&](int64_t row) {
      const RowKind kind = read_target(problem_, row).kind;
      if (kind == RowKind::kIgnored) {
        ++ignored_rows;
        return 0.0;
      }
      if (kind == RowKind::kOutOfRange) ++out_of_range;
      return mean ? read_row(problem_.row_weights, row, 1) : 0.0;
    };
    divisor_.value = acc(pairwise_sum(0, problem_.rows, weight));
  }
  divisor_.divides = mean || present(problem_.denominator);
  if (present(problem_.denominator)) divisor_.value = read_rounded(problem_.denominator, 0, plan_.acc_is_double);
  nan_mean_ = mean && options_.empty_mean_is_nan != 0 && ignored_rows == problem_.rows;
  if (present(problem_.row_counts)) {
    const int64_t step = problem_.row_counts.col_stride;
    write_integer(problem_.row_counts, 0, problem_.rows - ignored_rows - out_of_range);
    write_integer(problem_.row_counts, step, ignored_rows);
    write_integer(problem_.row_counts, 2 * step, out_of_range);
  }
  if (present(problem_.divisor)) write_number(problem_.divisor, 0, divisor_.value);
  return divisor_;
}

Stats Loss::ignored(int64_t row) { return write(row, {0, 1}, 0, 0, -1, 0); }

Stats Loss::counted(int64_t row, const Row &what, const Partial &total, double target_value) {
  const Stats stats = stats_of(total);
  const double sum = total.sum > 0 ? total.sum : kNan;
  const double log_sum = std::log(sum);
  // Wide: logits far apart and their maximum may pass the range of double before the weight or the type's limit.
  const Wide scale = math_.scale;
  const Wide lse = scale * total.max + log_sum;
  const double entropy = math_.entropy ? log_sum - total.entropy / sum : 0;
  Wide loss = kNan;
  if (what.kind == RowKind::kCounted) {
    const Wide eps = options_.label_smoothing;
    loss = 0;
    if (eps != 1) loss += (1 - eps) * (scale * (Wide{total.max} - target_value) + log_sum);
    if (eps != 0) {
      const Wide mean = total.shift / (Wide{math_.shift_unit} * static_cast<Wide>(options_.classes));
      loss += eps * (log_sum - scale * mean);
    }
    if (options_.z_loss != 0) loss += options_.z_loss * lse * lse;
    loss *= read_row(problem_.row_weights, row, 1);
  }
  return write(row, stats, static_cast<double>(lse), entropy, sum > 0 ? total.index : -1, static_cast<double>(loss));
}

Stats Loss::write(int64_t row, Stats stats, double lse, double entropy, int64_t predicted, double loss) {
  if (present(problem_.stats)) {
    const int64_t at = row_offset(problem_.stats, row);
    write_number(problem_.stats, at, stats.max);
    write_number(problem_.stats, at + problem_.stats.col_stride, stats.sum);
  }
  write_row(problem_.lse, row, lse);
  write_row(problem_.entropy, row, entropy);
  if (present(problem_.predicted)) {
    write_integer(problem_.predicted, row_offset(problem_.predicted, row), predicted);
  }
  if (options_.reduction == XENT_REDUCTION_NONE) {
    write_row(problem_.loss, row, loss);
  } else {
    losses_[row] = loss;
  }
  return stats;
}

void Loss::end() {
  if (options_.reduction == XENT_REDUCTION_NONE || !present(problem_.loss)) return;
  double loss = pairwise_sum(0, problem_.rows, [&](int64_t row) { return losses_[row]; });
  if (divisor_.divides) loss = divisor_.value == 0 ? 0 : loss / divisor_.value;
  write_number(problem_.loss, 0, nan_mean_ ? kNan : loss);
}

// A sum of 0 means that no logit is above -inf.
Stats Loss::stats_of(const Partial &total) const { return {total.max, total.sum > 0 ? acc(total.sum) : kNan}; }

double Loss::acc(double value) const {
  return plan_.acc_is_double ? value : static_cast<double>(static_cast<float>(value));
}

}  // namespace xent::cpu
