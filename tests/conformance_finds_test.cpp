// SPDX-FileCopyrightText: the libxent authors
// SPDX-License-Identifier: Apache-2.0

// What conformance must find in a backend that is wrong.

#include <cstdlib>

#include "conformance.hpp"

namespace xent_test::conformance {
namespace {

// A backend that is right but for one fault.
class ConformanceFinds : public ::testing::Test {
 protected:
  static void SetUpTestSuite() {
    std::string why;
    target_ = find_target("", XENT_TEST_PLUGINS "/reference.so", &why);
    if (!target_) FAIL() << why;
  }
  void SetUp() override { ASSERT_TRUE(target_); }
  void TearDown() override { unsetenv("XENT_TEST_FAULT"); }

  Report with_fault(const char *fault, int64_t problems) {
    setenv("XENT_TEST_FAULT", fault, 1);
    Limits limits;
    limits.problems = problems;
    limits.seed = 2;  // fixed, unlike elsewhere: how far a failure shrinks depends on the problem that it was found in
    limits.reported = 1;
    return campaign(*target_, limits);
  }

  static std::optional<Target> target_;
};
std::optional<Target> ConformanceFinds::target_;

TEST_F(ConformanceFinds, NothingInASoundPlugin) {
  EXPECT_EQ(target_->name, "reference.cpu");
  EXPECT_EQ(target_->device, Backend::kCpu);
  const Report report = with_fault("", 150);
  EXPECT_TRUE(report.passed()) << (report.failures.empty() ? "" : report.failures[0].verdict.what);
  EXPECT_EQ(report.all.drawn, 150);
}

TEST_F(ConformanceFinds, SmoothingOverThePaddingAndNothingElse) {
  const Report report = with_fault("smoothing", 150);
  ASSERT_FALSE(report.failures.empty());
  const Shrunk &small = report.failures[0];
  const Problem &p = small.problem;
  EXPECT_EQ(small.verdict.kind, Kind::kValue);
  EXPECT_NE(small.verdict.what.find("gradient at row 0 column"), std::string::npos) << small.verdict.what;
  // What the fault needs is still there, what it does not need is gone.
  EXPECT_NE(p.label_smoothing, 0);
  EXPECT_LT(p.real_classes(), p.vocab);
  EXPECT_EQ(p.rows(), 1);
  EXPECT_LE(p.vocab, 3);
  EXPECT_EQ(p.softcap, 0);
  EXPECT_EQ(p.z_loss, 0);
  EXPECT_EQ(p.logit_scale, 0);
  EXPECT_TRUE(p.weights.empty());
  EXPECT_FALSE(p.mask || p.denominator || p.ignore_index);
  EXPECT_TRUE(p.logits_layout.strides.empty());
  const Count &guilty = report.features.at("padded vocabulary");
  EXPECT_EQ(guilty.failed, report.all.failed);
}

TEST_F(ConformanceFinds, ARowThatDependsOnItsNeighbours) {
  const Report report = with_fault("neighbour", 100);
  ASSERT_FALSE(report.failures.empty());
  EXPECT_EQ(report.failures[0].verdict.kind, Kind::kAlone);
  EXPECT_EQ(report.failures[0].problem.rows(), 2);
  EXPECT_EQ(report.failures[0].problem.vocab, 1);
}

TEST_F(ConformanceFinds, AResultThatDoesNotRepeat) {
  const Report report = with_fault("repeat", 60);
  ASSERT_FALSE(report.failures.empty());
  EXPECT_EQ(report.failures[0].verdict.kind, Kind::kRepeat) << report.failures[0].verdict.what;
}

TEST_F(ConformanceFinds, AWriteToAnInput) {
  const Report report = with_fault("input", 60);
  ASSERT_FALSE(report.failures.empty());
  EXPECT_EQ(report.failures[0].verdict.kind, Kind::kWrite) << report.failures[0].verdict.what;
  EXPECT_EQ(report.failures[0].problem.vocab, 3);
}

TEST_F(ConformanceFinds, WhatAPluginRefuses) {
  const Report report = with_fault("type", 60);
  EXPECT_TRUE(report.passed());
  EXPECT_GT(report.refused, 0);
  EXPECT_EQ(report.types.at("bfloat16").drawn, 0);
}

}  // namespace
}  // namespace xent_test::conformance
