// SPDX-FileCopyrightText: the libxent authors
// SPDX-License-Identifier: Apache-2.0

// Where there is an nccl.h: what src/core/nccl_api.hpp says of NCCL without it. Compiling is the test.

#include <nccl.h>

#include <type_traits>

#include "core/nccl_api.hpp"

namespace xent::nccl {
namespace {

static_assert(sizeof(ncclResult_t) == sizeof(Result) && sizeof(ncclDataType_t) == sizeof(int));
static_assert(ncclSuccess == kSuccess && ncclInProgress == kInProgress && ncclUint8 == kUint8);
static_assert(std::is_pointer_v<ncclComm_t> && std::is_pointer_v<cudaStream_t>);

// `Ours`, with NCCL's enums for the ints that stand for them and its pointers for void *.
template <class Function, class Theirs>
inline constexpr bool same = std::is_same_v<Function, Theirs *>;
static_assert(same<decltype(&ncclCommCount), ncclResult_t(ncclComm_t, int *)>);
static_assert(same<decltype(&ncclCommUserRank), ncclResult_t(ncclComm_t, int *)>);
static_assert(same<decltype(&ncclCommCuDevice), ncclResult_t(ncclComm_t, int *)>);
static_assert(same<decltype(&ncclCommGetAsyncError), ncclResult_t(ncclComm_t, ncclResult_t *)>);
static_assert(same<decltype(&ncclAllGather),
                   ncclResult_t(const void *, void *, size_t, ncclDataType_t, ncclComm_t, cudaStream_t)>);
static_assert(same<decltype(&ncclGetErrorString), const char *(ncclResult_t)>);
static_assert(same<decltype(&ncclGetLastError), const char *(ncclComm_t)>);

}  // namespace
}  // namespace xent::nccl

int main() { return 0; }
