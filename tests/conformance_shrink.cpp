// SPDX-FileCopyrightText: the libxent authors
// SPDX-License-Identifier: Apache-2.0

// From a problem that fails to a small one.

#include <algorithm>
#include <chrono>
#include <cmath>

#include "conformance.hpp"

namespace xent_test::conformance {
namespace {

// Of row-major values of `shape`, the part [first, first + count) of dimension d.
template <class T>
std::vector<T> part(const std::vector<T> &values, const std::vector<int64_t> &shape, size_t d, int64_t first,
                    int64_t count) {
  int64_t inner = 1, outer = 1;
  for (size_t i = 0; i < d; ++i) outer *= shape[i];
  for (size_t i = d + 1; i < shape.size(); ++i) inner *= shape[i];
  std::vector<T> kept;
  for (int64_t o = 0; o < outer; ++o) {
    const auto begin = values.begin() + (o * shape[d] + first) * inner;
    kept.insert(kept.end(), begin, begin + count * inner);
  }
  return kept;
}

// Strides stay as they are, so that what depends on them still does.
Problem keep_rows(const Problem &p, size_t d, int64_t first, int64_t count) {
  Problem q = p;
  std::vector<int64_t> matrix = p.shape;
  matrix.push_back(p.vocab);
  q.shape[d] = count;
  q.logits = part(p.logits, matrix, d, first, count);
  q.targets = part(p.targets, p.shape, d, first, count);
  if (p.mask) q.mask->v = part(p.mask->v, p.shape, d, first, count);
  if (!p.weights.empty()) q.weights = part(p.weights, p.shape, d, first, count);
  if (p.per_row_upstream) q.upstream->v = part(p.upstream->v, p.shape, d, first, count);
  return q;
}

std::optional<Problem> keep_columns(const Problem &p, int64_t first, int64_t count) {
  const int64_t classes = std::min(p.real_classes() - first, count);
  if (classes < 1) return std::nullopt;
  Problem q = p;
  std::vector<int64_t> matrix = p.shape;
  matrix.push_back(p.vocab);
  q.vocab = count;
  if (p.classes != 0) q.classes = classes;
  q.logits = part(p.logits, matrix, p.shape.size(), first, count);
  for (int64_t &offset : q.split.offsets) offset = std::clamp<int64_t>(offset - first, 0, count);
  if (p.interleave > 0) q.interleave = std::max(p.interleave - 2 * (p.vocab - count), 2 * count);
  for (int64_t &t : q.targets) {
    if ((p.ignore_index && t == *p.ignore_index) || t < 0 || t >= p.real_classes()) continue;
    t = t >= first && t < first + classes ? t - first : t % classes;
  }
  return q;
}

using Step = std::function<bool(Problem &)>;  // false: changes nothing

template <class T, class V>
Step set(T Problem::*member, V value) {
  return [member, value](Problem &p) {
    if (p.*member == T(value)) return false;
    p.*member = T(value);
    return true;
  };
}

template <class T>
Step drop(std::optional<T> Problem::*member) {
  return [member](Problem &p) {
    const bool had = (p.*member).has_value();
    (p.*member).reset();
    return had;
  };
}

Step pack(Layout Problem::*member) {
  return [member](Problem &p) {
    Layout &l = p.*member;
    if (l.strides.empty() && l.misalign == 0 && l.byte_offset == 0 && l.guard == Guard::kCanary) return false;
    l = Layout();
    return true;
  };
}

std::vector<Step> layout_steps() {
  std::vector<Step> steps = {set(&Problem::interleave, 0), set(&Problem::partial_pitch, 1)};
  for (Layout Problem::*l : {&Problem::logits_layout, &Problem::grad_layout, &Problem::targets_layout,
                             &Problem::mask_layout, &Problem::weights_layout, &Problem::row_output_layout,
                             &Problem::upstream_layout, &Problem::stats_layout, &Problem::counts_layout}) {
    steps.push_back(pack(l));
    steps.push_back([l](Problem &p) {
      const bool had = !(p.*l).strides.empty();
      (p.*l).strides.clear();
      return had;
    });
    steps.push_back([l](Problem &p) {
      const bool had = (p.*l).misalign != 0 || (p.*l).byte_offset != 0 || (p.*l).guard != Guard::kCanary;
      (p.*l).misalign = (p.*l).byte_offset = 0;
      (p.*l).guard = Guard::kCanary;
      return had;
    });
  }
  return steps;
}

std::vector<Step> option_steps() {
  std::vector<Step> steps = {drop(&Problem::mask),
                             drop(&Problem::denominator),
                             [](Problem &p) {
                               const bool had = p.upstream.has_value();
                               p.upstream.reset();
                               p.per_row_upstream = false;
                               p.upstream_layout = Layout();
                               return had;
                             },
                             [](Problem &p) {
                               const bool had = !p.weights.empty();
                               p.weights.clear();
                               return had;
                             },
                             drop(&Problem::ignore_index),
                             set(&Problem::softcap, 0),
                             set(&Problem::label_smoothing, 0),
                             set(&Problem::z_loss, 0),
                             set(&Problem::logit_scale, 0),
                             set(&Problem::empty_mean_is_nan, false),
                             set(&Problem::entropy, false),
                             set(&Problem::predicted, false),
                             set(&Problem::lse, false),
                             set(&Problem::row_counts, false),
                             set(&Problem::overwrite, false),
                             set(&Problem::spare_rows, 0),
                             set(&Problem::threads, 0),

                             set(&Problem::scalar_as_one_element, false),
                             set(&Problem::classes, 0),
                             set(&Problem::target_dtype, kI64)};
  // All ranks, the last one, their padding, their layouts.
  steps.push_back([](Problem &p) {
    const bool had = !p.split.empty();
    p.split = Split();
    return had;
  });
  steps.push_back([](Problem &p) {
    if (p.split.padding.size() < 2) return false;
    p.split.offsets.erase(p.split.offsets.end() - 2);
    p.split.padding.pop_back();
    return true;
  });
  steps.push_back([](Problem &p) {
    const auto &pad = p.split.padding;
    const bool had = std::any_of(pad.begin(), pad.end(), [](int64_t n) { return n > 0; });
    p.split.padding.assign(pad.size(), 0);
    return had;
  });
  steps.push_back([](Problem &p) {
    const bool had = p.split.layouts != 0;
    p.split.layouts = 0;
    return had;
  });
  steps.push_back([](Problem &p) {
    if (p.reduction == XENT_REDUCTION_NONE || p.denominator) return false;
    p.reduction = XENT_REDUCTION_NONE;
    p.empty_mean_is_nan = false;
    return true;
  });
  steps.push_back([](Problem &p) {
    if (p.dtype == kF32) return false;
    p.dtype = p.grad_dtype = kF32;
    for (double &x : p.logits) x = round_to(kF32, x);
    for (double &w : p.weights) w = round_to(kF32, w);
    for (Layout *l : {&p.logits_layout, &p.grad_layout, &p.weights_layout}) {
      l->misalign = l->misalign / 4 * 4;
      l->byte_offset = l->byte_offset / 4 * 4;
    }
    return true;
  });
  steps.push_back([](Problem &p) {
    const bool differs = p.grad_dtype != p.dtype;
    p.grad_dtype = p.dtype;
    return differs;
  });
  return steps;
}

template <class T, class F>
bool rewrite(std::vector<T> &values, F &&f) {
  bool changed = false;
  for (T &v : values) {
    const T simple = f(v);
    changed = changed || !(simple == v || simple != simple);
    v = simple;
  }
  return changed;
}

std::vector<Step> value_steps() {
  return {
      [](Problem &p) { return rewrite(p.logits, [](double) { return 0.0; }); },
      [](Problem &p) { return rewrite(p.logits, [](double x) { return std::isfinite(x) ? 0.0 : x; }); },
      [](Problem &p) {
        return rewrite(p.logits, [](double x) { return std::fabs(x) < 1e3 ? std::round(x) + 0.0 : x; });
      },
      [](Problem &p) { return rewrite(p.targets, [](int64_t) { return int64_t{0}; }); },
      [](Problem &p) { return rewrite(p.weights, [](double) { return 1.0; }); },
      [](Problem &p) { return p.upstream && rewrite(p.upstream->v, [](double) { return 1.0; }); },
  };
}

class Shrinker {
 public:
  Shrinker(const Target &target, const Problem &p, const Verdict &verdict, uint64_t seed, double seconds)
      : target_(target), seed_(seed), best_{p, verdict, 0}, seconds_(seconds) {}

  Shrunk run() {
    // Small first: every later attempt costs less.
    bool smaller = true;
    while (smaller && in_time()) {
      smaller = sizes();
      for (const auto &steps : {layout_steps(), option_steps(), value_steps()}) {
        for (const Step &step : steps) {
          Problem q = best_.problem;
          if (step(q)) smaller = accept(std::move(q)) || smaller;
        }
      }
    }
    return best_;
  }

 private:
  bool in_time() const { return std::chrono::steady_clock::now() - start_ < seconds_; }

  bool accept(Problem q) {
    if (!in_time() || !well_posed(q)) return false;
    ++best_.attempts;
    const Verdict v = attempt(target_, q, seed_);
    if (v.kind != best_.verdict.kind) return false;
    best_.problem = std::move(q);
    best_.verdict = v;
    return true;
  }

  // Halves while either half fails, then takes ones off either end.
  template <class Keep>
  bool narrow(Keep &&keep, const std::function<int64_t()> &size) {
    bool any = false;
    for (int64_t off = size() / 2; off > 0;) {
      const int64_t n = size();
      off = std::min(off, n - 1);
      if (off <= 0) break;
      if (keep(int64_t{0}, n - off) || keep(off, n - off)) {
        any = true;
      } else {
        off /= 2;
      }
    }
    return any;
  }

  bool sizes() {
    bool any = false;
    for (size_t d = 0; d < best_.problem.shape.size(); ++d) {
      any = narrow([&](int64_t first, int64_t count) { return accept(keep_rows(best_.problem, d, first, count)); },
                   [&] { return best_.problem.shape[d]; }) ||
            any;
    }
    any = narrow(
              [&](int64_t first, int64_t count) {
                auto q = keep_columns(best_.problem, first, count);
                return q && accept(std::move(*q));
              },
              [&] { return best_.problem.vocab; }) ||
          any;
    // One dimension says as much as many, where no strides need them.
    const Problem &p = best_.problem;
    const auto strided = [](const Layout &l) { return !l.strides.empty(); };
    if (p.shape.size() != 1 && !strided(p.logits_layout) && !strided(p.grad_layout) && !strided(p.targets_layout) &&
        !strided(p.mask_layout) && !strided(p.weights_layout) && !strided(p.row_output_layout) &&
        !strided(p.upstream_layout)) {
      Problem q = p;
      q.shape = {p.rows()};
      any = accept(std::move(q)) || any;
    }
    return any;
  }

  const Target &target_;
  uint64_t seed_;
  Shrunk best_;
  std::chrono::duration<double> seconds_;
  std::chrono::steady_clock::time_point start_ = std::chrono::steady_clock::now();
};

}  // namespace

Shrunk shrink(const Target &target, const Problem &p, const Verdict &verdict, uint64_t seed, double seconds) {
  return Shrinker(target, p, verdict, seed, seconds).run();
}

}  // namespace xent_test::conformance
