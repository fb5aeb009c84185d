// SPDX-FileCopyrightText: the libxent authors
// SPDX-License-Identifier: Apache-2.0

// Instantiates the kernels of one type: one translation unit a type, so that they compile side by side.
#pragma once

#include "held.cuh"
#include "kernel_table.hpp"
#include "kernels.cuh"

namespace xent::cuda {

inline constexpr unsigned kAll = kSum | kEntropy | kArgmax;

template <typename Kernel>
const void *address(Kernel *kernel) {
  return reinterpret_cast<const void *>(kernel);
}

// Of rows that are not even, which are rarer and take longer to compile, the features of a set and more.
constexpr unsigned uneven_team(unsigned features) {
  return features == kPlain ? kPlain : (features & kSoftcap) != 0 ? kSoftcap | kAll : kAll;
}
constexpr unsigned uneven_block(unsigned features) { return (features & kSoftcap) != 0 ? kSoftcap | kAll : kAll; }

// The kernels of the sets kF, in the order of kFeatureSets.
template <typename T, unsigned... kF>
struct Kernels {
  static_assert(sizeof...(kF) == kFeatureSets);

  template <bool kGrad, int N>
  static SweepKernels sweep(const void *const (&rows)[kFeatureSets]) {
    SweepKernels kernels = {
        {},
        {address(split_kernel<T, kF, N>)...},
        {address(combine_kernel<T, kF, N>)...},
        {{address(team_kernel<T, uneven_team(kF), kGrad, false>)...}, {address(team_kernel<T, kF, kGrad, true>)...}}};
    for (int i = 0; i < kFeatureSets; ++i) kernels.rows[i] = rows[i];
    return kernels;
  }

  static KernelTable table() {
    return {
        sweep<false, kForwardBatch>({address(forward_kernel<T, kF>)...}),
        sweep<true, kBatch>({address(both_kernel<T, kF>)...}),
        {{address(block_kernel<T, uneven_block(kF), false>)...}, {address(block_kernel<T, kF, true>)...}},
        {{address(backward_kernel<T, T, kPlain>), address(backward_kernel<T, float, kPlain>)},
         {address(backward_kernel<T, T, kSoftcap>), address(backward_kernel<T, float, kSoftcap>)}},
        {{address(team_backward_kernel<T, kPlain, false>), address(team_backward_kernel<T, kPlain, true>)},
         {address(team_backward_kernel<T, kSoftcap, false>), address(team_backward_kernel<T, kSoftcap, true>)}},
    };
  }
};

template <typename T>
KernelTable make_table() {
  return Kernels<T, kPlain, kSum, kAll, kSoftcap, kSoftcap | kAll>::table();
}

}  // namespace xent::cuda
