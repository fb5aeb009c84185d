// SPDX-FileCopyrightText: the libxent authors
// SPDX-License-Identifier: Apache-2.0

// Loss and gradient in one call.

#include <algorithm>
#include <cmath>

#include "generate.hpp"

namespace xent_test {
namespace {

class LossAndGrad : public BackendTest {};

TEST_P(LossAndGrad, SmallAgreesWithForwardAndBackward) {
  for (const DLDataType dtype : dtypes_of(backend())) {
    for (int i = 0; i < 20; ++i) {
      const Problem p = random_problem(rng_, backend(), dtype, pick(rng_, 1, 12), pick(rng_, 1, 1500));
      const auto two = run(p, Mode::kForwardBackward);
      const auto one = run(p, Mode::kLossAndGrad);
      ASSERT_TRUE(two && one);
      ASSERT_TRUE(check(p, *two, Mode::kForwardBackward)) << p.describe();
      ASSERT_TRUE(check(p, *one, Mode::kLossAndGrad)) << p.describe();
      EXPECT_EQ(one->counts, two->counts);
      EXPECT_EQ(one->predicted, two->predicted);
      EXPECT_EQ(one->divisor, two->divisor);
    }
  }
}

TEST_P(LossAndGrad, SmallMeanKnowsItsDivisorBeforeTheFirstGradient) {
  // The rows that decide the divisor stand last.
  for (const DLDataType dtype : dtypes_of(backend())) {
    Problem p = plain(rng_, backend(), dtype, {40}, 300);
    p.ignore_index = -100;
    for (size_t r = 10; r < 40; ++r) p.targets[r] = -100;
    verify(p);
    p.weights.assign(40, 0.5);
    p.weights[5] = 1000;
    verify(p);
  }
}

TEST_P(LossAndGrad, FewAndManyRowsOfEachLength) {
  for (const DLDataType dtype : dtypes_of(backend())) {
    for (const int64_t vocab : {3, 2000, 33000, 128256}) {
      for (const int64_t rows : {1, 2, 17}) {
        if (rows * vocab > 300000) continue;
        verify(plain(rng_, backend(), dtype, {rows}, vocab));
      }
    }
  }
}

TEST_P(LossAndGrad, SmallWithoutStats) {
  Problem p = plain(rng_, backend(), kF32, {4}, 300);
  p.lse = p.row_counts = false;
  const auto whole = run(p, Mode::kLossAndGrad);
  ASSERT_TRUE(whole);
  Session session(p, device_);
  session.omit_stats();
  xent_error err = {};
  err.struct_size = sizeof(err);
  ASSERT_EQ(session.enqueue(Mode::kLossAndGrad, &err), XENT_OK) << err.message;
  const Result bare = session.collect();
  EXPECT_EQ(bare.loss, whole->loss);
  EXPECT_EQ(bare.grad, whole->grad);
}

// What the CPU backend keeps of a row from its sums to its gradient is up to the number of threads: one thread keeps
// all of these rows, 60 the last block or two, 200 none. Blocks are of 2048 columns.
class Kept : public LossAndGrad {
 protected:
  static constexpr int64_t kBlock = 2048, kVocab = 3 * kBlock + 37, kRows = 9;

  void SetUp() override {
    LossAndGrad::SetUp();
    if (cuda()) GTEST_SKIP() << "threads are the CPU backend's";
  }
  void lower(Problem &p, int64_t row, int64_t block, double by) {
    const auto begin = p.logits.begin() + row * kVocab;
    for (int64_t c = block * kBlock; c < std::min(kVocab, (block + 1) * kBlock); ++c) begin[c] -= by;
  }
  // Rows whose target is in the first, an inner and the last block, blocks far and very far below the others, a block
  // of -inf at each end, a NaN, rows that do not count.
  Problem start(DLDataType dtype) {
    Problem p = plain(rng_, backend(), dtype, {kRows}, kVocab);
    p.reduction = XENT_REDUCTION_NONE;
    p.spare_rows = 200;
    p.ignore_index = -100;
    p.targets = {5, kBlock + 1, kVocab - 1, 2 * kBlock, 2 * kBlock + 9, 3 * kBlock + 9, -100, kVocab, 77};
    for (const int64_t row : {0, 3}) lower(p, row, 1, 29), lower(p, row, 3, 45);
    lower(p, 1, 0, 80), lower(p, 1, 3, 100);
    lower(p, 4, 0, kInf), lower(p, 4, 3, kInf);
    lower(p, 5, 2, kInf);
    p.logits[8 * kVocab + kBlock + 3] = kNaN;
    p.quantize();
    return p;
  }
  // Beside a weight of 1: factors that have a lift, that are nearly subnormal and that are, and 0.
  static void weigh(Problem &p) {
    p.weights = {0x1p-98, 1e20, 1e-36, -0x1p-97, 0.5, 1e-25, 3, 2, 1};
    if (size_of(p.grad_dtype) == 2) p.weights = {0.25, 1e20, 1e-25, -0.01, 0.5, 0, 3, 2, 1};  // none subnormal
    p.quantize();
  }
  // Within the bars, and of the same bits whatever is kept.
  std::optional<Result> verify_kept(Problem p) {
    std::optional<Result> all;
    for (const int32_t threads : {1, 60, 200}) {
      p.threads = threads;
      const auto some = run(p, Mode::kLossAndGrad);
      EXPECT_TRUE(some);
      if (!some) return some;
      if (!all) {
        EXPECT_TRUE(check(p, *some, Mode::kLossAndGrad)) << p.describe();
        all = some;
      }
      EXPECT_TRUE(*some == *all) << p.describe();
    }
    return all;
  }
};

TEST_P(Kept, Options) {
  for (const DLDataType dtype : dtypes_of(backend())) {
    const Problem p = start(dtype);
    const auto with = [&](auto &&change) {
      Problem q = p;
      change(q);
      verify_kept(q);
      if (dtype != kF64) q.grad_dtype = kF32;
      weigh(q);
      verify_kept(q);
    };
    with([](Problem &) {});
    with([](Problem &q) { q.predicted = true; });
    with([](Problem &q) { q.entropy = true; });
    with([](Problem &q) { q.label_smoothing = 0.1; });
    with([](Problem &q) { q.z_loss = 1e-3, q.label_smoothing = 0.1, q.entropy = true; });
    with([](Problem &q) { q.softcap = 20; });
    with([](Problem &q) { q.logit_scale = 0.3; });
    if (dtype == kF16) continue;  // does not hold the logits of such scales
    for (const double scale : {1e-33, 1e30}) {
      with([&](Problem &q) {
        q.logit_scale = scale;
        for (double &x : q.logits) x /= scale;
        q.quantize();
      });
    }
  }
}

TEST_P(Kept, Layouts) {
  for (const DLDataType dtype : dtypes_of(backend())) {
    for (const bool predicted : {false, true}) {  // bfloat16 is read in another order then
      Problem p = start(dtype);
      weigh(p);
      p.predicted = predicted;
      const auto packed = verify_kept(p);
      ASSERT_TRUE(packed);
      const auto same = [&](auto &&change) {
        Problem q = p;
        change(q);
        const auto other = verify_kept(q);
        ASSERT_TRUE(other);
        EXPECT_EQ(other->grad, packed->grad) << q.describe();
      };
      const int64_t size = size_of(dtype), shift = pick(rng_, 1, 15) * size;
      same([&](Problem &q) { q.logits_layout.misalign = q.grad_layout.misalign = shift; });
      same([](Problem &q) { q.logits_layout.strides = {2 * kVocab + 5, 2}; });
      same([](Problem &q) { q.grad_layout.strides = {-2 * kVocab - 3, -2}; });
      same([](Problem &q) { q.overwrite = true; });
      same([&](Problem &q) { q.overwrite = true, q.logits_layout.misalign = shift; });
      same([](Problem &q) { q.overwrite = true, q.logits_layout.strides = {1, kRows + 2}; });
      if (size_of(dtype) != 2) continue;
      p.grad_dtype = kF32;
      const auto wide = verify_kept(p);
      p.grad_layout.misalign = 4 * pick(rng_, 1, 15);
      const auto apart = verify_kept(p);
      ASSERT_TRUE(wide && apart);
      EXPECT_EQ(apart->grad, wide->grad) << p.describe();
    }
  }
}

// Few rows are cut into slices of 16384 columns, which threads share, as many rows at once as occupy them; each of many
// rows is one thread's.
TEST_P(Kept, SharedRowsAndWholeOnes) {
  for (const DLDataType dtype : dtypes_of(backend())) {
    for (const auto &[rows, vocab] : {std::pair<int64_t, int64_t>{2, 32768}, {5, 128256}, {300, 5003}}) {
      if (dtype != kF32 && dtype != kBf16 && vocab == 128256) continue;
      Problem p = plain(rng_, backend(), dtype, {rows}, vocab);
      p.threads = 1;
      const auto one = run(p, Mode::kLossAndGrad);
      ASSERT_TRUE(one);
      EXPECT_TRUE(check(p, *one, Mode::kLossAndGrad));
      for (const int32_t threads : {2, 3, 8, 24}) {
        p.threads = threads;
        const auto many = run(p, Mode::kLossAndGrad);
        ASSERT_TRUE(many);
        EXPECT_TRUE(*one == *many) << p.describe();
      }
    }
  }
}

TEST_P(Kept, NothingOfAnEarlierCall) {
  for (const DLDataType dtype : dtypes_of(backend())) {
    Problem p = start(dtype);
    p.threads = 1;
    Session session(p, device_);
    for (int i = 0; i < 2; ++i) {
      xent_error err = {};
      err.struct_size = sizeof(err);
      ASSERT_EQ(session.enqueue(Mode::kLossAndGrad, &err), XENT_OK) << err.message;
      const Result found = session.collect();
      EXPECT_TRUE(check(p, found, Mode::kLossAndGrad)) << p.describe();
      for (double &x : p.logits) x = round_to(dtype, x + 1);  // plausible ones lie in the workspace
      session.upload(p);
    }
  }
}

TEST_P(Kept, InLittleMemory) {
  for (const DLDataType dtype : {kF32, kF64}) {
    for (const int64_t vocab : {1, 1000, 128256, 1 << 20, 1 << 26}) {
      for (const int64_t rows : {1, 100, 4096}) {
        for (const int32_t threads : {1, 2, 7, 128}) {
          Problem p;
          p.dtype = p.grad_dtype = dtype;
          p.shape = {rows};
          p.vocab = vocab;
          p.threads = threads;
          xent_error err = {};
          err.struct_size = sizeof(err);
          const auto plan = make_plan(p, &err);
          ASSERT_TRUE(plan) << err.message;
          xent_plan_info info = {};
          info.struct_size = sizeof(info);
          ASSERT_EQ(xent_plan_get_info(plan.get(), &info, &err), XENT_OK) << err.message;
          EXPECT_LE(info.loss_and_grad_workspace_bytes, static_cast<size_t>(64 * rows + (1 << 20))) << p.describe();
          EXPECT_LE(info.forward_workspace_bytes, info.loss_and_grad_workspace_bytes);
        }
      }
    }
  }
}

XENT_BACKENDS(LossAndGrad);
XENT_BACKENDS(Kept);

}  // namespace
}  // namespace xent_test
