// SPDX-FileCopyrightText: the libxent authors
// SPDX-License-Identifier: Apache-2.0

// The plugin's entry and its table.

#include <algorithm>
#include <cstddef>
#include <cstdio>
#include <cstring>
#include <new>

#include "common/dtype.hpp"
#include "device.cuh"
#include "plan.hpp"
#include "ranks.hpp"

namespace xent::cuda {
namespace {

constexpr int64_t kMostColumns = int64_t{1} << 32;  // vectors of a row are counted in 32 bits

int32_t probe(void *, const xent_options *options, char *why, size_t why_bytes) {
  const DLDataType &type = options->logits_dtype;
  if (!is_f32(type) && !is_f16(type) && !is_bf16(type)) {
    std::snprintf(why, why_bytes, "logits must be float32, float16 or bfloat16 on CUDA");
    return 0;
  }
  if (options->vocab > kMostColumns) {
    std::snprintf(why, why_bytes, "vocab is above 2^32 columns");
    return 0;
  }
  if (options->ranks > kMostRanks) {
    std::snprintf(why, why_bytes, "ranks are above %d on CUDA", kMostRanks);
    return 0;
  }
  int devices = 0;
  if (cudaGetDeviceCount(&devices) != cudaSuccess || options->device.device_id >= devices) {
    std::snprintf(why, why_bytes, "device %d is not there, CUDA sees %d", options->device.device_id, devices);
    return 0;
  }
  int major = 0;
  if (cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, options->device.device_id) != cudaSuccess ||
      major < 8) {
    std::snprintf(why, why_bytes, "device %d has compute capability %d.x, 8.0 is the least", options->device.device_id,
                  major);
    return 0;
  }
  return 100;
}

xent_status plan_create(void *self, const xent_options *options, void **plan, xent_plan_info *info, xent_error *err) {
  try {
    Plan *made = nullptr;
    const xent_status status = Plan::create(*static_cast<const Driver *>(self), *options, &made, info, err);
    *plan = made;
    return status;
  } catch (const std::bad_alloc &) {
    return fail(err, XENT_OUT_OF_MEMORY, "cuda: out of host memory");
  }
}

void plan_destroy(void *, void *plan) { delete static_cast<Plan *>(plan); }

xent_status forward(void *, void *plan, const xent_problem *problem, xent_error *err) {
  return static_cast<const Plan *>(plan)->forward(*problem, err);
}

xent_status backward(void *, void *plan, const xent_problem *problem, xent_error *err) {
  return static_cast<const Plan *>(plan)->backward(*problem, err);
}

xent_status loss_and_grad(void *, void *plan, const xent_problem *problem, xent_error *err) {
  return static_cast<const Plan *>(plan)->loss_and_grad(*problem, err);
}

xent_status partial(void *, void *plan, const xent_problem *problem, xent_error *err) {
  return static_cast<const Plan *>(plan)->partial(*problem, err);
}

xent_status combine(void *, void *plan, const xent_problem *problem, xent_error *err) {
  return static_cast<const Plan *>(plan)->combine(*problem, err);
}

xent_status scale_grad(void *, void *plan, const xent_problem *problem, xent_error *err) {
  return static_cast<const Plan *>(plan)->scale_grad(*problem, err);
}

template <typename Function>
cudaError_t find(const char *name, Function *out) {
  void *address = nullptr;
  cudaDriverEntryPointQueryResult found;
  const cudaError_t code = cudaGetDriverEntryPointByVersion(name, &address, 12000, cudaEnableDefault, &found);
  if (code != cudaSuccess) return code;
  if (found != cudaDriverEntryPointSuccess) return cudaErrorInsufficientDriver;
  *out = reinterpret_cast<Function>(address);
  return cudaSuccess;
}

// Filled once and never changed: the driver's functions are the same for every context of a process.
cudaError_t find_driver(Driver *driver) {
  cudaError_t code = find("cuCtxGetCurrent", &driver->context_get);
  if (code == cudaSuccess) code = find("cuCtxSetCurrent", &driver->context_set);
  if (code == cudaSuccess) code = find("cuDevicePrimaryCtxRetain", &driver->primary_retain);
  if (code == cudaSuccess) code = find("cuDevicePrimaryCtxRelease", &driver->primary_release);
  return code;
}

}  // namespace
}  // namespace xent::cuda

extern "C" XENT_API xent_status xent_plugin_entry_v1(const xent_host_api *, xent_backend_api *out, xent_error *err) {
  using namespace xent::cuda;
  int devices = 0;
  const cudaError_t counted = cudaGetDeviceCount(&devices);
  if (counted != cudaSuccess || devices == 0) {
    return xent::fail_native(err, XENT_UNSUPPORTED, static_cast<int32_t>(counted), "cuda: no usable device: %s",
                             counted != cudaSuccess ? cudaGetErrorString(counted) : "none is visible");
  }
  static Driver driver;
  static const cudaError_t found = find_driver(&driver);
  if (found != cudaSuccess) return device_error(err, found, "driver entry points");

  xent_backend_api api = {};
  api.struct_size = sizeof(api);
  api.abi_minor = XENT_PLUGIN_ABI_MINOR;
  api.device_type = kDLCUDA;
  api.name = "cuda";
  api.version = "0.1.0";
  api.self = &driver;
  api.probe = probe;
  api.plan_create = plan_create;
  api.plan_destroy = plan_destroy;
  api.forward = forward;
  api.backward = backward;
  api.loss_and_grad = loss_and_grad;
  api.partial = partial;
  api.combine = combine;
  api.scale_grad = scale_grad;
  constexpr size_t least = offsetof(xent_backend_api, scale_grad);  // minor 0
  if (out->struct_size < least) {
    return xent::fail(err, XENT_PLUGIN_ERROR, "cuda: the host's table has %zu bytes, this plugin needs %zu",
                      out->struct_size, least);
  }
  api.struct_size = std::min(out->struct_size, sizeof(api));  // what an older host does not know is left out
  std::memcpy(out, &api, api.struct_size);
  return XENT_OK;
}
