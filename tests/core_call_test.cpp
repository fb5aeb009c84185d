// SPDX-FileCopyrightText: the libxent authors
// SPDX-License-Identifier: Apache-2.0

// Every bad argument of a call: a status, a message that names it, and nothing written. Run on the built-in CPU
// backend, and on a fake one that records what reaches it.
#include "core_call.hpp"

#include <dlfcn.h>
#include <gtest/gtest.h>

#include <cstdlib>
#include <string>
#include <utility>

#include "plugins/fake.hpp"

namespace {

const std::string kPlugins = XENT_TEST_PLUGINS;

enum Operation { kForward = 1, kBackward = 2, kBoth = 4 };
constexpr const char *kNames[] = {"", "xent_forward", "xent_backward", "", "xent_loss_and_grad"};

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
    const std::string path = kPlugins + "/" + name + ".so";
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
                                                        : xent_loss_and_grad(plan, &setup.both, &err);
    std::free(own);
    xent_plan_destroy(plan);
    return status;
  }

  void accepted(int operations, const Change &change) {
    for (const Operation operation : {kForward, kBackward, kBoth}) {
      if ((operations & operation) == 0) continue;
      CallSetup setup;
      change(setup);
      EXPECT_EQ(call(setup, operation), XENT_OK) << err.message;
    }
  }

  void refused(int operations, const Change &change, const std::string &text, xent_status status = XENT_INVALID_ARGUMENT) {
    for (const Operation operation : {kForward, kBackward, kBoth}) {
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

constexpr int kAll = kForward | kBackward | kBoth;
constexpr int kLoss = kForward | kBoth;
constexpr int kGradient = kBackward | kBoth;

TEST_P(CallTest, TheUnchangedCallsAreAccepted) {
  accepted(kAll, [](CallSetup &) {});
  accepted(kAll, [](CallSetup &s) { s.per_row(); });
  accepted(kAll, [](CallSetup &s) { s.desc.reduction = XENT_REDUCTION_SUM; });
}

TEST_P(CallTest, OptionalTensorsMayBeAbsent) {
  accepted(kAll, [](CallSetup &s) { s.mask.absent = s.row_weights.absent = s.grad_loss.absent = true; });
  accepted(kLoss, [](CallSetup &s) {
    for (CallTensor *t : {&s.denominator, &s.stats, &s.divisor, &s.lse, &s.entropy, &s.predicted, &s.row_counts}) t->absent = true;
  });
}

TEST_P(CallTest, NullArguments) {
  CallSetup setup;
  setup.bind();
  err = xent_error{sizeof err, 0, 0, ""};
  EXPECT_EQ(xent_forward(nullptr, &setup.forward, &err), XENT_INVALID_ARGUMENT);
  EXPECT_STREQ(err.message, "xent_forward: plan: is NULL");
  EXPECT_EQ(xent_backward(nullptr, &setup.backward, &err), XENT_INVALID_ARGUMENT);
  EXPECT_EQ(xent_loss_and_grad(nullptr, &setup.both, &err), XENT_INVALID_ARGUMENT);
  xent_plan *plan = nullptr;
  ASSERT_EQ(xent_plan_create(ctx, &setup.desc, &plan, &err), XENT_OK) << err.message;
  EXPECT_EQ(xent_forward(plan, nullptr, &err), XENT_INVALID_ARGUMENT);
  EXPECT_STREQ(err.message, "xent_forward: args: is NULL");
  EXPECT_EQ(xent_backward(plan, nullptr, &err), XENT_INVALID_ARGUMENT);
  EXPECT_EQ(xent_loss_and_grad(plan, nullptr, &err), XENT_INVALID_ARGUMENT);
  EXPECT_EQ(xent_loss_and_grad(plan, &setup.both, &err), XENT_INVALID_ARGUMENT);
  EXPECT_STREQ(err.message, "xent_loss_and_grad: forward: is NULL");
  EXPECT_EQ(xent_forward(plan, nullptr, nullptr), XENT_INVALID_ARGUMENT);
  xent_plan_destroy(plan);
}

TEST_P(CallTest, PlanDescriptionsThatAreRefused) {
  xent_plan *plan = nullptr;
  const auto create = [&](xent_context *context, const xent_plan_desc *desc, xent_plan **out) {
    err = xent_error{sizeof err, 0, 0, ""};
    return xent_plan_create(context, desc, out, &err);
  };
  CallSetup setup;
  EXPECT_EQ(create(nullptr, &setup.desc, &plan), XENT_INVALID_ARGUMENT);
  EXPECT_EQ(create(ctx, nullptr, &plan), XENT_INVALID_ARGUMENT);
  EXPECT_EQ(create(ctx, &setup.desc, nullptr), XENT_INVALID_ARGUMENT);
  setup.desc.vocab = 0;
  EXPECT_EQ(create(ctx, &setup.desc, &plan), XENT_INVALID_ARGUMENT);
  EXPECT_STREQ(err.message, "xent_plan_create: vocab: is 0; it must be at least 1");
  setup.desc.struct_size = 20;
  EXPECT_EQ(create(ctx, &setup.desc, &plan), XENT_INVALID_STRUCT);
  EXPECT_EQ(plan, nullptr);
}

TEST_P(CallTest, Structs) {
  refused(kForward, [](CallSetup &s) { s.forward.struct_size = 8; }, "args: struct_size is 8", XENT_INVALID_STRUCT);
  refused(kBackward, [](CallSetup &s) { s.backward.struct_size = 8; }, "args: struct_size is 8", XENT_INVALID_STRUCT);
  refused(kBoth, [](CallSetup &s) { s.both.struct_size = 8; }, "args: struct_size is 8", XENT_INVALID_STRUCT);
  refused(kBoth, [](CallSetup &s) { s.forward.struct_size = 8; }, "forward: struct_size is 8", XENT_INVALID_STRUCT);
  refused(kForward | kBoth, [](CallSetup &s) { s.forward.next = &s; }, "next is not NULL", XENT_INVALID_STRUCT);
  // backward, which follows forward in memory, is what a longer struct would read.
  refused(kForward, [](CallSetup &s) { s.forward.struct_size += 16; }, "is set, but this library knows", XENT_INVALID_STRUCT);
}

TEST_P(CallTest, RequiredTensors) {
  refused(kAll, [](CallSetup &s) { s.logits.absent = true; }, "logits: is NULL; it is required");
  refused(kAll, [](CallSetup &s) { s.targets.absent = true; }, "targets: is NULL; it is required");
  refused(kLoss, [](CallSetup &s) { s.loss.absent = true; }, "loss: is NULL; it is required");
  refused(kBackward, [](CallSetup &s) { s.stats.absent = true; }, "stats: is NULL; it is required");
  refused(kBackward, [](CallSetup &s) { s.divisor.absent = true; }, "divisor: is NULL; it is required");
  refused(kGradient, [](CallSetup &s) { s.grad_logits.absent = true; }, "grad_logits: is NULL; it is required");
  accepted(kBackward, [](CallSetup &s) { s.desc.reduction = XENT_REDUCTION_SUM; s.divisor.absent = true; });
}

TEST_P(CallTest, TensorsThatHaveNoPlaceHere) {
  refused(kLoss, [](CallSetup &s) { s.per_row(); s.denominator.absent = false; }, "denominator: was given; it needs XENT_REDUCTION_SUM");
  refused(kLoss, [](CallSetup &s) { s.per_row(); s.divisor.absent = false; }, "divisor: was given; without MEAN and denominator");
  refused(kBackward, [](CallSetup &s) { s.per_row(); s.divisor.absent = false; }, "divisor: was given; with XENT_REDUCTION_NONE");
  refused(kLoss, [](CallSetup &s) { s.desc.reduction = XENT_REDUCTION_SUM; s.denominator.absent = true; }, "divisor: was given");
  refused(kLoss, [](CallSetup &s) { s.desc.flags = XENT_PLAN_PREDICTED; }, "entropy: was given; the plan needs XENT_PLAN_ENTROPY");
  refused(kLoss, [](CallSetup &s) { s.desc.flags = XENT_PLAN_ENTROPY; }, "predicted: was given; the plan needs XENT_PLAN_PREDICTED");
}

TEST_P(CallTest, Shapes) {
  refused(kAll, [](CallSetup &s) { s.targets.shape = {2, 4}; }, "targets: shape [2, 4] does not match the logits' leading shape [2, 3]");
  refused(kAll, [](CallSetup &s) { s.mask.shape = {6}; }, "mask: shape [6]");
  refused(kAll, [](CallSetup &s) { s.row_weights.shape = {3, 2}; }, "row_weights: shape [3, 2]");
  refused(kAll, [](CallSetup &s) { s.logits.shape = {2, 3, 5}; }, "logits: shape [2, 3, 5]; it must be [..., vocab], and the plan's vocab is 4");
  refused(kAll, [](CallSetup &s) { s.logits.shape = {7, 4}; s.logits.strides = {0, 1}; }, "logits: shape [7, 4] has more rows than the plan's max_rows, 6");
  refused(kAll, [](CallSetup &s) { s.stats.shape = {2, 3, 2}; }, "stats: shape [2, 3, 2]; it must be [rows, 2] = [6, 2]");
  refused(kAll, [](CallSetup &s) { s.divisor.shape = {2}; }, "divisor: shape [2]");
  refused(kLoss, [](CallSetup &s) { s.loss.shape = {2, 3}; }, "loss: shape [2, 3]; it must be [] or [1]");
  refused(kLoss, [](CallSetup &s) { s.per_row(); s.loss.shape = {}; }, "loss: shape []");
  refused(kLoss, [](CallSetup &s) { s.denominator.shape = {6}; }, "denominator: shape [6]");
  refused(kLoss, [](CallSetup &s) { s.lse.shape = {6}; }, "lse: shape [6]");
  refused(kLoss, [](CallSetup &s) { s.entropy.shape = {6}; }, "entropy: shape [6]");
  refused(kLoss, [](CallSetup &s) { s.predicted.shape = {6}; }, "predicted: shape [6]");
  refused(kLoss, [](CallSetup &s) { s.row_counts.shape = {2}; }, "row_counts: shape [2]; it must be [3]");
  refused(kGradient, [](CallSetup &s) { s.grad_loss.shape = {2, 3}; }, "grad_loss: shape [2, 3]; it must be [] or [1]");
  refused(kGradient, [](CallSetup &s) { s.per_row(); s.grad_loss.shape = {3}; }, "grad_loss: shape [3]; it must be [], [1] or");
  refused(kGradient, [](CallSetup &s) { s.grad_logits.shape = {6, 4}; }, "grad_logits: shape [6, 4] does not match the logits' shape [2, 3, 4]");
  accepted(kGradient, [](CallSetup &s) { s.per_row(); s.grad_loss.shape = {2, 3}; s.grad_loss.set<float>({1, 1, 1, 1, 1, 1}); });
}

TEST_P(CallTest, Types) {
  refused(kAll, [](CallSetup &s) { s.logits.dtype = kFloat64; }, "logits: dtype is float64; this plan takes float32");
  refused(kAll, [](CallSetup &s) { s.targets.dtype = kInt32; }, "targets: dtype is int32; this plan takes int64");
  refused(kAll, [](CallSetup &s) { s.mask.dtype = DLDataType{kDLInt, 8, 1}; }, "mask: dtype is int8");
  refused(kAll, [](CallSetup &s) { s.row_weights.dtype = kFloat64; }, "row_weights: dtype is float64");
  refused(kAll, [](CallSetup &s) { s.stats.dtype = kFloat64; }, "stats: dtype is float64");
  refused(kAll, [](CallSetup &s) { s.divisor.dtype = kInt32; }, "divisor: dtype is int32");
  refused(kLoss, [](CallSetup &s) { s.denominator.dtype = kFloat64; }, "denominator: dtype is float64; this plan takes float32 or int32 or int64");
  refused(kLoss, [](CallSetup &s) { s.loss.dtype = DLDataType{kDLFloat, 32, 2}; }, "loss: dtype is float32x2");
  refused(kLoss, [](CallSetup &s) { s.lse.dtype = kBFloat16; }, "lse: dtype is bfloat16");
  refused(kLoss, [](CallSetup &s) { s.entropy.dtype = kInt32; }, "entropy: dtype is int32");
  refused(kLoss, [](CallSetup &s) { s.predicted.dtype = kFloat32; }, "predicted: dtype is float32; this plan takes int32 or int64");
  refused(kLoss, [](CallSetup &s) { s.row_counts.dtype = kFloat32; }, "row_counts: dtype is float32");
  refused(kGradient, [](CallSetup &s) { s.grad_loss.dtype = kInt32; }, "grad_loss: dtype is int32");
  refused(kGradient, [](CallSetup &s) { s.grad_logits.dtype = kBFloat16; }, "grad_logits: dtype is bfloat16; this plan takes float32");
  const auto wide = [](CallSetup &s) {
    s.desc.logits_dtype = s.logits.dtype = kFloat64;
    for (CallTensor *t : {&s.row_weights, &s.loss, &s.stats, &s.divisor, &s.lse, &s.entropy, &s.grad_logits}) t->dtype = kFloat64;
  };
  accepted(kAll, wide);
  refused(kGradient, [&](CallSetup &s) { wide(s); s.grad_logits.dtype = kFloat32; }, "grad_logits: dtype is float32; this plan takes float64");
  const auto narrow = [](CallSetup &s) { s.desc.logits_dtype = s.logits.dtype = kBFloat16; };
  accepted(kAll, narrow);  // with a float32 gradient
  accepted(kAll, [&](CallSetup &s) { narrow(s); s.grad_logits.dtype = kBFloat16; });
  accepted(kGradient, [&](CallSetup &s) { s.grad_loss.dtype = kBFloat16; });
}

TEST_P(CallTest, Devices) {
  refused(kAll, [](CallSetup &s) { s.logits.device = DLDevice{kDLCUDA, 0}; }, "logits: is on device CUDA:0; the plan's device is CPU");
  refused(kGradient, [](CallSetup &s) { s.grad_logits.device = DLDevice{kDLCUDA, 1}; }, "grad_logits: is on device CUDA:1");
  refused(kLoss, [](CallSetup &s) { s.row_counts.device = DLDevice{kDLCUDAManaged, 0}; }, "row_counts: is on device CUDAManaged:0");
  accepted(kAll, [](CallSetup &s) { s.targets.device = DLDevice{kDLCUDAHost, 1}; });
}

TEST_P(CallTest, Stream) {
  refused(kLoss, [](CallSetup &s) { s.forward.stream = &s; }, "must be NULL on the CPU");
  refused(kBackward, [](CallSetup &s) { s.backward.stream = &s; }, "must be NULL on the CPU");
}

TEST_P(CallTest, Workspace) {
  CallSetup setup;
  for (const Operation operation : {kForward, kBackward, kBoth}) {
    CallSetup probe;
    EXPECT_EQ(call(probe, operation), XENT_OK) << err.message;
    if (needed == 0) {
      accepted(operation, [](CallSetup &s) { s.no_workspace = true; });
      continue;
    }
    const std::string text = "workspace: " + std::to_string(needed) + " bytes are needed, ";
    const size_t bytes = needed;
    refused(operation, [&](CallSetup &s) { s.no_workspace = true; }, text + std::to_string(bytes) + " given at NULL", XENT_WORKSPACE_TOO_SMALL);
    refused(operation, [&](CallSetup &s) { s.workspace_bytes = bytes - 1; }, text + std::to_string(bytes - 1) + " given", XENT_WORKSPACE_TOO_SMALL);
    refused(operation, [&](CallSetup &s) { s.workspace_bytes = 0; }, text + "0 given", XENT_WORKSPACE_TOO_SMALL);
    refused(operation, [&](CallSetup &s) { s.workspace_shift = 1; }, "is not aligned to");
    refused(operation, [&](CallSetup &s) { s.workspace_bytes = SIZE_MAX; }, "leave the address space");
    accepted(operation, [&](CallSetup &s) { s.workspace_bytes = bytes + 64; });
  }
}

TEST_P(CallTest, GradientOverLogits) {
  const auto over = [](CallSetup &s) { s.grad_logits.data = s.logits.data; };
  const auto allowed = [&](CallSetup &s) { over(s); s.desc.flags |= XENT_PLAN_OVERWRITE_LOGITS; };
  accepted(kGradient, allowed);
  refused(kGradient, over, "the plan needs XENT_PLAN_OVERWRITE_LOGITS for that");
  refused(kGradient, [&](CallSetup &s) { allowed(s); s.grad_logits.byte_offset = 4; }, "grad_logits: overlaps logits; it must be disjoint, or exactly");
  refused(kGradient, [&](CallSetup &s) { allowed(s); s.grad_logits.byte_offset = 92; }, "grad_logits: overlaps logits");
  accepted(kGradient, [&](CallSetup &s) { allowed(s); s.grad_logits.byte_offset = 96; });
  refused(kGradient, [&](CallSetup &s) { allowed(s); s.grad_logits.strides = {16, 5, 1}; }, "grad_logits: overlaps logits");
  refused(kGradient, [&](CallSetup &s) { allowed(s); s.desc.logits_dtype = s.logits.dtype = kBFloat16; }, "grad_logits: overlaps logits");
  refused(kGradient, [&](CallSetup &s) { allowed(s); s.grad_logits.strides = s.logits.strides = {12, 0, 1}; }, "grad_logits: is an output and overlaps itself");
}

TEST_P(CallTest, InterleavedGradientIsLegal) {
  accepted(kGradient, [](CallSetup &s) {
    s.logits.strides = s.grad_logits.strides = {24, 8, 1};
    s.grad_logits.data = s.logits.data;
    s.grad_logits.byte_offset = 16;
  });
  refused(kGradient, [](CallSetup &s) {
    s.logits.strides = s.grad_logits.strides = {24, 8, 1};
    s.grad_logits.data = s.logits.data;
    s.grad_logits.byte_offset = 12;
  }, "grad_logits: overlaps logits");
}

TEST_P(CallTest, OutputsThatOverlapSomething) {
  refused(kLoss, [](CallSetup &s) { s.lse.strides = {0, 1}; }, "lse: is an output and overlaps itself");
  refused(kLoss, [](CallSetup &s) { s.per_row(); s.loss.strides = {1, 1}; }, "loss: is an output and overlaps itself");
  refused(kLoss, [](CallSetup &s) { s.row_counts.strides = {0}; }, "row_counts: is an output and overlaps itself");
  refused(kLoss, [](CallSetup &s) { s.stats.strides = {2, 0}; }, "stats: is an output and overlaps itself");
  refused(kLoss, [](CallSetup &s) { s.loss.data = s.logits.data; }, "loss: overlaps logits");
  refused(kLoss, [](CallSetup &s) { s.loss.data = s.targets.data; }, "loss: overlaps targets");
  refused(kLoss, [](CallSetup &s) { s.lse.data = s.entropy.data; }, "entropy: overlaps lse");
  refused(kLoss, [](CallSetup &s) { s.divisor.data = s.denominator.data; }, "divisor: overlaps denominator");
  refused(kLoss, [](CallSetup &s) { s.predicted.data = s.mask.data; }, "predicted: overlaps mask");
  refused(kLoss, [](CallSetup &s) { s.stats.data = s.row_weights.data; }, "stats: overlaps row_weights");
  refused(kGradient, [](CallSetup &s) { s.grad_logits.data = s.targets.data; }, "grad_logits: overlaps targets");
  refused(kBackward, [](CallSetup &s) { s.grad_logits.data = s.stats.data; }, "grad_logits: overlaps stats");
  refused(kBackward, [](CallSetup &s) { s.grad_logits.data = s.divisor.data; }, "grad_logits: overlaps divisor");
  refused(kGradient, [](CallSetup &s) { s.grad_logits.data = s.grad_loss.data; }, "grad_logits: overlaps grad_loss");
  refused(kBoth, [](CallSetup &s) { s.grad_logits.data = s.lse.data; }, "grad_logits: overlaps lse");
  accepted(kLoss, [](CallSetup &s) { s.entropy.data = s.lse.data; s.entropy.strides = s.lse.strides = {6, 2}; s.entropy.byte_offset = 4; });
  accepted(kAll, [](CallSetup &s) { s.logits.strides = {0, 4, 1}; s.targets.strides = {0, 1}; });  // inputs may repeat
}

TEST_P(CallTest, WorkspaceThatOverlapsATensor) {
  alignas(4096) static uint64_t memory[8192];
  for (const Operation operation : {kForward, kBackward, kBoth}) {
    CallSetup probe;
    EXPECT_EQ(call(probe, operation), XENT_OK) << err.message;
    if (needed == 0) continue;
    const size_t bytes = needed;
    refused(operation, [&](CallSetup &s) {
      s.workspace = memory;
      s.targets.data = memory;
      s.targets.byte_offset = (bytes - 1) & ~size_t{7};
    }, "workspace: overlaps targets");
  }
}

TEST_P(CallTest, NoRows) {
  const auto empty = [](CallSetup &s) {
    s.logits.shape = s.grad_logits.shape = {2, 0, 4};
    s.stats.shape = {0, 2};
    for (CallTensor *t : {&s.targets, &s.mask, &s.row_weights, &s.lse, &s.entropy, &s.predicted}) t->shape = {2, 0};
    for (CallTensor *t : {&s.logits, &s.grad_logits, &s.stats, &s.targets, &s.mask, &s.row_weights, &s.lse, &s.entropy, &s.predicted}) t->data = nullptr;
  };
  accepted(kAll, empty);
  if (fake != nullptr) {
    EXPECT_EQ(fake->calls, 3);
    EXPECT_EQ(fake->problem.rows, 0);
    EXPECT_EQ(fake->problem.logits.data, nullptr);
    EXPECT_NE(fake->problem.loss.data, nullptr);
  }
  accepted(kAll, [&](CallSetup &s) { empty(s); s.desc.max_rows = 0; });
  refused(kLoss, [&](CallSetup &s) { empty(s); s.loss.data = nullptr; }, "loss: data is NULL");
  refused(kAll, [&](CallSetup &s) { empty(s); s.targets.shape = {3, 0}; }, "targets: shape [3, 0]");
}

INSTANTIATE_TEST_SUITE_P(Backends, CallTest, testing::Values("cpu", "fake_cpu"), [](const auto &kind) { return kind.param; });

// What the fake backends alone can show.
class FakeCallTest : public CallTest {};
INSTANTIATE_TEST_SUITE_P(Backends, FakeCallTest, testing::Values("fake_cpu"), [](const auto &kind) { return kind.param; });

TEST_P(FakeCallTest, TheProblemIsWhatWasAsked) {
  CallSetup setup;
  setup.logits.strides = {12, 4, 1};
  setup.targets.byte_offset = 8;
  ASSERT_EQ(call(setup, kForward), XENT_OK) << err.message;
  const xent_problem &problem = fake->problem;
  EXPECT_EQ(problem.struct_size, sizeof problem);
  EXPECT_EQ(problem.rows, 6);
  EXPECT_EQ(problem.workspace, setup.forward.workspace);
  EXPECT_EQ(problem.workspace_bytes, needed);
  EXPECT_EQ(problem.logits.rank, 1);
  EXPECT_EQ(problem.logits.shape[0], 6);
  EXPECT_EQ(problem.logits.stride[0], 4);
  EXPECT_EQ(problem.targets.data, reinterpret_cast<char *>(setup.targets.memory.data()) + 8);
  EXPECT_EQ(problem.grad_logits.data, nullptr);
  const std::pair<const xent_view *, CallTensor *> pairs[] = {
      {&problem.logits, &setup.logits},           {&problem.mask, &setup.mask},
      {&problem.row_weights, &setup.row_weights}, {&problem.denominator, &setup.denominator},
      {&problem.loss, &setup.loss},               {&problem.stats, &setup.stats},
      {&problem.divisor, &setup.divisor},         {&problem.lse, &setup.lse},
      {&problem.entropy, &setup.entropy},         {&problem.predicted, &setup.predicted},
      {&problem.row_counts, &setup.row_counts}};
  for (const auto &[view, tensor] : pairs) EXPECT_EQ(view->data, tensor->memory.data());
  ASSERT_EQ(call(setup, kBoth), XENT_OK) << err.message;
  EXPECT_EQ(problem.grad_logits.data, setup.grad_logits.memory.data());
  EXPECT_EQ(problem.grad_loss.data, setup.grad_loss.memory.data());
  EXPECT_EQ(problem.loss.data, setup.loss.memory.data());
  ASSERT_EQ(call(setup, kBackward), XENT_OK) << err.message;
  EXPECT_EQ(problem.stats.data, setup.stats.memory.data());
  EXPECT_EQ(problem.divisor.data, setup.divisor.memory.data());
  EXPECT_EQ(problem.loss.data, nullptr);
}

TEST_P(FakeCallTest, FailuresOfTheBackendPassThrough) {
  for (const Operation operation : {kForward, kBackward, kBoth}) {
    struct Late {
      xent_status status;
      const char *message;
      bool throws;
      const char *text;
    };
    for (const Late &late : {Late{XENT_DEVICE_ERROR, "launch failed", false, "launch failed"},
                             Late{XENT_UNSUPPORTED, "", false, "backend fake failed and gave no message"},
                             Late{-77, "odd", false, "odd"}, Late{XENT_OK, "", true, "thrown by the fake backend"}}) {
      CallSetup setup;
      xent_plan *plan = nullptr;
      *fake = FakeState{};
      fake->workspace_bytes = 0;
      ASSERT_EQ(xent_plan_create(ctx, &setup.desc, &plan, &err), XENT_OK) << err.message;
      fake->status = late.status;
      fake->message = late.message;
      fake->throws = late.throws;
      setup.bind();
      setup.both.forward = &setup.forward;
      err = xent_error{sizeof err, 0, 0, ""};
      const xent_status status = operation == kForward    ? xent_forward(plan, &setup.forward, &err)
                                 : operation == kBackward ? xent_backward(plan, &setup.backward, &err)
                                                          : xent_loss_and_grad(plan, &setup.both, &err);
      EXPECT_EQ(status, late.throws ? XENT_INTERNAL : late.status);
      EXPECT_NE(std::string(err.message).find(late.text), std::string::npos) << err.message;
      EXPECT_EQ(err.native_code, late.message[0] == '\0' ? 0 : 77);
      *fake = FakeState{};
      xent_plan_destroy(plan);
    }
  }
}

class CudaCallTest : public CallTest {
 protected:
  static void on_cuda(CallSetup &s) {
    s.desc.device = DLDevice{kDLCUDA, 1};
    for (CallTensor *t : s.tensors()) t->device = DLDevice{kDLCUDA, 1};
  }
};
INSTANTIATE_TEST_SUITE_P(Backends, CudaCallTest, testing::Values("fake_cuda"), [](const auto &kind) { return kind.param; });

TEST_P(CudaCallTest, StreamsAndDevices) {
  accepted(kAll, on_cuda);
  accepted(kLoss, [](CallSetup &s) { on_cuda(s); s.forward.stream = &s; });
  CallSetup setup;
  on_cuda(setup);
  setup.backward.stream = &setup;
  EXPECT_EQ(call(setup, kBackward), XENT_OK) << err.message;
  EXPECT_EQ(fake->problem.stream, &setup);
  accepted(kAll, [](CallSetup &s) { on_cuda(s); s.targets.device = DLDevice{kDLCUDAManaged, 1}; });
  refused(kAll, [](CallSetup &s) { on_cuda(s); s.targets.device = DLDevice{kDLCUDA, 0}; }, "targets: is on device CUDA:0; the plan's device is CUDA:1");
  refused(kAll, [](CallSetup &s) { on_cuda(s); s.logits.device = DLDevice{kDLCPU, 0}; }, "logits: is on device CPU; the plan's device is CUDA:1");
  refused(kLoss, [](CallSetup &s) { on_cuda(s); s.denominator.device = DLDevice{kDLCUDAHost, 1}; }, "denominator: is on device CUDAHost");
}

}  // namespace
