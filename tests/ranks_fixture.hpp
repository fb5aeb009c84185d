// SPDX-FileCopyrightText: the libxent authors
// SPDX-License-Identifier: Apache-2.0

// What tests of a split vocabulary on the CPU start from.
#pragma once

#include "generate.hpp"
#include "ranks.hpp"

namespace xent_test {

class RanksFixture : public ::testing::Test {
 protected:
  RanksFixture() {
    std::string why;
    device_ = device_for(Backend::kCpu, &why);
    rng_ = test_rng();
    err_.struct_size = sizeof(err_);
  }

  void says(const std::string &text) {
    EXPECT_NE(std::string(err_.message).find(text), std::string::npos) << err_.message;
  }

  // 64 classes in even shards.
  Problem problem(int32_t ranks) {
    Problem p = plain(rng_, Backend::kCpu, kF32, {5}, 64);
    p.split.offsets = {0};
    for (int32_t r = 1; r <= ranks; ++r) p.split.offsets.push_back(64 * r / ranks);
    p.split.padding.assign(static_cast<size_t>(ranks), 0);
    return p;
  }

  Device *device_ = nullptr;
  Rng rng_;
  xent_error err_ = {};
};

}  // namespace xent_test
