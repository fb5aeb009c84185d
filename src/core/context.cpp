// SPDX-FileCopyrightText: the libxent authors
// SPDX-License-Identifier: Apache-2.0

#include "core/context.hpp"

#include <cstdarg>
#include <cstdio>
#include <cstring>

#include "common/error.hpp"

extern "C" xent_status xent_cpu_plugin_entry_v1(const xent_host_api *host, xent_backend_api *out, xent_error *err);

namespace {

using xent::fail;

constexpr size_t kMaximumName = 64;

// More than any machine has processors; a larger number is an uninitialised one, not to be followed.
constexpr int32_t kMaximumThreads = 4096;

// All that a backend of the first minor version fills.
constexpr size_t kMinimumTable = offsetof(xent_backend_api, release) + sizeof(xent_backend_api::release);

}  // namespace

xent_context::xent_context(const xent_context_desc &desc) : desc_(desc) {
  host_.struct_size = sizeof host_;
  host_.abi_minor = XENT_PLUGIN_ABI_MINOR;
  host_.threads = desc.threads;
  host_.host = this;
  host_.log = host_log;
}

xent_context::~xent_context() {
  for (auto it = backends_.rbegin(); it != backends_.rend(); ++it) {
    const xent_backend_api &api = (*it)->api;
    try {
      if (api.release != nullptr) api.release(api.self);
    } catch (...) {  // a destroy function has nobody to tell
    }
  }
}

xent_status xent_context::create(const xent_context_desc &desc, xent_context **out, xent_error *err) {
  constexpr char function[] = "xent_context_create";
  if (desc.flags != 0) {
    return fail(err, XENT_INVALID_ARGUMENT, "%s: flags: 0x%x must be 0", function, unsigned{desc.flags});
  }
  if (desc.threads < 0 || desc.threads > kMaximumThreads) {
    return fail(err, XENT_INVALID_ARGUMENT, "%s: threads: is %d; it must be in [0, %d]", function, int{desc.threads},
                int{kMaximumThreads});
  }
  struct Release {
    void operator()(xent_context *ctx) const { ctx->release(); }
  };
  std::unique_ptr<xent_context, Release> ctx(new xent_context(desc));
  if (const xent_status status = ctx->add_backend(function, xent_cpu_plugin_entry_v1, "built in", err)) return status;
  *out = ctx.release();
  return XENT_OK;
}

void xent_context::release() {
  if (references_.fetch_sub(1, std::memory_order_acq_rel) == 1) delete this;
}

void xent_context::log(int32_t level, const char *format, ...) const noexcept {
  if (desc_.log == nullptr) return;
  char message[1024];
  va_list args;
  va_start(args, format);
  std::vsnprintf(message, sizeof message, format, args);
  va_end(args);
  try {
    desc_.log(desc_.log_user, level, message);
  } catch (...) {  // the caller's sink; a lost message must not fail the call
  }
}

void xent_context::host_log(void *host, int32_t level, const char *message) {
  if (host != nullptr && message != nullptr) static_cast<const xent_context *>(host)->log(level, "%s", message);
}

std::vector<const xent::Backend *> xent_context::backends() const {
  const std::lock_guard<std::mutex> lock(mutex_);
  std::vector<const xent::Backend *> out;
  out.reserve(backends_.size());
  for (const auto &backend : backends_) out.push_back(backend.get());
  return out;
}

const xent::Backend *xent_context::backend(size_t index) const {
  const std::lock_guard<std::mutex> lock(mutex_);
  return index < backends_.size() ? backends_[index].get() : nullptr;
}

size_t xent_context::backend_count() const {
  const std::lock_guard<std::mutex> lock(mutex_);
  return backends_.size();
}

bool xent_context::serves(int32_t device_type) const {
  const std::lock_guard<std::mutex> lock(mutex_);
  for (const auto &backend : backends_) {
    if (backend->api.device_type == device_type) return true;
  }
  return false;
}

xent_status xent_context::check_table(const char *function, const xent_backend_api &api, const char *origin,
                                      xent_error *err) const {
  if (api.struct_size < kMinimumTable || api.struct_size > sizeof api) {
    return fail(err, XENT_PLUGIN_ERROR, "%s: %s: its table has struct_size %zu; this host takes %zu to %zu", function,
                origin, api.struct_size, kMinimumTable, sizeof api);
  }
  const char *missing = api.name == nullptr            ? "name"
                        : api.version == nullptr       ? "version"
                        : api.probe == nullptr         ? "probe"
                        : api.plan_create == nullptr   ? "plan_create"
                        : api.plan_destroy == nullptr  ? "plan_destroy"
                        : api.forward == nullptr       ? "forward"
                        : api.backward == nullptr      ? "backward"
                        : api.loss_and_grad == nullptr ? "loss_and_grad"
                                                       : nullptr;
  if (missing != nullptr) {
    return fail(err, XENT_PLUGIN_ERROR, "%s: %s: %s of its table is NULL", function, origin, missing);
  }
  const size_t length = strnlen(api.name, kMaximumName + 1);
  if (length == 0 || length > kMaximumName) {
    return fail(err, XENT_PLUGIN_ERROR, "%s: %s: its name has %s characters; 1 to %zu are allowed", function, origin,
                length == 0 ? "no" : "too many", kMaximumName);
  }
  if (api.device_type <= 0) {
    return fail(err, XENT_PLUGIN_ERROR, "%s: %s: backend %s serves device type %d, which is none of DLPack's", function,
                origin, api.name, int{api.device_type});
  }
  return XENT_OK;
}

xent_status xent_context::add_backend(const char *function, xent_plugin_entry_fn entry, const char *origin,
                                      xent_error *err) {
  auto backend = std::make_unique<xent::Backend>();
  backend->origin = origin;
  xent_backend_api &api = backend->api;
  api.struct_size = sizeof api;
  xent::PluginError plugin;
  xent_status status = XENT_INTERNAL;
  try {
    status = entry(&host_, &api, &plugin.error);
  } catch (const std::exception &thrown) {
    return fail(err, XENT_PLUGIN_ERROR, "%s: %s: its entry threw an exception: %s", function, origin, thrown.what());
  } catch (...) {
    return fail(err, XENT_PLUGIN_ERROR, "%s: %s: its entry threw an exception", function, origin);
  }
  if (status != XENT_OK) {
    return xent::fail_native(err, XENT_PLUGIN_ERROR, plugin.error.native_code, "%s: %s: %s (%s)", function, origin,
                             plugin.message(), xent_status_name(status));
  }
  if (const xent_status bad = check_table(function, api, origin, err)) return bad;
  // Fields that a plugin of an older minor version does not know are 0, whatever it wrote there.
  std::memset(reinterpret_cast<unsigned char *>(&api) + api.struct_size, 0, sizeof api - api.struct_size);

  const char *other = nullptr;
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    for (const auto &known : backends_) {
      if (std::strcmp(known->api.name, api.name) == 0) other = known->origin.c_str();
    }
    if (other == nullptr) backends_.push_back(std::move(backend));
  }
  if (other != nullptr) {
    if (api.release != nullptr) api.release(api.self);
    return fail(err, XENT_PLUGIN_ERROR, "%s: %s: a backend named %s is already loaded (%s)", function, origin, api.name,
                other);
  }
  log(XENT_LOG_DEBUG, "libxent: backend %s %s (%s)", api.name, api.version, origin);
  return XENT_OK;
}
