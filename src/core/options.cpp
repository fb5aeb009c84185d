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
constexpr int64_t kPartialBytes = 48;  // of one rank, at most

bool unset(const DLDataType &dtype) { return dtype.code == 0 && dtype.bits == 0 && dtype.lanes == 0; }

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

xent_status check_sizes(const xent_plan_desc &desc, xent_error *err) {
  const int64_t least = desc.ranks == 0 ? 1 : 0;
  if (desc.vocab < least) {
    return fail(err, XENT_INVALID_ARGUMENT, "%s: vocab: is %" PRId64 "; it must be at least %" PRId64, kFunction,
                desc.vocab, least);
  }
  if (desc.max_rows < 0) {
    return fail(err, XENT_INVALID_ARGUMENT, "%s: max_rows: is %" PRId64 "; it must not be negative", kFunction,
                desc.max_rows);
  }
  const int64_t partials = desc.ranks == 0 ? 0 : kPartialBytes * (int64_t{desc.ranks} + 1);
  int64_t row_bytes = 0;
  int64_t total_bytes = 0;
  if (__builtin_mul_overflow(desc.vocab, int64_t{8}, &row_bytes) ||
      __builtin_add_overflow(row_bytes, kRowBytes + partials, &row_bytes) ||
      __builtin_mul_overflow(row_bytes, desc.max_rows, &total_bytes)) {
    return fail(err, XENT_INVALID_ARGUMENT,
                "%s: max_rows, vocab: %" PRId64 " rows of %" PRId64 " columns have no size in 63 bits", kFunction,
                desc.max_rows, desc.vocab);
  }
  return XENT_OK;
}

xent_status resolve_whole(const xent_plan_desc &desc, xent_options *out, xent_error *err) {
  if (desc.class_offsets != nullptr || desc.rank != 0 || desc.comm != nullptr) {
    return fail(err, XENT_INVALID_ARGUMENT,
                "%s: ranks: is 0, the vocabulary is not split, but class_offsets, rank or comm is set", kFunction);
  }
  if (desc.classes < 0 || desc.classes > desc.vocab) {
    return fail(err, XENT_INVALID_ARGUMENT, "%s: classes: is %" PRId64 "; it must be in [0, vocab = %" PRId64 "]",
                kFunction, desc.classes, desc.vocab);
  }
  out->classes = out->columns = desc.classes == 0 ? desc.vocab : desc.classes;
  return XENT_OK;
}

xent_status resolve_split(const xent_plan_desc &desc, xent_options *out, xent_error *err) {
  const int64_t *offsets = desc.class_offsets;
  if (desc.rank < 0 || desc.rank >= desc.ranks) {
    return fail(err, XENT_INVALID_ARGUMENT, "%s: rank: is %" PRId32 "; it must be in [0, ranks = %" PRId32 ")",
                kFunction, desc.rank, desc.ranks);
  }
  if (offsets == nullptr) {
    return fail(err, XENT_INVALID_ARGUMENT, "%s: class_offsets: is NULL; ranks is %" PRId32, kFunction, desc.ranks);
  }
  if (offsets[0] != 0) {
    return fail(err, XENT_INVALID_ARGUMENT,
                "%s: class_offsets: [0] is %" PRId64 "; it must be 0, or classes before it are on no rank", kFunction,
                offsets[0]);
  }
  for (int32_t r = 0; r < desc.ranks; ++r) {
    if (offsets[r + 1] >= offsets[r]) continue;
    return fail(err, XENT_INVALID_ARGUMENT,
                "%s: class_offsets: [%" PRId32 "] is %" PRId64 " and [%" PRId32 "] is %" PRId64
                "; they must not decrease, or shards overlap",
                kFunction, r, offsets[r], r + 1, offsets[r + 1]);
  }
  const int64_t classes = offsets[desc.ranks];
  const int64_t columns = offsets[desc.rank + 1] - offsets[desc.rank];
  if (classes == 0) {
    return fail(err, XENT_INVALID_ARGUMENT, "%s: class_offsets: [%" PRId32 "] is 0; there must be a class", kFunction,
                desc.ranks);
  }
  if (desc.classes != 0 && desc.classes != classes) {
    return fail(err, XENT_INVALID_ARGUMENT,
                "%s: classes: is %" PRId64 "; it must be 0 or class_offsets[ranks] = %" PRId64, kFunction, desc.classes,
                classes);
  }
  if (columns > desc.vocab) {
    return fail(err, XENT_INVALID_ARGUMENT,
                "%s: class_offsets: rank %" PRId32 " holds %" PRId64 " classes, but its vocab is %" PRId64 " columns",
                kFunction, desc.rank, columns, desc.vocab);
  }
  if (columns > 0 && columns < classes && desc.vocab >= classes) {
    return fail(err, XENT_INVALID_ARGUMENT,
                "%s: vocab: is %" PRId64 ", but rank %" PRId32 " holds %" PRId64 " of %" PRId64
                " classes: the logits seem to be gathered already",
                kFunction, desc.vocab, desc.rank, columns, classes);
  }
  out->classes = classes;
  out->columns = columns;
  out->class_begin = offsets[desc.rank];
  out->class_offsets = offsets;
  out->rank = desc.rank;
  out->ranks = desc.ranks;
  return XENT_OK;
}

xent_status resolve_sizes(const xent_plan_desc &desc, xent_options *out, xent_error *err) {
  if (desc.ranks < 0 || desc.ranks > kMaximumRanks) {
    return fail(err, XENT_INVALID_ARGUMENT, "%s: ranks: is %" PRId32 "; it must be in [0, %" PRId32 "]", kFunction,
                desc.ranks, kMaximumRanks);
  }
  if (const xent_status status = check_sizes(desc, err)) return status;
  out->vocab = desc.vocab;
  out->max_rows = desc.max_rows;
  return desc.ranks == 0 ? resolve_whole(desc, out, err) : resolve_split(desc, out, err);
}

// A partial carries the place of the largest logit in its shard in as many bytes as a number of acc has.
xent_status check_predicted(const xent_options &options, xent_error *err) {
  if (options.ranks == 0 || options.predicted == 0 || is_f64(options.logits_dtype)) return XENT_OK;
  for (int32_t r = 0; r < options.ranks; ++r) {
    const int64_t columns = options.class_offsets[r + 1] - options.class_offsets[r];
    if (columns <= INT32_MAX) continue;
    return fail(err, XENT_INVALID_ARGUMENT,
                "%s: class_offsets: rank %" PRId32 " holds %" PRId64
                " classes; with XENT_PLAN_PREDICTED a rank may hold 2^31 - 1",
                kFunction, r, columns);
  }
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

xent_status resolve_device(const char *function, DLDevice device, DLDevice *out, xent_error *err) {
  const auto type = static_cast<int32_t>(device.device_type);
  const bool unset = type == 0 && device.device_id == 0;
  if (unset || type == kDLCPU || type == kDLCUDAHost) {
    *out = DLDevice{kDLCPU, 0};
    return XENT_OK;
  }
  if (type <= 0 || device.device_id < 0) {
    return fail(err, XENT_INVALID_ARGUMENT, "%s: device: {%" PRId32 ", %" PRId32 "} is not a DLPack device", function,
                type, device.device_id);
  }
  *out = device;
  if (type == kDLCUDAManaged) out->device_type = kDLCUDA;
  return XENT_OK;
}

xent_status resolve_options(const xent_plan_desc &desc, xent_options *out, xent_error *err) {
  *out = xent_options{};
  out->struct_size = sizeof(xent_options);
  if (const xent_status status = resolve_device(kFunction, desc.device, &out->device, err)) return status;
  if (const xent_status status = resolve_dtypes(desc, out, err)) return status;
  if (const xent_status status = resolve_sizes(desc, out, err)) return status;
  if (const xent_status status = resolve_flags(desc, out, err)) return status;
  if (const xent_status status = check_predicted(*out, err)) return status;
  return resolve_numbers(desc, out, err);
}

}  // namespace xent
