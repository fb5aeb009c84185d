// SPDX-FileCopyrightText: the libxent authors
// SPDX-License-Identifier: Apache-2.0

// A softmax cross-entropy problem of any type, layout and option; its run through the C API on a backend; the
// comparison with the reference at the bars.
#pragma once

#include <gtest/gtest.h>
#include <xent/xent.h>

#include <cstdint>
#include <memory>
#include <optional>
#include <random>
#include <string>
#include <vector>

#include "device.hpp"
#include "formats.hpp"
#include "reference.hpp"
#include "tensor.hpp"

namespace xent_test {

using Rng = std::mt19937_64;

// XENT_TEST_SEED, or a fresh one; printed once.
uint64_t seed();
// A generator of its own for the running test, so that a filter does not change what a test draws.
Rng test_rng();
int64_t pick(Rng &rng, int64_t low, int64_t high);  // both included
template <class T>
T choose(Rng &rng, const std::vector<T> &from) {
  return from[static_cast<size_t>(pick(rng, 0, static_cast<int64_t>(from.size()) - 1))];
}

// A per-row or scalar argument.
struct Values {
  DLDataType dtype = kF32;
  std::vector<double> v;
};

// A vocabulary split over ranks, see ranks.hpp. Empty: not split.
struct Split {
  std::vector<int64_t> offsets;  // [ranks + 1]
  std::vector<int64_t> padding;  // [ranks], columns beyond each shard's real ones
  uint64_t layouts = 0;          // seed of the shards' own layouts; 0: packed
  bool empty() const { return padding.empty(); }
};

struct Problem {
  Backend backend = Backend::kCpu;
  DLDataType dtype = kF32;  // of the logits
  DLDataType target_dtype = kI64;
  DLDataType grad_dtype = kF32;
  std::vector<int64_t> shape;  // leading
  int64_t vocab = 1;
  int64_t classes = 0;  // 0: vocab
  std::optional<int64_t> ignore_index;
  int32_t reduction = XENT_REDUCTION_MEAN;
  bool empty_mean_is_nan = false;
  double label_smoothing = 0, z_loss = 0, softcap = 0, logit_scale = 0;  // as in xent_plan_desc
  bool entropy = false, predicted = false, lse = true, row_counts = true;
  DLDataType predicted_dtype = kI64, counts_dtype = kI64;
  int64_t spare_rows = 0;  // max_rows beyond the rows
  int32_t threads = 0;
  bool scalar_as_one_element = false;  // [] given as shape [1]

  // Row-major. Logits hold values of the type exactly: see quantize().
  std::vector<double> logits;
  std::vector<int64_t> targets;
  std::optional<Values> mask;
  std::vector<double> weights;  // empty: none
  std::optional<Values> denominator;
  std::optional<Values> upstream;  // grad_loss: one value, or one a row
  bool per_row_upstream = false;

  Layout logits_layout, grad_layout, targets_layout, mask_layout, weights_layout, row_output_layout, upstream_layout;
  Layout stats_layout, counts_layout;
  int64_t partial_pitch = 1;  // elements from one number of a partial to the next
  bool overwrite = false;     // gradient in the logits' storage
  // The whole of a split problem: to be cut into shards. Its vocab is its classes.
  Split split;
  // One shard: what its plan is told.
  std::vector<int64_t> class_offsets;
  int32_t rank = 0;
  xent_comm *comm = nullptr;

  int64_t interleave = 0;  // > 0: logits and gradient share rows of this many elements, side by side

  int64_t rows() const;
  // Of a whole problem.
  int64_t real_classes() const { return classes == 0 ? vocab : classes; }
  DLDataType acc() const { return dtype == kF64 ? kF64 : kF32; }
  bool divides() const { return reduction != XENT_REDUCTION_NONE && (reduction == XENT_REDUCTION_MEAN || denominator); }
  void quantize();  // rounds every value to the type it is stored in
  std::string describe() const;
};

// Bits of every output, row-major.
struct Result {
  std::vector<uint64_t> loss, stats, divisor, lse, entropy, predicted, counts, grad;
};
int64_t partial_width(const Problem &p);
bool operator==(const Result &a, const Result &b);

enum class Mode { kForward, kForwardBackward, kLossAndGrad };

// Every tensor of a problem on its device, guarded, and a plan for it.
class Session {
 public:
  Session(const Problem &problem, Device *device, std::shared_ptr<xent_plan> plan = nullptr, void *stream = nullptr);

  // The contents of `problem`, of the same shapes, types and options, to the device; outputs poisoned.
  void upload(const Problem &problem);
  xent_status enqueue(Mode mode, xent_error *err);
  // A shard's calls one by one, with partials [ranks, rows, width] that all ranks share.
  void share_partials(std::shared_ptr<Memory> partials, int32_t ranks);
  xent_status enqueue_partial(xent_error *err);
  xent_status enqueue_combine(xent_error *err);
  xent_status enqueue_backward(xent_error *err);
  // Fetches the outputs; a write outside of them, or to an input, is a test failure.
  Result collect();

  void retype_mask(DLDataType dtype) { mask_.mutable_dl()->dtype = dtype; }
  void omit_stats() { stats_ = Tensor(); }
  const std::shared_ptr<xent_plan> &plan() const { return plan_; }

 private:
  xent_forward_args forward_args() const;
  std::vector<Tensor *> inputs();
  std::vector<Tensor *> outputs();

  Device *device_;
  void *stream_;
  std::shared_ptr<xent_plan> plan_;
  Problem shape_;  // without values
  Tensor partial_, partials_;
  Tensor logits_, targets_, mask_, weights_, denominator_, upstream_;
  Tensor loss_, stats_, divisor_, lse_, entropy_, predicted_, counts_, grad_;
  std::unique_ptr<Memory> workspace_;
};

std::shared_ptr<xent_plan> make_plan(const Problem &problem, xent_error *err);

// Runs the problem; a failing call is a test failure and gives nothing.
std::optional<Result> run(const Problem &problem, Mode mode);

// The worst error in units of its bar.
struct Worst {
  double loss = 0, lse = 0, entropy = 0, grad = 0;
};
struct Outcome {
  Mode mode;
  const Result *result;
};
// Compares with the reference; true when all is within the bars.
bool check(const Problem &problem, const std::vector<Outcome> &outcomes, Worst *worst = nullptr);
bool check(const Problem &problem, const Result &result, Mode mode, Worst *worst = nullptr);

// Both modes, each compared with the reference.
void verify(const Problem &problem, Worst *worst = nullptr);

class BackendTest : public ::testing::TestWithParam<Backend> {
 protected:
  void SetUp() override;
  Backend backend() const { return GetParam(); }
  bool cuda() const { return GetParam() == Backend::kCuda; }
  Device *device_ = nullptr;
  Rng rng_;
};

#define XENT_BACKENDS(Suite)                                                           \
  INSTANTIATE_TEST_SUITE_P(Cpu, Suite, ::testing::Values(::xent_test::Backend::kCpu)); \
  INSTANTIATE_TEST_SUITE_P(Cuda, Suite, ::testing::Values(::xent_test::Backend::kCuda))

}  // namespace xent_test
