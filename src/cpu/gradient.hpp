// SPDX-FileCopyrightText: the libxent authors
// SPDX-License-Identifier: Apache-2.0

// The gradient of a piece of a row, be it all of it or a slice: what a call has in options and a row in scalars becomes
// the coefficients of the kernels. Apart from the driver, so that it is the same whoever deals the pieces out.
#pragma once

#include "cpu/loss.hpp"
#include "cpu/plan.hpp"
#include "cpu/rows.hpp"

namespace xent::cpu {

class Gradient {
 public:
  Gradient(const Plan &plan, const xent_problem &problem);

  void divide(const Divisor &by) { divisor_ = by; }
  bool streams() const { return stream_; }  // whoever has written pieces ends them by stream_fence()

  // Of the columns of `span`, on any thread. `last`: the row ends with them, so the columns that pad it are zeroed too.
  void write(int64_t row, const Stats &stats, const Span &span, bool last, bool backwards) const {
    GradRow grad;
    if (!coefficients(row, stats, span.begin, span.end, &grad)) {
      return zero(row, span.begin, last ? options_.vocab : span.end);
    }
    if (span.begin != span.end) {  // but for an empty shard
      const xent_view &to = problem_.grad_logits;
      kernel_(math_, grad, span, {const_cast<void *>(row_address(to, row)), to.col_stride, stream_, backwards});
    }
    if (last) zero(row, options_.columns, options_.vocab);
  }

 private:
  bool coefficients(int64_t row, const Stats &stats, int64_t begin, int64_t end, GradRow *out) const;
  void zero(int64_t row, int64_t begin, int64_t end) const;

  const Plan &plan_;
  const RowMath &math_;
  const xent_options &options_;
  const xent_problem &problem_;
  GradKernel kernel_ = nullptr;
  bool stream_ = false;
  Divisor divisor_;
};

}  // namespace xent::cpu
