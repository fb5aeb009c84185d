// SPDX-FileCopyrightText: the libxent authors
// SPDX-License-Identifier: Apache-2.0

// The mathematics: every option alone and all in combination, every type, every kind of vocabulary size.

#include <cmath>

#include "generate.hpp"

namespace xent_test {
namespace {

class Math : public BackendTest {
 protected:
  // A problem of each type, changed by `change` and compared with the reference.
  template <class F>
  void for_each_dtype(F &&change, int64_t rows = 6, int64_t vocab = 1037) {
    for (const DLDataType dtype : dtypes_of(backend())) {
      Problem p = plain(rng_, backend(), dtype, {rows}, vocab);
      change(p);
      verify(p);
    }
  }
};

const std::vector<int32_t> kReductions = {XENT_REDUCTION_NONE, XENT_REDUCTION_SUM, XENT_REDUCTION_MEAN};

TEST_P(Math, SmallReductions) {
  for (const int32_t reduction : kReductions) {
    for_each_dtype([&](Problem &p) { p.reduction = reduction; });
  }
}

TEST_P(Math, SmallTargetTypes) {
  for (const DLDataType t : {kI32, kI64}) {
    for_each_dtype([&](Problem &p) { p.target_dtype = t; });
  }
}

TEST_P(Math, SmallLabelSmoothing) {
  for (const double s : {1e-3, 0.1, 0.9, 1.0}) {
    for_each_dtype([&](Problem &p) { p.label_smoothing = s; });
  }
}

TEST_P(Math, SmallZLoss) {
  for (const double z : {1e-4, 1e-2, 0.5}) {
    for_each_dtype([&](Problem &p) { p.z_loss = z; });
  }
}

TEST_P(Math, SmallSoftcap) {
  for (const double cap : {0.5, 5.0, 30.0, 1000.0}) {
    for_each_dtype([&](Problem &p) { p.softcap = cap; });
    for_each_dtype([&](Problem &p) {
      p.softcap = cap;
      p.logit_scale = 4;
      draw_logits(rng_, p, Family::kHeavyTailed);
    });
  }
}

TEST_P(Math, SmallSoftcapSlopeTimesALargeScale) {
  // The slope near the cap lies below float32's normal range, and the scale brings the gradient back above the bar.
  for (const double x : {30.0, 45.0, 48.0, 50.0, 52.0, 60.0}) {
    Problem p = plain(rng_, backend(), kF32, {1}, 2);
    p.reduction = XENT_REDUCTION_NONE;
    p.softcap = 32;
    p.logit_scale = 28;
    p.logits = {0, x};
    p.targets = {0};
    verify(p);
  }
}

TEST_P(Math, SmallLogitScale) {
  for (const double scale : {1e-3, 0.0625, 1.0, 1.7, 20.0}) {
    for_each_dtype([&](Problem &p) { p.logit_scale = scale; });
  }
}

TEST_P(Math, SmallWeights) {
  for (const int32_t reduction : kReductions) {
    for_each_dtype([&](Problem &p) {
      p.reduction = reduction;
      add_weights(rng_, p);
    });
  }
}

TEST_P(Math, SmallWeightsThatSumToZero) {
  for_each_dtype([&](Problem &p) { p.weights = {1, -1, 0.5, -0.5, 0, 0}; });
  for_each_dtype([&](Problem &p) { p.weights.assign(6, 0); });
}

TEST_P(Math, SmallPaddedVocabulary) {
  for (const int64_t classes : {1, 31, 32, 1000, 1036}) {
    for_each_dtype([&](Problem &p) {
      p.classes = classes;
      p.label_smoothing = 0.1;
      p.entropy = p.predicted = true;
      draw_targets(rng_, p);
      for (int64_t r = 0; r < p.rows(); ++r) {
        for (int64_t c = classes; c < p.vocab; ++c) {
          p.logits[static_cast<size_t>(r * p.vocab + c)] = c % 2 == 0 ? kNaN : kInf;
        }
      }
    });
  }
}

TEST_P(Math, SmallOptionalOutputs) {
  for (int bits = 0; bits < 16; ++bits) {
    for_each_dtype(
        [&](Problem &p) {
          p.lse = (bits & 1) != 0;
          p.row_counts = (bits & 2) != 0;
          p.entropy = (bits & 4) != 0;
          p.predicted = (bits & 8) != 0;
          p.predicted_dtype = p.counts_dtype = bits < 8 ? kI32 : kI64;
        },
        3, 200);
  }
}

TEST_P(Math, SmallPredictedIsTheLowestOfEqualLogits) {
  for (const double softcap : {0.0, 3.0}) {
    for_each_dtype([&](Problem &p) {
      p.predicted = true;
      p.softcap = softcap;
      for (int64_t r = 0; r < p.rows(); ++r) {
        const int64_t first = pick(rng_, 0, p.vocab - 1);
        for (int64_t c = first; c < p.vocab; c += pick(rng_, 1, 300)) {
          p.logits[static_cast<size_t>(r * p.vocab + c)] = 12;
        }
      }
    });
  }
}

TEST_P(Math, SmallPredictedIsOfTheLogitsNotOfTheirCappedValues) {
  // 2000 and 4000 are the same number behind a cap of 1.
  for_each_dtype([&](Problem &p) {
    p.predicted = true;
    p.softcap = 1;
    for (int64_t r = 0; r < p.rows(); ++r) {
      p.logits[static_cast<size_t>(r * p.vocab + 5)] = 2000;
      p.logits[static_cast<size_t>(r * p.vocab + 900)] = 4000;
    }
  });
}

TEST_P(Math, SmallDenominators) {
  for (const DLDataType type : {kF32, kI32, kI64}) {
    for (const double value : {1.0, 7.0, -3.0, 0.0, 123456.0}) {
      for (const int32_t reduction : {XENT_REDUCTION_SUM, XENT_REDUCTION_MEAN}) {
        for_each_dtype(
            [&](Problem &p) {
              p.reduction = reduction;
              p.denominator = Values{type, {value}};
            },
            3, 77);
      }
    }
  }
  for_each_dtype([&](Problem &p) { p.denominator = Values{kF32, {round_to(kF32, 0.3)}}; }, 3, 77);
  for_each_dtype([&](Problem &p) { p.denominator = Values{kI64, {9007199254740993.0}}; }, 3, 77);
}

TEST_P(Math, SmallUpstreamScalars) {
  for (const DLDataType type : {kF32, kF16, kBf16, kF64}) {
    for (const int32_t reduction : kReductions) {
      for (const double g : {1.0, 0.0, -0.37, 1024.0}) {
        for_each_dtype(
            [&](Problem &p) {
              p.reduction = reduction;
              p.upstream = Values{type, {g}};
              p.quantize();
            },
            3, 77);
      }
    }
  }
}

TEST_P(Math, SmallUpstreamPerRow) {
  for (const DLDataType type : {kF32, kF16, kBf16, kF64}) {
    for (const int64_t stride : {1, 3, -2}) {
      for_each_dtype(
          [&](Problem &p) {
            p.reduction = XENT_REDUCTION_NONE;
            add_upstream(rng_, p, type, true);
            p.upstream_layout.strides = {stride};
            p.upstream_layout.misalign = size_of(type);
          },
          9, 77);
    }
    for_each_dtype(
        [&](Problem &p) {  // one value for all rows through a stride of 0
          p.reduction = XENT_REDUCTION_NONE;
          p.per_row_upstream = true;
          p.upstream = Values{type, std::vector<double>(9, -1.5)};
          p.upstream_layout.strides = {0};
        },
        9, 77);
  }
}

TEST_P(Math, SmallFloat32GradientOf16BitLogits) {
  for (const DLDataType dtype : {kF16, kBf16}) {
    for (const int64_t vocab : {1, 7, 33, 1037}) {
      Problem p = plain(rng_, backend(), dtype, {5}, vocab);
      p.grad_dtype = kF32;
      p.label_smoothing = 0.1;
      verify(p);
    }
  }
}

TEST_P(Math, SmallEvenHalfPrecisionLossScalesDoNotOverflowBefore) {
  // A loss scale of 2^16 is in range for the product, not for float16.
  Problem p = plain(rng_, backend(), kF16, {4}, 500);
  p.upstream = Values{kF32, {65536}};
  verify(p);
}

TEST_P(Math, SmallVocabularies) {
  for (const int64_t vocab : {1, 2, 3, 5, 7, 8, 9, 31, 32, 33, 127, 128, 255, 256, 257}) {
    for (const DLDataType dtype : dtypes_of(backend())) {
      Problem p = plain(rng_, backend(), dtype, {7}, vocab);
      p.entropy = p.predicted = true;
      p.label_smoothing = 0.1;
      verify(p);
    }
  }
}

TEST_P(Math, Vocabularies) {
  for (const int64_t vocab : {1000,  1023,  1024,  1025,  2047,  2048,  2049,  4096,  4097,   8191,  16383,
                              16384, 16385, 32000, 32767, 32768, 32769, 50257, 65537, 128256, 262144}) {
    for (const DLDataType dtype : dtypes_of(backend())) {
      Problem p = plain(rng_, backend(), dtype, {vocab > 60000 ? 2 : 3}, vocab, choose(rng_, kFamilies));
      p.entropy = p.predicted = true;
      if (pick(rng_, 0, 1) == 1) p.label_smoothing = 0.1;
      verify(p);
    }
  }
}

TEST_P(Math, SmallOptionsInCombination) {
  for (int i = 0; i < 60; ++i) {
    for (const DLDataType dtype : dtypes_of(backend())) {
      verify(random_problem(rng_, backend(), dtype, pick(rng_, 1, 9), pick(rng_, 1, 300)));
      if (HasFailure()) return;
    }
  }
}

TEST_P(Math, OptionsInCombination) {
  for (int i = 0; i < 25; ++i) {
    for (const DLDataType dtype : dtypes_of(backend())) {
      const auto vocab = static_cast<int64_t>(std::exp(std::uniform_real_distribution<double>(5, 11.2)(rng_)));
      verify(random_problem(rng_, backend(), dtype, pick(rng_, 1, vocab > 10000 ? 4 : 40), vocab));
      if (HasFailure()) return;
    }
  }
}

TEST_P(Math, ManyRows) {
  for (const DLDataType dtype : dtypes_of(backend())) {
    for (const int32_t reduction : kReductions) {
      Problem p = plain(rng_, backend(), dtype, {5000}, 19);
      p.reduction = reduction;
      add_weights(rng_, p);
      verify(p);
    }
  }
}

TEST_P(Math, SixteenBitLogitsGiveTheLossOfTheSameValuesInFloat32) {
  for (const DLDataType dtype : {kF16, kBf16}) {
    for (const Family family : kFamilies) {
      Problem p = plain(rng_, backend(), dtype, {4}, 5000, family);
      p.reduction = XENT_REDUCTION_NONE;
      const auto narrow = run(p, Mode::kForward);
      p.dtype = p.grad_dtype = kF32;
      const auto wide = run(p, Mode::kForward);
      ASSERT_TRUE(narrow && wide);
      for (size_t r = 0; r < 4; ++r) {
        const double a = decode_float(kF32, narrow->loss[r]), b = decode_float(kF32, wide->loss[r]);
        EXPECT_LE(std::fabs(a - b), 1e-6 * std::fmax(1.0, std::fabs(b))) << p.describe() << " row " << r;
      }
    }
  }
}

XENT_BACKENDS(Math);

}  // namespace
}  // namespace xent_test
