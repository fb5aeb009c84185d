// SPDX-FileCopyrightText: the libxent authors
// SPDX-License-Identifier: Apache-2.0

// CUDA graphs and streams: calls can be captured on their first use and replayed with new contents.

#include <thread>

#include "generate.hpp"

namespace xent_test {
namespace {

class CudaGraph : public BackendTest {
 protected:
  void SetUp() override {
    BackendTest::SetUp();
    if (device_ != nullptr) stream_ = device_->make_stream();
  }
  void TearDown() override {
    if (device_ != nullptr) device_->destroy_stream(stream_);
  }

  // Other contents for the same plan, tensors and scalars.
  void redraw(Problem &p) {
    draw_targets(rng_, p);
    draw_logits(rng_, p, choose(rng_, kFamilies));
    if (p.ignore_index) add_ignored(rng_, p, *p.ignore_index);
    if (p.mask) add_mask(rng_, p, p.mask->dtype);
    if (!p.weights.empty()) add_weights(rng_, p);
    if (p.upstream) add_upstream(rng_, p, p.upstream->dtype, p.per_row_upstream);
    if (p.denominator) p.denominator->v[0] = static_cast<double>(pick(rng_, 0, 9));
  }

  // Captures the very first call of a new plan, then replays it over three sets of contents.
  void capture_and_replay(Problem p, Mode mode) {
    SCOPED_TRACE(p.describe());
    Session session(p, device_, nullptr, stream_);
    ASSERT_TRUE(session.plan());
    xent_plan_info info = {};
    info.struct_size = sizeof(info);
    ASSERT_EQ(xent_plan_get_info(session.plan().get(), &info, nullptr), XENT_OK);
    EXPECT_NE(info.capabilities & unsigned{XENT_CAP_GRAPH_CAPTURE}, 0u);
    xent_error err = {};
    err.struct_size = sizeof(err);
    xent_status status = XENT_INTERNAL;
    void *graph = device_->capture(stream_, [&] { status = session.enqueue(mode, &err); });
    ASSERT_EQ(status, XENT_OK) << err.message;
    ASSERT_NE(graph, nullptr);
    for (int i = 0; i < 3; ++i) {
      if (i > 0) redraw(p);
      session.upload(p);
      device_->replay(graph, stream_);
      device_->synchronize();
      EXPECT_TRUE(check(p, session.collect(), mode)) << "replay " << i;
    }
    device_->destroy_graph(graph);
  }

  void *stream_ = nullptr;
};

TEST_P(CudaGraph, SmallFirstCallsAreCapturedAndReplayed) {
  for (const Mode mode : {Mode::kForward, Mode::kForwardBackward, Mode::kLossAndGrad}) {
    for (const DLDataType dtype : dtypes_of(backend())) {
      for (const int32_t reduction : {XENT_REDUCTION_NONE, XENT_REDUCTION_SUM, XENT_REDUCTION_MEAN}) {
        Problem p = plain(rng_, backend(), dtype, {9}, 333);
        p.reduction = reduction;
        p.ignore_index = -100;
        p.entropy = p.predicted = true;
        capture_and_replay(p, mode);
        p.label_smoothing = 0.1;
        p.softcap = 20;
        add_weights(rng_, p);
        add_mask(rng_, p, kBool);
        add_upstream(rng_, p, kF32, reduction == XENT_REDUCTION_NONE);
        if (reduction != XENT_REDUCTION_NONE) p.denominator = Values{kI64, {3}};
        capture_and_replay(p, mode);
      }
    }
  }
}

TEST_P(CudaGraph, EveryShapeOfWork) {
  for (const Mode mode : {Mode::kForwardBackward, Mode::kLossAndGrad}) {
    for (const DLDataType dtype : dtypes_of(backend())) {
      for (const auto &[rows, vocab] : {std::pair<int64_t, int64_t>{1, 128256}, {2, 50257}, {40, 32000}, {3000, 65}}) {
        capture_and_replay(plain(rng_, backend(), dtype, {rows}, vocab), mode);
      }
    }
  }
}

TEST_P(CudaGraph, RandomProblems) {
  for (int i = 0; i < 20; ++i) {
    Problem p =
        random_problem(rng_, backend(), choose(rng_, dtypes_of(backend())), pick(rng_, 1, 20), pick(rng_, 1, 5000));
    if (p.z_loss != 0 || p.classes != 0) continue;  // redraw() gives no offsets that suit them
    capture_and_replay(p, pick(rng_, 0, 1) == 0 ? Mode::kForwardBackward : Mode::kLossAndGrad);
  }
}

TEST_P(CudaGraph, TwoStreamsOfOnePlan) {
  void *other = device_->make_stream();
  for (const DLDataType dtype : dtypes_of(backend())) {
    Problem a = plain(rng_, backend(), dtype, {64}, 32000), b = a;
    redraw(b);
    Session first(a, device_, nullptr, stream_);
    Session second(b, device_, first.plan(), other);
    xent_error err = {};
    err.struct_size = sizeof(err);
    for (const Mode mode : {Mode::kForwardBackward, Mode::kLossAndGrad}) {
      first.upload(a);
      second.upload(b);
      for (int i = 0; i < 5; ++i) {
        ASSERT_EQ(first.enqueue(mode, &err), XENT_OK) << err.message;
        ASSERT_EQ(second.enqueue(mode, &err), XENT_OK) << err.message;
      }
      device_->synchronize();
      EXPECT_TRUE(check(a, first.collect(), mode));
      EXPECT_TRUE(check(b, second.collect(), mode));
    }
  }
  device_->destroy_stream(other);
}

TEST_P(CudaGraph, TwoThreadsOfOnePlan) {
  void *streams[2] = {stream_, device_->make_stream()};
  Problem problems[2] = {plain(rng_, backend(), kBf16, {64}, 32000), plain(rng_, backend(), kBf16, {64}, 32000)};
  Session first(problems[0], device_, nullptr, streams[0]);
  Session second(problems[1], device_, first.plan(), streams[1]);
  Session *sessions[2] = {&first, &second};
  std::string failed[2];
  std::vector<std::thread> threads;
  for (int t = 0; t < 2; ++t) {
    threads.emplace_back([&, t] {
      // No context of the driver is current in a new thread: the library must not need one.
      xent_error err = {};
      err.struct_size = sizeof(err);
      for (int i = 0; i < 20; ++i) {
        if (sessions[t]->enqueue(i % 2 == 0 ? Mode::kForwardBackward : Mode::kLossAndGrad, &err) != XENT_OK) {
          failed[t] = err.message;
        }
      }
    });
  }
  for (std::thread &t : threads) t.join();
  device_->synchronize();
  for (int t = 0; t < 2; ++t) {
    EXPECT_EQ(failed[t], "");
    EXPECT_TRUE(check(problems[t], sessions[t]->collect(), Mode::kLossAndGrad));
  }
  device_->destroy_stream(streams[1]);
}

INSTANTIATE_TEST_SUITE_P(Cuda, CudaGraph, ::testing::Values(Backend::kCuda));

}  // namespace
}  // namespace xent_test
