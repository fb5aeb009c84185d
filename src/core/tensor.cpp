// SPDX-FileCopyrightText: the libxent authors
// SPDX-License-Identifier: Apache-2.0

#include "core/tensor.hpp"

#include <algorithm>
#include <cinttypes>
#include <cstdio>

#include "common/dtype.hpp"
#include "common/error.hpp"
#include "core/describe.hpp"
#include "core/options.hpp"

namespace xent {
namespace {

constexpr int32_t kMaximumDims = XENT_MAX_LEADING_DIMS + 1;

Text<96> describe_set(uint32_t dtypes) {
  constexpr const char *names[] = {"float16", "bfloat16", "float32", "float64", "int32", "int64", "uint8", "bool"};
  Text<96> out;
  int used = 0;
  for (uint32_t i = 0; i < 8; ++i) {
    if ((dtypes >> i & 1u) == 0) continue;
    used += std::snprintf(out.text + used, sizeof out.text - used, "%s%s", used == 0 ? "" : " or ", names[i]);
  }
  return out;
}

// The offsets, in elements, between which a strided tensor lies. Overflow makes it invalid.
struct Span {
  int64_t low = 0;   // of the lowest element, <= 0
  int64_t high = 0;  // of the highest, >= 0
  bool valid = true;

  void add(int64_t extent, int64_t stride) {
    int64_t reach = 0;  // and so it stays where the size is 1, whatever the stride
    if (__builtin_mul_overflow(extent - 1, stride, &reach)) valid = false;
    int64_t &side = reach < 0 ? low : high;
    if (__builtin_add_overflow(side, reach, &side)) valid = false;
  }
  // In bytes below and above the first element.
  bool bytes(int64_t element, int64_t *below, int64_t *above) const {
    if (!valid || low < -kMaximumSpan || high >= kMaximumSpan) return false;
    int64_t total = 0;
    if (__builtin_mul_overflow(high - low + 1, element, &total) || total > kMaximumSpan) return false;
    *below = -low * element;
    *above = (high + 1) * element;
    return true;
  }
};

void packed_strides(const int64_t *shape, int32_t ndim, int64_t *strides) {
  int64_t stride = 1;
  for (int32_t dim = ndim - 1; dim >= 0; --dim) {
    strides[dim] = stride;
    // Shapes were compared with the plan's sizes, whose product fits.
    stride *= shape[dim];
  }
}

// Drops leading dimensions of size 1 and merges neighbours that one stride walks.
void merge_leading(const int64_t *shape, const int64_t *strides, int32_t leading, xent_view *view) {
  int32_t rank = 0;
  for (int32_t dim = 0; dim < leading; ++dim) {
    if (shape[dim] == 1) continue;
    int64_t whole = 0;
    if (rank > 0 && !__builtin_mul_overflow(strides[dim], shape[dim], &whole) && view->stride[rank - 1] == whole) {
      view->shape[rank - 1] *= shape[dim];
      view->stride[rank - 1] = strides[dim];
    } else {
      view->shape[rank] = shape[dim];
      view->stride[rank] = strides[dim];
      ++rank;
    }
  }
  view->rank = rank;
}

}  // namespace

uint32_t dtype_set(const DLDataType &dtype) {
  if (is_f32(dtype)) return kF32;
  if (is_bf16(dtype)) return kBF16;
  if (is_f16(dtype)) return kF16;
  if (is_f64(dtype)) return kF64;
  if (is_i64(dtype)) return kI64;
  if (is_i32(dtype)) return kI32;
  if (is_bool(dtype)) return kBool;
  if (is_u8(dtype)) return kU8;
  return 0;
}

xent_status TensorReader::read_logits(const DLTensor &tensor, xent_view *view) {
  const TensorRule rule{"logits", dtype_set(options_.logits_dtype), Form::kMatrix};
  if (const xent_status status = check_header(rule.name, tensor)) return status;
  if (const xent_status status = check_types(rule, tensor)) return status;
  const int32_t leading = tensor.ndim - 1;
  if (leading < 0 || tensor.shape[leading] != options_.vocab) {
    return fail(err_, XENT_INVALID_ARGUMENT,
                "%s: logits: shape %s; it must be [..., vocab], and the plan's vocab is %" PRId64, function_,
                describe_list(tensor.shape, tensor.ndim).text, options_.vocab);
  }
  if (const xent_status status = take_leading(rule.name, tensor.shape, leading, tensor)) return status;
  return make_view(rule, tensor, view);
}

xent_status TensorReader::read_first_rows(const TensorRule &rule, const DLTensor &tensor, xent_view *view) {
  if (const xent_status status = check_header(rule.name, tensor)) return status;
  if (const xent_status status = check_types(rule, tensor)) return status;
  if (tensor.ndim > XENT_MAX_LEADING_DIMS) {
    return fail(err_, XENT_INVALID_ARGUMENT, "%s: %s: ndim is %" PRId32 "; it must be in [0, %d]", function_, rule.name,
                tensor.ndim, XENT_MAX_LEADING_DIMS);
  }
  if (const xent_status status = take_leading(rule.name, tensor.shape, tensor.ndim, tensor)) return status;
  leader_ = "targets'";
  return make_view(rule, tensor, view);
}

xent_status TensorReader::read(const TensorRule &rule, const DLTensor &tensor, xent_view *view) const {
  if (const xent_status status = check_header(rule.name, tensor)) return status;
  if (const xent_status status = check_types(rule, tensor)) return status;
  if (const xent_status status = check_shape(rule, tensor)) return status;
  return make_view(rule, tensor, view);
}

xent_status TensorReader::check_header(const char *name, const DLTensor &tensor) const {
  if (tensor.ndim < 0 || tensor.ndim > kMaximumDims) {
    return fail(err_, XENT_INVALID_ARGUMENT, "%s: %s: ndim is %" PRId32 "; it must be in [0, %" PRId32 "]", function_,
                name, tensor.ndim, kMaximumDims);
  }
  if (tensor.ndim > 0 && tensor.shape == nullptr) {
    return fail(err_, XENT_INVALID_ARGUMENT, "%s: %s: shape is NULL with ndim %" PRId32, function_, name, tensor.ndim);
  }
  for (int32_t dim = 0; dim < tensor.ndim; ++dim) {
    if (tensor.shape[dim] >= 0) continue;
    return fail(err_, XENT_INVALID_ARGUMENT, "%s: %s: shape %s has a negative size", function_, name,
                describe_list(tensor.shape, tensor.ndim).text);
  }
  return XENT_OK;
}

xent_status TensorReader::check_types(const TensorRule &rule, const DLTensor &tensor) const {
  const DLDevice want = options_.device;
  const DLDevice got = tensor.device;
  const bool managed = want.device_type == kDLCUDA && got.device_type == kDLCUDAManaged;
  const bool fits = on_cpu(options_)
                        ? got.device_type == kDLCPU || got.device_type == kDLCUDAHost
                        : (got.device_type == want.device_type || managed) && got.device_id == want.device_id;
  if (!fits) {
    return fail(err_, XENT_INVALID_ARGUMENT, "%s: %s: is on device %s; the plan's device is %s", function_, rule.name,
                describe(got).text, describe(want).text);
  }
  if ((dtype_set(tensor.dtype) & rule.dtypes) == 0) {
    return fail(err_, XENT_INVALID_ARGUMENT, "%s: %s: dtype is %s; this plan takes %s", function_, rule.name,
                describe(tensor.dtype).text, describe_set(rule.dtypes).text);
  }
  return XENT_OK;
}

xent_status TensorReader::take_leading(const char *name, const int64_t *shape, int32_t ndim, const DLTensor &tensor) {
  int64_t rows = 1;
  bool empty = false;
  bool overflow = false;
  for (int32_t dim = 0; dim < ndim; ++dim) {
    empty = empty || shape[dim] == 0;
    overflow = overflow || __builtin_mul_overflow(rows, shape[dim], &rows);
  }
  if (!empty && (overflow || rows > options_.max_rows)) {
    return fail(err_, XENT_INVALID_ARGUMENT, "%s: %s: shape %s has more rows than the plan's max_rows, %" PRId64,
                function_, name, describe_list(tensor.shape, tensor.ndim).text, options_.max_rows);
  }
  leading_ = shape;
  leading_ndim_ = ndim;
  rows_ = empty ? 0 : rows;
  return XENT_OK;
}

bool TensorReader::is_leading(const int64_t *shape, int32_t ndim) const {
  if (ndim != leading_ndim_) return false;
  for (int32_t dim = 0; dim < ndim; ++dim) {
    if (shape[dim] != leading_[dim]) return false;
  }
  return true;
}

xent_status TensorReader::check_shape(const TensorRule &rule, const DLTensor &tensor) const {
  const int64_t *shape = tensor.shape;
  const int32_t ndim = tensor.ndim;
  const bool scalar = ndim == 0 || (ndim == 1 && shape[0] == 1);
  char must[256];
  switch (rule.form) {
    case Form::kScalar:
      if (scalar) return XENT_OK;
      std::snprintf(must, sizeof must, "; it must be [] or [1]");
      break;
    case Form::kRows:
      if (is_leading(shape, ndim)) return XENT_OK;
      std::snprintf(must, sizeof must, " does not match the %s shape %s", leader_,
                    describe_list(leading_, leading_ndim_).text);
      break;
    case Form::kScalarOrRows:
      if (scalar || is_leading(shape, ndim)) return XENT_OK;
      std::snprintf(must, sizeof must, "; it must be [], [1] or the %s shape %s", leader_,
                    describe_list(leading_, leading_ndim_).text);
      break;
    case Form::kMatrix: {
      if (ndim > 0 && is_leading(shape, ndim - 1) && shape[ndim - 1] == options_.vocab) return XENT_OK;
      int64_t matrix[XENT_MAX_LEADING_DIMS + 1];
      std::copy_n(leading_, leading_ndim_, matrix);
      matrix[leading_ndim_] = options_.vocab;
      std::snprintf(must, sizeof must, "; it must be [..., vocab] = %s", describe_list(matrix, leading_ndim_ + 1).text);
      break;
    }
    case Form::kPairs:
      if (ndim == 2 && shape[0] == rows_ && shape[1] == 2) return XENT_OK;
      std::snprintf(must, sizeof must, "; it must be [rows, 2] = [%" PRId64 ", 2]", rows_);
      break;
    case Form::kTriple:
      if (ndim == 1 && shape[0] == 3) return XENT_OK;
      std::snprintf(must, sizeof must, "; it must be [3]");
      break;
    case Form::kPartial: {
      const int64_t width = partial_width(options_);
      if (ndim == 2 && shape[0] == rows_ && shape[1] == width) return XENT_OK;
      std::snprintf(must, sizeof must, "; it must be [rows, partial_width] = [%" PRId64 ", %" PRId64 "]", rows_, width);
      break;
    }
    case Form::kPartials: {
      const int64_t width = partial_width(options_);
      if (ndim == 3 && shape[0] == options_.ranks && shape[1] == rows_ && shape[2] == width) return XENT_OK;
      std::snprintf(must, sizeof must,
                    "; it must be [ranks, rows, partial_width] = [%" PRId32 ", %" PRId64 ", %" PRId64 "]",
                    options_.ranks, rows_, width);
      break;
    }
  }
  return fail(err_, XENT_INVALID_ARGUMENT, "%s: %s: shape %s%s", function_, rule.name, describe_list(shape, ndim).text,
              must);
}

xent_status TensorReader::make_view(const TensorRule &rule, const DLTensor &tensor, xent_view *view) const {
  const char *name = rule.name;
  const int32_t ndim = tensor.ndim;
  const int64_t *shape = tensor.shape;
  view->dtype = tensor.dtype;
  view->data = nullptr;
  view->rank = 0;
  view->col_stride = 1;
  // A tensor without elements may hold anything in data and strides.
  for (int32_t dim = 0; dim < ndim; ++dim) {
    if (shape[dim] == 0) return XENT_OK;
  }

  int64_t packed[kMaximumDims];
  const int64_t *strides = tensor.strides;
  if (strides == nullptr) {
    packed_strides(shape, ndim, packed);
    strides = packed;
  }
  Span span;
  for (int32_t dim = 0; dim < ndim; ++dim) span.add(shape[dim], strides[dim]);
  const auto element = static_cast<int64_t>(element_size(tensor.dtype));
  int64_t below = 0;
  int64_t above = 0;
  if (!span.bytes(element, &below, &above)) {
    return fail(err_, XENT_INVALID_ARGUMENT, "%s: %s: shape %s with strides %s spans more than 2^61 bytes", function_,
                name, describe_list(shape, ndim).text, describe_list(strides, ndim).text);
  }

  if (tensor.data == nullptr) {
    return fail(err_, XENT_INVALID_ARGUMENT, "%s: %s: data is NULL with shape %s", function_, name,
                describe_list(shape, ndim).text);
  }
  uint64_t address = 0;
  uint64_t end = 0;
  if (__builtin_add_overflow(reinterpret_cast<uintptr_t>(tensor.data), tensor.byte_offset, &address) ||
      address < static_cast<uint64_t>(below) || __builtin_add_overflow(address, static_cast<uint64_t>(above), &end)) {
    return fail(err_, XENT_INVALID_ARGUMENT,
                "%s: %s: data %p with byte_offset %" PRIu64 " and strides %s leaves the address space", function_, name,
                tensor.data, tensor.byte_offset, describe_list(strides, ndim).text);
  }
  if ((address & static_cast<uint64_t>(element - 1)) != 0) {  // sizes of elements are powers of two
    return fail(err_, XENT_INVALID_ARGUMENT,
                "%s: %s: address 0x%" PRIx64 " (data + byte_offset) is not aligned to the %" PRId64 " bytes of %s",
                function_, name, address, element, describe(tensor.dtype).text);
  }

  view->data = reinterpret_cast<void *>(address);
  const bool columns = rule.form == Form::kMatrix || rule.form == Form::kPairs || rule.form == Form::kTriple ||
                       rule.form == Form::kPartial || rule.form == Form::kPartials;
  if (columns && shape[ndim - 1] > 1) view->col_stride = strides[ndim - 1];
  merge_leading(shape, strides, columns ? ndim - 1 : ndim, view);
  return XENT_OK;
}

}  // namespace xent
