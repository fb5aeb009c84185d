// SPDX-FileCopyrightText: the libxent authors
// SPDX-License-Identifier: Apache-2.0

// The exported functions. What each does is elsewhere; here nothing may throw. Only the end of a thread, in a callback
// of its own, passes: it goes on through the caller.

#include <xent/xent.h>

#include <exception>
#include <new>

#include "common/error.hpp"
#include "common/unwind.hpp"
#include "core/comm.hpp"
#include "core/context.hpp"
#include "core/execute.hpp"
#include "core/plan.hpp"
#include "core/plugin_loader.hpp"
#include "core/structs.hpp"

#define XENT_STRING_(value) #value
#define XENT_STRING(value) XENT_STRING_(value)

namespace {

template <class Body>
XENT_CATCHES_THREAD_ENDS xent_status guarded(const char *function, xent_error *err, Body &&body) {
  try {
    return body();
  } catch (const std::bad_alloc &) {
    return xent::fail(err, XENT_OUT_OF_MEMORY, "%s: out of host memory", function);
  } catch (const std::exception &thrown) {
    return xent::fail(err, XENT_INTERNAL, "%s: unexpected exception: %s", function, thrown.what());
  } catch (xent::ThreadEnds &) {
    throw;
  } catch (...) {
    return xent::fail(err, XENT_INTERNAL, "%s: unexpected exception", function);
  }
}

}  // namespace

uint32_t xent_abi_version(void) { return XENT_ABI_VERSION; }

const char *xent_version_string(void) {
  return XENT_STRING(XENT_VERSION_MAJOR) "." XENT_STRING(XENT_VERSION_MINOR) "." XENT_STRING(XENT_VERSION_PATCH);
}

const char *xent_status_name(xent_status status) {
  switch (status) {
    case XENT_OK:
      return "XENT_OK";
    case XENT_INVALID_ARGUMENT:
      return "XENT_INVALID_ARGUMENT";
    case XENT_INVALID_STRUCT:
      return "XENT_INVALID_STRUCT";
    case XENT_UNSUPPORTED:
      return "XENT_UNSUPPORTED";
    case XENT_WORKSPACE_TOO_SMALL:
      return "XENT_WORKSPACE_TOO_SMALL";
    case XENT_OUT_OF_MEMORY:
      return "XENT_OUT_OF_MEMORY";
    case XENT_DEVICE_ERROR:
      return "XENT_DEVICE_ERROR";
    case XENT_COMM_ERROR:
      return "XENT_COMM_ERROR";
    case XENT_PLUGIN_ERROR:
      return "XENT_PLUGIN_ERROR";
    case XENT_INTERNAL:
      return "XENT_INTERNAL";
    default:
      return "XENT_UNKNOWN";
  }
}

xent_status xent_context_create(const xent_context_desc *desc, xent_context **out, xent_error *err) {
  constexpr char function[] = "xent_context_create";
  return guarded(function, err, [&] {
    if (out == nullptr) return xent::fail(err, XENT_INVALID_ARGUMENT, "%s: out: is NULL", function);
    xent_context_desc copy{};
    if (desc != nullptr) {
      if (const xent_status status = xent::read_struct(function, "desc", desc, &copy, err)) return status;
    }
    return xent_context::create(copy, out, err);
  });
}

void xent_context_destroy(xent_context *ctx) {
  if (ctx != nullptr) ctx->release();
}

xent_status xent_backend_load(xent_context *ctx, const char *path, xent_error *err) {
  constexpr char function[] = "xent_backend_load";
  return guarded(function, err, [&] {
    if (ctx == nullptr) return xent::fail(err, XENT_INVALID_ARGUMENT, "%s: ctx: is NULL", function);
    return xent::load_backend(ctx, function, path, err);
  });
}

size_t xent_backend_count(const xent_context *ctx) { return ctx == nullptr ? 0 : ctx->backend_count(); }

const char *xent_backend_name(const xent_context *ctx, size_t index) {
  const xent::Backend *backend = ctx == nullptr ? nullptr : ctx->backend(index);
  return backend == nullptr ? nullptr : backend->api.name;
}

xent_status xent_comm_create(xent_context *ctx, const xent_comm_desc *desc, xent_comm **out, xent_error *err) {
  constexpr char function[] = "xent_comm_create";
  return guarded(function, err, [&] {
    if (ctx == nullptr) return xent::fail(err, XENT_INVALID_ARGUMENT, "%s: ctx: is NULL", function);
    if (out == nullptr) return xent::fail(err, XENT_INVALID_ARGUMENT, "%s: out: is NULL", function);
    xent_comm_desc copy{};
    if (const xent_status status = xent::read_struct(function, "desc", desc, &copy, err)) return status;
    return xent_comm::create(function, ctx, copy, out, err);
  });
}

xent_status xent_comm_from_nccl(xent_context *ctx, void *nccl_comm, void *nccl_library, xent_comm **out,
                                xent_error *err) {
  constexpr char function[] = "xent_comm_from_nccl";
  return guarded(function, err, [&] {
    if (ctx == nullptr) return xent::fail(err, XENT_INVALID_ARGUMENT, "%s: ctx: is NULL", function);
    if (nccl_comm == nullptr) return xent::fail(err, XENT_INVALID_ARGUMENT, "%s: nccl_comm: is NULL", function);
    if (out == nullptr) return xent::fail(err, XENT_INVALID_ARGUMENT, "%s: out: is NULL", function);
    return xent::comm_from_nccl(function, ctx, nccl_comm, nccl_library, out, err);
  });
}

void xent_comm_destroy(xent_comm *comm) {
  if (comm != nullptr) comm->release();
}

xent_status xent_plan_create(xent_context *ctx, const xent_plan_desc *desc, xent_plan **out, xent_error *err) {
  return guarded("xent_plan_create", err, [&] { return xent::create_plan(ctx, desc, out, err); });
}

void xent_plan_destroy(xent_plan *plan) { xent::destroy_plan(plan); }

xent_status xent_plan_get_info(const xent_plan *plan, xent_plan_info *info, xent_error *err) {
  constexpr char function[] = "xent_plan_get_info";
  return guarded(function, err, [&] {
    if (plan == nullptr) return xent::fail(err, XENT_INVALID_ARGUMENT, "%s: plan: is NULL", function);
    return xent::write_struct(function, "info", plan->info, info, err);
  });
}

xent_status xent_forward(const xent_plan *plan, const xent_forward_args *args, xent_error *err) {
  return guarded("xent_forward", err, [&] { return xent::forward(plan, args, err); });
}

xent_status xent_backward(const xent_plan *plan, const xent_backward_args *args, xent_error *err) {
  return guarded("xent_backward", err, [&] { return xent::backward(plan, args, err); });
}

xent_status xent_loss_and_grad(const xent_plan *plan, const xent_loss_and_grad_args *args, xent_error *err) {
  return guarded("xent_loss_and_grad", err, [&] { return xent::loss_and_grad(plan, args, err); });
}

xent_status xent_scale_grad(const xent_plan *plan, const xent_scale_grad_args *args, xent_error *err) {
  return guarded("xent_scale_grad", err, [&] { return xent::scale_grad(plan, args, err); });
}

xent_status xent_forward_partial(const xent_plan *plan, const xent_partial_args *args, xent_error *err) {
  return guarded("xent_forward_partial", err, [&] { return xent::forward_partial(plan, args, err); });
}

xent_status xent_forward_combine(const xent_plan *plan, const xent_combine_args *args, xent_error *err) {
  return guarded("xent_forward_combine", err, [&] { return xent::forward_combine(plan, args, err); });
}
