// SPDX-FileCopyrightText: the libxent authors
// SPDX-License-Identifier: Apache-2.0

// Faults that users of other implementations reported in public, one test each, named by the fault. The numbers are
// those of this project's list of such reports. Not here, because nothing in this library could have them:
//   A17  class weights mixed into the smoothing term: there are no class weights, a row's weight scales its whole loss
//   A28  float64 arithmetic leaking into kernels: a matter of the compiled code, checked where kernels are built
//   A31, A32  gradients and overlaps of split vocabularies: not part of this interface
//   A38  lost read-only flags: a DLTensor has none; the bindings check the flag of a versioned tensor
// A1 to A3, tensors beyond 2^31 and 2^32 elements, are in fault_list_large_test.cpp.

#include <algorithm>
#include <cmath>

#include "generate.hpp"

namespace xent_test {
namespace {

class FaultList : public BackendTest {
 protected:
  Problem start(DLDataType dtype, std::vector<int64_t> shape, int64_t vocab) {
    return plain(rng_, backend(), dtype, std::move(shape), vocab);
  }
  static double value(const Result &r) { return decode_float(kF32, r.loss[0]); }
};

TEST_P(FaultList, SmallA04_ShortMisalignedRowsAreNotReadPastTheirEnds) {
  for (const DLDataType dtype : dtypes_of(backend())) {
    for (const auto &[rows, vocab] : {std::pair<int64_t, int64_t>{1, 587}, {9, 1017}, {1, 5}, {9, 3}}) {
      for (const Guard guard : {Guard::kPageEnd, Guard::kPageStart, Guard::kCanary}) {
        if (cuda() && guard != Guard::kCanary) continue;
        Problem p = start(dtype, {rows}, vocab);
        p.logits_layout.guard = p.grad_layout.guard = guard;
        p.logits_layout.misalign = p.grad_layout.misalign = size_of(dtype);
        verify(p);
      }
    }
  }
}

TEST_P(FaultList, SmallA05_TargetsNeedNoMoreThanTheirOwnAlignment) {
  for (const DLDataType type : {kI32, kI64}) {
    Problem p = start(kF32, {31}, 90);
    p.target_dtype = type;
    p.targets_layout.misalign = size_of(type);  // labels[1:]
    verify(p);
  }
}

TEST_P(FaultList, A06_VeryLargeVocabulariesAreComputed) {
  for (const DLDataType dtype : {kF32, kBf16}) {
    Problem p = start(dtype, {1}, 1000003);
    p.entropy = p.predicted = true;
    verify(p);
  }
}

TEST_P(FaultList, A07_TheTargetsLogitIsReadBeforeTheGradientLiesOverIt) {
  for (const int64_t vocab : {33, 1037, 40000}) {
    for (const int64_t target : {int64_t{0}, vocab / 2, vocab - 1}) {
      Problem p = start(kF32, {8}, vocab);
      p.targets.assign(8, target);
      p.reduction = XENT_REDUCTION_NONE;
      const auto apart = run(p, Mode::kLossAndGrad);
      p.overwrite = true;
      for (int i = 0; i < 4; ++i) {
        const auto over = run(p, Mode::kLossAndGrad);
        ASSERT_TRUE(apart && over);
        ASSERT_EQ(apart->loss, over->loss);
      }
      verify(p);
    }
  }
}

TEST_P(FaultList, SmallA08_NoRowsIsNoCrashAndNoVocabularyIsAnError) {
  for (const int32_t reduction : {XENT_REDUCTION_NONE, XENT_REDUCTION_SUM, XENT_REDUCTION_MEAN}) {
    Problem p = start(kF32, {0}, 5);
    p.reduction = reduction;
    verify(p);
  }
  Problem p = start(kF32, {5}, 5);
  p.vocab = 0;
  xent_error err = {};
  err.struct_size = sizeof(err);
  EXPECT_EQ(make_plan(p, &err), nullptr);
  EXPECT_EQ(err.status, XENT_INVALID_ARGUMENT);
}

TEST_P(FaultList, A09_NoVocabularyIsTooWideForABlock) {
  for (const int64_t vocab : {65536, 65537, 102400}) verify(start(kBf16, {2}, vocab));
}

TEST_P(FaultList, SmallA10_ViewsOfOneColumnGiveTheLossOfTheirCopies) {
  // x[:, :, 0] of (16, 10, 5) and t[:, 0] of (16, 3)
  Problem p = start(kF32, {16}, 10);
  const auto copies = run(p, Mode::kForwardBackward);
  p.logits_layout.strides = {50, 5};
  p.targets_layout.strides = {3};
  const auto views = run(p, Mode::kForwardBackward);
  ASSERT_TRUE(copies && views);
  EXPECT_TRUE(*copies == *views);
  verify(p);
}

TEST_P(FaultList, SmallA11_NoUnitStrideIsAssumedOfAnyTensor) {
  for (const DLDataType dtype : dtypes_of(backend())) {
    for (const std::vector<int64_t> &logits :
         {std::vector<int64_t>{2000, 500, 1}, {400, 1600, 1}, {0, 400, 1}, {2400, 800, 2}, {1600, 1, 4}}) {
      for (const std::vector<int64_t> &rows : {std::vector<int64_t>{3, 1}, {1, 4}, {10, 2}}) {
        Problem p = start(dtype, {4, 3}, 400);
        p.reduction = XENT_REDUCTION_NONE;
        if (logits[0] == 0) {
          for (int64_t b = 1; b < 4; ++b) std::copy_n(p.logits.begin(), 1200, p.logits.begin() + b * 1200);
        }
        add_weights(rng_, p);
        add_mask(rng_, p, kI32);
        add_upstream(rng_, p, kF32, true);
        p.logits_layout.strides = logits;
        p.grad_layout.strides = {1200, 1, 3};
        p.targets_layout.strides = p.weights_layout.strides = p.mask_layout.strides = rows;
        p.upstream_layout.strides = p.row_output_layout.strides = rows;
        verify(p);
      }
    }
  }
}

TEST_P(FaultList, SmallA12_AllIgnoredGivesGradientsOfZero) {
  for (const bool nan : {false, true}) {
    Problem p = start(kF32, {7}, 100);
    p.ignore_index = -100;
    p.targets.assign(7, -100);
    p.empty_mean_is_nan = nan;
    const auto r = run(p, Mode::kForwardBackward);
    ASSERT_TRUE(r);
    EXPECT_EQ(std::isnan(value(*r)), nan);
    for (const uint64_t bits : r->grad) ASSERT_EQ(decode_float(kF32, bits), 0.0);
  }
}

TEST_P(FaultList, SmallA13_SmoothingLeavesIgnoredRowsOut) {
  for (const int32_t reduction : {XENT_REDUCTION_SUM, XENT_REDUCTION_MEAN}) {
    Problem p = start(kF32, {6}, 50), counted = p;
    p.reduction = reduction;
    p.label_smoothing = 0.2;
    counted = p;
    counted.shape = {3};
    counted.logits.resize(150);
    counted.targets.resize(3);
    p.ignore_index = -100;
    for (size_t r = 3; r < 6; ++r) p.targets[r] = -100;
    const auto with = run(p, Mode::kForward), without = run(counted, Mode::kForward);
    ASSERT_TRUE(with && without);
    EXPECT_NEAR(value(*with), value(*without), 1e-6 * std::fabs(value(*without)));
    verify(p);
  }
}

TEST_P(FaultList, SmallA14_AnIgnoredTargetIndexesNothing) {
  Problem p = start(kF32, {2}, 3);
  p.ignore_index = -100;
  p.targets = {-100, 1};
  p.label_smoothing = 0.1;
  p.weights = {0.2, 0.3};
  p.quantize();
  if (!cuda()) p.logits_layout.guard = p.weights_layout.guard = Guard::kPageStart;
  verify(p);
}

TEST_P(FaultList, SmallA15_AnIgnoreIndexBeyondTheClassesWorksInAllReductions) {
  for (const int32_t reduction : {XENT_REDUCTION_NONE, XENT_REDUCTION_SUM, XENT_REDUCTION_MEAN}) {
    Problem p = start(kF32, {6}, 3);
    p.reduction = reduction;
    p.ignore_index = 255;
    p.targets = {0, 255, 1, 255, 2, 0};
    verify(p);
  }
}

TEST_P(FaultList, SmallA16_ATargetOutOfRangeIsReportedAndHarmless) {
  Problem p = start(kF32, {4}, 3);
  p.reduction = XENT_REDUCTION_NONE;
  p.targets = {0, 254, 2, 1};
  const auto r = run(p, Mode::kForwardBackward);
  ASSERT_TRUE(r);
  EXPECT_TRUE(std::isnan(decode_float(kF32, r->loss[1])));
  EXPECT_EQ(r->counts, (std::vector<uint64_t>{3, 0, 1}));
  verify(p);
  p.targets[1] = 1;  // the backend is as good as before
  verify(p);
}

TEST_P(FaultList, SmallA18_IgnoringAClassNeverRemovesItsColumn) {
  Problem p = start(kF32, {4}, 5);
  p.ignore_index = 2;
  p.targets = {0, 2, 1, 4};
  for (size_t r = 0; r < 4; ++r) p.logits[r * 5 + 2] = 9;  // dominates every denominator
  verify(p);
}

TEST_P(FaultList, SmallA19_PerRowUpstreamGradientIsNotReadAsScalar) {
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

TEST_P(FaultList, SmallA20_UpstreamGradientsOfAnyValueAndStride) {
  for (const int64_t stride : {1, 2, 0, -3}) {
    Problem p = start(kBf16, {8}, 100);
    p.reduction = XENT_REDUCTION_NONE;
    add_upstream(rng_, p, kF32, true);
    if (stride == 0) p.upstream->v.assign(8, -2.5);
    p.upstream_layout.strides = {stride};
    verify(p);
  }
}

TEST_P(FaultList, SmallA21_LossAndGradientShareOneNormaliser) {
  for (const int32_t reduction : {XENT_REDUCTION_NONE, XENT_REDUCTION_SUM, XENT_REDUCTION_MEAN}) {
    Problem p = start(kF32, {20}, 100);
    p.reduction = reduction;
    add_ignored(rng_, p, -100);
    add_mask(rng_, p, kBool);
    verify(p);
  }
}

TEST_P(FaultList, SmallA22_ASecondLossOnTheSameLogitsIsTheFirst) {
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

TEST_P(FaultList, SmallA23_OptionalOutputsAreOptionalOneByOne) {
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

TEST_P(FaultList, SmallA24_TheGradientIsRoundedOnce) {
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

TEST_P(FaultList, A25_AFloat16SumBeyondFloat16IsAccumulatedWider) {
  Problem p = start(kF16, {20, 1025}, 30);
  for (double &x : p.logits) x = round_to(kF16, x * 4);
  p.logits_layout.strides = {30 * 1025, 1, 1025};
  for (const int32_t reduction : {XENT_REDUCTION_SUM, XENT_REDUCTION_MEAN}) {
    p.reduction = reduction;
    verify(p);
  }
}

TEST_P(FaultList, A26_TheMeanIsTheMeanOfTheRows) {
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

TEST_P(FaultList, SmallA27_ACommonOffsetCostsNoDigits) {
  Problem p = start(kF32, {4}, 3);
  p.reduction = XENT_REDUCTION_NONE;
  for (double &x : p.logits) x = round_to(kF32, std::uniform_real_distribution<double>(0, 1)(rng_) - 1e7);
  verify(p);
}

TEST_P(FaultList, SmallA29_NothingIsFetchedToTheHost) {
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

TEST_P(FaultList, A30_BitsAreThoseOfEveryRunAndOfEveryBatch) {
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

TEST_P(FaultList, SmallA33_MicroBatchesWithACommonDenominatorAreTheWholeBatch) {
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

TEST_P(FaultList, SmallA34_WeightsGiveTheMeanOfSampleMeans) {
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

TEST_P(FaultList, SmallA35_NullStridesArePackedInAnyNumberOfDimensions) {
  for (const std::vector<int64_t> &shape : {std::vector<int64_t>{}, {3}, {2, 3}}) {
    Problem p = start(kF32, shape, 50);
    for (Layout *l : {&p.logits_layout, &p.grad_layout, &p.targets_layout, &p.row_output_layout, &p.upstream_layout}) {
      l->null_strides = true;
    }
    p.upstream = Values{kF32, {2}};
    verify(p);
  }
}

TEST_P(FaultList, SmallA36_StridesAndByteOffsetsAreHonoured) {
  // a[:, 1:3] of a (2, 3) array
  Problem p = start(kF32, {2}, 2);
  p.logits_layout.strides = p.grad_layout.strides = {3, 1};
  p.logits_layout.byte_offset = p.logits_layout.misalign = 4;
  verify(p);
}

TEST_P(FaultList, SmallA37_StreamsAreTheCallersAndNoMagicNumbers) {
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

TEST_P(FaultList, SmallA39_BoolMasksAreTakenAndOddTypesRefused) {
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

XENT_BACKENDS(FaultList);

}  // namespace
}  // namespace xent_test
