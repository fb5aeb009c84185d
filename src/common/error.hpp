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
  std::vsnprintf(err->message, room, format, args);
}

#if defined(__GNUC__)
__attribute__((format(printf, 3, 4)))
#endif
inline xent_status
fail(xent_error *err, xent_status status, const char *format, ...) {
  va_list args;
  va_start(args, format);
  write_error(err, status, 0, format, args);
  va_end(args);
  return status;
}

#if defined(__GNUC__)
__attribute__((format(printf, 4, 5)))
#endif
inline xent_status
fail_native(xent_error *err, xent_status status, int32_t native_code, const char *format, ...) {
  va_list args;
  va_start(args, format);
  write_error(err, status, native_code, format, args);
  va_end(args);
  return status;
}

}  // namespace xent
