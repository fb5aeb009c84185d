// SPDX-FileCopyrightText: the libxent authors
// SPDX-License-Identifier: Apache-2.0

// Ten seconds of conformance on every backend, and ten of split vocabularies.

#include "conformance.hpp"

#include <cstdio>

namespace xent_test::conformance {
namespace {

class Conformance : public BackendTest {
 protected:
  void run(const Target &target, const Limits &limits) {
    Listener listener;
    listener.failure = [](const std::string &text) { ADD_FAILURE() << text; };
    const Report report = campaign(target, limits, listener);
    EXPECT_TRUE(report.passed());
    EXPECT_EQ(report.refused, 0);
    std::printf("%s", report.table().c_str());
  }
};

TEST_P(Conformance, TenSeconds) {
  std::string why;
  const auto target = find_target(name_of(backend()), "", &why);
  ASSERT_TRUE(target) << why;
  Limits limits;
  limits.seconds = 10;
  limits.seed = rng_();
  run(*target, limits);
}

TEST_P(Conformance, TenSecondsOfRanks) {
  std::string why;
  const auto target = find_target(name_of(backend()), "", &why);
  ASSERT_TRUE(target) << why;
  Limits limits;
  limits.seconds = 10;
  limits.seed = rng_();
  limits.ranks = {1, 2, 3, 4, 8};
  run(*target, limits);
}

XENT_BACKENDS(Conformance);

}  // namespace
}  // namespace xent_test::conformance
