// SPDX-FileCopyrightText: the libxent authors
// SPDX-License-Identifier: Apache-2.0

#include "tensor.hpp"

#include <sys/mman.h>

#include <cstring>
#include <stdexcept>

namespace xent_test {
namespace {

constexpr int64_t kMargin = 512;  // canary at both ends
constexpr int64_t kPage = 4096;

// NaN in every float type, -1 in every integer: what lies beside a tensor must not look like data.
constexpr uint8_t kGap = 0xFF;
// Finite in every float type, no class and no count.
constexpr uint8_t kPoison = 0xC7;

}  // namespace

Memory::Memory(Device *device, int64_t bytes, int64_t misalign, Guard guard)
    : device_(device), bytes_(bytes), guard_(guard) {
  if (guard_ == Guard::kCanary) {
    margin_ = kMargin + misalign;
    const int64_t total = margin_ + bytes_ + kMargin;
    base_ = allocation_ = device_->allocate(static_cast<size_t>(total));
    image_.assign(static_cast<size_t>(total), kGap);
    return;
  }
  if (device_->dl().device_type != kDLCPU) throw std::logic_error("guard pages are for host memory");
  margin_ = 0;
  const int64_t inner = (bytes_ + kPage - 1) / kPage * kPage + (bytes_ == 0 ? kPage : 0);
  mapped_ = static_cast<size_t>(inner + 2 * kPage);
  allocation_ = mmap(nullptr, mapped_, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (allocation_ == MAP_FAILED) throw std::bad_alloc();
  uint8_t *first = static_cast<uint8_t *>(allocation_) + kPage;
  mprotect(first, static_cast<size_t>(inner), PROT_READ | PROT_WRITE);
  base_ = guard_ == Guard::kPageStart ? first : first + inner - bytes_;
  image_.assign(static_cast<size_t>(bytes_), kGap);
}

Memory::~Memory() {
  if (guard_ == Guard::kCanary) {
    device_->release(allocation_);
  } else {
    munmap(allocation_, mapped_);
  }
}

void Memory::allow_writes(int64_t first, int64_t count) {
  if (writable_.empty()) writable_.assign(image_.size(), 0);
  std::memset(writable_.data() + margin_ + first, 1, static_cast<size_t>(count));
}

void Memory::upload() {
  sent_ = image_;
  device_->copy_in(base_, image_.data(), image_.size());
}

std::string Memory::download() {
  device_->copy_out(image_.data(), base_, image_.size());
  if (std::memcmp(image_.data(), sent_.data(), image_.size()) == 0) return "";
  for (size_t i = 0; i < image_.size(); ++i) {
    if (image_[i] == sent_[i] || (!writable_.empty() && writable_[i] != 0)) continue;
    return "byte " + std::to_string(static_cast<int64_t>(i) - margin_) + " of a tensor of " + std::to_string(bytes_) +
           " bytes changed from " + std::to_string(sent_[i]) + " to " + std::to_string(image_[i]);
  }
  return "";
}

std::vector<int64_t> packed_strides(const std::vector<int64_t> &shape) {
  std::vector<int64_t> strides(shape.size());
  int64_t next = 1;
  for (size_t i = shape.size(); i-- > 0;) {
    strides[i] = next;
    next *= shape[i];
  }
  return strides;
}

Tensor::Tensor(Device *device, DLDataType dtype, std::vector<int64_t> shape, const Layout &layout)
    : dtype_(dtype), shape_(std::move(shape)) {
  strides_ = layout.strides.empty() ? packed_strides(shape_) : layout.strides;
  if (strides_.size() != shape_.size()) throw std::logic_error("strides do not fit the shape");
  int64_t low = 0, high = 0;
  bool empty = false;
  for (size_t i = 0; i < shape_.size(); ++i) {
    if (shape_[i] == 0) empty = true;
    if (shape_[i] <= 1) continue;  // such a stride is never used
    const int64_t reach = (shape_[i] - 1) * strides_[i];
    (reach < 0 ? low : high) += reach;
  }
  const int64_t size = size_of(dtype_);
  memory_ = std::make_shared<Memory>(device, empty ? 0 : (high - low + 1) * size, layout.misalign, layout.guard);
  origin_ = empty ? 0 : -low * size;
  finish(layout.byte_offset);
  if (layout.null_strides) dl_.strides = nullptr;
}

Tensor::Tensor(std::shared_ptr<Memory> memory, DLDataType dtype, std::vector<int64_t> shape,
               std::vector<int64_t> strides, int64_t origin)
    : memory_(std::move(memory)),
      dtype_(dtype),
      shape_(std::move(shape)),
      strides_(std::move(strides)),
      origin_(origin) {
  finish(0);
}

void Tensor::finish(int64_t byte_offset) {
  elements_ = 1;
  for (const int64_t n : shape_) elements_ *= n;
  dl_.data = memory_->address() + origin_ - byte_offset;
  dl_.byte_offset = static_cast<uint64_t>(byte_offset);
  dl_.device = memory_->device()->dl();
  dl_.dtype = dtype_;
  dl_.ndim = static_cast<int32_t>(shape_.size());
  dl_.shape = shape_.data();
  dl_.strides = strides_.data();
}

template <class F>
void Tensor::each_row(F &&f) const {
  if (elements_ == 0) return;
  const int64_t size = size_of(dtype_);
  if (shape_.empty()) return f(0, origin_, 1, size);
  const size_t last = shape_.size() - 1;
  std::vector<int64_t> index(last, 0);
  int64_t byte = origin_;
  for (int64_t i = 0; i < elements_; i += shape_[last]) {
    f(i, byte, shape_[last], shape_[last] == 1 ? size : strides_[last] * size);
    for (size_t d = last; d-- > 0;) {
      if (shape_[d] == 1) continue;
      byte += strides_[d] * size;
      if (++index[d] < shape_[d]) break;
      byte -= strides_[d] * size * shape_[d];
      index[d] = 0;
    }
  }
}

void Tensor::poison() {
  const int64_t size = size_of(dtype_);
  each_row([&](int64_t, int64_t byte, int64_t count, int64_t step) {
    if (step == size) return void(std::memset(memory_->image() + byte, kPoison, static_cast<size_t>(count * size)));
    for (int64_t i = 0; i < count; ++i) {
      std::memset(memory_->image() + byte + i * step, kPoison, static_cast<size_t>(size));
    }
  });
}

void Tensor::allow_writes() {
  const int64_t size = size_of(dtype_);
  each_row([&](int64_t, int64_t byte, int64_t count, int64_t step) {
    if (step == size) return memory_->allow_writes(byte, count * size);
    for (int64_t i = 0; i < count; ++i) memory_->allow_writes(byte + i * step, size);
  });
}

void Tensor::fill(const std::vector<double> &values) {
  const bool is_fp = is_float(dtype_);
  each_row([&](int64_t first, int64_t byte, int64_t count, int64_t step) {
    for (int64_t i = 0; i < count; ++i) {
      const double v = values[static_cast<size_t>(first + i)];
      const uint64_t bits = is_fp ? encode_float(dtype_, v) : static_cast<uint64_t>(static_cast<int64_t>(v));
      std::memcpy(memory_->image() + byte + i * step, &bits, static_cast<size_t>(size_of(dtype_)));
    }
  });
}

void Tensor::fill(const std::vector<int64_t> &values) {
  each_row([&](int64_t first, int64_t byte, int64_t count, int64_t step) {
    for (int64_t i = 0; i < count; ++i) {
      std::memcpy(memory_->image() + byte + i * step, &values[static_cast<size_t>(first + i)],
                  static_cast<size_t>(size_of(dtype_)));
    }
  });
}

std::vector<uint64_t> Tensor::bits() const {
  std::vector<uint64_t> out(static_cast<size_t>(elements_));
  each_row([&](int64_t first, int64_t byte, int64_t count, int64_t step) {
    for (int64_t i = 0; i < count; ++i) {
      out[static_cast<size_t>(first + i)] = load_bits(memory_->image() + byte + i * step, size_of(dtype_));
    }
  });
  return out;
}

}  // namespace xent_test
