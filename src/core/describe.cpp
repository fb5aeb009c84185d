// SPDX-FileCopyrightText: the libxent authors
// SPDX-License-Identifier: Apache-2.0

#include "core/describe.hpp"

#include <cinttypes>
#include <cstdio>

#include "common/dtype.hpp"

namespace xent {
namespace {

const char *code_name(uint8_t code) {
  switch (code) {
    case kDLInt:
      return "int";
    case kDLUInt:
      return "uint";
    case kDLFloat:
      return "float";
    case kDLBfloat:
      return "bfloat";
    case kDLComplex:
      return "complex";
    default:
      return nullptr;
  }
}

const char *device_name(int32_t type) {
  switch (type) {
    case kDLCPU:
      return "CPU";
    case kDLCUDA:
      return "CUDA";
    case kDLCUDAHost:
      return "CUDAHost";
    case kDLROCM:
      return "ROCm";
    case kDLCUDAManaged:
      return "CUDAManaged";
    default:
      return nullptr;
  }
}

}  // namespace

Text<32> describe(DLDataType dtype) {
  Text<32> out;
  const char *name = code_name(dtype.code);
  char lanes[8] = "";
  if (dtype.lanes != 1) std::snprintf(lanes, sizeof lanes, "x%u", unsigned{dtype.lanes});
  if (is_bool(dtype)) {
    std::snprintf(out.text, sizeof out.text, "bool");
  } else if (name != nullptr) {
    std::snprintf(out.text, sizeof out.text, "%s%u%s", name, unsigned{dtype.bits}, lanes);
  } else {
    std::snprintf(out.text, sizeof out.text, "(code %u, bits %u)%s", unsigned{dtype.code}, unsigned{dtype.bits}, lanes);
  }
  return out;
}

Text<32> describe(DLDevice device) {
  Text<32> out;
  const auto type = static_cast<int32_t>(device.device_type);
  const char *name = device_name(type);
  if (type == kDLCPU || type == kDLCUDAHost) {
    std::snprintf(out.text, sizeof out.text, "%s", name);
  } else if (name != nullptr) {
    std::snprintf(out.text, sizeof out.text, "%s:%" PRId32, name, device.device_id);
  } else {
    std::snprintf(out.text, sizeof out.text, "(type %" PRId32 "):%" PRId32, type, device.device_id);
  }
  return out;
}

Text<128> describe_list(const int64_t *values, int32_t count) {
  Text<128> out;
  // 24 characters hold any int64 and its separator; what does not fit is elided.
  int used = std::snprintf(out.text, sizeof out.text, "[");
  for (int32_t i = 0; i < count; ++i) {
    if (used + 24 + 5 > static_cast<int>(sizeof out.text)) {
      used += std::snprintf(out.text + used, sizeof out.text - used, ", ...");
      break;
    }
    used += std::snprintf(out.text + used, sizeof out.text - used, i == 0 ? "%" PRId64 : ", %" PRId64, values[i]);
  }
  std::snprintf(out.text + used, sizeof out.text - used, "]");
  return out;
}

}  // namespace xent
