// SPDX-FileCopyrightText: the libxent authors
// SPDX-License-Identifier: Apache-2.0

#include "conformance.hpp"

#include <gtest/gtest-spi.h>

#include <algorithm>
#include <chrono>
#include <cmath>
#include <exception>

#include "ranks.hpp"

namespace xent_test::conformance {
namespace {

// Thread counts that a problem, or the same problem run again, may ask for.
const std::vector<int32_t> kThreads = {0, 1, 2, 3};

std::string text(double v) {
  char buffer[40];
  std::snprintf(buffer, sizeof(buffer), "%.9g", v);
  return buffer;
}

template <class T>
std::string list(const char *name, const std::vector<T> &values) {
  std::string s = std::string("\n  ") + name + ":";
  for (const T v : values) s += " " + text(static_cast<double>(v));
  return s;
}

void refusal(const Target &target, const xent_error &err, Verdict *verdict) {
  const bool refused = target.may_refuse && err.status == XENT_UNSUPPORTED;
  *verdict = {refused ? Kind::kRefused : Kind::kCall, std::string("xent_plan_create: ") + err.message};
}

bool served(const Target &target, xent_plan *plan, Verdict *verdict) {
  xent_error err = {};
  err.struct_size = sizeof(err);
  xent_plan_info info = {};
  info.struct_size = sizeof(info);
  if (xent_plan_get_info(plan, &info, &err) != XENT_OK) {
    *verdict = {Kind::kCall, std::string("xent_plan_get_info: ") + err.message};
    return false;
  }
  if (target.name == info.backend_name) return true;
  *verdict = {target.may_refuse ? Kind::kRefused : Kind::kCall, std::string("served by ") + info.backend_name};
  return false;
}

std::optional<Result> execute_ranks(const Target &target, const Problem &p, Door door, Mode mode, Verdict *verdict) {
  std::string difference;
  Device *device = device_for(p.backend, &difference);
  Ranks ranks(p, device, door, [&](Problem &shard, int32_t) { draw_shard_layouts(shard, p.split.layouts); });
  if (ranks.refusal() != nullptr) {
    refusal(target, *ranks.refusal(), verdict);
    return std::nullopt;
  }
  if (!served(target, ranks.session(0).plan().get(), verdict)) return std::nullopt;
  xent_error err = {};
  err.struct_size = sizeof(err);
  const xent_status status = ranks.enqueue(mode, &err);
  device->synchronize();
  if (status != XENT_OK) {
    *verdict = {Kind::kCall, std::string(xent_status_name(status)) + ": " + err.message};
    return std::nullopt;
  }
  Result result = ranks.collect(&difference);
  if (difference.empty()) return result;
  *verdict = {Kind::kRanks, difference};
  return std::nullopt;
}

// `again`: where there is another way to the same bits, that one.
std::optional<Result> execute(const Target &target, const Problem &p, Mode mode, Verdict *verdict, bool again = false) {
  if (!p.split.empty()) {
    const bool comm = mode == Mode::kLossAndGrad || (again && p.split.padding.size() > 1);
    return execute_ranks(target, p, comm ? Door::kComm : Door::kPartials, mode, verdict);
  }
  xent_error err = {};
  err.struct_size = sizeof(err);
  const auto plan = make_plan(p, &err);
  if (!plan) {
    refusal(target, err, verdict);
    return std::nullopt;
  }
  if (!served(target, plan.get(), verdict)) return std::nullopt;
  std::string why;
  Device *device = device_for(p.backend, &why);
  Session session(p, device, plan);
  const xent_status status = session.enqueue(mode, &err);
  device->synchronize();
  if (status != XENT_OK) {
    *verdict = {Kind::kCall, std::string(xent_status_name(status)) + ": " + err.message};
    return std::nullopt;
  }
  return session.collect();
}

// The row as a problem of its own, packed. False where its gradient cannot be asked for in the same way.
bool alone(const Problem &p, int64_t r, const Result &batch, Problem *q) {
  const auto i = static_cast<size_t>(r);
  *q = p;
  q->shape = {1};
  q->spare_rows = 0;
  q->interleave = 0;
  q->threads = 0;
  q->split.layouts = 0;
  for (Layout *l : {&q->logits_layout, &q->grad_layout, &q->targets_layout, &q->mask_layout, &q->weights_layout,
                    &q->row_output_layout, &q->upstream_layout}) {
    *l = Layout();
  }
  q->logits.assign(p.logits.begin() + r * p.vocab, p.logits.begin() + (r + 1) * p.vocab);
  q->targets = {p.targets[i]};
  if (p.mask) q->mask->v = {p.mask->v[i]};
  if (!p.weights.empty()) q->weights = {p.weights[i]};
  if (p.per_row_upstream) q->upstream->v = {p.upstream->v[i]};
  if (!p.divides() || p.denominator) return true;
  // What the batch was divided by.
  const double divisor = decode_float(p.acc(), batch.divisor[0]);
  q->denominator = Values{kF32, {divisor}};
  return round_to(kF32, divisor) == divisor;
}

std::string row_difference(const Problem &p, const Result &batch, int64_t r, const Result &one, bool gradient) {
  const auto differs = [&](const std::vector<uint64_t> &x, const std::vector<uint64_t> &y, int64_t width) -> int64_t {
    if (x.empty()) return -1;
    const auto at = std::mismatch(y.begin(), y.end(), x.begin() + r * width);
    return at.first == y.end() ? -1 : at.first - y.begin();
  };
  const std::string row = " of row " + std::to_string(r) + " is not what the row alone gives";
  if (p.reduction == XENT_REDUCTION_NONE && differs(batch.loss, one.loss, 1) >= 0) return "loss" + row;
  if (const int64_t i = differs(batch.stats, one.stats, 2); i >= 0) return (i == 0 ? "kept maximum" : "kept sum") + row;
  if (differs(batch.lse, one.lse, 1) >= 0) return "lse" + row;
  if (differs(batch.entropy, one.entropy, 1) >= 0) return "entropy" + row;
  if (differs(batch.predicted, one.predicted, 1) >= 0) return "predicted" + row;
  const int64_t c = gradient ? differs(batch.grad, one.grad, p.vocab) : -1;
  return c < 0 ? "" : "gradient at column " + std::to_string(c) + row;
}

std::string result_difference(const Result &a, const Result &b) {
  const std::pair<const char *, std::vector<uint64_t> Result::*> members[] = {
      {"loss", &Result::loss},         {"stats", &Result::stats},     {"divisor", &Result::divisor},
      {"lse", &Result::lse},           {"entropy", &Result::entropy}, {"predicted", &Result::predicted},
      {"row_counts", &Result::counts}, {"gradient", &Result::grad}};
  for (const auto &[name, member] : members) {
    const auto at = std::mismatch((a.*member).begin(), (a.*member).end(), (b.*member).begin());
    if (at.first == (a.*member).end()) continue;
    return std::string(name) + " element " + std::to_string(at.first - (a.*member).begin()) +
           " differs in a second run";
  }
  return "";
}

Verdict examine(const Target &target, const Problem &p, uint64_t seed, Worst *worst,
                const ::testing::TestPartResultArray &complaints) {
  Verdict verdict;
  const Mode modes[] = {Mode::kForwardBackward, Mode::kLossAndGrad};
  const char *const names[] = {"forward, backward: ", "loss_and_grad: "};
  std::optional<Result> results[2];
  for (int m = 0; m < 2; ++m) {
    results[m] = execute(target, p, modes[m], &verdict);
    if (!results[m]) return verdict;
  }
  const auto complaint = [&](Kind kind) -> Verdict { return {kind, complaints.GetTestPartResult(0).message()}; };
  if (complaints.size() > 0) return complaint(Kind::kWrite);
  check(p, {{modes[0], &*results[0]}, {modes[1], &*results[1]}}, worst);
  if (complaints.size() > 0) return complaint(Kind::kValue);

  Rng rng(seed ^ 0x5bd1e995);
  Problem again = p;
  if (p.backend == Backend::kCpu) again.threads = choose(rng, kThreads);
  Problem one;
  const int64_t r = p.rows() > 0 ? pick(rng, 0, p.rows() - 1) : -1;
  // loss_and_grad may divide by a sum wider than the divisor that it stores.
  const bool given = !p.divides() || p.denominator;
  const bool with_gradient = r >= 0 && alone(p, r, *results[0], &one);
  for (int m = 0; m < 2; ++m) {
    const auto second = execute(target, again, modes[m], &verdict, true);
    if (!second) return verdict;
    if (complaints.size() > 0) return complaint(Kind::kWrite);
    if (std::string d = result_difference(*results[m], *second); !d.empty()) {
      return {Kind::kRepeat, names[m] + d + " with threads " + std::to_string(again.threads)};
    }
    if (r < 0) continue;
    const auto single = execute(target, one, modes[m], &verdict);
    if (!single) return verdict;
    if (complaints.size() > 0) return complaint(Kind::kWrite);
    if (std::string d = row_difference(p, *results[m], r, *single, with_gradient && (m == 0 || given)); !d.empty()) {
      return {Kind::kAlone, names[m] + d};
    }
  }
  return {};
}

}  // namespace

const char *name_of(Kind kind) {
  static const char *const names[] = {"passed",        "refused",       "a call failed",   "the device failed",
                                      "a wrong write", "a wrong value", "does not repeat", "depends on other rows",
                                      "ranks differ"};
  return names[static_cast<int>(kind)];
}

bool ignored(const Problem &p, size_t row) {
  return (p.mask && p.mask->v[row] == 0) || (p.ignore_index && p.targets[row] == *p.ignore_index);
}

bool well_posed(const Problem &p) {
  for (size_t r = 0; r < p.targets.size(); ++r) {
    if (ignored(p, r)) continue;
    if (!p.weights.empty() && !std::isfinite(p.weights[r])) return false;
    if (p.upstream && !std::isfinite(p.upstream->v[p.per_row_upstream ? r : 0])) return false;
    // A sum of weights that cancels measures the inputs' rounding.
    const bool summed = p.reduction == XENT_REDUCTION_MEAN && !p.denominator;
    if (summed && !p.weights.empty() && p.weights[r] < 0) return false;
  }
  // As does 1 + 2 z_loss lse near 0.
  if (p.z_loss == 0) return true;
  const double scale = p.logit_scale == 0 ? 1 : p.logit_scale;
  for (int64_t r = 0; r < p.rows(); ++r) {
    double top = -kInf, sum = 0;
    const double *x = p.logits.data() + r * p.vocab;
    const auto z = [&](int64_t c) {
      return p.softcap > 0 ? p.softcap * std::tanh(scale * x[c] / p.softcap) : scale * x[c];
    };
    for (int64_t c = 0; c < p.real_classes(); ++c) top = std::max(top, z(c));
    if (!std::isfinite(top)) continue;
    for (int64_t c = 0; c < p.real_classes(); ++c) sum += std::exp(z(c) - top);
    const double term = 2 * p.z_loss * (top + std::log(sum));
    if (std::fabs(1 + term) < 0.5 * std::fabs(term)) return false;
  }
  return true;
}

std::string describe(const Problem &p) {
  std::string s = p.describe();
  s.erase(0, s.find(", ") + 2);  // the seed of the tests
  const auto add = [&](bool has, const char *name) {
    if (has) s += std::string(", ") + name;
  };
  add(p.lse, "lse");
  add(p.entropy, "entropy");
  add(p.predicted, p.predicted_dtype == kI32 ? "predicted int32" : "predicted int64");
  add(p.row_counts, p.counts_dtype == kI32 ? "row_counts int32" : "row_counts int64");
  if (p.spare_rows > 0) s += ", max_rows " + std::to_string(p.rows() + p.spare_rows);
  add(p.scalar_as_one_element, "scalars of shape [1]");
  const auto layout = [&](const char *name, const Layout &l) {
    if (l.strides.empty() && l.misalign == 0 && l.byte_offset == 0) return;
    s += std::string(", ") + name + " strides (";
    for (const int64_t d : l.strides) s += std::to_string(d) + " ";
    s += ") misaligned " + std::to_string(l.misalign) + " byte_offset " + std::to_string(l.byte_offset);
  };
  layout("mask", p.mask_layout);
  layout("row_weights", p.weights_layout);
  if (p.logits.size() > 64) return s;
  s += list("logits", p.logits) + list("targets", p.targets);
  if (p.mask) s += list("mask", p.mask->v);
  if (!p.weights.empty()) s += list("row_weights", p.weights);
  if (p.upstream) s += list("grad_loss", p.upstream->v);
  return s;
}

std::optional<Target> find_target(const std::string &name, const std::string &path, std::string *why) {
  xent_error err = {};
  err.struct_size = sizeof(err);
  Target target;
  target.name = name;
  if (path.empty()) {
    target.device = name == "cuda" ? Backend::kCuda : Backend::kCpu;
  } else {
    for (const int32_t threads : kThreads) {
      xent_context *context = context_with(threads);
      const size_t before = xent_backend_count(context);
      if (xent_backend_load(context, path.c_str(), &err) != XENT_OK) {
        *why = err.message;
        return std::nullopt;
      }
      if (name.empty() && xent_backend_count(context) > before) target.name = xent_backend_name(context, before);
    }
    target.may_refuse = true;
  }
  // Who serves a plan says which memory it takes.
  for (const Backend device : {Backend::kCpu, Backend::kCuda}) {
    if (path.empty() && device != target.device) continue;
    if (device_for(device, why) == nullptr) continue;
    for (const DLDataType &dtype : {kF32, kF16, kBf16, kF64}) {
      Problem p;
      p.backend = device;
      p.dtype = p.grad_dtype = dtype;
      xent_plan_info info = {};
      info.struct_size = sizeof(info);
      const auto plan = make_plan(p, &err);
      if (!plan || xent_plan_get_info(plan.get(), &info, &err) != XENT_OK) continue;
      target.device = device;
      if (target.name == info.backend_name) return target;
    }
  }
  if (why->empty()) *why = "no plan is served by a backend named \"" + target.name + "\"";
  return std::nullopt;
}

Verdict attempt(const Target &target, const Problem &p, uint64_t seed, Worst *worst) {
  ::testing::TestPartResultArray complaints;
  try {
    const ::testing::ScopedFakeTestPartResultReporter reporter(
        ::testing::ScopedFakeTestPartResultReporter::INTERCEPT_ONLY_CURRENT_THREAD, &complaints);
    return examine(target, p, seed, worst, complaints);
  } catch (const std::exception &e) {
    return {Kind::kDevice, e.what()};
  }
}

Report campaign(const Target &target, const Limits &limits, const Listener &listener) {
  using Clock = std::chrono::steady_clock;
  const auto start = Clock::now();
  const auto elapsed = [&] { return std::chrono::duration<double>(Clock::now() - start).count(); };
  Report report;
  std::string again;
  for (const int32_t n : limits.ranks) again += (again.empty() ? " --ranks " : ",") + std::to_string(n);
  double next_progress = 5;
  for (int64_t i = 0; !report.stopped; ++i) {
    if (limits.problems > 0 ? i >= limits.problems : elapsed() >= limits.seconds) break;
    const uint64_t seed = limits.seed + static_cast<uint64_t>(i);
    listener.before(seed);
    const Case c = draw(seed, target.device, limits.ranks);
    TypeCount &type = report.types[name_of(c.problem.dtype)];
    const Verdict verdict = attempt(target, c.problem, seed, &type.worst);
    if (verdict.kind == Kind::kRefused) {
      ++report.refused;
      continue;
    }
    const auto count = [&](Count &n) {
      ++n.drawn;
      n.failed += verdict.failed() ? 1 : 0;
    };
    count(report.all);
    count(type);
    for (const std::string &name : features(c)) count(report.features[name]);
    report.stopped = verdict.kind == Kind::kDevice;
    if (verdict.failed() && static_cast<int>(report.failures.size()) < limits.reported) {
      Shrunk small = {c.problem, verdict, 0};
      if (!report.stopped) small = shrink(target, c.problem, verdict, seed, limits.shrink_seconds);
      listener.failure("FAILED: " + std::string(name_of(verdict.kind)) + "\n" + verdict.what +
                       "\nproblem (again with --seed " + std::to_string(seed) + " --problems 1" + again +
                       "): " + describe(c.problem) + "\nshrunk in " + std::to_string(small.attempts) +
                       " attempts to: " + describe(small.problem) + "\n" + small.verdict.what + "\n");
      report.failures.push_back(std::move(small));
    }
    if (elapsed() >= next_progress) {
      next_progress = elapsed() + 5;
      listener.progress(std::to_string(static_cast<int64_t>(elapsed())) + " s: " + std::to_string(report.all.drawn) +
                        " problems, " + std::to_string(report.all.failed) + " failed");
    }
  }
  report.seconds = elapsed();
  return report;
}

std::string Report::table() const {
  std::string s;
  const auto line = [&](const char *format, auto... values) {
    char buffer[200];
    std::snprintf(buffer, sizeof(buffer), format, values...);
    s += buffer;
  };
  line("%-36s %10s %8s\n", "feature", "problems", "failed");
  for (const auto &[name, n] : features) {
    line("%-36s %10lld %8lld\n", name.c_str(), static_cast<long long>(n.drawn), static_cast<long long>(n.failed));
  }
  line("\n%-10s %10s %8s   worst error / bar: %7s %7s %7s %8s\n", "type", "problems", "failed", "loss", "lse",
       "entropy", "gradient");
  for (const auto &[name, n] : types) {
    line("%-10s %10lld %8lld   %26.3f %7.3f %7.3f %8.3f\n", name.c_str(), static_cast<long long>(n.drawn),
         static_cast<long long>(n.failed), n.worst.loss, n.worst.lse, n.worst.entropy, n.worst.grad);
  }
  line("\n%lld problems in %.0f s, %lld failed, %lld refused by the backend%s\n", static_cast<long long>(all.drawn),
       seconds, static_cast<long long>(all.failed), static_cast<long long>(refused),
       stopped ? "; stopped, the device is lost" : "");
  return s;
}

}  // namespace xent_test::conformance
