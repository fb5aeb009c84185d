// SPDX-FileCopyrightText: the libxent authors
// SPDX-License-Identifier: Apache-2.0

#include "core/execute.hpp"

#include "common/error.hpp"
#include "core/call.hpp"
#include "core/split.hpp"
#include "core/structs.hpp"

namespace xent {
namespace {

constexpr auto kRequired = Call::kRequired;
constexpr auto kOptional = Call::kOptional;
constexpr uint32_t kMaskTypes = kBool | kU8 | kI32 | kI64 | kF32;

// int32 only where it holds every number in [0, count].
uint32_t holds_indices(int64_t count) { return count > INT32_MAX ? kI64 : kI32 | kI64; }

// logits, targets and mask: which rows there are, and which of them count.
void read_rows(Call &call, const DLTensor *logits, const DLTensor *targets, const DLTensor *mask) {
  xent_problem &problem = call.problem();
  call.logits(logits);
  call.input({"targets", dtype_set(call.options().target_dtype), Form::kRows}, kRequired, targets, &problem.targets);
  call.input({"mask", kMaskTypes, Form::kRows}, kOptional, mask, &problem.mask);
}

// What every call has that makes a loss or a gradient of logits.
template <class Args>
void read_weighted_rows(Call &call, const Args &args) {
  xent_problem &problem = call.problem();
  read_rows(call, args.logits, args.targets, args.mask);
  call.input({"row_weights", call.accumulator(), Form::kRows}, kOptional, args.row_weights, &problem.row_weights);
}

// What the call cannot do, before any tensor is read.
void refuse_outputs(Call &call, const xent_forward_args &args) {
  const xent_options &options = call.options();
  const bool per_row = options.reduction == XENT_REDUCTION_NONE;
  const bool divided = options.reduction == XENT_REDUCTION_MEAN || args.denominator != nullptr;
  call.refuse(args.denominator != nullptr && per_row, "denominator", "it needs XENT_REDUCTION_SUM or _MEAN");
  call.refuse(args.divisor != nullptr && !divided, "divisor",
              "without XENT_REDUCTION_MEAN and denominator nothing is divided");
  call.refuse(args.entropy != nullptr && !options.entropy, "entropy", "the plan needs XENT_PLAN_ENTROPY for it");
  call.refuse(args.predicted != nullptr && !options.predicted, "predicted",
              "the plan needs XENT_PLAN_PREDICTED for it");
}

// All but the rows.
void read_outputs(Call &call, const xent_forward_args &args) {
  const xent_options &options = call.options();
  xent_problem &problem = call.problem();
  const uint32_t acc = call.accumulator();
  const bool per_row = options.reduction == XENT_REDUCTION_NONE;
  call.input({"denominator", kF32 | kI32 | kI64, Form::kScalar}, kOptional, args.denominator, &problem.denominator);
  call.output({"loss", acc, per_row ? Form::kRows : Form::kScalar}, kRequired, args.loss, &problem.loss);
  call.output({"stats", acc, Form::kPairs}, kOptional, args.stats, &problem.stats);
  call.output({"divisor", acc, Form::kScalar}, kOptional, args.divisor, &problem.divisor);
  call.output({"lse", acc, Form::kRows}, kOptional, args.lse, &problem.lse);
  call.output({"entropy", acc, Form::kRows}, kOptional, args.entropy, &problem.entropy);
  call.output({"predicted", holds_indices(options.classes), Form::kRows}, kOptional, args.predicted,
              &problem.predicted);
  call.output({"row_counts", holds_indices(problem.rows), Form::kTriple}, kOptional, args.row_counts,
              &problem.row_counts);
}

void read_forward(Call &call, const xent_forward_args &args) {
  refuse_outputs(call, args);
  read_weighted_rows(call, args);
  read_outputs(call, args);
}

// `grad_loss` and `grad_logits`, the end of every argument list that has them.
void read_gradient(Call &call, Call::Need need, const DLTensor *grad_loss, const DLTensor *grad_logits) {
  const xent_options &options = call.options();
  xent_problem &problem = call.problem();
  const bool per_row = options.reduction == XENT_REDUCTION_NONE;
  call.input({"grad_loss", kAnyFloat, per_row ? Form::kScalarOrRows : Form::kScalar}, need, grad_loss,
             &problem.grad_loss);
  const uint32_t logits = dtype_set(options.logits_dtype);
  call.output({"grad_logits", logits == kF64 ? logits : logits | kF32, Form::kMatrix}, kRequired, grad_logits,
              &problem.grad_logits);
}

xent_status no_plan(const char *function, xent_error *err) {
  return fail(err, XENT_INVALID_ARGUMENT, "%s: plan: is NULL", function);
}

xent_status need_comm(const char *function, const xent_plan &plan, xent_error *err) {
  if (plan.options.ranks <= 1 || plan.comm != nullptr) return XENT_OK;
  return fail(err, XENT_INVALID_ARGUMENT,
              "%s: plan: its vocabulary is split over %d ranks and it has no communicator; with a collective of your "
              "own use xent_forward_partial, xent_forward_combine and xent_backward",
              function, int{plan.options.ranks});
}

xent_status need_split(const char *function, const xent_plan &plan, xent_error *err) {
  if (plan.options.ranks > 0) return XENT_OK;
  return fail(err, XENT_INVALID_ARGUMENT, "%s: plan: its vocabulary is not split (ranks is 0)", function);
}

}  // namespace

xent_status forward(const xent_plan *plan, const xent_forward_args *args, xent_error *err) {
  constexpr char function[] = "xent_forward";
  if (plan == nullptr) return no_plan(function, err);
  if (const xent_status status = need_comm(function, *plan, err)) return status;
  xent_forward_args copy;
  if (const xent_status status = read_struct(function, "args", args, &copy, err)) return status;
  Call call(function, *plan, err);
  call.stream(copy.stream);
  call.workspace(copy.workspace, copy.workspace_bytes, plan->info.forward_workspace_bytes);
  read_forward(call, copy);
  return plan->options.ranks > 1 ? forward_over_ranks(call, err) : call.run(&xent_backend_api::forward);
}

xent_status backward(const xent_plan *plan, const xent_backward_args *args, xent_error *err) {
  constexpr char function[] = "xent_backward";
  if (plan == nullptr) return no_plan(function, err);
  xent_backward_args copy;
  if (const xent_status status = read_struct(function, "args", args, &copy, err)) return status;
  Call call(function, *plan, err);
  xent_problem &problem = call.problem();
  const int32_t reduction = plan->options.reduction;
  call.stream(copy.stream);
  call.workspace(copy.workspace, copy.workspace_bytes, plan->info.backward_workspace_bytes);
  call.refuse(copy.divisor != nullptr && reduction == XENT_REDUCTION_NONE, "divisor",
              "with XENT_REDUCTION_NONE nothing is divided");
  read_weighted_rows(call, copy);
  call.input({"stats", call.accumulator(), Form::kPairs}, kRequired, copy.stats, &problem.stats);
  call.input({"divisor", call.accumulator(), Form::kScalar}, reduction == XENT_REDUCTION_MEAN ? kRequired : kOptional,
             copy.divisor, &problem.divisor);
  read_gradient(call, kOptional, copy.grad_loss, copy.grad_logits);
  return call.run(&xent_backend_api::backward);
}

xent_status loss_and_grad(const xent_plan *plan, const xent_loss_and_grad_args *args, xent_error *err) {
  constexpr char function[] = "xent_loss_and_grad";
  if (plan == nullptr) return no_plan(function, err);
  if (const xent_status status = need_comm(function, *plan, err)) return status;
  xent_loss_and_grad_args copy;
  xent_forward_args forward;
  if (const xent_status status = read_struct(function, "args", args, &copy, err)) return status;
  if (const xent_status status = read_struct(function, "forward", copy.forward, &forward, err)) return status;
  Call call(function, *plan, err);
  call.stream(forward.stream);
  call.workspace(forward.workspace, forward.workspace_bytes, plan->info.loss_and_grad_workspace_bytes);
  read_forward(call, forward);
  read_gradient(call, kOptional, copy.grad_loss, copy.grad_logits);
  return plan->options.ranks > 1 ? loss_and_grad_over_ranks(call, err) : call.run(&xent_backend_api::loss_and_grad);
}

xent_status scale_grad(const xent_plan *plan, const xent_scale_grad_args *args, xent_error *err) {
  constexpr char function[] = "xent_scale_grad";
  if (plan == nullptr) return no_plan(function, err);
  xent_scale_grad_args copy;
  if (const xent_status status = read_struct(function, "args", args, &copy, err)) return status;
  const xent_backend_api &backend = plan->backend->api;
  if (backend.scale_grad == nullptr) {
    return fail(err, XENT_UNSUPPORTED, "%s: plan: its backend %s has no scale_grad; use xent_backward with grad_loss",
                function, backend.name);
  }
  Call call(function, *plan, err);
  xent_problem &problem = call.problem();
  call.stream(copy.stream);
  call.first_rows({"targets", dtype_set(call.options().target_dtype), Form::kRows}, copy.targets, &problem.targets);
  call.input({"mask", kMaskTypes, Form::kRows}, kOptional, copy.mask, &problem.mask);
  read_gradient(call, kRequired, copy.grad_loss, copy.grad_logits);
  return call.run(&xent_backend_api::scale_grad);
}

xent_status forward_partial(const xent_plan *plan, const xent_partial_args *args, xent_error *err) {
  constexpr char function[] = "xent_forward_partial";
  if (plan == nullptr) return no_plan(function, err);
  if (const xent_status status = need_split(function, *plan, err)) return status;
  xent_partial_args copy;
  if (const xent_status status = read_struct(function, "args", args, &copy, err)) return status;
  Call call(function, *plan, err);
  call.stream(copy.stream);
  call.workspace(copy.workspace, copy.workspace_bytes, plan->info.forward_workspace_bytes);
  read_rows(call, copy.logits, copy.targets, copy.mask);
  call.output({"partial", call.accumulator(), Form::kPartial}, kRequired, copy.partial, &call.problem().partial);
  return call.run(&xent_backend_api::partial);
}

xent_status forward_combine(const xent_plan *plan, const xent_combine_args *args, xent_error *err) {
  constexpr char function[] = "xent_forward_combine";
  if (plan == nullptr) return no_plan(function, err);
  if (const xent_status status = need_split(function, *plan, err)) return status;
  xent_combine_args copy;
  xent_forward_args forward;
  if (const xent_status status = read_struct(function, "args", args, &copy, err)) return status;
  if (const xent_status status = read_struct(function, "forward", copy.forward, &forward, err)) return status;
  Call call(function, *plan, err);
  xent_problem &problem = call.problem();
  call.stream(forward.stream);
  call.workspace(forward.workspace, forward.workspace_bytes, plan->info.forward_workspace_bytes);
  call.refuse(forward.logits != nullptr, "logits", "it must be NULL: combine reads partials in their place");
  refuse_outputs(call, forward);
  call.first_rows({"targets", dtype_set(call.options().target_dtype), Form::kRows}, forward.targets, &problem.targets);
  call.input({"mask", kMaskTypes, Form::kRows}, kOptional, forward.mask, &problem.mask);
  call.input({"row_weights", call.accumulator(), Form::kRows}, kOptional, forward.row_weights, &problem.row_weights);
  call.input({"partials", call.accumulator(), Form::kPartials}, kRequired, copy.partials, &problem.partial);
  read_outputs(call, forward);
  return call.run(&xent_backend_api::combine);
}

}  // namespace xent
