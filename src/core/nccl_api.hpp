// SPDX-FileCopyrightText: the libxent authors
// SPDX-License-Identifier: Apache-2.0

// The few functions of NCCL that are called, as nccl.h declares them: with its enums as the ints that they are and its
// pointers as void *. A test compares with the header where there is one.
#pragma once

#include <cstddef>

namespace xent::nccl {

using Result = int;  // ncclResult_t
inline constexpr Result kSuccess = 0;
inline constexpr Result kInProgress = 7;
inline constexpr int kUint8 = 1;  // of ncclDataType_t

struct Api {
  Result (*comm_count)(const void *comm, int *count);
  Result (*comm_user_rank)(const void *comm, int *rank);
  Result (*comm_cu_device)(const void *comm, int *device);
  Result (*comm_get_async_error)(void *comm, Result *error);
  Result (*all_gather)(const void *send, void *recv, size_t send_count, int data_type, void *comm, void *stream);
  const char *(*get_error_string)(Result result);
  const char *(*get_last_error)(void *comm);  // younger than the others: may be NULL
};

}  // namespace xent::nccl
