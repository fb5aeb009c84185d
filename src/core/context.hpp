// SPDX-FileCopyrightText: the libxent authors
// SPDX-License-Identifier: Apache-2.0

// A context: its backends, its log sink, and the reference count that plans share.
#pragma once

#include <xent/xent_plugin.h>

#include <atomic>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

namespace xent {

struct Backend {
  xent_backend_api api{};
  std::string origin;  // the file, or "built in"
};

// The error of a call across the plugin interface: a plugin may leave it empty, or fill it and succeed.
struct PluginError {
  xent_error error;

  PluginError() {
    error.struct_size = sizeof error;
    error.status = XENT_OK;
    error.native_code = 0;
    error.message[0] = '\0';
  }
  const char *message() {
    error.message[sizeof error.message - 1] = '\0';
    return error.message[0] == '\0' ? "no message given" : error.message;
  }
};

}  // namespace xent

struct xent_context {
 public:
  static xent_status create(const xent_context_desc &desc, xent_context **out, xent_error *err);
  void retain() { references_.fetch_add(1, std::memory_order_relaxed); }
  void release();

  // Calls a plugin's entry and adds the backend that it fills in. `function` heads messages.
  xent_status add_backend(const char *function, xent_plugin_entry_fn entry, const char *origin, xent_error *err);

  // Backends are only ever added, so a snapshot stays valid as long as the context.
  std::vector<const xent::Backend *> backends() const;
  const xent::Backend *backend(size_t index) const;
  size_t backend_count() const;
  bool serves(int32_t device_type) const;

  void log(int32_t level, const char *format, ...) const noexcept __attribute__((format(printf, 3, 4)));

  // Held while a plugin is looked for and loaded. Recursive: the caller's log function may come back here.
  std::recursive_mutex &load_mutex() { return load_mutex_; }

 private:
  explicit xent_context(const xent_context_desc &desc);
  ~xent_context();
  static void host_log(void *host, int32_t level, const char *message);
  xent_status check_table(const char *function, const xent_backend_api &api, const char *origin, xent_error *err) const;

  std::atomic<int64_t> references_{1};
  xent_context_desc desc_;
  xent_host_api host_{};
  std::recursive_mutex load_mutex_;
  mutable std::mutex mutex_;  // guards backends_
  std::vector<std::unique_ptr<xent::Backend>> backends_;
};
