// SPDX-FileCopyrightText: the libxent authors
// SPDX-License-Identifier: Apache-2.0

// Loss and gradient in one call.

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

XENT_BACKENDS(LossAndGrad);

}  // namespace
}  // namespace xent_test
