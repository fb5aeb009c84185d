// SPDX-FileCopyrightText: the libxent authors
// SPDX-License-Identifier: Apache-2.0

// Bits: the same inputs give the same bits in every run, wherever and beside whatever a row lies.

#include <algorithm>

#include "generate.hpp"

namespace xent_test {
namespace {

class Bitwise : public BackendTest {
 protected:
  Problem start(DLDataType dtype, int64_t rows, int64_t vocab) {
    Problem p = plain(rng_, backend(), dtype, {rows}, vocab, choose(rng_, kFamilies));
    p.reduction = XENT_REDUCTION_NONE;
    p.entropy = p.predicted = true;
    if (pick(rng_, 0, 1) == 1) p.label_smoothing = 0.1;
    if (pick(rng_, 0, 3) == 0) p.softcap = 30;
    return p;
  }

  // The rows [first, first + count) of a problem as a problem of their own.
  static Problem rows_of(const Problem &p, int64_t first, int64_t count) {
    Problem q = p;
    q.shape = {count};
    q.logits.assign(p.logits.begin() + first * p.vocab, p.logits.begin() + (first + count) * p.vocab);
    q.targets.assign(p.targets.begin() + first, p.targets.begin() + first + count);
    return q;
  }

  // Row `i` of `a` and row `j` of `b`, every output.
  static ::testing::AssertionResult same_row(const Result &a, int64_t i, const Result &b, int64_t j, int64_t vocab) {
    const auto same = [&](const std::vector<uint64_t> &x, const std::vector<uint64_t> &y, int64_t width) {
      return std::equal(x.begin() + i * width, x.begin() + (i + 1) * width, y.begin() + j * width);
    };
    if (!same(a.loss, b.loss, 1)) return ::testing::AssertionFailure() << "loss differs, rows " << i << ", " << j;
    if (!same(a.stats, b.stats, 2)) return ::testing::AssertionFailure() << "stats differ, rows " << i << ", " << j;
    if (!same(a.lse, b.lse, 1)) return ::testing::AssertionFailure() << "lse differs, rows " << i << ", " << j;
    if (!same(a.entropy, b.entropy, 1)) return ::testing::AssertionFailure() << "entropy differs, row " << i;
    if (!a.predicted.empty() && !same(a.predicted, b.predicted, 1))
      return ::testing::AssertionFailure() << "predicted differs, row " << i;
    if (!same(a.grad, b.grad, vocab)) return ::testing::AssertionFailure() << "gradient differs, row " << i;
    return ::testing::AssertionSuccess();
  }

  std::vector<Mode> modes_ = {Mode::kForwardBackward, Mode::kLossAndGrad};
};

TEST_P(Bitwise, SmallRunsRepeat) {
  for (const DLDataType dtype : dtypes_of(backend())) {
    for (const int32_t reduction : {XENT_REDUCTION_NONE, XENT_REDUCTION_SUM, XENT_REDUCTION_MEAN}) {
      Problem p = start(dtype, 50, 333);
      p.reduction = reduction;
      add_weights(rng_, p);
      for (const Mode mode : modes_) {
        const auto first = run(p, mode);
        for (int i = 0; i < 5; ++i) {
          const auto again = run(p, mode);
          ASSERT_TRUE(first && again);
          ASSERT_TRUE(*first == *again) << p.describe();
        }
      }
    }
  }
}

TEST_P(Bitwise, LargeRunsRepeat) {
  for (const DLDataType dtype : {kF32, kBf16}) {
    Problem p = start(dtype, 40, 20000);
    p.reduction = XENT_REDUCTION_MEAN;
    for (const Mode mode : modes_) {
      const auto first = run(p, mode);
      for (int i = 0; i < 3; ++i) {
        const auto again = run(p, mode);
        ASSERT_TRUE(first && again);
        ASSERT_TRUE(*first == *again) << p.describe();
      }
    }
  }
}

TEST_P(Bitwise, ARowAloneIsTheRowInABatch) {
  for (const DLDataType dtype : dtypes_of(backend())) {
    // Of whole vectors and not, of few lanes and of many: the alignment chooses other code for the same bits.
    for (const int64_t vocab : {9, 64, 1000, 1037, 8192, 40000}) {
      const Problem p = start(dtype, 9, vocab);
      for (const Mode mode : modes_) {
        const auto batch = run(p, mode);
        ASSERT_TRUE(batch);
        for (const int64_t r : {0, 4, 8}) {
          Problem alone = rows_of(p, r, 1);
          alone.logits_layout.misalign = pick(rng_, 0, 15) * size_of(dtype);
          alone.grad_layout.misalign = pick(rng_, 0, 15) * size_of(dtype);
          const auto one = run(alone, mode);
          ASSERT_TRUE(one);
          EXPECT_TRUE(same_row(*batch, r, *one, 0, vocab)) << alone.describe();
        }
      }
    }
  }
}

TEST_P(Bitwise, ARowOfAGradientLargerThanTheCaches) {
  // One thread: what counts on a CPU are the caches of the threads' cores.
  for (const DLDataType dtype : {kF32, kBf16}) {
    const int64_t rows = dtype == kF32 ? 90 : 180, vocab = 50257;
    Problem p = start(dtype, rows, vocab);
    p.threads = 1;
    p.predicted = false;  // bfloat16 is read in pairs then
    p.grad_layout.strides = {vocab + 3, 1};
    p.grad_layout.misalign = pick(rng_, 0, 15) * size_of(dtype);
    p.ignore_index = p.targets[5];
    for (const Mode mode : modes_) {
      const auto many = run(p, mode);
      ASSERT_TRUE(many);
      for (const int64_t r : {int64_t{0}, int64_t{5}, rows - 1}) {
        const auto one = run(rows_of(p, r, 1), mode);
        ASSERT_TRUE(one);
        EXPECT_TRUE(same_row(*many, r, *one, 0, vocab)) << p.describe();
      }
    }
  }
}

TEST_P(Bitwise, OneRowIsTheRowAmongThousands) {
  // Few rows and many rows take different paths.
  for (const DLDataType dtype : {kF32, kBf16}) {
    for (const int64_t vocab : std::vector<int64_t>{257, cuda() ? 3001 : 1501, cuda() ? 128256 : 65}) {
      const int64_t rows = vocab > 100000 ? 300 : 2000;
      Problem p = start(dtype, rows, vocab);
      for (const Mode mode : modes_) {
        const auto many = run(p, mode);
        ASSERT_TRUE(many);
        for (const int64_t count : {1, 2, 7, 33}) {
          const int64_t first = pick(rng_, 0, rows - count);
          const auto few = run(rows_of(p, first, count), mode);
          ASSERT_TRUE(few);
          for (int64_t i = 0; i < count; ++i) ASSERT_TRUE(same_row(*many, first + i, *few, i, vocab)) << p.describe();
        }
      }
    }
  }
}

TEST_P(Bitwise, OneLongRowIsTheRowAmongMany) {
  for (const DLDataType dtype : {kF32, kF16}) {
    const int64_t vocab = 128256;
    Problem p = start(dtype, 12, vocab);
    for (const Mode mode : modes_) {
      const auto many = run(p, mode);
      const auto one = run(rows_of(p, 11, 1), mode);
      ASSERT_TRUE(many && one);
      EXPECT_TRUE(same_row(*many, 11, *one, 0, vocab)) << p.describe();
    }
  }
}

// More rows than a GPU spreads over its SMs (eight times their number in forward, twice in loss_and_grad): there a warp
// or a block has whole rows.
TEST_P(Bitwise, ManyLongRows) {
  struct Case {
    DLDataType dtype;
    int64_t rows, vocab;
  };
  for (const Case &c :
       {Case{kBf16, 3000, 9001}, {kF16, 1100, 32000}, {kF16, 450, 50257}, {kBf16, 310, 128256}, {kF32, 1080, 66001}}) {
    if (!cuda() && c.vocab > 40000) continue;  // OneLongRowIsTheRowAmongMany does for threads
    const int64_t rows = cuda() ? c.rows : 5;
    Problem p = start(c.dtype, rows, c.vocab);
    p.ignore_index = -100;
    for (size_t row = 0; row < p.targets.size(); ++row) {
      if (row % 7 == 3) p.targets[row] = -100;
    }
    p.overwrite = pick(rng_, 0, 1) == 1;
    for (const Mode mode : modes_) {
      const auto many = run(p, mode);
      ASSERT_TRUE(many);
      EXPECT_TRUE(check(p, *many, mode));
      for (const int64_t row : {int64_t{0}, int64_t{3}, rows / 2, rows - 1}) {
        const auto one = run(rows_of(p, row, 1), mode);
        ASSERT_TRUE(one);
        EXPECT_TRUE(same_row(*many, row, *one, 0, c.vocab)) << p.describe();
      }
      if (HasFailure()) return;
    }
  }
}

TEST_P(Bitwise, AnyNumberOfThreads) {
  if (cuda()) GTEST_SKIP() << "threads are the CPU backend's";
  for (const DLDataType dtype : dtypes_of(backend())) {
    for (const auto &[rows, vocab] : {std::pair<int64_t, int64_t>{40, 5003}, {1, 70001}, {3, 128256}}) {
      Problem p = start(dtype, rows, vocab);
      if (rows > 1) p.reduction = XENT_REDUCTION_MEAN;
      for (const Mode mode : modes_) {
        p.threads = 1;
        const auto one = run(p, mode);
        for (int32_t threads = 2; threads <= 8; ++threads) {
          p.threads = threads;
          const auto many = run(p, mode);
          ASSERT_TRUE(one && many);
          ASSERT_TRUE(*one == *many) << p.describe();
        }
      }
    }
  }
}

TEST_P(Bitwise, SmallStridedIsPacked) {
  for (const DLDataType dtype : dtypes_of(backend())) {
    for (const int64_t vocab : {9, 1037, 3000}) {
      Problem p = start(dtype, 6, vocab);
      for (const Mode mode : modes_) {
        const auto packed = run(p, mode);
        ASSERT_TRUE(packed);
        for (const int64_t column : {1, 2, 3, -1}) {
          Problem q = p;
          const int64_t width = (column < 0 ? -column : column) * vocab;
          q.logits_layout.strides = {width + 5, column};
          q.grad_layout.strides = {width + 2, column == 3 ? 1 : column};
          const auto strided = run(q, mode);
          ASSERT_TRUE(strided);
          EXPECT_TRUE(*packed == *strided) << q.describe();
        }
      }
    }
  }
}

TEST_P(Bitwise, SmallPaddingColumnsChangeNothing) {
  for (const DLDataType dtype : dtypes_of(backend())) {
    Problem p = start(dtype, 4, 500);
    p.classes = 500;
    const auto exact = run(p, Mode::kForward);
    Problem q = p;
    q.vocab = 512;
    q.logits.clear();
    for (int64_t r = 0; r < 4; ++r) {
      q.logits.insert(q.logits.end(), p.logits.begin() + r * 500, p.logits.begin() + (r + 1) * 500);
      q.logits.insert(q.logits.end(), 12, kNaN);
    }
    const auto padded = run(q, Mode::kForward);
    q.logits.back() = 7;
    const auto other = run(q, Mode::kForward);
    ASSERT_TRUE(exact && padded && other);
    EXPECT_TRUE(*padded == *other) << "padding was read";
    verify(q);
  }
}

TEST_P(Bitwise, SmallBackwardTwice) {
  for (const DLDataType dtype : dtypes_of(backend())) {
    const Problem p = start(dtype, 5, 1037);
    Session session(p, device_);  // collect() sees that the logits are as they were
    xent_error err = {};
    err.struct_size = sizeof(err);
    ASSERT_EQ(session.enqueue(Mode::kForwardBackward, &err), XENT_OK) << err.message;
    const Result first = session.collect();
    ASSERT_EQ(session.enqueue(Mode::kForwardBackward, &err), XENT_OK) << err.message;
    EXPECT_TRUE(first == session.collect());
  }
}

TEST_P(Bitwise, SmallForwardDoesNotDependOnWhetherBackwardFollows) {
  for (const DLDataType dtype : dtypes_of(backend())) {
    const Problem p = start(dtype, 5, 1037);
    const auto alone = run(p, Mode::kForward);
    const auto both = run(p, Mode::kForwardBackward);
    ASSERT_TRUE(alone && both);
    EXPECT_EQ(alone->loss, both->loss);
    EXPECT_EQ(alone->stats, both->stats);
  }
}

TEST_P(Bitwise, SmallGarbageInTheWorkspace) {
  // upload() sends back what the last call left there.
  Problem p = start(kF32, 20, 333);
  p.reduction = XENT_REDUCTION_MEAN;
  Session session(p, device_);
  xent_error err = {};
  err.struct_size = sizeof(err);
  ASSERT_EQ(session.enqueue(Mode::kForwardBackward, &err), XENT_OK) << err.message;
  const Result first = session.collect();
  session.upload(p);
  ASSERT_EQ(session.enqueue(Mode::kForwardBackward, &err), XENT_OK) << err.message;
  EXPECT_TRUE(first == session.collect());
}

XENT_BACKENDS(Bitwise);

}  // namespace
}  // namespace xent_test
