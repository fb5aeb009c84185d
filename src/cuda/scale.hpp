// SPDX-FileCopyrightText: the libxent authors
// SPDX-License-Identifier: Apache-2.0

// The kernel that scales a gradient, as a plan launches it.
#pragma once

#include "params.cuh"

namespace xent::cuda {

inline constexpr int kScaleThreads = 256;
inline constexpr int kScaleBlocks = 4;                  // an SM
inline constexpr int kScaleVectors = 8;                 // of 16 bytes that a thread has in flight
inline constexpr int kScalePiece = 32 * kScaleVectors;  // vectors of a row that a warp takes at once

// scale_kernel for a gradient of that type: float32, float16 or bfloat16. Its arguments: Params, pieces of a row.
const void *scale_kernel_for(Element type);

}  // namespace xent::cuda
