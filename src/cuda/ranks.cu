// SPDX-FileCopyrightText: the libxent authors
// SPDX-License-Identifier: Apache-2.0

#include "kernel_table.cuh"
#include "ranks.cuh"

namespace xent::cuda {

const void *const kRanksKernels[kFeatureSets] = {address(ranks_kernel<kPlain>), address(ranks_kernel<kSum>),
                                                 address(ranks_kernel<kAll>), address(ranks_kernel<kSoftcap>),
                                                 address(ranks_kernel<kSoftcap | kAll>)};
const void *const kEmptyKernel = address(empty_kernel);

}  // namespace xent::cuda
