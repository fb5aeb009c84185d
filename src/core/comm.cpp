// SPDX-FileCopyrightText: the libxent authors
// SPDX-License-Identifier: Apache-2.0

#include "core/comm.hpp"

#include <exception>

#include "common/error.hpp"
#include "common/unwind.hpp"
#include "core/context.hpp"
#include "core/describe.hpp"
#include "core/options.hpp"

xent_status xent_comm::create(const char *function, xent_context *ctx, const xent_comm_desc &desc, xent_comm **out,
                              xent_error *err) {
  using xent::fail;
  xent_comm_desc copy = desc;
  if (const xent_status status = xent::resolve_device(function, desc.device, &copy.device, err)) return status;
  if (desc.ranks < 1 || desc.ranks > xent::kMaximumRanks) {
    return fail(err, XENT_INVALID_ARGUMENT, "%s: ranks: is %d; it must be in [1, %d]", function, int{desc.ranks},
                int{xent::kMaximumRanks});
  }
  if (desc.rank < 0 || desc.rank >= desc.ranks) {
    return fail(err, XENT_INVALID_ARGUMENT, "%s: rank: is %d; it must be in [0, ranks = %d)", function, int{desc.rank},
                int{desc.ranks});
  }
  if (desc.all_gather == nullptr) return fail(err, XENT_INVALID_ARGUMENT, "%s: all_gather: is NULL", function);
  if ((desc.flags & ~unsigned{XENT_COMM_GRAPH_CAPTURE}) != 0) {
    return fail(err, XENT_INVALID_ARGUMENT, "%s: flags: bits 0x%x are unknown to this library", function,
                desc.flags & ~unsigned{XENT_COMM_GRAPH_CAPTURE});
  }
  if (desc.reserved != 0) {
    return fail(err, XENT_INVALID_ARGUMENT, "%s: reserved: is 0x%x; it must be 0", function, unsigned{desc.reserved});
  }
  *out = new xent_comm(ctx, copy);
  ctx->retain();
  return XENT_OK;
}

void xent_comm::release() noexcept {
  if (references_.fetch_sub(1, std::memory_order_acq_rel) != 1) return;
  try {
    if (desc_.release != nullptr) desc_.release(desc_.user);
  } catch (...) {  // a destroy function has nobody to tell
  }
  xent_context *ctx = context_;
  delete this;
  ctx->release();
}

void xent_comm::spend(const char *what, const std::string &reason, int32_t native_code) {
  const std::lock_guard<std::mutex> lock(mutex_);
  if (failed_.load(std::memory_order_relaxed)) return;
  reason_ = what + (": " + reason);
  native_code_ = native_code;
  failed_.store(true, std::memory_order_release);
}

// Whatever way a callback fails, the communicator is spent.
template <class Body>
XENT_CATCHES_THREAD_ENDS xent_status xent_comm::guarded(const char *function, const char *what, xent_error *err,
                                                        const Body &body) {
  xent::PluginError given;
  std::string reason;
  try {
    const xent_status status = body(&given.error);
    if (status == XENT_OK) return XENT_OK;
    reason = std::string(given.message()) + " (" + xent_status_name(status) + ")";
  } catch (const std::exception &thrown) {
    reason = std::string("an exception: ") + thrown.what();
  } catch (xent::ThreadEnds &) {
    spend(what, "its thread ended", 0);
    throw;
  } catch (...) {
    reason = "an exception";
  }
  spend(what, reason, given.error.native_code);
  context_->log(XENT_LOG_ERROR, "libxent: communicator of rank %d of %d: %s: %s", int{desc_.rank}, int{desc_.ranks},
                what, reason.c_str());
  return spent(function, err);
}

xent_status xent_comm::spent(const char *function, xent_error *err) {
  const std::lock_guard<std::mutex> lock(mutex_);
  return xent::fail_native(err, XENT_COMM_ERROR, native_code_,
                           "%s: comm: rank %d of %d: it failed and needs to be made anew, like its plans: %s", function,
                           int{desc_.rank}, int{desc_.ranks}, reason_.c_str());
}

xent_status xent_comm::check(const char *function, xent_error *err) {
  if (failed_.load(std::memory_order_acquire)) return spent(function, err);
  if (desc_.async_error == nullptr) return XENT_OK;
  return guarded(function, "async_error", err, [&](xent_error *given) { return desc_.async_error(desc_.user, given); });
}

xent_status xent_comm::all_gather(const char *function, const void *send, void *recv, size_t bytes, void *stream,
                                  xent_error *err) {
  return guarded(function, "all_gather", err,
                 [&](xent_error *given) { return desc_.all_gather(desc_.user, send, recv, bytes, stream, given); });
}
