// SPDX-FileCopyrightText: the libxent authors
// SPDX-License-Identifier: Apache-2.0

// Reading and filling of the sized structs of the C API, by one rule for all of them.
#pragma once

#include <xent/xent.h>

#include <cstddef>
#include <cstring>

#include "common/error.hpp"

namespace xent {

// The end of the last field of the first release: what every binary built against libxent covers.
template <class T>
inline constexpr size_t kMinimumSize = 0;
#define XENT_MINIMUM_SIZE(type, last) \
  template <>                         \
  inline constexpr size_t kMinimumSize<type> = offsetof(type, last) + sizeof(type::last)
XENT_MINIMUM_SIZE(xent_context_desc, flags);
XENT_MINIMUM_SIZE(xent_comm_desc, reserved);
XENT_MINIMUM_SIZE(xent_plan_desc, comm);
XENT_MINIMUM_SIZE(xent_plan_info, partial_width);
XENT_MINIMUM_SIZE(xent_forward_args, row_counts);
XENT_MINIMUM_SIZE(xent_backward_args, grad_logits);
XENT_MINIMUM_SIZE(xent_loss_and_grad_args, grad_logits);
XENT_MINIMUM_SIZE(xent_scale_grad_args, grad_logits);
XENT_MINIMUM_SIZE(xent_partial_args, partial);
XENT_MINIMUM_SIZE(xent_combine_args, partials);
#undef XENT_MINIMUM_SIZE

// No struct grows past this, so a larger struct_size is an uninitialised one, not to be followed through memory.
inline constexpr size_t kMaximumSize = 4096;

template <class T>
xent_status check_size(const char *function, const char *argument, size_t size, xent_error *err) {
  static_assert(kMinimumSize<T> != 0 && kMinimumSize<T> <= sizeof(T) && sizeof(T) <= kMaximumSize);
  if (size >= kMinimumSize<T> && size <= kMaximumSize) return XENT_OK;
  return fail(err, XENT_INVALID_STRUCT,
              "%s: %s: struct_size is %zu; at least %zu is needed (set it to sizeof) and at most %zu", function,
              argument, size, kMinimumSize<T>, kMaximumSize);
}

// Copies a caller's struct into `out`, zero where the caller's is shorter.
template <class T>
xent_status read_struct(const char *function, const char *argument, const T *in, T *out, xent_error *err) {
  if (in == nullptr) return fail(err, XENT_INVALID_ARGUMENT, "%s: %s: is NULL", function, argument);
  const size_t size = in->struct_size;
  if (const xent_status status = check_size<T>(function, argument, size, err)) return status;
  const auto *bytes = reinterpret_cast<const unsigned char *>(in);
  for (size_t i = sizeof(T); i < size; ++i) {
    if (bytes[i] == 0) continue;
    return fail(err, XENT_INVALID_STRUCT,
                "%s: %s: byte %zu of %zu is set, but this library knows %zu: the caller uses an option that it lacks",
                function, argument, i, size, sizeof(T));
  }
  if (size < sizeof(T)) std::memset(static_cast<void *>(out), 0, sizeof(T));
  std::memcpy(static_cast<void *>(out), bytes, size < sizeof(T) ? size : sizeof(T));
  out->struct_size = sizeof(T);
  if constexpr (requires { out->next; }) {
    if (out->next != nullptr) {
      return fail(err, XENT_INVALID_STRUCT, "%s: %s: next is not NULL; this library knows no extension", function,
                  argument);
    }
  }
  return XENT_OK;
}

// Fills a caller's struct as far as it reaches; bytes that only a newer caller knows become 0.
template <class T>
xent_status write_struct(const char *function, const char *argument, const T &in, T *out, xent_error *err) {
  if (out == nullptr) return fail(err, XENT_INVALID_ARGUMENT, "%s: %s: is NULL", function, argument);
  const size_t size = out->struct_size;
  if (const xent_status status = check_size<T>(function, argument, size, err)) return status;
  std::memcpy(static_cast<void *>(out), &in, size < sizeof(T) ? size : sizeof(T));
  if (size > sizeof(T)) std::memset(reinterpret_cast<unsigned char *>(out) + sizeof(T), 0, size - sizeof(T));
  out->struct_size = size;
  return XENT_OK;
}

}  // namespace xent
