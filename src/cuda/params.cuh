// SPDX-FileCopyrightText: the libxent authors
// SPDX-License-Identifier: Apache-2.0

// What a kernel is given, and how it reads and writes values that come one a row.
#pragma once

#include "common/view.hpp"
#include "load.cuh"
#include "math.cuh"

namespace xent::cuda {

enum class Element : int32_t { f32, f16, bf16, f64, i32, i64, u8 };

// Division by a constant of the call: n / d = (n * multiplier) >> (62 + shift) for 0 <= n < 2^62 (Granlund and
// Montgomery, 1994). A 64-bit division in a kernel is a hundred instructions, or a call that takes its registers away.
struct Divisor {
  uint64_t multiplier;  // floor(2^(62 + shift) / d) + 1
  int64_t d;
  int32_t shift;  // ceil(log2 d)

  __device__ __forceinline__ int64_t quotient(int64_t n) const {
    return static_cast<int64_t>(__umul64hi(static_cast<uint64_t>(n) << 2, multiplier) >> shift);
  }
};

// One tensor. As xent_view, with the type as a number to switch on. kFlat: of one leading dimension at most, or of none
// and a stride of 0.
template <bool kFlat>
struct TensorOf {
  void *data;
  Element type;
  int32_t rank;
  Divisor inner[XENT_MAX_LEADING_DIMS - 1];  // of dimensions 1, ...: by the outermost none divides
  int64_t stride[XENT_MAX_LEADING_DIMS];
  int64_t col_stride;

  __device__ __forceinline__ int64_t offset(int64_t row) const {
    if (kFlat) return row * stride[0];
    if (rank == 0) return 0;
    int64_t sum = 0;
#pragma unroll 1
    for (int dim = rank - 1; dim > 0; --dim) {
      const int64_t outer = inner[dim - 1].quotient(row);
      sum += (row - outer * inner[dim - 1].d) * stride[dim];
      row = outer;
    }
    return sum + row * stride[0];
  }
  template <typename T>
  __device__ __forceinline__ T *row(int64_t r) const {
    return static_cast<T *>(data) + offset(r);
  }
};
using Tensor = TensorOf<false>;

// How rows are cut, see geometry.hpp.
struct Geometry {
  int warps;    // that share a row
  int batches;  // of a row; in block_kernel its units
  int keep;     // a warp keeps that many of its last batches for the gradient; in block_kernel units in shared memory
  int cluster;  // blocks that share a row: 1, or 2 with thread block clusters
  int span;     // lanes that share a short row
  int rows;     // short rows that a warp takes at once
};

// kFlat: of tensors that are, as layout_of() finds them. A tensor of any dimensions takes a loop, which in the code of
// a kernel stands a dozen times: the kernels that have the usual rows do without.
template <bool kFlat>
struct ParamsOf {
  using Tensor = TensorOf<kFlat>;
  Constants math;
  Geometry geometry;
  int64_t rows;
  int64_t classes;  // of this rank: real columns
  int64_t vocab;
  int64_t all_classes;  // of all ranks
  int64_t class_begin;  // of column 0
  int64_t ignore_index;
  int32_t has_ignore_index;
  int32_t reduction;
  int32_t empty_mean_is_nan;
  int32_t entropy_asked;
  int32_t predicted_asked;
  Tensor logits, targets, mask, row_weights, denominator;
  Tensor loss, stats, divisor, lse, entropy, predicted, row_counts;
  Tensor grad_loss, grad_logits;
  Tensor partial;      // set: the forward kernels write partials alone
  double *row_loss;    // workspace: w * l a row, for the sum over rows
  float *partials;     // workspace: [rows, pieces, words]
  float *own_divisor;  // workspace: the divisor that loss_and_grad computes before its gradient
  void *chunks;        // workspace: partial sums over rows
};
using Params = ParamsOf<false>;
using FlatParams = ParamsOf<true>;
static_assert(sizeof(FlatParams) == sizeof(Params), "the host fills in one for both");

// A floating-point value of a type that the caller chose.
template <class Tensor>
__device__ __forceinline__ double read_floating(const Tensor &tensor, int64_t offset) {
  switch (tensor.type) {
    case Element::f16:
      return static_cast<double>(to_float(static_cast<const f16 *>(tensor.data)[offset]));
    case Element::bf16:
      return static_cast<double>(to_float(static_cast<const bf16 *>(tensor.data)[offset]));
    case Element::f64:
      return static_cast<const double *>(tensor.data)[offset];
    default:
      return static_cast<double>(static_cast<const float *>(tensor.data)[offset]);
  }
}

template <class Tensor>
__device__ __forceinline__ int64_t read_int(const Tensor &tensor, int64_t offset) {
  if (tensor.type == Element::i32) return static_cast<const int32_t *>(tensor.data)[offset];
  return static_cast<const int64_t *>(tensor.data)[offset];
}

template <class Tensor>
__device__ __forceinline__ void write_int(const Tensor &tensor, int64_t offset, int64_t value) {
  if (tensor.type == Element::i32) {
    static_cast<int32_t *>(tensor.data)[offset] = static_cast<int32_t>(value);
  } else {
    static_cast<int64_t *>(tensor.data)[offset] = value;
  }
}

template <class Tensor>
__device__ __forceinline__ void write_row(const Tensor &tensor, int64_t row, float value) {
  if (tensor.data != nullptr) static_cast<float *>(tensor.data)[tensor.offset(row)] = value;
}

enum class RowKind { counted, ignored, out_of_range };

inline constexpr int64_t kNoColumn = -64;  // before any vector of a row

struct RowTarget {
  RowKind kind;
  int64_t target;  // its column, kNoColumn where another rank has it
};

// By the bits: no value but 0, and of a float -0, has none set.
template <class P>
__device__ __forceinline__ bool masked(const P &p, int64_t row) {
  if (p.mask.data == nullptr) return false;
  const int64_t at = p.mask.offset(row);
  switch (p.mask.type) {
    case Element::u8:
      return static_cast<const uint8_t *>(p.mask.data)[at] == 0;
    case Element::i64:
      return static_cast<const int64_t *>(p.mask.data)[at] == 0;
    case Element::f32:
      return (static_cast<const uint32_t *>(p.mask.data)[at] & 0x7fffffffu) == 0;
    default:
      return static_cast<const int32_t *>(p.mask.data)[at] == 0;
  }
}

// Of the row whose target is `target`.
template <class P>
__device__ __forceinline__ RowTarget classify(const P &p, int64_t row, int64_t target) {
  if ((p.has_ignore_index && target == p.ignore_index) || masked(p, row)) return {RowKind::ignored, target};
  if (target < 0 || target >= p.all_classes) return {RowKind::out_of_range, kNoColumn};
  const int64_t column = target - p.class_begin;
  return {RowKind::counted, column >= 0 && column < p.classes ? column : kNoColumn};
}

template <class P>
__device__ __forceinline__ RowTarget read_target(const P &p, int64_t row) {
  return classify(p, row, read_int(p.targets, p.targets.offset(row)));
}

template <class P>
__device__ __forceinline__ float read_weight(const P &p, int64_t row) {
  return p.row_weights.data == nullptr ? 1.0f : *p.row_weights.template row<const float>(row);
}

template <class P>
__device__ __forceinline__ float read_denominator(const P &p) {
  if (p.denominator.type == Element::f32) return *static_cast<const float *>(p.denominator.data);
  return static_cast<float>(read_int(p.denominator, 0));
}

// The warp's number in its block. What depends on it is the same in all lanes, which the compiler knows only from such
// a shuffle: it then needs neither a register nor an instruction a lane for addresses, branches and policies of L2.
__device__ __forceinline__ int warp_of_block() {
  return __shfl_sync(0xffffffffu, static_cast<int>(threadIdx.x / 32), 0);
}

// The launch behind this one may be brought up already.
__device__ __forceinline__ void let_next_start() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
#endif
}
// Where a kernel is itself launched ahead of time: all that was before has ended. Every block must come by here before
// it ends, so that the launch behind does not have to wait for more than this one. What the caller gave is there from
// the start, for the first launch of a call is not ahead of time.
__device__ __forceinline__ void wait_for_previous() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}

// First thing in a kernel. One without it is never launched ahead, and the one behind waits for its end.
__device__ __forceinline__ void start_in_chain() {
  let_next_start();
  wait_for_previous();
}

}  // namespace xent::cuda
