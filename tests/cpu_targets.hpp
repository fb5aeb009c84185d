// SPDX-FileCopyrightText: the libxent authors
// SPDX-License-Identifier: Apache-2.0

// Tests whose body runs once for each instruction set that was compiled and that the processor has. After Highway's
// foreach_target.h, in its HWY_ONCE part.
#pragma once

#include <gtest/gtest.h>

#include <string>

class CpuTargets : public ::testing::TestWithParam<int64_t> {
 protected:
  void SetUp() override {
    hwy::SetSupportedTargetsForTest(GetParam());
    hwy::GetChosenTarget().Update(hwy::SupportedTargets());
  }
  void TearDown() override {
    hwy::SetSupportedTargetsForTest(0);
    hwy::GetChosenTarget().Update(hwy::SupportedTargets());
  }
};

#define XENT_CPU_TARGETS(suite)                                                                      \
  INSTANTIATE_TEST_SUITE_P(Targets, suite, ::testing::ValuesIn(hwy::SupportedAndGeneratedTargets()), \
                           [](const auto &target) { return std::string(hwy::TargetName(target.param)); })
