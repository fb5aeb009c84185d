// SPDX-FileCopyrightText: the libxent authors
// SPDX-License-Identifier: Apache-2.0

#include "kernel_table.cuh"

namespace xent::cuda {

const KernelTable kKernelsBf16 = make_table<bf16>();

}  // namespace xent::cuda
