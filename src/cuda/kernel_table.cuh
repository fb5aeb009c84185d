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

template <typename T, int N>
SweepKernels make_sweep(const void *plain, const void *sum, const void *all, const void *softcap, const void *most) {
  return {
      {plain, sum, all, softcap, most},
      {address(split_kernel<T, kPlain, N>), address(split_kernel<T, kSum, N>), address(split_kernel<T, kAll, N>),
       address(split_kernel<T, kSoftcap, N>), address(split_kernel<T, kSoftcap | kAll, N>)},
      {address(combine_kernel<T, kPlain, N>), address(combine_kernel<T, kSum, N>), address(combine_kernel<T, kAll, N>),
       address(combine_kernel<T, kSoftcap, N>), address(combine_kernel<T, kSoftcap | kAll, N>)}};
}

template <typename T>
KernelTable make_table() {
  return {
      make_sweep<T, kForwardBatch>(address(forward_kernel<T, kPlain>), address(forward_kernel<T, kSum>),
                                   address(forward_kernel<T, kAll>), address(forward_kernel<T, kSoftcap>),
                                   address(forward_kernel<T, kSoftcap | kAll>)),
      make_sweep<T, kBatch>(address(both_kernel<T, kPlain>), address(both_kernel<T, kSum>),
                            address(both_kernel<T, kAll>), address(both_kernel<T, kSoftcap>),
                            address(both_kernel<T, kSoftcap | kAll>)),
      {{address(backward_kernel<T, T, kPlain>), address(backward_kernel<T, float, kPlain>)},
       {address(backward_kernel<T, T, kSoftcap>), address(backward_kernel<T, float, kSoftcap>)}},
  };
}

}  // namespace xent::cuda
