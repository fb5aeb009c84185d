// SPDX-FileCopyrightText: the libxent authors
// SPDX-License-Identifier: Apache-2.0

// Checked launches, and kernels made ready for them.
#pragma once

#include <algorithm>
#include <cstdint>

#include "device.cuh"

namespace xent::cuda {

// A grid-stride kernel takes what does not fit.
inline unsigned grid_of(int64_t blocks) { return static_cast<unsigned>(std::min<int64_t>(blocks, INT32_MAX)); }

// `follows`: its blocks may start while the last ones of the launch before it run; they wait before they read.
inline xent_status launch(const void *kernel, int64_t blocks, int threads, size_t shared, bool follows, void **args,
                          void *stream, const char *what, xent_error *err, int cluster = 1) {
  cudaLaunchConfig_t config = {};
  config.gridDim = dim3(grid_of(blocks));
  config.blockDim = dim3(static_cast<unsigned>(threads));
  config.dynamicSmemBytes = shared;
  config.stream = static_cast<cudaStream_t>(stream);
  cudaLaunchAttribute attributes[2] = {};
  config.attrs = attributes;
  if (follows) {
    cudaLaunchAttribute &attribute = attributes[config.numAttrs++];
    attribute.id = cudaLaunchAttributeProgrammaticStreamSerialization;
    attribute.val.programmaticStreamSerializationAllowed = 1;
  }
  if (cluster > 1) {
    cudaLaunchAttribute &attribute = attributes[config.numAttrs++];
    attribute.id = cudaLaunchAttributeClusterDimension;
    attribute.val.clusterDim = {static_cast<unsigned>(cluster), 1, 1};
  }
  const cudaError_t code = cudaLaunchKernelExC(&config, kernel, args);
  return code == cudaSuccess ? XENT_OK : device_error(err, code, what);
}

inline xent_status load_kernel(const void *kernel, size_t shared, xent_error *err) {
  cudaFuncAttributes attributes;
  cudaError_t code = cudaFuncGetAttributes(&attributes, kernel);
  const int bytes = static_cast<int>(shared);
  // Never lowered: another plan may need more of it.
  if (code == cudaSuccess && attributes.maxDynamicSharedSizeBytes < bytes) {
    code = cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, bytes);
  }
  return code == cudaSuccess ? XENT_OK : device_error(err, code, "loading a kernel");
}

}  // namespace xent::cuda
