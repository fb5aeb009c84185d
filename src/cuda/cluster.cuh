// SPDX-FileCopyrightText: the libxent authors
// SPDX-License-Identifier: Apache-2.0

// Thread block clusters, where the device has them: compute capability 9.0 and later. Elsewhere no launch asks for one.
#pragma once

#include <cstdint>

namespace xent::cuda {

__device__ __forceinline__ uint32_t cluster_rank() {
  uint32_t rank = 0;
#if __CUDA_ARCH__ >= 900
  asm("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
#endif
  return rank;
}

// The same place in the shared memory of the cluster's block `rank`, which must have come by a barrier and not ended.
template <typename T>
__device__ __forceinline__ T *of_block(T *p, uint32_t rank) {
#if __CUDA_ARCH__ >= 900
  uint64_t there;
  asm("mapa.u64 %0, %1, %2;" : "=l"(there) : "l"(p), "r"(rank));
  return reinterpret_cast<T *>(there);
#else
  return p;
#endif
}

// A barrier of the cluster in two halves. What was written before the first is seen behind the second.
__device__ __forceinline__ void cluster_arrive() {
#if __CUDA_ARCH__ >= 900
  asm volatile("barrier.cluster.arrive.release;" ::: "memory");
#endif
}
__device__ __forceinline__ void cluster_wait() {
#if __CUDA_ARCH__ >= 900
  asm volatile("barrier.cluster.wait.acquire;" ::: "memory");
#endif
}
__device__ __forceinline__ void cluster_barrier() {
  cluster_arrive();
  cluster_wait();
}

}  // namespace xent::cuda
