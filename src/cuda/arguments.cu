// SPDX-FileCopyrightText: the libxent authors
// SPDX-License-Identifier: Apache-2.0

#include "arguments.hpp"

#include <algorithm>
#include <cfloat>
#include <cmath>

#include "common/dtype.hpp"

namespace xent::cuda {

Element element_of(const DLDataType &type) {
  if (is_f16(type)) return Element::f16;
  if (is_bf16(type)) return Element::bf16;
  if (is_f64(type)) return Element::f64;
  if (is_i32(type)) return Element::i32;
  if (is_i64(type)) return Element::i64;
  if (is_u8(type) || is_bool(type)) return Element::u8;
  return Element::f32;
}

// `d` may be 0: of no rows none is divided.
Divisor divisor_of(int64_t d) {
  d = std::max<int64_t>(d, 1);
  int32_t shift = 0;
  while ((int64_t{1} << shift) < d) ++shift;
  const unsigned __int128 numerator = static_cast<unsigned __int128>(1) << (62 + shift);
  return {static_cast<uint64_t>(numerator / static_cast<uint64_t>(d)) + 1, d, shift};
}

void describe(const xent_view &view, Tensor *tensor) {
  tensor->data = view.data;
  tensor->type = element_of(view.dtype);
  tensor->rank = view.rank;
  // Rows are not divided by the outermost extent, see Tensor::offset.
  for (int dim = 1; dim < view.rank; ++dim) tensor->inner[dim - 1] = divisor_of(view.shape[dim]);
  for (int dim = 0; dim < view.rank; ++dim) tensor->stride[dim] = view.stride[dim];
  tensor->col_stride = view.col_stride;
}

Tensor tensor_of(const xent_view &view) {
  Tensor tensor = {};
  describe(view, &tensor);
  return tensor;
}

Geometry geometry_of(const RowShape &shape) {
  return {shape.warps, shape.batches, shape.keep, shape.cluster, shape.span, 0};
}

Constants constants_of(const xent_options &o) {
  Constants c = {};
  const bool capped = o.softcap != 0.0;
  const double unit = capped ? 1.0 : o.logit_scale;
  // Kept normal and finite: 0 * inf and inf * 0 would turn a -inf logit or a gap of 0 into NaN.
  const auto normal = [](double x) {
    return static_cast<float>(std::clamp(x, static_cast<double>(FLT_MIN), static_cast<double>(FLT_MAX)));
  };
  c.unit = normal(unit);
  c.exponent = normal(unit * 1.4426950408889634074);
  c.sum_scale = static_cast<float>(std::exp2(-std::ceil(std::log2(static_cast<double>(o.classes)))));
  c.mean_scale = static_cast<float>(unit / (static_cast<double>(o.classes) * c.sum_scale));
  c.softcap = static_cast<float>(o.softcap);
  c.softcap_in = capped ? normal(o.logit_scale / o.softcap) : 0.0f;
  c.chain = static_cast<float>(o.logit_scale);
  const int lift = capped && c.chain > 1.0f ? std::ilogb(c.chain) : 0;
  c.slope_lift = static_cast<float>(lift);
  c.slope_drop = std::ldexp(1.0f, -lift);
  c.chain_rest = capped ? 4.0f * std::ldexp(c.chain, -lift) : c.chain;
  c.smoothing = static_cast<float>(o.label_smoothing);
  c.one_minus_smoothing = static_cast<float>(1.0 - o.label_smoothing);
  c.smoothing_per_class = static_cast<float>(o.label_smoothing / static_cast<double>(o.classes));
  c.z_loss = static_cast<float>(o.z_loss);
  return c;
}

Layout layout_of(const Params &p, int64_t size) {
  const auto adjacent = [](const Tensor &t) { return t.rank <= 1 && t.col_stride == 1; };
  const Tensor &x = p.logits, &grad = p.grad_logits;
  for (const Tensor *of_rows : {&p.targets, &p.mask, &p.row_weights, &p.loss, &p.stats, &p.lse, &p.entropy,
                                &p.predicted, &p.grad_loss, &p.partial}) {
    if (of_rows->rank > 1) return Layout::any;
  }
  // The kernels of other layouts count a row's columns in 32 bits, padding included.
  if (!adjacent(x) || p.vocab >= INT32_MAX / 2) return Layout::any;
  const auto at = [](const Tensor &t) { return reinterpret_cast<uintptr_t>(t.data); };
  const auto step = [size](const Tensor &t) { return t.rank == 0 ? 0 : static_cast<uintptr_t>(t.stride[0] * size); };
  if (grad.data != nullptr) {
    const bool alike = (at(x) - at(grad)) % 16 == 0 && (step(x) - step(grad)) % 16 == 0;
    if (grad.type != x.type || !adjacent(grad) || !alike) return Layout::any;
  }
  const bool padded = grad.data != nullptr && p.vocab != p.classes;
  const bool whole = !padded && p.classes * size % 16 == 0 && at(x) % 16 == 0 && step(x) % 16 == 0;
  return whole ? Layout::even : Layout::adjacent;
}

}  // namespace xent::cuda
