// SPDX-FileCopyrightText: the libxent authors
// SPDX-License-Identifier: Apache-2.0

#include "case.hpp"

#include <algorithm>

namespace fuzz {
namespace {

constexpr DLDataType kF16{kDLFloat, 16, 1}, kBF16{kDLBfloat, 16, 1}, kF32{kDLFloat, 32, 1}, kF64{kDLFloat, 64, 1};
constexpr DLDataType kI32{kDLInt, 32, 1}, kI64{kDLInt, 64, 1}, kU8{kDLUInt, 8, 1}, kBool{6, 8, 1};

int64_t product(const std::vector<int64_t> &values) {
  int64_t out = 1;
  for (const int64_t value : values) {
    if (__builtin_mul_overflow(out, value, &out)) return -1;
  }
  return out;
}

}  // namespace

void read_plan(Bytes &in, Case *c) {
  constexpr DLDataType logits[] = {kF32, kBF16, kF16, kF64};
  constexpr DLDataType targets[] = {kI64, kI32};
  constexpr int64_t dims[] = {2, 1, 3, 5, 0, 4, 7, 16};
  xent_plan_desc &desc = c->desc;
  desc.struct_size = sizeof desc;
  desc.logits_dtype = in.pick(logits);
  desc.target_dtype = in.pick(targets);
  const uint8_t operation = in.byte();
  c->operation = operation >= 200 ? kScale : static_cast<Operation>(operation % 3);
  const uint8_t columns = in.byte();
  desc.vocab = columns < 200 ? 1 + columns % 80 : 1 + in.take<uint16_t>() % 600;
  const uint8_t shape = in.byte();
  for (int i = 0; i < shape % 9; ++i) c->leading.push_back(in.pick(dims));
  if (shape >= 250) {  // sizes that no memory holds
    desc.vocab = 1 + in.take<int64_t>() % (int64_t{1} << 56);
    if (desc.vocab < 1) desc.vocab = 1;
    for (int64_t &size : c->leading) size = in.take<uint32_t>();
  }
  desc.max_rows = product(c->leading);
  const Wide bytes = (Wide{desc.vocab} * 8 + 1024) * desc.max_rows;
  if (desc.max_rows < 0 || bytes >= (Wide{1} << 59)) {
    desc.max_rows = 5;  // more rows than the plan has
    c->plain = false;
  }
  desc.classes = std::max<int64_t>(1, desc.vocab - in.byte() % 4);
  const uint8_t flags = in.byte();
  desc.reduction = flags % 3;
  desc.flags = flags >> 3;
  if (desc.reduction != XENT_REDUCTION_MEAN) desc.flags &= ~uint32_t{XENT_PLAN_EMPTY_MEAN_IS_NAN};
  if ((desc.flags & XENT_PLAN_IGNORE_INDEX) != 0) desc.ignore_index = static_cast<int8_t>(in.byte());
  const uint8_t options = in.byte();
  desc.label_smoothing = (options & 1) != 0 ? 0.1 : 0;
  desc.z_loss = (options & 2) != 0 ? 0.1 : 0;
  desc.softcap = (options & 4) != 0 ? 30 : 0;
  desc.logit_scale = (options & 8) != 0 ? 0.5 : 0;
}

namespace {

// What the plan and the call make of a slot: its type, shape, direction, and whether it must or may be there.
enum Presence { kMust, kMay, kMustNot, kNoField };
Presence describe(const Case &c, Slot slot, Tensor *tensor) {
  const xent_plan_desc &desc = c.desc;
  const bool none = desc.reduction == XENT_REDUCTION_NONE;
  const bool mean = desc.reduction == XENT_REDUCTION_MEAN;
  const bool scale = c.operation == kScale;
  const bool forward = c.operation == kForward || c.operation == kBoth;
  const bool backward = c.operation != kForward;
  const DLDataType acc = desc.logits_dtype.bits == 64 ? kF64 : kF32;
  const auto is = [&](DLDataType dtype, const std::vector<int64_t> &shape, bool written, Presence presence) {
    tensor->dtype = dtype;
    tensor->shape = shape;
    tensor->written = written;
    return presence;
  };
  const auto optional = [](bool allowed) { return allowed ? kMay : kMustNot; };
  std::vector<int64_t> matrix = c.leading;
  matrix.push_back(desc.vocab);
  const bool of_forward = slot == kDenominator || slot == kLoss || (slot >= kLse && slot <= kRowCounts);
  const bool of_backward = slot == kGradLoss || slot == kGradLogits;
  const bool of_scale = slot == kTargets || slot == kMask || of_backward;
  if ((of_forward && !forward) || (of_backward && !backward) || (scale && !of_scale)) return kNoField;
  switch (slot) {
    case kLogits:
      return is(desc.logits_dtype, matrix, false, kMust);
    case kTargets:
      return is(desc.target_dtype, c.leading, false, kMust);
    case kMask:
      return is(kBool, c.leading, false, kMay);
    case kRowWeights:
      return is(acc, c.leading, false, kMay);
    case kDenominator:
      return is(kF32, {}, false, optional(!none));
    case kLoss:
      return is(acc, none ? c.leading : std::vector<int64_t>{}, true, kMust);
    case kStats:
      return is(acc, {std::max<int64_t>(0, product(c.leading)), 2}, forward, forward ? kMay : kMust);
    case kDivisor:
      return is(acc, {}, forward,
                forward ? optional(mean || c.tensors[kDenominator].present) : (mean ? kMust : optional(!none)));
    case kLse:
      return is(acc, c.leading, true, kMay);
    case kEntropy:
      return is(acc, c.leading, true, optional((desc.flags & XENT_PLAN_ENTROPY) != 0));
    case kPredicted:
      return is(kI64, c.leading, true, optional((desc.flags & XENT_PLAN_PREDICTED) != 0));
    case kRowCounts:
      return is(kI64, {3}, true, kMay);
    case kGradLoss:
      return is(kF32, none ? c.leading : std::vector<int64_t>{}, false, scale ? kMust : kMay);
    case kGradLogits:
      return is(desc.logits_dtype, matrix, true, kMust);
    default:
      return is(kU8, {static_cast<int64_t>(c.workspace_bytes)}, true, optional(c.workspace_bytes > 0));
  }
}

void read_strides(Bytes &in, Tensor *tensor, Case *c) {
  const auto ndim = tensor->shape.size();
  std::vector<int64_t> &strides = tensor->strides;
  const uint8_t kind = in.byte() % 8;
  if (kind == 0 || ndim == 0) return;
  strides.assign(ndim, 0);
  std::vector<size_t> order(ndim);  // from the innermost out
  for (size_t i = 0; i < ndim; ++i) order[i] = ndim - 1 - i;
  const uint8_t shuffle = kind == 2 ? in.byte() : 0;
  if (kind == 2) std::rotate(order.begin(), order.begin() + static_cast<ptrdiff_t>(shuffle % ndim), order.end());
  const uint8_t bits = kind == 3 || kind == 4 ? in.byte() : 0;
  int64_t stride = kind == 3 ? 1 + bits % 4 : 1;
  for (const size_t dim : order) {
    strides[dim] = kind == 4 && (bits >> dim % 8 & 1) != 0 ? -stride : stride;
    if (__builtin_mul_overflow(stride, std::max<int64_t>(1, tensor->shape[dim]), &stride) ||
        __builtin_add_overflow(stride, kind == 3 ? bits / 4 % 8 : 0, &stride)) {
      stride = 1;
      c->plain = false;
    }
  }
  if (c->huge()) c->plain = false;  // padded, it may span too much
  for (int64_t &s : strides) {
    if (kind == 5) s = static_cast<int8_t>(in.byte());
    if (kind == 6) s = in.take<int64_t>();
    if (kind == 7 && in.byte() % 2 == 0) s = 0;
  }
  if (kind == 6 || ((kind == 5 || kind == 7) && tensor->written)) c->plain = false;
}

// One thing that the library may have to refuse.
void mutate(Bytes &in, Slot slot, Tensor *tensor, Case *c) {
  constexpr DLDataType dtypes[] = {kF32, kF64, kBF16, kF16, kI32, kI64, kU8, kBool};
  c->plain = false;
  switch (in.byte() % 12) {
    case 0:
      tensor->dtype = in.pick(dtypes);
      break;
    case 1:
      tensor->dtype = in.take<DLDataType>();
      break;
    case 2:
      tensor->device = in.take<DLDevice>();
      break;
    case 3:
      tensor->ndim = in.take<int32_t>();
      break;
    case 4:
      tensor->ndim = in.byte() % 10;
      break;
    case 5:
      if (!tensor->shape.empty()) tensor->shape[in.byte() % tensor->shape.size()] = in.take<int64_t>();
      break;
    case 6:
      tensor->byte_offset = in.take<uint64_t>();
      break;
    case 7:
      tensor->null_data = true;
      break;
    case 8:
      tensor->null_shape = true;
      break;
    case 9:
      tensor->position = static_cast<int8_t>(in.byte());
      break;
    case 10: {  // elsewhere in an earlier tensor
      const auto other = in.byte() % (slot + 1);
      tensor->group = c->tensors[static_cast<size_t>(other)].group;
      tensor->position = in.take<int16_t>() * (in.byte() % 4 == 0 ? 1 : std::max<int64_t>(1, tensor->element()));
      break;
    }
    default:
      c->base = in.take<uint64_t>();
  }
  // Shape and strides are as long as an ndim that can be says.
  const auto ndim = static_cast<size_t>(tensor->ndim);
  if (ndim > XENT_MAX_LEADING_DIMS + 1 || ndim == tensor->shape.size()) return;
  tensor->shape.resize(ndim, 1);
  tensor->shape.shrink_to_fit();
  if (!tensor->strides.empty()) tensor->strides.resize(ndim, 1);
  tensor->strides.shrink_to_fit();
}

}  // namespace

void read_tensors(Bytes &in, Case *c) {
  for (int i = 0; i < kSlots; ++i) {
    const auto slot = static_cast<Slot>(i);
    Tensor &tensor = c->tensors[static_cast<size_t>(i)];
    tensor.group = i;
    const Presence presence = describe(*c, slot, &tensor);
    const uint8_t how = in.byte();
    // 0 leaves an optional tensor away, but the workspace.
    tensor.present = presence == kMust || (presence == kMay && ((how & 1) != 0 || slot == kWorkspace));
    if (how >= 240 && presence != kNoField) {
      tensor.present = !tensor.present;
      c->plain = false;
    }
    tensor.ndim = static_cast<int32_t>(tensor.shape.size());
    if (!tensor.present || how < 2) continue;
    if (slot == kMask && (how & 2) != 0) {
      constexpr DLDataType masks[] = {kU8, kI32, kI64, kF32};
      tensor.dtype = in.pick(masks);
    }
    if (slot == kGradLogits && (how & 2) != 0 && tensor.dtype.bits == 16) tensor.dtype = kF32;
    if ((how & 4) != 0) tensor.position = in.byte() % 16 * tensor.element();
    if ((how & 8) != 0) tensor.byte_offset = in.byte();
    if ((how & 16) != 0 && slot != kWorkspace) read_strides(in, &tensor, c);
    if (slot == kWorkspace && tensor.position % 64 != 0) c->plain = false;
    const Tensor kept = tensor;
    if ((how & 32) != 0) mutate(in, slot, &tensor, c);
    if ((how & 64) != 0) mutate(in, slot, &tensor, c);
    if (slot == kWorkspace) {  // a pointer and a size, no more
      const Tensor moved = tensor;
      tensor = kept;
      tensor.group = moved.group;
      tensor.position = moved.position;
    }
    if (slot == kGradLogits && (how & 128) != 0) {  // over the logits
      tensor = c->tensors[kLogits];
      tensor.written = true;
      c->plain = false;
    }
  }
}

}  // namespace fuzz
