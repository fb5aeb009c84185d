// SPDX-FileCopyrightText: the libxent authors
// SPDX-License-Identifier: Apache-2.0

// Layouts: any strides, offsets and alignments, and no byte outside of the rows.

#include <algorithm>
#include <numeric>

#include "generate.hpp"

namespace xent_test {
namespace {

class LayoutTest : public BackendTest {
 protected:
  // Strides of a tensor whose dimensions lie in memory in the order `order`, outermost first, `gap` elements apart.
  static std::vector<int64_t> permuted(const std::vector<int64_t> &shape, const std::vector<size_t> &order,
                                       int64_t gap = 0) {
    std::vector<int64_t> strides(shape.size());
    int64_t next = 1;
    for (size_t i = order.size(); i-- > 0;) {
      strides[order[i]] = next;
      next = next * shape[order[i]] + gap;
    }
    return strides;
  }
  static std::vector<int64_t> with_vocab(const Problem &p) {
    std::vector<int64_t> shape = p.shape;
    shape.push_back(p.vocab);
    return shape;
  }
  Problem start(DLDataType dtype, std::vector<int64_t> shape, int64_t vocab) {
    Problem p = plain(rng_, backend(), dtype, std::move(shape), vocab);
    p.reduction = pick(rng_, 0, 1) == 0 ? XENT_REDUCTION_NONE : XENT_REDUCTION_MEAN;
    p.entropy = p.predicted = true;
    p.label_smoothing = pick(rng_, 0, 1) == 0 ? 0 : 0.1;
    return p;
  }
};

TEST_P(LayoutTest, SmallTransposedSequenceFirst) {
  for (const DLDataType dtype : dtypes_of(backend())) {
    Problem p = start(dtype, {3, 5}, 77);  // (B, S, V) in memory as (S, B, V)
    p.logits_layout.strides = permuted(with_vocab(p), {1, 0, 2});
    verify(p);
    p.targets_layout.strides = {1, 3};
    p.row_output_layout.strides = {1, 3};
    p.grad_layout.strides = p.logits_layout.strides;
    verify(p);
  }
}

TEST_P(LayoutTest, SmallSlicedAndPaddedRows) {
  for (const DLDataType dtype : dtypes_of(backend())) {
    for (const int64_t pad : {1, 3, 8, 51}) {
      Problem p = start(dtype, {4, 3}, 77);
      p.logits_layout.strides = {3 * (77 + pad) + 5, 77 + pad, 1};
      p.grad_layout.strides = {3 * (77 + pad + 2), 77 + pad + 2, 1};
      p.targets_layout.strides = {9, 2};
      p.row_output_layout.strides = {7, 2};
      verify(p);
    }
  }
}

TEST_P(LayoutTest, SmallExpandedInputs) {
  for (const DLDataType dtype : dtypes_of(backend())) {
    Problem p = start(dtype, {4, 3}, 300);
    for (int64_t b = 1; b < 4; ++b) {  // one batch entry, seen four times
      std::copy_n(p.logits.begin(), 900, p.logits.begin() + b * 900);
      std::copy_n(p.targets.begin(), 3, p.targets.begin() + b * 3);
    }
    p.logits_layout.strides = {0, 300, 1};
    p.targets_layout.strides = {0, 1};
    verify(p);
  }
}

TEST_P(LayoutTest, SmallOneColumnSeenAsManyByStrideZero) {
  Problem p = start(kF32, {3}, 40);
  for (int64_t r = 0; r < 3; ++r) {
    for (int64_t c = 0; c < 40; ++c) p.logits[static_cast<size_t>(r * 40 + c)] = p.logits[static_cast<size_t>(r * 40)];
  }
  p.logits_layout.strides = {1, 0};
  verify(p);
}

TEST_P(LayoutTest, SmallNegativeStrides) {
  for (const DLDataType dtype : dtypes_of(backend())) {
    Problem p = start(dtype, {4, 3}, 77);
    p.logits_layout.strides = {-231, 77, 1};
    p.grad_layout.strides = {231, -77, 1};
    p.targets_layout.strides = {-3, -1};
    p.row_output_layout.strides = {3, -1};
    verify(p);
    p.logits_layout.strides = {231, 77, -1};
    p.grad_layout.strides = {-231, -77, -1};
    verify(p);
  }
}

TEST_P(LayoutTest, SmallVocabularyStrides) {
  for (const DLDataType dtype : dtypes_of(backend())) {
    for (const int64_t stride : {2, 3, 7, 64}) {
      for (const int64_t vocab : {1, 9, 300}) {
        Problem p = start(dtype, {5}, vocab);
        p.logits_layout.strides = {vocab * stride + 1, stride};
        verify(p);
        p.grad_layout.strides = {vocab * 2, 2};
        verify(p);
        p.logits_layout.strides.clear();
        verify(p);
      }
    }
  }
}

TEST_P(LayoutTest, SmallClassesInTheMiddle) {
  // (N, C, d1) as PyTorch takes it: rows (N, d1), vocabulary stride d1.
  for (const DLDataType dtype : dtypes_of(backend())) {
    Problem p = start(dtype, {3, 6}, 130);
    p.logits_layout.strides = {130 * 6, 1, 6};
    p.grad_layout.strides = p.logits_layout.strides;
    verify(p);
  }
}

TEST_P(LayoutTest, ALongVocabularyInTheMiddle) {
  for (const DLDataType dtype : dtypes_of(backend())) {
    Problem p = start(dtype, {2, 3}, 20011);
    p.logits_layout.strides = {20011 * 3, 1, 3};
    p.grad_layout.strides = p.logits_layout.strides;
    verify(p);
  }
}

TEST_P(LayoutTest, SmallEveryAlignment) {
  for (const DLDataType dtype : dtypes_of(backend())) {
    for (const int64_t vocab : {37, 1030}) {
      for (int64_t element = 0; element < 16; ++element) {
        Problem p = start(dtype, {3}, vocab);
        p.logits_layout.misalign = element * size_of(dtype);
        p.grad_layout.misalign = pick(rng_, 0, 15) * size_of(dtype);
        verify(p);
        std::swap(p.logits_layout.misalign, p.grad_layout.misalign);
        p.targets_layout.misalign = 8;
        p.row_output_layout.misalign = 8;
        verify(p);
        if (HasFailure()) return;
      }
    }
  }
}

TEST_P(LayoutTest, SmallEveryPairOfAlignments) {
  for (const DLDataType dtype : {kF32, kBf16}) {
    for (int64_t i = 0; i < 16; ++i) {
      for (int64_t j = 0; j < 16; ++j) {
        Problem p = start(dtype, {1}, 71);
        p.logits_layout.misalign = i * size_of(dtype);
        p.grad_layout.misalign = j * size_of(dtype);
        verify(p);
        if (HasFailure()) return;
      }
    }
  }
}

TEST_P(LayoutTest, SmallByteOffsets) {
  for (const DLDataType dtype : dtypes_of(backend())) {
    for (const int64_t offset : {size_of(dtype), int64_t{256}, int64_t{65536}}) {
      Problem p = start(dtype, {3}, 300);
      p.logits_layout.byte_offset = offset;
      p.grad_layout.byte_offset = 3 * size_of(dtype);
      p.targets_layout.byte_offset = 8;
      p.row_output_layout.byte_offset = 16;
      verify(p);
    }
  }
}

TEST_P(LayoutTest, SmallNullStridesArePacked) {
  Problem p = start(kF32, {3, 2}, 300);
  for (Layout *l : {&p.logits_layout, &p.grad_layout, &p.targets_layout, &p.row_output_layout}) l->null_strides = true;
  verify(p);
}

TEST_P(LayoutTest, SmallInterleavedLogitsAndGradient) {
  for (const DLDataType dtype : dtypes_of(backend())) {
    for (const int64_t vocab : {7, 300, 1037}) {
      Problem p = start(dtype, {2, 4}, vocab);
      p.interleave = 2 * vocab + 2 * pick(rng_, 0, 5);
      verify(p);
    }
  }
}

TEST_P(LayoutTest, SmallEightLeadingDimensions) {
  for (const DLDataType dtype : dtypes_of(backend())) {
    Problem p = start(dtype, {2, 1, 3, 2, 1, 2, 1, 2}, 19);
    verify(p);
    std::vector<size_t> order(9);
    std::iota(order.begin(), order.end(), size_t{0});
    std::shuffle(order.begin(), order.end() - 1, rng_);
    p.logits_layout.strides = permuted(with_vocab(p), order, 1);
    std::shuffle(order.begin(), order.end(), rng_);
    p.grad_layout.strides = permuted(with_vocab(p), order, 2);
    std::shuffle(order.begin(), order.end(), rng_);
    order.erase(std::find(order.begin(), order.end(), size_t{8}));
    p.targets_layout.strides = permuted(p.shape, order, 1);
    p.row_output_layout.strides = permuted(p.shape, order, 3);
    verify(p);
  }
}

TEST_P(LayoutTest, SmallNoLeadingDimensions) {
  for (const DLDataType dtype : dtypes_of(backend())) {
    Problem p = start(dtype, {}, 300);
    verify(p);
  }
}

TEST_P(LayoutTest, SmallSizeOneDimensionsWithJunkStrides) {
  const int64_t junk = INT64_MAX / 2;
  for (const int64_t vocab : {1, 300}) {
    Problem p = start(kF32, {1, 4, 1}, vocab);
    p.logits_layout.strides = {junk, vocab, -junk, vocab == 1 ? junk : 1};
    p.grad_layout.strides = {0, vocab, 0, vocab == 1 ? 0 : 1};
    p.targets_layout.strides = {-junk, 1, junk};
    p.row_output_layout.strides = {0, 1, 0};
    verify(p);
  }
}

TEST_P(LayoutTest, SmallStatsAndCountsOfAnyStrides) {
  for (const DLDataType dtype : dtypes_of(backend())) {
    for (const std::vector<int64_t> &strides :
         std::vector<std::vector<int64_t>>{{1, 7}, {3, 1}, {5, 2}, {-2, 1}, {2, -1}}) {
      for (const int32_t reduction : {XENT_REDUCTION_NONE, XENT_REDUCTION_MEAN}) {
        Problem p = start(dtype, {7}, 300);
        p.reduction = reduction;
        p.stats_layout.strides = strides;
        p.counts_layout.strides = {strides[0]};
        verify(p);
      }
    }
  }
}

TEST_P(LayoutTest, SmallNoRows) {
  for (const std::vector<int64_t> &shape : {std::vector<int64_t>{0}, {3, 0}, {0, 5}}) {
    for (const int32_t reduction : {XENT_REDUCTION_NONE, XENT_REDUCTION_SUM, XENT_REDUCTION_MEAN}) {
      Problem p = start(kF32, shape, 300);
      p.reduction = reduction;
      verify(p);
      p.spare_rows = 4;
      verify(p);
      if (reduction != XENT_REDUCTION_MEAN) continue;
      p.empty_mean_is_nan = true;
      verify(p);
    }
  }
}

TEST_P(LayoutTest, SmallNothingOutsideThePages) {
  if (cuda()) GTEST_SKIP() << "guard pages are for host memory; canaries and compute-sanitizer watch the device";
  for (const DLDataType dtype : dtypes_of(backend())) {
    for (const int64_t vocab : {1, 2, 3, 5, 7, 8, 9, 15, 16, 17, 31, 33, 63, 65, 127, 255, 257, 1023, 1025, 2050}) {
      for (const Guard guard : {Guard::kPageEnd, Guard::kPageStart}) {
        for (const int64_t column : {1, 2}) {
          Problem p = start(dtype, {pick(rng_, 1, 3)}, vocab);
          if (column != 1) {
            p.logits_layout.strides = p.grad_layout.strides = {vocab * column, column};
          }
          for (Layout *l : {&p.logits_layout, &p.grad_layout, &p.targets_layout, &p.row_output_layout}) {
            l->guard = guard;
          }
          verify(p);
          if (HasFailure()) return;
        }
      }
    }
  }
}

TEST_P(LayoutTest, LongRowsAtTheEndOfAPage) {
  if (cuda()) GTEST_SKIP() << "guard pages are for host memory; canaries and compute-sanitizer watch the device";
  for (const DLDataType dtype : dtypes_of(backend())) {
    for (const int64_t vocab : {16385, 33001}) {
      for (const Guard guard : {Guard::kPageEnd, Guard::kPageStart}) {
        Problem p = start(dtype, {1}, vocab);
        p.logits_layout.guard = p.grad_layout.guard = guard;
        verify(p);
      }
    }
  }
}

XENT_BACKENDS(LayoutTest);

}  // namespace
}  // namespace xent_test
