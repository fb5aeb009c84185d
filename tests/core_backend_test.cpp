// SPDX-FileCopyrightText: the libxent authors
// SPDX-License-Identifier: Apache-2.0

// What reaches a backend, and what becomes of its failures.
#include "core_call.hpp"

namespace {

class FakeCallTest : public CallTest {};
INSTANTIATE_TEST_SUITE_P(Backends, FakeCallTest, testing::Values("fake_cpu"), backend_name);

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
  const std::pair<const xent_view *, CallTensor *> pairs[] = {{&problem.logits, &setup.logits},
                                                              {&problem.mask, &setup.mask},
                                                              {&problem.row_weights, &setup.row_weights},
                                                              {&problem.denominator, &setup.denominator},
                                                              {&problem.loss, &setup.loss},
                                                              {&problem.stats, &setup.stats},
                                                              {&problem.divisor, &setup.divisor},
                                                              {&problem.lse, &setup.lse},
                                                              {&problem.entropy, &setup.entropy},
                                                              {&problem.predicted, &setup.predicted},
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
INSTANTIATE_TEST_SUITE_P(Backends, CudaCallTest, testing::Values("fake_cuda"), backend_name);

TEST_P(CudaCallTest, StreamsAndDevices) {
  accepted(kAll, on_cuda);
  accepted(kLoss, [](CallSetup &s) {
    on_cuda(s);
    s.forward.stream = &s;
  });
  CallSetup setup;
  on_cuda(setup);
  setup.backward.stream = &setup;
  EXPECT_EQ(call(setup, kBackward), XENT_OK) << err.message;
  EXPECT_EQ(fake->problem.stream, &setup);
  accepted(kAll, [](CallSetup &s) {
    on_cuda(s);
    s.targets.device = DLDevice{kDLCUDAManaged, 1};
  });
  refused(
      kAll,
      [](CallSetup &s) {
        on_cuda(s);
        s.targets.device = DLDevice{kDLCUDA, 0};
      },
      "targets: is on device CUDA:0; the plan's device is CUDA:1");
  refused(
      kAll,
      [](CallSetup &s) {
        on_cuda(s);
        s.logits.device = DLDevice{kDLCPU, 0};
      },
      "logits: is on device CPU; the plan's device is CUDA:1");
  refused(
      kLoss,
      [](CallSetup &s) {
        on_cuda(s);
        s.denominator.device = DLDevice{kDLCUDAHost, 1};
      },
      "denominator: is on device CUDAHost");
}

}  // namespace
