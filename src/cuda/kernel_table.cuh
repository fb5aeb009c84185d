// SPDX-FileCopyrightText: the libxent authors
// SPDX-License-Identifier: Apache-2.0

// Instantiates the kernels of one type: one translation unit a type, so that they compile side by side.
#pragma once

#include "backward.cuh"
#include "block.cuh"
#include "forward.cuh"
#include "kernel_table.hpp"
#include "kernels.cuh"
#include "team.cuh"

namespace xent::cuda {

inline constexpr unsigned kAll = kSum | kEntropy | kArgmax;

template <typename Kernel>
const void *address(Kernel *kernel) {
  return reinterpret_cast<const void *>(kernel);
}

// Kernels that calls rarely take are of fewer sets, with the features of a set and more: of rows of any layout, which
// take longest to compile, of two; of adjacent ones with a softcap of one; and of the streams of three.
constexpr unsigned features_of(Layout rows, unsigned features) {
  if ((features & kSoftcap) != 0) return rows == Layout::even ? features : kSoftcap | kAll;
  return rows == Layout::any ? kAll : features;
}
constexpr unsigned stream_features(unsigned features) {
  return features == kPlain ? kPlain : features_of(Layout::any, features);
}

// Whether the kernel of blocks that hold no units in shared memory is the one that can: 1 to 2 % slower then.
constexpr bool shares_stash(unsigned features) { return features != kPlain && features != kSum; }

// The kernels of the sets kF, in the order of kFeatureSets.
template <typename T, unsigned... kF>
struct Kernels {
  static_assert(sizeof...(kF) == kFeatureSets);

  template <bool kGrad, int N>
  static SweepKernels sweep(const void *const (&rows)[kFeatureSets]) {
    SweepKernels kernels = {{},
                            {address(split_kernel<T, kF, N>)...},
                            {address(combine_kernel<T, kF>)...},
                            {{address(team_kernel<T, features_of(Layout::any, kF), kGrad, Layout::any>)...},
                             {address(team_kernel<T, features_of(Layout::adjacent, kF), kGrad, Layout::adjacent>)...},
                             {address(team_kernel<T, kF, kGrad, Layout::even>)...}}};
    for (int i = 0; i < kFeatureSets; ++i) kernels.rows[i] = rows[i];
    return kernels;
  }

  static KernelTable table() {
    return {
        sweep<false, kForwardBatch>({address(forward_kernel<T, stream_features(kF)>)...}),
        sweep<true, kBatch>({address(both_kernel<T, stream_features(kF)>)...}),
        {{},
         {address(row_kernel<T, features_of(Layout::adjacent, kF), Layout::adjacent>)...},
         {address(row_kernel<T, kF, Layout::even>)...}},
        {{address(block_kernel<T, features_of(Layout::any, kF), Layout::any, false>)...},
         {address(block_kernel<T, features_of(Layout::adjacent, kF), Layout::adjacent, shares_stash(kF)>)...},
         {address(block_kernel<T, kF, Layout::even, shares_stash(kF)>)...}},
        {{address(block_kernel<T, features_of(Layout::any, kF), Layout::any, false>)...},
         {address(block_kernel<T, features_of(Layout::adjacent, kF), Layout::adjacent, true>)...},
         {address(block_kernel<T, kF, Layout::even, true>)...}},
        {{},
         {address(row_pieces_kernel<T, kF, Layout::adjacent>)...},
         {address(row_pieces_kernel<T, kF, Layout::even>)...}},
        {{},
         {address(block_shares_kernel<T, kF, Layout::adjacent>)...},
         {address(block_shares_kernel<T, kF, Layout::even>)...}},
        {{address(backward_kernel<T, T, kPlain>), address(backward_kernel<T, float, kPlain>)},
         {address(backward_kernel<T, T, kSoftcap>), address(backward_kernel<T, float, kSoftcap>)}},
        {{},
         {address(unit_kernel<T, kPlain, Layout::adjacent>), address(unit_kernel<T, kSoftcap, Layout::adjacent>)},
         {address(unit_kernel<T, kPlain, Layout::even>), address(unit_kernel<T, kSoftcap, Layout::even>)}},
        {{address(team_backward_kernel<T, kPlain, Layout::any>),
          address(team_backward_kernel<T, kSoftcap, Layout::any>)},
         {address(team_backward_kernel<T, kPlain, Layout::adjacent>),
          address(team_backward_kernel<T, kSoftcap, Layout::adjacent>)},
         {address(team_backward_kernel<T, kPlain, Layout::even>),
          address(team_backward_kernel<T, kSoftcap, Layout::even>)}},
    };
  }
};

template <typename T>
KernelTable make_table() {
  return Kernels<T, kPlain, kSum, kAll, kSoftcap, kSoftcap | kAll>::table();
}

}  // namespace xent::cuda
