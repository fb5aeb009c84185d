// SPDX-FileCopyrightText: the libxent authors
// SPDX-License-Identifier: Apache-2.0

// Which tensors of a call may share memory.
#include "core_call.hpp"

namespace {

TEST_P(CallTest, GradientOverLogits) {
  const auto over = [](CallSetup &s) { s.grad_logits.data = s.logits.data; };
  const auto allowed = [&](CallSetup &s) {
    over(s);
    s.desc.flags |= XENT_PLAN_OVERWRITE_LOGITS;
  };
  accepted(kGradient, allowed);
  refused(kGradient, over, "the plan needs XENT_PLAN_OVERWRITE_LOGITS for that");
  refused(
      kGradient,
      [&](CallSetup &s) {
        allowed(s);
        s.grad_logits.byte_offset = 4;
      },
      "grad_logits: overlaps logits; it must be disjoint, or exactly");
  refused(
      kGradient,
      [&](CallSetup &s) {
        allowed(s);
        s.grad_logits.byte_offset = 92;
      },
      "grad_logits: overlaps logits");
  accepted(kGradient, [&](CallSetup &s) {
    allowed(s);
    s.grad_logits.byte_offset = 96;
  });
  refused(
      kGradient,
      [&](CallSetup &s) {
        allowed(s);
        s.grad_logits.strides = {16, 5, 1};
      },
      "grad_logits: overlaps logits");
  refused(
      kGradient,
      [&](CallSetup &s) {
        allowed(s);
        s.desc.logits_dtype = s.logits.dtype = kBFloat16;
      },
      "grad_logits: overlaps logits");
  refused(
      kGradient,
      [&](CallSetup &s) {
        allowed(s);
        s.grad_logits.strides = s.logits.strides = {12, 0, 1};
      },
      "grad_logits: is an output and overlaps itself");
}

TEST_P(CallTest, InterleavedGradientIsLegal) {
  accepted(kGradient, [](CallSetup &s) {
    s.logits.strides = s.grad_logits.strides = {24, 8, 1};
    s.grad_logits.data = s.logits.data;
    s.grad_logits.byte_offset = 16;
  });
  refused(
      kGradient,
      [](CallSetup &s) {
        s.logits.strides = s.grad_logits.strides = {24, 8, 1};
        s.grad_logits.data = s.logits.data;
        s.grad_logits.byte_offset = 12;
      },
      "grad_logits: overlaps logits");
}

TEST_P(CallTest, OutputsThatOverlapSomething) {
  refused(kLoss, [](CallSetup &s) { s.lse.strides = {0, 1}; }, "lse: is an output and overlaps itself");
  refused(
      kLoss,
      [](CallSetup &s) {
        s.per_row();
        s.loss.strides = {1, 1};
      },
      "loss: is an output and overlaps itself");
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
  accepted(kLoss, [](CallSetup &s) {
    s.entropy.data = s.lse.data;
    s.entropy.strides = s.lse.strides = {6, 2};
    s.entropy.byte_offset = 4;
  });
  accepted(kAll, [](CallSetup &s) {
    s.logits.strides = {0, 4, 1};
    s.targets.strides = {0, 1};
  });  // inputs may repeat
}

TEST_P(CallTest, WorkspaceThatOverlapsATensor) {
  alignas(4096) static uint64_t memory[8192];
  for (const Operation operation : {kForward, kBackward, kBoth}) {
    CallSetup probe;
    EXPECT_EQ(call(probe, operation), XENT_OK) << err.message;
    if (needed == 0) continue;
    const size_t bytes = needed;
    refused(
        operation,
        [&](CallSetup &s) {
          s.workspace = memory;
          s.targets.data = memory;
          s.targets.byte_offset = (bytes - 1) & ~size_t{7};
        },
        "workspace: overlaps targets");
  }
}

INSTANTIATE_TEST_SUITE_P(Backends, CallTest, testing::Values("cpu", "fake_cpu"), backend_name);

}  // namespace
