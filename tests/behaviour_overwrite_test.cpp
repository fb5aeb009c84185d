// SPDX-FileCopyrightText: the libxent authors
// SPDX-License-Identifier: Apache-2.0

// The gradient over the logits.

#include "generate.hpp"

namespace xent_test {
namespace {

class Overwrite : public BackendTest {};

TEST_P(Overwrite, SmallIsTheGradientOfItsOwnBuffer) {
  for (const DLDataType dtype : dtypes_of(backend())) {
    for (const int64_t vocab : {1, 2, 9, 33, 300, 1037}) {
      for (const Mode mode : {Mode::kForwardBackward, Mode::kLossAndGrad}) {
        Problem p = plain(rng_, backend(), dtype, {5}, vocab);
        p.label_smoothing = 0.1;
        const auto apart = run(p, mode);
        p.overwrite = true;
        p.logits_layout.misalign = pick(rng_, 0, 15) * size_of(dtype);
        const auto over = run(p, mode);
        ASSERT_TRUE(apart && over);
        EXPECT_TRUE(*apart == *over) << p.describe();
        EXPECT_TRUE(check(p, *over, mode)) << p.describe();
      }
    }
  }
}

TEST_P(Overwrite, LongRows) {
  for (const DLDataType dtype : dtypes_of(backend())) {
    for (const int64_t rows : {1, 3}) {
      Problem p = plain(rng_, backend(), dtype, {rows}, 70001);
      p.overwrite = true;
      verify(p);
    }
  }
}

TEST_P(Overwrite, SmallStrided) {
  for (const DLDataType dtype : dtypes_of(backend())) {
    for (const int64_t column : {1, 2, -1}) {
      Problem p = plain(rng_, backend(), dtype, {2, 3}, 300);
      p.overwrite = true;
      if (column == 1) p.logits_layout.strides = {3 * 305, 305, 1};
      if (column == 2) p.logits_layout.strides = {1, 2 * 301, 2};
      if (column == -1) p.logits_layout.strides = {3 * 305, -305, -1};
      verify(p);
    }
  }
}

TEST_P(Overwrite, SmallThePlanAllowsABufferOfItsOwnToo) {
  Problem p = plain(rng_, backend(), kF32, {4}, 300);
  p.overwrite = true;
  xent_error err = {};
  err.struct_size = sizeof(err);
  const auto plan = make_plan(p, &err);
  ASSERT_TRUE(plan) << err.message;
  p.overwrite = false;
  Session session(p, device_, plan);
  ASSERT_EQ(session.enqueue(Mode::kForwardBackward, &err), XENT_OK) << err.message;
  EXPECT_TRUE(check(p, session.collect(), Mode::kForwardBackward));
}

TEST_P(Overwrite, SmallWithoutTheFlagItIsRefused) {
  Problem p = plain(rng_, backend(), kF32, {4}, 300);
  xent_error err = {};
  err.struct_size = sizeof(err);
  const auto plan = make_plan(p, &err);
  ASSERT_TRUE(plan) << err.message;
  p.overwrite = true;
  Session session(p, device_, plan);
  EXPECT_EQ(session.enqueue(Mode::kLossAndGrad, &err), XENT_INVALID_ARGUMENT);
  EXPECT_NE(std::string(err.message).find("grad_logits"), std::string::npos) << err.message;
  session.collect();
}

TEST_P(Overwrite, SmallIgnoredAndSpecialRows) {
  for (const DLDataType dtype : dtypes_of(backend())) {
    Problem p = plain(rng_, backend(), dtype, {5}, 300);
    p.overwrite = true;
    p.reduction = XENT_REDUCTION_NONE;
    p.ignore_index = -100;
    p.targets[1] = -100;
    p.targets[2] = 300;
    for (int64_t c = 0; c < 300; ++c) p.logits[static_cast<size_t>(300 + c)] = kNaN;
    p.logits[3 * 300 + 7] = kInf;
    verify(p);
  }
}

XENT_BACKENDS(Overwrite);

}  // namespace
}  // namespace xent_test
