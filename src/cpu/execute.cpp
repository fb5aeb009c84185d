// SPDX-FileCopyrightText: the libxent authors
// SPDX-License-Identifier: Apache-2.0

// The rows' driver: forward, backward and both together, and the two halves of a forward over ranks, over a pool of
// threads.
//
// Rows go to threads in contiguous pieces. Where there are few, the slices of rows do, and a row's partials meet in the
// workspace. Neither changes any result: a row is always the merge of its slices in order, and sums over rows are taken
// at the end by one thread.

#include <algorithm>
#include <climits>
#include <cstring>

#include "cpu/plan.hpp"
#include "cpu/ranks.hpp"
#include "cpu/rows.hpp"

namespace xent::cpu {
namespace {

constexpr int64_t kSmallBytes = int64_t{64} << 10;  // less than this is not worth a second thread
using Wide = long double;
constexpr double kNan = std::numeric_limits<double>::quiet_NaN();

class Call {
 public:
  Call(const Plan &plan, Pool &pool, const xent_problem &problem)
      : plan_(plan), math_(plan.math), options_(*plan.options), pool_(pool), problem_(problem) {
    if (problem.workspace != nullptr) {
      losses_ = static_cast<double *>(problem.workspace);
      partials_ = reinterpret_cast<Partial *>(static_cast<char *>(problem.workspace) + plan.losses_bytes);
    }
    const int64_t element = static_cast<int64_t>(element_size(options_.logits_dtype));
    row_bytes_ = std::max<int64_t>(1, options_.columns * element);
    threads_ = row_bytes_ * problem.rows < kSmallBytes ? 1 : pool.threads();
    split_ = threads_ > 1 && plan.slices > 1 && problem.rows < int64_t{4} * threads_;
    if (present(problem.grad_logits)) {
      const xent_view &grad = problem.grad_logits;
      const int64_t bytes = problem.rows * options_.vocab * static_cast<int64_t>(element_size(grad.dtype));
      stream_ = grad.col_stride == 1 && grad.data != problem.logits.data && bytes > cache_bytes();
      grad_kernel_ = same_dtype(grad.dtype, options_.logits_dtype) ? plan.grad : plan.grad_f32;
    }
  }

  void forward() {
    read_divisor_of_forward();
    for_totals([&](int64_t row, const Row &what, const Partial *total) { finish_row(row, what, total); });
    write_totals();
  }

  void partial() {
    for_totals([&](int64_t row, const Row &what, const Partial *total) {
      if (total == nullptr) return store_ignored(plan_, problem_.partial, row);
      store_partial(plan_, problem_.partial, row, *total, target_value(row, what));
    });
  }

  void combine() {
    read_divisor_of_forward();
    for_rows([&](int64_t row) {
      const Row what = read_target(problem_, row);
      if (what.kind == RowKind::kIgnored) {
        finish_ignored(row);
        return;
      }
      const Gathered all = load_partials(plan_, problem_.partial, problem_.rows, row, what.target);
      finish(row, what, all.total, all.target_value);
    });
    write_totals();
  }

  void backward() {
    divides_ = present(problem_.divisor);
    if (divides_) divisor_ = read_number(problem_.divisor, 0);
    if (split_) {
      for_slices(0, problem_.rows, [&](int64_t row, int64_t slice) { grad_slice(row, read_stats(row), slice); });
    } else {
      for_rows([&](int64_t row) { grad_row(row, read_stats(row), false); });
    }
  }

  void loss_and_grad() {
    read_divisor_of_forward();
    if (split_) {
      // As few rows at once as occupy the threads: their logits are still in a cache when the gradient reads them.
      const int64_t rows = std::max<int64_t>(1, int64_t{2} * threads_ / plan_.slices);
      for_row_groups(std::min(rows, plan_.partials / plan_.slices), [&](int64_t first, int64_t count) {
        split_totals(first, count, [&](int64_t row, const Row &what, Partial *total) {
          finish_row(row, what, total);
          if (total == nullptr) partials_[(row - first) * plan_.slices] = {};
        });
        for_slices(first, count, [&](int64_t row, int64_t slice) {
          grad_slice(row, stats_of(partials_[(row - first) * plan_.slices]), slice);
        });
      });
    } else {
      for_rows([&](int64_t row) {
        Partial total;
        const Row what = read_target(problem_, row);
        const bool counts = what.kind != RowKind::kIgnored;
        if (counts) total = total_of(row);
        grad_row(row, finish_row(row, what, counts ? &total : nullptr), true);
      });
    }
    write_totals();
  }

 private:
  struct Stats {
    double max, sum;
  };

  // ---- Dealing out the work

  template <class Body>
  void for_rows(const Body &body) {
    const int64_t rows = problem_.rows;
    const int64_t at_least = (kSmallBytes + row_bytes_ - 1) / row_bytes_;
    const int64_t piece = threads_ == 1 ? std::max<int64_t>(rows, 1) : std::max(at_least, rows / (8 * threads_));
    pool_.run((rows + piece - 1) / piece, [&](int64_t i) {
      const int64_t end = std::min(rows, (i + 1) * piece);
      for (int64_t row = i * piece; row < end; ++row) body(row);
      if (stream_) stream_fence();
    });
  }

  template <class Body>
  void for_slices(int64_t first, int64_t rows, const Body &body) {
    pool_.run(rows * plan_.slices, [&](int64_t i) {
      body(first + i / plan_.slices, i % plan_.slices);
      if (stream_) stream_fence();
    });
  }

  template <class Body>
  void for_row_groups(int64_t size, const Body &body) {
    for (int64_t row = 0; row < problem_.rows; row += size) body(row, std::min(size, problem_.rows - row));
  }

  // ---- Forward

  Span columns(int64_t row, int64_t slice) const {
    const int64_t begin = slice * plan_.slice;
    return {row_address(problem_.logits, row), problem_.logits.col_stride, begin,
            std::min(options_.columns, begin + plan_.slice)};
  }

  Partial total_of(int64_t row) const {
    if (plan_.slices == 0) return empty_partial(plan_);
    PartialTree tree(math_);
    for (int64_t slice = 0; slice < plan_.slices; ++slice) {
      Partial part;
      plan_.forward(math_, columns(row, slice), &part);
      tree.push(part);
    }
    return tree.total();
  }

  // Body(row, what, its partial, or NULL where the row is ignored) for every row.
  template <class Body>
  void for_totals(const Body &body) {
    if (split_) {
      return for_row_groups(plan_.partials / plan_.slices,
                            [&](int64_t first, int64_t rows) { split_totals(first, rows, body); });
    }
    for_rows([&](int64_t row) {
      const Row what = read_target(problem_, row);
      if (what.kind == RowKind::kIgnored) return body(row, what, nullptr);
      Partial total = total_of(row);
      body(row, what, &total);
    });
  }

  // The same for a few rows, whose partials are left in the place of their first slice's.
  template <class Body>
  void split_totals(int64_t first, int64_t rows, const Body &body) {
    for_slices(first, rows, [&](int64_t row, int64_t slice) {
      if (read_target(problem_, row).kind == RowKind::kIgnored) return;
      plan_.forward(math_, columns(row, slice), &partials_[(row - first) * plan_.slices + slice]);
    });
    for (int64_t row = first; row < first + rows; ++row) {
      const Row what = read_target(problem_, row);
      Partial *const parts = partials_ + (row - first) * plan_.slices;
      if (what.kind == RowKind::kIgnored) {
        body(row, what, nullptr);
        continue;
      }
      PartialTree tree(math_);
      for (int64_t slice = 0; slice < plan_.slices; ++slice) tree.push(parts[slice]);
      parts[0] = tree.total();
      body(row, what, &parts[0]);
    }
  }

  double acc(double value) const {
    return plan_.acc_is_double ? value : static_cast<double>(static_cast<float>(value));
  }

  // A sum of 0 means that no logit is above -inf.
  Stats stats_of(const Partial &total) const { return {total.max, total.sum > 0 ? acc(total.sum) : kNan}; }

  double logit(int64_t row, int64_t column) const {
    const xent_view &logits = problem_.logits;
    return read_number(logits, row_offset(logits, row) + column * logits.col_stride);
  }

  // v at the target, 0 where it is no column of this rank.
  double target_value(int64_t row, const Row &what) const {
    const int64_t column = what.target - options_.class_begin;
    if (what.kind != RowKind::kCounted || column < 0 || column >= options_.columns) return 0;
    const double x = logit(row, column);
    return math_.softcap != 0 ? plan_.squash(math_, x) : x;
  }

  Stats finish_row(int64_t row, const Row &what, const Partial *total) {
    return total == nullptr ? finish_ignored(row) : finish(row, what, *total, target_value(row, what));
  }

  Stats finish_ignored(int64_t row) { return write_outputs(row, {0, 1}, 0, 0, -1, 0); }

  Stats finish(int64_t row, const Row &what, const Partial &total, double target_value) {
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
    return write_outputs(row, stats, static_cast<double>(lse), entropy, sum > 0 ? total.index : -1,
                         static_cast<double>(loss));
  }

  Stats write_outputs(int64_t row, const Stats &stats, double lse, double entropy, int64_t predicted, double loss) {
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

  // The divisor, the counts: what the rows' scalars alone decide.
  void read_divisor_of_forward() {
    const bool mean = options_.reduction == XENT_REDUCTION_MEAN && !present(problem_.denominator);
    int64_t ignored = 0, out_of_range = 0;
    if (mean || present(problem_.row_counts)) {
      const auto weight = [&](int64_t row) {
        const RowKind kind = read_target(problem_, row).kind;
        if (kind == RowKind::kIgnored) {
          ++ignored;
          return 0.0;
        }
        if (kind == RowKind::kOutOfRange) ++out_of_range;
        return mean ? read_row(problem_.row_weights, row, 1) : 0.0;
      };
      divisor_ = acc(pairwise_sum(0, problem_.rows, weight));
    }
    divides_ = mean || present(problem_.denominator);
    if (present(problem_.denominator)) divisor_ = read_rounded(problem_.denominator, 0, plan_.acc_is_double);
    nan_mean_ = mean && options_.empty_mean_is_nan != 0 && ignored == problem_.rows;
    if (present(problem_.row_counts)) {
      const int64_t step = problem_.row_counts.col_stride;
      write_integer(problem_.row_counts, 0, problem_.rows - ignored - out_of_range);
      write_integer(problem_.row_counts, step, ignored);
      write_integer(problem_.row_counts, 2 * step, out_of_range);
    }
    if (present(problem_.divisor)) write_number(problem_.divisor, 0, divisor_);
  }

  void write_totals() {
    if (options_.reduction == XENT_REDUCTION_NONE || !present(problem_.loss)) return;
    double loss = pairwise_sum(0, problem_.rows, [&](int64_t row) { return losses_[row]; });
    if (divides_) loss = divisor_ == 0 ? 0 : loss / divisor_;
    write_number(problem_.loss, 0, nan_mean_ ? kNan : loss);
  }

  // ---- Gradient

  Stats read_stats(int64_t row) const {
    const int64_t at = row_offset(problem_.stats, row);
    return {read_number(problem_.stats, at), read_number(problem_.stats, at + problem_.stats.col_stride)};
  }

  void zero_columns(int64_t row, int64_t begin, int64_t end) {
    if (begin == end) return;
    const xent_view &grad = problem_.grad_logits;
    const size_t element = element_size(grad.dtype);
    char *const to = static_cast<char *>(grad.data) +
                     (row_offset(grad, row) + begin * grad.col_stride) * static_cast<int64_t>(element);
    if (grad.col_stride == 1) {
      std::memset(to, 0, static_cast<size_t>(end - begin) * element);
      return;
    }
    for (int64_t i = 0; i < end - begin; ++i) {
      std::memset(to + i * grad.col_stride * static_cast<int64_t>(element), 0, element);
    }
  }

  // Reads the target's logit, so before any of its slice is overwritten.
  double target_gradient(int64_t row, int64_t target, Wide f, Wide factor, Wide offset, double max) const {
    const Wide eps = options_.label_smoothing;
    const double x = logit(row, target);
    double v = x, slope = 1;
    if (math_.softcap != 0) {
      const double q = std::exp(-2 * std::fabs(x * math_.cap_ratio));
      v = plan_.squash(math_, x);  // of the same rounding as the maximum: the difference is never above 0
      slope = 4 * q / ((1 + q) * (1 + q));
    }
    const Wide e = std::exp(static_cast<double>(math_.scale * (Wide{v} - max)));
    return static_cast<double>((e * factor - offset - (eps != 1 ? f * (1 - eps) : 0)) * slope);
  }

  // For the columns [begin, end). False: the row's gradient is 0.
  bool grad_coefficients(int64_t row, const Stats &stats, int64_t begin, int64_t end, GradRow *out) const {
    if (divides_ && divisor_ == 0) return false;
    const Row what = read_target(problem_, row);
    if (what.kind != RowKind::kCounted) return false;
    const double eps = options_.label_smoothing;
    Wide f = Wide{read_row(problem_.grad_loss, row, 1)} * read_row(problem_.row_weights, row, 1) * options_.logit_scale;
    if (divides_) f /= divisor_;
    Wide loss_slope = 1;
    if (options_.z_loss != 0)
      loss_slope += 2 * Wide{options_.z_loss} * (Wide{math_.scale} * stats.max + std::log(stats.sum));
    const Wide factor = f * loss_slope / stats.sum;
    out->max = stats.max;
    const Wide offset = eps != 0 ? f * eps / static_cast<Wide>(options_.classes) : 0;
    // Beside a small upstream gradient a large slope must not magnify what the exponential flushes to 0, as far as the
    // gradient's type shows it.
    const Wide slope = loss_slope * options_.logit_scale / stats.sum;
    const int shown = std::min(exponent(slope), exponent(factor) + (plan_.acc_is_double ? 60 : 30));
    const int most = plan_.acc_is_double ? 1022 : 126;
    out->lift = std::clamp(std::max(exponent(factor), shown), 0, most);
    out->post = std::clamp(std::max(exponent(factor), exponent(offset)) - most, 0, most);
    // No factor is subnormal, nor with softcap what its slope multiplies: a gradient that is one is rounded once.
    const int least = plan_.acc_is_double ? -900 : math_.softcap != 0 ? -24 : -100;
    const int size = std::max(exponent(factor, INT_MIN), exponent(offset, INT_MIN));
    if (size < least && size != INT_MIN) out->post = std::max(size, -most);
    out->factor = shrunk(factor, out->lift + out->post);
    out->offset = shrunk(offset, out->post);
    out->target = what.target - options_.class_begin;  // may be no column of this rank
    if (out->target >= begin && out->target < end) {
      out->target_grad = target_gradient(row, out->target, f, factor, offset, stats.max);
    }
    return true;
  }

  static int exponent(Wide value, int otherwise = 0) {
    return std::isfinite(value) && value != 0 ? std::ilogb(value) : otherwise;
  }

  // value * 2^-by; a number stays one.
  double shrunk(Wide value, int by) const {
    if (!std::isfinite(value)) return static_cast<double>(value);
    const Wide largest = plan_.acc_is_double ? std::numeric_limits<double>::max() : std::numeric_limits<float>::max();
    return static_cast<double>(std::clamp(std::ldexp(value, -by), -largest, largest));
  }

  void grad_columns(int64_t row, const GradRow &grad, const Span &span, bool backwards) const {
    grad_kernel_(math_, grad, span,
                 {const_cast<void *>(row_address(problem_.grad_logits, row)), problem_.grad_logits.col_stride, stream_,
                  backwards});
  }

  void grad_row(int64_t row, const Stats &stats, bool backwards) {
    GradRow grad;
    if (!grad_coefficients(row, stats, 0, options_.columns, &grad)) return zero_columns(row, 0, options_.vocab);
    if (options_.columns == 0) return zero_columns(row, 0, options_.vocab);  // an empty shard
    grad_columns(row, grad, {row_address(problem_.logits, row), problem_.logits.col_stride, 0, options_.columns},
                 backwards);
    zero_columns(row, options_.columns, options_.vocab);
  }

  void grad_slice(int64_t row, const Stats &stats, int64_t slice) {
    const Span span = columns(row, slice);
    const bool last = slice == plan_.slices - 1;
    GradRow grad;
    if (!grad_coefficients(row, stats, span.begin, span.end, &grad)) {
      return zero_columns(row, span.begin, last ? options_.vocab : span.end);
    }
    grad_columns(row, grad, span, false);
    if (last) zero_columns(row, options_.columns, options_.vocab);
  }

  const Plan &plan_;
  const RowMath &math_;
  const xent_options &options_;
  Pool &pool_;
  const xent_problem &problem_;
  double *losses_ = nullptr;
  Partial *partials_ = nullptr;
  int64_t row_bytes_;
  int threads_;
  bool split_;
  bool stream_ = false;
  GradKernel grad_kernel_ = nullptr;
  bool divides_ = false;
  bool nan_mean_ = false;
  double divisor_ = 1;
};

}  // namespace

void run_forward(const Plan &plan, Pool &pool, const xent_problem &problem) { Call(plan, pool, problem).forward(); }
void run_backward(const Plan &plan, Pool &pool, const xent_problem &problem) { Call(plan, pool, problem).backward(); }
void run_loss_and_grad(const Plan &plan, Pool &pool, const xent_problem &problem) {
  Call(plan, pool, problem).loss_and_grad();
}
void run_partial(const Plan &plan, Pool &pool, const xent_problem &problem) { Call(plan, pool, problem).partial(); }
void run_combine(const Plan &plan, Pool &pool, const xent_problem &problem) { Call(plan, pool, problem).combine(); }

}  // namespace xent::cpu
