// SPDX-FileCopyrightText: the libxent authors
// SPDX-License-Identifier: Apache-2.0

#include "kernel_table.cuh"

namespace xent::cuda {

const KernelTable kKernelsF16 = make_table<f16>();

}  // namespace xent::cuda
