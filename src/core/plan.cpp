// SPDX-FileCopyrightText: the libxent authors
// SPDX-License-Identifier: Apache-2.0

#include "core/plan.hpp"

#include <cstdio>

#include "common/error.hpp"
#include "core/describe.hpp"
#include "core/options.hpp"
#include "core/plugin_loader.hpp"
#include "core/split.hpp"
#include "core/structs.hpp"

namespace xent {
namespace {

constexpr char kFunction[] = "xent_plan_create";

// Loads the CUDA backend when a plan first asks for a CUDA device.
xent_status load_on_demand(xent_context *ctx, const xent_options &options, xent_error *err) {
  const int32_t type = options.device.device_type;
  if (type != kDLCUDA || ctx->serves(type)) return XENT_OK;
  const std::lock_guard<std::recursive_mutex> lock(ctx->load_mutex());
  if (ctx->serves(type)) return XENT_OK;
  const std::string prefix = std::string(kFunction) + ": device: no backend for " + describe(options.device).text;
  PluginError reason;
  if (load_backend(ctx, prefix.c_str(), "cuda", &reason.error) == XENT_OK) return XENT_OK;
  return fail_native(err, XENT_UNSUPPORTED, reason.error.native_code, "%s", reason.message());
}

// The backend of the highest preference; among equals the first loaded.
xent_status choose_backend(const xent_context *ctx, const xent_options &options, const Backend **out, xent_error *err) {
  std::string reasons;
  int32_t best = 0;
  *out = nullptr;
  for (const Backend *backend : ctx->backends()) {
    const xent_backend_api &api = backend->api;
    if (api.device_type != static_cast<int32_t>(options.device.device_type)) continue;
    char why[256] = "";
    int32_t preference = 0;
    if (options.ranks > 0 && (api.partial == nullptr || api.combine == nullptr)) {
      std::snprintf(why, sizeof why, "serves no split vocabulary");
    } else {
      preference = api.probe(api.self, &options, why, sizeof why);
    }
    if (preference > best) {
      best = preference;
      *out = backend;
    } else if (preference <= 0) {
      why[sizeof why - 1] = '\0';
      reasons += reasons.empty() ? "" : "; ";
      reasons += std::string(api.name) + ": " + (why[0] == '\0' ? "gives no reason" : why);
    }
  }
  if (*out != nullptr) return XENT_OK;
  if (reasons.empty()) reasons = "none serves this device";
  return fail(err, XENT_UNSUPPORTED, "%s: no backend can run this plan on %s: %s", kFunction,
              describe(options.device).text, reasons.c_str());
}

bool is_power_of_two(size_t value) { return value != 0 && (value & (value - 1)) == 0; }

// Asks the backend for its part of the plan. On success the plan owns references to context and communicator.
xent_status start_plan(xent_context *ctx, xent_comm *comm, xent_plan *plan, xent_error *err) {
  const xent_backend_api &api = plan->backend->api;
  plan->info.struct_size = sizeof plan->info;
  PluginError plugin;
  const xent_status status = api.plan_create(api.self, &plan->options, &plan->state, &plan->info, &plugin.error);
  if (status != XENT_OK) {
    return fail_native(err, status, plugin.error.native_code, "%s: backend %s: %s", kFunction, api.name,
                       plugin.message());
  }
  xent_plan_info &info = plan->info;
  if (info.alignment == 0) info.alignment = 1;
  if (!is_power_of_two(info.alignment)) {
    const size_t alignment = info.alignment;
    api.plan_destroy(api.self, plan->state);
    return fail(err, XENT_PLUGIN_ERROR, "%s: backend %s asks for an alignment of %zu, which is no power of two",
                kFunction, api.name, alignment);
  }
  info.struct_size = sizeof info;
  info.backend_name = api.name;
  info.partial_width = partial_width(plan->options);
  if (plan->options.ranks > 1) info.capabilities &= ~uint32_t{XENT_CAP_ONE_PASS};
  if (comm != nullptr) reserve_gather(plan, *comm);
  ctx->retain();
  plan->context = ctx;
  if (comm != nullptr) comm->retain();
  plan->comm = comm;
  return XENT_OK;
}

}  // namespace

xent_status create_plan(xent_context *ctx, const xent_plan_desc *desc, xent_plan **out, xent_error *err) {
  if (ctx == nullptr) return fail(err, XENT_INVALID_ARGUMENT, "%s: ctx: is NULL", kFunction);
  if (out == nullptr) return fail(err, XENT_INVALID_ARGUMENT, "%s: out: is NULL", kFunction);
  xent_plan_desc copy;
  if (const xent_status status = read_struct(kFunction, "desc", desc, &copy, err)) return status;
  auto plan = std::make_unique<xent_plan>();
  if (const xent_status status = resolve_options(copy, &plan->options, err)) return status;
  if (const xent_status status = check_comm(plan->options, copy.comm, err)) return status;
  if (plan->options.ranks > 0) {
    plan->class_offsets.assign(copy.class_offsets, copy.class_offsets + copy.ranks + 1);
    plan->options.class_offsets = plan->class_offsets.data();
  }
  if (const xent_status status = load_on_demand(ctx, plan->options, err)) return status;
  if (const xent_status status = choose_backend(ctx, plan->options, &plan->backend, err)) return status;
  if (const xent_status status = start_plan(ctx, copy.comm, plan.get(), err)) return status;
  *out = plan.release();
  return XENT_OK;
}

void destroy_plan(xent_plan *plan) noexcept {
  if (plan == nullptr) return;
  const xent_backend_api &api = plan->backend->api;
  try {
    api.plan_destroy(api.self, plan->state);
  } catch (...) {  // a destroy function has nobody to tell
  }
  xent_context *ctx = plan->context;
  xent_comm *comm = plan->comm;
  delete plan;
  if (comm != nullptr) comm->release();
  ctx->release();
}

}  // namespace xent
