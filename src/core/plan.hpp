// SPDX-FileCopyrightText: the libxent authors
// SPDX-License-Identifier: Apache-2.0

// A plan: resolved options, the backend chosen for them and that backend's own state.
#pragma once

#include <vector>

#include "core/comm.hpp"
#include "core/context.hpp"

namespace xent {

// What a communicator needs of the workspace, before the backend's part of it: offsets and totals in bytes.
struct GatherSpace {
  size_t send = 0, recv = 0, forward_bytes = 0;            // forward has the first two
  size_t stats = 0, divisor = 0, loss_and_grad_bytes = 0;  // loss_and_grad all four
};

}  // namespace xent

struct xent_plan {
  xent_context *context = nullptr;  // one reference is held
  xent_comm *comm = nullptr;        // one reference is held
  const xent::Backend *backend = nullptr;
  void *state = nullptr;  // the backend's
  xent_options options{};
  std::vector<int64_t> class_offsets;  // options.class_offsets
  xent::GatherSpace gather{};
  xent_plan_info info{};
};

namespace xent {

xent_status create_plan(xent_context *ctx, const xent_plan_desc *desc, xent_plan **out, xent_error *err);
void destroy_plan(xent_plan *plan) noexcept;

}  // namespace xent
