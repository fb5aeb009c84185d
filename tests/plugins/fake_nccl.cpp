// SPDX-FileCopyrightText: the libxent authors
// SPDX-License-Identifier: Apache-2.0

#include "fake_nccl.hpp"

#define NCCL_API extern "C" __attribute__((visibility("default")))

namespace {
FakeNccl state;
}

NCCL_API FakeNccl *fake_nccl();
FakeNccl *fake_nccl() { return &state; }

NCCL_API int ncclCommCount(const void *comm, int *count);
int ncclCommCount(const void *, int *count) {
  *count = state.ranks;
  return state.count_result;
}

NCCL_API int ncclCommUserRank(const void *comm, int *rank);
int ncclCommUserRank(const void *, int *rank) {
  *rank = state.rank;
  return state.rank_result;
}

NCCL_API int ncclCommCuDevice(const void *comm, int *device);
int ncclCommCuDevice(const void *, int *device) {
  *device = state.device;
  return state.device_result;
}

NCCL_API int ncclCommGetAsyncError(void *comm, int *error);
int ncclCommGetAsyncError(void *, int *error) {
  ++state.polls;
  *error = state.pending > 0 ? 7 : state.state;
  if (state.pending > 0) --state.pending;
  return state.async_result;
}

NCCL_API int ncclAllGather(const void *send, void *recv, size_t count, int data_type, void *comm, void *stream);
int ncclAllGather(const void *send, void *recv, size_t count, int data_type, void *comm, void *stream) {
  ++state.gathers;
  state.send = send;
  state.recv = recv;
  state.count = count;
  state.data_type = data_type;
  state.comm = comm;
  state.stream = stream;
  if (state.on_gather != nullptr) state.on_gather();
  return state.gather_result;
}

NCCL_API const char *ncclGetErrorString(int result);
const char *ncclGetErrorString(int result) { return result == 6 ? "remote process exited" : "some NCCL error"; }

#ifndef FAKE_NCCL_OLD
NCCL_API const char *ncclGetLastError(void *comm);
const char *ncclGetLastError(void *) { return state.last_error; }
#endif
