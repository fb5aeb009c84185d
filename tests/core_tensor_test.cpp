// SPDX-FileCopyrightText: the libxent authors
// SPDX-License-Identifier: Apache-2.0

// The validator, with a row for each DLPack pitfall that a C library meets. What remains is the bindings': who owns a
// capsule and when its deleter runs, stream numbers, copies on import, immutable arrays.
#include "core/tensor.hpp"

#include <gtest/gtest.h>
#include <xent/dlpack_util.h>

#include <functional>
#include <string>
#include <vector>

#include "common/dtype.hpp"
#include "common/view.hpp"

namespace xent {
namespace {

constexpr DLDataType kFloat32{kDLFloat, 32, 1};
constexpr DLDataType kInt64{kDLInt, 64, 1};
constexpr int64_t kVocab = 8;

// A DLTensor with storage for its shape and strides. `data` is a number: validation never follows it.
struct Tensor {
  std::vector<int64_t> shape;
  std::vector<int64_t> strides;  // empty: NULL
  DLDataType dtype = kFloat32;
  DLDevice device{kDLCPU, 0};
  uintptr_t data = 0x10000;
  uint64_t byte_offset = 0;

  DLTensor get() {
    DLTensor out{};
    out.data = reinterpret_cast<void *>(data);
    out.device = device;
    out.ndim = static_cast<int32_t>(shape.size());
    out.dtype = dtype;
    out.shape = shape.empty() ? nullptr : shape.data();
    out.strides = strides.empty() ? nullptr : strides.data();
    out.byte_offset = byte_offset;
    return out;
  }
};

class TensorTest : public testing::Test {
 protected:
  TensorTest() {
    options.device = DLDevice{kDLCPU, 0};
    options.logits_dtype = kFloat32;
    options.target_dtype = kInt64;
    options.vocab = kVocab;
    options.classes = kVocab;
    options.max_rows = 1000;
    err.struct_size = sizeof err;
  }

  xent_status logits(const DLTensor &tensor) {
    TensorReader reader("xent_forward", options, &err);
    const xent_status status = reader.read_logits(tensor, &view);
    rows = reader.rows();
    return status;
  }
  xent_status logits(Tensor tensor) { return logits(tensor.get()); }

  // Another tensor, beside logits of the leading shape `leading`.
  xent_status beside(std::vector<int64_t> leading, const TensorRule &rule, Tensor tensor) {
    TensorReader reader("xent_forward", options, &err);
    leading.push_back(kVocab);
    Tensor base{leading, {}};
    base.device = device;
    const DLTensor base_tensor = base.get();
    EXPECT_EQ(reader.read_logits(base_tensor, &view), XENT_OK) << err.message;
    view = xent_view{};
    return reader.read(rule, tensor.get(), &view);
  }

  void refused(xent_status status, const std::string &message) {
    EXPECT_EQ(status, XENT_INVALID_ARGUMENT);
    EXPECT_NE(std::string(err.message).find(message), std::string::npos) << "message: " << err.message;
  }

  void expect_rows(std::vector<int64_t> shape, std::vector<int64_t> strides) {
    ASSERT_EQ(view.rank, static_cast<int32_t>(shape.size()));
    for (size_t i = 0; i < shape.size(); ++i) {
      EXPECT_EQ(view.shape[i], shape[i]) << i;
      EXPECT_EQ(view.stride[i], strides[i]) << i;
    }
  }

  xent_options options{};
  DLDevice device{kDLCPU, 0};
  xent_error err{};
  xent_view view{};
  int64_t rows = -1;
};

const TensorRule kTargets{"targets", kI64, Form::kRows};
const TensorRule kLoss{"loss", kF32, Form::kScalar};

TEST_F(TensorTest, Pitfall01_NullStridesArePacked) {
  ASSERT_EQ(logits(Tensor{{4, 5, kVocab}, {}}), XENT_OK) << err.message;
  expect_rows({20}, {kVocab});
  EXPECT_EQ(view.col_stride, 1);
  EXPECT_EQ(rows, 20);
}

TEST_F(TensorTest, Pitfall02_StridesOfSizeOneAreIgnored) {
  ASSERT_EQ(logits(Tensor{{1, 6, 1, kVocab}, {INT64_MAX, kVocab, INT64_MIN, 1}}), XENT_OK) << err.message;
  expect_rows({6}, {kVocab});
  options.vocab = options.classes = 1;
  ASSERT_EQ(logits(Tensor{{6, 1}, {1, INT64_MAX}}), XENT_OK) << err.message;
  expect_rows({6}, {1});
  EXPECT_EQ(view.col_stride, 1);
}

TEST_F(TensorTest, Pitfall03_EmptyTensorsMayHoldAnything) {
  Tensor empty{{3, 0, kVocab}, {INT64_MAX, -7, INT64_MIN}};
  empty.data = 0;
  empty.byte_offset = UINT64_MAX;
  ASSERT_EQ(logits(empty), XENT_OK) << err.message;
  EXPECT_FALSE(present(view));
  EXPECT_EQ(rows, 0);
  empty.data = 3;  // unaligned
  EXPECT_EQ(logits(empty), XENT_OK) << err.message;
  // Sizes whose product overflows are no rows either.
  EXPECT_EQ(logits(Tensor{{INT64_MAX, 0, INT64_MAX, kVocab}, {}}), XENT_OK) << err.message;
  Tensor targets{{0}, {}, kInt64};
  targets.data = 0;
  ASSERT_EQ(beside({0}, kTargets, targets), XENT_OK) << err.message;
  EXPECT_FALSE(present(view));
}

TEST_F(TensorTest, Pitfall04_ByteOffsetIsApplied) {
  Tensor tensor{{2, kVocab}, {}};
  tensor.byte_offset = 20;
  ASSERT_EQ(logits(tensor), XENT_OK) << err.message;
  EXPECT_EQ(reinterpret_cast<uintptr_t>(view.data), 0x10000u + 20u);
}

TEST_F(TensorTest, Pitfall05_ElementAlignmentIsEnoughAndNeeded) {
  Tensor tensor{{2, kVocab}, {}};
  tensor.data = 0x10004;
  EXPECT_EQ(logits(tensor), XENT_OK) << err.message;
  tensor.data = 0x10002;
  refused(logits(tensor), "xent_forward: logits: address 0x10002 (data + byte_offset) is not aligned to the 4 bytes");
  tensor.byte_offset = 2;  // only the sum counts
  EXPECT_EQ(logits(tensor), XENT_OK) << err.message;
  options.logits_dtype = DLDataType{kDLBfloat, 16, 1};
  tensor.dtype = options.logits_dtype;
  tensor.byte_offset = 0;
  EXPECT_EQ(logits(tensor), XENT_OK) << err.message;
}

TEST_F(TensorTest, Pitfall07_ReadOnlyIsRefusedForOutputsOnly) {
  DLManagedTensorVersioned managed{};
  managed.version.major = 1;
  const DLTensor *out = nullptr;
  EXPECT_EQ(xent_dlpack_borrow(&managed, XENT_DLPACK_WRITE, "loss", &out, &err), XENT_OK);
  EXPECT_EQ(out, &managed.dl_tensor);
  managed.flags = DLPACK_FLAG_BITMASK_READ_ONLY;
  EXPECT_EQ(xent_dlpack_borrow(&managed, XENT_DLPACK_READ, "logits", &out, &err), XENT_OK);
  out = nullptr;
  refused(xent_dlpack_borrow(&managed, XENT_DLPACK_WRITE, "loss", &out, &err), "loss: is read-only");
  EXPECT_EQ(out, nullptr);
  managed.flags = 1u << 2;
  refused(xent_dlpack_borrow(&managed, XENT_DLPACK_READ, "logits", &out, &err), "padded");
  EXPECT_EQ(xent_dlpack_borrow(&managed, XENT_DLPACK_READ, "logits", &out, nullptr), XENT_INVALID_ARGUMENT);
  EXPECT_EQ(xent_dlpack_borrow(nullptr, XENT_DLPACK_READ, "logits", &out, &err), XENT_INVALID_ARGUMENT);
}

TEST_F(TensorTest, Pitfall12_DeviceIdIsCompared) {
  options.device = DLDevice{kDLCUDA, 1};
  Tensor tensor{{2, kVocab}, {}};
  tensor.device = DLDevice{kDLCUDA, 1};
  EXPECT_EQ(logits(tensor), XENT_OK) << err.message;
  tensor.device = DLDevice{kDLCUDA, 0};
  refused(logits(tensor), "logits: is on device CUDA:0; the plan's device is CUDA:1");
  tensor.device = DLDevice{kDLCPU, 1};
  refused(logits(tensor), "logits: is on device CPU; the plan's device is CUDA:1");
  tensor.device = DLDevice{kDLROCM, 1};
  refused(logits(tensor), "ROCm:1");
}

TEST_F(TensorTest, Pitfall13_ManagedAndPinnedMemory) {
  Tensor tensor{{2, kVocab}, {}};
  tensor.device = DLDevice{kDLCUDAHost, 3};
  EXPECT_EQ(logits(tensor), XENT_OK) << err.message;
  tensor.device = DLDevice{kDLCPU, 5};  // host memory has no number
  EXPECT_EQ(logits(tensor), XENT_OK) << err.message;
  tensor.device = DLDevice{kDLCUDAManaged, 0};
  refused(logits(tensor), "CUDAManaged:0");
  options.device = DLDevice{kDLCUDA, 0};
  EXPECT_EQ(logits(tensor), XENT_OK) << err.message;
  tensor.device = DLDevice{kDLCUDAManaged, 1};
  refused(logits(tensor), "CUDAManaged:1");
  tensor.device = DLDevice{kDLCUDAHost, 0};
  refused(logits(tensor), "CUDAHost");
}

TEST_F(TensorTest, Pitfall14_BoolIsItsOwnType) {
  const TensorRule mask{"mask", kBool | kU8 | kI32 | kI64 | kF32, Form::kRows};
  for (const DLDataType type :
       {DLDataType{6, 8, 1}, DLDataType{kDLUInt, 8, 1}, DLDataType{kDLInt, 32, 1}, kInt64, kFloat32}) {
    EXPECT_EQ(beside({3}, mask, Tensor{{3}, {}, type}), XENT_OK) << err.message;
  }
  for (const DLDataType type :
       {DLDataType{6, 1, 1}, DLDataType{kDLInt, 8, 1}, DLDataType{kDLUInt, 32, 1}, DLDataType{6, 8, 8}}) {
    refused(beside({3}, mask, Tensor{{3}, {}, type}), "this plan takes float32 or int32 or int64 or uint8 or bool");
  }
}

TEST_F(TensorTest, Pitfall15_TheWholeTypeIsCompared) {
  options.logits_dtype = DLDataType{kDLBfloat, 16, 1};
  Tensor tensor{{2, kVocab}, {}, options.logits_dtype};
  EXPECT_EQ(logits(tensor), XENT_OK) << err.message;
  tensor.dtype.bits = 8;
  refused(logits(tensor), "logits: dtype is bfloat8; this plan takes bfloat16");
  tensor.dtype = DLDataType{kDLBfloat, 16, 2};
  refused(logits(tensor), "bfloat16x2");
  tensor.dtype = DLDataType{kDLFloat, 16, 1};
  refused(logits(tensor), "float16");
  tensor.dtype = DLDataType{99, 16, 1};
  refused(logits(tensor), "(code 99, bits 16)");
  tensor.dtype = DLDataType{kDLBfloat, 16, 0};
  refused(logits(tensor), "bfloat16x0");
}

TEST_F(TensorTest, Pitfall17_AnotherMajorVersionIsNotRead) {
  DLManagedTensorVersioned managed{};
  managed.version.major = 2;
  const DLTensor *out = nullptr;
  refused(xent_dlpack_borrow(&managed, XENT_DLPACK_READ, "logits", &out, &err), "major version is not 1");
}

TEST_F(TensorTest, Pitfall20_NothingIsTrusted) {
  const auto with = [](const std::function<void(DLTensor *)> &change) {
    static Tensor base;
    base = Tensor{{2, kVocab}, {kVocab, 1}};
    DLTensor out = base.get();
    change(&out);
    return out;
  };
  refused(logits(with([](DLTensor *t) { t->ndim = -1; })), "ndim is -1");
  refused(logits(with([](DLTensor *t) { t->ndim = 10; })), "ndim is 10; it must be in [0, 9]");
  refused(logits(with([](DLTensor *t) { t->shape = nullptr; })), "shape is NULL with ndim 2");
  refused(logits(with([](DLTensor *t) { t->data = nullptr; })), "data is NULL with shape [2, 8]");
  refused(logits(with([](DLTensor *t) { t->shape[0] = -2; })), "shape [-2, 8] has a negative size");
  refused(logits(with([](DLTensor *t) { t->shape[0] = 1001; })), "has more rows than the plan's max_rows, 1000");
  refused(logits(with([](DLTensor *t) { t->shape[1] = 7; })),
          "shape [2, 7]; it must be [..., vocab], and the plan's vocab is 8");
  refused(logits(with([](DLTensor *t) { t->ndim = 0; })), "must be [..., vocab]");
  refused(logits(with([](DLTensor *t) { t->byte_offset = UINT64_MAX - 0xffff; })), "leaves the address space");
  refused(logits(with([](DLTensor *t) { t->strides[0] = INT64_MAX; })), "spans more than 2^61 bytes");
  refused(logits(with([](DLTensor *t) { t->strides[0] = INT64_MIN; })), "spans more than 2^61 bytes");
  refused(logits(with([](DLTensor *t) { t->strides[1] = int64_t{1} << 58; })), "spans more than 2^61 bytes");
  refused(logits(with([](DLTensor *t) { t->strides[1] = INT64_MAX / 6; })), "spans more than 2^61 bytes");
  refused(logits(with([](DLTensor *t) { t->strides[0] = -0x10000; })), "leaves the address space");
}

TEST_F(TensorTest, Pitfall20_RowProductsDoNotWrap) {
  // 2^32 * 2^32 rows wrap to 0 in 64 bits.
  refused(logits(Tensor{{int64_t{1} << 32, int64_t{1} << 32, kVocab}, {0, 0, 1}}), "has more rows than the plan's");
  refused(logits(Tensor{{INT64_MAX, 3, kVocab}, {0, 0, 1}}), "has more rows than the plan's");
}

TEST_F(TensorTest, LeadingDimensionsMergeAsFarAsStridesAllow) {
  ASSERT_EQ(logits(Tensor{{2, 3, 4, kVocab}, {120, 40, 10, 1}}), XENT_OK) << err.message;
  expect_rows({24}, {10});
  ASSERT_EQ(logits(Tensor{{2, 3, 4, kVocab}, {1000, 40, 10, 1}}), XENT_OK) << err.message;
  expect_rows({2, 12}, {1000, 10});
  ASSERT_EQ(logits(Tensor{{5, 3, kVocab}, {8, 40, 1}}), XENT_OK) << err.message;  // transposed
  expect_rows({5, 3}, {8, 40});
  ASSERT_EQ(logits(Tensor{{5, 3, kVocab}, {0, 0, 1}}), XENT_OK) << err.message;  // expanded
  expect_rows({15}, {0});
  Tensor negative{{4, kVocab}, {-8, -1}};
  ASSERT_EQ(logits(negative), XENT_OK) << err.message;
  expect_rows({4}, {-8});
  EXPECT_EQ(view.col_stride, -1);
  ASSERT_EQ(logits(Tensor{{2, 5, kVocab}, {40, 1, 5}}), XENT_OK) << err.message;  // (N, C, d1)
  EXPECT_EQ(view.col_stride, 5);
}

TEST_F(TensorTest, EveryOrderOfRowsIsKept) {
  // The rows of the view, one by one, are those of the tensor in row-major order.
  const std::vector<int64_t> shape{2, 1, 3, 2, 2};
  const std::vector<int64_t> strides{-96, 7, 8, 200, 400};
  Tensor tensor{shape, strides};
  tensor.shape.push_back(kVocab);
  tensor.strides.push_back(1);
  ASSERT_EQ(logits(tensor), XENT_OK) << err.message;
  int64_t row = 0;
  for (int64_t a = 0; a < 2; ++a)
    for (int64_t c = 0; c < 3; ++c)
      for (int64_t d = 0; d < 2; ++d)
        for (int64_t e = 0; e < 2; ++e) {
          EXPECT_EQ(row_offset(view, row), -96 * a + 8 * c + 200 * d + 400 * e) << row;
          ++row;
        }
  EXPECT_EQ(row, rows);
}

TEST_F(TensorTest, EightLeadingDimensions) {
  ASSERT_EQ(logits(Tensor{{2, 1, 2, 1, 2, 1, 2, 2, kVocab}, {}}), XENT_OK) << err.message;
  expect_rows({32}, {kVocab});
  ASSERT_EQ(logits(Tensor{{kVocab}, {}}), XENT_OK) << err.message;
  EXPECT_EQ(rows, 1);
  EXPECT_EQ(view.rank, 0);
}

TEST_F(TensorTest, ShapesOfRowTensors) {
  EXPECT_EQ(beside({4, 8}, kTargets, Tensor{{4, 8}, {1, 4}, kInt64}), XENT_OK) << err.message;
  refused(beside({4, 8}, kTargets, Tensor{{4, 7}, {}, kInt64}),
          "xent_forward: targets: shape [4, 7] does not match the logits' leading shape [4, 8]");
  refused(beside({4, 8}, kTargets, Tensor{{32}, {}, kInt64}), "shape [32] does not match");
  refused(beside({4, 8}, kTargets, Tensor{{4, 8, 1}, {}, kInt64}), "shape [4, 8, 1] does not match");
  refused(beside({4, 8}, kTargets, Tensor{{}, {}, kInt64}), "shape [] does not match");
}

TEST_F(TensorTest, ShapesOfScalars) {
  EXPECT_EQ(beside({4}, kLoss, Tensor{{}, {}}), XENT_OK) << err.message;
  EXPECT_EQ(beside({4}, kLoss, Tensor{{1}, {-9}}), XENT_OK) << err.message;
  refused(beside({4}, kLoss, Tensor{{4}, {}}), "loss: shape [4]; it must be [] or [1]");
  refused(beside({4}, kLoss, Tensor{{1, 1}, {}}), "loss: shape [1, 1]");
  refused(beside({4}, kLoss, Tensor{{0}, {}}), "loss: shape [0]");
  const TensorRule upstream{"grad_loss", kAnyFloat, Form::kScalarOrRows};
  EXPECT_EQ(beside({4}, upstream, Tensor{{4}, {0}}), XENT_OK) << err.message;
  expect_rows({4}, {0});
  EXPECT_EQ(beside({4}, upstream, Tensor{{1}, {}}), XENT_OK) << err.message;
  EXPECT_EQ(view.rank, 0);
  refused(beside({4}, upstream, Tensor{{5}, {}}), "it must be [], [1] or the logits' leading shape [4]");
}

TEST_F(TensorTest, ShapesOfMatricesPairsAndTriples) {
  const TensorRule gradient{"grad_logits", kF32, Form::kMatrix};
  EXPECT_EQ(beside({4}, gradient, Tensor{{4, kVocab}, {1, 4}}), XENT_OK) << err.message;
  EXPECT_EQ(view.col_stride, 4);
  refused(beside({4}, gradient, Tensor{{4, 9}, {}}), "grad_logits: shape [4, 9]; it must be [..., vocab] = [4, 8]");
  refused(beside({4}, gradient, Tensor{{}, {}}), "grad_logits: shape []");
  const TensorRule stats{"stats", kF32, Form::kPairs};
  EXPECT_EQ(beside({2, 2}, stats, Tensor{{4, 2}, {1, 4}}), XENT_OK) << err.message;
  EXPECT_EQ(view.col_stride, 4);
  refused(beside({2, 2}, stats, Tensor{{2, 2, 2}, {}}), "it must be [rows, 2] = [4, 2]");
  const TensorRule counts{"row_counts", kI64, Form::kTriple};
  EXPECT_EQ(beside({4}, counts, Tensor{{3}, {-2}, kInt64}), XENT_OK) << err.message;
  EXPECT_EQ(view.col_stride, -2);
  refused(beside({4}, counts, Tensor{{4}, {}, kInt64}), "it must be [3]");
}

}  // namespace
}  // namespace xent
