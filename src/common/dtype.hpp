// SPDX-FileCopyrightText: the libxent authors
// SPDX-License-Identifier: Apache-2.0

// The element types of DLPack that libxent knows. kDLBool is younger than the oldest header we build with.
#pragma once

#include <xent/xent.h>

namespace xent {

inline constexpr uint8_t kBoolCode = 6;

inline bool is(const DLDataType &type, uint8_t code, uint8_t bits) {
  return type.code == code && type.bits == bits && type.lanes == 1;
}
inline bool is_f16(const DLDataType &type) { return is(type, kDLFloat, 16); }
inline bool is_f32(const DLDataType &type) { return is(type, kDLFloat, 32); }
inline bool is_f64(const DLDataType &type) { return is(type, kDLFloat, 64); }
inline bool is_bf16(const DLDataType &type) { return is(type, kDLBfloat, 16); }
inline bool is_i32(const DLDataType &type) { return is(type, kDLInt, 32); }
inline bool is_i64(const DLDataType &type) { return is(type, kDLInt, 64); }
inline bool is_u8(const DLDataType &type) { return is(type, kDLUInt, 8); }
inline bool is_bool(const DLDataType &type) { return is(type, kBoolCode, 8); }
inline bool same_dtype(const DLDataType &a, const DLDataType &b) {
  return a.code == b.code && a.bits == b.bits && a.lanes == b.lanes;
}
inline size_t element_size(const DLDataType &type) { return (size_t{type.bits} + 7) / 8; }

}  // namespace xent
