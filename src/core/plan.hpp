// SPDX-FileCopyrightText: the libxent authors
// SPDX-License-Identifier: Apache-2.0

// A plan: resolved options, the backend chosen for them and that backend's own state.
#pragma once

#include "core/context.hpp"

struct xent_plan {
  xent_context *context = nullptr;  // one reference is held
  const xent::Backend *backend = nullptr;
  void *state = nullptr;  // the backend's
  xent_options options{};
  xent_plan_info info{};
};

namespace xent {

xent_status create_plan(xent_context *ctx, const xent_plan_desc *desc, xent_plan **out, xent_error *err);
void destroy_plan(xent_plan *plan) noexcept;

}  // namespace xent
