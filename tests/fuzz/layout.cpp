// SPDX-FileCopyrightText: the libxent authors
// SPDX-License-Identifier: Apache-2.0

#include "layout.hpp"

#if defined(__SANITIZE_ADDRESS__)
#define FUZZ_ASAN 1
#elif defined(__has_feature)
#if __has_feature(address_sanitizer)
#define FUZZ_ASAN 1
#endif
#endif
#ifdef FUZZ_ASAN
#include <sanitizer/asan_interface.h>
#endif

namespace fuzz {

bool Tensor::well_formed() const {
  if (ndim < 0 || static_cast<size_t>(ndim) != shape.size() || (null_shape && ndim > 0) || element() == 0) return false;
  Wide count = 1;
  for (const int64_t size : shape) {
    if (size < 0) return false;
    count *= size;
    if (count > (Wide{1} << 62)) return false;
  }
  return strides.empty() || strides.size() == shape.size();
}

bool Tensor::empty() const {
  for (const int64_t size : shape) {
    if (size == 0) return true;
  }
  return false;
}

int64_t Tensor::stride(int32_t dim) const {
  if (!strides.empty()) return strides[static_cast<size_t>(dim)];
  int64_t packed = 1;
  for (int32_t d = ndim - 1; d > dim; --d) packed *= shape[static_cast<size_t>(d)];
  return packed;
}

void Tensor::extent(Wide *low, Wide *high) const {
  *low = 0;
  *high = 0;
  if (empty()) return;
  for (int32_t dim = 0; dim < ndim; ++dim) {
    const Wide reach = Wide{shape[static_cast<size_t>(dim)] - 1} * stride(dim) * element();
    (reach < 0 ? *low : *high) += reach;
  }
  *high += element();
}

Wide Tensor::elements() const {
  Wide count = 1;
  for (const int64_t size : shape) count *= size;
  return count;
}

Wide Tensor::offset_of(Wide index) const {
  Wide offset = 0;
  for (int32_t dim = ndim - 1; dim >= 0; --dim) {
    const int64_t size = shape[static_cast<size_t>(dim)];
    offset += index % size * stride(dim);
    index /= size;
  }
  return offset * element();
}

Buffers::Buffers(Tensors &tensors, uint64_t base) : tensors_(tensors) {
  for (Tensor &tensor : tensors) {
    if (!tensor.present) continue;
    if (!tensor.well_formed() || tensor.elements() > kMostElements) {
      in_memory_ = false;
      continue;
    }
    Group &group = groups_[static_cast<size_t>(tensor.group)];
    Wide low, high;
    tensor.extent(&low, &high);
    low += tensor.position;
    high += tensor.position;
    group.low = group.used ? std::min(group.low, low) : low;
    group.high = group.used ? std::max(group.high, high) : high;
    group.used = true;
    if (group.high - group.low > kMostBytes) in_memory_ = false;
  }
  for (size_t i = 0; i < kSlots; ++i) {
    Group &group = groups_[i];
    // Position 0 is a multiple of 64, so that alignment is the input's choice.
    uint64_t zero = base + (static_cast<uint64_t>(i) << 60);
    if (in_memory_ && group.used) {
      group.head = static_cast<size_t>((group.low % 64 + 64) % 64);
      group.size = group.head + static_cast<size_t>(group.high - group.low);
      group.memory.reset(
          static_cast<unsigned char *>(operator new(std::max<size_t>(group.size, 1), std::align_val_t{64})));
      zero = reinterpret_cast<uint64_t>(group.memory.get()) + group.head - static_cast<uint64_t>(group.low);
    }
    for (size_t slot = 0; slot < kSlots; ++slot) {
      Tensor &tensor = tensors[slot];
      if (!tensor.present || static_cast<size_t>(tensor.group) != i) continue;
      first_[slot] = zero + static_cast<uint64_t>(tensor.position);
      tensor.dl.data = tensor.null_data ? nullptr : reinterpret_cast<void *>(first_[slot] - tensor.byte_offset);
      tensor.dl.device = tensor.device;
      tensor.dl.ndim = tensor.ndim;
      tensor.dl.dtype = tensor.dtype;
      tensor.dl.shape = tensor.null_shape ? nullptr : tensor.shape.data();
      tensor.dl.strides = tensor.strides.empty() ? nullptr : tensor.strides.data();
      tensor.dl.byte_offset = tensor.byte_offset;
    }
  }
  poison(true);
}

void Buffers::poison(bool on) {
#ifdef FUZZ_ASAN
  for (Group &group : groups_) {
    if (group.memory == nullptr) continue;
    if (on) {
      ASAN_POISON_MEMORY_REGION(group.memory.get(), group.head);
    } else {
      ASAN_UNPOISON_MEMORY_REGION(group.memory.get(), group.size);
    }
  }
#else
  (void)on;
#endif
}

void Buffers::for_elements(Slot slot, const std::function<void(int64_t, unsigned char *)> &body) const {
  const Tensor &tensor = tensors_[slot];
  if (!in_memory_ || !tensor.present || tensor.empty()) return;
  const auto count = static_cast<int64_t>(tensor.elements());
  for (int64_t i = 0; i < count; ++i) {
    body(i, reinterpret_cast<unsigned char *>(first_[slot] + static_cast<uint64_t>(tensor.offset_of(i))));
  }
}

bool Buffers::overlap(const std::function<bool(Slot, Slot)> &allow) const {
  for (size_t i = 0; i < kSlots; ++i) {
    const Group &group = groups_[i];
    if (group.memory == nullptr) continue;
    // Who owns a byte: bits of slots.
    std::vector<uint32_t> owners(group.size);
    bool found = false;
    for (size_t slot = 0; slot < kSlots; ++slot) {
      const Tensor &tensor = tensors_[slot];
      if (!tensor.present || static_cast<size_t>(tensor.group) != i) continue;
      uint32_t forbidden = tensor.written ? 1u << slot : 0;
      for (size_t other = 0; other < kSlots; ++other) {
        if (other != slot && (tensor.written || tensors_[other].written) &&
            !allow(static_cast<Slot>(slot), static_cast<Slot>(other))) {
          forbidden |= 1u << other;
        }
      }
      for_elements(static_cast<Slot>(slot), [&](int64_t, unsigned char *at) {
        for (int64_t b = 0; b < tensor.element(); ++b) {
          uint32_t &owner = owners[static_cast<size_t>(at + b - group.memory.get())];
          found = found || (owner & forbidden) != 0;
          owner |= 1u << slot;
        }
      });
    }
    if (found) return true;
  }
  return false;
}

void Buffers::fill(uint32_t seed) {
  for (Group &group : groups_) {
    for (size_t i = group.head; i < group.size; ++i) {
      seed = seed * 1664525u + 1013904223u;
      group.memory.get()[i] = static_cast<unsigned char>(seed >> 24);
    }
  }
}

std::vector<std::vector<unsigned char>> Buffers::snapshot() const {
  std::vector<std::vector<unsigned char>> out;
  for (const Group &group : groups_) {
    const unsigned char *memory = group.memory.get();
    out.emplace_back(memory + group.head, memory + group.size);
  }
  return out;
}

void Buffers::restore(const std::vector<std::vector<unsigned char>> &bytes) {
  for (size_t i = 0; i < kSlots; ++i) {
    std::copy(bytes[i].begin(), bytes[i].end(), groups_[i].memory.get() + groups_[i].head);
  }
}

bool Buffers::unchanged(const std::vector<std::vector<unsigned char>> &before, bool but_written) const {
  std::vector<std::vector<unsigned char>> expected = before;
  for (size_t slot = 0; but_written && slot < kSlots; ++slot) {
    const Tensor &tensor = tensors_[slot];
    if (!tensor.present || !tensor.written) continue;
    const Group &group = groups_[static_cast<size_t>(tensor.group)];
    for_elements(static_cast<Slot>(slot), [&](int64_t, unsigned char *at) {
      const auto offset = static_cast<size_t>(at - group.memory.get()) - group.head;
      std::copy(at, at + tensor.element(),
                expected[static_cast<size_t>(tensor.group)].begin() + static_cast<ptrdiff_t>(offset));
    });
  }
  return snapshot() == expected;
}

}  // namespace fuzz
