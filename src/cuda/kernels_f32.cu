// SPDX-FileCopyrightText: the libxent authors
// SPDX-License-Identifier: Apache-2.0

#include "kernel_table.cuh"

namespace xent::cuda {

const KernelTable kKernelsF32 = make_table<float>();

}  // namespace xent::cuda
