// SPDX-FileCopyrightText: the libxent authors
// SPDX-License-Identifier: Apache-2.0

// Every bad argument of a call: a status, a message that names it, and nothing written. Run on the built-in CPU
// backend, and on a fake one that records what reaches it.
#include "core_call.hpp"

namespace {

TEST_P(CallTest, TheUnchangedCallsAreAccepted) {
  accepted(kAll, [](CallSetup &) {});
  accepted(kAll, [](CallSetup &s) { s.per_row(); });
  accepted(kAll, [](CallSetup &s) { s.desc.reduction = XENT_REDUCTION_SUM; });
}

TEST_P(CallTest, OptionalTensorsMayBeAbsent) {
  accepted(kAll, [](CallSetup &s) { s.mask.absent = s.row_weights.absent = s.grad_loss.absent = true; });
  accepted(kLoss, [](CallSetup &s) {
    for (CallTensor *t : {&s.denominator, &s.stats, &s.divisor, &s.lse, &s.entropy, &s.predicted, &s.row_counts})
      t->absent = true;
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
  refused(
      kForward, [](CallSetup &s) { s.forward.struct_size += 16; }, "is set, but this library knows",
      XENT_INVALID_STRUCT);
}

TEST_P(CallTest, RequiredTensors) {
  refused(kAll, [](CallSetup &s) { s.logits.absent = true; }, "logits: is NULL; it is required");
  refused(kAll, [](CallSetup &s) { s.targets.absent = true; }, "targets: is NULL; it is required");
  refused(kLoss, [](CallSetup &s) { s.loss.absent = true; }, "loss: is NULL; it is required");
  refused(kBackward, [](CallSetup &s) { s.stats.absent = true; }, "stats: is NULL; it is required");
  refused(kBackward, [](CallSetup &s) { s.divisor.absent = true; }, "divisor: is NULL; it is required");
  refused(kGradient, [](CallSetup &s) { s.grad_logits.absent = true; }, "grad_logits: is NULL; it is required");
  accepted(kBackward, [](CallSetup &s) {
    s.desc.reduction = XENT_REDUCTION_SUM;
    s.divisor.absent = true;
  });
}

TEST_P(CallTest, TensorsThatHaveNoPlaceHere) {
  refused(
      kLoss,
      [](CallSetup &s) {
        s.per_row();
        s.denominator.absent = false;
      },
      "denominator: was given; it needs XENT_REDUCTION_SUM");
  refused(
      kLoss,
      [](CallSetup &s) {
        s.per_row();
        s.divisor.absent = false;
      },
      "divisor: was given; without XENT_REDUCTION_MEAN and denominator");
  refused(
      kBackward,
      [](CallSetup &s) {
        s.per_row();
        s.divisor.absent = false;
      },
      "divisor: was given; with XENT_REDUCTION_NONE");
  refused(
      kLoss,
      [](CallSetup &s) {
        s.desc.reduction = XENT_REDUCTION_SUM;
        s.denominator.absent = true;
      },
      "divisor: was given");
  refused(
      kLoss, [](CallSetup &s) { s.desc.flags = XENT_PLAN_PREDICTED; },
      "entropy: was given; the plan needs XENT_PLAN_ENTROPY");
  refused(
      kLoss, [](CallSetup &s) { s.desc.flags = XENT_PLAN_ENTROPY; },
      "predicted: was given; the plan needs XENT_PLAN_PREDICTED");
}

TEST_P(CallTest, Shapes) {
  refused(
      kAll, [](CallSetup &s) { s.targets.shape = {2, 4}; },
      "targets: shape [2, 4] does not match the logits' leading shape [2, 3]");
  refused(kAll, [](CallSetup &s) { s.mask.shape = {6}; }, "mask: shape [6]");
  refused(kAll, [](CallSetup &s) { s.row_weights.shape = {3, 2}; }, "row_weights: shape [3, 2]");
  refused(
      kAll, [](CallSetup &s) { s.logits.shape = {2, 3, 5}; },
      "logits: shape [2, 3, 5]; it must be [..., vocab], and the plan's vocab is 4");
  refused(
      kAll,
      [](CallSetup &s) {
        s.logits.shape = {7, 4};
        s.logits.strides = {0, 1};
      },
      "logits: shape [7, 4] has more rows than the plan's max_rows, 6");
  refused(
      kAll, [](CallSetup &s) { s.stats.shape = {2, 3, 2}; }, "stats: shape [2, 3, 2]; it must be [rows, 2] = [6, 2]");
  refused(kAll, [](CallSetup &s) { s.divisor.shape = {2}; }, "divisor: shape [2]");
  refused(kLoss, [](CallSetup &s) { s.loss.shape = {2, 3}; }, "loss: shape [2, 3]; it must be [] or [1]");
  refused(
      kLoss,
      [](CallSetup &s) {
        s.per_row();
        s.loss.shape = {};
      },
      "loss: shape []");
  refused(kLoss, [](CallSetup &s) { s.denominator.shape = {6}; }, "denominator: shape [6]");
  refused(kLoss, [](CallSetup &s) { s.lse.shape = {6}; }, "lse: shape [6]");
  refused(kLoss, [](CallSetup &s) { s.entropy.shape = {6}; }, "entropy: shape [6]");
  refused(kLoss, [](CallSetup &s) { s.predicted.shape = {6}; }, "predicted: shape [6]");
  refused(kLoss, [](CallSetup &s) { s.row_counts.shape = {2}; }, "row_counts: shape [2]; it must be [3]");
  refused(kGradient, [](CallSetup &s) { s.grad_loss.shape = {2, 3}; }, "grad_loss: shape [2, 3]; it must be [] or [1]");
  refused(
      kGradient,
      [](CallSetup &s) {
        s.per_row();
        s.grad_loss.shape = {3};
      },
      "grad_loss: shape [3]; it must be [], [1] or");
  refused(
      kGradient, [](CallSetup &s) { s.grad_logits.shape = {6, 4}; },
      "grad_logits: shape [6, 4]; it must be [..., vocab] = [2, 3, 4]");
  accepted(kGradient, [](CallSetup &s) {
    s.per_row();
    s.grad_loss.shape = {2, 3};
    s.grad_loss.set<float>({1, 1, 1, 1, 1, 1});
  });
}

TEST_P(CallTest, Types) {
  refused(kAll, [](CallSetup &s) { s.logits.dtype = kFloat64; }, "logits: dtype is float64; this plan takes float32");
  refused(kAll, [](CallSetup &s) { s.targets.dtype = kInt32; }, "targets: dtype is int32; this plan takes int64");
  refused(kAll, [](CallSetup &s) { s.mask.dtype = DLDataType{kDLInt, 8, 1}; }, "mask: dtype is int8");
  refused(kAll, [](CallSetup &s) { s.row_weights.dtype = kFloat64; }, "row_weights: dtype is float64");
  refused(kAll, [](CallSetup &s) { s.stats.dtype = kFloat64; }, "stats: dtype is float64");
  refused(kAll, [](CallSetup &s) { s.divisor.dtype = kInt32; }, "divisor: dtype is int32");
  refused(
      kLoss, [](CallSetup &s) { s.denominator.dtype = kFloat64; },
      "denominator: dtype is float64; this plan takes float32 or int32 or int64");
  refused(kLoss, [](CallSetup &s) { s.loss.dtype = DLDataType{kDLFloat, 32, 2}; }, "loss: dtype is float32x2");
  refused(kLoss, [](CallSetup &s) { s.lse.dtype = kBFloat16; }, "lse: dtype is bfloat16");
  refused(kLoss, [](CallSetup &s) { s.entropy.dtype = kInt32; }, "entropy: dtype is int32");
  refused(
      kLoss, [](CallSetup &s) { s.predicted.dtype = kFloat32; },
      "predicted: dtype is float32; this plan takes int32 or int64");
  refused(kLoss, [](CallSetup &s) { s.row_counts.dtype = kFloat32; }, "row_counts: dtype is float32");
  refused(kGradient, [](CallSetup &s) { s.grad_loss.dtype = kInt32; }, "grad_loss: dtype is int32");
  refused(
      kGradient, [](CallSetup &s) { s.grad_logits.dtype = kBFloat16; },
      "grad_logits: dtype is bfloat16; this plan takes float32");
  const auto wide = [](CallSetup &s) {
    s.desc.logits_dtype = s.logits.dtype = kFloat64;
    for (CallTensor *t : {&s.row_weights, &s.loss, &s.stats, &s.divisor, &s.lse, &s.entropy, &s.grad_logits})
      t->dtype = kFloat64;
  };
  accepted(kAll, wide);
  refused(
      kGradient,
      [&](CallSetup &s) {
        wide(s);
        s.grad_logits.dtype = kFloat32;
      },
      "grad_logits: dtype is float32; this plan takes float64");
  const auto narrow = [](CallSetup &s) { s.desc.logits_dtype = s.logits.dtype = kBFloat16; };
  accepted(kAll, narrow);  // with a float32 gradient
  accepted(kAll, [&](CallSetup &s) {
    narrow(s);
    s.grad_logits.dtype = kBFloat16;
  });
  accepted(kGradient, [&](CallSetup &s) { s.grad_loss.dtype = kBFloat16; });
}

TEST_P(CallTest, Devices) {
  refused(
      kAll, [](CallSetup &s) { s.logits.device = DLDevice{kDLCUDA, 0}; },
      "logits: is on device CUDA:0; the plan's device is CPU");
  refused(
      kGradient, [](CallSetup &s) { s.grad_logits.device = DLDevice{kDLCUDA, 1}; }, "grad_logits: is on device CUDA:1");
  refused(
      kLoss, [](CallSetup &s) { s.row_counts.device = DLDevice{kDLCUDAManaged, 0}; },
      "row_counts: is on device CUDAManaged:0");
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
    refused(
        operation, [&](CallSetup &s) { s.no_workspace = true; }, text + std::to_string(bytes) + " given at NULL",
        XENT_WORKSPACE_TOO_SMALL);
    refused(
        operation, [&](CallSetup &s) { s.workspace_bytes = bytes - 1; }, text + std::to_string(bytes - 1) + " given",
        XENT_WORKSPACE_TOO_SMALL);
    refused(operation, [&](CallSetup &s) { s.workspace_bytes = 0; }, text + "0 given", XENT_WORKSPACE_TOO_SMALL);
    refused(operation, [&](CallSetup &s) { s.workspace_shift = 1; }, "is not aligned to");
    refused(operation, [&](CallSetup &s) { s.workspace_bytes = SIZE_MAX; }, "leave the address space");
    accepted(operation, [&](CallSetup &s) { s.workspace_bytes = bytes + 64; });
  }
}

TEST_P(CallTest, NoRows) {
  const auto empty = [](CallSetup &s) {
    s.logits.shape = s.grad_logits.shape = {2, 0, 4};
    s.stats.shape = {0, 2};
    for (CallTensor *t : {&s.targets, &s.mask, &s.row_weights, &s.lse, &s.entropy, &s.predicted}) t->shape = {2, 0};
    for (CallTensor *t :
         {&s.logits, &s.grad_logits, &s.stats, &s.targets, &s.mask, &s.row_weights, &s.lse, &s.entropy, &s.predicted})
      t->data = nullptr;
  };
  accepted(kAll, empty);
  if (fake != nullptr) {
    EXPECT_EQ(fake->calls, 3);
    EXPECT_EQ(fake->problem.rows, 0);
    EXPECT_EQ(fake->problem.logits.data, nullptr);
    EXPECT_NE(fake->problem.loss.data, nullptr);
  }
  accepted(kAll, [&](CallSetup &s) {
    empty(s);
    s.desc.max_rows = 0;
  });
  refused(
      kLoss,
      [&](CallSetup &s) {
        empty(s);
        s.loss.data = nullptr;
      },
      "loss: data is NULL");
  refused(
      kAll,
      [&](CallSetup &s) {
        empty(s);
        s.targets.shape = {3, 0};
      },
      "targets: shape [3, 0]");
}

INSTANTIATE_TEST_SUITE_P(Backends, CallTest, testing::Values("cpu", "fake_cpu"), backend_name);

}  // namespace
