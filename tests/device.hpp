// SPDX-FileCopyrightText: the libxent authors
// SPDX-License-Identifier: Apache-2.0

// Where the tensors of a test live: the host, or GPU 0 through the driver that is found at run time, so that one test
// binary serves machines with and without a GPU.
#pragma once

#include <dlpack/dlpack.h>
#include <xent/xent.h>

#include <cstddef>
#include <functional>
#include <ostream>
#include <string>

namespace xent_test {

class Device {
 public:
  virtual ~Device() = default;
  virtual DLDevice dl() const = 0;
  virtual void *allocate(size_t bytes) = 0;
  virtual void release(void *p) = 0;
  virtual void copy_in(void *to, const void *from, size_t bytes) = 0;  // waits for earlier work first
  virtual void copy_out(void *to, const void *from, size_t bytes) = 0;
  virtual void synchronize() = 0;
  virtual void bind_thread() {}  // before a new thread's first use
  virtual void *make_stream() { return nullptr; }
  virtual void destroy_stream(void *) {}
  virtual size_t free_bytes() = 0;

  // A recorded sequence of launches; null where the device has none.
  virtual void *capture(void *stream, const std::function<void()> &enqueue) = 0;
  virtual void replay(void *graph, void *stream) = 0;
  virtual void destroy_graph(void *graph) = 0;
};

enum class Backend { kCpu, kCuda };
inline const char *name_of(Backend b) { return b == Backend::kCpu ? "cpu" : "cuda"; }
inline void PrintTo(Backend b, std::ostream *os) { *os << name_of(b); }

// Null where the backend cannot run here; `why` says what is missing.
Device *device_for(Backend backend, std::string *why);

// A context with `threads` CPU threads (0: all), made once and kept.
xent_context *context_with(int32_t threads);

}  // namespace xent_test
