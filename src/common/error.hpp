// SPDX-FileCopyrightText: the libxent authors
// SPDX-License-Identifier: Apache-2.0

// How every layer reports a failure: one line that fills the caller's xent_error and returns the status.
#pragma once

#include <xent/xent.h>

#include <cstdarg>
#include <cstddef>
#include <cstdio>

namespace xent {

inline void write_error(xent_error *err, xent_status status, int32_t native_code, const char *format, va_list args) {
  // A struct too short for a message is left alone: it cannot be told from one that was never set up.
  constexpr size_t header = offsetof(xent_error, message);
  if (err == nullptr || err->struct_size <= header) return;
  err->status = status;
  err->native_code = native_code;
  const size_t room = err->struct_size < sizeof(xent_error) ? err->struct_size - header : sizeof(err->message);
  const int length = std::vsnprintf(err->message, room, format, args);
  if (length < 0 || static_cast<size_t>(length) < room) return;
  // A character of UTF-8 that was cut goes as a whole: `lead` is where the last one begins.
  size_t lead = room - 1;
  while (lead > 0 && room - lead < 4 && (err->message[lead - 1] & 0xC0) == 0x80) --lead;
  if (lead == 0) return;
  const auto first = static_cast<unsigned char>(err->message[--lead]);
  const size_t bytes = first >= 0xF0 ? 4 : first >= 0xE0 ? 3 : first >= 0xC0 ? 2 : 1;
  if (room - 1 - lead < bytes) err->message[lead] = '\0';
}

#if defined(__GNUC__)
__attribute__((format(printf, 3, 4)))
#endif
inline xent_status fail(xent_error *err, xent_status status, const char *format, ...) {
  va_list args;
  va_start(args, format);
  write_error(err, status, 0, format, args);
  va_end(args);
  return status;
}

#if defined(__GNUC__)
__attribute__((format(printf, 4, 5)))
#endif
inline xent_status fail_native(xent_error *err, xent_status status, int32_t native_code, const char *format, ...) {
  va_list args;
  va_start(args, format);
  write_error(err, status, native_code, format, args);
  va_end(args);
  return status;
}

}  // namespace xent
