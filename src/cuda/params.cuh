// SPDX-FileCopyrightText: the libxent authors
// SPDX-License-Identifier: Apache-2.0

// What a kernel is given, and how it reads and writes values that come one a row.
#pragma once

#include "common/view.hpp"
#include "load.cuh"
#include "math.cuh"

namespace xent::cuda {

enum class Element : int32_t { f32, f16, bf16, f64, i32, i64, u8 };

// Out of line: rare, and its 64-bit divisions would be inlined a dozen times into every kernel.
static __device__ __noinline__ int64_t general_row_offset(int32_t rank, const int64_t *shape, const int64_t *stride,
                                                          int64_t row) {
  return row_offset(rank, shape, stride, row);
}

// One tensor. As xent_view, with the type as a number to switch on.
struct Tensor {
  void *data;
  Element type;
  int32_t rank;
  int64_t shape[XENT_MAX_LEADING_DIMS];
  int64_t stride[XENT_MAX_LEADING_DIMS];
  int64_t col_stride;

  __device__ __forceinline__ int64_t offset(int64_t row) const {
    if (rank == 1) return row * stride[0];
    return rank == 0 ? 0 : general_row_offset(rank, shape, stride, row);
  }
  template <typename T>
  __device__ __forceinline__ T *row(int64_t r) const {
    return static_cast<T *>(data) + offset(r);
  }
};

// How rows are cut, see geometry.hpp.
struct Geometry {
  int threads;
  int slice_vectors;
  int slices;
  int stashed;
};

struct Params {
  Constants math;
  Geometry geometry;
  int64_t rows;
  int64_t classes;
  int64_t vocab;
  int64_t ignore_index;
  int32_t has_ignore_index;
  int32_t reduction;
  int32_t empty_mean_is_nan;
  Tensor logits, targets, mask, row_weights, denominator;
  Tensor loss, stats, divisor, lse, entropy, predicted, row_counts;
  Tensor grad_loss, grad_logits;
  float *row_loss;        // workspace: w * l a row, for the sum over rows
  float *slice_partials;  // workspace: [rows, slices, words]
  float *own_divisor;     // workspace: the divisor that loss_and_grad computes before its gradient
  void *chunks;           // workspace: partial sums over rows
};

static __device__ __noinline__ float read_converted(const Tensor &tensor, int64_t offset) {
  switch (tensor.type) {
    case Element::f32:
      return static_cast<const float *>(tensor.data)[offset];
    case Element::f16:
      return to_float(static_cast<const f16 *>(tensor.data)[offset]);
    case Element::bf16:
      return to_float(static_cast<const bf16 *>(tensor.data)[offset]);
    case Element::f64:
      return static_cast<float>(static_cast<const double *>(tensor.data)[offset]);
    case Element::i32:
      return static_cast<float>(static_cast<const int32_t *>(tensor.data)[offset]);
    case Element::i64:
      return static_cast<float>(static_cast<const int64_t *>(tensor.data)[offset]);
    case Element::u8:
      return static_cast<float>(static_cast<const uint8_t *>(tensor.data)[offset]);
  }
  return 0.0f;
}

__device__ __forceinline__ float read_float(const Tensor &tensor, int64_t offset) {
  if (tensor.type == Element::f32) return static_cast<const float *>(tensor.data)[offset];
  return read_converted(tensor, offset);
}

__device__ __forceinline__ int64_t read_int(const Tensor &tensor, int64_t offset) {
  if (tensor.type == Element::i32) return static_cast<const int32_t *>(tensor.data)[offset];
  return static_cast<const int64_t *>(tensor.data)[offset];
}

__device__ __forceinline__ void write_int(const Tensor &tensor, int64_t offset, int64_t value) {
  if (tensor.type == Element::i32) {
    static_cast<int32_t *>(tensor.data)[offset] = static_cast<int32_t>(value);
  } else {
    static_cast<int64_t *>(tensor.data)[offset] = value;
  }
}

__device__ __forceinline__ void write_row(const Tensor &tensor, int64_t row, float value) {
  if (tensor.data != nullptr) static_cast<float *>(tensor.data)[tensor.offset(row)] = value;
}

enum class RowKind { counted, ignored, out_of_range };

struct RowTarget {
  RowKind kind;
  int64_t target;
};

__device__ __forceinline__ bool masked(const Params &p, int64_t row) {
  if (p.mask.data == nullptr) return false;
  return read_float(p.mask, p.mask.offset(row)) == 0.0f;  // no integer but 0 converts to 0
}

__device__ __forceinline__ RowTarget read_target(const Params &p, int64_t row) {
  const int64_t target = read_int(p.targets, p.targets.offset(row));
  if ((p.has_ignore_index && target == p.ignore_index) || masked(p, row)) return {RowKind::ignored, target};
  if (target < 0 || target >= p.classes) return {RowKind::out_of_range, target};
  return {RowKind::counted, target};
}

__device__ __forceinline__ float read_weight(const Params &p, int64_t row) {
  return p.row_weights.data == nullptr ? 1.0f : read_float(p.row_weights, p.row_weights.offset(row));
}

}  // namespace xent::cuda
