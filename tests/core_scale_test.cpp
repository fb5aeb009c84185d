// SPDX-FileCopyrightText: the libxent authors
// SPDX-License-Identifier: Apache-2.0

// Every bad argument of xent_scale_grad, and what reaches a backend of a good call.
#include "core_call.hpp"

namespace {

TEST_P(CallTest, ScaleIsAccepted) {
  accepted(kScale, [](CallSetup &) {});
  accepted(kScale, [](CallSetup &s) { s.mask.absent = true; });
  accepted(kScale, [](CallSetup &s) { s.desc.flags = 0; });
  accepted(kScale, [](CallSetup &s) { s.grad_loss.shape = {1}; });
  for (const DLDataType dtype : {DLDataType{kDLFloat, 16, 1}, kBFloat16, kFloat64}) {
    accepted(kScale, [&](CallSetup &s) { s.grad_loss.dtype = dtype; });
  }
  for (const DLDataType dtype : {kBFloat16, kFloat32}) {
    accepted(kScale, [&](CallSetup &s) {
      s.desc.logits_dtype = kBFloat16;
      s.grad_logits.dtype = dtype;
    });
  }
  accepted(kScale, [](CallSetup &s) {
    s.per_row();
    s.grad_loss.shape = {2, 3};
    s.grad_loss.strides = {0, 0};
  });
  if (fake == nullptr) return;
  CallSetup setup;
  EXPECT_EQ(call(setup, kScale), XENT_OK) << err.message;
  const xent_problem &problem = fake->problem;
  EXPECT_EQ(problem.rows, 6);
  EXPECT_EQ(problem.targets.data, setup.targets.data);
  EXPECT_EQ(problem.mask.data, setup.mask.data);
  EXPECT_EQ(problem.grad_loss.data, setup.grad_loss.data);
  EXPECT_EQ(problem.grad_logits.data, setup.grad_logits.data);
  EXPECT_EQ(problem.logits.data, nullptr);
  EXPECT_EQ(problem.workspace, nullptr);
}

TEST_P(CallTest, ScaleNullArguments) {
  CallSetup setup;
  setup.bind();
  err = xent_error{sizeof err, 0, 0, ""};
  EXPECT_EQ(xent_scale_grad(nullptr, &setup.scale, &err), XENT_INVALID_ARGUMENT);
  EXPECT_STREQ(err.message, "xent_scale_grad: plan: is NULL");
  xent_plan *plan = nullptr;
  ASSERT_EQ(xent_plan_create(ctx, &setup.desc, &plan, &err), XENT_OK) << err.message;
  EXPECT_EQ(xent_scale_grad(plan, nullptr, &err), XENT_INVALID_ARGUMENT);
  EXPECT_STREQ(err.message, "xent_scale_grad: args: is NULL");
  EXPECT_EQ(xent_scale_grad(plan, nullptr, nullptr), XENT_INVALID_ARGUMENT);
  xent_plan_destroy(plan);
  refused(kScale, [](CallSetup &s) { s.targets.absent = true; }, "targets: is NULL; it is required");
  refused(kScale, [](CallSetup &s) { s.grad_loss.absent = true; }, "grad_loss: is NULL; it is required");
  refused(kScale, [](CallSetup &s) { s.grad_logits.absent = true; }, "grad_logits: is NULL; it is required");
}

TEST_P(CallTest, ScaleStructAndStream) {
  refused(kScale, [](CallSetup &s) { s.scale.struct_size = 8; }, "args: struct_size is 8", XENT_INVALID_STRUCT);
  refused(
      kScale, [](CallSetup &s) { s.scale.struct_size = sizeof s.scale - 8; }, "args: struct_size is 48",
      XENT_INVALID_STRUCT);
  refused(kScale, [](CallSetup &s) { s.scale.next = &s; }, "next is not NULL", XENT_INVALID_STRUCT);
  refused(kScale, [](CallSetup &s) { s.scale.stream = &s; }, "must be NULL on the CPU");
}

TEST_P(CallTest, ScaleShapes) {
  refused(
      kScale, [](CallSetup &s) { s.targets.shape = {7}; },
      "targets: shape [7] has more rows than the plan's max_rows, 6");
  refused(kScale, [](CallSetup &s) { s.mask.shape = {6}; }, "mask: shape [6] does not match the targets' shape [2, 3]");
  refused(kScale, [](CallSetup &s) { s.grad_loss.shape = {2, 3}; }, "grad_loss: shape [2, 3]; it must be [] or [1]");
  refused(
      kScale,
      [](CallSetup &s) {
        s.per_row();
        s.grad_loss.shape = {3};
      },
      "grad_loss: shape [3]; it must be [], [1] or the targets' shape [2, 3]");
  for (const std::vector<int64_t> &shape : {std::vector<int64_t>{2, 3, 5}, {2, 3}, {6, 4}, {3, 2, 4}, {}}) {
    refused(kScale, [&](CallSetup &s) { s.grad_logits.shape = shape; }, "; it must be [..., vocab] = [2, 3, 4]");
  }
}

TEST_P(CallTest, ScaleTypes) {
  refused(kScale, [](CallSetup &s) { s.targets.dtype = kInt32; }, "targets: dtype is int32; this plan takes int64");
  refused(kScale, [](CallSetup &s) { s.mask.dtype = DLDataType{kDLInt, 8, 1}; }, "mask: dtype is int8");
  refused(kScale, [](CallSetup &s) { s.grad_loss.dtype = kInt32; }, "grad_loss: dtype is int32; this plan takes");
  refused(
      kScale, [](CallSetup &s) { s.grad_logits.dtype = kBFloat16; },
      "grad_logits: dtype is bfloat16; this plan takes float32");
  refused(
      kScale, [](CallSetup &s) { s.desc.logits_dtype = kFloat64; },
      "grad_logits: dtype is float32; this plan takes float64");
}

TEST_P(CallTest, ScaleMemory) {
  refused(
      kScale, [](CallSetup &s) { s.grad_logits.device = DLDevice{kDLCUDA, 0}; },
      "grad_logits: is on device CUDA:0; the plan's device is CPU");
  refused(kScale, [](CallSetup &s) { s.grad_loss.data = nullptr; }, "grad_loss: data is NULL");
  refused(kScale, [](CallSetup &s) { s.grad_logits.byte_offset = 2; }, "is not aligned to the 4 bytes of float32");
  refused(
      kScale, [](CallSetup &s) { s.grad_logits.strides = {12, 0, 1}; },
      "grad_logits: is an output and overlaps itself");
  refused(
      kScale, [](CallSetup &s) { s.grad_loss.data = s.grad_logits.data; }, "grad_logits: overlaps grad_loss; what is");
  refused(kScale, [](CallSetup &s) { s.targets.data = s.grad_logits.data; }, "grad_logits: overlaps targets");
  refused(kScale, [](CallSetup &s) { s.mask.data = s.grad_logits.data; }, "grad_logits: overlaps mask");
}

TEST_P(CallTest, ScaleNoRows) {
  const auto empty = [](CallSetup &s) {
    s.targets.shape = s.mask.shape = {2, 0};
    s.grad_logits.shape = {2, 0, 4};
    s.targets.data = s.mask.data = s.grad_logits.data = nullptr;
  };
  accepted(kScale, empty);
  accepted(kScale, [&](CallSetup &s) {
    empty(s);
    s.desc.max_rows = 0;
  });
}

INSTANTIATE_TEST_SUITE_P(Backends, CallTest, testing::Values("cpu", "fake_cpu"), backend_name);

}  // namespace
