// SPDX-FileCopyrightText: the libxent authors
// SPDX-License-Identifier: Apache-2.0

// One call under construction: collects a problem from the caller's arguments and stops at the first that is wrong.
#pragma once

#include "core/overlap.hpp"
#include "core/plan.hpp"
#include "core/tensor.hpp"

namespace xent {

class Call {
 public:
  using Entry = xent_status (*xent_backend_api::*)(void *, void *, const xent_problem *, xent_error *);
  enum Need { kRequired, kOptional };

  Call(const char *function, const xent_plan &plan, xent_error *err);

  // All that follow do nothing once one has failed.
  void stream(void *stream);
  void workspace(void *data, size_t bytes, size_t needed);
  // First of the tensors: its shape is what the others are compared with.
  void logits(const DLTensor *tensor);
  // The same for a call without logits.
  void first_rows(const TensorRule &rule, const DLTensor *tensor, xent_view *view);
  void input(const TensorRule &rule, Need need, const DLTensor *tensor, xent_view *view);
  void output(const TensorRule &rule, Need need, const DLTensor *tensor, xent_view *view);
  // Refuses an argument that is there although it must not be.
  void refuse(bool given, const char *name, const char *rule);

  // Compares the outputs and the workspace with everything.
  xent_status check();
  // Calls the backend with the problem as it is.
  xent_status invoke(Entry entry);
  // The two.
  xent_status run(Entry entry) {
    const xent_status status = check();
    return status == XENT_OK ? invoke(entry) : status;
  }

  const char *function() const { return function_; }
  const xent_plan &plan() const { return plan_; }
  const xent_options &options() const { return plan_.options; }
  uint32_t accumulator() const { return accumulator_; }
  xent_problem &problem() { return problem_; }

 private:
  struct Access {
    const char *name;
    Region region;
    bool written;
  };
  static constexpr int kMaximumTensors = 15;  // as many as xent_problem has views

  void tensor(const TensorRule &rule, Need need, const DLTensor *tensor, xent_view *view, bool written);
  void record(const char *name, const xent_view *view, Form form, bool written);
  xent_status check_disjoint();
  xent_status check_pair(const Access &output, const Access &other);
  xent_status check_self(const Access &output);
  bool failed() const { return status_ != XENT_OK; }

  const char *function_;
  const xent_plan &plan_;
  xent_error *err_;
  xent_status status_ = XENT_OK;
  uint32_t accumulator_;
  TensorReader reader_;
  xent_problem problem_{};
  xent_view workspace_;
  Access accesses_[kMaximumTensors + 1];
  int count_ = 0;
};

}  // namespace xent
