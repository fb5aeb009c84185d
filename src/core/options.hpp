// SPDX-FileCopyrightText: the libxent authors
// SPDX-License-Identifier: Apache-2.0

// The one place that turns an xent_plan_desc into options.
#pragma once

#include <xent/xent_plugin.h>

namespace xent {

// Checks `desc` (already read), fills in defaults and turns flags into values. Host memory of any kind becomes
// {kDLCPU, 0} and managed CUDA memory {kDLCUDA, id}: the device that computes. class_offsets stays the caller's.
xent_status resolve_options(const xent_plan_desc &desc, xent_options *out, xent_error *err);

// A device as a caller gives it, to the one that computes. `function` heads messages.
xent_status resolve_device(const char *function, DLDevice device, DLDevice *out, xent_error *err);

inline constexpr int32_t kMaximumRanks = 65536;

// Numbers a row of a partial; 0 where the vocabulary is not split.
inline int32_t partial_width(const xent_options &options) {
  if (options.ranks == 0) return 0;
  return 3 + (options.label_smoothing != 0.0) + (options.entropy != 0) + (options.predicted != 0);
}

inline bool on_cpu(const xent_options &options) { return options.device.device_type == kDLCPU; }

// The type of losses, statistics and row outputs: float32, or float64 for float64 logits.
inline DLDataType accumulator_dtype(const xent_options &options) {
  const bool wide = options.logits_dtype.code == kDLFloat && options.logits_dtype.bits == 64;
  return DLDataType{kDLFloat, static_cast<uint8_t>(wide ? 64 : 32), 1};
}

}  // namespace xent
