// SPDX-FileCopyrightText: the libxent authors
// SPDX-License-Identifier: Apache-2.0

#include "harness.hpp"

#include <algorithm>
#include <atomic>
#include <cstdio>
#include <cstdlib>
#include <functional>

namespace xent_test {
namespace {

std::vector<int64_t> with_vocab(const Problem &p) {
  std::vector<int64_t> shape = p.shape;
  shape.push_back(p.vocab);
  return shape;
}

std::vector<int64_t> scalar_shape(const Problem &p) {
  return p.scalar_as_one_element ? std::vector<int64_t>{1} : std::vector<int64_t>{};
}

Problem without_values(const Problem &p) {
  Problem q = p;
  q.logits.clear();
  q.targets.clear();
  return q;
}

}  // namespace

int64_t partial_width(const Problem &p) {
  return 3 + (p.label_smoothing != 0 ? 1 : 0) + (p.entropy ? 1 : 0) + (p.predicted ? 1 : 0);
}

uint64_t seed() {
  static const uint64_t value = [] {
    const char *text = std::getenv("XENT_TEST_SEED");
    return text != nullptr ? std::strtoull(text, nullptr, 0) : uint64_t{std::random_device{}()};
  }();
  return value;
}

Rng test_rng() {
  const auto *info = ::testing::UnitTest::GetInstance()->current_test_info();
  // The name without its instance: CPU and CUDA draw the same problems.
  std::string name = info != nullptr ? std::string(info->test_suite_name()) + "." + info->name() : "";
  name = name.substr(name.find('/') == std::string::npos ? 0 : name.find('/') + 1);
  uint64_t hash = 14695981039346656037ull;
  for (const char c : name) hash = (hash ^ static_cast<uint8_t>(c)) * 1099511628211ull;
  static const bool printed = std::printf("XENT_TEST_SEED=%llu\n", static_cast<unsigned long long>(seed())) > 0;
  static_cast<void>(printed);
  return Rng(seed() ^ hash);
}

int64_t pick(Rng &rng, int64_t low, int64_t high) { return std::uniform_int_distribution<int64_t>(low, high)(rng); }

bool operator==(const Result &a, const Result &b) {
  return a.loss == b.loss && a.stats == b.stats && a.divisor == b.divisor && a.lse == b.lse && a.entropy == b.entropy &&
         a.predicted == b.predicted && a.counts == b.counts && a.grad == b.grad;
}

int64_t Problem::rows() const {
  int64_t n = 1;
  for (const int64_t d : shape) n *= d;
  return n;
}

void Problem::quantize() {
  for (double &v : logits) v = round_to(dtype, v);
  for (double &v : weights) v = round_to(acc(), v);
  for (const auto &values : {&mask, &denominator, &upstream}) {
    if (!*values || !is_float((*values)->dtype)) continue;
    for (double &v : (*values)->v) v = round_to((*values)->dtype, v);
  }
}

std::string Problem::describe() const {
  std::string s = "seed " + std::to_string(seed()) + ", " + name_of(backend) + " " + name_of(dtype) + " [";
  for (const int64_t d : shape) s += std::to_string(d) + ", ";
  s += std::to_string(vocab) + "] classes " + std::to_string(real_classes()) + ", targets " + name_of(target_dtype) +
       ", grad " + name_of(grad_dtype) + ", reduction " + std::to_string(reduction);
  const auto real = [&](const char *name, double v) {
    char text[64];
    std::snprintf(text, sizeof(text), ", %s %.9g", name, v);
    if (v != 0) s += text;
  };
  real("label_smoothing", label_smoothing);
  real("z_loss", z_loss);
  real("softcap", softcap);
  real("logit_scale", logit_scale);
  if (ignore_index) s += ", ignore_index " + std::to_string(*ignore_index);
  if (mask) s += std::string(", mask ") + name_of(mask->dtype);
  if (!weights.empty()) s += ", weights";
  if (denominator) {
    s += std::string(", denominator ") + name_of(denominator->dtype);
    real("of", denominator->v[0]);
  }
  if (upstream) {
    s += std::string(", grad_loss ") + name_of(upstream->dtype) + (per_row_upstream ? " a row" : "");
    real("first", upstream->v.empty() ? 0 : upstream->v[0]);
  }
  if (empty_mean_is_nan) s += ", EMPTY_MEAN_IS_NAN";
  if (!split.empty()) {
    s += ", ranks at (";
    for (const int64_t d : split.offsets) s += std::to_string(d) + " ";
    s += ") padded by (";
    for (const int64_t d : split.padding) s += std::to_string(d) + " ";
    s += ")";
  }
  if (overwrite) s += ", overwrite";
  if (interleave != 0) s += ", interleaved";
  if (threads != 0) s += ", threads " + std::to_string(threads);
  const auto layout = [&](const char *name, const Layout &l) {
    if (l.strides.empty() && l.misalign == 0 && l.byte_offset == 0 && l.guard == Guard::kCanary) return;
    s += std::string(", ") + name + " strides (";
    for (const int64_t d : l.strides) s += std::to_string(d) + " ";
    s += ") misaligned " + std::to_string(l.misalign) + " byte_offset " + std::to_string(l.byte_offset);
    if (l.guard != Guard::kCanary) s += l.guard == Guard::kPageEnd ? " page end" : " page start";
  };
  layout("logits", logits_layout);
  layout("gradient", grad_layout);
  layout("targets", targets_layout);
  layout("row outputs", row_output_layout);
  layout("grad_loss", upstream_layout);
  layout("stats", stats_layout);
  layout("row counts", counts_layout);
  if (partial_pitch != 1) s += ", partials pitched by " + std::to_string(partial_pitch);
  return s;
}

std::shared_ptr<xent_plan> make_plan(const Problem &p, xent_error *err) {
  std::string why;
  Device *device = device_for(p.backend, &why);
  xent_plan_desc desc = {};
  desc.struct_size = sizeof(desc);
  desc.device = device->dl();
  desc.logits_dtype = p.dtype;
  desc.target_dtype = p.target_dtype;
  desc.max_rows = p.rows() + p.spare_rows;
  desc.vocab = p.vocab;
  desc.classes = p.classes;
  desc.ignore_index = p.ignore_index.value_or(0);
  desc.flags = (p.ignore_index ? unsigned{XENT_PLAN_IGNORE_INDEX} : 0u) |
               (p.overwrite ? unsigned{XENT_PLAN_OVERWRITE_LOGITS} : 0u) |
               (p.empty_mean_is_nan ? unsigned{XENT_PLAN_EMPTY_MEAN_IS_NAN} : 0u) |
               (p.entropy ? unsigned{XENT_PLAN_ENTROPY} : 0u) | (p.predicted ? unsigned{XENT_PLAN_PREDICTED} : 0u);
  desc.reduction = p.reduction;
  desc.label_smoothing = p.label_smoothing;
  desc.z_loss = p.z_loss;
  desc.softcap = p.softcap;
  desc.logit_scale = p.logit_scale;
  if (!p.class_offsets.empty()) {
    desc.class_offsets = p.class_offsets.data();
    desc.rank = p.rank;
    desc.ranks = static_cast<int32_t>(p.class_offsets.size()) - 1;
    desc.comm = p.comm;
  }
  xent_plan *plan = nullptr;
  if (xent_plan_create(context_with(p.threads), &desc, &plan, err) != XENT_OK) return nullptr;
  return {plan, xent_plan_destroy};
}

Session::Session(const Problem &p, Device *device, std::shared_ptr<xent_plan> plan, void *stream)
    : device_(device), stream_(stream), plan_(std::move(plan)), shape_(without_values(p)) {
  xent_error err = {};
  err.struct_size = sizeof(err);
  if (!plan_) plan_ = make_plan(p, &err);
  if (!plan_) {
    ADD_FAILURE() << "xent_plan_create: " << err.message << "\n" << p.describe();
    return;
  }
  const DLDataType acc = p.acc();
  const int64_t rows = p.rows();
  if (p.interleave > 0) {
    // One row of the shared storage: the logits, then the gradient, each in half of it.
    const int64_t bytes = p.interleave * size_of(p.dtype);
    auto shared = std::make_shared<Memory>(device_, rows * bytes, p.logits_layout.misalign, Guard::kCanary);
    std::vector<int64_t> strides = packed_strides(with_vocab(p));
    for (size_t d = 0; d + 1 < strides.size(); ++d) strides[d] = strides[d] / p.vocab * p.interleave;
    logits_ = Tensor(shared, p.dtype, with_vocab(p), strides, 0);
    grad_ = Tensor(shared, p.dtype, with_vocab(p), strides, p.interleave / 2 * size_of(p.dtype));
  } else {
    logits_ = Tensor(device_, p.dtype, with_vocab(p), p.logits_layout);
    if (p.overwrite) {
      std::vector<int64_t> strides =
          p.logits_layout.strides.empty() ? packed_strides(with_vocab(p)) : p.logits_layout.strides;
      const int64_t origin =
          static_cast<const uint8_t *>(logits_.dl()->data) + logits_.dl()->byte_offset - logits_.memory().address();
      grad_ = Tensor(logits_.shared(), p.dtype, with_vocab(p), strides, origin);
    } else {
      grad_ = Tensor(device_, p.grad_dtype, with_vocab(p), p.grad_layout);
    }
  }
  targets_ = Tensor(device_, p.target_dtype, p.shape, p.targets_layout);
  if (p.mask) mask_ = Tensor(device_, p.mask->dtype, p.shape, p.mask_layout);
  if (!p.weights.empty()) weights_ = Tensor(device_, acc, p.shape, p.weights_layout);
  const std::vector<int64_t> scalar = scalar_shape(p);
  if (p.denominator) denominator_ = Tensor(device_, p.denominator->dtype, scalar, {});
  if (p.upstream) {
    upstream_ = Tensor(device_, p.upstream->dtype, p.per_row_upstream ? p.shape : scalar, p.upstream_layout);
  }
  loss_ = p.reduction == XENT_REDUCTION_NONE ? Tensor(device_, acc, p.shape, p.row_output_layout)
                                             : Tensor(device_, acc, scalar, {});
  stats_ = Tensor(device_, acc, {rows, 2}, p.stats_layout);
  if (p.divides()) divisor_ = Tensor(device_, acc, scalar, {});
  if (p.lse) lse_ = Tensor(device_, acc, p.shape, p.row_output_layout);
  if (p.entropy) entropy_ = Tensor(device_, acc, p.shape, p.row_output_layout);
  if (p.predicted) predicted_ = Tensor(device_, p.predicted_dtype, p.shape, p.row_output_layout);
  if (p.row_counts) counts_ = Tensor(device_, p.counts_dtype, {3}, p.counts_layout);
  for (Tensor *t : outputs()) t->allow_writes();

  xent_plan_info info = {};
  info.struct_size = sizeof(info);
  EXPECT_EQ(xent_plan_get_info(plan_.get(), &info, &err), XENT_OK) << err.message;
  size_t bytes = info.forward_workspace_bytes;
  if (info.backward_workspace_bytes > bytes) bytes = info.backward_workspace_bytes;
  if (info.loss_and_grad_workspace_bytes > bytes) bytes = info.loss_and_grad_workspace_bytes;
  // Exactly the alignment that was asked for, not more.
  const int64_t misalign = info.alignment > 0 && info.alignment < 256 ? static_cast<int64_t>(info.alignment) : 0;
  workspace_ = std::make_unique<Memory>(device_, static_cast<int64_t>(bytes), misalign, Guard::kCanary);
  // NaN, or in every other session zeros: what is read there without having been written may pass where it is NaN.
  static std::atomic<unsigned> sessions{0};
  if (sessions.fetch_add(1) % 2 == 0) std::fill_n(workspace_->image(), bytes, uint8_t{0});
  if (bytes > 0) workspace_->allow_writes(0, static_cast<int64_t>(bytes));
  upload(p);
}

std::vector<Tensor *> Session::inputs() {
  std::vector<Tensor *> found;
  for (Tensor *t : {&logits_, &targets_, &mask_, &weights_, &denominator_, &upstream_}) {
    if (t->present()) found.push_back(t);
  }
  return found;
}

std::vector<Tensor *> Session::outputs() {
  std::vector<Tensor *> found;
  for (Tensor *t : {&loss_, &stats_, &divisor_, &lse_, &entropy_, &predicted_, &counts_, &grad_}) {
    if (t->present()) found.push_back(t);
  }
  return found;
}

void Session::upload(const Problem &p) {
  for (Tensor *t : outputs()) t->poison();
  logits_.fill(p.logits);
  targets_.fill(p.targets);
  if (p.mask) mask_.fill(p.mask->v);
  if (!p.weights.empty()) weights_.fill(p.weights);
  if (p.denominator) denominator_.fill(p.denominator->v);
  if (p.upstream) upstream_.fill(p.upstream->v);
  for (Tensor *t : inputs()) t->memory().upload();
  for (Tensor *t : outputs()) t->memory().upload();
  workspace_->upload();
}

void Session::share_partials(std::shared_ptr<Memory> partials, int32_t ranks) {
  const int64_t rows = shape_.rows(), width = partial_width(shape_), pitch = shape_.partial_pitch;
  const int64_t row = width * pitch, rank = rows * row;
  partial_ = Tensor(partials, shape_.acc(), {rows, width}, {row, pitch}, shape_.rank * rank * size_of(shape_.acc()));
  partials_ = Tensor(partials, shape_.acc(), {ranks, rows, width}, {rank, row, pitch}, 0);
}

xent_status Session::enqueue_partial(xent_error *err) {
  const xent_forward_args f = forward_args();
  xent_partial_args a = {};
  a.struct_size = sizeof(a);
  a.stream = f.stream;
  a.workspace = f.workspace;
  a.workspace_bytes = f.workspace_bytes;
  a.logits = f.logits;
  a.targets = f.targets;
  a.mask = f.mask;
  a.partial = partial_.dl();
  return xent_forward_partial(plan_.get(), &a, err);
}

xent_status Session::enqueue_combine(xent_error *err) {
  xent_forward_args f = forward_args();
  f.logits = nullptr;
  xent_combine_args a = {};
  a.struct_size = sizeof(a);
  a.forward = &f;
  a.partials = partials_.dl();
  return xent_forward_combine(plan_.get(), &a, err);
}

xent_forward_args Session::forward_args() const {
  xent_forward_args f = {};
  f.struct_size = sizeof(f);
  f.stream = stream_;
  f.workspace = workspace_->address();
  f.workspace_bytes = static_cast<size_t>(workspace_->bytes());
  f.logits = logits_.dl();
  f.targets = targets_.dl();
  f.mask = mask_.dl();
  f.row_weights = weights_.dl();
  f.denominator = denominator_.dl();
  f.loss = loss_.dl();
  f.stats = stats_.dl();
  f.divisor = divisor_.dl();
  f.lse = lse_.dl();
  f.entropy = entropy_.dl();
  f.predicted = predicted_.dl();
  f.row_counts = counts_.dl();
  return f;
}

xent_status Session::enqueue(Mode mode, xent_error *err) {
  const xent_forward_args f = forward_args();
  if (mode == Mode::kLossAndGrad) {
    xent_loss_and_grad_args a = {};
    a.struct_size = sizeof(a);
    a.forward = &f;
    a.grad_loss = upstream_.dl();
    a.grad_logits = grad_.dl();
    return xent_loss_and_grad(plan_.get(), &a, err);
  }
  const xent_status status = xent_forward(plan_.get(), &f, err);
  if (status != XENT_OK || mode == Mode::kForward) return status;
  return enqueue_backward(err);
}

xent_status Session::enqueue_backward(xent_error *err) {
  const xent_forward_args f = forward_args();
  xent_backward_args b = {};
  b.struct_size = sizeof(b);
  b.stream = stream_;
  b.workspace = f.workspace;
  b.workspace_bytes = f.workspace_bytes;
  b.logits = f.logits;
  b.targets = f.targets;
  b.mask = f.mask;
  b.row_weights = f.row_weights;
  b.stats = f.stats;
  b.divisor = f.divisor;
  b.grad_loss = upstream_.dl();
  b.grad_logits = grad_.dl();
  return xent_backward(plan_.get(), &b, err);
}

Result Session::collect() {
  for (Tensor *t : inputs()) EXPECT_EQ(t->memory().download(), "") << "an input was written";
  for (Tensor *t : outputs()) EXPECT_EQ(t->memory().download(), "") << "a write outside of an output";
  EXPECT_EQ(workspace_->download(), "") << "a write outside of the workspace";
  const auto bits = [](const Tensor &t) { return t.present() ? t.bits() : std::vector<uint64_t>(); };
  return {bits(loss_),    bits(stats_),     bits(divisor_), bits(lse_),
          bits(entropy_), bits(predicted_), bits(counts_),  bits(grad_)};
}

std::optional<Result> run(const Problem &p, Mode mode) {
  std::string why;
  Device *device = device_for(p.backend, &why);
  Session session(p, device);
  if (!session.plan()) return std::nullopt;
  xent_error err = {};
  err.struct_size = sizeof(err);
  const xent_status status = session.enqueue(mode, &err);
  device->synchronize();
  if (status != XENT_OK) {
    ADD_FAILURE() << xent_status_name(status) << ": " << err.message << "\n" << p.describe();
    return std::nullopt;
  }
  return session.collect();
}

void verify(const Problem &p, Worst *worst) {
  SCOPED_TRACE(p.describe());
  const std::optional<Result> two = run(p, Mode::kForwardBackward), one = run(p, Mode::kLossAndGrad);
  if (two && one) check(p, {{Mode::kForwardBackward, &*two}, {Mode::kLossAndGrad, &*one}}, worst);
}

void BackendTest::SetUp() {
  std::string why;
  device_ = device_for(GetParam(), &why);
  rng_ = test_rng();
  if (device_ != nullptr) return;
  ASSERT_EQ(std::getenv("XENT_TEST_REQUIRE_CUDA"), nullptr) << "XENT_TEST_REQUIRE_CUDA is set: " << why;
  GTEST_SKIP() << why;
}

}  // namespace xent_test
