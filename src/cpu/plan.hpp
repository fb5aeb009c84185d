// SPDX-FileCopyrightText: the libxent authors
// SPDX-License-Identifier: Apache-2.0

#pragma once

#include <xent/xent_plugin.h>

#include "cpu/kernels.hpp"
#include "cpu/pool.hpp"

namespace xent::cpu {

struct Plan {
  const xent_options *options;
  RowMath math;
  ForwardKernel forward;
  GradKernel grad;      // into the logits' type
  GradKernel grad_f32;  // into float32
  SquashKernel squash;
  int64_t slice;        // columns
  int64_t slices;       // of a row
  int64_t streamed;     // a gradient of more bytes is stored past the caches
  size_t losses_bytes;  // workspace: a double a row, none where nothing is reduced ...
  int64_t partials;     // ... then so many Partials ...
  int64_t kept_rows;    // ... and loss_and_grad's: what Kept is of for so many rows, 0: not at all
  int64_t kept_begin;   // Kept::begin
  size_t maxima_bytes;  // of Kept, of a row ...
  size_t terms_bytes;   // ... after those
  bool acc_is_double;
};

inline constexpr size_t kWorkspaceAlignment = alignof(Partial);

// Bytes of forward's workspace. In loss_and_grad's the kept rows follow.
inline size_t forward_workspace(const Plan &plan) {
  return plan.losses_bytes + static_cast<size_t>(plan.partials) * sizeof(Partial);
}

Plan make_plan(const xent_options &options, int threads);
// Of the largest cache, in bytes.
int64_t cache_bytes();

void run_forward(const Plan &plan, Pool &pool, const xent_problem &problem);
void run_backward(const Plan &plan, Pool &pool, const xent_problem &problem);
void run_loss_and_grad(const Plan &plan, Pool &pool, const xent_problem &problem);
void run_scale_grad(const Plan &plan, Pool &pool, const xent_problem &problem);
void run_partial(const Plan &plan, Pool &pool, const xent_problem &problem);
void run_combine(const Plan &plan, Pool &pool, const xent_problem &problem);

}  // namespace xent::cpu
