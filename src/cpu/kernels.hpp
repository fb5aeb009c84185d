// SPDX-FileCopyrightText: the libxent authors
// SPDX-License-Identifier: Apache-2.0

// What the rows' driver asks of the SIMD kernels. A kernel works on one row's columns [begin, end); it is compiled once
// an instruction set and picked when it is called. "acc" is float, or double for float64 logits.
//
// A row's sums are a tree that the columns alone decide: blocks of kBlock columns merge pairwise into slices, slices
// merge pairwise into the row. Whether one thread does a row or many do, the tree is the same, and so are the bits.
#pragma once

#include <bit>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <limits>

// Instrumented, what a kernel inlines takes a compiler minutes.
#if defined(__SANITIZE_ADDRESS__)
#define XENT_CPU_INLINE __attribute__((noinline))
#else
#define XENT_CPU_INLINE HWY_INLINE
#endif

namespace xent::cpu {

inline constexpr int64_t kBlock = 2048;
inline constexpr int64_t kAhead = 16384;  // bytes from the columns in work to those that memory is asked for

// Element types as they lie in memory.
struct F16 {
  uint16_t bits;
};
struct BF16 {
  uint16_t bits;
};

template <class T>
struct AccOf {
  using type = float;
};
template <>
struct AccOf<double> {
  using type = double;
};
template <class T>
using Acc = typename AccOf<T>::type;

// The plan's options as the kernels want them. v is x without softcap and z with softcap; p_i = exp(scale * (v_i - max
// v)) / d.
struct RowMath {
  double scale;       // logit_scale; 1 with softcap
  double half;        // v is multiplied by this before the subtraction and scale / half after it: 1, or 0.5 where
                      // scale is so small that a difference that overflows would matter
  double softcap;     // 0: off
  double cap_ratio;   // logit_scale / softcap
  double shift_unit;  // a power of two; sum (v_i - max v) is kept in multiples of its reciprocal, so it cannot
                      // overflow. 1 where scale is so large that what overflows would anyway, and what matters is tiny
  bool smoothing;
  bool entropy;
  bool predicted;
};

// What forward keeps of a row for the gradient that follows at once: each block's largest v and, of the last columns,
// exp(scale * (v_i - that maximum)), of acc, in the order that the sums' pass has them in (IsPaired in load-inl.hpp).
// The gradient computes the others in the same way: its bits do not tell which were kept.
struct Kept {
  double *maxima;
  void *terms;    // of the columns from `begin` on, whole blocks
  int64_t begin;  // a multiple of kBlock
};

struct Span {
  const void *row;
  int64_t stride;  // of a column, in elements
  int64_t begin, end;
  const void *next = nullptr;  // columns that the thread reads after these, of stride 1 like them; NULL: not known
  const Kept *kept = nullptr;  // forward fills it, the gradient takes from it; NULL: nothing is kept. Not with softcap
};

// The sums over a set of columns. `max` of a set without a logit above -inf is the lowest value of acc, never -inf: no
// difference of maxima is then NaN.
struct alignas(64) Partial {
  double max;
  double sum;      // exp(scale * (v_i - max))
  double shift;    // shift_unit * (v_i - max)
  double entropy;  // u_i * exp(u_i), u_i = scale * (v_i - max)
  double best;     // the largest x, for `index`
  int64_t index;   // the lowest column of it, -1: none
  int64_t count;
};

// `b` holds the columns after those of `a`.
inline Partial merge(const Partial &a, const Partial &b, const RowMath &math) {
  Partial out;
  out.max = a.max > b.max ? a.max : b.max;
  const auto moved = [&](const Partial &part, double &sum, double &shift, double &entropy) {
    if (part.max == out.max) {
      sum = part.sum, shift = part.shift, entropy = part.entropy;
      return;
    }
    const double delta = (part.max * math.half - out.max * math.half) * (math.scale / math.half);
    const double factor = std::exp(delta);
    sum = part.sum * factor;
    shift = part.shift + static_cast<double>(part.count) * (part.max * math.shift_unit - out.max * math.shift_unit);
    entropy = factor == 0 ? 0 : factor * (part.entropy + delta * part.sum);
  };
  double sum_a, sum_b, shift_a, shift_b, entropy_a, entropy_b;
  moved(a, sum_a, shift_a, entropy_a);
  moved(b, sum_b, shift_b, entropy_b);
  out.sum = sum_a + sum_b;
  out.shift = shift_a + shift_b;
  out.entropy = entropy_a + entropy_b;
  const bool take_b = a.index < 0 || (b.index >= 0 && b.best > a.best);
  out.best = take_b ? b.best : a.best;
  out.index = take_b ? b.index : a.index;
  out.count = a.count + b.count;
  return out;
}

// Merges partials in the order given as a binary counter counts: neighbours of equal weight first.
class PartialTree {
 public:
  explicit PartialTree(const RowMath &math) : math_(math) {}

  void push(const Partial &added) {
    Partial part = added;
    for (uint64_t n = pushed_++; n & 1; n >>= 1) part = merge(stack_[--depth_], part, math_);
    stack_[depth_++] = part;
  }
  Partial total() {
    while (depth_ > 1) {
      --depth_;
      stack_[depth_ - 1] = merge(stack_[depth_ - 1], stack_[depth_], math_);
    }
    return stack_[0];
  }

 private:
  const RowMath &math_;
  uint64_t pushed_ = 0;
  int depth_ = 0;
  Partial stack_[64];
};

// Columns that one task of a split row takes: at most 256 slices a row.
inline int64_t slice_columns(int64_t classes) {
  const uint64_t share = (static_cast<uint64_t>(classes) + 255) / 256;
  return static_cast<int64_t>(std::bit_ceil(share < 16384 ? uint64_t{16384} : share));
}

// One row's gradient: (exp(scale * (v_i - max)) * 2^lift * factor - offset) * 2^post * dz/dx, but for `target`'s, which
// is given. A large factor (z-loss) gives its exponent to `lift`, so that neither it overflows nor the small
// exponentials vanish; what is larger still, to `post`, so that no difference of infinities comes of it; a small one
// too, so that what is subnormal is rounded once. Both factors are numbers of acc, unless the upstream gradient or a
// weight is not one.
struct GradRow {
  double max;
  double factor;
  double offset;
  int lift;  // 0 .. 100
  int post;  // up to the largest exponent of acc, less 1, either way
  int64_t target;
  double target_grad;
};

struct GradOut {
  void *row;
  int64_t stride;
  bool stream;     // store past the caches
  bool backwards;  // from the last column down: the row was just read, and its end is what a cache still holds
};

using ForwardKernel = void (*)(const RowMath &, const Span &, Partial *);
using GradKernel = void (*)(const RowMath &, const GradRow &, const Span &, const GradOut &);
using SquashKernel = double (*)(const RowMath &, double x);  // z of one logit, with the bits of the forward kernel

void forward_f32(const RowMath &, const Span &, Partial *);
void forward_f64(const RowMath &, const Span &, Partial *);
void forward_f16(const RowMath &, const Span &, Partial *);
void forward_bf16(const RowMath &, const Span &, Partial *);
double squash_f32(const RowMath &, double x);
double squash_f64(const RowMath &, double x);
void grad_f32(const RowMath &, const GradRow &, const Span &, const GradOut &);
void grad_f64(const RowMath &, const GradRow &, const Span &, const GradOut &);
void grad_f16(const RowMath &, const GradRow &, const Span &, const GradOut &);
void grad_bf16(const RowMath &, const GradRow &, const Span &, const GradOut &);
void grad_f16_f32(const RowMath &, const GradRow &, const Span &, const GradOut &);
void grad_bf16_f32(const RowMath &, const GradRow &, const Span &, const GradOut &);

void stream_zeros(void *to, size_t bytes);
void stream_fence();  // ends a task whose kernels were asked to stream

}  // namespace xent::cpu
