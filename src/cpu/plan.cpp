// SPDX-FileCopyrightText: the libxent authors
// SPDX-License-Identifier: Apache-2.0

#include "cpu/plan.hpp"

#include <unistd.h>

#include <algorithm>

#include "common/dtype.hpp"

namespace xent::cpu {
namespace {

// The core has seen to it that every factor, logit_scale / softcap too, is a normal number of acc.
template <class A>
RowMath make_math(const xent_options &options) {
  using Limits = std::numeric_limits<A>;
  RowMath math = {};
  math.scale = options.softcap != 0 ? 1.0 : options.logit_scale;
  // The difference of two logits can be twice the largest number; above this scale its exponential is 0 anyway.
  math.half = math.scale < std::ldexp(1.0, Limits::min_exponent + 24) ? 0.5 : 1.0;
  if (options.softcap != 0) {
    math.softcap = options.softcap;
    math.cap_ratio = options.logit_scale / options.softcap;
  }
  math.shift_unit =
      math.scale >= 0x1p64 ? 1.0 : 1.0 / static_cast<double>(std::bit_ceil(2 * static_cast<uint64_t>(options.classes)));
  math.smoothing = options.label_smoothing != 0;
  math.entropy = options.entropy != 0;
  math.predicted = options.predicted != 0;
  return math;
}

// A store to a line that is not in the core's own cache reads it first, and a large shared cache gives and takes hardly
// more than memory does. With 2 MiB for each of two cores and 300 MiB shared, a gradient of 8 MiB was there sooner
// stored and read again the usual way, and one of 16 MiB stored past the caches and read from memory.
int64_t streamed_from(int threads) {
  const int64_t own = sysconf(_SC_LEVEL2_CACHE_SIZE);
  return own > 0 ? std::min(cache_bytes(), 4 * own * threads) : cache_bytes();
}

}  // namespace

int64_t cache_bytes() {
  static const int64_t bytes = [] {
    for (const int level : {_SC_LEVEL4_CACHE_SIZE, _SC_LEVEL3_CACHE_SIZE, _SC_LEVEL2_CACHE_SIZE}) {
      if (const long size = sysconf(level); size > 0) return static_cast<int64_t>(size);
    }
    return int64_t{32} << 20;
  }();
  return bytes;
}

namespace {

// Of workspace beside the losses, in bytes: as much as a call may add to what it is given and gives.
constexpr int64_t kRoom = int64_t{1} << 20;
// Of a longer row nothing is kept, not even the maxima: that they are decides bits, so no number of threads may.
constexpr int64_t kKeptColumns = int64_t{1} << 20;

size_t aligned(size_t bytes) { return (bytes + kWorkspaceAlignment - 1) / kWorkspaceAlignment * kWorkspaceAlignment; }

// Neither what partials take nor how many columns are kept changes any bits.
void lay_out_workspace(const xent_options &options, int threads, Plan *plan) {
  if (options.reduction != XENT_REDUCTION_NONE) {
    plan->losses_bytes = aligned(static_cast<size_t>(options.max_rows) * sizeof(double));
  }
  int64_t room = kRoom;
  const int64_t blocks = (options.columns + kBlock - 1) / kBlock;
  if (options.softcap == 0 && blocks > 0 && options.columns <= kKeptColumns) {
    plan->kept_rows = std::min<int64_t>(options.max_rows, threads);
    plan->maxima_bytes = aligned(static_cast<size_t>(blocks) * sizeof(double));
    room -= plan->kept_rows * static_cast<int64_t>(plan->maxima_bytes);
  }
  if (plan->slices > 1 && threads > 1) {
    const int64_t most = std::max(plan->slices, room / static_cast<int64_t>(sizeof(Partial)) - 1);
    plan->partials = std::min(most, plan->slices * std::min<int64_t>(options.max_rows, int64_t{4} * threads));
    room -= plan->partials * static_cast<int64_t>(sizeof(Partial));
  }
  if (plan->kept_rows == 0) return;
  const int64_t block = kBlock * static_cast<int64_t>(plan->acc_is_double ? sizeof(double) : sizeof(float));
  const int64_t kept = std::clamp<int64_t>(room / plan->kept_rows / block, 0, blocks);
  plan->kept_begin = (blocks - kept) * kBlock;
  plan->terms_bytes = static_cast<size_t>(kept * block);
}

}  // namespace

Plan make_plan(const xent_options &options, int threads) {
  Plan plan = {};
  plan.options = &options;
  plan.acc_is_double = is_f64(options.logits_dtype);
  plan.math = plan.acc_is_double ? make_math<double>(options) : make_math<float>(options);
  if (is_f64(options.logits_dtype)) {
    plan.forward = forward_f64, plan.grad = grad_f64;
  } else if (is_f16(options.logits_dtype)) {
    plan.forward = forward_f16, plan.grad = grad_f16, plan.grad_f32 = grad_f16_f32;
  } else if (is_bf16(options.logits_dtype)) {
    plan.forward = forward_bf16, plan.grad = grad_bf16, plan.grad_f32 = grad_bf16_f32;
  } else {
    plan.forward = forward_f32, plan.grad = plan.grad_f32 = grad_f32;
  }
  plan.squash = plan.acc_is_double ? squash_f64 : squash_f32;
  plan.slice = slice_columns(options.columns);
  plan.streamed = streamed_from(threads);
  plan.slices = (options.columns + plan.slice - 1) / plan.slice;
  lay_out_workspace(options, threads, &plan);
  return plan;
}

}  // namespace xent::cpu
