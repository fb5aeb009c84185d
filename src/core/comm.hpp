// SPDX-FileCopyrightText: the libxent authors
// SPDX-License-Identifier: Apache-2.0

// A communicator: the caller's callbacks, and what is known of their failure.
#pragma once

#include <xent/xent.h>

#include <atomic>
#include <mutex>
#include <string>

struct xent_comm {
 public:
  // Checks `desc` (already read). On success the communicator owns desc.user. `function` heads messages.
  static xent_status create(const char *function, xent_context *ctx, const xent_comm_desc &desc, xent_comm **out,
                            xent_error *err);
  void retain() { references_.fetch_add(1, std::memory_order_relaxed); }
  void release() noexcept;

  DLDevice device() const { return desc_.device; }
  int32_t rank() const { return desc_.rank; }
  int32_t ranks() const { return desc_.ranks; }
  bool capturable() const { return (desc_.flags & unsigned{XENT_COMM_GRAPH_CAPTURE}) != 0; }

  // Failed before, or since the last call?
  xent_status check(const char *function, xent_error *err);
  xent_status all_gather(const char *function, const void *send, void *recv, size_t bytes, void *stream,
                         xent_error *err);

 private:
  xent_comm(xent_context *ctx, const xent_comm_desc &desc) : context_(ctx), desc_(desc) {}
  ~xent_comm() = default;
  template <class Body>
  xent_status guarded(const char *function, const char *what, xent_error *err, const Body &body);
  void spend(const char *what, const std::string &reason, int32_t native_code);
  xent_status spent(const char *function, xent_error *err);

  std::atomic<int64_t> references_{1};
  xent_context *context_;  // one reference is held
  xent_comm_desc desc_;
  std::atomic<bool> failed_{false};
  std::mutex mutex_;  // guards the two below
  std::string reason_;
  int32_t native_code_ = 0;
};

namespace xent {

// xent_comm_from_nccl.
xent_status comm_from_nccl(const char *function, xent_context *ctx, void *nccl_comm, void *library, xent_comm **out,
                           xent_error *err);

}  // namespace xent
