// SPDX-FileCopyrightText: the libxent authors
// SPDX-License-Identifier: Apache-2.0

// Rows that do not count, and what is counted.

#include "generate.hpp"

namespace xent_test {
namespace {

class Ignore : public BackendTest {
 protected:
  void fill_row(Problem &p, int64_t row, double value) {
    for (int64_t c = 0; c < p.vocab; ++c) p.logits[static_cast<size_t>(row * p.vocab + c)] = value;
  }
};

TEST_P(Ignore, SmallIndexMayBeAnyInteger) {
  for (const int64_t index : {int64_t{-100}, int64_t{-1}, int64_t{0}, int64_t{3}, int64_t{76}, int64_t{77},
                              int64_t{255}, INT64_MIN, INT64_MAX, int64_t{1} << 32, (int64_t{1} << 32) + 3}) {
    for (const int32_t reduction : {XENT_REDUCTION_NONE, XENT_REDUCTION_SUM, XENT_REDUCTION_MEAN}) {
      for (const double s : {0.0, 0.2}) {
        Problem p = plain(rng_, backend(), kF32, {12}, 77);
        p.reduction = reduction;
        p.label_smoothing = s;
        p.entropy = p.predicted = true;
        add_ignored(rng_, p, index);
        p.targets[3] = index;
        verify(p);
      }
    }
  }
}

TEST_P(Ignore, SmallAnInt32TargetIsNotAnInt64IndexOfTheSameLowBits) {
  for (const int64_t index : {(int64_t{1} << 32) + 3, INT64_MIN + 3, int64_t{4294967295}}) {
    Problem p = plain(rng_, backend(), kF32, {4}, 77);
    p.target_dtype = kI32;
    p.ignore_index = index;
    p.targets = {3, 3, 5, 0};
    verify(p);
  }
  Problem p = plain(rng_, backend(), kF32, {4}, 77);
  p.target_dtype = kI32;
  p.ignore_index = 4294967295;
  p.targets = {-1, 3, 5, 0};  // out of range, not ignored
  verify(p);
}

TEST_P(Ignore, SmallWithoutAnIndexNothingIsIgnored) {
  Problem p = plain(rng_, backend(), kF32, {4}, 77);
  p.targets = {0, 0, 1, 0};
  verify(p);
}

TEST_P(Ignore, SmallMasksOfEveryType) {
  for (const DLDataType mask : {kBool, kU8, kI32, kI64, kF32}) {
    for (const DLDataType dtype : dtypes_of(backend())) {
      Problem p = plain(rng_, backend(), dtype, {24}, 45);
      p.entropy = p.predicted = true;
      add_mask(rng_, p, mask);
      if (pick(rng_, 0, 1) == 1) add_ignored(rng_, p, -100);
      verify(p);
    }
  }
}

TEST_P(Ignore, SmallStridedMasks) {
  for (const DLDataType mask : {kBool, kU8, kI32, kI64, kF32}) {
    for (const int64_t stride : {2, -1}) {
      Problem p = plain(rng_, backend(), kF32, {24}, 45);
      add_mask(rng_, p, mask);
      p.mask_layout.strides = {stride};
      p.mask_layout.misalign = size_of(mask);
      verify(p);
    }
  }
}

TEST_P(Ignore, SmallWhateverTheRowHolds) {
  for (const DLDataType dtype : dtypes_of(backend())) {
    for (const double junk : {kNaN, kInf, -kInf}) {
      for (const bool by_mask : {false, true}) {
        for (const int32_t reduction : {XENT_REDUCTION_NONE, XENT_REDUCTION_SUM, XENT_REDUCTION_MEAN}) {
          Problem p = plain(rng_, backend(), dtype, {5}, 1037);
          p.reduction = reduction;
          p.label_smoothing = 0.1;
          p.z_loss = 1e-3;
          p.entropy = p.predicted = true;
          for (const int64_t r : {0, 3}) {
            fill_row(p, r, junk);
            if (!by_mask) p.targets[static_cast<size_t>(r)] = -100;
          }
          if (by_mask) {
            p.mask = Values{kBool, {0, 1, 1, 0, 1}};
          } else {
            p.ignore_index = -100;
          }
          // Not even a NaN that would multiply the row.
          p.weights = {kNaN, 1, 2, kInf, 0.5};
          if (reduction == XENT_REDUCTION_NONE) {
            p.per_row_upstream = true;
            p.upstream = Values{kF32, {kNaN, 1, -1, kInf, 2}};
          }
          verify(p);
        }
      }
    }
  }
}

TEST_P(Ignore, SmallAMaskedRowMayHaveAnyTarget) {
  Problem p = plain(rng_, backend(), kF32, {6}, 77);
  p.mask = Values{kU8, {0, 0, 0, 0, 1, 1}};
  p.targets = {-1, 77, INT64_MIN, INT64_MAX, 3, 4};
  p.entropy = p.predicted = true;
  verify(p);
}

TEST_P(Ignore, SmallAllIgnored) {
  for (const DLDataType dtype : dtypes_of(backend())) {
    for (const bool nan : {false, true}) {
      for (const int32_t reduction : {XENT_REDUCTION_NONE, XENT_REDUCTION_SUM, XENT_REDUCTION_MEAN}) {
        if (nan && reduction != XENT_REDUCTION_MEAN) continue;
        for (const bool denominator : {false, true}) {
          if (denominator && reduction == XENT_REDUCTION_NONE) continue;
          Problem p = plain(rng_, backend(), dtype, {5}, 45);
          p.reduction = reduction;
          p.empty_mean_is_nan = nan;
          p.ignore_index = -100;
          p.targets.assign(5, -100);
          p.entropy = p.predicted = true;
          p.upstream = Values{kF32, {2}};
          if (denominator) p.denominator = Values{kF32, {4}};
          verify(p);
        }
      }
    }
  }
}

TEST_P(Ignore, SmallTheNaNOfAnEmptyMeanIsNotThatOfAZeroDivisor) {
  Problem p = plain(rng_, backend(), kF32, {3}, 45);
  p.empty_mean_is_nan = true;
  p.weights = {0, 0, 0};  // the rows count, their weights sum to 0: the loss is 0
  verify(p);
  p.weights.clear();
  verify(p);  // rows count: an ordinary mean
}

TEST_P(Ignore, SmallARowOfWeightZeroCountsAndItsNaNStays) {
  Problem p = plain(rng_, backend(), kF32, {4}, 45);
  p.reduction = XENT_REDUCTION_NONE;
  p.weights = {1, 0, 0, 2};
  fill_row(p, 2, kNaN);
  verify(p);
}

TEST_P(Ignore, SmallADivisorOfZeroSilencesEvenNaN) {
  Problem p = plain(rng_, backend(), kF32, {4}, 45);
  p.weights = {1, -1, 0.5, -0.5};
  fill_row(p, 2, kNaN);
  verify(p);
  p.weights.clear();
  p.denominator = Values{kI32, {0}};
  verify(p);
}

TEST_P(Ignore, SmallCountsAreDisjoint) {
  for (const DLDataType type : {kI32, kI64}) {
    Problem p = plain(rng_, backend(), kF32, {200}, 20);
    p.reduction = XENT_REDUCTION_NONE;
    p.counts_dtype = type;
    add_ignored(rng_, p, 5);
    add_mask(rng_, p, kBool);
    for (int i = 0; i < 20; ++i) p.targets[static_cast<size_t>(pick(rng_, 0, 199))] = choose<int64_t>(rng_, {-1, 20});
    verify(p);
  }
}

TEST_P(Ignore, ManyRowsAreCountedExactly) {
  Problem p = plain(rng_, backend(), kF32, {70001}, 2);
  p.reduction = XENT_REDUCTION_MEAN;
  add_ignored(rng_, p, -100);
  verify(p);
}

XENT_BACKENDS(Ignore);

}  // namespace
}  // namespace xent_test
