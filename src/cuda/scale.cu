// SPDX-FileCopyrightText: the libxent authors
// SPDX-License-Identifier: Apache-2.0

#include "scale.cuh"

#include "kernel_table.cuh"

namespace xent::cuda {

const void *scale_kernel_for(Element type) {
  if (type == Element::f16) return address(scale_kernel<f16>);
  if (type == Element::bf16) return address(scale_kernel<bf16>);
  return address(scale_kernel<float>);
}

}  // namespace xent::cuda
