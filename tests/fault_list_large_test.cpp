// SPDX-FileCopyrightText: the libxent authors
// SPDX-License-Identifier: Apache-2.0

// Faults A1 to A3 of the list in fault_list_test.cpp: tensors beyond 2^31 and 2^32 elements. The host maps far more
// address space than memory and touches only the rows that count; a GPU takes real memory where it has enough.

#include <sys/mman.h>

#include <algorithm>
#include <cstring>

#include "generate.hpp"

namespace xent_test {
namespace {

// Address space without memory behind it until it is touched; on a GPU memory.
class Expanse {
 public:
  Expanse(Device *device, int64_t bytes) : device_(device), bytes_(static_cast<size_t>(bytes)) {
    if (host()) {
      void *p = mmap(nullptr, bytes_, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
      base_ = p == MAP_FAILED ? nullptr : static_cast<uint8_t *>(p);
    } else if (device->free_bytes() > bytes_ + (size_t{2} << 30)) {
      base_ = static_cast<uint8_t *>(device->allocate(bytes_));
    }
  }
  ~Expanse() {
    if (base_ == nullptr) return;
    if (host()) {
      munmap(base_, bytes_);
    } else {
      device_->release(base_);
    }
  }
  Expanse(const Expanse &) = delete;
  Expanse &operator=(const Expanse &) = delete;
  uint8_t *base() const { return base_; }

 private:
  bool host() const { return device_->dl().device_type == kDLCPU; }
  Device *device_;
  size_t bytes_;
  uint8_t *base_ = nullptr;
};

class FaultListLarge : public BackendTest {
 protected:
  // `rows` rows of `vocab` logits, `row_stride` elements apart; only `counted` rows have a target, each with logits of
  // its own. Compares loss and gradient of each with those of the row alone.
  void run_sparse(DLDataType dtype, int64_t rows, int64_t vocab, int64_t row_stride, std::vector<int64_t> counted) {
    const int64_t size = size_of(dtype), bytes = ((rows - 1) * row_stride + vocab) * size;
    Expanse logits(device_, bytes), grad(device_, bytes);
    if (logits.base() == nullptr || grad.base() == nullptr) {
      GTEST_SKIP() << "not enough memory for two tensors of " << bytes << " bytes";
    }
    Problem alone = plain(rng_, backend(), dtype, {static_cast<int64_t>(counted.size())}, vocab);
    alone.reduction = XENT_REDUCTION_NONE;
    const auto expected = run(alone, Mode::kForwardBackward);
    ASSERT_TRUE(expected);
    ASSERT_TRUE(check(alone, *expected, Mode::kForwardBackward));

    std::vector<uint8_t> row(static_cast<size_t>(vocab * size));
    std::vector<int64_t> targets(static_cast<size_t>(rows), -100);
    for (size_t i = 0; i < counted.size(); ++i) {
      for (int64_t c = 0; c < vocab; ++c) {
        const uint64_t bits =
            encode_float(dtype, alone.logits[i * static_cast<size_t>(vocab) + static_cast<size_t>(c)]);
        std::memcpy(row.data() + c * size, &bits, static_cast<size_t>(size));
      }
      device_->copy_in(logits.base() + counted[i] * row_stride * size, row.data(), row.size());
      targets[static_cast<size_t>(counted[i])] = alone.targets[i];
    }
    Tensor target(device_, kI64, {rows}, {}), loss(device_, alone.acc(), {rows}, {}),
        stats(device_, alone.acc(), {rows, 2}, {});
    target.fill(targets);
    for (Tensor *t : {&loss, &stats}) {
      t->allow_writes();
      t->poison();
    }
    for (Tensor *t : {&target, &loss, &stats}) t->memory().upload();

    Problem whole = alone;
    whole.shape = {rows};
    whole.ignore_index = -100;
    xent_error err = {};
    err.struct_size = sizeof(err);
    const auto plan = make_plan(whole, &err);
    ASSERT_TRUE(plan) << err.message;
    xent_plan_info info = {};
    info.struct_size = sizeof(info);
    ASSERT_EQ(xent_plan_get_info(plan.get(), &info, &err), XENT_OK);
    const size_t need = std::max(info.forward_workspace_bytes, info.backward_workspace_bytes);
    Memory workspace(device_, static_cast<int64_t>(need), 0, Guard::kCanary);
    int64_t shape[2] = {rows, vocab}, strides[2] = {row_stride, 1};
    DLTensor x = {logits.base(), device_->dl(), 2, dtype, shape, strides, 0}, dx = x;
    dx.data = grad.base();
    xent_forward_args f = {};
    f.struct_size = sizeof(f);
    f.workspace = workspace.address();
    f.workspace_bytes = need;
    f.logits = &x;
    f.targets = target.dl();
    f.loss = loss.dl();
    f.stats = stats.dl();
    ASSERT_EQ(xent_forward(plan.get(), &f, &err), XENT_OK) << err.message;
    xent_backward_args b = {};
    b.struct_size = sizeof(b);
    b.workspace = f.workspace;
    b.workspace_bytes = need;
    b.logits = &x;
    b.targets = target.dl();
    b.stats = stats.dl();
    b.grad_logits = &dx;
    ASSERT_EQ(xent_backward(plan.get(), &b, &err), XENT_OK) << err.message;
    device_->synchronize();

    ASSERT_EQ(loss.memory().download(), "");
    const std::vector<uint64_t> got = loss.bits();
    for (size_t r = 0, i = 0; r < got.size(); ++r) {
      const bool counts = i < counted.size() && counted[i] == static_cast<int64_t>(r);
      ASSERT_EQ(got[r], counts ? expected->loss[i] : 0) << "loss of row " << r;
      if (!counts) continue;
      device_->copy_out(row.data(), grad.base() + counted[i] * row_stride * size, row.size());
      for (int64_t c = 0; c < vocab; ++c) {
        ASSERT_EQ(load_bits(row.data() + c * size, size),
                  expected->grad[i * static_cast<size_t>(vocab) + static_cast<size_t>(c)])
            << "gradient of row " << r << " column " << c;
      }
      ++i;
    }
  }
};

TEST_P(FaultListLarge, A01_MoreThanTwoToThe31Logits) {
  if (!cuda()) GTEST_SKIP() << "zeroing the gradient of 18423 rows takes real memory; A03 goes there with few rows";
  run_sparse(kBf16, 18423, 131072, 131072, {0, 15000, 16383, 16384, 18000, 18422});
}

TEST_P(FaultListLarge, A02_MoreThanTwoToThe32Logits) {
  if (!cuda()) GTEST_SKIP() << "zeroing the gradient of 98256 rows takes real memory; A03 goes there with few rows";
  run_sparse(kF16, 48 * 2047, 50000, 50000, {0, 42949, 42950, 85899, 85900, 88021, 98255});
}

TEST_P(FaultListLarge, A02_MoreThanTwoToThe32ExpandedLogits) {
  // One row seen 98256 times; forward alone.
  Problem p = plain(rng_, backend(), kF16, {1}, 50000);
  p.reduction = XENT_REDUCTION_NONE;
  p.ignore_index = -100;
  const auto expected = run(p, Mode::kForward);
  ASSERT_TRUE(expected);
  const int64_t rows = 48 * 2047;
  std::vector<int64_t> targets(static_cast<size_t>(rows), -100);
  const std::vector<int64_t> counted = {0, 42949, 42950, 85899, 85900, 98255};
  for (const int64_t r : counted) targets[static_cast<size_t>(r)] = p.targets[0];
  Tensor row(device_, kF16, {50000}, {}), target(device_, kI64, {rows}, {}), loss(device_, kF32, {rows}, {});
  row.fill(p.logits);
  target.fill(targets);
  loss.allow_writes();
  loss.poison();
  for (Tensor *t : {&row, &target, &loss}) t->memory().upload();
  p.shape = {rows};
  xent_error err = {};
  err.struct_size = sizeof(err);
  const auto plan = make_plan(p, &err);
  ASSERT_TRUE(plan) << err.message;
  xent_plan_info info = {};
  info.struct_size = sizeof(info);
  ASSERT_EQ(xent_plan_get_info(plan.get(), &info, &err), XENT_OK);
  Memory workspace(device_, static_cast<int64_t>(info.forward_workspace_bytes), 0, Guard::kCanary);
  int64_t shape[2] = {rows, 50000}, strides[2] = {0, 1};
  DLTensor logits = *row.dl();
  logits.ndim = 2;
  logits.shape = shape;
  logits.strides = strides;
  xent_forward_args f = {};
  f.struct_size = sizeof(f);
  f.workspace = workspace.address();
  f.workspace_bytes = info.forward_workspace_bytes;
  f.logits = &logits;
  f.targets = target.dl();
  f.loss = loss.dl();
  ASSERT_EQ(xent_forward(plan.get(), &f, &err), XENT_OK) << err.message;
  device_->synchronize();
  ASSERT_EQ(loss.memory().download(), "");
  const std::vector<uint64_t> got = loss.bits();
  for (size_t r = 0; r < got.size(); ++r) {
    ASSERT_EQ(got[r], targets[r] == -100 ? 0 : expected->loss[0]) << "row " << r;
  }
}

TEST_P(FaultListLarge, A03_StrideProductsBeyondTwoToThe31And32) {
  for (const DLDataType dtype : {kBf16, kF32}) {
    run_sparse(dtype, 4, 333, (int64_t{1} << 30) + 7, {1, 2, 3});
    run_sparse(dtype, 3, 333, (int64_t{1} << 31) + 64, {0, 1, 2});
    run_sparse(dtype, 2, 333, (int64_t{1} << 32) + 1, {0, 1});
  }
}

// Not of the list: a gradient larger than every cache, which a backend may store past them.
TEST_P(FaultListLarge, GradientsBeyondTheCaches) {
  for (const DLDataType dtype : dtypes_of(backend())) {
    const int64_t rows = 160000000 / (1003 * size_of(dtype));
    const std::vector<int64_t> counted = {0, 1, 2, 3, 77, rows / 2, rows - 2, rows - 1};
    run_sparse(dtype, rows, 1003, 1003, counted);
    run_sparse(dtype, rows, 1003, 1100, counted);
  }
}

XENT_BACKENDS(FaultListLarge);

}  // namespace
}  // namespace xent_test
