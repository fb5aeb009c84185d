// SPDX-FileCopyrightText: the libxent authors
// SPDX-License-Identifier: Apache-2.0

// Guarded tensors. Memory keeps a host image of what it holds and knows which bytes a call may write; every other byte
// (both ends, gaps between rows, inputs) must come back as it went in.
#pragma once

#include <dlpack/dlpack.h>

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "device.hpp"
#include "formats.hpp"

namespace xent_test {

// kPageEnd and kPageStart put the last or the first byte against a page that cannot be touched; host memory only.
enum class Guard { kCanary, kPageEnd, kPageStart };

class Memory {
 public:
  // `misalign`: bytes from a 256-byte boundary to the first byte, where the guard leaves the choice.
  Memory(Device *device, int64_t bytes, int64_t misalign, Guard guard);
  ~Memory();
  Memory(const Memory &) = delete;
  Memory &operator=(const Memory &) = delete;

  Device *device() const { return device_; }
  uint8_t *image() { return image_.data() + margin_; }
  const uint8_t *image() const { return image_.data() + margin_; }
  uint8_t *address() const { return static_cast<uint8_t *>(base_) + margin_; }
  int64_t bytes() const { return bytes_; }

  void allow_writes(int64_t first, int64_t count);
  void upload();
  // Fetches what the device holds; returns what was changed without permission, or "".
  std::string download();

 private:
  Device *device_;
  int64_t bytes_, margin_;
  Guard guard_;
  void *allocation_ = nullptr;
  size_t mapped_ = 0;
  void *base_ = nullptr;
  std::vector<uint8_t> image_, sent_;
  std::vector<uint8_t> writable_;  // one a byte; empty: none
};

// How a tensor lies in its memory. Strides in elements, for all dimensions; empty: packed.
struct Layout {
  std::vector<int64_t> strides;
  bool null_strides = false;  // say NULL, with packed strides only
  int64_t byte_offset = 0;    // the part of the address that goes into DLTensor::byte_offset
  int64_t misalign = 0;
  Guard guard = Guard::kCanary;
};

std::vector<int64_t> packed_strides(const std::vector<int64_t> &shape);

class Tensor {
 public:
  Tensor() = default;
  // In memory of its own.
  Tensor(Device *device, DLDataType dtype, std::vector<int64_t> shape, const Layout &layout);
  // A view into memory that others share; `origin` is the byte of element 0.
  Tensor(std::shared_ptr<Memory> memory, DLDataType dtype, std::vector<int64_t> shape, std::vector<int64_t> strides,
         int64_t origin);

  bool present() const { return memory_ != nullptr; }
  const DLTensor *dl() const { return memory_ != nullptr ? &dl_ : nullptr; }
  DLTensor *mutable_dl() { return &dl_; }
  Memory &memory() { return *memory_; }
  const std::shared_ptr<Memory> &shared() const { return memory_; }
  DLDataType dtype() const { return dtype_; }
  int64_t elements() const { return elements_; }

  void poison();                                 // every element gets a pattern that no result has
  void allow_writes();                           // an output
  void fill(const std::vector<double> &values);  // row-major, rounded to the type
  void fill(const std::vector<int64_t> &values);
  std::vector<uint64_t> bits() const;  // row-major, from the image

 private:
  void finish(int64_t byte_offset);
  // f(first element, its byte, count, bytes from one to the next) for every row of the last dimension.
  template <class F>
  void each_row(F &&f) const;

  std::shared_ptr<Memory> memory_;
  DLDataType dtype_ = kF32;
  std::vector<int64_t> shape_, strides_;
  int64_t origin_ = 0, elements_ = 0;
  DLTensor dl_ = {};

 public:
  // dl_ points into shape_ and strides_: moving keeps the vectors' storage, copying would not.
  Tensor(Tensor &&) = default;
  Tensor &operator=(Tensor &&) = default;
  Tensor(const Tensor &) = delete;
  Tensor &operator=(const Tensor &) = delete;
};

}  // namespace xent_test
