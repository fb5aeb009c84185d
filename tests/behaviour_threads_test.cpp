// SPDX-FileCopyrightText: the libxent authors
// SPDX-License-Identifier: Apache-2.0

// One plan and one context under many threads.

#include <thread>

#include "generate.hpp"

namespace xent_test {
namespace {

class Threads : public BackendTest {
 protected:
  // Runs every session from a thread of its own, all at once, `rounds` times.
  void race(std::vector<std::unique_ptr<Session>> &sessions, int rounds) {
    std::vector<std::string> failed(sessions.size());
    std::vector<std::thread> threads;
    for (size_t t = 0; t < sessions.size(); ++t) {
      threads.emplace_back([&, t] {
        xent_error err = {};
        err.struct_size = sizeof(err);
        for (int i = 0; i < rounds; ++i) {
          const Mode mode = (i + t) % 2 == 0 ? Mode::kForwardBackward : Mode::kLossAndGrad;
          if (sessions[t]->enqueue(mode, &err) != XENT_OK) failed[t] = err.message;
        }
        if (sessions[t]->enqueue(Mode::kForwardBackward, &err) != XENT_OK) failed[t] = err.message;
      });
    }
    for (std::thread &t : threads) t.join();
    device_->synchronize();
    for (const std::string &message : failed) EXPECT_EQ(message, "");
  }
};

TEST_P(Threads, SmallOnePlanOnEightThreads) {
  for (const int64_t vocab : {333, 20000}) {
    std::vector<Problem> problems;
    std::vector<std::unique_ptr<Session>> sessions;
    std::vector<Result> alone;
    for (int t = 0; t < 8; ++t) {
      problems.push_back(plain(rng_, backend(), kF32, {8}, vocab));
      const auto result = run(problems.back(), Mode::kForwardBackward);
      ASSERT_TRUE(result);
      alone.push_back(*result);
    }
    for (int t = 0; t < 8; ++t) {
      const auto plan = t == 0 ? nullptr : sessions[0]->plan();
      sessions.push_back(std::make_unique<Session>(problems[static_cast<size_t>(t)], device_, plan));
    }
    race(sessions, 10);
    for (size_t t = 0; t < 8; ++t) {
      const Result together = sessions[t]->collect();
      EXPECT_TRUE(together == alone[t]) << "thread " << t;
      EXPECT_TRUE(check(problems[t], together, Mode::kForwardBackward));
    }
  }
}

TEST_P(Threads, SmallPlansOfOneContextAtOnce) {
  std::vector<Problem> problems;
  for (int t = 0; t < 6; ++t) {
    problems.push_back(random_problem(rng_, backend(), choose(rng_, dtypes_of(backend())), 5, 400));
  }
  std::vector<std::thread> threads;
  std::vector<std::string> failed(problems.size());
  for (size_t t = 0; t < problems.size(); ++t) {
    threads.emplace_back([&, t] {
      for (int i = 0; i < 50; ++i) {
        xent_error err = {};
        err.struct_size = sizeof(err);
        if (!make_plan(problems[t], &err)) failed[t] = err.message;
      }
    });
  }
  for (std::thread &t : threads) t.join();
  for (const std::string &message : failed) EXPECT_EQ(message, "");
}

XENT_BACKENDS(Threads);

}  // namespace
}  // namespace xent_test
