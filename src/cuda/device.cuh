// SPDX-FileCopyrightText: the libxent authors
// SPDX-License-Identifier: Apache-2.0

// Checked CUDA calls, and the device context of a plan made current for the length of a call.
#pragma once

#include <cuda.h>
#include <cuda_runtime.h>

#include "common/error.hpp"

namespace xent::cuda {

inline xent_status device_error(xent_error *err, cudaError_t code, const char *what) {
  const xent_status status = code == cudaErrorMemoryAllocation ? XENT_OUT_OF_MEMORY : XENT_DEVICE_ERROR;
  return fail_native(err, status, static_cast<int32_t>(code), "cuda: %s: %s (%s)", what, cudaGetErrorString(code),
                     cudaGetErrorName(code));
}

// The driver is reached through the runtime, so that the plugin loads where there is none and can say so.
struct Driver {
  CUresult (*context_get)(CUcontext *) = nullptr;
  CUresult (*context_set)(CUcontext) = nullptr;
  CUresult (*primary_retain)(CUcontext *, CUdevice) = nullptr;
  CUresult (*primary_release)(CUdevice) = nullptr;
};

// Makes a context current and restores what was, also where that was none or not a primary context: cudaSetDevice
// cannot.
class CurrentContext {
 public:
  CurrentContext(const Driver &driver, CUcontext wanted) : driver_(driver) {
    status_ = driver_.context_get(&before_);
    changed_ = status_ == CUDA_SUCCESS && before_ != wanted;
    if (changed_) status_ = driver_.context_set(wanted);
  }
  ~CurrentContext() {
    if (changed_) driver_.context_set(before_);
  }
  CurrentContext(const CurrentContext &) = delete;
  CurrentContext &operator=(const CurrentContext &) = delete;

  xent_status check(xent_error *err) const {
    if (status_ == CUDA_SUCCESS) return XENT_OK;
    return fail_native(err, XENT_DEVICE_ERROR, static_cast<int32_t>(status_),
                       "cuda: the device's primary context cannot be made current (CUresult %d)",
                       static_cast<int>(status_));
  }

 private:
  const Driver &driver_;
  CUcontext before_ = nullptr;
  CUresult status_ = CUDA_SUCCESS;
  bool changed_ = false;
};

}  // namespace xent::cuda
