// SPDX-FileCopyrightText: the libxent authors
// SPDX-License-Identifier: Apache-2.0

#include "cpu/rows.hpp"

#include <bit>
#include <cstring>

namespace xent::cpu {
namespace {

template <class T>
T load(const xent_view &view, int64_t offset) {
  T value;
  std::memcpy(&value, static_cast<const char *>(view.data) + offset * static_cast<int64_t>(sizeof(T)), sizeof(T));
  return value;
}
template <class T>
void store(const xent_view &view, int64_t offset, T value) {
  std::memcpy(static_cast<char *>(view.data) + offset * static_cast<int64_t>(sizeof(T)), &value, sizeof(T));
}

double f16_value(uint16_t bits) {
  const int exponent = (bits >> 10) & 31;
  const int mantissa = bits & 1023;
  double value;
  if (exponent == 31) {
    value = mantissa != 0 ? std::numeric_limits<double>::quiet_NaN() : std::numeric_limits<double>::infinity();
  } else {
    value = exponent == 0 ? std::ldexp(mantissa, -24) : std::ldexp(mantissa + 1024, exponent - 25);
  }
  return (bits & 0x8000) != 0 ? -value : value;
}

bool masked_out(const xent_view &mask, int64_t offset) {
  if (is_f32(mask.dtype)) return load<float>(mask, offset) == 0;
  if (is_i32(mask.dtype)) return load<int32_t>(mask, offset) == 0;
  if (is_i64(mask.dtype)) return load<int64_t>(mask, offset) == 0;
  return load<uint8_t>(mask, offset) == 0;
}

}  // namespace

double read_number(const xent_view &view, int64_t offset) {
  const DLDataType type = view.dtype;
  if (is_f32(type)) return load<float>(view, offset);
  if (is_f64(type)) return load<double>(view, offset);
  if (is_bf16(type)) return std::bit_cast<float>(static_cast<uint32_t>(load<uint16_t>(view, offset)) << 16);
  if (is_f16(type)) return f16_value(load<uint16_t>(view, offset));
  if (is_i32(type)) return load<int32_t>(view, offset);
  return static_cast<double>(load<int64_t>(view, offset));
}

double read_rounded(const xent_view &view, int64_t offset, bool to_double) {
  if (to_double) return read_number(view, offset);
  if (is_i64(view.dtype)) return static_cast<float>(load<int64_t>(view, offset));
  return static_cast<float>(read_number(view, offset));
}

int64_t read_integer(const xent_view &view, int64_t offset) {
  return is_i64(view.dtype) ? load<int64_t>(view, offset) : load<int32_t>(view, offset);
}

void write_number(const xent_view &view, int64_t offset, double value) {
  if (is_f64(view.dtype)) {
    store(view, offset, value);
  } else {
    store(view, offset, static_cast<float>(value));
  }
}

void write_integer(const xent_view &view, int64_t offset, int64_t value) {
  if (is_i64(view.dtype)) {
    store(view, offset, value);
  } else {
    store(view, offset, static_cast<int32_t>(value));
  }
}

const void *row_address(const xent_view &view, int64_t row) {
  return static_cast<const char *>(view.data) + row_offset(view, row) * static_cast<int64_t>(element_size(view.dtype));
}

Row read_target(const xent_problem &problem, int64_t row) {
  const xent_options &options = *problem.options;
  const int64_t at = row_offset(problem.targets, row);
  const int64_t target = read_integer(problem.targets, at);
  if (options.has_ignore_index != 0 && target == options.ignore_index) return {RowKind::kIgnored, target};
  if (present(problem.mask) && masked_out(problem.mask, row_offset(problem.mask, row))) {
    return {RowKind::kIgnored, target};
  }
  return {target < 0 || target >= options.classes ? RowKind::kOutOfRange : RowKind::kCounted, target};
}

}  // namespace xent::cpu
