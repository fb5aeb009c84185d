// SPDX-FileCopyrightText: the libxent authors
// SPDX-License-Identifier: Apache-2.0

// A libnccl that moves nothing: it records what it is asked and answers as it is told.
#pragma once

#include <cstddef>

struct FakeNccl {
  int ranks = 3, rank = 1, device = 0;
  // ncclResult_t of each function.
  int count_result = 0, rank_result = 0, device_result = 0, gather_result = 0, async_result = 0;
  int state = 0;    // what ncclCommGetAsyncError tells
  int pending = 0;  // so many times it tells ncclInProgress first
  const char *last_error = "";

  int gathers = 0, polls = 0;
  const void *send = nullptr;
  void *recv = nullptr, *comm = nullptr, *stream = nullptr;
  size_t count = 0;
  int data_type = -1;
  void (*on_gather)() = nullptr;
};

// Exported as fake_nccl.
using FakeNcclFunction = FakeNccl *(*)();
