// SPDX-FileCopyrightText: the libxent authors
// SPDX-License-Identifier: Apache-2.0

#include "cpu/pool.hpp"

#include <pthread.h>
#include <sched.h>
#include <signal.h>

#include <cfenv>
#include <condition_variable>
#include <memory>
#include <new>
#include <thread>
#include <vector>

namespace xent::cpu {
namespace {

std::atomic<uint64_t> forks{0};

void watch_forks() {
  // Unregistered by the C library when this object is unloaded.
  static const int once = pthread_atfork(nullptr, nullptr, [] { forks.fetch_add(1, std::memory_order_relaxed); });
  (void)once;
}

int usable_processors() {
  cpu_set_t set;
  if (sched_getaffinity(0, sizeof set, &set) == 0) return CPU_COUNT(&set);
  // More processors than cpu_set_t holds.
  const unsigned n = std::thread::hardware_concurrency();
  return n > 0 ? static_cast<int>(n) : 1;
}

}  // namespace

struct Pool::Crew {
  const uint64_t born = forks.load(std::memory_order_relaxed);
  std::atomic<bool> taken{false};

  std::mutex mutex;
  std::condition_variable work, idle;
  uint64_t jobs = 0;
  int active = 0;  // workers inside the job
  bool stop = false;
  Function function = nullptr;  // nullptr: no job, or one that needs no more hands
  void *context = nullptr;
  int64_t count = 0;
  std::atomic<int64_t> next{0};

  std::vector<std::thread> workers;

  explicit Crew(int hands) {
    workers.reserve(static_cast<size_t>(hands));
    // Signals are the application's: no handler may run on a worker.
    sigset_t all, before;
    sigfillset(&all);
    pthread_sigmask(SIG_SETMASK, &all, &before);
    try {
      for (int i = 0; i < hands; ++i) workers.emplace_back([this] { serve(); });
    } catch (...) {
      // Fewer workers do the same work.
    }
    pthread_sigmask(SIG_SETMASK, &before, nullptr);
  }

  ~Crew() {
    {
      const std::lock_guard lock(mutex);
      stop = true;
    }
    work.notify_all();
    for (std::thread &worker : workers) worker.join();
  }

  void drain(Function f, void *c, int64_t n) {
    for (;;) {
      const int64_t i = next.fetch_add(1, std::memory_order_relaxed);
      if (i >= n) return;
      f(c, i);
    }
  }

  void serve() {
    std::fesetenv(FE_DFL_ENV);  // not what the creating thread had
    uint64_t seen = 0;
    std::unique_lock lock(mutex);
    for (;;) {
      work.wait(lock, [&] { return stop || (function != nullptr && jobs != seen); });
      if (stop) return;
      seen = jobs;
      ++active;
      const Function f = function;
      void *const c = context;
      const int64_t n = count;
      lock.unlock();
      drain(f, c, n);
      lock.lock();
      if (--active == 0) idle.notify_one();
    }
  }

  void lead(int64_t n, Function f, void *c) {
    {
      const std::lock_guard lock(mutex);
      function = f, context = c, count = n;
      next.store(0, std::memory_order_relaxed);
      ++jobs;
    }
    const int64_t hands = static_cast<int64_t>(workers.size());
    if (n - 1 >= hands) {
      work.notify_all();
    } else {
      for (int64_t i = 1; i < n; ++i) work.notify_one();
    }
    drain(f, c, n);
    std::unique_lock lock(mutex);
    function = nullptr;  // who wakes up now finds nothing
    idle.wait(lock, [&] { return active == 0; });
  }
};

Pool::Pool(int threads) : threads_(threads > 0 ? threads : usable_processors()) { watch_forks(); }

Pool::~Pool() {
  Crew *crew = crew_.load();
  // A crew from before fork() has no threads to join, and its mutex may be held by one that is gone.
  if (crew != nullptr && crew->born == forks.load(std::memory_order_relaxed)) delete crew;
}

Pool::Crew *Pool::crew() {
  Crew *now = crew_.load(std::memory_order_acquire);
  if (now != nullptr && now->born == forks.load(std::memory_order_relaxed)) return now;
  try {
    auto fresh = std::make_unique<Crew>(threads_ - 1);
    if (crew_.compare_exchange_strong(now, fresh.get(), std::memory_order_acq_rel)) return fresh.release();
    return now;
  } catch (...) {
    return nullptr;
  }
}

void Pool::start() {
  if (threads_ > 1) crew();
}

void Pool::run_shared(int64_t count, Function function, void *context) {
  Crew *const helpers = crew();
  if (helpers == nullptr || helpers->taken.exchange(true, std::memory_order_acquire)) {
    for (int64_t i = 0; i < count; ++i) function(context, i);
    return;
  }
  helpers->lead(count, function, context);
  helpers->taken.store(false, std::memory_order_release);
}

}  // namespace xent::cpu
