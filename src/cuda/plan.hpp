// SPDX-FileCopyrightText: the libxent authors
// SPDX-License-Identifier: Apache-2.0

// A plan on one device: what is decided once, and the launches of each call.
#pragma once

#include <xent/xent_plugin.h>

#include "geometry.hpp"
#include "kernel_table.hpp"
#include "params.cuh"

namespace xent::cuda {

struct Driver;

class Plan {
 public:
  static xent_status create(const Driver &driver, const xent_options &options, Plan **out, xent_plan_info *info,
                            xent_error *err);
  ~Plan();

  xent_status forward(const xent_problem &problem, xent_error *err) const;
  xent_status backward(const xent_problem &problem, xent_error *err) const;
  xent_status loss_and_grad(const xent_problem &problem, xent_error *err) const;
  xent_status partial(const xent_problem &problem, xent_error *err) const;
  xent_status combine(const xent_problem &problem, xent_error *err) const;
  xent_status scale_grad(const xent_problem &problem, xent_error *err) const;

 private:
  // Offsets into the workspace. Pieces that a call does not use are not reserved.
  struct Workspace {
    size_t row_loss = 0, chunks = 0, divisor = 0, partials = 0, stats = 0, bytes = 0;
  };

  // How forward, or loss and gradient in one pass, goes over the rows.
  struct Sweep {
    bool gradient = false;
    RowShape shape = {};
    const void *rows = nullptr;   // the stream: a warp or a block a row
    const void *split = nullptr;  // the pieces of a row on different SMs
    const void *combine = nullptr;
    const void *held[kLayouts] = {};   // rows in registers; beside forward's stream a block a row, where there is one
    const void *parts[kLayouts] = {};  // few rows of such: the parts of a row on different SMs
    size_t shared = 0, held_shared = 0, split_shared = 0;
    int blocks = 0;
    int pieces = 0;
    int64_t split_rows = 0, part_rows = 0;  // up to here they are few
    Workspace space;
    int serial = 0;  // batches, or units, of a warp's share that are one piece
    bool splits(int64_t count, Layout layout) const {
      const int at = static_cast<int>(layout);
      return count > 0 && count <= (parts[at] != nullptr ? part_rows : held[at] == nullptr ? split_rows : 0);
    }
  };

  Plan(const Driver &driver, const xent_options &options) : driver_(driver), options_(options) {}
  xent_status load(xent_error *err);
  xent_status prepare(Sweep &sweep, const SweepKernels &kernels, xent_error *err) const;
  xent_status prepare_stream(Sweep &sweep, const SweepKernels &kernels, xent_error *err) const;
  Workspace workspace(const Sweep &sweep) const;
  Params params(const xent_problem &problem, const Sweep &sweep) const;
  xent_status run(const Sweep &sweep, const Params &params, int what, bool follows, void *stream,
                  xent_error *err) const;
  xent_status run_rows(const Sweep &sweep, const void *held, const Params &params, bool follows, void *stream,
                       xent_error *err) const;
  xent_status run_teams(const void *kernel, Params &params, bool follows, void *stream, xent_error *err) const;
  xent_status gradient(const Params &params, bool follows, void *stream, xent_error *err) const;
  xent_status reduce(const Params &params, int what, bool follows, void *stream, xent_error *err) const;

  const Driver &driver_;
  const xent_options &options_;
  Constants constants_ = {};
  void *context_ = nullptr;  // CUcontext
  const KernelTable *kernels_ = nullptr;
  int feature_set_ = 0;
  int partial_words_ = 0;
  int lanes_ = 0;  // elements of a vector
  int processors_ = 0;
  bool overlaps_ = false;  // the device can start a launch while the one before it ends
  Sweep forward_, both_;
};

}  // namespace xent::cuda
