// SPDX-FileCopyrightText: the libxent authors
// SPDX-License-Identifier: Apache-2.0

// Faults that users of other implementations reported in public, one test each, named by the fault. The numbers are
// those of this project's list of such reports. Not here, because nothing in this library could have them:
//   A17  class weights mixed into the smoothing term: there are no class weights, a row's weight scales its whole loss
//   A28  float64 arithmetic leaking into kernels: a matter of the compiled code, checked where kernels are built
//   A31, A32  gradients and overlaps of split vocabularies: not part of this interface
//   A38  lost read-only flags: a DLTensor has none; the bindings check the flag of a versioned tensor
// A1 to A3, tensors beyond 2^31 and 2^32 elements, are in fault_list_large_test.cpp; A19 and later in
// fault_list_results_test.cpp.

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

XENT_BACKENDS(FaultList);

}  // namespace
}  // namespace xent_test
