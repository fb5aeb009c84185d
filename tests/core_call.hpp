// SPDX-FileCopyrightText: the libxent authors
// SPDX-License-Identifier: Apache-2.0

// One call with every tensor that it may take, in buffers that are watched: tests change one thing at a time.
#pragma once

#include <dlfcn.h>
#include <gtest/gtest.h>
#include <xent/xent.h>

#include <cstdlib>
#include <cstring>
#include <functional>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "plugins/fake.hpp"

inline constexpr DLDataType kFloat32{kDLFloat, 32, 1};
inline constexpr DLDataType kFloat64{kDLFloat, 64, 1};
inline constexpr DLDataType kBFloat16{kDLBfloat, 16, 1};
inline constexpr DLDataType kInt32{kDLInt, 32, 1};
inline constexpr DLDataType kInt64{kDLInt, 64, 1};

// A tensor with memory of its own: room for 64 elements of 8 bytes, all bytes 0xa5 but for inputs that are set.
struct CallTensor {
  CallTensor(std::vector<int64_t> shape_, DLDataType dtype_) : shape(std::move(shape_)), dtype(dtype_) {
    memory.assign(64, 0xa5a5a5a5a5a5a5a5u);
    data = memory.data();
  }
  CallTensor(const CallTensor &) = delete;
  CallTensor &operator=(const CallTensor &) = delete;

  template <class T>
  void set(const std::vector<T> &values) {
    std::memcpy(memory.data(), values.data(), values.size() * sizeof(T));
  }
  const DLTensor *get() {
    if (absent) return nullptr;
    tensor = DLTensor{};
    tensor.data = data;
    tensor.device = device;
    tensor.ndim = static_cast<int32_t>(shape.size());
    tensor.dtype = dtype;
    tensor.shape = shape.data();
    tensor.strides = strides.empty() ? nullptr : strides.data();
    tensor.byte_offset = byte_offset;
    return &tensor;
  }

  std::vector<int64_t> shape;
  std::vector<int64_t> strides;
  DLDataType dtype;
  DLDevice device{kDLCPU, 0};
  void *data;
  uint64_t byte_offset = 0;
  bool absent = false;
  std::vector<uint64_t> memory;
  DLTensor tensor{};
};

// Two by three rows of four columns.
struct CallSetup {
  CallSetup() {
    desc.struct_size = sizeof desc;
    desc.vocab = 4;
    desc.max_rows = 6;
    desc.reduction = XENT_REDUCTION_MEAN;
    desc.flags = XENT_PLAN_ENTROPY | XENT_PLAN_PREDICTED;
    forward.struct_size = sizeof forward;
    backward.struct_size = sizeof backward;
    both.struct_size = sizeof both;
    scale.struct_size = sizeof scale;
    logits.set<float>(std::vector<float>(24, 0.5f));
    targets.set<int64_t>({0, 1, 2, 3, 0, 1});
    mask.set<uint8_t>({1, 1, 0, 1, 1, 1});
    row_weights.set<float>({1, 2, 3, 4, 5, 6});
    denominator.set<float>({5});
    stats.set<float>({0.5f, 4, 0.5f, 4, 0.5f, 4, 0.5f, 4, 0.5f, 4, 0.5f, 4});
    divisor.set<float>({5});
    grad_loss.set<float>({1});
  }

  // NONE in place of MEAN, with all that goes with it.
  void per_row() {
    desc.reduction = XENT_REDUCTION_NONE;
    denominator.absent = divisor.absent = true;
    loss.shape = {2, 3};
  }
  void bind() {
    forward.logits = backward.logits = logits.get();
    forward.targets = backward.targets = scale.targets = targets.get();
    forward.mask = backward.mask = scale.mask = mask.get();
    forward.row_weights = backward.row_weights = row_weights.get();
    forward.denominator = denominator.get();
    forward.loss = loss.get();
    forward.stats = backward.stats = stats.get();
    forward.divisor = backward.divisor = divisor.get();
    forward.lse = lse.get();
    forward.entropy = entropy.get();
    forward.predicted = predicted.get();
    forward.row_counts = row_counts.get();
    backward.grad_loss = both.grad_loss = scale.grad_loss = grad_loss.get();
    backward.grad_logits = both.grad_logits = scale.grad_logits = grad_logits.get();
  }
  std::vector<CallTensor *> tensors() {
    return {&logits,  &targets, &mask,    &row_weights, &denominator, &loss,      &stats,
            &divisor, &lse,     &entropy, &predicted,   &row_counts,  &grad_loss, &grad_logits};
  }
  std::vector<std::vector<uint64_t>> contents() {
    std::vector<std::vector<uint64_t>> out;
    for (const CallTensor *tensor : tensors()) out.push_back(tensor->memory);
    return out;
  }

  xent_plan_desc desc{};
  CallTensor logits{{2, 3, 4}, kFloat32};
  CallTensor targets{{2, 3}, kInt64};
  CallTensor mask{{2, 3}, DLDataType{6, 8, 1}};
  CallTensor row_weights{{2, 3}, kFloat32};
  CallTensor denominator{{}, kFloat32};
  CallTensor loss{{}, kFloat32};
  CallTensor stats{{6, 2}, kFloat32};
  CallTensor divisor{{1}, kFloat32};
  CallTensor lse{{2, 3}, kFloat32};
  CallTensor entropy{{2, 3}, kFloat32};
  CallTensor predicted{{2, 3}, kInt64};
  CallTensor row_counts{{3}, kInt32};
  CallTensor grad_loss{{}, kFloat32};
  CallTensor grad_logits{{2, 3, 4}, kFloat32};
  xent_forward_args forward{};
  xent_backward_args backward{};
  xent_loss_and_grad_args both{};
  xent_scale_grad_args scale{};
  // The workspace: as much as is needed, unless a test says otherwise.
  std::optional<size_t> workspace_bytes;
  size_t workspace_shift = 0;
  void *workspace = nullptr;
  bool no_workspace = false;
};

enum Operation { kForward = 1, kBackward = 2, kBoth = 4, kScale = 8 };
inline constexpr const char *kNames[] = {"", "xent_forward",   "xent_backward", "", "xent_loss_and_grad", "", "",
                                         "", "xent_scale_grad"};

using Change = std::function<void(CallSetup &)>;

class CallTest : public testing::TestWithParam<const char *> {
 protected:
  CallTest() {
    err.struct_size = sizeof err;
    EXPECT_EQ(xent_context_create(nullptr, &ctx, &err), XENT_OK) << err.message;
    if (GetParam() == std::string("cpu")) return;
    load(GetParam());
  }
  ~CallTest() override { xent_context_destroy(ctx); }

  void load(const std::string &name) {
    const std::string path = XENT_TEST_PLUGINS + ("/" + name) + ".so";
    EXPECT_EQ(xent_backend_load(ctx, path.c_str(), &err), XENT_OK) << err.message;
    void *handle = dlopen(path.c_str(), RTLD_NOW | RTLD_NOLOAD);
    fake = reinterpret_cast<FakeStateFunction>(dlsym(handle, "fake_state"))();
    *fake = FakeState{};
  }

  xent_status call(CallSetup &setup, Operation operation) {
    xent_plan *plan = nullptr;
    EXPECT_EQ(xent_plan_create(ctx, &setup.desc, &plan, &err), XENT_OK) << err.message;
    xent_plan_info info{};
    info.struct_size = sizeof info;
    EXPECT_EQ(xent_plan_get_info(plan, &info, &err), XENT_OK) << err.message;
    needed = operation == kForward    ? info.forward_workspace_bytes
             : operation == kBackward ? info.backward_workspace_bytes
                                      : info.loss_and_grad_workspace_bytes;
    const size_t bytes = setup.workspace_bytes.value_or(needed);
    void *own = std::aligned_alloc(4096, 65536);
    void *workspace = setup.no_workspace           ? nullptr
                      : setup.workspace != nullptr ? setup.workspace
                                                   : static_cast<char *>(own) + setup.workspace_shift;
    setup.bind();
    setup.forward.workspace = setup.backward.workspace = workspace;
    setup.forward.workspace_bytes = setup.backward.workspace_bytes = bytes;
    if (setup.both.forward == nullptr) setup.both.forward = &setup.forward;
    err = xent_error{sizeof err, 0, 0, ""};
    const xent_status status = operation == kForward    ? xent_forward(plan, &setup.forward, &err)
                               : operation == kBackward ? xent_backward(plan, &setup.backward, &err)
                               : operation == kScale    ? xent_scale_grad(plan, &setup.scale, &err)
                                                        : xent_loss_and_grad(plan, &setup.both, &err);
    std::free(own);
    xent_plan_destroy(plan);
    return status;
  }

  void accepted(int operations, const Change &change) {
    for (const Operation operation : {kForward, kBackward, kBoth, kScale}) {
      if ((operations & operation) == 0) continue;
      CallSetup setup;
      change(setup);
      EXPECT_EQ(call(setup, operation), XENT_OK) << err.message;
    }
  }

  void refused(int operations, const Change &change, const std::string &text,
               xent_status status = XENT_INVALID_ARGUMENT) {
    for (const Operation operation : {kForward, kBackward, kBoth, kScale}) {
      if ((operations & operation) == 0) continue;
      SCOPED_TRACE(text);
      CallSetup setup;
      change(setup);
      const auto before = setup.contents();
      const int calls = fake == nullptr ? 0 : fake->calls;
      EXPECT_EQ(call(setup, operation), status) << kNames[operation];
      EXPECT_EQ(err.status, status);
      EXPECT_EQ(std::string(err.message).find(kNames[operation] + std::string(": ")), 0u) << err.message;
      EXPECT_NE(std::string(err.message).find(text), std::string::npos) << err.message;
      EXPECT_TRUE(setup.contents() == before) << "something was written";
      if (fake != nullptr) {
        EXPECT_EQ(fake->calls, calls) << "the backend was called";
      }
    }
  }

  xent_context *ctx = nullptr;
  FakeState *fake = nullptr;
  xent_error err{};
  size_t needed = 0;
};

inline constexpr int kAll = kForward | kBackward | kBoth;
inline constexpr int kLoss = kForward | kBoth;
inline constexpr int kGradient = kBackward | kBoth;

inline std::string backend_name(const testing::TestParamInfo<const char *> &param) { return param.param; }
