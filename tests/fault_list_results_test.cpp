// SPDX-FileCopyrightText: the libxent authors
// SPDX-License-Identifier: Apache-2.0

// The list of fault_list_test.cpp from A19 on: gradient scaling, precision, the host's part, interchange.

#include <cmath>

#include "generate.hpp"

namespace xent_test {
namespace {

class FaultListResults : public BackendTest {
 protected:
  Problem start(DLDataType dtype, std::vector<int64_t> shape, int64_t vocab) {
    return plain(rng_, backend(), dtype, std::move(shape), vocab);
  }
  static double value(const Result &r) { return decode_float(kF32, r.loss[0]); }
};

TEST_P(FaultListResults, SmallA19_PerRowUpstreamGradientIsNotReadAsScalar) {
  for (const DLDataType dtype : dtypes_of(backend())) {
    Problem p = start(dtype, {6}, 100);
    p.reduction = XENT_REDUCTION_NONE;
    p.ignore_index = -100;
    p.targets[0] = -100;
    p.per_row_upstream = true;
    p.upstream = Values{kF32, {0, 1, 2, 3, 4, 5}};
    verify(p);
  }
}

TEST_P(FaultListResults, SmallA20_UpstreamGradientsOfAnyValueAndStride) {
  for (const int64_t stride : {1, 2, 0, -3}) {
    Problem p = start(kBf16, {8}, 100);
    p.reduction = XENT_REDUCTION_NONE;
    add_upstream(rng_, p, kF32, true);
    if (stride == 0) p.upstream->v.assign(8, -2.5);
    p.upstream_layout.strides = {stride};
    verify(p);
  }
}

TEST_P(FaultListResults, SmallA21_LossAndGradientShareOneNormaliser) {
  for (const int32_t reduction : {XENT_REDUCTION_NONE, XENT_REDUCTION_SUM, XENT_REDUCTION_MEAN}) {
    Problem p = start(kF32, {20}, 100);
    p.reduction = reduction;
    add_ignored(rng_, p, -100);
    add_mask(rng_, p, kBool);
    verify(p);
  }
}

TEST_P(FaultListResults, SmallA22_ASecondLossOnTheSameLogitsIsTheFirst) {
  for (const DLDataType dtype : dtypes_of(backend())) {
    Problem p = start(dtype, {5}, 1037);
    Session session(p, device_);
    xent_error err = {};
    err.struct_size = sizeof(err);
    for (const Mode mode : {Mode::kForwardBackward, Mode::kLossAndGrad, Mode::kForwardBackward}) {
      ASSERT_EQ(session.enqueue(mode, &err), XENT_OK) << err.message;
      EXPECT_TRUE(check(p, session.collect(), mode));  // collect() sees that the logits are as they were
    }
  }
}

TEST_P(FaultListResults, SmallA23_OptionalOutputsAreOptionalOneByOne) {
  Problem p = start(kF32, {5}, 300);
  p.z_loss = 1e-3;
  p.lse = p.row_counts = false;
  const auto bare = run(p, Mode::kForward);
  p.lse = true;
  const auto with = run(p, Mode::kForward);
  ASSERT_TRUE(bare && with);
  EXPECT_EQ(bare->loss, with->loss);
  EXPECT_NE(value(*bare), 0);
  verify(p);
}

TEST_P(FaultListResults, SmallA24_TheGradientIsRoundedOnce) {
  for (const DLDataType dtype : {kBf16, kF16}) {
    for (const bool overwrite : {false, true}) {
      for (const Mode mode : {Mode::kForwardBackward, Mode::kLossAndGrad}) {
        Problem p = start(dtype, {9}, 1037);
        p.upstream = Values{kF32, {0.37}};
        p.quantize();
        p.grad_dtype = kF32;
        const auto wide = run(p, mode);
        p.grad_dtype = dtype;
        p.overwrite = overwrite;
        const auto narrow = run(p, mode);
        ASSERT_TRUE(wide && narrow);
        for (size_t i = 0; i < wide->grad.size(); ++i) {
          ASSERT_EQ(decode_float(dtype, narrow->grad[i]), round_to(dtype, decode_float(kF32, wide->grad[i]))) << i;
        }
      }
    }
  }
}

TEST_P(FaultListResults, A25_AFloat16SumBeyondFloat16IsAccumulatedWider) {
  Problem p = start(kF16, {20, 1025}, 30);
  for (double &x : p.logits) x = round_to(kF16, x * 4);
  p.logits_layout.strides = {30 * 1025, 1, 1025};
  for (const int32_t reduction : {XENT_REDUCTION_SUM, XENT_REDUCTION_MEAN}) {
    p.reduction = reduction;
    verify(p);
  }
}

TEST_P(FaultListResults, A26_TheMeanIsTheMeanOfTheRows) {
  Problem p = start(kF32, {2, 150000}, 2);
  p.logits_layout.strides = {300000, 1, 150000};
  const auto mean = run(p, Mode::kForward);
  p.reduction = XENT_REDUCTION_NONE;
  const auto rows = run(p, Mode::kForward);
  ASSERT_TRUE(mean && rows);
  double sum = 0;
  for (const uint64_t bits : rows->loss) sum += decode_float(kF32, bits);
  EXPECT_NEAR(value(*mean), sum / 300000, 1.2e-7 * sum / 300000);
}

TEST_P(FaultListResults, SmallA27_ACommonOffsetCostsNoDigits) {
  Problem p = start(kF32, {4}, 3);
  p.reduction = XENT_REDUCTION_NONE;
  for (double &x : p.logits) x = round_to(kF32, std::uniform_real_distribution<double>(0, 1)(rng_) - 1e7);
  verify(p);
}

TEST_P(FaultListResults, SmallA29_NothingIsFetchedToTheHost) {
  if (!cuda()) GTEST_SKIP() << "a host has nothing to fetch";
  void *stream = device_->make_stream();
  Problem p = start(kF32, {9}, 300);
  add_ignored(rng_, p, -100);
  add_weights(rng_, p);
  Session session(p, device_, nullptr, stream);
  xent_error err = {};
  err.struct_size = sizeof(err);
  xent_status status = XENT_INTERNAL;
  void *graph = device_->capture(stream, [&] { status = session.enqueue(Mode::kForwardBackward, &err); });
  ASSERT_EQ(status, XENT_OK) << err.message;
  for (int i = 0; i < 2; ++i) {
    draw_targets(rng_, p);
    add_ignored(rng_, p, -100);
    session.upload(p);
    device_->replay(graph, stream);
    device_->synchronize();
    EXPECT_TRUE(check(p, session.collect(), Mode::kForwardBackward));
  }
  device_->destroy_graph(graph);
  device_->destroy_stream(stream);
}

TEST_P(FaultListResults, A30_BitsAreThoseOfEveryRunAndOfEveryBatch) {
  Problem p = start(kF32, {16, 2048}, 2);
  p.logits_layout.strides = {4096, 1, 2048};
  const auto first = run(p, Mode::kForward);
  for (int i = 0; i < 5; ++i) {
    const auto again = run(p, Mode::kForward);
    ASSERT_TRUE(first && again);
    ASSERT_EQ(first->loss, again->loss);
  }
  Problem one = p;
  one.shape = {1, 1};
  one.logits.resize(2);
  one.targets.resize(1);
  one.logits_layout.strides.clear();
  const auto alone = run(one, Mode::kForward);
  ASSERT_TRUE(alone);
  EXPECT_EQ(alone->lse[0], first->lse[0]);
}

TEST_P(FaultListResults, SmallA33_MicroBatchesWithACommonDenominatorAreTheWholeBatch) {
  Problem whole = start(kF32, {30}, 100);
  add_ignored(rng_, whole, -100);
  const auto expected = run(whole, Mode::kForwardBackward);
  ASSERT_TRUE(expected);
  double loss = 0;
  std::vector<double> grad;
  for (const auto &[first, count] : {std::pair<int64_t, int64_t>{0, 7}, {7, 20}, {27, 3}}) {
    Problem part = whole;
    part.shape = {count};
    part.logits.assign(whole.logits.begin() + first * 100, whole.logits.begin() + (first + count) * 100);
    part.targets.assign(whole.targets.begin() + first, whole.targets.begin() + first + count);
    part.denominator = Values{kI64, {static_cast<double>(expected->counts[0])}};
    const auto r = run(part, Mode::kForwardBackward);
    ASSERT_TRUE(r);
    loss += value(*r);
    for (const uint64_t bits : r->grad) grad.push_back(decode_float(kF32, bits));
  }
  EXPECT_NEAR(loss, value(*expected), 1e-6 * std::fmax(1.0, value(*expected)));
  for (size_t i = 0; i < grad.size(); ++i) ASSERT_EQ(grad[i], decode_float(kF32, expected->grad[i])) << i;
}

TEST_P(FaultListResults, SmallA34_WeightsGiveTheMeanOfSampleMeans) {
  // Three samples of 2, 5 and 3 tokens packed into one row of tokens.
  Problem p = start(kF32, {10}, 100);
  p.reduction = XENT_REDUCTION_SUM;
  for (const int n : {2, 5, 3}) p.weights.insert(p.weights.end(), static_cast<size_t>(n), 1.0 / (3 * n));
  p.quantize();
  const auto packed = run(p, Mode::kForward);
  ASSERT_TRUE(packed);
  double mean = 0;
  int64_t first = 0;
  for (const int64_t n : {2, 5, 3}) {
    Problem sample = p;
    sample.shape = {n};
    sample.weights.clear();
    sample.reduction = XENT_REDUCTION_MEAN;
    sample.logits.assign(p.logits.begin() + first * 100, p.logits.begin() + (first + n) * 100);
    sample.targets.assign(p.targets.begin() + first, p.targets.begin() + first + n);
    const auto r = run(sample, Mode::kForward);
    ASSERT_TRUE(r);
    mean += value(*r) / 3;
    first += n;
  }
  EXPECT_NEAR(value(*packed), mean, 1e-6 * mean);
  verify(p);
}

TEST_P(FaultListResults, SmallA35_NullStridesArePackedInAnyNumberOfDimensions) {
  for (const std::vector<int64_t> &shape : {std::vector<int64_t>{}, {3}, {2, 3}}) {
    Problem p = start(kF32, shape, 50);
    for (Layout *l : {&p.logits_layout, &p.grad_layout, &p.targets_layout, &p.row_output_layout, &p.upstream_layout}) {
      l->null_strides = true;
    }
    p.upstream = Values{kF32, {2}};
    verify(p);
  }
}

TEST_P(FaultListResults, SmallA36_StridesAndByteOffsetsAreHonoured) {
  // a[:, 1:3] of a (2, 3) array
  Problem p = start(kF32, {2}, 2);
  p.logits_layout.strides = p.grad_layout.strides = {3, 1};
  p.logits_layout.byte_offset = p.logits_layout.misalign = 4;
  verify(p);
}

TEST_P(FaultListResults, SmallA37_StreamsAreTheCallersAndNoMagicNumbers) {
  Problem p = start(kF32, {3}, 50);
  xent_error err = {};
  err.struct_size = sizeof(err);
  if (!cuda()) {
    for (const uintptr_t magic : {uintptr_t{1}, uintptr_t{2}, ~uintptr_t{0}}) {
      Session session(p, device_, nullptr, reinterpret_cast<void *>(magic));
      EXPECT_EQ(session.enqueue(Mode::kForward, &err), XENT_INVALID_ARGUMENT);
      EXPECT_NE(std::string(err.message).find("stream"), std::string::npos) << err.message;
    }
    return;
  }
  // Work on any other stream would end the capture with an error.
  void *stream = device_->make_stream();
  Session session(p, device_, nullptr, stream);
  xent_status status = XENT_INTERNAL;
  void *graph = device_->capture(stream, [&] { status = session.enqueue(Mode::kLossAndGrad, &err); });
  EXPECT_EQ(status, XENT_OK) << err.message;
  device_->destroy_graph(graph);
  device_->destroy_stream(stream);
}

TEST_P(FaultListResults, SmallA39_BoolMasksAreTakenAndOddTypesRefused) {
  Problem p = start(kF32, {8}, 50);
  add_mask(rng_, p, kBool);
  verify(p);
  for (const DLDataType wrong : {DLDataType{6, 8, 2}, DLDataType{6, 1, 1}, DLDataType{kDLUInt, 16, 1},
                                 DLDataType{kDLInt, 8, 1}, DLDataType{kDLFloat, 64, 1}}) {
    Session session(p, device_);
    session.retype_mask(wrong);
    xent_error err = {};
    err.struct_size = sizeof(err);
    EXPECT_EQ(session.enqueue(Mode::kForward, &err), XENT_INVALID_ARGUMENT);
    EXPECT_NE(std::string(err.message).find("mask"), std::string::npos) << err.message;
  }
}

XENT_BACKENDS(FaultListResults);

}  // namespace
}  // namespace xent_test
