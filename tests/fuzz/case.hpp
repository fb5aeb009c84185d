// SPDX-FileCopyrightText: the libxent authors
// SPDX-License-Identifier: Apache-2.0

// One call, read from the fuzzer's bytes: a valid one where they are zeros.
#pragma once

#include "layout.hpp"

namespace fuzz {

enum Operation { kForward, kBackward, kBoth, kScale };

struct Case {
  xent_plan_desc desc{};
  Operation operation = kForward;
  std::vector<int64_t> leading;
  Tensors tensors;
  uint64_t base = uint64_t{1} << 44;  // of addresses, where there is no memory
  size_t workspace_bytes = 0;
  void *stream = nullptr;
  bool plain = true;  // nothing was done that the library may refuse

  bool huge() const { return desc.vocab > 700 || desc.max_rows > 64; }
};

// The plan and the shape of [...].
void read_plan(Bytes &in, Case *c);
// The tensors, once workspace_bytes is known.
void read_tensors(Bytes &in, Case *c);

}  // namespace fuzz
