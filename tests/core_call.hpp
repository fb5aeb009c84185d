// SPDX-FileCopyrightText: the libxent authors
// SPDX-License-Identifier: Apache-2.0

// One call with every tensor that it may take, in buffers that are watched: tests change one thing at a time.
#pragma once

#include <xent/xent.h>

#include <cstring>
#include <functional>
#include <optional>
#include <vector>

inline constexpr DLDataType kFloat32{kDLFloat, 32, 1};
inline constexpr DLDataType kFloat64{kDLFloat, 64, 1};
inline constexpr DLDataType kBFloat16{kDLBfloat, 16, 1};
inline constexpr DLDataType kInt32{kDLInt, 32, 1};
inline constexpr DLDataType kInt64{kDLInt, 64, 1};

// A tensor with memory of its own: room for 64 elements of 8 bytes, all bytes 0xa5 but for inputs that are set.
struct CallTensor {
  CallTensor(std::vector<int64_t> shape_, DLDataType dtype_) : shape(std::move(shape_)), dtype(dtype_) {
    memory.assign(64, 0xa5a5a5a5a5a5a5a5u);
    data = memory.data();
  }
  CallTensor(const CallTensor &) = delete;
  CallTensor &operator=(const CallTensor &) = delete;

  template <class T>
  void set(const std::vector<T> &values) {
    std::memcpy(memory.data(), values.data(), values.size() * sizeof(T));
  }
  const DLTensor *get() {
    if (absent) return nullptr;
    tensor = DLTensor{};
    tensor.data = data;
    tensor.device = device;
    tensor.ndim = static_cast<int32_t>(shape.size());
    tensor.dtype = dtype;
    tensor.shape = shape.data();
    tensor.strides = strides.empty() ? nullptr : strides.data();
    tensor.byte_offset = byte_offset;
    return &tensor;
  }

  std::vector<int64_t> shape;
  std::vector<int64_t> strides;
  DLDataType dtype;
  DLDevice device{kDLCPU, 0};
  void *data;
  uint64_t byte_offset = 0;
  bool absent = false;
  std::vector<uint64_t> memory;
  DLTensor tensor{};
};

// Two by three rows of four columns.
struct CallSetup {
  CallSetup() {
    desc.struct_size = sizeof desc;
    desc.vocab = 4;
    desc.max_rows = 6;
    desc.reduction = XENT_REDUCTION_MEAN;
    desc.flags = XENT_PLAN_ENTROPY | XENT_PLAN_PREDICTED;
    forward.struct_size = sizeof forward;
    backward.struct_size = sizeof backward;
    both.struct_size = sizeof both;
    logits.set<float>(std::vector<float>(24, 0.5f));
    targets.set<int64_t>({0, 1, 2, 3, 0, 1});
    mask.set<uint8_t>({1, 1, 0, 1, 1, 1});
    row_weights.set<float>({1, 2, 3, 4, 5, 6});
    denominator.set<float>({5});
    stats.set<float>({0.5f, 4, 0.5f, 4, 0.5f, 4, 0.5f, 4, 0.5f, 4, 0.5f, 4});
    divisor.set<float>({5});
    grad_loss.set<float>({1});
  }

  // NONE in place of MEAN, with all that goes with it.
  void per_row() {
    desc.reduction = XENT_REDUCTION_NONE;
    denominator.absent = divisor.absent = true;
    loss.shape = {2, 3};
  }
  void bind() {
    forward.logits = backward.logits = logits.get();
    forward.targets = backward.targets = targets.get();
    forward.mask = backward.mask = mask.get();
    forward.row_weights = backward.row_weights = row_weights.get();
    forward.denominator = denominator.get();
    forward.loss = loss.get();
    forward.stats = backward.stats = stats.get();
    forward.divisor = backward.divisor = divisor.get();
    forward.lse = lse.get();
    forward.entropy = entropy.get();
    forward.predicted = predicted.get();
    forward.row_counts = row_counts.get();
    backward.grad_loss = both.grad_loss = grad_loss.get();
    backward.grad_logits = both.grad_logits = grad_logits.get();
  }
  std::vector<CallTensor *> tensors() {
    return {&logits, &targets, &mask,    &row_weights, &denominator, &loss,      &stats,
            &divisor, &lse,    &entropy, &predicted,   &row_counts,  &grad_loss, &grad_logits};
  }
  std::vector<std::vector<uint64_t>> contents() {
    std::vector<std::vector<uint64_t>> out;
    for (const CallTensor *tensor : tensors()) out.push_back(tensor->memory);
    return out;
  }

  xent_plan_desc desc{};
  CallTensor logits{{2, 3, 4}, kFloat32};
  CallTensor targets{{2, 3}, kInt64};
  CallTensor mask{{2, 3}, DLDataType{6, 8, 1}};
  CallTensor row_weights{{2, 3}, kFloat32};
  CallTensor denominator{{}, kFloat32};
  CallTensor loss{{}, kFloat32};
  CallTensor stats{{6, 2}, kFloat32};
  CallTensor divisor{{1}, kFloat32};
  CallTensor lse{{2, 3}, kFloat32};
  CallTensor entropy{{2, 3}, kFloat32};
  CallTensor predicted{{2, 3}, kInt64};
  CallTensor row_counts{{3}, kInt32};
  CallTensor grad_loss{{}, kFloat32};
  CallTensor grad_logits{{2, 3, 4}, kFloat32};
  xent_forward_args forward{};
  xent_backward_args backward{};
  xent_loss_and_grad_args both{};
  // The workspace: as much as is needed, unless a test says otherwise.
  std::optional<size_t> workspace_bytes;
  size_t workspace_shift = 0;
  void *workspace = nullptr;
  bool no_workspace = false;
};
