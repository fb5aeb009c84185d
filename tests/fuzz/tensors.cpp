// SPDX-FileCopyrightText: the libxent authors
// SPDX-License-Identifier: Apache-2.0

// Fuzz target: the tensors of forward, backward and loss_and_grad. The same call goes to a backend that only records
// what the core made of it, which is compared with the tensors element by element, and, where the tensors have memory,
// to the CPU backend, which may touch what they describe and nothing else.
#include <dlfcn.h>

#include <string>

#include "../plugins/fake.hpp"
#include "layout.hpp"

namespace {

using fuzz::Buffers;
using fuzz::Bytes;
using fuzz::Slot;
using fuzz::Tensor;
using fuzz::Tensors;
using fuzz::Wide;

constexpr DLDataType kF16{kDLFloat, 16, 1}, kBF16{kDLBfloat, 16, 1}, kF32{kDLFloat, 32, 1}, kF64{kDLFloat, 64, 1};
constexpr DLDataType kI32{kDLInt, 32, 1}, kI64{kDLInt, 64, 1}, kU8{kDLUInt, 8, 1}, kBool{6, 8, 1};

enum Operation { kForward, kBackward, kBoth };

struct World {
  xent_context *cpu = nullptr;
  xent_context *recording = nullptr;
  FakeState *recorded = nullptr;

  World() {
    xent_context_desc desc{};
    desc.struct_size = sizeof desc;
    desc.threads = 1;
    xent_error err{};
    err.struct_size = sizeof err;
    const std::string plugin = std::string(XENT_TEST_PLUGINS) + "/fake_cpu.so";
    FUZZ_CHECK(xent_context_create(&desc, &cpu, &err) == XENT_OK, err.message);
    FUZZ_CHECK(xent_context_create(&desc, &recording, &err) == XENT_OK, err.message);
    FUZZ_CHECK(xent_backend_load(recording, plugin.c_str(), &err) == XENT_OK, err.message);
    void *handle = dlopen(plugin.c_str(), RTLD_NOW | RTLD_NOLOAD);
    recorded = reinterpret_cast<FakeStateFunction>(dlsym(handle, "fake_state"))();
  }
  ~World() {
    xent_context_destroy(recording);
    xent_context_destroy(cpu);
  }
};

struct Plan {
  xent_plan *plan = nullptr;
  Plan(xent_context *ctx, const xent_plan_desc &desc) {
    xent_error err{};
    err.struct_size = sizeof err;
    FUZZ_CHECK(xent_plan_create(ctx, &desc, &plan, &err) == XENT_OK, err.message);
  }
  ~Plan() { xent_plan_destroy(plan); }
  Plan(const Plan &) = delete;
  Plan &operator=(const Plan &) = delete;
};

// ---- From bytes to a call

struct Case {
  xent_plan_desc desc{};
  Operation operation = kForward;
  std::vector<int64_t> leading;
  Tensors tensors;
  uint64_t base = 0;  // of addresses, where there is no memory
  size_t workspace_bytes = 0;
  void *stream = nullptr;
  bool plain = true;  // nothing was done that the library may refuse

  bool huge() const { return desc.vocab > 700 || desc.max_rows > 64; }
};

int64_t product(const std::vector<int64_t> &values) {
  int64_t out = 1;
  for (const int64_t value : values) {
    if (__builtin_mul_overflow(out, value, &out)) return -1;
  }
  return out;
}

void read_plan(Bytes &in, Case *c) {
  constexpr DLDataType logits[] = {kF32, kBF16, kF16, kF64};
  constexpr DLDataType targets[] = {kI64, kI32};
  constexpr int64_t dims[] = {2, 1, 3, 5, 0, 4, 7, 16};
  xent_plan_desc &desc = c->desc;
  desc.struct_size = sizeof desc;
  desc.logits_dtype = in.pick(logits);
  desc.target_dtype = in.pick(targets);
  c->operation = static_cast<Operation>(in.byte() % 3);
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

// What the plan and the call make of a slot: its type, shape, direction, and whether it must or may be there.
enum Presence { kMust, kMay, kMustNot, kNoField };
Presence describe(const Case &c, Slot slot, Tensor *tensor) {
  const xent_plan_desc &desc = c.desc;
  const bool none = desc.reduction == XENT_REDUCTION_NONE;
  const bool mean = desc.reduction == XENT_REDUCTION_MEAN;
  const bool forward = c.operation != kBackward;
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
  const bool of_forward =
      slot == fuzz::kDenominator || slot == fuzz::kLoss || (slot >= fuzz::kLse && slot <= fuzz::kRowCounts);
  const bool of_backward = slot == fuzz::kGradLoss || slot == fuzz::kGradLogits;
  if ((of_forward && !forward) || (of_backward && !backward)) return kNoField;
  switch (slot) {
    case fuzz::kLogits:
      return is(desc.logits_dtype, matrix, false, kMust);
    case fuzz::kTargets:
      return is(desc.target_dtype, c.leading, false, kMust);
    case fuzz::kMask:
      return is(kBool, c.leading, false, kMay);
    case fuzz::kRowWeights:
      return is(acc, c.leading, false, kMay);
    case fuzz::kDenominator:
      return is(kF32, {}, false, optional(!none));
    case fuzz::kLoss:
      return is(acc, none ? c.leading : std::vector<int64_t>{}, true, kMust);
    case fuzz::kStats:
      return is(acc, {std::max<int64_t>(0, product(c.leading)), 2}, forward, forward ? kMay : kMust);
    case fuzz::kDivisor:
      return is(acc, {}, forward,
                forward ? optional(mean || c.tensors[fuzz::kDenominator].present) : (mean ? kMust : optional(!none)));
    case fuzz::kLse:
      return is(acc, c.leading, true, kMay);
    case fuzz::kEntropy:
      return is(acc, c.leading, true, optional((desc.flags & XENT_PLAN_ENTROPY) != 0));
    case fuzz::kPredicted:
      return is(kI64, c.leading, true, optional((desc.flags & XENT_PLAN_PREDICTED) != 0));
    case fuzz::kRowCounts:
      return is(kI64, {3}, true, kMay);
    case fuzz::kGradLoss:
      return is(kF32, none ? c.leading : std::vector<int64_t>{}, false, kMay);
    case fuzz::kGradLogits:
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

void read_tensors(Bytes &in, Case *c) {
  for (int i = 0; i < fuzz::kSlots; ++i) {
    const auto slot = static_cast<Slot>(i);
    Tensor &tensor = c->tensors[static_cast<size_t>(i)];
    tensor.group = i;
    const Presence presence = describe(*c, slot, &tensor);
    const uint8_t how = in.byte();
    // 0 leaves an optional tensor away, but the workspace.
    tensor.present = presence == kMust || (presence == kMay && ((how & 1) != 0 || slot == fuzz::kWorkspace));
    if (how >= 240 && presence != kNoField) {
      tensor.present = !tensor.present;
      c->plain = false;
    }
    tensor.ndim = static_cast<int32_t>(tensor.shape.size());
    if (!tensor.present || how < 2) continue;
    if (slot == fuzz::kMask && (how & 2) != 0) {
      constexpr DLDataType masks[] = {kU8, kI32, kI64, kF32};
      tensor.dtype = in.pick(masks);
    }
    if (slot == fuzz::kGradLogits && (how & 2) != 0 && tensor.dtype.bits == 16) tensor.dtype = kF32;
    if ((how & 4) != 0) tensor.position = in.byte() % 16 * tensor.element();
    if ((how & 8) != 0) tensor.byte_offset = in.byte();
    if ((how & 16) != 0 && slot != fuzz::kWorkspace) read_strides(in, &tensor, c);
    if (slot == fuzz::kWorkspace && tensor.position % 64 != 0) c->plain = false;
    const Tensor kept = tensor;
    if ((how & 32) != 0) mutate(in, slot, &tensor, c);
    if ((how & 64) != 0) mutate(in, slot, &tensor, c);
    if (slot == fuzz::kWorkspace) {  // a pointer and a size, no more
      const Tensor moved = tensor;
      tensor = kept;
      tensor.group = moved.group;
      tensor.position = moved.position;
    }
    if (slot == fuzz::kGradLogits && (how & 128) != 0) {  // over the logits
      tensor = c->tensors[fuzz::kLogits];
      tensor.written = true;
      c->plain = false;
    }
  }
}

// ---- The call

struct Call {
  xent_forward_args forward{};
  xent_backward_args backward{};
  xent_loss_and_grad_args both{};
  Operation operation;

  Call(const Case &c, const Buffers &buffers) : operation(c.operation) {
    const auto at = [&](Slot slot) { return c.tensors[slot].present ? &c.tensors[slot].dl : nullptr; };
    void *const workspace = c.tensors[fuzz::kWorkspace].present ? buffers.address(fuzz::kWorkspace) : nullptr;
    forward.struct_size = sizeof forward;
    backward.struct_size = sizeof backward;
    both.struct_size = sizeof both;
    forward.stream = backward.stream = c.stream;
    forward.workspace = backward.workspace = workspace;
    forward.workspace_bytes = backward.workspace_bytes = workspace == nullptr ? 0 : c.workspace_bytes;
    forward.logits = backward.logits = at(fuzz::kLogits);
    forward.targets = backward.targets = at(fuzz::kTargets);
    forward.mask = backward.mask = at(fuzz::kMask);
    forward.row_weights = backward.row_weights = at(fuzz::kRowWeights);
    forward.denominator = at(fuzz::kDenominator);
    forward.loss = at(fuzz::kLoss);
    forward.stats = backward.stats = at(fuzz::kStats);
    forward.divisor = backward.divisor = at(fuzz::kDivisor);
    forward.lse = at(fuzz::kLse);
    forward.entropy = at(fuzz::kEntropy);
    forward.predicted = at(fuzz::kPredicted);
    forward.row_counts = at(fuzz::kRowCounts);
    backward.grad_loss = both.grad_loss = at(fuzz::kGradLoss);
    backward.grad_logits = both.grad_logits = at(fuzz::kGradLogits);
    both.forward = &forward;
  }
  xent_status run(const xent_plan *plan, xent_error *err) const {
    *err = xent_error{};
    err->struct_size = sizeof *err;
    return operation == kForward    ? xent_forward(plan, &forward, err)
           : operation == kBackward ? xent_backward(plan, &backward, err)
                                    : xent_loss_and_grad(plan, &both, err);
  }
};

// Is a view the tensor that it was made from?
void compare(const Case &c, Slot slot, const Buffers &buffers, const xent_view &view) {
  const Tensor &tensor = c.tensors[slot];
  const std::string text = "slot " + std::to_string(slot);
  const char *const where = text.c_str();
  if (!tensor.present || tensor.empty()) {
    FUZZ_CHECK(view.data == nullptr, where);
    return;
  }
  FUZZ_CHECK(tensor.well_formed() && !tensor.null_data, where);
  const bool inner =
      slot == fuzz::kLogits || slot == fuzz::kGradLogits || slot == fuzz::kStats || slot == fuzz::kRowCounts;
  const int64_t columns = inner ? tensor.shape.back() : 1;
  const Wide rows = tensor.elements() / columns;
  Wide viewed = 1;
  FUZZ_CHECK(view.rank >= 0 && view.rank <= XENT_MAX_LEADING_DIMS, where);
  for (int32_t dim = 0; dim < view.rank; ++dim) {
    FUZZ_CHECK(view.shape[dim] > 1, where);
    viewed *= view.shape[dim];
  }
  FUZZ_CHECK(viewed == rows, where);
  const auto first = reinterpret_cast<uint64_t>(buffers.address(slot));
  Wide low, high;
  tensor.extent(&low, &high);
  FUZZ_CHECK(first + low >= 0 && first + high <= (Wide{1} << 64), where);
  for (Wide i = 0; i < rows; i = i < 40 ? i + 1 : i + std::max<Wide>(1, (rows - i) / 3)) {
    Wide row = i, offset = 0;
    for (int32_t dim = view.rank - 1; dim >= 0; --dim) {
      offset += row % view.shape[dim] * view.stride[dim];
      row /= view.shape[dim];
    }
    for (const int64_t column : {int64_t{0}, columns / 2, columns - 1}) {
      const Wide there =
          reinterpret_cast<uint64_t>(view.data) + (offset + Wide{column} * view.col_stride) * tensor.element();
      FUZZ_CHECK(there == first + tensor.offset_of(i * columns + column), where);
    }
  }
}

void compare_all(const Case &c, const Buffers &buffers, const xent_problem &problem) {
  const xent_view *views[] = {&problem.logits,      &problem.targets,    &problem.mask,      &problem.row_weights,
                              &problem.denominator, &problem.loss,       &problem.stats,     &problem.divisor,
                              &problem.lse,         &problem.entropy,    &problem.predicted, &problem.row_counts,
                              &problem.grad_loss,   &problem.grad_logits};
  for (int slot = 0; slot < fuzz::kWorkspace; ++slot) compare(c, static_cast<Slot>(slot), buffers, *views[slot]);
  FUZZ_CHECK(problem.workspace == nullptr || problem.workspace_bytes >= c.workspace_bytes, "workspace");
}

// The gradient over the logits, with the flag for it.
bool is_overwrite(const Case &c, Slot a, Slot b) {
  if ((c.desc.flags & XENT_PLAN_OVERWRITE_LOGITS) == 0) return false;
  if (!(a == fuzz::kLogits && b == fuzz::kGradLogits) && !(a == fuzz::kGradLogits && b == fuzz::kLogits)) return false;
  const Tensor &x = c.tensors[fuzz::kLogits], &y = c.tensors[fuzz::kGradLogits];
  if (!x.present || !y.present || x.group != y.group || x.dtype.code != y.dtype.code || x.dtype.bits != y.dtype.bits ||
      x.shape != y.shape) {
    return false;
  }
  for (Wide i = 0; i < x.elements(); ++i) {
    if (x.position + x.offset_of(i) != y.position + y.offset_of(i)) return false;
  }
  return true;
}

// Values that lead somewhere: targets about the range, masks of 0 and 1, half of the logits of a common size.
void fill(Bytes &in, const Case &c, Buffers &buffers) {
  const auto seed = in.take<uint32_t>();
  buffers.fill(seed);
  const auto store = [](const DLDataType &dtype, unsigned char *at, int value) {
    const float single = static_cast<float>(value);
    const double wide = value;
    const int64_t integer = value;
    if (dtype.code == kDLFloat && dtype.bits == 32) {
      std::memcpy(at, &single, sizeof single);
    } else if (dtype.code == kDLFloat && dtype.bits == 64) {
      std::memcpy(at, &wide, sizeof wide);
    } else if (dtype.code == kDLInt || dtype.code == kDLUInt || dtype.code == kBool.code) {
      std::memcpy(at, &integer, std::min(sizeof integer, (dtype.bits + size_t{7}) / 8));
    }
  };
  const auto width = static_cast<uint32_t>(c.desc.vocab + 3);
  if (seed % 4 != 3) {
    buffers.for_elements(fuzz::kTargets, [&](int64_t i, unsigned char *at) {
      store(c.tensors[fuzz::kTargets].dtype, at, static_cast<int>((seed + static_cast<uint32_t>(i) * 7) % width) - 1);
    });
    buffers.for_elements(fuzz::kMask, [&](int64_t i, unsigned char *at) {
      store(c.tensors[fuzz::kMask].dtype, at, (seed >> i % 32 & 1) != 0);
    });
  }
  if (seed % 2 == 0) {
    buffers.for_elements(fuzz::kLogits, [&](int64_t i, unsigned char *at) {
      store(c.tensors[fuzz::kLogits].dtype, at, static_cast<int>((seed + static_cast<uint32_t>(i) * 13) % 17) - 8);
    });
  }
}

// The real computation, in memory of exactly the tensors' bytes.
void compute(Bytes &in, const Case &c, Buffers &buffers, const Call &call, const xent_plan *plan,
             xent_status expected) {
  fill(in, c, buffers);
  const auto before = buffers.snapshot();
  xent_error err;
  const xent_status status = call.run(plan, &err);
  FUZZ_CHECK(status == expected, err.message);
  FUZZ_CHECK(buffers.unchanged(before, status == XENT_OK), "bytes that are no output's");
  if (status != XENT_OK) return;
  // Again, with other bytes in outputs and workspace.
  const auto first = buffers.snapshot();
  buffers.restore(before);
  const bool over = is_overwrite(c, fuzz::kLogits, fuzz::kGradLogits);
  for (int i = 0; i < fuzz::kSlots; ++i) {
    const Tensor &tensor = c.tensors[static_cast<size_t>(i)];
    if (!tensor.written || (over && i == fuzz::kGradLogits)) continue;
    buffers.for_elements(static_cast<Slot>(i), [&](int64_t, unsigned char *at) {
      for (int64_t b = 0; b < tensor.element(); ++b) at[b] = static_cast<unsigned char>(~at[b]);
    });
  }
  FUZZ_CHECK(call.run(plan, &err) == XENT_OK, err.message);
  auto second = buffers.snapshot();
  const auto scratch = static_cast<size_t>(c.tensors[fuzz::kWorkspace].group);
  if (c.tensors[fuzz::kWorkspace].present && scratch == fuzz::kWorkspace) second[scratch] = first[scratch];
  FUZZ_CHECK(scratch != fuzz::kWorkspace || second == first, "the same inputs, other bits");
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size) {
  static World world;
  Bytes in(data, size);
  Case c;
  read_plan(in, &c);
  const Plan cpu(world.cpu, c.desc);
  xent_plan_info info{};
  info.struct_size = sizeof info;
  xent_plan_get_info(cpu.plan, &info, nullptr);
  c.workspace_bytes = c.operation == kForward    ? info.forward_workspace_bytes
                      : c.operation == kBackward ? info.backward_workspace_bytes
                                                 : info.loss_and_grad_workspace_bytes;
  *world.recorded = FakeState{};
  world.recorded->workspace_bytes = c.workspace_bytes;
  world.recorded->alignment = info.alignment;
  const Plan recording(world.recording, c.desc);

  c.base = uint64_t{1} << 44;
  read_tensors(in, &c);
  if (in.byte() >= 250) {
    c.stream = reinterpret_cast<void *>(uintptr_t{64});
    c.plain = false;
  }
  Buffers buffers(c.tensors, c.base);
  const Call call(c, buffers);
  xent_error err;
  const xent_status status = call.run(recording.plan, &err);
  FUZZ_CHECK(status == XENT_OK || status == XENT_INVALID_ARGUMENT || status == XENT_WORKSPACE_TOO_SMALL, err.message);
  FUZZ_CHECK((status == XENT_OK) == (err.message[0] == '\0'), err.message);
  FUZZ_CHECK(world.recorded->calls == (status == XENT_OK), "calls of the backend");
  if (c.plain) FUZZ_CHECK(status == XENT_OK, err.message);
  if (status == XENT_OK) compare_all(c, buffers, world.recorded->problem);
  if (!buffers.in_memory()) return 0;

  const bool overlap = buffers.overlap([&](Slot a, Slot b) { return is_overwrite(c, a, b); });
  if (overlap) FUZZ_CHECK(status != XENT_OK, "an overlap was accepted");
  if (std::strstr(err.message, "overlap") != nullptr && std::strstr(err.message, "could not be shown") == nullptr) {
    FUZZ_CHECK(overlap, err.message);
  }
  compute(in, c, buffers, call, cpu.plan, status);
  return 0;
}
