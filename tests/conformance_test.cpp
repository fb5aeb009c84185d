// SPDX-FileCopyrightText: the libxent authors
// SPDX-License-Identifier: Apache-2.0

// Ten seconds of conformance on every backend.

#include "conformance.hpp"

#include <cstdio>

namespace xent_test::conformance {
namespace {

class Conformance : public BackendTest {};

TEST_P(Conformance, TenSeconds) {
  std::string why;
  const auto target = find_target(name_of(backend()), "", &why);
  ASSERT_TRUE(target) << why;
  Limits limits;
  limits.seconds = 10;
  limits.seed = rng_();
  Listener listener;
  listener.failure = [](const std::string &text) { ADD_FAILURE() << text; };
  const Report report = campaign(*target, limits, listener);
  EXPECT_TRUE(report.passed());
  EXPECT_EQ(report.refused, 0);
  std::printf("%s", report.table().c_str());
}

XENT_BACKENDS(Conformance);

}  // namespace
}  // namespace xent_test::conformance
