// SPDX-FileCopyrightText: the libxent authors
// SPDX-License-Identifier: Apache-2.0

#include "core/options.hpp"

#include <cfloat>
#include <cinttypes>

#include "common/dtype.hpp"
#include "common/error.hpp"
#include "core/describe.hpp"

namespace xent {
namespace {

constexpr char kFunction[] = "xent_plan_create";
constexpr uint32_t kKnownFlags = XENT_PLAN_IGNORE_INDEX | XENT_PLAN_OVERWRITE_LOGITS | XENT_PLAN_EMPTY_MEAN_IS_NAN |
                                 XENT_PLAN_ENTROPY | XENT_PLAN_PREDICTED;

// Bytes of bookkeeping a row that a size computation may assume, logits apart.
constexpr int64_t kRowBytes = 1024;

bool unset(const DLDataType &dtype) { return dtype.code == 0 && dtype.bits == 0 && dtype.lanes == 0; }

xent_status resolve_device(DLDevice device, DLDevice *out, xent_error *err) {
  const auto type = static_cast<int32_t>(device.device_type);
  const bool unset = type == 0 && device.device_id == 0;
  if (unset || type == kDLCPU || type == kDLCUDAHost) {
    *out = DLDevice{kDLCPU, 0};
    return XENT_OK;
  }
  if (type <= 0 || device.device_id < 0) {
    return fail(err, XENT_INVALID_ARGUMENT, "%s: device: {%" PRId32 ", %" PRId32 "} is not a DLPack device", kFunction,
                type, device.device_id);
  }
  *out = device;
  if (type == kDLCUDAManaged) out->device_type = kDLCUDA;
  return XENT_OK;
}

xent_status resolve_dtypes(const xent_plan_desc &desc, xent_options *out, xent_error *err) {
  out->logits_dtype = unset(desc.logits_dtype) ? DLDataType{kDLFloat, 32, 1} : desc.logits_dtype;
  out->target_dtype = unset(desc.target_dtype) ? DLDataType{kDLInt, 64, 1} : desc.target_dtype;
  const DLDataType &logits = out->logits_dtype;
  if (!is_f32(logits) && !is_f16(logits) && !is_bf16(logits) && !is_f64(logits)) {
    return fail(err, XENT_INVALID_ARGUMENT,
                "%s: logits_dtype: is %s; it must be float32, float16, bfloat16 or, on the CPU, float64", kFunction,
                describe(logits).text);
  }
  if (!is_i32(out->target_dtype) && !is_i64(out->target_dtype)) {
    return fail(err, XENT_INVALID_ARGUMENT, "%s: target_dtype: is %s; it must be int32 or int64", kFunction,
                describe(out->target_dtype).text);
  }
  return XENT_OK;
}

xent_status resolve_sizes(const xent_plan_desc &desc, xent_options *out, xent_error *err) {
  if (desc.vocab < 1) {
    return fail(err, XENT_INVALID_ARGUMENT, "%s: vocab: is %" PRId64 "; it must be at least 1", kFunction, desc.vocab);
  }
  if (desc.classes < 0 || desc.classes > desc.vocab) {
    return fail(err, XENT_INVALID_ARGUMENT, "%s: classes: is %" PRId64 "; it must be in [0, vocab = %" PRId64 "]",
                kFunction, desc.classes, desc.vocab);
  }
  if (desc.max_rows < 0) {
    return fail(err, XENT_INVALID_ARGUMENT, "%s: max_rows: is %" PRId64 "; it must not be negative", kFunction,
                desc.max_rows);
  }
  int64_t row_bytes = 0;
  int64_t total_bytes = 0;
  if (__builtin_mul_overflow(desc.vocab, int64_t{8}, &row_bytes) ||
      __builtin_add_overflow(row_bytes, kRowBytes, &row_bytes) ||
      __builtin_mul_overflow(row_bytes, desc.max_rows, &total_bytes)) {
    return fail(err, XENT_INVALID_ARGUMENT,
                "%s: max_rows, vocab: %" PRId64 " rows of %" PRId64 " columns have no size in 63 bits", kFunction,
                desc.max_rows, desc.vocab);
  }
  out->vocab = desc.vocab;
  out->classes = desc.classes == 0 ? desc.vocab : desc.classes;
  out->max_rows = desc.max_rows;
  return XENT_OK;
}

xent_status resolve_flags(const xent_plan_desc &desc, xent_options *out, xent_error *err) {
  if ((desc.flags & ~kKnownFlags) != 0) {
    return fail(err, XENT_INVALID_ARGUMENT, "%s: flags: bits 0x%" PRIx32 " are unknown to this library", kFunction,
                desc.flags & ~kKnownFlags);
  }
  if (desc.reduction < XENT_REDUCTION_NONE || desc.reduction > XENT_REDUCTION_MEAN) {
    return fail(err, XENT_INVALID_ARGUMENT, "%s: reduction: is %" PRId32 "; it must be one of XENT_REDUCTION_*",
                kFunction, desc.reduction);
  }
  out->reduction = desc.reduction;
  out->has_ignore_index = (desc.flags & XENT_PLAN_IGNORE_INDEX) != 0;
  out->overwrite = (desc.flags & XENT_PLAN_OVERWRITE_LOGITS) != 0;
  out->empty_mean_is_nan = (desc.flags & XENT_PLAN_EMPTY_MEAN_IS_NAN) != 0;
  out->entropy = (desc.flags & XENT_PLAN_ENTROPY) != 0;
  out->predicted = (desc.flags & XENT_PLAN_PREDICTED) != 0;
  if (desc.ignore_index != 0 && !out->has_ignore_index) {
    return fail(err, XENT_INVALID_ARGUMENT,
                "%s: ignore_index: is %" PRId64 " without XENT_PLAN_IGNORE_INDEX, which makes it count", kFunction,
                desc.ignore_index);
  }
  out->ignore_index = desc.ignore_index;
  if (out->empty_mean_is_nan && desc.reduction != XENT_REDUCTION_MEAN) {
    return fail(err, XENT_INVALID_ARGUMENT,
                "%s: flags: XENT_PLAN_EMPTY_MEAN_IS_NAN needs XENT_REDUCTION_MEAN; reduction is %" PRId32, kFunction,
                desc.reduction);
  }
  return XENT_OK;
}

// A factor of the computation must also be one in the type that computes.
xent_status check_factor(const char *name, double value, bool wide, xent_error *err) {
  const double least = wide ? DBL_MIN : double{FLT_MIN};
  const double most = wide ? DBL_MAX : double{FLT_MAX};
  if (value >= least && value <= most) return XENT_OK;  // false for NaN
  return fail(err, XENT_INVALID_ARGUMENT, "%s: %s: is %g; it must be 0 or a positive normal %s", kFunction, name, value,
              wide ? "float64" : "float32, the type of the arithmetic");
}

xent_status resolve_numbers(const xent_plan_desc &desc, xent_options *out, xent_error *err) {
  const bool wide = is_f64(out->logits_dtype);
  if (!(desc.label_smoothing >= 0.0 && desc.label_smoothing <= 1.0)) {
    return fail(err, XENT_INVALID_ARGUMENT, "%s: label_smoothing: is %g; it must be in [0, 1]", kFunction,
                desc.label_smoothing);
  }
  if (!(desc.z_loss >= 0.0 && desc.z_loss <= (wide ? DBL_MAX : double{FLT_MAX}))) {
    return fail(err, XENT_INVALID_ARGUMENT, "%s: z_loss: is %g; it must be finite%s and not negative", kFunction,
                desc.z_loss, wide ? "" : " in float32, the type of the arithmetic,");
  }
  if (desc.softcap != 0.0) {
    if (const xent_status status = check_factor("softcap", desc.softcap, wide, err)) return status;
  }
  if (desc.logit_scale != 0.0) {
    if (const xent_status status = check_factor("logit_scale", desc.logit_scale, wide, err)) return status;
  }
  if (desc.softcap != 0.0) {
    // tanh is taken of logit_scale / softcap * x.
    const double scale = desc.logit_scale == 0.0 ? 1.0 : desc.logit_scale;
    if (const xent_status status = check_factor("logit_scale / softcap", scale / desc.softcap, wide, err))
      return status;
  }
  // Adding 0 turns -0 into 0.
  out->label_smoothing = desc.label_smoothing + 0.0;
  out->z_loss = desc.z_loss + 0.0;
  out->softcap = desc.softcap + 0.0;
  out->logit_scale = desc.logit_scale == 0.0 ? 1.0 : desc.logit_scale;
  return XENT_OK;
}

}  // namespace

xent_status resolve_options(const xent_plan_desc &desc, xent_options *out, xent_error *err) {
  *out = xent_options{};
  out->struct_size = sizeof(xent_options);
  if (const xent_status status = resolve_device(desc.device, &out->device, err)) return status;
  if (const xent_status status = resolve_dtypes(desc, out, err)) return status;
  if (const xent_status status = resolve_sizes(desc, out, err)) return status;
  if (const xent_status status = resolve_flags(desc, out, err)) return status;
  return resolve_numbers(desc, out, err);
}

}  // namespace xent
