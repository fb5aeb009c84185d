// SPDX-FileCopyrightText: the libxent authors
// SPDX-License-Identifier: Apache-2.0

// The one validator: from a caller's DLTensor, which is untrusted, to a view that a backend may follow blindly.
#pragma once

#include <xent/xent_plugin.h>

namespace xent {

// Sets of element types.
enum : uint32_t {
  kF16 = 1u << 0,
  kBF16 = 1u << 1,
  kF32 = 1u << 2,
  kF64 = 1u << 3,
  kI32 = 1u << 4,
  kI64 = 1u << 5,
  kU8 = 1u << 6,
  kBool = 1u << 7,
  kAnyFloat = kF16 | kBF16 | kF32 | kF64,
};

// The set of one type; empty for a type that libxent does not know.
uint32_t dtype_set(const DLDataType &dtype);

// [...] is the leading shape of the logits, or where a call has none the shape of the targets, with `rows` elements.
enum class Form {
  kScalar,        // [] or [1]
  kRows,          // [...]
  kScalarOrRows,  // one of the two
  kMatrix,        // [..., vocab]
  kPairs,         // [rows, 2]
  kTriple,        // [3]
  kPartial,       // [rows, partial_width]
  kPartials,      // [ranks, rows, partial_width]
};

struct TensorRule {
  const char *name;
  uint32_t dtypes;
  Form form;
};

// No tensor may span more bytes, so that sums of a few spans stay within int64.
inline constexpr int64_t kMaximumSpan = int64_t{1} << 61;

class TensorReader {
 public:
  TensorReader(const char *function, const xent_options &options, xent_error *err)
      : function_(function), options_(options), err_(err) {}

  // One of the two is to be called first: the shape decides what [...] is.
  xent_status read_logits(const DLTensor &tensor, xent_view *view);
  xent_status read_first_rows(const TensorRule &rule, const DLTensor &tensor, xent_view *view);
  xent_status read(const TensorRule &rule, const DLTensor &tensor, xent_view *view) const;
  int64_t rows() const { return rows_; }

 private:
  xent_status check_header(const char *name, const DLTensor &tensor) const;
  xent_status check_types(const TensorRule &rule, const DLTensor &tensor) const;
  xent_status check_shape(const TensorRule &rule, const DLTensor &tensor) const;
  xent_status take_leading(const char *name, const int64_t *shape, int32_t ndim, const DLTensor &tensor);
  xent_status make_view(const TensorRule &rule, const DLTensor &tensor, xent_view *view) const;
  bool is_leading(const int64_t *shape, int32_t ndim) const;

  const char *function_;
  const xent_options &options_;
  xent_error *err_;
  const char *leader_ = "logits' leading";  // whose shape [...] is, for messages
  const int64_t *leading_ = nullptr;
  int32_t leading_ndim_ = 0;
  int64_t rows_ = 0;
};

}  // namespace xent
