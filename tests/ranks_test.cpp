// SPDX-FileCopyrightText: the libxent authors
// SPDX-License-Identifier: Apache-2.0

// A vocabulary split over ranks: against the unsplit problem's reference, with every option.

#include "ranks.hpp"

#include <cmath>

#include "generate.hpp"

namespace xent_test {
namespace {

class RanksTest : public BackendTest {
 protected:
  const std::vector<int32_t> counts_ = {1, 2, 3, 4, 8};

  // A random problem whose padding is the ranks'.
  Problem split_problem(DLDataType dtype, int64_t rows, int64_t classes, int32_t ranks) {
    Problem p = random_problem(rng_, backend(), dtype, rows, classes);
    for (double &x : p.logits) {
      if (std::isnan(x)) x = 0.5;  // what was padding
    }
    p.classes = 0;
    p.quantize();
    p.split = draw_split(rng_, classes, ranks);
    return p;
  }
  static Split even(int64_t classes, int32_t ranks) {
    Split split;
    split.offsets = {0};
    for (int32_t r = 1; r <= ranks; ++r) split.offsets.push_back(classes * r / ranks);
    split.padding.assign(static_cast<size_t>(ranks), 0);
    return split;
  }
};

TEST_P(RanksTest, SmallRandomProblems) {
  for (int i = 0; i < 60 && !HasFailure(); ++i) {
    const DLDataType dtype = choose(rng_, dtypes_of(backend()));
    verify_ranks(split_problem(dtype, pick(rng_, 1, 12), pick(rng_, 1, 700), choose(rng_, counts_)));
  }
}

TEST_P(RanksTest, LongRows) {
  for (const int32_t ranks : {2, 8}) {
    for (const DLDataType dtype : dtypes_of(backend())) {
      Problem p = split_problem(dtype, 3, 70001, ranks);
      p.threads = 3;
      verify_ranks(p);
    }
  }
}

// Even shards of a power of two, with everything on.
TEST_P(RanksTest, SmallEvenShardsWithEveryOption) {
  for (const DLDataType dtype : dtypes_of(backend())) {
    Problem p = plain(rng_, backend(), dtype, {2, 5}, 512);
    p.label_smoothing = 0.1;
    p.z_loss = 1e-3;
    p.softcap = 15;
    p.logit_scale = 1.5;
    p.entropy = p.predicted = true;
    add_weights(rng_, p);
    add_mask(rng_, p, kBool);
    add_ignored(rng_, p, -100);
    p.split = even(512, 4);
    verify_ranks(p);
  }
}

// The last ranks have padding alone, or no columns at all.
TEST_P(RanksTest, SmallEmptyShards) {
  for (const int64_t padding : {0, 16}) {
    Problem p = plain(rng_, backend(), kF32, {7}, 40);
    p.label_smoothing = 0.2;
    p.entropy = p.predicted = true;
    p.split.offsets = {0, 0, 40, 40, 40};
    p.split.padding = {padding, padding, padding, padding};
    verify_ranks(p);
  }
}

TEST_P(RanksTest, SmallPartialsOfAnyPitch) {
  for (const int64_t pitch : {2, 3}) {
    Problem p = plain(rng_, backend(), kF32, {5}, 90);
    p.split = even(90, 3);
    p.label_smoothing = 0.1;
    p.entropy = p.predicted = true;
    p.partial_pitch = pitch;
    verify_ranks(p);
  }
}

TEST_P(RanksTest, SmallNoRows) {
  for (const std::vector<int64_t> &shape : {std::vector<int64_t>{0}, {2, 0}}) {
    for (const int32_t reduction : {XENT_REDUCTION_NONE, XENT_REDUCTION_SUM, XENT_REDUCTION_MEAN}) {
      Problem p = plain(rng_, backend(), kF32, shape, 40);
      p.reduction = reduction;
      p.split = even(40, 2);
      verify_ranks(p);
    }
  }
}

// NeMo's and Megatron's smoothing is alpha * V / (V - 1) over the columns of one rank; here K is all ranks' classes.
TEST_P(RanksTest, SmallSmoothingIsOverTheGlobalVocabulary) {
  Problem p = plain(rng_, backend(), kF32, {6}, 96);
  p.label_smoothing = 0.3;
  p.reduction = XENT_REDUCTION_NONE;
  p.split.offsets = {0, 50, 60, 96};
  p.split.padding = {0, 6, 32};
  verify_ranks(p);
  // Every rank's columns get -eps / K: of an unlikely class that is all there is.
  for (double &x : p.logits) x = 0;
  for (int64_t r = 0; r < p.rows(); ++r) {
    p.targets[static_cast<size_t>(r)] = 55;
    p.logits[static_cast<size_t>(r * 96 + 55)] = 200;
  }
  const auto result = run_ranks(p, Door::kComm, Mode::kLossAndGrad);
  ASSERT_TRUE(result);
  for (const int64_t c : {0, 49, 50, 59, 60, 95}) {
    EXPECT_FLOAT_EQ(decode_float(kF32, result->grad[static_cast<size_t>(c)]), -0.3 / 96) << c;
  }
}

// TransformerEngine gives NaN where a shard has nothing above -inf: exp(-inf - -inf).
TEST_P(RanksTest, SmallAShardOfMinusInfinities) {
  for (const DLDataType dtype : dtypes_of(backend())) {
    for (size_t dead = 0; dead < 3; ++dead) {
      Problem p = plain(rng_, backend(), dtype, {4}, 60);
      p.split.offsets = {0, 20, 40, 60};
      p.split.padding = {0, 3, 0};
      p.entropy = p.predicted = true;
      for (int64_t r = 0; r < p.rows(); ++r) {
        p.targets[static_cast<size_t>(r)] = pick(rng_, 0, 19) + 20 * static_cast<int64_t>((dead + 1) % 3);
        for (int64_t c = 0; c < 20; ++c)
          p.logits[static_cast<size_t>(r * 60 + 20 * static_cast<int64_t>(dead) + c)] = -kInf;
      }
      verify_ranks(p);
      const auto result = run_ranks(p, Door::kPartials, Mode::kForwardBackward);
      ASSERT_TRUE(result);
      EXPECT_TRUE(std::isfinite(decode_float(p.acc(), result->loss[0])));
      p.label_smoothing = 0.1;  // +inf, as the mathematics says
      verify_ranks(p);
      p.label_smoothing = 0;
      p.softcap = 5;
      verify_ranks(p);
    }
  }
}

TEST_P(RanksTest, SmallAllShardsOfMinusInfinitiesAndSpecialValues) {
  for (const double special : {-kInf, kInf, kNaN}) {
    for (const double softcap : {0.0, 7.0}) {
      Problem p = plain(rng_, backend(), kF32, {5}, 30);
      p.reduction = XENT_REDUCTION_NONE;
      p.entropy = p.predicted = true;
      p.softcap = softcap;
      p.split.offsets = {0, 7, 7, 30};
      p.split.padding = {2, 0, 0};
      for (int64_t c = 0; c < 30; ++c) p.logits[static_cast<size_t>(30 + c)] = -kInf;
      p.logits[60 + 29] = special;
      p.logits[90] = special;
      verify_ranks(p);
    }
  }
}

TEST_P(RanksTest, SmallLogitsScaledAThousandTimes) {
  for (const DLDataType dtype : dtypes_of(backend())) {
    for (const int32_t ranks : {2, 3, 8}) {
      Problem p = plain(rng_, backend(), dtype, {6}, 333);
      for (double &x : p.logits) x *= 1000;
      p.quantize();
      p.reduction = XENT_REDUCTION_NONE;
      p.entropy = p.predicted = true;
      p.split = draw_split(rng_, 333, ranks);
      verify_ranks(p);
      p.label_smoothing = 0.1;
      verify_ranks(p);
    }
  }
}

// A common offset must not cost digits, whichever rank has the maximum.
TEST_P(RanksTest, SmallOffsetsAndShardsFarApart) {
  for (const double gap : {1e4, 1e30}) {
    Problem p = plain(rng_, backend(), kF32, {8}, 64);
    for (int64_t r = 0; r < p.rows(); ++r) {
      for (int64_t c = 0; c < 64; ++c)
        p.logits[static_cast<size_t>(r * 64 + c)] += gap * static_cast<double>((r + c / 16) % 3);
    }
    p.quantize();
    p.reduction = XENT_REDUCTION_NONE;
    p.entropy = p.predicted = true;
    p.label_smoothing = gap < 1e10 ? 0.1 : 0;
    p.split = even(64, 4);
    verify_ranks(p);
  }
}

// Equal largest logits on several ranks: the lowest class. With softcap many x give one z.
TEST_P(RanksTest, SmallTiesOfPredicted) {
  for (const double softcap : {0.0, 1.0}) {
    Problem p = plain(rng_, backend(), kF32, {50}, 24);
    p.softcap = softcap;
    p.predicted = true;
    for (double &x : p.logits) x = 40 + static_cast<double>(pick(rng_, -2, 0)) * 0.5;
    p.split.offsets = {0, 5, 11, 11, 24};
    p.split.padding = {0, 1, 2, 3};
    verify_ranks(p);
  }
}

// More classes than float32 can count: the partial must carry them exactly.
TEST_P(RanksTest, PredictedBeyondTwoToThe24) {
  const int64_t classes = (int64_t{1} << 24) + 77;
  Problem p;
  p.backend = backend();
  p.shape = {1};
  p.vocab = classes;
  p.targets = {7};
  p.logits.assign(static_cast<size_t>(classes), 0.25);
  p.predicted = true;
  p.logits[static_cast<size_t>(classes - 4)] = 3;
  p.split.offsets = {0, 5, classes};
  p.split.padding = {0, 0};
  const auto result = run_ranks(p, Door::kPartials, Mode::kForward);
  ASSERT_TRUE(result);
  EXPECT_EQ(decode_int(kI64, result->predicted[0]), classes - 4);
}

// The same rows in one batch, one by one, and in halves.
TEST_P(RanksTest, SmallBatchesDoNotMatter) {
  for (int i = 0; i < 10 && !HasFailure(); ++i) {
    Problem p = split_problem(kF32, 6, pick(rng_, 2, 300), static_cast<int32_t>(pick(rng_, 2, 8)));
    p.shape = {6};
    p.reduction = XENT_REDUCTION_NONE;
    p.denominator.reset();
    p.empty_mean_is_nan = false;
    p.upstream.reset();
    p.per_row_upstream = false;
    SCOPED_TRACE(p.describe());
    const auto all = run_ranks(p, Door::kPartials, Mode::kForwardBackward);
    ASSERT_TRUE(all);
    for (size_t r = 0; r < 6; ++r) {
      Problem q = p;
      q.shape = {1};
      const auto row = static_cast<std::ptrdiff_t>(r);
      q.logits.assign(p.logits.begin() + row * p.vocab, p.logits.begin() + (row + 1) * p.vocab);
      q.targets = {p.targets[r]};
      if (p.mask) q.mask->v = {p.mask->v[r]};
      if (!p.weights.empty()) q.weights = {p.weights[r]};
      const auto one = run_ranks(q, Door::kComm, Mode::kForwardBackward);
      ASSERT_TRUE(one);
      EXPECT_EQ(one->loss[0], all->loss[r]);
      EXPECT_EQ(one->stats[0], all->stats[2 * r]);
      EXPECT_EQ(one->stats[1], all->stats[2 * r + 1]);
      EXPECT_TRUE(std::equal(one->grad.begin(), one->grad.end(), all->grad.begin() + row * p.vocab));
    }
  }
}

// Within the bars of the unsplit result, which is near enough to be compared directly.
TEST_P(RanksTest, SmallLikeTheUnsplitResult) {
  Problem p = plain(rng_, backend(), kF32, {9}, 257);
  p.reduction = XENT_REDUCTION_NONE;
  p.entropy = p.predicted = true;
  const auto whole = run(p, Mode::kForwardBackward);
  p.split = draw_split(rng_, 257, 4);
  const auto split = run_ranks(p, Door::kComm, Mode::kForwardBackward);
  ASSERT_TRUE(whole && split);
  EXPECT_EQ(whole->predicted, split->predicted);
  EXPECT_EQ(whole->counts, split->counts);
  for (size_t r = 0; r < 9; ++r) {
    EXPECT_EQ(whole->stats[2 * r], split->stats[2 * r]) << "the maximum is exact";
    EXPECT_NEAR(decode_float(kF32, whole->loss[r]), decode_float(kF32, split->loss[r]), 1e-5);
    EXPECT_NEAR(decode_float(kF32, whole->entropy[r]), decode_float(kF32, split->entropy[r]), 1e-5);
  }
  for (size_t i = 0; i < whole->grad.size(); ++i) {
    ASSERT_NEAR(decode_float(kF32, whole->grad[i]), decode_float(kF32, split->grad[i]), 1e-6);
  }
}

XENT_BACKENDS(RanksTest);

}  // namespace
}  // namespace xent_test
