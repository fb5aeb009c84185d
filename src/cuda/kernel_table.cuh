// SPDX-FileCopyrightText: the libxent authors
// SPDX-License-Identifier: Apache-2.0

// Instantiates the kernels of one type: one translation unit a type, so that they compile side by side.
#pragma once

#include "kernel_table.hpp"
#include "kernels.cuh"

namespace xent::cuda {

inline constexpr unsigned kAll = kSum | kEntropy | kArgmax;

template <typename Kernel>
const void *address(Kernel *kernel) {
  return reinterpret_cast<const void *>(kernel);
}

template <typename T>
KernelTable make_table() {
  return {
      {address(forward_kernel<T, kPlain>), address(forward_kernel<T, kSum>), address(forward_kernel<T, kAll>),
       address(forward_kernel<T, kSoftcap>), address(forward_kernel<T, kSoftcap | kAll>)},
      {address(both_kernel<T, kPlain>), address(both_kernel<T, kSum>), address(both_kernel<T, kAll>),
       address(both_kernel<T, kSoftcap>), address(both_kernel<T, kSoftcap | kAll>)},
      {address(split_kernel<T, kPlain, kForwardBatch>), address(split_kernel<T, kSum, kForwardBatch>),
       address(split_kernel<T, kAll, kForwardBatch>), address(split_kernel<T, kSoftcap, kForwardBatch>),
       address(split_kernel<T, kSoftcap | kAll, kForwardBatch>)},
      {address(split_kernel<T, kPlain, kBatch>), address(split_kernel<T, kSum, kBatch>),
       address(split_kernel<T, kAll, kBatch>), address(split_kernel<T, kSoftcap, kBatch>),
       address(split_kernel<T, kSoftcap | kAll, kBatch>)},
      {address(combine_kernel<T, kPlain>), address(combine_kernel<T, kSum>), address(combine_kernel<T, kAll>),
       address(combine_kernel<T, kSoftcap>), address(combine_kernel<T, kSoftcap | kAll>)},
      {{address(backward_kernel<T, T, kPlain>), address(backward_kernel<T, float, kPlain>)},
       {address(backward_kernel<T, T, kSoftcap>), address(backward_kernel<T, float, kSoftcap>)}},
  };
}

}  // namespace xent::cuda
