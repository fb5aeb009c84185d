// SPDX-FileCopyrightText: the libxent authors
// SPDX-License-Identifier: Apache-2.0

#include "plan.hpp"

#include <algorithm>

#include "arguments.hpp"
#include "common/dtype.hpp"
#include "device.cuh"
#include "kernel_table.cuh"
#include "launch.hpp"
#include "ranks.hpp"
#include "reduce.cuh"
#include "scale.hpp"

namespace xent::cuda {
namespace {

constexpr size_t kAlignment = 256;
static_assert(kTeamVectors == 32 * kTeamHeld);

size_t aligned(size_t bytes) { return (bytes + kAlignment - 1) / kAlignment * kAlignment; }

struct FeatureSet {
  unsigned features;
  int words;
};

constexpr FeatureSet kSets[kFeatureSets] = {{kPlain, kPartialWords<kPlain>},
                                            {kSum, kPartialWords<kSum>},
                                            {kAll, kPartialWords<kAll>},
                                            {kSoftcap, kPartialWords<kSoftcap>},
                                            {kSoftcap | kAll, kPartialWords<kSoftcap | kAll>}};

int feature_set_of(const xent_options &o) {
  const unsigned needed = (o.label_smoothing != 0.0 ? kSum : 0u) | (o.entropy ? kEntropy : 0u) |
                          (o.predicted ? kArgmax : 0u) | (o.softcap != 0.0 ? kSoftcap : 0u);
  int set = 0;
  while ((kSets[set].features & needed) != needed || ((kSets[set].features ^ needed) & kSoftcap) != 0) ++set;
  return set;
}

// The sums over rows that forward makes.
int sums_of_forward(const Params &p) {
  int what = p.row_counts.data != nullptr ? kReduceCounts : 0;
  if (p.reduction != XENT_REDUCTION_NONE) what |= kReduceLoss | kReduceDivisor;
  if (p.reduction == XENT_REDUCTION_MEAN && p.denominator.data == nullptr) what |= kReduceWeights;
  return what;
}

}  // namespace

xent_status Plan::create(const Driver &driver, const xent_options &options, Plan **out, xent_plan_info *info,
                         xent_error *err) {
  Plan *plan = new Plan(driver, options);
  plan->constants_ = constants_of(options);
  const xent_status status = plan->load(err);
  if (status != XENT_OK) {
    delete plan;
    return status;
  }
  info->forward_workspace_bytes = plan->forward_.space.bytes;
  info->backward_workspace_bytes = 0;
  info->loss_and_grad_workspace_bytes = plan->both_.space.bytes;
  info->saved_bytes = static_cast<size_t>(options.max_rows) * 2 * sizeof(float) +
                      (options.reduction == XENT_REDUCTION_NONE ? 0 : sizeof(float));
  info->alignment = kAlignment;
  info->capabilities = XENT_CAP_GRAPH_CAPTURE | XENT_CAP_ONE_PASS;
  *out = plan;
  return XENT_OK;
}

Plan::~Plan() {
  if (context_ != nullptr) driver_.primary_release(options_.device.device_id);
}

xent_status Plan::load(xent_error *err) {
  CUcontext context = nullptr;
  const CUresult retained = driver_.primary_retain(&context, options_.device.device_id);
  if (retained != CUDA_SUCCESS) {
    return fail_native(err, XENT_DEVICE_ERROR, static_cast<int32_t>(retained),
                       "cuda: no context on device %d (CUresult %d)", options_.device.device_id,
                       static_cast<int>(retained));
  }
  context_ = context;
  const CurrentContext current(driver_, context);
  xent_status status = current.check(err);
  if (status != XENT_OK) return status;
  cudaError_t code = cudaDeviceGetAttribute(&processors_, cudaDevAttrMultiProcessorCount, options_.device.device_id);
  int major = 0, most_shared = 0;
  if (code == cudaSuccess) {
    code = cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, options_.device.device_id);
  }
  if (code == cudaSuccess) {
    code = cudaDeviceGetAttribute(&most_shared, cudaDevAttrMaxSharedMemoryPerBlockOptin, options_.device.device_id);
  }
  if (code != cudaSuccess) return device_error(err, code, "device attributes");
  // A kernel compiled for less does not wait for the launch before it.
  cudaFuncAttributes attributes = {};
  code = cudaFuncGetAttributes(&attributes, address(reduce_rows_kernel));
  if (code != cudaSuccess) return device_error(err, code, "loading a kernel");
  overlaps_ = major >= 9 && attributes.binaryVersion >= 90;

  const DLDataType &type = options_.logits_dtype;
  kernels_ = is_f32(type) ? &kKernelsF32 : is_f16(type) ? &kKernelsF16 : &kKernelsBf16;
  feature_set_ = feature_set_of(options_);
  partial_words_ = kSets[feature_set_].words;
  lanes_ = static_cast<int>(16 / element_size(type));
  const int64_t vectors = ceil_div(options_.columns, lanes_);
  forward_.shape = forward_shape(vectors, kForwardBatch * 32);
  // 12 KiB remain for what the warps share beside their stages.
  const int most_warps = (most_shared - 12 * 1024) / kRingBytes<kBatch>;
  both_.shape = both_shape(vectors, kBatch * 32, kUnit, most_warps, most_shared - kBlockShared, overlaps_);
  // A kernel that was never asked for is loaded at its first launch, which a stream capture would refuse.
  const int capped = options_.softcap != 0.0 ? 1 : 0;
  both_.gradient = true;
  status = prepare(forward_, kernels_->forward, err);
  if (status == XENT_OK) status = prepare(both_, kernels_->both, err);
  for (const void *kernel :
       {kernels_->backward[capped][0], kernels_->backward[capped][1], address(reduce_rows_kernel),
        address(reduce_chunks_kernel), kRanksKernels[feature_set_], kernels_->team_backward[0][capped],
        kernels_->team_backward[1][capped], kernels_->team_backward[2][capped], kernels_->unit[1][capped],
        kernels_->unit[2][capped], kEmptyKernel, scale_kernel_for(element_of(type)), scale_kernel_for(Element::f32)}) {
    if (status == XENT_OK) status = load_kernel(kernel, 0, err);
  }
  forward_.space = workspace(forward_);
  both_.space = workspace(both_);
  return status;
}

Plan::Workspace Plan::workspace(const Sweep &sweep) const {
  Workspace space;
  const auto reserve = [&](size_t bytes) {
    const size_t at = space.bytes;
    space.bytes += aligned(bytes);
    return at;
  };
  const size_t rows = static_cast<size_t>(options_.max_rows);
  const size_t words = static_cast<size_t>(partial_words_);
  if (options_.reduction != XENT_REDUCTION_NONE) space.row_loss = reserve(rows * sizeof(double));
  space.chunks = reserve(static_cast<size_t>(ceil_div(options_.max_rows, kRowsPerBlock)) * sizeof(RowSums));
  const size_t split_rows = static_cast<size_t>(std::max(sweep.split_rows, sweep.part_rows));
  space.partials = reserve(split_rows * static_cast<size_t>(sweep.pieces) * words * sizeof(float));
  if (sweep.gradient) {
    space.divisor = reserve(sizeof(float));
    space.stats = reserve(split_rows * 2 * sizeof(float));
  }
  return space;
}

Params Plan::params(const xent_problem &problem, const Sweep &sweep) const {
  const Workspace &space = sweep.space;
  Params p = {};
  p.math = constants_;
  p.geometry = geometry_of(sweep.shape);
  p.rows = problem.rows;
  p.classes = options_.columns;
  p.vocab = options_.vocab;
  p.all_classes = options_.classes;
  p.class_begin = options_.class_begin;
  p.entropy_asked = options_.entropy;
  p.predicted_asked = options_.predicted;
  p.ignore_index = options_.ignore_index;
  p.has_ignore_index = options_.has_ignore_index;
  p.reduction = options_.reduction;
  p.empty_mean_is_nan = options_.empty_mean_is_nan;
  describe(problem.logits, &p.logits);
  describe(problem.targets, &p.targets);
  describe(problem.mask, &p.mask);
  describe(problem.row_weights, &p.row_weights);
  describe(problem.denominator, &p.denominator);
  describe(problem.loss, &p.loss);
  describe(problem.stats, &p.stats);
  describe(problem.divisor, &p.divisor);
  describe(problem.lse, &p.lse);
  describe(problem.entropy, &p.entropy);
  describe(problem.predicted, &p.predicted);
  describe(problem.row_counts, &p.row_counts);
  describe(problem.grad_loss, &p.grad_loss);
  describe(problem.grad_logits, &p.grad_logits);
  char *workspace = static_cast<char *>(problem.workspace);
  if (workspace != nullptr) {
    if (options_.reduction != XENT_REDUCTION_NONE) p.row_loss = reinterpret_cast<double *>(workspace + space.row_loss);
    p.chunks = workspace + space.chunks;
    p.partials = reinterpret_cast<float *>(workspace + space.partials);
  }
  return p;
}

xent_status Plan::gradient(const Params &params, bool follows, void *stream, xent_error *err) const {
  Params p = params;
  const int64_t held = ceil_div(options_.columns, lanes_);
  const int capped = options_.softcap != 0.0 ? 1 : 0;
  const int layout = static_cast<int>(layout_of(p, static_cast<int64_t>(element_size(options_.logits_dtype))));
  if (held <= kTeamVectors) {
    p.geometry = geometry_of(team_shape(held));
    return run_teams(kernels_->team_backward[layout][capped], p, follows, stream, err);
  }
  if (const void *const kernel = kernels_->unit[layout][capped]) {
    Divisor units = divisor_of(ceil_div(held, kUnit));
    void *args[] = {&p, &units};
    return launch(kernel, p.rows * units.d, 32, 0, follows, args, stream, "unit kernel", err);
  }
  const bool wide = lanes_ == 8 && p.grad_logits.type == Element::f32;
  const void *kernel = kernels_->backward[capped][wide ? 1 : 0];
  const int64_t vectors = ceil_div(options_.vocab + lanes_ - 1, lanes_);  // a misaligned row begins inside a vector
  const int64_t batches = ceil_div(vectors, kBatch * 32);
  int warps = 1;
  while (warps < kBackwardThreads / 32 && warps * kRepeats < batches) warps *= 2;
  int pieces = static_cast<int>(ceil_div(batches, int64_t{warps} * kRepeats));
  void *args[] = {&p, &pieces, &warps};
  return launch(kernel, ceil_div(p.rows * pieces, kBackwardThreads / 32 / warps), kBackwardThreads, 0, follows, args,
                stream, "backward kernel", err);
}

xent_status Plan::reduce(const Params &params, int what, bool follows, void *stream, xent_error *err) const {
  Params p = params;
  const int64_t most = ceil_div(p.rows, kRowsPerBlock);
  int cluster = 1;
  while (overlaps_ && cluster < kReduceCluster && cluster < most) cluster *= 2;
  int64_t chunks = std::max<int64_t>(1, ceil_div(most, cluster));
  void *args[] = {&p, &what, &cluster};
  const xent_status status = launch(address(reduce_rows_kernel), chunks * cluster, kReduceThreads, 0,
                                    follows && overlaps_, args, stream, "row sums kernel", err, cluster);
  if (status != XENT_OK || chunks == 1) return status;
  void *chunk_args[] = {&p, &what, &chunks};
  return launch(address(reduce_chunks_kernel), 1, kReduceThreads, 0, overlaps_, chunk_args, stream, "chunk sums kernel",
                err);
}

xent_status Plan::forward(const xent_problem &problem, xent_error *err) const {
  const CurrentContext current(driver_, static_cast<CUcontext>(context_));
  const xent_status status = current.check(err);
  if (status != XENT_OK) return status;
  const Params p = params(problem, forward_);
  return run(forward_, p, sums_of_forward(p), false, problem.stream, err);
}

xent_status Plan::partial(const xent_problem &problem, xent_error *err) const {
  if (problem.rows == 0) return XENT_OK;
  const CurrentContext current(driver_, static_cast<CUcontext>(context_));
  const xent_status status = current.check(err);
  if (status != XENT_OK) return status;
  Params p = params(problem, forward_);
  p.partial = tensor_of(problem.partial);
  if (options_.columns > 0) return run(forward_, p, 0, false, problem.stream, err);
  void *args[] = {&p};
  return launch(kEmptyKernel, ceil_div(p.rows, kRanksThreads), kRanksThreads, 0, false, args, problem.stream,
                "empty kernel", err);
}

xent_status Plan::combine(const xent_problem &problem, xent_error *err) const {
  const CurrentContext current(driver_, static_cast<CUcontext>(context_));
  xent_status status = current.check(err);
  if (status != XENT_OK) return status;
  Params p = params(problem, forward_);
  if (p.rows > 0) {
    Shards shards = {};
    shards.count = options_.ranks;
    shards.partials = tensor_of(problem.partial);
    std::copy_n(options_.class_offsets, options_.ranks + 1, shards.offsets);
    void *args[] = {&p, &shards};
    status = launch(kRanksKernels[feature_set_], ceil_div(p.rows, kRanksThreads), kRanksThreads, 0, false, args,
                    problem.stream, "ranks kernel", err);
  }
  const int what = sums_of_forward(p);
  return status == XENT_OK && what != 0 ? reduce(p, what, p.rows > 0, problem.stream, err) : status;
}

xent_status Plan::backward(const xent_problem &problem, xent_error *err) const {
  if (problem.rows == 0 || options_.vocab == 0) return XENT_OK;
  const CurrentContext current(driver_, static_cast<CUcontext>(context_));
  const xent_status status = current.check(err);
  if (status != XENT_OK) return status;
  return gradient(params(problem, {}), false, problem.stream, err);
}

xent_status Plan::loss_and_grad(const xent_problem &problem, xent_error *err) const {
  const CurrentContext current(driver_, static_cast<CUcontext>(context_));
  xent_status status = current.check(err);
  if (status != XENT_OK) return status;
  Params p = params(problem, both_);
  char *workspace = static_cast<char *>(problem.workspace);
  const bool own_divisor = p.reduction == XENT_REDUCTION_MEAN && p.denominator.data == nullptr;
  if (own_divisor) p.own_divisor = reinterpret_cast<float *>(workspace + both_.space.divisor);
  int what = p.row_counts.data != nullptr ? kReduceCounts : 0;
  if (p.reduction != XENT_REDUCTION_NONE) what |= kReduceLoss | kReduceDivisor;
  if (both_.splits(p.rows, layout_of(p, static_cast<int64_t>(element_size(options_.logits_dtype))))) {
    if (p.stats.data == nullptr) {
      p.stats.data = workspace + both_.space.stats;
      p.stats.rank = 1;
      p.stats.stride[0] = 2;
      p.stats.col_stride = 1;
    }
    if (own_divisor) what |= kReduceWeights;
    status = run(both_, p, what, false, problem.stream, err);
    return status == XENT_OK ? gradient(p, overlaps_, problem.stream, err) : status;
  }
  if (own_divisor) {
    what &= ~kReduceDivisor;
    status = reduce(p, kReduceWeights | kReduceDivisor, false, problem.stream, err);
  }
  return status == XENT_OK ? run(both_, p, what, own_divisor && overlaps_, problem.stream, err) : status;
}

xent_status Plan::scale_grad(const xent_problem &problem, xent_error *err) const {
  if (problem.rows == 0 || options_.columns == 0) return XENT_OK;
  const CurrentContext current(driver_, static_cast<CUcontext>(context_));
  const xent_status status = current.check(err);
  if (status != XENT_OK) return status;
  Params p = params(problem, {});
  const int64_t lanes = 16 / static_cast<int64_t>(element_size(problem.grad_logits.dtype));
  const int64_t vectors = ceil_div(options_.columns + lanes - 1, lanes);  // a misaligned row begins inside a vector
  Divisor pieces = divisor_of(ceil_div(vectors, kScalePiece));
  void *args[] = {&p, &pieces};
  const int64_t blocks =
      std::min<int64_t>(int64_t{processors_} * kScaleBlocks, ceil_div(p.rows * pieces.d, kScaleThreads / 32));
  return launch(scale_kernel_for(p.grad_logits.type), blocks, kScaleThreads, 0, false, args, problem.stream,
                "scale kernel", err);
}

}  // namespace xent::cuda
