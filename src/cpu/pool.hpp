// SPDX-FileCopyrightText: the libxent authors
// SPDX-License-Identifier: Apache-2.0

// The threads of a context. run() deals task numbers to the calling thread and to the workers and returns when all are
// done. Callers do not wait for each other: while one has the workers, the others work alone. A task must not throw.
// After fork() the child gets workers of its own when it first needs them.
#pragma once

#include <atomic>
#include <cstdint>
#include <mutex>

namespace xent::cpu {

class Pool {
 public:
  explicit Pool(int threads);  // the caller of run() included; 0: the processors that this process may use
  ~Pool();
  Pool(const Pool &) = delete;
  Pool &operator=(const Pool &) = delete;

  int threads() const { return threads_; }
  void start();  // starts the workers ahead of the first run(), so that it allocates nothing

  template <class Task>
  void run(int64_t count, Task &&task) {
    if (threads_ == 1 || count <= 1) {
      for (int64_t i = 0; i < count; ++i) task(i);
      return;
    }
    run_shared(
        count, [](void *context, int64_t i) { (*static_cast<std::remove_reference_t<Task> *>(context))(i); }, &task);
  }

 private:
  struct Crew;
  using Function = void (*)(void *context, int64_t i);
  void run_shared(int64_t count, Function function, void *context);
  Crew *crew();

  const int threads_;
  std::atomic<Crew *> crew_{nullptr};
};

}  // namespace xent::cpu
