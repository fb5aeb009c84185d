// SPDX-FileCopyrightText: the libxent authors
// SPDX-License-Identifier: Apache-2.0

// The calls of a plan.
#pragma once

#include "core/plan.hpp"

namespace xent {

xent_status forward(const xent_plan *plan, const xent_forward_args *args, xent_error *err);
xent_status backward(const xent_plan *plan, const xent_backward_args *args, xent_error *err);
xent_status loss_and_grad(const xent_plan *plan, const xent_loss_and_grad_args *args, xent_error *err);
xent_status scale_grad(const xent_plan *plan, const xent_scale_grad_args *args, xent_error *err);
xent_status forward_partial(const xent_plan *plan, const xent_partial_args *args, xent_error *err);
xent_status forward_combine(const xent_plan *plan, const xent_combine_args *args, xent_error *err);

}  // namespace xent
