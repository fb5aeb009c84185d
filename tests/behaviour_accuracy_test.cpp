// SPDX-FileCopyrightText: the libxent authors
// SPDX-License-Identifier: Apache-2.0

// Accuracy: how much of each bar is used, by type and family of inputs.

#include <cstdio>

#include "generate.hpp"

namespace xent_test {
namespace {

class Accuracy : public BackendTest {
 protected:
  void measure(DLDataType dtype, Family family, double softcap) {
    Worst worst;
    for (const int64_t vocab : {10, 1000, 16387, 128256}) {
      if (vocab > 100000 && dtype == kF64) continue;
      const int64_t rows = vocab > 10000 ? 1 : vocab > 100 ? 20 : 200;
      for (const double smoothing : {0.0, 0.1}) {
        Problem p = plain(rng_, backend(), dtype, {rows}, vocab, family);
        p.reduction = XENT_REDUCTION_NONE;
        p.label_smoothing = smoothing;
        p.softcap = softcap;
        p.entropy = true;
        p.grad_dtype = dtype == kF64 ? kF64 : kF32;  // 16-bit storage would hide the arithmetic
        verify(p, &worst);
      }
    }
    std::printf("%-4s %-8s %-12s softcap %2g  error / bar: loss %.3f  lse %.3f  entropy %.3f  gradient %.3f\n",
                name_of(backend()), name_of(dtype), name_of(family), softcap, worst.loss, worst.lse, worst.entropy,
                worst.grad);
  }
};

TEST_P(Accuracy, ErrorsInUnitsOfTheBar) {
  for (const DLDataType dtype : dtypes_of(backend())) {
    for (const Family family : kFamilies) measure(dtype, family, 0);
    measure(dtype, Family::kRandom, 30);
    measure(dtype, Family::kHeavyTailed, 30);
  }
}

TEST_P(Accuracy, SumsOverManyRows) {
  // Equal losses: a running sum in float32 drifts, and all in one direction.
  for (const int32_t reduction : {XENT_REDUCTION_SUM, XENT_REDUCTION_MEAN}) {
    Problem p = plain(rng_, backend(), kF32, {200000}, 3);
    for (size_t i = 0; i < p.logits.size(); ++i) p.logits[i] = i % 3 == 0 ? 0.75 : 0;
    for (int64_t &t : p.targets) t = 1;
    p.reduction = reduction;
    verify(p);
  }
}

XENT_BACKENDS(Accuracy);

}  // namespace
}  // namespace xent_test
