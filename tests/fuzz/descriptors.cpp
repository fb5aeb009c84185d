// SPDX-FileCopyrightText: the libxent authors
// SPDX-License-Identifier: Apache-2.0

// Fuzz target: descriptions of contexts and plans. Each struct lies in memory of exactly the size that the library may
// read, and what it accepts is compared with xent.h.
#include <xent/xent.h>

#include <cfloat>
#include <cmath>
#include <limits>
#include <memory>
#include <string>
#include <vector>

#include "bytes.hpp"

namespace {

using fuzz::Bytes;
using fuzz::Wide;

constexpr size_t kLongest = 4096;  // structs beyond it are refused unread
constexpr int32_t kMostThreads = 4096;

// A struct of the caller's, of any size, in memory of its own.
template <class T>
class Sized {
 public:
  // `value` with up to four patches, then a struct_size and a tail.
  Sized(Bytes &in, T value) {
    auto *raw = reinterpret_cast<unsigned char *>(&value);
    for (int patches = in.byte() % 5; patches > 0; --patches) {
      const size_t at = sizeof(size_t) + in.byte() % (sizeof(T) - sizeof(size_t));
      const int bytes = 1 + in.byte() % 8;
      for (int i = 0; i < bytes; ++i) {
        const uint8_t byte = in.byte();
        if (at + static_cast<size_t>(i) < sizeof(T)) raw[at + static_cast<size_t>(i)] = byte;
      }
    }
    place(in, value);
  }
  // Fields of the caller's to be fixed after the patches.
  template <class Fix>
  Sized(Bytes &in, T value, const Fix &fix) : Sized(in, value) {
    if (readable() && size_ >= sizeof(T)) fix(*get());
  }

  T *get() { return reinterpret_cast<T *>(memory_.get()); }
  bool readable() const { return size_ >= sizeof(T) && size_ <= kLongest; }
  bool tail_is_zero() const {
    for (size_t i = sizeof(T); i < size_; ++i) {
      if (memory_[i] != 0) return false;
    }
    return true;
  }

 private:
  void place(Bytes &in, const T &value) {
    switch (in.byte() % 4) {
      case 0:
        size_ = sizeof(T);
        break;
      case 1:
        size_ = in.byte();
        break;
      case 2:
        size_ = in.take<uint16_t>();
        break;
      default:
        size_ = in.take<size_t>();
    }
    const size_t bytes = readable() ? size_ : sizeof(size_t);
    memory_ = std::make_unique<unsigned char[]>(bytes);
    std::memcpy(memory_.get(), &value, std::min(bytes, sizeof(T)));
    std::memcpy(memory_.get(), &size_, sizeof size_);
    if (bytes <= sizeof(T)) return;
    const size_t at = sizeof(T) + in.take<uint16_t>() % (bytes - sizeof(T));
    memory_[at] = in.byte();
  }

  size_t size_ = 0;
  std::unique_ptr<unsigned char[]> memory_;
};

// The caller's error, of any size, in memory of its own.
class Error {
 public:
  explicit Error(Bytes &in) {
    size_ = in.byte() % 2 == 0 ? sizeof(xent_error) : in.take<uint16_t>() % (2 * sizeof(xent_error));
    memory_.reset(new unsigned char[std::max(size_, sizeof size_)]);
    std::memset(memory_.get(), 0xa5, std::max(size_, sizeof size_));
    std::memcpy(memory_.get(), &size_, sizeof size_);
  }
  xent_error *get() { return reinterpret_cast<xent_error *>(memory_.get()); }

  // A failure is described, as far as there is room, and a success leaves the struct alone.
  void check(xent_status status, const char *function) const {
    constexpr size_t header = offsetof(xent_error, message);
    if (status == XENT_OK || size_ <= header) {
      for (size_t i = sizeof size_; i < size_; ++i) FUZZ_CHECK(memory_[i] == 0xa5, "the error was written");
      return;
    }
    xent_status told;
    std::memcpy(&told, memory_.get() + offsetof(xent_error, status), sizeof told);
    FUZZ_CHECK(told == status, function);
    const char *text = reinterpret_cast<const char *>(memory_.get()) + header;
    const size_t room = std::min(size_, sizeof(xent_error)) - header;
    const size_t length = strnlen(text, room);
    FUZZ_CHECK(length < room, "the message does not end");
    FUZZ_CHECK(std::strncmp(text, function, std::min(length, std::strlen(function))) == 0, text);
  }

 private:
  size_t size_;
  std::unique_ptr<unsigned char[]> memory_;
};

bool is(const DLDataType &type, int code, int bits) {
  return type.code == code && type.bits == bits && type.lanes == 1;
}
bool unset(const DLDataType &type) { return type.code == 0 && type.bits == 0 && type.lanes == 0; }

// Shards of up to 65536 ranks: 5 classes each, now and then none, up to 1000.
const int64_t *some_offsets() {
  static const std::vector<int64_t> offsets = [] {
    std::vector<int64_t> made;
    for (int64_t r = 0; r <= 65536; ++r) made.push_back(std::min<int64_t>((r - r / 4) * 5, 1000));
    return made;
  }();
  return offsets.data();
}

bool follows_the_rules_of_ranks(const xent_plan_desc &desc) {
  if (desc.ranks == 0) {
    return desc.class_offsets == nullptr && desc.rank == 0 && desc.comm == nullptr && desc.vocab >= 1 &&
           desc.classes >= 0 && desc.classes <= desc.vocab;
  }
  if (desc.ranks < 0 || desc.ranks > 65536 || desc.rank < 0 || desc.rank >= desc.ranks) return false;
  if (desc.class_offsets == nullptr) return false;
  const int64_t classes = desc.class_offsets[desc.ranks];
  const int64_t columns = desc.class_offsets[desc.rank + 1] - desc.class_offsets[desc.rank];
  return classes > 0 && (desc.classes == 0 || desc.classes == classes) && desc.vocab >= columns &&
         (columns == 0 || columns == classes || desc.vocab < classes);
}

// xent.h's rules for a plan on the CPU, but for the size of the struct.
bool follows_the_rules(const xent_plan_desc &desc) {
  const bool wide = is(desc.logits_dtype, kDLFloat, 64);
  const auto normal = [&](double value) {
    return value >= (wide ? DBL_MIN : double{FLT_MIN}) && value <= (wide ? DBL_MAX : double{FLT_MAX});
  };
  const auto factor = [&](double value) { return value == 0 || normal(value); };
  const double scale = desc.logit_scale == 0 ? 1 : desc.logit_scale;
  const bool types =
      (unset(desc.logits_dtype) || wide || is(desc.logits_dtype, kDLFloat, 32) || is(desc.logits_dtype, kDLFloat, 16) ||
       is(desc.logits_dtype, kDLBfloat, 16)) &&
      (unset(desc.target_dtype) || is(desc.target_dtype, kDLInt, 32) || is(desc.target_dtype, kDLInt, 64));
  const Wide row = Wide{desc.vocab} * 8 + 1024 + (desc.ranks == 0 ? 0 : 48 * (Wide{desc.ranks} + 1));
  const bool sizes = desc.vocab >= 0 && desc.max_rows >= 0 && row <= std::numeric_limits<int64_t>::max() &&
                     row * desc.max_rows <= std::numeric_limits<int64_t>::max() && follows_the_rules_of_ranks(desc);
  const bool flags = desc.flags < 32 && desc.reduction >= 0 && desc.reduction <= 2 &&
                     (desc.ignore_index == 0 || (desc.flags & XENT_PLAN_IGNORE_INDEX) != 0) &&
                     ((desc.flags & XENT_PLAN_EMPTY_MEAN_IS_NAN) == 0 || desc.reduction == XENT_REDUCTION_MEAN);
  return desc.next == nullptr && types && sizes && flags && desc.label_smoothing >= 0 && desc.label_smoothing <= 1 &&
         desc.z_loss >= 0 && desc.z_loss <= (wide ? DBL_MAX : double{FLT_MAX}) && factor(desc.softcap) &&
         factor(desc.logit_scale) && (desc.softcap == 0 || normal(scale / desc.softcap));
}

xent_plan_desc plan_desc(Bytes &in) {
  constexpr double numbers[] = {0.0,   0.1,   1.0,  30.0, 1e-40,    1e-310, 1e39,
                                1e300, -1e-9, -0.0, NAN,  INFINITY, 1e-37,  1e30};
  constexpr DLDataType logits[] = {
      {0, 0, 0}, {kDLFloat, 32, 1}, {kDLBfloat, 16, 1}, {kDLFloat, 16, 1}, {kDLFloat, 64, 1}};
  constexpr DLDataType targets[] = {{0, 0, 0}, {kDLInt, 64, 1}, {kDLInt, 32, 1}};
  constexpr int64_t sizes[] = {0, 1, 31, 1 << 20, int64_t{1} << 33, int64_t{1} << 59, int64_t{1} << 60};
  xent_plan_desc desc{};
  desc.struct_size = sizeof desc;
  desc.logits_dtype = in.pick(logits);
  desc.target_dtype = in.pick(targets);
  desc.max_rows = in.pick(sizes);
  desc.vocab = in.pick(sizes) + 1;
  desc.classes = in.pick(sizes);
  desc.ignore_index = static_cast<int8_t>(in.byte());
  desc.flags = in.byte() % 32;
  desc.reduction = in.byte() % 3;
  desc.label_smoothing = in.pick(numbers);
  desc.z_loss = in.pick(numbers);
  desc.softcap = in.pick(numbers);
  desc.logit_scale = in.pick(numbers);
  if (desc.ignore_index != 0) desc.flags |= XENT_PLAN_IGNORE_INDEX;
  if (in.byte() % 4 == 0) {
    constexpr int32_t ranks[] = {1, 2, 3, 8, 400, 65536};
    desc.ranks = in.pick(ranks);
    desc.rank = in.byte() % desc.ranks;
    desc.classes = 0;
    desc.vocab = in.byte() % 8;
    desc.class_offsets = some_offsets();
  }
  return desc;
}

// Fills an info of any size, and compares what there is with a whole one.
void get_info(Bytes &in, const xent_plan *plan, int32_t width) {
  xent_plan_info whole{};
  whole.struct_size = sizeof whole;
  FUZZ_CHECK(xent_plan_get_info(plan, &whole, nullptr) == XENT_OK, "a whole info");
  FUZZ_CHECK(whole.alignment != 0 && (whole.alignment & (whole.alignment - 1)) == 0, "alignment");
  FUZZ_CHECK(whole.partial_width == width && whole.backend_name != nullptr, "partial_width, backend_name");
  Sized<xent_plan_info> info(in, xent_plan_info{});
  Error err(in);
  const size_t size = info.get()->struct_size;
  const xent_status status = xent_plan_get_info(plan, info.get(), err.get());
  err.check(status, "xent_plan_get_info: ");
  FUZZ_CHECK(status == (info.readable() ? XENT_OK : XENT_INVALID_STRUCT), "info");
  FUZZ_CHECK(info.get()->struct_size == size, "struct_size of info");
  if (status != XENT_OK) return;
  FUZZ_CHECK(info.tail_is_zero(), "the tail of info");
  whole.struct_size = size;
  FUZZ_CHECK(std::memcmp(info.get(), &whole, sizeof whole) == 0, "contents of info");
}

void create_plan(Bytes &in, xent_context *ctx) {
  // What pointers point to is the caller's promise.
  Sized<xent_plan_desc> desc(in, plan_desc(in), [](xent_plan_desc &given) {
    if (given.class_offsets != nullptr) given.class_offsets = some_offsets();
    if (given.ranks != 0) given.comm = nullptr;
  });
  Error err(in);
  auto *const untouched = reinterpret_cast<xent_plan *>(&err);
  xent_plan *plan = untouched;
  const xent_status status = xent_plan_create(ctx, desc.get(), &plan, err.get());
  err.check(status, "xent_plan_create: ");
  FUZZ_CHECK(status != XENT_INTERNAL, "xent_plan_create");
  if (!desc.readable() || !desc.tail_is_zero() || desc.get()->next != nullptr) {
    FUZZ_CHECK(status == XENT_INVALID_STRUCT, "a struct that this library does not know");
  } else {
    const DLDevice device = desc.get()->device;
    const auto type = static_cast<int32_t>(device.device_type);
    if (type == kDLCPU || type == kDLCUDAHost || (type == 0 && device.device_id == 0)) {
      FUZZ_CHECK((status == XENT_OK) == follows_the_rules(*desc.get()), xent_status_name(status));
    }
  }
  if (status != XENT_OK) {
    FUZZ_CHECK(plan == untouched, "out of a plan that was refused");
    return;
  }
  const xent_plan_desc &d = *desc.get();
  const int32_t asked = (d.label_smoothing != 0 ? 1 : 0) + ((d.flags & XENT_PLAN_ENTROPY) != 0 ? 1 : 0) +
                        ((d.flags & XENT_PLAN_PREDICTED) != 0 ? 1 : 0);
  get_info(in, plan, d.ranks == 0 ? 0 : 3 + asked);
  xent_plan_destroy(plan);
}

struct Log {
  int messages = 0;
};

void log(void *user, int32_t level, const char *message) {
  FUZZ_CHECK(level >= XENT_LOG_DEBUG && level <= XENT_LOG_ERROR && message[0] != '\0', "a log message");
  ++static_cast<Log *>(user)->messages;
}

void create_context(Bytes &in) {
  Log sink;
  const bool logs = in.byte() % 2 != 0;
  xent_context_desc valid{};
  valid.struct_size = sizeof valid;
  valid.threads = 1;
  // The function is the caller's promise.
  Sized<xent_context_desc> desc(in, valid, [&](xent_context_desc &given) {
    given.log = logs ? log : nullptr;
    given.log_user = logs ? &sink : given.log_user;
  });
  Error err(in);
  auto *const untouched = reinterpret_cast<xent_context *>(&err);
  xent_context *ctx = untouched;
  const xent_status status = xent_context_create(desc.get(), &ctx, err.get());
  err.check(status, "xent_context_create: ");
  if (!desc.readable() || !desc.tail_is_zero() || desc.get()->next != nullptr) {
    FUZZ_CHECK(status == XENT_INVALID_STRUCT, "a struct that this library does not know");
  } else {
    const bool good = desc.get()->flags == 0 && desc.get()->threads >= 0 && desc.get()->threads <= kMostThreads;
    FUZZ_CHECK(status == (good ? XENT_OK : XENT_INVALID_ARGUMENT), xent_status_name(status));
  }
  if (status != XENT_OK) {
    FUZZ_CHECK(ctx == untouched, "out of a context that was refused");
    return;
  }
  FUZZ_CHECK(!logs || sink.messages > 0, "the log");
  FUZZ_CHECK(xent_backend_count(ctx) == 1 && std::strcmp(xent_backend_name(ctx, 0), "cpu") == 0, "backends");
  // A plan starts the threads.
  if (desc.get()->threads > 0 && desc.get()->threads < 4) create_plan(in, ctx);
  xent_context_destroy(ctx);
}

xent_context *shared_context() {
  static const std::unique_ptr<xent_context, void (*)(xent_context *)> ctx(
      [] {
        unsetenv("XENT_PLUGIN_PATH");
        xent_context_desc desc{};
        desc.struct_size = sizeof desc;
        desc.threads = 1;
        xent_context *made = nullptr;
        FUZZ_CHECK(xent_context_create(&desc, &made, nullptr) == XENT_OK, "a context");
        return made;
      }(),
      xent_context_destroy);
  return ctx.get();
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size) {
  Bytes in(data, size);
  if (in.byte() % 4 == 3) {
    create_context(in);
  } else {
    create_plan(in, shared_context());
  }
  return 0;
}
