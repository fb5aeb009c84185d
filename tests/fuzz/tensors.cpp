// SPDX-FileCopyrightText: the libxent authors
// SPDX-License-Identifier: Apache-2.0

// Fuzz target: the tensors of forward, backward, loss_and_grad and scale_grad. The same call goes to a backend that
// only records what the core made of it, which is compared with the tensors element by element, and, where the tensors
// have memory, to the CPU backend, which may touch what they describe and nothing else.
#include <dlfcn.h>

#include <string>

#include "../plugins/fake.hpp"
#include "case.hpp"

namespace {

using fuzz::Buffers;
using fuzz::Bytes;
using fuzz::Case;
using fuzz::kBackward;
using fuzz::kForward;
using fuzz::kScale;
using fuzz::Operation;
using fuzz::Slot;
using fuzz::Tensor;
using fuzz::Tensors;
using fuzz::Wide;

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

// ---- The call

struct Call {
  xent_forward_args forward{};
  xent_backward_args backward{};
  xent_loss_and_grad_args both{};
  xent_scale_grad_args scale{};
  Operation operation;

  Call(const Case &c, const Buffers &buffers) : operation(c.operation) {
    const auto at = [&](Slot slot) { return c.tensors[slot].present ? &c.tensors[slot].dl : nullptr; };
    void *const workspace = c.tensors[fuzz::kWorkspace].present ? buffers.address(fuzz::kWorkspace) : nullptr;
    forward.struct_size = sizeof forward;
    backward.struct_size = sizeof backward;
    both.struct_size = sizeof both;
    scale.struct_size = sizeof scale;
    forward.stream = backward.stream = scale.stream = c.stream;
    forward.workspace = backward.workspace = workspace;
    forward.workspace_bytes = backward.workspace_bytes = workspace == nullptr ? 0 : c.workspace_bytes;
    forward.logits = backward.logits = at(fuzz::kLogits);
    forward.targets = backward.targets = scale.targets = at(fuzz::kTargets);
    forward.mask = backward.mask = scale.mask = at(fuzz::kMask);
    forward.row_weights = backward.row_weights = at(fuzz::kRowWeights);
    forward.denominator = at(fuzz::kDenominator);
    forward.loss = at(fuzz::kLoss);
    forward.stats = backward.stats = at(fuzz::kStats);
    forward.divisor = backward.divisor = at(fuzz::kDivisor);
    forward.lse = at(fuzz::kLse);
    forward.entropy = at(fuzz::kEntropy);
    forward.predicted = at(fuzz::kPredicted);
    forward.row_counts = at(fuzz::kRowCounts);
    backward.grad_loss = both.grad_loss = scale.grad_loss = at(fuzz::kGradLoss);
    backward.grad_logits = both.grad_logits = scale.grad_logits = at(fuzz::kGradLogits);
    both.forward = &forward;
  }
  xent_status run(const xent_plan *plan, xent_error *err) const {
    *err = xent_error{};
    err->struct_size = sizeof *err;
    return operation == kForward    ? xent_forward(plan, &forward, err)
           : operation == kBackward ? xent_backward(plan, &backward, err)
           : operation == kScale    ? xent_scale_grad(plan, &scale, err)
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
    } else if (dtype.code == kDLInt || dtype.code == kDLUInt || dtype.code == 6) {
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
    if (!tensor.written || ((over || c.operation == kScale) && i == fuzz::kGradLogits)) continue;
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
                      : c.operation == kScale    ? 0
                                                 : info.loss_and_grad_workspace_bytes;
  *world.recorded = FakeState{};
  world.recorded->workspace_bytes = c.workspace_bytes;
  world.recorded->alignment = info.alignment;
  const Plan recording(world.recording, c.desc);

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
