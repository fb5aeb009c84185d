// SPDX-FileCopyrightText: the libxent authors
// SPDX-License-Identifier: Apache-2.0

// What the fuzz targets share: a reader of the input, and how they fail. An exhausted input reads as zeros, and zeros
// mean "valid" everywhere, so that a short input is a valid call and a mutation changes one thing.
#pragma once

#include <algorithm>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>

namespace fuzz {

__extension__ typedef __int128 Wide;  // sizes that no int64 holds

class Bytes {
 public:
  Bytes(const uint8_t *data, size_t size) : next_(data), left_(size) {}

  template <class T>
  T take() {
    T value{};
    const size_t size = std::min(left_, sizeof value);
    if (size > 0) std::memcpy(static_cast<void *>(&value), next_, size);
    next_ += size;
    left_ -= size;
    return value;
  }
  uint8_t byte() { return take<uint8_t>(); }
  template <class T, size_t N>
  T pick(const T (&table)[N]) {
    return table[byte() % N];
  }

 private:
  const uint8_t *next_;
  size_t left_;
};

[[noreturn]] inline void broken(const char *file, int line, const char *what, const char *detail) {
  std::fprintf(stderr, "%s:%d: does not hold: %s\n  %s\n", file, line, what, detail);
  std::abort();
}

}  // namespace fuzz

#define FUZZ_CHECK(condition, detail) \
  if (!(condition)) fuzz::broken(__FILE__, __LINE__, #condition, detail)

extern "C" int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);
