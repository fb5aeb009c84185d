// SPDX-FileCopyrightText: the libxent authors
// SPDX-License-Identifier: Apache-2.0

// A problem whose vocabulary is split: its shards, one a rank, run in one process through either door of the C API, and
// put together to the result of the whole problem.
#pragma once

#include <chrono>
#include <condition_variable>
#include <functional>
#include <mutex>

#include "harness.hpp"

namespace xent_test {

// Shards of random, uneven widths (often an empty one) and paddings.
Split draw_split(Rng &rng, int64_t classes, int32_t ranks);

// The part of rank `rank` of a problem with a split: its columns, its padding as NaN.
Problem shard_of(const Problem &p, int32_t rank);

// An all-gather between threads, one a rank. A rank that waits longer than the timeout gives up, and with it all.
class ThreadGather {
 public:
  ThreadGather(Device *device, int32_t ranks, std::chrono::milliseconds timeout = std::chrono::seconds(60));
  ~ThreadGather();
  ThreadGather(const ThreadGather &) = delete;
  ThreadGather &operator=(const ThreadGather &) = delete;

  xent_comm *comm(int32_t rank) { return members_[static_cast<size_t>(rank)].comm; }
  int gathers() const { return gathers_; }
  int released() const { return released_; }
  // The next async_error of the rank reports this.
  void fail_later(int32_t rank) { members_[static_cast<size_t>(rank)].fails = true; }

 private:
  struct Member {
    ThreadGather *gather;
    int32_t rank;
    xent_comm *comm = nullptr;
    bool fails = false;
  };
  static xent_status all_gather(void *user, const void *send, void *recv, size_t bytes, void *stream, xent_error *err);
  static xent_status async_error(void *user, xent_error *err);
  static void release(void *user);
  bool meet();

  Device *device_;
  std::chrono::milliseconds timeout_;
  std::vector<Member> members_;
  std::mutex mutex_;
  std::condition_variable all_here_;
  std::vector<std::vector<uint8_t>> sent_;
  int32_t here_ = 0;
  int round_ = 0, gathers_ = 0, released_ = 0;
  bool broken_ = false;
};

// kPartials: partial, combine and backward of all ranks, one after the other. kComm: a thread a rank.
enum class Door { kPartials, kComm };

class Ranks {
 public:
  using Adjust = std::function<void(Problem &shard, int32_t rank)>;
  Ranks(const Problem &p, Device *device, Door door, const Adjust &adjust = {}, void *stream = nullptr);

  // Where a plan could not be made: what err says. Else null.
  const xent_error *refusal() const { return err_.status == XENT_OK ? nullptr : &err_; }
  Session &session(int32_t rank) { return *sessions_[static_cast<size_t>(rank)]; }
  void upload(const Problem &p);
  // kLossAndGrad through kComm alone. The first status that is not XENT_OK.
  xent_status enqueue(Mode mode, xent_error *err);
  // Row outputs of rank 0, the gradient of all ranks. `difference` tells where ranks differ, or padding is not +0.
  Result collect(std::string *difference);

 private:
  Problem part(const Problem &p, int32_t rank) const;

  Problem whole_;
  Device *device_;
  Door door_;
  Adjust adjust_;
  bool wrote_gradient_ = false;
  xent_error err_ = {};
  std::unique_ptr<ThreadGather> gather_;
  std::shared_ptr<Memory> partials_;
  std::vector<std::unique_ptr<Session>> sessions_;
  std::vector<Problem> shards_;
};

// Runs a problem with a split and puts it together; a failing call or a difference of ranks is a test failure.
std::optional<Result> run_ranks(const Problem &p, Door door, Mode mode);
// Both doors, every mode, against the reference; and the doors against each other, bit by bit.
void verify_ranks(const Problem &p, Worst *worst = nullptr);

}  // namespace xent_test
