// SPDX-FileCopyrightText: the libxent authors
// SPDX-License-Identifier: Apache-2.0

// The tensors of one call as a caller may give them, in memory of exactly the bytes that they describe, and what may be
// done with those bytes, counted one by one. Shares no code with the library.
#pragma once

#include <xent/xent_plugin.h>

#include <array>
#include <functional>
#include <memory>
#include <new>
#include <vector>

#include "bytes.hpp"

namespace fuzz {

enum Slot {
  kLogits,
  kTargets,
  kMask,
  kRowWeights,
  kDenominator,
  kLoss,
  kStats,
  kDivisor,
  kLse,
  kEntropy,
  kPredicted,
  kRowCounts,
  kGradLoss,
  kGradLogits,
  kWorkspace,
  kSlots
};

struct Tensor {
  bool present = false;
  bool written = false;
  std::vector<int64_t> shape;
  std::vector<int64_t> strides;  // empty: NULL
  DLDataType dtype{};
  DLDevice device{kDLCPU, 0};
  int32_t ndim = 0;
  uint64_t byte_offset = 0;
  bool null_shape = false;
  bool null_data = false;
  int group = 0;         // tensors of a group share a buffer,
  int64_t position = 0;  // in which the first element stands here

  // Of a tensor that describes elements in memory.
  bool well_formed() const;
  bool empty() const;
  int64_t element() const { return (dtype.bits + 7) / 8; }
  int64_t stride(int32_t dim) const;  // in elements
  // Bytes from the first element to the lowest one and past the highest one.
  void extent(Wide *low, Wide *high) const;
  Wide elements() const;
  // Byte offset, from the first element, of an element given by its index in row-major order.
  Wide offset_of(Wide index) const;

  DLTensor dl{};  // filled in by Buffers
};

using Tensors = std::array<Tensor, kSlots>;

class Buffers {
 public:
  static constexpr int64_t kMostBytes = 1 << 16;     // of a buffer
  static constexpr int64_t kMostElements = 1 << 11;  // of a tensor

  // Gives the tensors memory where that is possible, else addresses from `base` on.
  Buffers(Tensors &tensors, uint64_t base);
  ~Buffers() { poison(false); }
  Buffers(const Buffers &) = delete;
  Buffers &operator=(const Buffers &) = delete;
  bool in_memory() const { return in_memory_; }
  void *address(Slot slot) const { return reinterpret_cast<void *>(first_[slot]); }

  // Is a byte of a written tensor also one of another element of it or of another tensor? `allow`: pairs that may.
  bool overlap(const std::function<bool(Slot, Slot)> &allow) const;
  // Fills all memory from a seed; then the elements of one slot by the function, from (index, address).
  void fill(uint32_t seed);
  void for_elements(Slot slot, const std::function<void(int64_t, unsigned char *)> &body) const;

  std::vector<std::vector<unsigned char>> snapshot() const;
  void restore(const std::vector<std::vector<unsigned char>> &bytes);
  // Is every byte as it was, but for the elements of written tensors where `written` says so?
  bool unchanged(const std::vector<std::vector<unsigned char>> &before, bool but_written) const;

 private:
  struct Free {
    void operator()(unsigned char *memory) const { operator delete(memory, std::align_val_t{64}); }
  };
  struct Group {
    Wide low = 0, high = 0;
    bool used = false;
    std::unique_ptr<unsigned char, Free> memory;
    size_t size = 0;
    size_t head = 0;  // bytes in front that belong to nobody
  };
  void poison(bool on);

  Tensors &tensors_;
  std::array<Group, kSlots> groups_;
  std::array<uint64_t, kSlots> first_{};
  bool in_memory_ = true;
};

}  // namespace fuzz
