// SPDX-FileCopyrightText: the libxent authors
// SPDX-License-Identifier: Apache-2.0

// The shards of a split vocabulary, as a kernel is given them.
#pragma once

#include <cstdint>

#include "kernel_table.hpp"
#include "params.cuh"

namespace xent::cuda {

inline constexpr int kMostRanks = 256;  // what parameters of a kernel hold with ease

struct Shards {
  int32_t count;
  Tensor partials;  // row rank * rows + r
  int64_t offsets[kMostRanks + 1];
};

inline constexpr int kRanksThreads = 64;  // few, for the rows to spread over the SMs

// ranks_kernel by feature set, and empty_kernel.
extern const void *const kRanksKernels[kFeatureSets];
extern const void *const kEmptyKernel;

}  // namespace xent::cuda
