// SPDX-FileCopyrightText: the libxent authors
// SPDX-License-Identifier: Apache-2.0

// Tensors and options as kernels are given them.
#pragma once

#include <xent/xent_plugin.h>

#include "geometry.hpp"
#include "kernel_table.hpp"
#include "params.cuh"

namespace xent::cuda {

Element element_of(const DLDataType &type);
Divisor divisor_of(int64_t d);
// `tensor` holds zeros before.
void describe(const xent_view &view, Tensor *tensor);
Tensor tensor_of(const xent_view &view);
Geometry geometry_of(const RowShape &shape);
Constants constants_of(const xent_options &options);

// `size`: of an element.
Layout layout_of(const Params &params, int64_t size);

}  // namespace xent::cuda
