// SPDX-FileCopyrightText: the libxent authors
// SPDX-License-Identifier: Apache-2.0

// xent_scale_grad: a gradient that is there already, times the upstream gradient. A product in float64, rounded to acc
// and then to the stored type, is what every backend must give, bit by bit.

#include <algorithm>
#include <cmath>
#include <cstring>
#include <optional>

#include "generate.hpp"

namespace xent_test {
namespace {

const std::vector<DLDataType> kUpstreams = {kF32, kF16, kBf16, kF64};

class Scale : public BackendTest {
 protected:
  // A problem without logits: what scale_grad takes of it. Of the gradient's type, any bits.
  Problem start(DLDataType dtype, std::vector<int64_t> shape, int64_t vocab, DLDataType upstream = kF32) {
    Problem p = plain(rng_, backend(), dtype, std::move(shape), vocab);
    p.grad_dtype = dtype;
    p.reduction = XENT_REDUCTION_NONE;
    add_upstream(rng_, p, upstream, true);
    return p;
  }

  static int64_t columns(const Problem &p) {
    return p.class_offsets.empty() ? p.real_classes()
                                   : p.class_offsets[static_cast<size_t>(p.rank) + 1] - p.class_offsets[p.rank];
  }

  std::vector<int64_t> random_bits(const Problem &p) {
    std::vector<int64_t> bits;
    for (int64_t i = 0; i < p.rows() * p.vocab; ++i) bits.push_back(static_cast<int64_t>(rng_()));
    return bits;
  }
  std::vector<int64_t> gradient(const Problem &p) {
    std::vector<int64_t> bits;
    for (const double v : draw_normal(rng_, p.rows() * p.vocab, 0.1)) {
      bits.push_back(static_cast<int64_t>(encode_float(p.grad_dtype, v)));
    }
    return bits;
  }

  static bool counts(const Problem &p, size_t row) {
    const int64_t classes = p.class_offsets.empty() ? p.real_classes() : p.class_offsets.back();
    const int64_t target = p.targets[row];
    if (p.ignore_index && target == *p.ignore_index) return false;
    return !(p.mask && p.mask->v[row] == 0) && target >= 0 && target < classes;
  }
  static double factor(const Problem &p, size_t row) { return p.upstream->v[p.per_row_upstream ? row : 0]; }

  // Cut to the type; a NaN to one of them, unless it must be the same.
  static uint64_t want(const Problem &p, size_t row, int64_t column, int64_t raw) {
    const uint64_t bits = p.grad_dtype.bits == 64
                              ? static_cast<uint64_t>(raw)
                              : static_cast<uint64_t>(raw) & ((uint64_t{1} << p.grad_dtype.bits) - 1);
    if (column >= columns(p) || !counts(p, row) || factor(p, row) == 1) return bits;
    const double product = decode_float(p.grad_dtype, bits) * factor(p, row);
    if (std::isnan(product)) return encode_float(p.grad_dtype, kNaN);
    return encode_float(p.grad_dtype,
                        p.grad_dtype == kF64 ? product : static_cast<double>(static_cast<float>(product)));
  }

  struct Arguments {
    Tensor targets, mask, upstream, grad;
    xent_scale_grad_args args = {};
  };
  Arguments upload(const Problem &p, const std::vector<int64_t> &bits, void *stream = nullptr) {
    Arguments a;
    std::vector<int64_t> matrix = p.shape;
    matrix.push_back(p.vocab);
    const auto scalar = p.scalar_as_one_element ? std::vector<int64_t>{1} : std::vector<int64_t>{};
    a.targets = Tensor(device_, p.target_dtype, p.shape, p.targets_layout);
    a.targets.fill(p.targets);
    if (p.mask) {
      a.mask = Tensor(device_, p.mask->dtype, p.shape, p.mask_layout);
      a.mask.fill(p.mask->v);
    }
    a.upstream = Tensor(device_, p.upstream->dtype, p.per_row_upstream ? p.shape : scalar, p.upstream_layout);
    a.upstream.fill(p.upstream->v);
    a.grad = Tensor(device_, p.grad_dtype, matrix, p.grad_layout);
    a.grad.allow_writes();
    a.grad.fill(bits);
    for (Tensor *t : {&a.targets, &a.mask, &a.upstream, &a.grad}) {
      if (t->present()) t->memory().upload();
    }
    a.args.struct_size = sizeof a.args;
    a.args.stream = stream;
    a.args.targets = a.targets.dl();
    a.args.mask = a.mask.dl();
    a.args.grad_loss = a.upstream.dl();
    a.args.grad_logits = a.grad.dl();
    return a;
  }
  static std::vector<uint64_t> collect(Arguments &a) {
    for (Tensor *t : {&a.targets, &a.mask, &a.upstream}) {
      if (!t->present()) continue;
      EXPECT_EQ(t->memory().download(), "") << "an input was written";
    }
    EXPECT_EQ(a.grad.memory().download(), "") << "a write outside of the gradient";
    return a.grad.bits();
  }

  std::vector<uint64_t> scale(const Problem &p, const std::vector<int64_t> &bits) {
    xent_error err = {};
    err.struct_size = sizeof(err);
    const auto plan = make_plan(p, &err);
    EXPECT_TRUE(plan) << err.message;
    if (!plan) return {};
    Arguments a = upload(p, bits);
    EXPECT_EQ(xent_scale_grad(plan.get(), &a.args, &err), XENT_OK) << err.message;
    device_->synchronize();
    return collect(a);
  }

  void compare(const Problem &p, const std::vector<int64_t> &bits, const std::vector<uint64_t> &got) {
    SCOPED_TRACE(p.describe());
    ASSERT_EQ(got.size(), bits.size());
    for (size_t i = 0; i < bits.size(); ++i) {
      const size_t row = i / static_cast<size_t>(p.vocab);
      const int64_t column = static_cast<int64_t>(i) % p.vocab;
      const uint64_t expected = want(p, row, column, bits[i]);
      if (got[i] == expected) continue;
      const bool multiplied = column < columns(p) && counts(p, row) && factor(p, row) != 1;
      if (multiplied && std::isnan(decode_float(p.grad_dtype, expected)) &&
          std::isnan(decode_float(p.grad_dtype, got[i])))
        continue;
      ADD_FAILURE() << "row " << row << " column " << column << " factor " << factor(p, row) << std::hex << ": got "
                    << got[i] << ", want " << expected << " of " << bits[i];
      return;
    }
  }
  void verify_scale(const Problem &p, const std::vector<int64_t> &bits) { compare(p, bits, scale(p, bits)); }
  void verify_scale(const Problem &p) { verify_scale(p, gradient(p)); }
};

TEST_P(Scale, SmallEveryTypeAndRow) {
  for (const DLDataType dtype : dtypes_of(backend())) {
    for (const DLDataType upstream : kUpstreams) {
      for (const int64_t vocab : {1, 2, 7, 8, 9, 33, 300, 1037}) {
        Problem p = start(dtype, {3, 4}, vocab, upstream);
        p.grad_dtype = dtype == kF64 || pick(rng_, 0, 1) == 0 ? dtype : kF32;
        p.target_dtype = pick(rng_, 0, 1) == 0 ? kI32 : kI64;
        p.grad_layout.misalign = pick(rng_, 0, 15) * size_of(p.grad_dtype);
        add_ignored(rng_, p, choose<int64_t>(rng_, {-100, 0}));
        add_mask(rng_, p, choose<DLDataType>(rng_, {kBool, kU8, kI32, kI64, kF32}));
        p.targets[1] = vocab;
        p.targets[2] = -7;
        verify_scale(p, random_bits(p));
        p.mask.reset();
        add_upstream(rng_, p, upstream, false);  // a scalar
        p.scalar_as_one_element = pick(rng_, 0, 1) == 0;
        verify_scale(p);
        p.reduction = static_cast<int32_t>(pick(rng_, XENT_REDUCTION_SUM, XENT_REDUCTION_MEAN));
        verify_scale(p);
      }
    }
  }
}

TEST_P(Scale, SmallPaddingColumnsStay) {
  for (const DLDataType dtype : dtypes_of(backend())) {
    for (const int64_t classes : {1, 30, 38}) {
      Problem p = start(dtype, {6}, 39);
      p.classes = classes;
      draw_targets(rng_, p);
      p.targets[2] = classes;  // no class
      verify_scale(p, random_bits(p));
    }
  }
}

TEST_P(Scale, SmallRowsThatDoNotCountStay) {
  for (const DLDataType dtype : dtypes_of(backend())) {
    for (const double bad : {kNaN, kInf, 0.0}) {
      Problem p = start(dtype, {4}, 21);
      p.upstream->v.assign(4, bad);
      p.ignore_index = 5;
      p.targets = {5, 21, -1, 3};
      p.mask = Values{kU8, {1, 1, 1, 0}};
      verify_scale(p, random_bits(p));
      verify_scale(p, std::vector<int64_t>(4 * 21, 0));
    }
  }
}

TEST_P(Scale, SmallOneTouchesNothing) {
  // Bits of every kind: a NaN whose quiet bit is 0 would come back with it set.
  for (const DLDataType dtype : dtypes_of(backend())) {
    for (const DLDataType upstream : kUpstreams) {
      for (const bool per_row : {false, true}) {
        Problem p = start(dtype, {7}, 333, upstream);
        p.per_row_upstream = per_row;
        p.upstream->v.assign(per_row ? 7 : 1, 1.0);
        verify_scale(p, random_bits(p));
        if (per_row) {
          p.upstream->v[3] = -2;  // alone
          verify_scale(p, random_bits(p));
          p.upstream->v.assign(7, 1.0);
          p.upstream_layout.strides = {0};
          verify_scale(p, random_bits(p));
        }
      }
    }
  }
  Problem p = start(kF32, {2}, 4);
  p.upstream = Values{kF64, {1 + 0x1p-52, 1 - 0x1p-53}};  // not 1, but for one who narrows
  verify_scale(p, std::vector<int64_t>(8, 0x7f800001));
  const auto got = scale(p, std::vector<int64_t>(8, 0x7f800001));
  EXPECT_EQ(std::count(got.begin(), got.end(), 0x7f800001u), 0) << "a signalling NaN was not multiplied";
}

TEST_P(Scale, SmallSpecialFactors) {
  for (const DLDataType dtype : dtypes_of(backend())) {
    const double least = static_cast<double>(ulp_at(dtype, 0)), most = max_finite(dtype);
    for (const double by : {0.0, -0.0, -1.0, kInf, -kInf, kNaN, 0.5, 2.0, 3e-5, 1e-40, 1.0 / 3}) {
      Problem p = start(dtype, {2}, 19);
      p.upstream->v = {by, 1};
      p.quantize();
      std::vector<int64_t> bits;
      for (int row = 0; row < 2; ++row) {
        for (const double v : {0.0, -0.0, 1.0, -1.0, kInf, -kInf, kNaN, least, -least, 3 * least, 7 * least, most,
                               -most, most / 2, 0.1, -0.3, 1e-5, 65000.0, 5e-8}) {
          bits.push_back(static_cast<int64_t>(encode_float(dtype, v)));
        }
      }
      verify_scale(p, bits);
    }
  }
}

TEST_P(Scale, SmallFactorsThatFloat32DoesNotHold) {
  for (const DLDataType dtype : dtypes_of(backend())) {
    for (const double by : {1e60, 1e39, -3e42, 1e-60, 1e-46, 0.1, 1 + 0x1p-30, 65536.0 + 0x1p-20}) {
      Problem p = start(dtype, {3}, 77, kF64);
      p.grad_dtype = dtype == kF64 ? kF64 : kF32;
      p.upstream->v = {by, 1, -by};
      std::vector<int64_t> bits;
      for (const double v : draw_normal(rng_, 3 * 77)) {
        bits.push_back(static_cast<int64_t>(encode_float(p.grad_dtype, v * (std::fabs(by) > 1e30 ? 1e-38 : 1))));
      }
      verify_scale(p, bits);
      p.per_row_upstream = false;
      p.upstream->v = {by};
      verify_scale(p, bits);
    }
  }
}

TEST_P(Scale, SmallStrides) {
  for (const DLDataType dtype : dtypes_of(backend())) {
    const std::vector<std::vector<int64_t>> layouts = {
        {77, 3 * 77, 1},    {5 * 90, 90, 1}, {-400, 80, 1}, {5 * 77, -77, -1},
        {3 * 77 * 2, 1, 3}, {900, 160, 2},   {800, 7, 33},  {1, 3, 20},
    };
    for (const auto &strides : layouts) {
      Problem p = start(dtype, {3, 5}, 77);
      if (strides[0] == 77) p.shape = {3, 4};
      if (strides[0] == 1 || strides[1] == 1) p.shape = {3, 3};
      p.targets.resize(static_cast<size_t>(p.rows()));
      add_upstream(rng_, p, kF32, true);
      p.grad_layout.strides = strides;
      p.grad_layout.misalign = pick(rng_, 0, 15) * size_of(dtype);
      p.grad_layout.byte_offset = 16 * pick(rng_, 0, 3);
      p.targets_layout.strides = {1, p.shape[0]};
      p.upstream_layout.strides = {-2, 2 * p.shape[0]};
      verify_scale(p);
    }
    Problem p = start(dtype, {}, 77);
    verify_scale(p);
    p = start(dtype, {4, 3}, 9);
    p.upstream_layout.strides = {0, 1};
    for (size_t i = 3; i < 12; ++i) p.upstream->v[i] = p.upstream->v[i - 3];
    verify_scale(p);
  }
}

TEST_P(Scale, SmallNoRows) {
  Problem p = start(kF32, {3, 0}, 300);
  verify_scale(p, {});
}

TEST_P(Scale, SmallNothingOutsideThePages) {
  if (cuda()) GTEST_SKIP() << "guard pages are for host memory; canaries and compute-sanitizer watch the device";
  for (const DLDataType dtype : dtypes_of(backend())) {
    for (const int64_t vocab : {1, 3, 8, 15, 17, 33, 65, 257, 2050}) {
      for (const Guard guard : {Guard::kPageEnd, Guard::kPageStart}) {
        Problem p = start(dtype, {2}, vocab);
        for (Layout *l : {&p.grad_layout, &p.targets_layout, &p.upstream_layout}) l->guard = guard;
        verify_scale(p);
        p.grad_layout.strides = {2 * vocab, 2};
        verify_scale(p);
      }
    }
  }
}

TEST_P(Scale, LongRowsByAnyNumberOfThreads) {
  for (const DLDataType dtype : dtypes_of(backend())) {
    for (const int64_t rows : {1, 3}) {
      Problem p = start(dtype, {rows}, 70001);
      p.upstream->v.assign(static_cast<size_t>(rows), 0.37);
      p.quantize();
      p.grad_layout.misalign = pick(rng_, 0, 15) * size_of(dtype);
      for (const int32_t threads : {1, 3}) {
        p.threads = threads;
        verify_scale(p);
      }
      p.grad_layout.strides = {1, rows};
      verify_scale(p);
    }
  }
}

TEST_P(Scale, ManyRows) {
  // More than a grid looks at in one go.
  for (const int64_t vocab : {1, 3}) {
    Problem p = start(kBf16, {160001}, vocab);
    add_ignored(rng_, p, -100);
    verify_scale(p);
  }
}

TEST_P(Scale, SmallShards) {
  for (const DLDataType dtype : dtypes_of(backend())) {
    for (const int64_t padding : {0, 3}) {
      for (int32_t rank = 0; rank < 3; ++rank) {
        Problem p = start(dtype, {5}, 1);
        p.class_offsets = {0, 25, 60, 60};
        p.rank = rank;
        p.vocab = columns(p) + padding;
        p.targets = {0, 59, 60, -1, 30};  // classes of any rank count, on every rank
        p.upstream->v = {2, -3, kNaN, kInf, 0.5};
        verify_scale(p, random_bits(p));
      }
    }
  }
}

TEST_P(Scale, SmallGivesTheGradientOfTheUpstream) {
  for (const DLDataType dtype : dtypes_of(backend())) {
    for (const int32_t reduction : {XENT_REDUCTION_NONE, XENT_REDUCTION_SUM, XENT_REDUCTION_MEAN}) {
      Problem p = plain(rng_, backend(), dtype, {6}, 300);
      // Twice a subnormal of float16 is further from the reference than the rounding of the product.
      p.grad_dtype = dtype == kF16 ? kF32 : dtype;
      p.reduction = reduction;
      p.label_smoothing = 0.1;
      add_ignored(rng_, p, -100);
      p.targets[4] = 300;
      auto result = run(p, Mode::kLossAndGrad);
      ASSERT_TRUE(result);
      p.upstream = Values{kF32, {-2}};  // powers of two: nothing is rounded again
      if (reduction == XENT_REDUCTION_NONE) {
        p.per_row_upstream = true;
        p.upstream->v = {-2, 1, 4, 0, kInf, 0.5};
      }
      result->grad = scale(p, std::vector<int64_t>(result->grad.begin(), result->grad.end()));
      EXPECT_TRUE(check(p, *result, Mode::kLossAndGrad)) << p.describe();
    }
  }
}

TEST_P(Scale, SmallFirstCallIsCaptured) {
  if (!cuda()) GTEST_SKIP() << "graphs are CUDA's";
  void *stream = device_->make_stream();
  for (const DLDataType dtype : dtypes_of(backend())) {
    for (const DLDataType stored : {dtype, kF32}) {
      Problem p = start(dtype, {9}, 333);
      p.grad_dtype = stored;
      xent_error err = {};
      err.struct_size = sizeof(err);
      const auto plan = make_plan(p, &err);
      ASSERT_TRUE(plan) << err.message;
      const auto bits = gradient(p);
      Arguments a = upload(p, bits, stream);
      xent_status status = XENT_INTERNAL;
      void *graph = device_->capture(stream, [&] { status = xent_scale_grad(plan.get(), &a.args, &err); });
      ASSERT_EQ(status, XENT_OK) << err.message;
      ASSERT_NE(graph, nullptr);
      device_->replay(graph, stream);
      device_->synchronize();
      compare(p, bits, collect(a));
      device_->destroy_graph(graph);
    }
  }
  device_->destroy_stream(stream);
}

XENT_BACKENDS(Scale);

}  // namespace
}  // namespace xent_test
