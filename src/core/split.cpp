// SPDX-FileCopyrightText: the libxent authors
// SPDX-License-Identifier: Apache-2.0

#include "core/split.hpp"

#include <algorithm>

#include "common/dtype.hpp"
#include "common/error.hpp"
#include "common/view.hpp"
#include "core/describe.hpp"
#include "core/options.hpp"

namespace xent {
namespace {

constexpr char kCreate[] = "xent_plan_create";

// Of collectives' buffers: what NCCL's fastest copies want.
constexpr size_t kBufferAlignment = 128;

size_t row_bytes(const xent_options &options) {
  return static_cast<size_t>(partial_width(options)) * element_size(accumulator_dtype(options));
}

xent_view packed(void *data, const xent_options &options, int64_t rows, int64_t columns) {
  xent_view view = {};
  view.data = data;
  view.dtype = accumulator_dtype(options);
  view.rank = 1;
  view.shape[0] = rows;
  view.stride[0] = columns;
  view.col_stride = 1;
  return view;
}

// The part of the workspace that is the core's, and what is left for the backend.
class Buffers {
 public:
  Buffers(Call &call, size_t bytes) : base_(static_cast<char *>(call.problem().workspace)) {
    call.problem().workspace = base_ + bytes;
    call.problem().workspace_bytes -= bytes;
  }
  void *at(size_t offset) const { return base_ + offset; }

 private:
  char *base_;
};

xent_status gather_and_combine(Call &call, const Buffers &buffers, xent_error *err) {
  const xent_plan &plan = call.plan();
  xent_problem &problem = call.problem();
  const xent_options &options = plan.options;
  const int64_t rows = problem.rows;
  const int32_t width = partial_width(options);
  // Without rows there is nothing to gather, on any rank.
  if (rows > 0) {
    void *const send = buffers.at(plan.gather.send);
    void *const recv = buffers.at(plan.gather.recv);
    if (const xent_status status = plan.comm->check(call.function(), err)) return status;
    problem.partial = packed(send, options, rows, width);
    if (const xent_status status = call.invoke(&xent_backend_api::partial)) return status;
    const size_t bytes = static_cast<size_t>(rows) * row_bytes(options);
    if (const xent_status status = plan.comm->all_gather(call.function(), send, recv, bytes, problem.stream, err)) {
      return status;
    }
    if (const xent_status status = plan.comm->check(call.function(), err)) return status;
    problem.partial = packed(recv, options, rows * options.ranks, width);
  }
  return call.invoke(&xent_backend_api::combine);
}

}  // namespace

xent_status check_comm(const xent_options &options, const xent_comm *comm, xent_error *err) {
  if (comm == nullptr) return XENT_OK;
  if (comm->ranks() != options.ranks || comm->rank() != options.rank) {
    return fail(err, XENT_INVALID_ARGUMENT, "%s: comm: is rank %d of %d; the plan is rank %d of %d", kCreate,
                int{comm->rank()}, int{comm->ranks()}, int{options.rank}, int{options.ranks});
  }
  const DLDevice have = comm->device();
  const DLDevice want = options.device;
  if (have.device_type == want.device_type && have.device_id == want.device_id) return XENT_OK;
  return fail(err, XENT_INVALID_ARGUMENT, "%s: comm: gathers on %s; the plan's device is %s", kCreate,
              describe(have).text, describe(want).text);
}

void reserve_gather(xent_plan *plan, const xent_comm &comm) {
  const xent_options &options = plan->options;
  if (options.ranks <= 1) return;
  xent_plan_info &info = plan->info;
  GatherSpace &space = plan->gather;
  info.alignment = std::max(info.alignment, kBufferAlignment);
  size_t bytes = 0;
  const auto reserve = [&](size_t count, size_t size) {
    const size_t at = bytes;
    bytes += (count * size + info.alignment - 1) / info.alignment * info.alignment;
    return at;
  };
  const auto rows = static_cast<size_t>(options.max_rows);
  const size_t acc = element_size(accumulator_dtype(options));
  space.send = reserve(rows, row_bytes(options));
  space.recv = reserve(rows * static_cast<size_t>(options.ranks), row_bytes(options));
  space.forward_bytes = bytes;
  space.stats = reserve(rows, 2 * acc);
  space.divisor = reserve(1, acc);
  space.loss_and_grad_bytes = bytes;
  info.loss_and_grad_workspace_bytes = bytes + std::max(info.forward_workspace_bytes, info.backward_workspace_bytes);
  info.forward_workspace_bytes += space.forward_bytes;
  if (!comm.capturable()) info.capabilities &= ~uint32_t{XENT_CAP_GRAPH_CAPTURE};
}

xent_status forward_over_ranks(Call &call, xent_error *err) {
  if (const xent_status status = call.check()) return status;
  const Buffers buffers(call, call.plan().gather.forward_bytes);
  return gather_and_combine(call, buffers, err);
}

xent_status loss_and_grad_over_ranks(Call &call, xent_error *err) {
  if (const xent_status status = call.check()) return status;
  const xent_plan &plan = call.plan();
  const xent_options &options = plan.options;
  xent_problem &problem = call.problem();
  const Buffers buffers(call, plan.gather.loss_and_grad_bytes);
  const bool divided = options.reduction == XENT_REDUCTION_MEAN || present(problem.denominator);
  if (!present(problem.stats)) problem.stats = packed(buffers.at(plan.gather.stats), options, problem.rows, 2);
  if (divided && !present(problem.divisor)) {
    problem.divisor = packed(buffers.at(plan.gather.divisor), options, 1, 1);
    problem.divisor.rank = 0;
  }
  if (const xent_status status = gather_and_combine(call, buffers, err)) return status;
  // As xent_backward would be called.
  problem.denominator = xent_view{};
  return call.invoke(&xent_backend_api::backward);
}

}  // namespace xent
