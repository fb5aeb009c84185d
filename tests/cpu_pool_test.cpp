// SPDX-FileCopyrightText: the libxent authors
// SPDX-License-Identifier: Apache-2.0

// The CPU backend's threads: every task once, callers at once, callers inside tasks, fork().
#include "cpu/pool.hpp"

#include <gtest/gtest.h>
#include <sched.h>
#include <signal.h>
#include <sys/wait.h>
#include <unistd.h>

#include <atomic>
#include <chrono>
#include <memory>
#include <thread>
#include <vector>

namespace xent::cpu {
namespace {

// True if two tasks were inside at the same time, which takes two threads.
bool two_tasks_meet(Pool &pool) {
  std::atomic<int> inside{0};
  std::atomic<bool> met{true};
  pool.run(2, [&](int64_t) {
    inside.fetch_add(1);
    const auto deadline = std::chrono::steady_clock::now() + std::chrono::seconds(20);
    while (inside.load() < 2) {
      if (std::chrono::steady_clock::now() > deadline) {
        met = false;
        return;
      }
      std::this_thread::yield();
    }
  });
  return met;
}

TEST(CpuPool, RunsEveryTaskOnce) {
  for (int threads : {1, 2, 3, 8}) {
    Pool pool(threads);
    EXPECT_EQ(pool.threads(), threads);
    for (int64_t count : {0, 1, 2, 7, 1000}) {
      std::vector<std::atomic<int>> done(static_cast<size_t>(count));
      pool.run(count, [&](int64_t i) { done[static_cast<size_t>(i)].fetch_add(1); });
      for (const auto &times : done) EXPECT_EQ(times.load(), 1);
    }
  }
}

TEST(CpuPool, ManyShortRuns) {
  Pool pool(4);
  for (int64_t round = 0; round < 5000; ++round) {
    std::atomic<int64_t> sum{0};
    pool.run(5, [&](int64_t i) { sum += round + i; });
    ASSERT_EQ(sum.load(), 5 * round + 10);
  }
}

TEST(CpuPool, WorkersTakePart) {
  Pool pool(2);
  EXPECT_TRUE(two_tasks_meet(pool));
}

TEST(CpuPool, ReturnsWhenTheWorkersAreDoneToo) {
  Pool pool(2);
  const std::thread::id caller = std::this_thread::get_id();
  std::atomic<int> inside{0};
  std::atomic<bool> done{false};
  pool.run(2, [&](int64_t) {
    inside.fetch_add(1);
    while (inside.load() < 2) std::this_thread::yield();
    if (std::this_thread::get_id() == caller) return;
    std::this_thread::sleep_for(std::chrono::milliseconds(50));
    done = true;
  });
  EXPECT_TRUE(done.load());
  while (!done.load()) std::this_thread::yield();
}

TEST(CpuPool, WorkersBlockSignals) {
  Pool pool(2);
  const std::thread::id caller = std::this_thread::get_id();
  std::atomic<int> inside{0}, blocked{-1};
  pool.run(2, [&](int64_t) {
    inside.fetch_add(1);
    while (inside.load() < 2) std::this_thread::yield();
    if (std::this_thread::get_id() == caller) return;
    sigset_t set;
    pthread_sigmask(SIG_SETMASK, nullptr, &set);
    blocked = sigismember(&set, SIGINT);
  });
  EXPECT_EQ(blocked.load(), 1);
  sigset_t set;
  pthread_sigmask(SIG_SETMASK, nullptr, &set);
  EXPECT_EQ(sigismember(&set, SIGINT), 0) << "the caller's own mask was changed";
}

TEST(CpuPool, CallersAtOnce) {
  Pool pool(3);
  std::vector<std::thread> callers;
  std::atomic<int> wrong{0};
  for (int c = 0; c < 8; ++c) {
    callers.emplace_back([&, c] {
      for (int round = 0; round < 300; ++round) {
        std::vector<int64_t> out(64, -1);
        pool.run(64, [&](int64_t i) { out[static_cast<size_t>(i)] = i * c; });
        for (int64_t i = 0; i < 64; ++i) wrong += out[static_cast<size_t>(i)] != i * c;
      }
    });
  }
  for (std::thread &caller : callers) caller.join();
  EXPECT_EQ(wrong.load(), 0);
}

TEST(CpuPool, RunInsideATask) {
  Pool pool(4);
  std::atomic<int64_t> sum{0};
  pool.run(8, [&](int64_t i) { pool.run(8, [&](int64_t j) { sum += 8 * i + j; }); });
  EXPECT_EQ(sum.load(), 63 * 64 / 2);
}

TEST(CpuPool, DefaultIsTheProcessorsOfTheProcess) {
  cpu_set_t before, one;
  ASSERT_EQ(sched_getaffinity(0, sizeof before, &before), 0);
  EXPECT_EQ(Pool(0).threads(), CPU_COUNT(&before));
  CPU_ZERO(&one);
  for (size_t cpu = 0; cpu < CPU_SETSIZE; ++cpu) {
    if (CPU_ISSET(cpu, &before)) {
      CPU_SET(cpu, &one);
      break;
    }
  }
  ASSERT_EQ(sched_setaffinity(0, sizeof one, &one), 0);
  const int threads = Pool(0).threads();
  ASSERT_EQ(sched_setaffinity(0, sizeof before, &before), 0);
  EXPECT_EQ(threads, 1);
}

#if defined(__SANITIZE_THREAD__)
#define XENT_TSAN 1
#elif defined(__has_feature)
#if __has_feature(thread_sanitizer)
#define XENT_TSAN 1
#endif
#endif

// The child of a process with threads, under a watchdog; its exit status.
template <class Body>
int in_child(const Body &body) {
  const pid_t child = fork();
  if (child == 0) {
    alarm(60);
    _exit(body());
  }
  int status = -1;
  waitpid(child, &status, 0);
  return WIFEXITED(status) ? WEXITSTATUS(status) : 1000 + WTERMSIG(status);
}

TEST(CpuPool, ChildHasWorkersOfItsOwn) {
#ifdef XENT_TSAN
  GTEST_SKIP() << "ThreadSanitizer does not start threads after a fork of a process with threads";
#endif
  Pool pool(2);
  ASSERT_TRUE(two_tasks_meet(pool));
  EXPECT_EQ(in_child([&] {
              if (!two_tasks_meet(pool)) return 1;
              return in_child([&] { return two_tasks_meet(pool) ? 0 : 2; });
            }),
            0);
  EXPECT_TRUE(two_tasks_meet(pool)) << "the parent's workers are gone";
}

TEST(CpuPool, ChildDestroysWhatItInherits) {
  auto pool = std::make_unique<Pool>(2);
  ASSERT_TRUE(two_tasks_meet(*pool));
  EXPECT_EQ(in_child([&] {
              pool.reset();
              return 0;
            }),
            0);
}

TEST(CpuPool, ForkWhileAnotherThreadRuns) {
#ifdef XENT_TSAN
  GTEST_SKIP() << "ThreadSanitizer does not start threads after a fork of a process with threads";
#endif
  Pool pool(3);
  std::atomic<bool> stop{false};
  std::thread busy([&] {
    while (!stop) pool.run(3, [](int64_t) {});
  });
  for (int round = 0; round < 20; ++round) {
    EXPECT_EQ(in_child([&] { return two_tasks_meet(pool) ? 0 : 1; }), 0);
  }
  stop = true;
  busy.join();
}

}  // namespace
}  // namespace xent::cpu
