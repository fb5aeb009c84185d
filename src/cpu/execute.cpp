// SPDX-FileCopyrightText: the libxent authors
// SPDX-License-Identifier: Apache-2.0

// The rows' driver: forward, backward and both together, and the two halves of a forward over ranks, over a pool of
// threads. What becomes of a row's sums is Loss's to say, what a gradient is, Gradient's.
//
// Rows go to threads in contiguous pieces. Where there are few, the slices of rows do, and a row's partials meet in the
// workspace. Neither changes any result: a row is always the merge of its slices in order, and sums over rows are taken
// at the end by one thread.
//
// In loss_and_grad what a row keeps from its sums to its gradient lies in the workspace: for each thread, or for each
// of the rows that all threads share. The fewer bytes that is, the sooner a cache gives them back.

#include <algorithm>
#include <atomic>
#include <utility>

#include "cpu/gradient.hpp"
#include "cpu/loss.hpp"
#include "cpu/plan.hpp"
#include "cpu/ranks.hpp"
#include "cpu/rows.hpp"

namespace xent::cpu {
namespace {

constexpr int64_t kSmallBytes = int64_t{64} << 10;  // less than this is not worth a second thread

// Rows dealt out in pieces that get smaller, at least `least` rows each: large ones, so that a thread goes on from one
// row to the next, and small ones in the end, so that the threads finish together.
class Pieces {
 public:
  Pieces(int64_t rows, int64_t least, int threads) : rows_(rows), least_(least), threads_(threads) {}

  int64_t count() const {
    int64_t n = 0;
    for (int64_t left = rows_; left > 0; left -= threads_ * size(left)) n += threads_;
    return n;
  }
  // The rows [first, second) of piece `i`; the last ones may be empty.
  std::pair<int64_t, int64_t> operator[](int64_t i) const {
    int64_t left = rows_;
    for (; i >= threads_; i -= threads_) left -= threads_ * size(left);
    const int64_t begin = rows_ - left + i * size(left);
    return {begin, std::min(rows_, begin + size(left))};
  }

 private:
  // Of a piece where so many rows are left: `threads` pieces have one size.
  int64_t size(int64_t left) const { return threads_ == 1 ? rows_ : std::max(least_, left / (4 * threads_)); }

  int64_t rows_, least_, threads_;
};

class Call {
 public:
  Call(const Plan &plan, Pool &pool, const xent_problem &problem)
      : plan_(plan), math_(plan.math), pool_(pool), problem_(problem), loss_(plan, problem), gradient_(plan, problem) {
    if (problem.workspace != nullptr) {
      partials_ = reinterpret_cast<Partial *>(static_cast<char *>(problem.workspace) + plan.losses_bytes);
    }
    const int64_t element = static_cast<int64_t>(element_size(plan.options->logits_dtype));
    row_bytes_ = std::max<int64_t>(1, plan.options->columns * element);
    threads_ = row_bytes_ * problem.rows < kSmallBytes ? 1 : pool.threads();
    split_ = threads_ > 1 && plan.slices > 1 && problem.rows < int64_t{4} * threads_;
  }

  void forward() {
    loss_.begin();
    for_totals([&](int64_t row, const Row &what, const Partial *total) { loss_.row(row, what, total); });
    loss_.end();
  }

  void partial() {
    for_totals([&](int64_t row, const Row &what, const Partial *total) {
      if (total == nullptr) return store_ignored(plan_, problem_.partial, row);
      store_partial(plan_, problem_.partial, row, *total, loss_.target_value(row, what));
    });
  }

  void combine() {
    loss_.begin();
    for_rows([&](int64_t row, const void *, int64_t) {
      const Row what = read_target(problem_, row);
      if (what.kind == RowKind::kIgnored) {
        loss_.ignored(row);
        return;
      }
      const Gathered all = load_partials(plan_, problem_.partial, problem_.rows, row, what.target);
      loss_.counted(row, what, all.total, all.target_value);
    });
    loss_.end();
  }

  void backward() {
    if (present(problem_.divisor)) gradient_.divide({true, read_number(problem_.divisor, 0)});
    if (split_) {
      for_slices(0, problem_.rows, [&](int64_t row, int64_t slice) {
        gradient_.write(row, read_stats(problem_, row), columns(row, slice), slice == plan_.slices - 1, false);
      });
    } else {
      for_rows([&](int64_t row, const void *next, int64_t) {
        grad_row(row, read_stats(problem_, row), next, false, nullptr);
      });
    }
  }

  void loss_and_grad() {
    gradient_.divide(loss_.begin());
    if (split_) {
      // As few rows at once as occupy the threads: their logits are still in a cache when the gradient reads them.
      const int64_t rows = std::max<int64_t>(1, int64_t{2} * threads_ / plan_.slices);
      for_row_groups(std::min(rows, plan_.partials / plan_.slices), [&](int64_t first, int64_t count) {
        const auto kept = [&](int64_t row) { return kept_of(row - first); };
        split_totals(
            first, count,
            [&](int64_t row, const Row &what, Partial *total) {
              loss_.row(row, what, total);
              if (total == nullptr) partials_[(row - first) * plan_.slices] = {};
            },
            kept);
        for_slices(first, count, [&](int64_t row, int64_t slice) {
          const Kept terms = kept(row);
          Span span = columns(row, slice);
          span.kept = if_any(terms);
          const Stats stats = loss_.stats_of(partials_[(row - first) * plan_.slices]);
          gradient_.write(row, stats, span, slice == plan_.slices - 1, false);
        });
      });
    } else {
      for_rows([&](int64_t row, const void *next, int64_t hand) {
        Partial total;
        const Row what = read_target(problem_, row);
        const bool counts = what.kind != RowKind::kIgnored;
        const Kept terms = kept_of(hand);
        if (counts) total = total_of(row, nullptr, if_any(terms));
        grad_row(row, loss_.row(row, what, counts ? &total : nullptr), next, true, if_any(terms));
      });
    }
    loss_.end();
  }

 private:
  // ---- Dealing out the work

  // Body(row, the logits that the thread reads after the row's, or NULL, the hand) for every row. A hand does one row
  // at a time; they count from 0, and there are no more than threads or rows.
  template <class Body>
  void for_rows(const Body &body) {
    const Pieces pieces(problem_.rows, (kSmallBytes + row_bytes_ - 1) / row_bytes_, threads_);
    const int64_t count = pieces.count();
    std::atomic<int64_t> taken{0};
    pool_.run(std::min<int64_t>(threads_, problem_.rows), [&](int64_t hand) {
      for (int64_t i; (i = taken.fetch_add(1, std::memory_order_relaxed)) < count;) {
        const auto [begin, end] = pieces[i];
        for (int64_t row = begin; row < end; ++row) {
          const bool read = row + 1 < end && read_target(problem_, row + 1).kind == RowKind::kCounted;
          body(row, read ? row_address(problem_.logits, row + 1) : nullptr, hand);
        }
        if (gradient_.streams()) stream_fence();
      }
    });
  }

  template <class Body>
  void for_slices(int64_t first, int64_t rows, const Body &body) {
    pool_.run(rows * plan_.slices, [&](int64_t i) {
      body(first + i / plan_.slices, i % plan_.slices);
      if (gradient_.streams()) stream_fence();
    });
  }

  template <class Body>
  void for_row_groups(int64_t size, const Body &body) {
    for (int64_t row = 0; row < problem_.rows; row += size) body(row, std::min(size, problem_.rows - row));
  }

  Span columns(int64_t row, int64_t slice) const {
    const int64_t begin = slice * plan_.slice;
    return {row_address(problem_.logits, row), problem_.logits.col_stride, begin,
            std::min(plan_.options->columns, begin + plan_.slice)};
  }

  // Where the `place`th of the rows that are done at once keeps its exponentials.
  Kept kept_of(int64_t place) const {
    if (plan_.kept_rows == 0) return {};
    char *const to = static_cast<char *>(problem_.workspace) + forward_workspace(plan_) +
                     static_cast<size_t>(place) * (plan_.maxima_bytes + plan_.terms_bytes);
    return {reinterpret_cast<double *>(to), to + plan_.maxima_bytes, plan_.kept_begin};
  }
  static const Kept *if_any(const Kept &kept) { return kept.maxima == nullptr ? nullptr : &kept; }

  // ---- The sums of rows

  Partial total_of(int64_t row, const void *next, const Kept *kept) const {
    if (plan_.slices == 0) return empty_partial(plan_);
    const int64_t element = static_cast<int64_t>(element_size(plan_.options->logits_dtype));
    PartialTree tree(math_);
    for (int64_t slice = 0; slice < plan_.slices; ++slice) {
      Partial part;
      Span span = columns(row, slice);
      span.kept = kept;
      span.next = slice + 1 < plan_.slices ? static_cast<const char *>(span.row) + span.end * element : next;
      plan_.forward(math_, span, &part);
      tree.push(part);
    }
    return tree.total();
  }

  // Body(row, what, its partial, or NULL where the row is ignored) for every row.
  template <class Body>
  void for_totals(const Body &body) {
    if (split_) {
      return for_row_groups(plan_.partials / plan_.slices, [&](int64_t first, int64_t rows) {
        split_totals(first, rows, body, [](int64_t) { return Kept{}; });
      });
    }
    for_rows([&](int64_t row, const void *next, int64_t) {
      const Row what = read_target(problem_, row);
      if (what.kind == RowKind::kIgnored) return body(row, what, nullptr);
      Partial total = total_of(row, next, nullptr);
      body(row, what, &total);
    });
  }

  // The same for a few rows, whose partials are left in the place of their first slice's. kept(row): its Kept.
  template <class Body, class KeptOf>
  void split_totals(int64_t first, int64_t rows, const Body &body, const KeptOf &kept) {
    for_slices(first, rows, [&](int64_t row, int64_t slice) {
      if (read_target(problem_, row).kind == RowKind::kIgnored) return;
      const Kept terms = kept(row);
      Span span = columns(row, slice);
      span.kept = if_any(terms);
      plan_.forward(math_, span, &partials_[(row - first) * plan_.slices + slice]);
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

  // ---- Gradients

  void grad_row(int64_t row, const Stats &stats, const void *next, bool backwards, const Kept *kept) const {
    const Span all = {
        row_address(problem_.logits, row), problem_.logits.col_stride, 0, plan_.options->columns, next, kept};
    gradient_.write(row, stats, all, true, backwards);
  }

  const Plan &plan_;
  const RowMath &math_;
  Pool &pool_;
  const xent_problem &problem_;
  Loss loss_;
  Gradient gradient_;
  Partial *partials_ = nullptr;
  int64_t row_bytes_;
  int threads_;
  bool split_;
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
