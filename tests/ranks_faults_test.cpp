// SPDX-FileCopyrightText: the libxent authors
// SPDX-License-Identifier: Apache-2.0

// What goes wrong with a split vocabulary: ranks that die, calls through the wrong door.

#include <pthread.h>

#include <thread>

#include "ranks_fixture.hpp"

namespace xent_test {
namespace {

using std::chrono::milliseconds;

class RanksFaults : public RanksFixture {};

TEST_F(RanksFaults, OneGatherACall) {
  Problem p = problem(2);
  ThreadGather gather(device_, 2);
  std::vector<std::unique_ptr<Session>> sessions;
  for (const int32_t r : {0, 1}) {
    Problem shard = shard_of(p, r);
    shard.comm = gather.comm(r);
    sessions.push_back(std::make_unique<Session>(shard, device_));
  }
  const auto all = [&](Mode mode) {
    std::vector<std::thread> threads;
    for (auto &s : sessions) {
      threads.emplace_back([&] { EXPECT_EQ(s->enqueue(mode, nullptr), XENT_OK); });
    }
    for (auto &t : threads) t.join();
  };
  all(Mode::kForward);
  EXPECT_EQ(gather.gathers(), 1);
  all(Mode::kForwardBackward);
  EXPECT_EQ(gather.gathers(), 2);
  all(Mode::kLossAndGrad);
  EXPECT_EQ(gather.gathers(), 3);
}

// loss_and_grad keeps its own statistics where the caller wants none.
TEST_F(RanksFaults, LossAndGradWithoutStats) {
  Problem p = problem(4);
  const auto want = run_ranks(p, Door::kComm, Mode::kLossAndGrad);
  Ranks ranks(p, device_, Door::kComm);
  for (int32_t r = 0; r < 4; ++r) ranks.session(r).omit_stats();
  ASSERT_EQ(ranks.enqueue(Mode::kLossAndGrad, &err_), XENT_OK) << err_.message;
  std::string difference;
  const Result result = ranks.collect(&difference);
  ASSERT_TRUE(want);
  EXPECT_EQ(difference, "");
  EXPECT_EQ(result.loss, want->loss);
  EXPECT_EQ(result.grad, want->grad);
}

TEST_F(RanksFaults, TheWrongDoor) {
  const Problem p = problem(2);
  Session alone(shard_of(p, 0), device_);
  EXPECT_EQ(alone.enqueue(Mode::kForward, &err_), XENT_INVALID_ARGUMENT);
  says("xent_forward: plan: its vocabulary is split over 2 ranks and it has no communicator");
  EXPECT_EQ(alone.enqueue(Mode::kLossAndGrad, &err_), XENT_INVALID_ARGUMENT);
  says("xent_loss_and_grad: plan: its vocabulary is split over 2 ranks");
  Session whole(plain(rng_, Backend::kCpu, kF32, {5}, 64), device_);
  EXPECT_EQ(whole.enqueue_partial(&err_), XENT_INVALID_ARGUMENT);
  says("xent_forward_partial: plan: its vocabulary is not split");
  EXPECT_EQ(whole.enqueue_combine(&err_), XENT_INVALID_ARGUMENT);
  says("xent_forward_combine: plan: its vocabulary is not split");
}

TEST_F(RanksFaults, TensorsOfPartialAndCombine) {
  Problem p = problem(3);
  p.entropy = true;
  Ranks ranks(p, device_, Door::kPartials);
  xent_plan *made = ranks.session(0).plan().get();
  std::vector<float> logits(5 * 21), partials(3 * 5 * 4), loss(1);
  std::vector<int64_t> targets(5);
  std::vector<std::vector<int64_t>> shapes;
  shapes.reserve(8);
  const auto tensor = [&](void *data, DLDataType type, std::vector<int64_t> shape) {
    shapes.push_back(std::move(shape));
    DLTensor t = {};
    t.data = data;
    t.device = {kDLCPU, 0};
    t.ndim = static_cast<int32_t>(shapes.back().size());
    t.dtype = type;
    t.shape = shapes.back().data();
    return t;
  };
  DLTensor x = tensor(logits.data(), kF32, {5, 21}), t = tensor(targets.data(), kI64, {5});
  DLTensor all = tensor(partials.data(), kF32, {3, 5, 4}), mine = tensor(partials.data(), kF32, {5, 4});
  DLTensor l = tensor(loss.data(), kF32, {});
  std::vector<std::max_align_t> workspace(4096);
  xent_partial_args a = {};
  a.struct_size = sizeof(a);
  a.workspace = reinterpret_cast<void *>((reinterpret_cast<uintptr_t>(workspace.data()) + 255) / 256 * 256);
  a.workspace_bytes = 32768;
  a.logits = &x;
  a.targets = &t;
  a.partial = &mine;
  xent_forward_args f = {};
  f.struct_size = sizeof(f);
  f.workspace = a.workspace;
  f.workspace_bytes = a.workspace_bytes;
  f.targets = &t;
  f.loss = &l;
  xent_combine_args c = {};
  c.struct_size = sizeof(c);
  c.forward = &f;
  c.partials = &all;
  ASSERT_EQ(xent_forward_partial(made, &a, &err_), XENT_OK) << err_.message;
  ASSERT_EQ(xent_forward_combine(made, &c, &err_), XENT_OK) << err_.message;
  const auto partial = [&](const std::string &text) {
    EXPECT_EQ(xent_forward_partial(made, &a, &err_), XENT_INVALID_ARGUMENT) << text;
    says("xent_forward_partial: " + text);
  };
  const auto combine = [&](const std::string &text) {
    EXPECT_EQ(xent_forward_combine(made, &c, &err_), XENT_INVALID_ARGUMENT) << text;
    says("xent_forward_combine: " + text);
  };
  a.partial = nullptr;
  partial("partial: is NULL; it is required");
  a.partial = &all;
  partial("partial: shape [3, 5, 4]; it must be [rows, partial_width] = [5, 4]");
  a.partial = &mine;
  mine.dtype = kF64;
  partial("partial: dtype is float64; this plan takes float32");
  mine.dtype = kF32;
  mine.data = logits.data();
  partial("partial: overlaps logits");
  c.partials = nullptr;
  combine("partials: is NULL; it is required");
  c.partials = &mine;
  combine("partials: shape [5, 4]; it must be [ranks, rows, partial_width] = [3, 5, 4]");
  c.partials = &all;
  f.logits = &x;
  combine("logits: was given; it must be NULL");
  f.logits = nullptr;
  f.targets = nullptr;
  combine("targets: is NULL; it is required");
  f.targets = &t;
  l.data = partials.data() + 3;
  combine("loss: overlaps partials");
  l.data = loss.data();
  shapes[4] = {1, 1};
  l.ndim = 2;
  l.shape = shapes[4].data();
  combine("loss: shape [1, 1]; it must be [] or [1]");
  l.ndim = 0;
  shapes[1][0] = 6;
  combine("targets: shape [6] has more rows than the plan's max_rows, 5");
  shapes[1][0] = 5;
  c.forward = nullptr;
  EXPECT_EQ(xent_forward_combine(made, &c, &err_), XENT_INVALID_ARGUMENT);
  says("xent_forward_combine: forward: is NULL");
}

// ---- Ranks that fail

// A rank that dies between two steps: the others come back within the communicator's timeout, and stay failed.
TEST_F(RanksFaults, ARankThatDies) {
  const Problem p = problem(3);
  ThreadGather gather(device_, 3, milliseconds(200));
  std::vector<std::unique_ptr<Session>> sessions;
  for (const int32_t r : {0, 1, 2}) {
    Problem shard = shard_of(p, r);
    shard.comm = gather.comm(r);
    sessions.push_back(std::make_unique<Session>(shard, device_));
  }
  xent_error errors[3] = {};
  for (xent_error &e : errors) e.struct_size = sizeof(e);
  const auto step = [&](int ranks) {
    std::vector<std::thread> threads;
    const auto start = std::chrono::steady_clock::now();
    for (int r = 0; r < ranks; ++r) {
      threads.emplace_back([&, r] {
        const xent_status status = sessions[static_cast<size_t>(r)]->enqueue(Mode::kLossAndGrad, &errors[r]);
        if (status == XENT_OK) errors[r].status = XENT_OK;
      });
    }
    for (auto &t : threads) t.join();
    return std::chrono::duration_cast<milliseconds>(std::chrono::steady_clock::now() - start);
  };
  step(3);
  for (const xent_error &e : errors) EXPECT_EQ(e.status, XENT_OK) << e.message;
  EXPECT_LT(step(2), milliseconds(10000));  // rank 2 is gone
  for (int r = 0; r < 2; ++r) {
    EXPECT_EQ(errors[r].status, XENT_COMM_ERROR);
    EXPECT_EQ(errors[r].native_code, 42);
    err_ = errors[r];
    says("xent_loss_and_grad: comm: rank " + std::to_string(r) +
         " of 3: it failed and needs to be made anew, like its "
         "plans: all_gather: rank " +
         std::to_string(r) + " waited for 200 ms (XENT_COMM_ERROR)");
  }
  // At once from now on, without a collective.
  for (auto &e : errors) e.message[0] = '\0';
  EXPECT_EQ(sessions[0]->enqueue(Mode::kForward, &errors[0]), XENT_COMM_ERROR);
  err_ = errors[0];
  says("xent_forward: comm: rank 0 of 3: it failed");
  // A new communicator and new plans go on.
  verify_ranks(p);
}

TEST_F(RanksFaults, AnErrorThatShowsLater) {
  const Problem p = problem(2);
  ThreadGather gather(device_, 2, milliseconds(200));
  Problem shard = shard_of(p, 1);
  shard.comm = gather.comm(1);
  Session session(shard, device_);
  gather.fail_later(1);
  EXPECT_EQ(session.enqueue(Mode::kForward, &err_), XENT_COMM_ERROR);
  says("async_error: rank 1 failed later (XENT_DEVICE_ERROR)");
  EXPECT_EQ(gather.gathers(), 0);
  EXPECT_EQ(session.enqueue(Mode::kForward, &err_), XENT_COMM_ERROR);
}

TEST_F(RanksFaults, CallbacksThatThrow) {
  int calls = 0;
  xent_comm_desc desc = {};
  desc.struct_size = sizeof(desc);
  desc.ranks = 2;
  desc.user = &calls;
  desc.all_gather = [](void *user, const void *, void *, size_t, void *, xent_error *) -> xent_status {
    ++*static_cast<int *>(user);
    throw std::runtime_error("of the callback");
  };
  desc.release = [](void *) { throw 1; };
  xent_comm *comm = nullptr;
  ASSERT_EQ(xent_comm_create(context_with(0), &desc, &comm, &err_), XENT_OK) << err_.message;
  {
    Problem shard = shard_of(problem(2), 0);
    shard.comm = comm;
    Session session(shard, device_);
    for (int i = 0; i < 3; ++i) {
      EXPECT_EQ(session.enqueue(Mode::kForward, &err_), XENT_COMM_ERROR);
      says("all_gather: an exception: of the callback");
    }
  }
  EXPECT_EQ(calls, 1) << "a spent communicator is not asked again";
  xent_comm_destroy(comm);
}

// As Python does to a thread that still runs when its interpreter ends.
TEST_F(RanksFaults, CallbacksThatEndTheirThread) {
  xent_comm_desc desc = {};
  desc.struct_size = sizeof(desc);
  desc.ranks = 2;
  desc.all_gather = [](void *, const void *, void *, size_t, void *, xent_error *) -> xent_status {
    pthread_exit(nullptr);
  };
  xent_comm *comm = nullptr;
  ASSERT_EQ(xent_comm_create(context_with(0), &desc, &comm, &err_), XENT_OK) << err_.message;
  {
    Problem shard = shard_of(problem(2), 0);
    shard.comm = comm;
    Session session(shard, device_);
    pthread_t thread;
    ASSERT_EQ(pthread_create(
                  &thread, nullptr,
                  [](void *user) -> void * {
                    static_cast<Session *>(user)->enqueue(Mode::kForward, nullptr);
                    return user;
                  },
                  &session),
              0);
    void *returned = &session;
    ASSERT_EQ(pthread_join(thread, &returned), 0);
    EXPECT_EQ(returned, nullptr) << "the call returned";
    EXPECT_EQ(session.enqueue(Mode::kForward, &err_), XENT_COMM_ERROR);
    says("all_gather: its thread ended");
  }
  xent_comm_destroy(comm);
}

// A wrong argument is refused before anything is gathered.
TEST_F(RanksFaults, ArgumentsAreCheckedFirst) {
  Problem p = problem(2);
  p.mask = Values{kBool, {1, 1, 1, 0, 1}};
  ThreadGather gather(device_, 2, milliseconds(200));
  Problem shard = shard_of(p, 0);
  shard.comm = gather.comm(0);
  Session session(shard, device_);
  session.retype_mask(kF64);
  EXPECT_EQ(session.enqueue(Mode::kForward, &err_), XENT_INVALID_ARGUMENT);
  says("xent_forward: mask: dtype is float64");
  session.retype_mask(kBool);
  gather.fail_later(0);  // still asked for
  EXPECT_EQ(session.enqueue(Mode::kForward, &err_), XENT_COMM_ERROR);
}

}  // namespace
}  // namespace xent_test
