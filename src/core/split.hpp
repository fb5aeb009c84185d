// SPDX-FileCopyrightText: the libxent authors
// SPDX-License-Identifier: Apache-2.0

// Calls of a plan whose communicator joins the ranks of a split vocabulary.
#pragma once

#include "core/call.hpp"
#include "core/comm.hpp"
#include "core/plan.hpp"

namespace xent {

// Does the communicator, which may be absent, fit the plan?
xent_status check_comm(const xent_options &options, const xent_comm *comm, xent_error *err);
// Adds what the communicator needs to the backend's workspace sizes, and takes what it cannot from the capabilities.
void reserve_gather(xent_plan *plan, const xent_comm &comm);

// Partial, all-gather and combine; then backward too. The problem has been read.
xent_status forward_over_ranks(Call &call, xent_error *err);
xent_status loss_and_grad_over_ranks(Call &call, xent_error *err);

}  // namespace xent
