// SPDX-FileCopyrightText: the libxent authors
// SPDX-License-Identifier: Apache-2.0

#include "core/call.hpp"

#include "common/error.hpp"
#include "common/view.hpp"
#include "core/describe.hpp"
#include "core/options.hpp"

namespace xent {

Call::Call(const char *function, const xent_plan &plan, xent_error *err)
    : function_(function),
      plan_(plan),
      err_(err),
      accumulator_(dtype_set(accumulator_dtype(plan.options))),
      reader_(function, plan.options, err) {
  problem_.struct_size = sizeof problem_;
  problem_.options = &plan.options;
}

void Call::stream(void *stream) {
  if (failed()) return;
  if (stream != nullptr && on_cpu(options())) {
    status_ = fail(err_, XENT_INVALID_ARGUMENT, "%s: stream: is %p; it must be NULL on the CPU", function_, stream);
  }
  problem_.stream = stream;
}

void Call::workspace(void *data, size_t bytes, size_t needed) {
  if (failed() || needed == 0) return;
  const auto address = reinterpret_cast<uintptr_t>(data);
  if (data == nullptr || bytes < needed) {
    status_ = fail(err_, XENT_WORKSPACE_TOO_SMALL, "%s: workspace: %zu bytes are needed, %zu given%s", function_,
                   needed, bytes, data == nullptr ? " at NULL" : "");
  } else if ((address & (plan_.info.alignment - 1)) != 0) {
    status_ = fail(err_, XENT_INVALID_ARGUMENT, "%s: workspace: address %p is not aligned to %zu bytes", function_,
                   data, plan_.info.alignment);
  } else if (bytes > static_cast<size_t>(kMaximumSpan) || address + bytes < address) {
    status_ = fail(err_, XENT_INVALID_ARGUMENT, "%s: workspace_bytes: %zu from %p leave the address space", function_,
                   bytes, data);
  } else {
    problem_.workspace = data;
    problem_.workspace_bytes = bytes;
    workspace_.data = data;
    workspace_.dtype = DLDataType{kDLUInt, 8, 1};
    workspace_.rank = 0;
    workspace_.col_stride = 1;
    accesses_[count_++] = Access{"workspace", Region{&workspace_, static_cast<int64_t>(bytes)}, true};
  }
}

void Call::record(const char *name, const xent_view *view, Form form, bool written) {
  if (!present(*view)) return;
  const bool partial = form == Form::kPartial || form == Form::kPartials;
  const int64_t columns = form == Form::kMatrix   ? options().vocab
                          : form == Form::kPairs  ? 2
                          : form == Form::kTriple ? 3
                          : partial               ? partial_width(options())
                                                  : 1;
  accesses_[count_++] = Access{name, Region{view, columns}, written};
}

void Call::logits(const DLTensor *tensor) {
  if (failed()) return;
  if (tensor == nullptr) {
    status_ = fail(err_, XENT_INVALID_ARGUMENT, "%s: logits: is NULL; it is required", function_);
    return;
  }
  status_ = reader_.read_logits(*tensor, &problem_.logits);
  if (failed()) return;
  problem_.rows = reader_.rows();
  record("logits", &problem_.logits, Form::kMatrix, false);
}

void Call::first_rows(const TensorRule &rule, const DLTensor *tensor, xent_view *view) {
  if (failed()) return;
  if (tensor == nullptr) {
    status_ = fail(err_, XENT_INVALID_ARGUMENT, "%s: %s: is NULL; it is required", function_, rule.name);
    return;
  }
  status_ = reader_.read_first_rows(rule, *tensor, view);
  if (failed()) return;
  problem_.rows = reader_.rows();
  record(rule.name, view, rule.form, false);
}

void Call::tensor(const TensorRule &rule, Need need, const DLTensor *tensor, xent_view *view, bool written) {
  if (failed()) return;
  if (tensor == nullptr) {
    if (need == kRequired) {
      status_ = fail(err_, XENT_INVALID_ARGUMENT, "%s: %s: is NULL; it is required", function_, rule.name);
    }
    return;
  }
  status_ = reader_.read(rule, *tensor, view);
  if (!failed()) record(rule.name, view, rule.form, written);
}

void Call::input(const TensorRule &rule, Need need, const DLTensor *tensor, xent_view *view) {
  this->tensor(rule, need, tensor, view, false);
}

void Call::output(const TensorRule &rule, Need need, const DLTensor *tensor, xent_view *view) {
  this->tensor(rule, need, tensor, view, true);
}

void Call::refuse(bool given, const char *name, const char *rule) {
  if (failed() || !given) return;
  status_ = fail(err_, XENT_INVALID_ARGUMENT, "%s: %s: was given; %s", function_, name, rule);
}

xent_status Call::check_self(const Access &output) {
  const Overlap overlap = find_self_overlap(output.region);
  if (overlap == Overlap::kNone) return XENT_OK;
  const xent_view &view = *output.region.view;
  return fail(err_, XENT_INVALID_ARGUMENT, "%s: %s: %s; the merged leading shape is %s with strides %s", function_,
              output.name,
              overlap == Overlap::kSome ? "is an output and overlaps itself"
                                        : "is an output and could not be shown not to overlap itself",
              describe_list(view.shape, view.rank).text, describe_list(view.stride, view.rank).text);
}

xent_status Call::check_pair(const Access &output, const Access &other) {
  const bool gradient = output.region.view == &problem_.grad_logits && other.region.view == &problem_.logits;
  if (gradient && same_storage(problem_.grad_logits, problem_.logits)) {
    if (options().overwrite) return XENT_OK;
    return fail(err_, XENT_INVALID_ARGUMENT,
                "%s: grad_logits: is the storage of logits (%p); the plan needs XENT_PLAN_OVERWRITE_LOGITS for that",
                function_, problem_.logits.data);
  }
  const Overlap overlap = find_overlap(output.region, other.region);
  if (overlap == Overlap::kNone) return XENT_OK;
  return fail(err_, XENT_INVALID_ARGUMENT, "%s: %s: %s %s; %s", function_, output.name,
              overlap == Overlap::kSome ? "overlaps" : "could not be shown to be disjoint from", other.name,
              gradient ? "it must be disjoint, or exactly the same storage, type and strides "
                         "(XENT_PLAN_OVERWRITE_LOGITS)"
                       : "what is written must be disjoint from every other tensor of the call");
}

xent_status Call::check_disjoint() {
  ByteRange ranges[kMaximumTensors + 1];
  for (int i = 0; i < count_; ++i) ranges[i] = byte_range(accesses_[i].region);
  for (int i = 0; i < count_; ++i) {
    if (!accesses_[i].written) continue;
    // The workspace is a run of bytes.
    if (accesses_[i].region.view != &workspace_) {
      if (const xent_status status = check_self(accesses_[i])) return status;
    }
    for (int j = 0; j < count_; ++j) {
      // A pair of outputs is looked at once, from the later one.
      if (j == i || (j > i && accesses_[j].written) || !ranges[i].meets(ranges[j])) continue;
      if (const xent_status status = check_pair(accesses_[i], accesses_[j])) return status;
    }
  }
  return XENT_OK;
}

xent_status Call::check() {
  if (!failed()) status_ = check_disjoint();
  return status_;
}

xent_status Call::invoke(Entry entry) {
  const xent_backend_api &api = plan_.backend->api;
  PluginError plugin;
  const xent_status status = (api.*entry)(api.self, plan_.state, &problem_, &plugin.error);
  if (status == XENT_OK) return XENT_OK;
  if (plugin.error.message[0] != '\0') {
    return fail_native(err_, status, plugin.error.native_code, "%s", plugin.message());
  }
  return fail_native(err_, status, plugin.error.native_code, "%s: backend %s failed and gave no message", function_,
                     api.name);
}

}  // namespace xent
