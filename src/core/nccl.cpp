// SPDX-FileCopyrightText: the libxent authors
// SPDX-License-Identifier: Apache-2.0

// A communicator made of an ncclComm_t. NCCL is neither linked nor needed to build: a communicator may only be given to
// the very library that made it, and that one its owner has loaded already.

#include <dlfcn.h>
#include <link.h>

#include <chrono>
#include <cstring>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "common/error.hpp"
#include "core/comm.hpp"
#include "core/context.hpp"
#include "core/nccl_api.hpp"

namespace xent {
namespace {

struct NcclComm {
  nccl::Api api{};
  void *comm = nullptr;

  std::string describe(nccl::Result result) const {
    const char *name = api.get_error_string(result);
    std::string text = name == nullptr ? "unknown error" : name;
    const char *last = api.get_last_error == nullptr ? nullptr : api.get_last_error(comm);
    if (last != nullptr && last[0] != '\0') text += std::string(": ") + last;
    return text;
  }
  xent_status fail(xent_error *err, const char *what, nccl::Result result) const {
    return fail_native(err, XENT_COMM_ERROR, result, "%s: %s (ncclResult_t %d)", what, describe(result).c_str(),
                       result);
  }
  xent_status async_error(xent_error *err) const {
    nccl::Result state = nccl::kSuccess;
    const nccl::Result result = api.comm_get_async_error(comm, &state);
    if (result != nccl::kSuccess) return fail(err, "ncclCommGetAsyncError", result);
    if (state == nccl::kSuccess || state == nccl::kInProgress) return XENT_OK;
    return fail(err, "the communicator", state);
  }
};

xent_status all_gather(void *user, const void *send, void *recv, size_t bytes, void *stream, xent_error *err) {
  const NcclComm &nccl = *static_cast<const NcclComm *>(user);
  nccl::Result result = nccl.api.all_gather(send, recv, bytes, nccl::kUint8, nccl.comm, stream);
  // A non-blocking communicator enqueues in a thread of its own. Its owner's abort ends the wait.
  while (result == nccl::kInProgress) {
    const nccl::Result asked = nccl.api.comm_get_async_error(nccl.comm, &result);
    if (asked != nccl::kSuccess) return nccl.fail(err, "ncclCommGetAsyncError", asked);
    if (result == nccl::kInProgress) std::this_thread::sleep_for(std::chrono::microseconds(20));
  }
  return result == nccl::kSuccess ? XENT_OK : nccl.fail(err, "ncclAllGather", result);
}

xent_status async_error(void *user, xent_error *err) { return static_cast<const NcclComm *>(user)->async_error(err); }

void release(void *user) { delete static_cast<NcclComm *>(user); }

// Every libnccl.so* that the process has loaded, by path.
std::vector<std::string> loaded_libraries() {
  std::vector<std::string> found;
  dl_iterate_phdr(
      [](dl_phdr_info *info, size_t, void *list) {
        const char *path = info->dlpi_name == nullptr ? "" : info->dlpi_name;
        const char *slash = std::strrchr(path, '/');
        if (std::strncmp(slash == nullptr ? path : slash + 1, "libnccl.so", 10) == 0) {
          static_cast<std::vector<std::string> *>(list)->push_back(path);
        }
        return 0;
      },
      &found);
  return found;
}

// RTLD_DEFAULT where no libnccl.so is loaded: NCCL may be part of the program.
xent_status find_library(const char *function, void **out, xent_error *err) {
  *out = RTLD_DEFAULT;
  const std::vector<std::string> found = loaded_libraries();
  if (found.empty()) return XENT_OK;
  if (found.size() > 1) {
    return fail(err, XENT_INVALID_ARGUMENT,
                "%s: nccl_library: is NULL, but this process has loaded %s and %s: give the handle of the one that "
                "made the communicator",
                function, found[0].c_str(), found[1].c_str());
  }
  void *const handle = dlopen(found[0].c_str(), RTLD_LAZY | RTLD_NOLOAD);
  if (handle == nullptr) {
    return fail(err, XENT_PLUGIN_ERROR, "%s: nccl_library: %s is loaded and cannot be opened", function,
                found[0].c_str());
  }
  dlclose(handle);  // whoever made the communicator keeps it loaded
  *out = handle;
  return XENT_OK;
}

template <class Function>
bool find(void *library, const char *name, Function *out) {
  *out = reinterpret_cast<Function>(dlsym(library, name));
  return *out != nullptr;
}

xent_status find_functions(const char *function, void *library, nccl::Api *api, xent_error *err) {
  const char *missing = !find(library, "ncclCommCount", &api->comm_count)                     ? "ncclCommCount"
                        : !find(library, "ncclCommUserRank", &api->comm_user_rank)            ? "ncclCommUserRank"
                        : !find(library, "ncclCommCuDevice", &api->comm_cu_device)            ? "ncclCommCuDevice"
                        : !find(library, "ncclCommGetAsyncError", &api->comm_get_async_error) ? "ncclCommGetAsyncError"
                        : !find(library, "ncclAllGather", &api->all_gather)                   ? "ncclAllGather"
                        : !find(library, "ncclGetErrorString", &api->get_error_string)        ? "ncclGetErrorString"
                                                                                              : nullptr;
  find(library, "ncclGetLastError", &api->get_last_error);
  if (missing == nullptr) return XENT_OK;
  return fail(err, XENT_PLUGIN_ERROR, "%s: nccl_library: %s has no %s", function,
              library == RTLD_DEFAULT ? "this process has loaded no libnccl.so and" : "the library", missing);
}

}  // namespace

xent_status comm_from_nccl(const char *function, xent_context *ctx, void *nccl_comm, void *library, xent_comm **out,
                           xent_error *err) {
  auto made = std::make_unique<NcclComm>();
  made->comm = nccl_comm;
  if (library == nullptr) {
    if (const xent_status status = find_library(function, &library, err)) return status;
  }
  if (const xent_status status = find_functions(function, library, &made->api, err)) return status;
  xent_comm_desc desc{};
  desc.device.device_type = kDLCUDA;
  const auto asked = [&](const char *what, nccl::Result result) -> xent_status {
    if (result == nccl::kSuccess) return XENT_OK;
    return fail_native(err, XENT_COMM_ERROR, result, "%s: nccl_comm: %s: %s (ncclResult_t %d)", function, what,
                       made->describe(result).c_str(), result);
  };
  int ranks = 0, rank = 0, device = 0;
  if (const xent_status bad = asked("ncclCommCount", made->api.comm_count(nccl_comm, &ranks))) return bad;
  if (const xent_status bad = asked("ncclCommUserRank", made->api.comm_user_rank(nccl_comm, &rank))) return bad;
  if (const xent_status bad = asked("ncclCommCuDevice", made->api.comm_cu_device(nccl_comm, &device))) return bad;
  PluginError failure;
  if (made->async_error(&failure.error) != XENT_OK) {
    return fail_native(err, XENT_COMM_ERROR, failure.error.native_code, "%s: nccl_comm: %s", function,
                       failure.message());
  }
  desc.struct_size = sizeof desc;
  desc.device.device_id = device;
  desc.ranks = ranks;
  desc.rank = rank;
  desc.user = made.get();
  desc.all_gather = all_gather;
  desc.async_error = async_error;
  desc.release = release;
  desc.flags = XENT_COMM_GRAPH_CAPTURE;
  const xent_status status = xent_comm::create(function, ctx, desc, out, err);
  if (status == XENT_OK) made.release();
  return status;
}

}  // namespace xent
