// SPDX-FileCopyrightText: the libxent authors
// SPDX-License-Identifier: Apache-2.0

// The compiled kernels of one logits type, by the features they carry.
#pragma once

namespace xent::cuda {

// Feature sets that are compiled; a plan takes the first that has all it needs.
inline constexpr int kFeatureSets = 5;

// The kernels of one work, by feature set.
struct SweepKernels {
  const void *rows[kFeatureSets];
  const void *split[kFeatureSets];
  const void *combine[kFeatureSets];
  const void *team[2][kFeatureSets];  // [rows are even, see held.cuh]
};

struct KernelTable {
  SweepKernels forward, both;
  const void *block[2][kFeatureSets];  // [rows are even]: loss and gradient
  const void *backward[2][2];          // [softcap][float32 gradient]
  const void *team_backward[2][2];     // [softcap][rows are even]
};

extern const KernelTable kKernelsF32, kKernelsF16, kKernelsBf16;

}  // namespace xent::cuda
