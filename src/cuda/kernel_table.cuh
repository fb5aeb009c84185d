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
      {address(rows_kernel<T, kPlain, false>), address(rows_kernel<T, kSum, false>),
       address(rows_kernel<T, kAll, false>), address(rows_kernel<T, kSoftcap, false>),
       address(rows_kernel<T, kSoftcap | kAll, false>)},
      {address(rows_kernel<T, kPlain, true>), address(rows_kernel<T, kSum, true>), address(rows_kernel<T, kAll, true>),
       address(rows_kernel<T, kSoftcap, true>), address(rows_kernel<T, kSoftcap | kAll, true>)},
      {address(slices_kernel<T, kPlain>), address(slices_kernel<T, kSum>), address(slices_kernel<T, kAll>),
       address(slices_kernel<T, kSoftcap>), address(slices_kernel<T, kSoftcap | kAll>)},
      {address(combine_kernel<T, kPlain>), address(combine_kernel<T, kSum>), address(combine_kernel<T, kAll>),
       address(combine_kernel<T, kSoftcap>), address(combine_kernel<T, kSoftcap | kAll>)},
      {{address(backward_kernel<T, T, kPlain>), address(backward_kernel<T, float, kPlain>)},
       {address(backward_kernel<T, T, kSoftcap>), address(backward_kernel<T, float, kSoftcap>)}},
  };
}

}  // namespace xent::cuda
