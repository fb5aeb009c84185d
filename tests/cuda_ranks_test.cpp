// SPDX-FileCopyrightText: the libxent authors
// SPDX-License-Identifier: Apache-2.0

// A split vocabulary on one GPU: 2 to 8 ranks in one process, all of a step captured in a CUDA graph.

#include <cmath>

#include "generate.hpp"
#include "ranks.hpp"

namespace xent_test {
namespace {

class CudaRanks : public BackendTest {
 protected:
  void SetUp() override {
    BackendTest::SetUp();
    if (device_ != nullptr) stream_ = device_->make_stream();
  }
  void TearDown() override {
    if (device_ != nullptr) device_->destroy_stream(stream_);
  }

  void capture_and_replay(Problem p) {
    SCOPED_TRACE(p.describe());
    Ranks ranks(p, device_, Door::kPartials, {}, stream_);
    ASSERT_EQ(ranks.refusal(), nullptr) << ranks.refusal()->message;
    xent_error err = {};
    err.struct_size = sizeof(err);
    xent_status status = XENT_INTERNAL;
    void *graph = device_->capture(stream_, [&] { status = ranks.enqueue(Mode::kForwardBackward, &err); });
    ASSERT_EQ(status, XENT_OK) << err.message;
    ASSERT_NE(graph, nullptr);
    for (int i = 0; i < 3; ++i) {
      if (i > 0) {
        draw_targets(rng_, p);
        draw_logits(rng_, p, choose(rng_, kFamilies));
        if (p.ignore_index) add_ignored(rng_, p, *p.ignore_index);
      }
      ranks.upload(p);
      device_->replay(graph, stream_);
      device_->synchronize();
      std::string difference;
      const Result result = ranks.collect(&difference);
      EXPECT_EQ(difference, "") << "replay " << i;
      EXPECT_TRUE(check(p, result, Mode::kForwardBackward)) << "replay " << i;
    }
    device_->destroy_graph(graph);
  }

  void *stream_ = nullptr;
};

TEST_P(CudaRanks, SmallFirstStepsAreCapturedAndReplayed) {
  for (const DLDataType dtype : dtypes_of(backend())) {
    for (const int32_t ranks : {2, 3, 4, 8}) {
      Problem p = plain(rng_, backend(), dtype, {9}, 333);
      p.ignore_index = -100;
      p.split = draw_split(rng_, 333, ranks);
      capture_and_replay(p);
      p.label_smoothing = 0.1;
      p.entropy = p.predicted = true;
      p.reduction = XENT_REDUCTION_NONE;
      capture_and_replay(p);
      p.softcap = 20;
      p.reduction = XENT_REDUCTION_SUM;
      p.denominator = Values{kI64, {3}};
      capture_and_replay(p);
    }
  }
}

TEST_P(CudaRanks, EveryShapeOfWork) {
  for (const DLDataType dtype : dtypes_of(backend())) {
    for (const auto &[rows, vocab] : {std::pair<int64_t, int64_t>{1, 128256}, {2, 50257}, {40, 32000}, {3000, 65}}) {
      Problem p = plain(rng_, backend(), dtype, {rows}, vocab);
      p.predicted = true;
      p.split = draw_split(rng_, vocab, choose<int32_t>(rng_, {2, 4, 8}));
      capture_and_replay(p);
    }
  }
}

INSTANTIATE_TEST_SUITE_P(Cuda, CudaRanks, ::testing::Values(Backend::kCuda));

}  // namespace
}  // namespace xent_test
