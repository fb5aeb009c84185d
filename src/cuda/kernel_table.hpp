// SPDX-FileCopyrightText: the libxent authors
// SPDX-License-Identifier: Apache-2.0

// The compiled kernels of one logits type, by the features they carry.
#pragma once

namespace xent::cuda {

// Feature sets that are compiled; a plan takes the first that has all it needs.
inline constexpr int kFeatureSets = 5;

struct KernelTable {
  const void *forward[kFeatureSets];
  const void *both[kFeatureSets];
  const void *split_forward[kFeatureSets];
  const void *split_both[kFeatureSets];
  const void *combine[kFeatureSets];
  const void *backward[2][2];  // [softcap][float32 gradient]
};

extern const KernelTable kKernelsF32, kKernelsF16, kKernelsBf16;

}  // namespace xent::cuda
