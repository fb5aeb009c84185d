// SPDX-FileCopyrightText: the libxent authors
// SPDX-License-Identifier: Apache-2.0

// Special values: infinities, NaN, extremes of the type, targets out of range.

#include <cmath>

#include "generate.hpp"

namespace xent_test {
namespace {

class Special : public BackendTest {
 protected:
  double &at(Problem &p, int64_t row, int64_t column) { return p.logits[static_cast<size_t>(row * p.vocab + column)]; }
  void fill(Problem &p, int64_t row, int64_t from, int64_t to, double value) {
    for (int64_t c = from; c < to; ++c) at(p, row, c) = value;
  }
  Problem start(DLDataType dtype, int64_t rows, int64_t vocab) {
    Problem p = plain(rng_, backend(), dtype, {rows}, vocab);
    p.reduction = XENT_REDUCTION_NONE;
    p.entropy = p.predicted = true;
    return p;
  }
  // With each option that treats a row differently.
  void verify_with_options(Problem p) {
    verify(p);
    p.label_smoothing = 0.1;
    verify(p);
    p.label_smoothing = 1;
    verify(p);
    p.label_smoothing = 0;
    p.z_loss = 1e-3;
    verify(p);
    p.z_loss = 0;
    p.softcap = 20;
    verify(p);
    p.label_smoothing = 0.1;
    verify(p);
  }
};

TEST_P(Special, SmallMinusInfinityInSomeColumns) {
  for (const DLDataType dtype : dtypes_of(backend())) {
    for (const int64_t vocab : {5, 100, 1037}) {
      Problem p = start(dtype, 4, vocab);
      for (int64_t r = 0; r < 4; ++r) {
        for (int64_t c = 0; c < vocab; c += pick(rng_, 1, 5)) {
          if (c != p.targets[static_cast<size_t>(r)]) at(p, r, c) = -kInf;
        }
      }
      verify_with_options(p);
    }
  }
}

TEST_P(Special, MinusInfinityInAFirstBlockOrAnyEighth) {
  for (const DLDataType dtype : dtypes_of(backend())) {
    for (const int64_t vocab : {1000, 9001, 40000}) {
      Problem p = start(dtype, 9, vocab);
      for (int64_t part = 0; part < 8; ++part) {
        fill(p, part, part * vocab / 8, (part + 1) * vocab / 8, -kInf);
        p.targets[static_cast<size_t>(part)] = ((part + 4) % 8) * vocab / 8 + 1;
      }
      fill(p, 8, 0, vocab - 1, -kInf);
      p.targets[8] = vocab - 1;
      verify(p);
      p.z_loss = 1e-3;
      verify(p);
    }
  }
}

TEST_P(Special, SmallAllButOneColumnMinusInfinity) {
  for (const DLDataType dtype : dtypes_of(backend())) {
    for (const int64_t vocab : {2, 33, 1037, 5000}) {
      Problem p = start(dtype, 6, vocab);
      const std::vector<int64_t> alone = {0, vocab / 2, vocab - 1};
      for (int64_t r = 0; r < 6; ++r) {
        fill(p, r, 0, vocab, -kInf);
        const int64_t column = alone[static_cast<size_t>(r % 3)];
        at(p, r, column) = r - 2.5;
        p.targets[static_cast<size_t>(r)] = r < 3 ? column : (column + 1) % vocab;  // then the loss is +inf
      }
      verify_with_options(p);
    }
  }
}

TEST_P(Special, AllButOneColumnMinusInfinityInEveryThreadsShare) {
  // A row for every third column, so one for each vector of four, whichever thread and lane has it.
  for (const DLDataType dtype : dtypes_of(backend())) {
    Problem p = start(dtype, 346, 1037);
    for (int64_t r = 0; r < 346; ++r) {
      const double kept = at(p, r, 3 * r);
      fill(p, r, 0, 1037, -kInf);
      at(p, r, 3 * r) = kept;
      p.targets[static_cast<size_t>(r)] = 3 * r + (r % 3 == 0 ? 1 : 0);
    }
    verify(p);
    p.z_loss = 1e-3;
    p.softcap = 20;
    verify(p);
  }
}

TEST_P(Special, MinusInfinityInEveryThreadsAndWarpsShare) {
  // A share is every `parts`-th piece of `part` columns. It alone is -inf in one row, all else in another.
  for (const DLDataType dtype : dtypes_of(backend())) {
    for (const auto &[part, parts] :
         std::vector<std::pair<int64_t, int64_t>>{{4, 8}, {8, 32}, {4, 128}, {128, 4}, {1024, 4}}) {
      const bool each = parts < 128;  // of the shares has both rows, or one of them by chance
      Problem p = start(dtype, each ? 2 * parts : parts, 4001);
      for (int64_t r = 0; r < p.rows(); ++r) {
        const int64_t share = r % parts;
        const bool alone = each ? r < parts : pick(rng_, 0, 1) == 1;
        for (int64_t c = 0; c < 4001; ++c) {
          if ((c / part % parts == share) != alone) at(p, r, c) = -kInf;
        }
        p.targets[static_cast<size_t>(r)] = (alone ? share : (share + 1) % parts) * part + 1;
      }
      verify(p);
    }
  }
}

TEST_P(Special, SmallTheTargetsOwnLogitIsMinusInfinity) {
  for (const DLDataType dtype : dtypes_of(backend())) {
    Problem p = start(dtype, 3, 300);
    for (int64_t r = 0; r < 3; ++r) at(p, r, p.targets[static_cast<size_t>(r)]) = -kInf;
    verify_with_options(p);
    p.weights = {1, -1, 0};  // +inf, -inf, NaN
    verify(p);
    p.weights.clear();
    p.reduction = XENT_REDUCTION_MEAN;
    verify(p);
  }
}

TEST_P(Special, SmallRowsWithoutAFiniteSoftmax) {
  for (const DLDataType dtype : dtypes_of(backend())) {
    for (const int64_t vocab : {1, 3, 64, 1037, 5000}) {
      for (const int64_t column : {int64_t{0}, vocab / 2, vocab - 1}) {
        Problem p = start(dtype, 7, vocab);
        fill(p, 1, 0, vocab, -kInf);
        at(p, 3, column) = kInf;
        at(p, 5, column) = kNaN;
        verify_with_options(p);
      }
    }
  }
}

TEST_P(Special, SmallNaNBesideInfinities) {
  for (const DLDataType dtype : dtypes_of(backend())) {
    Problem p = start(dtype, 5, 700);
    fill(p, 0, 0, 700, -kInf);
    at(p, 0, 350) = kNaN;
    at(p, 1, 10) = kNaN;
    at(p, 1, 500) = kInf;
    at(p, 2, 10) = kInf;
    at(p, 2, 500) = -kInf;
    fill(p, 3, 0, 700, kInf);
    fill(p, 4, 0, 700, kNaN);
    verify_with_options(p);
  }
}

TEST_P(Special, SmallNaNPoisonsItsRowOnlyAndTheReducedLoss) {
  for (const int32_t reduction : {XENT_REDUCTION_SUM, XENT_REDUCTION_MEAN}) {
    Problem p = start(kF32, 4, 300);
    p.reduction = reduction;
    at(p, 2, 7) = kNaN;
    verify(p);
  }
}

TEST_P(Special, SmallSoftcapMakesInfinitiesFinite) {
  for (const DLDataType dtype : dtypes_of(backend())) {
    Problem p = start(dtype, 5, 700);
    p.softcap = 15;
    at(p, 0, 3) = kInf;
    at(p, 1, 3) = -kInf;
    at(p, 2, p.targets[2]) = kInf;
    at(p, 3, p.targets[3]) = -kInf;
    fill(p, 4, 0, 700, -kInf);
    verify(p);
    p.z_loss = 1e-3;
    p.label_smoothing = 0.1;
    verify(p);
  }
}

TEST_P(Special, SmallOffsets) {
  for (const DLDataType dtype : dtypes_of(backend())) {
    for (const double offset : {1e4, -1e4, 1e30, -1e30}) {
      if (std::fabs(offset) > max_finite(dtype)) continue;
      for (const double scale : {1.0, 0.3}) {
        Problem p = start(dtype, 4, 1037);
        p.logit_scale = scale;
        for (double &x : p.logits) x = round_to(dtype, x + offset);
        verify(p);
        p.label_smoothing = 0.1;
        verify(p);
      }
    }
  }
}

TEST_P(Special, SmallLogitsFarApart) {
  for (const DLDataType dtype : dtypes_of(backend())) {
    const double large = max_finite(dtype);
    for (const double size : {1e3, 6e4, large / 4}) {
      Problem p = start(dtype, 4, 333);
      for (double &x : p.logits) x = round_to(dtype, std::fmin(std::fmax(x * size / 8, -large), large));
      verify(p);
    }
    Problem p = start(dtype, 4, 333);
    for (int64_t r = 0; r < 4; ++r) {
      for (int64_t c = 0; c < 333; c += 2) {
        if (c != p.targets[static_cast<size_t>(r)]) at(p, r, c) = -large;
      }
    }
    verify(p);
  }
}

TEST_P(Special, SmallSmoothingOverManyLowestValues) {
  // The sum of the logits is far beyond the type, their mean is not.
  for (const DLDataType dtype : dtypes_of(backend())) {
    for (const int64_t vocab : {64, 5000}) {
      Problem p = start(dtype, 3, vocab);
      p.label_smoothing = 0.1;
      for (int64_t r = 0; r < 3; ++r) {
        for (int64_t c = r; c < vocab; c += 2) {
          if (c != p.targets[static_cast<size_t>(r)]) at(p, r, c) = -max_finite(dtype);
        }
      }
      verify(p);
    }
  }
}

TEST_P(Special, SmallDenormals) {
  for (const DLDataType dtype : dtypes_of(backend())) {
    Problem p = start(dtype, 4, 333);
    const double tiny = static_cast<double>(ulp_at(dtype, 0));
    for (double &x : p.logits) x = tiny * static_cast<double>(pick(rng_, -9, 9));
    verify(p);
    p.weights.assign(4, 1e-40);  // and gradients that are
    p.quantize();
    verify(p);
  }
}

TEST_P(Special, SmallGradientsDownToTheEndOfTheType) {
  for (const DLDataType dtype : dtypes_of(backend())) {
    Problem p = start(dtype, 4, 333);
    for (int64_t r = 0; r < 4; ++r) {
      for (int64_t c = 0; c < 333; ++c) at(p, r, c) = round_to(dtype, -static_cast<double>(c) / 3);
    }
    verify(p);
    p.grad_dtype = dtype == kF64 ? kF64 : kF32;
    verify(p);
  }
}

TEST_P(Special, SmallZLossBeyondTheType) {
  Problem p = start(kF32, 3, 100);
  p.z_loss = 0.5;
  for (double &x : p.logits) x = round_to(kF32, x + 1e25);
  verify(p);
}

TEST_P(Special, SmallTargetsOutOfRange) {
  for (const DLDataType dtype : dtypes_of(backend())) {
    for (const int32_t reduction : {XENT_REDUCTION_NONE, XENT_REDUCTION_SUM, XENT_REDUCTION_MEAN}) {
      for (const int64_t classes : {40, 45}) {
        Problem p = start(dtype, 8, 45);
        p.reduction = reduction;
        p.classes = classes;
        draw_targets(rng_, p);
        const std::vector<int64_t> wild = {-1, classes, INT64_MIN, INT64_MAX, int64_t{1} << 32, -100};
        for (size_t r = 0; r < wild.size(); ++r) p.targets[r] = wild[r];
        for (int64_t r = 0; r < 8; ++r) fill(p, r, classes, 45, kNaN);
        verify(p);
        p.label_smoothing = 0.1;
        p.z_loss = 1e-3;
        verify(p);
      }
      Problem p = start(dtype, 5, 45);
      p.reduction = reduction;
      p.target_dtype = kI32;
      p.targets = {-1, 45, INT32_MIN, INT32_MAX, 3};
      verify(p);
    }
  }
}

TEST_P(Special, SmallNaNWeightsAndUpstreamOfCountedRows) {
  Problem p = start(kF32, 4, 100);
  p.weights = {1, kNaN, 2, 0};
  verify(p);
  p.weights.clear();
  p.per_row_upstream = true;
  p.upstream = Values{kF32, {1, kNaN, 0, -1}};
  verify(p);
}

TEST_P(Special, SmallZeroUpstreamOfARowWithoutSoftmaxIsNaN) {
  Problem p = start(kF32, 3, 100);
  at(p, 1, 5) = kNaN;
  p.upstream = Values{kF32, {0}};
  verify(p);
}

XENT_BACKENDS(Special);

}  // namespace
}  // namespace xent_test
