// SPDX-FileCopyrightText: the libxent authors
// SPDX-License-Identifier: Apache-2.0

// The plugin table of the CPU backend.

#include <xent/xent_plugin.h>

#include <algorithm>
#include <cfenv>
#include <cstdio>
#include <new>

#include "common/dtype.hpp"
#include "common/error.hpp"
#include "cpu/plan.hpp"

#define XENT_CPU_STRING_OF(x) #x
#define XENT_CPU_STRING(x) XENT_CPU_STRING_OF(x)

namespace xent::cpu {
namespace {

// Control words alone, without the exception flags. Without a cheap way to ask, false.
bool arithmetic_is_default() {
#if defined(__x86_64__) && defined(__GNUC__)
  uint16_t x87;
  __asm__ volatile("fnstcw %0" : "=m"(x87));
  return (__builtin_ia32_stmxcsr() & ~0x3Fu) == 0x1F80u && x87 == 0x037F;
#else
  return false;
#endif
}

// The arithmetic is that of the default environment, whatever the caller's: with another rounding or subnormals flushed
// to zero, results would depend on which thread computes a row, and with traps -inf would raise a signal.
class DefaultArithmetic {
 public:
  DefaultArithmetic() : changed_(!arithmetic_is_default()) {
    if (!changed_) return;
    std::fegetenv(&saved_);
    std::fesetenv(FE_DFL_ENV);
  }
  ~DefaultArithmetic() {
    if (changed_) std::fesetenv(&saved_);
  }
  DefaultArithmetic(const DefaultArithmetic &) = delete;
  DefaultArithmetic &operator=(const DefaultArithmetic &) = delete;

 private:
  const bool changed_;
  std::fenv_t saved_;
};

// Nothing that allocates or throws is left once a plan exists, but for a child's threads after fork(), which the pool
// can do without.
template <class Body>
xent_status guarded(xent_error *err, const Body &body) noexcept {
  const DefaultArithmetic arithmetic;
  try {
    body();
    return XENT_OK;
  } catch (const std::bad_alloc &) {
    return fail(err, XENT_OUT_OF_MEMORY, "cpu backend: out of memory");
  } catch (...) {
    return fail(err, XENT_INTERNAL, "cpu backend: unexpected exception");
  }
}

int32_t probe(void *, const xent_options *options, char *why, size_t why_bytes) {
  if (options->device.device_type != kDLCPU && options->device.device_type != kDLCUDAHost) {
    std::snprintf(why, why_bytes, "device type %d is not host memory", static_cast<int>(options->device.device_type));
    return 0;
  }
  const DLDataType type = options->logits_dtype;
  if (!is_f32(type) && !is_f16(type) && !is_bf16(type) && !is_f64(type)) {
    std::snprintf(why, why_bytes, "logits must be float32, float16, bfloat16 or float64");
    return 0;
  }
  return 1;
}

xent_status plan_create(void *self, const xent_options *options, void **plan, xent_plan_info *info, xent_error *err) {
  Pool &pool = *static_cast<Pool *>(self);
  return guarded(err, [&] {
    auto *const made = new Plan(make_plan(*options, pool.threads()));
    *plan = made;
    pool.start();
    const size_t forward = forward_workspace(*made);
    const size_t acc = made->acc_is_double ? sizeof(double) : sizeof(float);
    info->forward_workspace_bytes = forward;
    info->backward_workspace_bytes = 0;
    info->loss_and_grad_workspace_bytes =
        forward + static_cast<size_t>(made->kept_rows) * (made->maxima_bytes + made->terms_bytes);
    info->saved_bytes = static_cast<size_t>(options->max_rows) * 2 * acc + acc;
    info->alignment = kWorkspaceAlignment;
    // Each thread's row, its gradient and what prefetching brings must fit the last cache at once.
    const int64_t row_bytes = options->columns * static_cast<int64_t>(element_size(options->logits_dtype));
    info->capabilities = row_bytes <= cache_bytes() / (3 * pool.threads()) ? uint32_t{XENT_CAP_ONE_PASS} : 0;
  });
}

void plan_destroy(void *, void *plan) { delete static_cast<Plan *>(plan); }

template <void (*run)(const Plan &, Pool &, const xent_problem &)>
xent_status execute(void *self, void *plan, const xent_problem *problem, xent_error *err) {
  return guarded(err, [&] { run(*static_cast<const Plan *>(plan), *static_cast<Pool *>(self), *problem); });
}

void release(void *self) { delete static_cast<Pool *>(self); }

}  // namespace
}  // namespace xent::cpu

extern "C" xent_status xent_cpu_plugin_entry_v1(const xent_host_api *host, xent_backend_api *out, xent_error *err);

extern "C" xent_status xent_cpu_plugin_entry_v1(const xent_host_api *host, xent_backend_api *out, xent_error *err) {
  using namespace xent::cpu;
  return guarded(err, [&] {
    out->self = new Pool(host->threads);
    out->struct_size = sizeof *out;
    out->abi_minor = XENT_PLUGIN_ABI_MINOR;
    out->device_type = kDLCPU;
    out->name = "cpu";
    out->version = XENT_CPU_STRING(XENT_VERSION_MAJOR) "." XENT_CPU_STRING(XENT_VERSION_MINOR) "." XENT_CPU_STRING(
        XENT_VERSION_PATCH);
    out->probe = probe;
    out->plan_create = plan_create;
    out->plan_destroy = plan_destroy;
    out->forward = execute<run_forward>;
    out->backward = execute<run_backward>;
    out->loss_and_grad = execute<run_loss_and_grad>;
    out->partial = execute<run_partial>;
    out->combine = execute<run_combine>;
    out->release = release;
    out->scale_grad = execute<run_scale_grad>;
  });
}
