// SPDX-FileCopyrightText: the libxent authors
// SPDX-License-Identifier: Apache-2.0

// A plan on one device: what is decided once, and the launches of each call.
#pragma once

#include <xent/xent_plugin.h>

#include "geometry.hpp"
#include "kernel_table.hpp"

namespace xent::cuda {

struct Driver;
struct Params;

class Plan {
 public:
  static xent_status create(const Driver &driver, const xent_options &options, Plan **out, xent_plan_info *info,
                            xent_error *err);
  ~Plan();

  xent_status forward(const xent_problem &problem, xent_error *err) const;
  xent_status backward(const xent_problem &problem, xent_error *err) const;
  xent_status loss_and_grad(const xent_problem &problem, xent_error *err) const;

 private:
  // Offsets into the workspace. Pieces that a call does not use are not reserved.
  struct Workspace {
    size_t row_loss = 0, chunks = 0, divisor = 0, partials = 0, bytes = 0;
  };

  Plan(const Driver &driver, const xent_options &options) : driver_(driver), options_(options) {}
  xent_status load(xent_error *err);
  Workspace workspace(bool gradient) const;
  Params params(const xent_problem &problem, const RowShape &shape, const Workspace &space) const;
  xent_status sweep(const Params &params, void *stream, xent_error *err) const;
  xent_status launch_rows(const void *kernel, const RowShape &shape, void **args, int64_t rows, void *stream,
                          xent_error *err) const;
  xent_status one_pass(const Params &params, void *stream, xent_error *err) const;
  xent_status gradient(const Params &params, void *stream, xent_error *err) const;
  xent_status reduce(const Params &params, int what, void *stream, xent_error *err) const;

  const Driver &driver_;
  const xent_options &options_;
  void *context_ = nullptr;  // CUcontext
  const KernelTable *kernels_ = nullptr;
  int feature_set_ = 0;
  int partial_words_ = 0;
  int lanes_ = 0;  // elements of a vector
  int processors_ = 0;
  RowShape forward_shape_ = {};
  RowShape one_pass_shape_ = {};
  int64_t split_rows_ = 0;  // up to here forward gives the slices of a row to different blocks
  Workspace forward_space_, one_pass_space_;
};

}  // namespace xent::cuda
