// SPDX-FileCopyrightText: the libxent authors
// SPDX-License-Identifier: Apache-2.0

#include "device.hpp"

#include <dlfcn.h>
#include <unistd.h>

#include <cstdlib>
#include <cstring>
#include <map>
#include <memory>
#include <mutex>
#include <stdexcept>

namespace xent_test {
namespace {

class HostDevice final : public Device {
 public:
  DLDevice dl() const override { return {kDLCPU, 0}; }
  void *allocate(size_t bytes) override { return std::aligned_alloc(4096, (bytes + 4095) / 4096 * 4096); }
  void release(void *p) override { std::free(p); }
  void copy_in(void *to, const void *from, size_t bytes) override { std::memcpy(to, from, bytes); }
  void copy_out(void *to, const void *from, size_t bytes) override { std::memcpy(to, from, bytes); }
  void synchronize() override {}
  size_t free_bytes() override {
    return static_cast<size_t>(sysconf(_SC_AVPHYS_PAGES)) * static_cast<size_t>(sysconf(_SC_PAGESIZE));
  }
  void *capture(void *, const std::function<void()> &) override { return nullptr; }
  void replay(void *, void *) override {}
  void destroy_graph(void *) override {}
};

// The few functions of the CUDA driver API that the tests need, with the types its ABI gives them.
class CudaDevice final : public Device {
 public:
  explicit CudaDevice(void *library) : library_(library) {
    check(call<int(unsigned)>("cuInit")(0), "cuInit");
    int device = 0;
    check(call<int(int *, int)>("cuDeviceGet")(&device, 0), "cuDeviceGet");
    check(call<int(void **, int)>("cuDevicePrimaryCtxRetain")(&context_, device), "cuDevicePrimaryCtxRetain");
    bind_thread();
  }

  DLDevice dl() const override { return {kDLCUDA, 0}; }
  void bind_thread() override { check(call<int(void *)>("cuCtxSetCurrent")(context_), "cuCtxSetCurrent"); }
  void *allocate(size_t bytes) override {
    uint64_t p = 0;
    check(call<int(uint64_t *, size_t)>("cuMemAlloc_v2")(&p, bytes == 0 ? 1 : bytes), "cuMemAlloc");
    return reinterpret_cast<void *>(p);
  }
  void release(void *p) override { call<int(uint64_t)>("cuMemFree_v2")(reinterpret_cast<uint64_t>(p)); }
  void copy_in(void *to, const void *from, size_t bytes) override {
    synchronize();
    check(call<int(uint64_t, const void *, size_t)>("cuMemcpyHtoD_v2")(reinterpret_cast<uint64_t>(to), from, bytes),
          "cuMemcpyHtoD");
    synchronize();  // a copy from pageable memory may return before the device has it
  }
  void copy_out(void *to, const void *from, size_t bytes) override {
    synchronize();
    check(call<int(void *, uint64_t, size_t)>("cuMemcpyDtoH_v2")(to, reinterpret_cast<uint64_t>(from), bytes),
          "cuMemcpyDtoH");
  }
  void synchronize() override { check(call<int()>("cuCtxSynchronize")(), "cuCtxSynchronize"); }
  void *make_stream() override {
    void *stream = nullptr;
    check(call<int(void **, unsigned)>("cuStreamCreate")(&stream, 1 /* non-blocking */), "cuStreamCreate");
    return stream;
  }
  void destroy_stream(void *stream) override { call<int(void *)>("cuStreamDestroy_v2")(stream); }
  size_t free_bytes() override {
    size_t free = 0, total = 0;
    check(call<int(size_t *, size_t *)>("cuMemGetInfo_v2")(&free, &total), "cuMemGetInfo");
    return free;
  }

  void *capture(void *stream, const std::function<void()> &enqueue) override {
    void *graph = nullptr, *executable = nullptr;
    // Global mode: whatever would be illegal in any capture, an allocation or a synchronisation, fails here.
    check(call<int(void *, int)>("cuStreamBeginCapture_v2")(stream, 0), "cuStreamBeginCapture");
    enqueue();
    check(call<int(void *, void **)>("cuStreamEndCapture")(stream, &graph), "cuStreamEndCapture");
    check(call<int(void **, void *, unsigned long long)>("cuGraphInstantiateWithFlags")(&executable, graph, 0),
          "cuGraphInstantiate");
    call<int(void *)>("cuGraphDestroy")(graph);
    return executable;
  }
  void replay(void *graph, void *stream) override {
    check(call<int(void *, void *)>("cuGraphLaunch")(graph, stream), "cuGraphLaunch");
  }
  void destroy_graph(void *graph) override { call<int(void *)>("cuGraphExecDestroy")(graph); }

 private:
  template <class Signature>
  Signature *call(const char *name) {
    void *address = dlsym(library_, name);
    if (address == nullptr) throw std::runtime_error(std::string("libcuda.so.1 lacks ") + name);
    return reinterpret_cast<Signature *>(address);
  }
  static void check(int code, const char *what) {
    if (code != 0) throw std::runtime_error(std::string(what) + " failed with CUresult " + std::to_string(code));
  }

  void *library_;
  void *context_ = nullptr;
};

Device *cuda_device(std::string *why) {
  static std::string reason;
  static const std::unique_ptr<Device> device = []() -> std::unique_ptr<Device> {
    void *library = dlopen("libcuda.so.1", RTLD_NOW | RTLD_LOCAL);
    if (library == nullptr) {
      reason = "no CUDA driver (libcuda.so.1)";
      return nullptr;
    }
    std::unique_ptr<Device> found;
    try {
      found = std::make_unique<CudaDevice>(library);
    } catch (const std::exception &e) {
      reason = std::string("no usable GPU: ") + e.what();
      return nullptr;
    }
    xent_error err = {};
    err.struct_size = sizeof(err);
    if (xent_backend_load(context_with(0), "cuda", &err) != XENT_OK) {
      reason = std::string("a GPU, but no CUDA backend: ") + err.message;
      return nullptr;
    }
    return found;
  }();
  *why = reason;
  return device.get();
}

}  // namespace

xent_context *context_with(int32_t threads) {
  static std::mutex mutex;
  static std::map<int32_t, std::shared_ptr<xent_context>> contexts;
  const std::lock_guard<std::mutex> lock(mutex);
  auto &slot = contexts[threads];
  if (!slot) {
    xent_context_desc desc = {};
    desc.struct_size = sizeof(desc);
    desc.threads = threads;
    xent_context *context = nullptr;
    xent_error err = {};
    err.struct_size = sizeof(err);
    if (xent_context_create(&desc, &context, &err) != XENT_OK) {
      throw std::runtime_error(std::string("xent_context_create: ") + err.message);
    }
    slot.reset(context, xent_context_destroy);
  }
  return slot.get();
}

Device *device_for(Backend backend, std::string *why) {
  static HostDevice host;
  if (backend == Backend::kCpu) return &host;
  Device *device = cuda_device(why);
  if (device != nullptr) device->bind_thread();
  return device;
}

}  // namespace xent_test
