// SPDX-FileCopyrightText: the libxent authors
// SPDX-License-Identifier: Apache-2.0

// How a plan goes over the rows of a call: the kernels it has for that, and which of them a call takes.

#include <algorithm>

#include "arguments.hpp"
#include "common/dtype.hpp"
#include "device.cuh"
#include "kernel_table.cuh"
#include "launch.hpp"
#include "plan.hpp"

namespace xent::cuda {
namespace {

// The partials of few rows take at most as much of the workspace.
constexpr int64_t kSplitBytes = 1024 * 1024;
// A block of forward has at most as much for the pieces of its row.
constexpr size_t kMostRowShared = 32 * 1024;
// Rows an SM that are few: the stream's warps, or blocks, do not fill the device.
constexpr int kFewForward = 8, kFewBoth = 2;
// Rows that are so few, and of so many parts, that many SMs are sooner done with them, and with a launch more, than a
// block for each: forward up to kFewBlocks of more pieces than a block has warps, the one pass up to three rows for
// four SMs.
constexpr int kFewBlocks = 40, kRowParts = kRowThreads / 32 + 1, kBlockParts = 12;

}  // namespace

xent_status Plan::prepare(Sweep &sweep, const SweepKernels &kernels, xent_error *err) const {
  const Path path = sweep.shape.path;
  if (path == Path::stream) {
    const xent_status status = prepare_stream(sweep, kernels, err);
    if (status != XENT_OK) return status;
    // A row's partials are in shared memory, which very long rows would fill. A kernel may carry more features than the
    // plan asked for.
    sweep.held_shared = static_cast<size_t>(sweep.pieces * kPartialWords<kSoftcap | kAll>) * sizeof(float);
    if (sweep.gradient || !has_row_blocks(ceil_div(options_.columns, lanes_)) || sweep.held_shared > kMostRowShared) {
      return XENT_OK;
    }
  }
  const int64_t most_rows = std::min<int64_t>(options_.max_rows, sweep.gradient ? processors_ * 3 / 4 : kFewBlocks);
  if (path == Path::block) {
    sweep.pieces = sweep.shape.warps;
    sweep.serial = sweep.shape.batches;
    sweep.held_shared = static_cast<size_t>(sweep.shape.warps * sweep.shape.keep * kUnit) * 16;
    sweep.combine = kernels.combine[feature_set_];
    const xent_status status = load_kernel(sweep.combine, 0, err);
    if (status != XENT_OK) return status;
  }
  if (path != Path::team && sweep.pieces >= (sweep.gradient ? kBlockParts : kRowParts)) sweep.part_rows = most_rows;
  for (int layout = 0; layout < kLayouts; ++layout) {
    const void *const kernel = path == Path::stream   ? kernels_->row[layout][feature_set_]
                               : path == Path::team   ? kernels.team[layout][feature_set_]
                               : sweep.shape.keep > 0 ? kernels_->stash[layout][feature_set_]
                                                      : kernels_->block[layout][feature_set_];
    if (kernel == nullptr) continue;
    sweep.held[layout] = kernel;
    xent_status status = load_kernel(kernel, sweep.held_shared, err);
    if (sweep.part_rows > 0) {
      sweep.parts[layout] = (path == Path::block ? kernels_->block_shares : kernels_->row_pieces)[layout][feature_set_];
      if (status == XENT_OK && sweep.parts[layout] != nullptr) status = load_kernel(sweep.parts[layout], 0, err);
    }
    if (status != XENT_OK) return status;
  }
  return XENT_OK;
}

xent_status Plan::prepare_stream(Sweep &sweep, const SweepKernels &kernels, xent_error *err) const {
  const RowShape &shape = sweep.shape;
  sweep.rows = kernels.rows[feature_set_];
  sweep.split = kernels.split[feature_set_];
  sweep.combine = kernels.combine[feature_set_];
  const int batch = sweep.gradient ? kBatch : kForwardBatch;
  sweep.serial = serial_of(batch);
  sweep.pieces = shape.warps * share_pieces(geometry_of(shape), sweep.serial);
  const int block_warps = shape.warps / shape.cluster;
  if (sweep.gradient) {
    sweep.shared =
        static_cast<size_t>(block_warps * kRingBytes<kBatch> + slot_bytes(shape.warps, kPartialWords<kSoftcap | kAll>));
  }
  sweep.split_shared = static_cast<size_t>(kSplitWarps * sweep.serial * (batch * 32 + 1) * 16);
  xent_status status = load_kernel(sweep.rows, sweep.shared, err);
  if (status == XENT_OK) status = load_kernel(sweep.split, sweep.split_shared, err);
  if (status == XENT_OK) status = load_kernel(sweep.combine, 0, err);
  if (status != XENT_OK) return status;
  int blocks = 0;
  const cudaError_t code =
      cudaOccupancyMaxActiveBlocksPerMultiprocessor(&blocks, sweep.rows, block_warps * 32, sweep.shared);
  if (code != cudaSuccess) return device_error(err, code, "occupancy");
  sweep.blocks = std::max(1, blocks) * processors_ / shape.cluster * shape.cluster;
  // Few rows: the pieces of a row on many SMs, as long as the partials take little of the workspace.
  if (sweep.pieces > 1) {
    const int64_t row_bytes = int64_t{sweep.pieces} * partial_words_ * static_cast<int64_t>(sizeof(float));
    const int64_t few = int64_t{processors_} * (sweep.gradient ? kFewBoth : kFewForward);
    sweep.split_rows = std::min({few, kSplitBytes / row_bytes, options_.max_rows});
  }
  return XENT_OK;
}

// Everything that forward writes, with `what` of the sums over rows; with `sweep` being both_, where it does not split,
// the gradient too.
xent_status Plan::run(const Sweep &sweep, const Params &params, int what, bool follows, void *stream,
                      xent_error *err) const {
  const int64_t size = static_cast<int64_t>(element_size(options_.logits_dtype));
  const Layout layout = layout_of(params, size);
  const void *const held = sweep.held[static_cast<int>(layout)], *const parts = sweep.parts[static_cast<int>(layout)];
  xent_status status = XENT_OK;
  if (sweep.splits(params.rows, layout)) {
    Params p = params;
    int serial = sweep.serial;
    void *args[] = {&p, &serial};
    if (parts != nullptr) {
      status = launch(parts, p.rows * sweep.pieces, 32, 0, false, args, stream, "parts kernel", err);
    } else {
      status = launch(sweep.split, ceil_div(p.rows * sweep.pieces, kSplitWarps), kSplitWarps * 32, sweep.split_shared,
                      false, args, stream, "split kernel", err);
    }
    if (status != XENT_OK) return status;
    const int combine_warps = sweep.pieces == sweep.shape.warps ? 1 : std::min(sweep.shape.warps, kCombineWarps);
    status = launch(sweep.combine, p.rows, combine_warps * 32, 0, overlaps_, args, stream, "combine kernel", err);
  } else if (params.rows > 0) {
    status = run_rows(sweep, held, params, follows, stream, err);
  }
  return status == XENT_OK && what != 0 ? reduce(params, what, params.rows > 0, stream, err) : status;
}

// `held`: of the layout's kernel, or nothing where the stream is for all.
xent_status Plan::run_rows(const Sweep &sweep, const void *held, const Params &params, bool follows, void *stream,
                           xent_error *err) const {
  Params p = params;
  void *args[] = {&p};
  const int warps = sweep.shape.warps;
  if (sweep.shape.path == Path::team) return run_teams(held, p, follows, stream, err);
  if (sweep.shape.path == Path::block) {
    return launch(held, p.rows, warps * 32, sweep.held_shared, follows, args, stream, "block kernel", err);
  }
  if (held != nullptr) {
    constexpr int most = kRowThreads / 32;
    const int row_block =
        row_warps(ceil_div(p.classes, lanes_), sweep.pieces, p.rows, int64_t{processors_} * most, most);
    return launch(held, p.rows, row_block * 32, sweep.held_shared, follows, args, stream, "row kernel", err);
  }
  const int cluster = sweep.shape.cluster;
  const int64_t blocks = sweep.gradient ? std::min<int64_t>(p.rows * cluster, sweep.blocks)
                                        : forward_blocks(p.rows, p.classes * (16 / lanes_), sweep.blocks);
  return launch(sweep.rows, blocks, warps / cluster * 32, sweep.shared, follows, args, stream, "rows kernel", err,
                cluster);
}

// Teams of lanes on short rows.
xent_status Plan::run_teams(const void *kernel, Params &p, bool follows, void *stream, xent_error *err) const {
  const int64_t resident = int64_t{processors_} * kTeamBlocks * (kTeamThreads / 32);
  p.geometry.rows = team_rows(p.rows, p.geometry.span, resident);
  void *args[] = {&p};
  return launch(kernel, ceil_div(p.rows, int64_t{kTeamThreads / 32} * p.geometry.rows), kTeamThreads, 0, follows, args,
                stream, "team kernel", err);
}

}  // namespace xent::cuda
