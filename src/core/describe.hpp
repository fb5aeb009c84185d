// SPDX-FileCopyrightText: the libxent authors
// SPDX-License-Identifier: Apache-2.0

// Short texts for messages. They live on the stack of whoever reports a failure.
#pragma once

#include <xent/xent.h>

namespace xent {

template <int N>
struct Text {
  char text[N] = {};
};

Text<32> describe(DLDataType dtype);                            // "bfloat16", "float32x4", "(code 77, bits 8)"
Text<32> describe(DLDevice device);                             // "CPU", "CUDA:1", "(type 99):0"
Text<128> describe_list(const int64_t *values, int32_t count);  // "[4, 7]"

}  // namespace xent
