// SPDX-FileCopyrightText: the libxent authors
// SPDX-License-Identifier: Apache-2.0

// What conformance draws.

#include <algorithm>
#include <cmath>
#include <numeric>

#include "conformance.hpp"
#include "generate.hpp"
#include "ranks.hpp"

namespace xent_test::conformance {
namespace {

double uniform(Rng &rng, double low, double high) { return std::uniform_real_distribution<double>(low, high)(rng); }
bool chance(Rng &rng, double p) { return uniform(rng, 0, 1) < p; }
double power_of_ten(Rng &rng, double low, double high) { return std::pow(10.0, uniform(rng, low, high)); }

// ---- Logits

double smallest(const DLDataType &t) { return static_cast<double>(ulp_at(t, 0)); }

// Returns what it is, in words.
const char *adversarial_row(Rng &rng, const Problem &p, double *x, int64_t target) {
  const int64_t n = p.real_classes();
  const int64_t somewhere = choose<int64_t>(rng, {0, n - 1, n / 2, pick(rng, 0, n - 1)});
  const bool has_target = target >= 0 && target < n;
  switch (pick(rng, 0, 15)) {
    case 0:
      std::fill_n(x, n, uniform(rng, -50, 50));
      return "flat";
    case 1:
      std::fill_n(x, n, choose<double>(rng, {0.0, -0.0}));
      x[somewhere] = 50;
      return "one-hot";
    case 2:  // beyond what the exponential can show
      for (int64_t c = 0; c < n; ++c) x[c] = choose<double>(rng, {0, 1, -87, -90, -104, -150, -746, -1e4});
      return "gaps above 100";
    case 3:
      std::fill_n(x, pick(rng, 0, n - 1), -kInf);
      return "-inf in front";
    case 4: {
      const int64_t left = pick(rng, 1, n);
      std::fill_n(x + left, n - left, -kInf);
      return "-inf behind";
    }
    case 5: {
      const double kept = x[somewhere];
      std::fill_n(x, n, -kInf);
      x[somewhere] = kept;
      if (somewhere == 0) return "all -inf but the first";
      return somewhere == n - 1 ? "all -inf but the last" : "all -inf but one";
    }
    case 6:
      for (int64_t c = 0; c < n; ++c) x[c] = chance(rng, 0.3) ? -kInf : x[c];
      return "-inf here and there";
    case 7:
      std::fill_n(x, n, -kInf);
      return "all -inf";
    case 8:
      x[somewhere] = kInf;
      return "+inf";
    case 9:
      x[somewhere] = kNaN;
      return "NaN";
    case 10:
      for (int64_t c = 0; c < n; ++c) x[c] = static_cast<double>(pick(rng, -50, 50)) * smallest(p.dtype);
      return "denormals";
    case 11: {
      const double offset = p.dtype == kF16 ? 3e4 : choose<double>(rng, {1e4, 1e6, 1e30});
      const double sign = chance(rng, 0.5) ? -1 : 1;
      for (int64_t c = 0; c < n; ++c) x[c] = sign * offset + x[c];
      return offset > 1e6 ? "offset 1e30" : "offset 1e4 or 1e6";
    }
    case 12:
      if (has_target) x[target] = -kInf;
      return "the target's -inf";
    case 13:
    case 14: {  // one of `threads` takes every such vector of columns
      const int64_t vector = choose<int64_t>(rng, {1, 4, 8, 16});
      const bool warp = chance(rng, 0.5);
      const int64_t threads = choose<int64_t>(rng, {2, 4, 8, 32, 128, 256, 1024});
      const int64_t part = vector * (warp ? 32 : 1), parts = warp ? std::max<int64_t>(1, threads / 32) : threads;
      // Of those that have columns.
      const int64_t share = pick(rng, 0, std::min(parts, (n + part - 1) / part) - 1);
      const bool alone = chance(rng, 0.5);
      for (int64_t c = 0; c < n; ++c) x[c] = (c / part % parts == share) == alone ? x[c] : -kInf;
      if (alone) return warp ? "all -inf but a warp's share" : "all -inf but a thread's share";
      return warp ? "-inf in a warp's share" : "-inf in a thread's share";
    }
    default:
      for (int64_t c = 0; c < n; ++c) x[c] = std::round(x[c] / 2) * 2;
      return "ties";
  }
}

void draw_values(Rng &rng, Case &c) {
  Problem &p = c.problem;
  const bool adversarial = chance(rng, 0.25);
  const Family family = choose(rng, kFamilies);
  draw_logits(rng, p, adversarial ? Family::kRandom : family);
  c.family = adversarial ? "adversarial" : name_of(family);
  if (!adversarial) return;
  for (int64_t r = 0; r < p.rows(); ++r) {
    c.rows.insert(adversarial_row(rng, p, p.logits.data() + r * p.vocab, p.targets[static_cast<size_t>(r)]));
  }
  p.quantize();
}

// What must not matter: padding, and everything of a row that is ignored.
void spoil(Rng &rng, Problem &p) {
  const std::vector<double> junk = {kNaN, kInf, -kInf, round_to(p.dtype, max_finite(p.dtype)), 7};
  for (int64_t r = 0; r < p.rows(); ++r) {
    const auto i = static_cast<size_t>(r);
    double *x = p.logits.data() + r * p.vocab;
    for (int64_t c = p.real_classes(); c < p.vocab; ++c) x[c] = choose(rng, junk);
    if (!ignored(p, i) || chance(rng, 0.5)) continue;
    std::fill_n(x, p.vocab, choose(rng, junk));
  }
}

// As spoil(), once it is known which rows share a value.
void spoil_factors(Rng &rng, Problem &p) {
  const auto shared = [](const Layout &l) { return std::count(l.strides.begin(), l.strides.end(), 0) > 0; };
  for (size_t i = 0; i < p.targets.size(); ++i) {
    if (!ignored(p, i) || chance(rng, 0.5)) continue;
    const double junk = choose<double>(rng, {kNaN, kInf, -3});
    if (!p.weights.empty() && !shared(p.weights_layout)) p.weights[i] = junk;
    if (p.per_row_upstream && !shared(p.upstream_layout)) p.upstream->v[i] = junk;
  }
}

// ---- Layouts

struct Demands {
  bool output = false;
  bool vocabulary = false;  // the last dimension is the vocabulary
  int64_t unit = 4;         // what offsets are multiples of
  bool host = true;
};

Layout draw_layout(Rng &rng, const std::vector<int64_t> &shape, const Demands &demands) {
  Layout l;
  if (chance(rng, 0.6)) l.misalign = pick(rng, 0, 31) * demands.unit;
  if (chance(rng, 0.3)) l.byte_offset = pick(rng, 0, 300) * demands.unit;
  if (demands.host && chance(rng, 0.3)) l.guard = chance(rng, 0.5) ? Guard::kPageEnd : Guard::kPageStart;
  if (chance(rng, 0.5)) {
    l.null_strides = chance(rng, 0.3);
    return l;
  }
  std::vector<size_t> order(shape.size());
  std::iota(order.begin(), order.end(), size_t{0});
  const bool vocabulary_moves = !demands.vocabulary || chance(rng, 0.2);
  if (chance(rng, 0.5) && !order.empty()) std::shuffle(order.begin(), order.end() - (vocabulary_moves ? 0 : 1), rng);
  l.strides.resize(shape.size());
  int64_t next = chance(rng, 0.7) ? 1 : pick(rng, 2, 4);
  for (size_t i = order.size(); i-- > 0;) {
    const int64_t n = shape[order[i]];
    l.strides[order[i]] = chance(rng, 0.15) ? -next : next;
    next = next * std::max<int64_t>(n, 1) + (chance(rng, 0.3) ? pick(rng, 1, 9) : 0);
    if (n <= 1 && chance(rng, 0.3)) l.strides[order[i]] = choose<int64_t>(rng, {0, INT64_MAX / 2, -7});
  }
  return l;
}

// Makes one dimension of an input an expanded one, its values the first's.
template <class T>
void expand(Rng &rng, const std::vector<int64_t> &shape, Layout &l, std::vector<T> &values) {
  if (l.strides.empty() || values.empty()) return;
  const auto d = static_cast<size_t>(pick(rng, 0, static_cast<int64_t>(shape.size()) - 1));
  l.strides[d] = 0;
  int64_t inner = 1;
  for (size_t i = d + 1; i < shape.size(); ++i) inner *= shape[i];
  for (size_t i = 0; i < values.size(); ++i) {
    const auto index = static_cast<int64_t>(i) / inner % shape[d];
    values[i] = values[i - static_cast<size_t>(index * inner)];
  }
}

void draw_layouts(Rng &rng, Problem &p) {
  std::vector<int64_t> matrix = p.shape;
  matrix.push_back(p.vocab);
  const bool host = p.backend == Backend::kCpu;
  if (!p.overwrite && p.grad_dtype == p.dtype && chance(rng, 0.08)) {
    p.interleave = 2 * p.vocab + 2 * pick(rng, 0, 5);
  } else {
    p.logits_layout = draw_layout(rng, matrix, {p.overwrite, true, size_of(p.dtype), host});
    if (!p.overwrite && chance(rng, 0.1)) expand(rng, matrix, p.logits_layout, p.logits);
    if (!p.overwrite) p.grad_layout = draw_layout(rng, matrix, {true, true, size_of(p.grad_dtype), host});
  }
  const auto input = [&](Layout &l, const DLDataType &t, auto &values) {
    l = draw_layout(rng, p.shape, {false, false, size_of(t), host});
    if (chance(rng, 0.1)) expand(rng, p.shape, l, values);
  };
  input(p.targets_layout, p.target_dtype, p.targets);
  if (p.mask) input(p.mask_layout, p.mask->dtype, p.mask->v);
  if (!p.weights.empty()) input(p.weights_layout, p.acc(), p.weights);
  if (p.upstream && p.per_row_upstream) input(p.upstream_layout, p.upstream->dtype, p.upstream->v);
  p.row_output_layout = draw_layout(rng, p.shape, {true, false, 8, host});
  p.stats_layout = draw_layout(rng, {p.rows(), 2}, {true, false, size_of(p.acc()), host});
  p.counts_layout = draw_layout(rng, {3}, {true, false, size_of(p.counts_dtype), host});
  if (chance(rng, 0.3)) p.partial_pitch = pick(rng, 2, 5);
}

// ---- Shapes

int64_t draw_vocab(Rng &rng) {
  switch (pick(rng, 0, 5)) {
    case 0:
      return pick(rng, 1, 20);
    case 1:
      return std::max<int64_t>(1, (int64_t{1} << pick(rng, 0, 14)) + pick(rng, -1, 1));
    case 2:
      return choose<int64_t>(rng, {2, 3, 7, 61, 127, 257, 1031, 4099, 16381, 32003});
    case 3:
      return pick(rng, 20, 40000);
    default:
      return static_cast<int64_t>(power_of_ten(rng, 0, 3.5));
  }
}

std::vector<int64_t> draw_shape(Rng &rng, int64_t vocab) {
  if (chance(rng, 0.02)) return choose<std::vector<int64_t>>(rng, {{0}, {3, 0}, {0, 2, 2}});
  const int64_t most = std::clamp<int64_t>(30000 / vocab, 1, 300);
  const int64_t rows = static_cast<int64_t>(std::pow(static_cast<double>(most), uniform(rng, 0, 1)));
  const int64_t rank = choose<int64_t>(rng, {0, 1, 1, 1, 2, 2, 3, 4, 8});
  if (rank == 0) return {};
  std::vector<int64_t> shape(static_cast<size_t>(rank), 1);
  int64_t left = rows;
  for (int64_t &n : shape) {
    n = &n == &shape.back() ? left : std::min<int64_t>(left, pick(rng, 1, 4));
    left = std::max<int64_t>(1, left / n);
  }
  return shape;
}

void draw_options(Rng &rng, Problem &p) {
  p.grad_dtype = p.dtype == kF64 || chance(rng, 0.7) ? p.dtype : kF32;
  p.target_dtype = chance(rng, 0.5) ? kI32 : kI64;
  p.reduction = static_cast<int32_t>(pick(rng, 0, 2));
  if (chance(rng, 0.4)) p.classes = pick(rng, p.vocab / 2 + 1, p.vocab);
  if (chance(rng, 0.45))
    p.label_smoothing = chance(rng, 0.3) ? uniform(rng, 0, 1) : choose<double>(rng, {0.1, 0.01, 1});
  if (chance(rng, 0.4)) p.softcap = chance(rng, 0.5) ? power_of_ten(rng, -1, 3) : choose<double>(rng, {30, 50, 1});
  if (chance(rng, 0.4)) p.logit_scale = chance(rng, 0.5) ? power_of_ten(rng, -2, 1.5) : choose<double>(rng, {0.25, 3});
  if (chance(rng, 0.4)) p.z_loss = chance(rng, 0.5) ? power_of_ten(rng, -6, -1) : choose<double>(rng, {1e-4, 1e-3});
  p.entropy = chance(rng, 0.5);
  p.predicted = chance(rng, 0.5);
  p.lse = chance(rng, 0.6);
  p.row_counts = chance(rng, 0.6);
  p.predicted_dtype = chance(rng, 0.5) ? kI32 : kI64;
  p.counts_dtype = chance(rng, 0.5) ? kI32 : kI64;
  p.spare_rows = chance(rng, 0.3) ? pick(rng, 1, 100) : 0;
  p.scalar_as_one_element = chance(rng, 0.3);
  p.overwrite = p.grad_dtype == p.dtype && chance(rng, 0.25);
  p.empty_mean_is_nan = p.reduction == XENT_REDUCTION_MEAN && chance(rng, 0.3);
  if (p.backend == Backend::kCpu) p.threads = choose<int32_t>(rng, {0, 0, 1, 2, 3});
}

}  // namespace

void draw_shard_layouts(Problem &shard, uint64_t seed) {
  if (seed == 0) return;
  Rng rng(seed + static_cast<uint64_t>(shard.rank));
  std::vector<int64_t> matrix = shard.shape;
  matrix.push_back(shard.vocab);
  const bool host = shard.backend == Backend::kCpu;
  shard.logits_layout = draw_layout(rng, matrix, {shard.overwrite, true, size_of(shard.dtype), host});
  if (!shard.overwrite) shard.grad_layout = draw_layout(rng, matrix, {true, true, size_of(shard.grad_dtype), host});
}

Case draw(uint64_t seed, Backend device, const std::vector<int32_t> &ranks) {
  Rng rng(seed);
  Case c;
  c.seed = seed;
  Problem &p = c.problem;
  p.backend = device;
  p.dtype = choose(rng, dtypes_of(device));
  p.vocab = chance(rng, 0.01) ? pick(rng, 40000, 300000) : draw_vocab(rng);
  p.shape = draw_shape(rng, p.vocab);
  draw_options(rng, p);
  if (!ranks.empty()) p.classes = 0;  // the padding is the shards'
  draw_targets(rng, p);
  if (chance(rng, 0.35)) {
    add_ignored(rng, p, choose<int64_t>(rng, {-100, -1, 0, p.real_classes() - 1, p.real_classes(), INT32_MAX}));
  }
  if (p.rows() > 0 && chance(rng, 0.12)) {
    p.targets[static_cast<size_t>(pick(rng, 0, p.rows() - 1))] =
        choose<int64_t>(rng, {-5, p.real_classes(), p.vocab, INT32_MIN, INT32_MAX - 1});
  }
  draw_values(rng, c);
  if (p.reduction != XENT_REDUCTION_NONE && chance(rng, 0.35)) {
    p.denominator = Values{choose<DLDataType>(rng, {kF32, kI32, kI64}), {}};
    p.denominator->v.push_back(choose<double>(rng, {1, 3, 1000, -7, 0, 16777217}));  // float32 has not the last
  }
  if (chance(rng, 0.4)) add_weights(rng, p);
  if (chance(rng, 0.4)) add_mask(rng, p, choose<DLDataType>(rng, {kBool, kU8, kI32, kI64, kF32}));
  if (chance(rng, 0.7)) {
    const bool per_row = p.reduction == XENT_REDUCTION_NONE && chance(rng, 0.7);
    add_upstream(rng, p, choose<DLDataType>(rng, {kF32, kF16, kBf16, kF64}), per_row);
  }
  spoil(rng, p);
  p.quantize();
  draw_layouts(rng, p);
  spoil_factors(rng, p);
  if (!well_posed(p)) p.z_loss = 0;
  if (!ranks.empty()) {
    p.split = draw_split(rng, p.vocab, choose(rng, ranks));
    p.split.layouts = rng() | 1;
    p.logits_layout = p.grad_layout = Layout();
    p.interleave = 0;
  }
  return c;
}

std::vector<std::string> features(const Case &c) {
  const Problem &p = c.problem;
  std::vector<std::string> all = {"all", "logits: " + c.family};
  for (const std::string &row : c.rows) all.push_back("row: " + row);
  const auto add = [&](bool has, const std::string &name) {
    if (has) all.push_back(name);
  };
  static const char *const reductions[] = {"none", "sum", "mean"};
  all.push_back(std::string("reduction: ") + reductions[p.reduction]);
  all.push_back(std::string("targets: ") + name_of(p.target_dtype));
  add(p.softcap != 0, "softcap");
  add(p.label_smoothing != 0, "label smoothing");
  add(p.z_loss != 0, "z-loss");
  add(p.logit_scale != 0, "logit scale");
  add(p.softcap != 0 && p.label_smoothing != 0 && p.z_loss != 0, "softcap x smoothing x z-loss");
  add(!p.weights.empty(), "row weights");
  add(p.ignore_index.has_value(), "ignore_index");
  if (p.mask) all.push_back(std::string("mask: ") + name_of(p.mask->dtype));
  bool out_of_range = false;
  for (const int64_t t : p.targets) {
    const bool ignored = p.ignore_index && t == *p.ignore_index;
    out_of_range = out_of_range || (!ignored && (t < 0 || t >= p.real_classes()));
  }
  add(out_of_range, "targets out of range");
  add(p.real_classes() < p.vocab, "padded vocabulary");
  if (p.denominator) all.push_back(std::string("denominator: ") + name_of(p.denominator->dtype));
  add(p.denominator && p.denominator->v[0] == 0, "denominator 0");
  add(p.upstream && !p.per_row_upstream, "grad_loss: scalar");
  add(p.upstream && p.per_row_upstream, "grad_loss: a row");
  add(p.empty_mean_is_nan, "empty mean is NaN");
  add(p.overwrite, "gradient over the logits");
  add(p.interleave > 0, "gradient between the logits' rows");
  add(p.grad_dtype != p.dtype, "float32 gradient of 16-bit logits");
  add(p.lse, "output: lse");
  add(p.entropy, "output: entropy");
  add(p.predicted, "output: predicted");
  add(p.row_counts, "output: row_counts");
  add(p.rows() == 0, "no rows");
  add(p.rows() == 1, "one row");
  add(p.shape.size() > 1, "several leading dimensions");
  add(p.spare_rows > 0, "fewer rows than max_rows");
  add(p.vocab > 16384, "vocab above 16384");
  add(p.threads > 0, "threads set");
  if (!p.split.empty()) {
    all.push_back("ranks: " + std::to_string(p.split.padding.size()));
    const auto &offsets = p.split.offsets;
    add(std::adjacent_find(offsets.begin(), offsets.end()) != offsets.end(), "an empty shard");
    add(std::any_of(p.split.padding.begin(), p.split.padding.end(), [](auto n) { return n > 0; }), "padded shards");
  }
  const Layout *layouts[] = {&p.logits_layout,   &p.grad_layout,    &p.targets_layout,
                             &p.mask_layout,     &p.weights_layout, &p.row_output_layout,
                             &p.upstream_layout, &p.stats_layout,   &p.counts_layout};
  const auto any = [&](auto &&has) { return std::any_of(std::begin(layouts), std::end(layouts), has); };
  add(any([](const Layout *l) { return !l->strides.empty(); }), "strides");
  add(any([](const Layout *l) { return l->null_strides; }), "strides NULL");
  add(any([](const Layout *l) { return std::count(l->strides.begin(), l->strides.end(), 0) > 0; }), "stride 0");
  add(any([](const Layout *l) {
        return std::any_of(l->strides.begin(), l->strides.end(), [](auto s) { return s < 0; });
      }),
      "negative strides");
  add(!p.logits_layout.strides.empty() && p.logits_layout.strides.back() != 1, "vocabulary stride other than 1");
  add(!p.stats_layout.strides.empty(), "strides of stats");
  add(any([](const Layout *l) { return l->misalign != 0; }), "misaligned");
  add(any([](const Layout *l) { return l->byte_offset != 0; }), "byte_offset");
  add(any([](const Layout *l) { return l->guard != Guard::kCanary; }), "at a page that cannot be touched");
  return all;
}

}  // namespace xent_test::conformance
