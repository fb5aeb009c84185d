// SPDX-FileCopyrightText: the libxent authors
// SPDX-License-Identifier: Apache-2.0

// The compiled kernels of one logits type, by the features they carry.
#pragma once

namespace xent::cuda {

// Feature sets that are compiled; a plan takes the first that has all it needs.
inline constexpr int kFeatureSets = 5;

// How the rows of a call lie, for the kernels that hold them in registers.
enum class Layout {
  any,
  adjacent,  // one stride apart, what comes one a row too, columns adjacent, and a gradient of their type that lies so
             // too and begins in every row where the logits do between two multiples of 16 bytes
  even,      // and all are whole aligned vectors of 16 bytes, and the gradient has no padding: nearly every call
};
inline constexpr int kLayouts = 3;

// The kernels of one work, by feature set.
struct SweepKernels {
  const void *rows[kFeatureSets];
  const void *split[kFeatureSets];
  const void *combine[kFeatureSets];
  const void *team[kLayouts][kFeatureSets];
};

struct KernelTable {
  SweepKernels forward, both;
  const void *row[kLayouts][kFeatureSets];           // forward: a block a row; of any layout there is none
  const void *block[kLayouts][kFeatureSets];         // loss and gradient
  const void *stash[kLayouts][kFeatureSets];         // the same, with units in shared memory, but for any layout
  const void *row_pieces[kLayouts][kFeatureSets];    // few rows of either, whose parts combine_kernel puts together;
  const void *block_shares[kLayouts][kFeatureSets];  // of any layout there are none
  const void *backward[2][2];                        // [softcap][float32 gradient]
  const void *unit[kLayouts][2];                     // [][softcap]: backward; of any layout there is none
  const void *team_backward[kLayouts][2];            // the same, of short rows
};

extern const KernelTable kKernelsF32, kKernelsF16, kKernelsBf16;

}  // namespace xent::cuda
