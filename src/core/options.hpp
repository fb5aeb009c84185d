// SPDX-FileCopyrightText: the libxent authors
// SPDX-License-Identifier: Apache-2.0

// The one place that turns an xent_plan_desc into options.
#pragma once

#include <xent/xent_plugin.h>

namespace xent {

// Checks `desc` (already read), fills in defaults and turns flags into values. Host memory of any kind becomes
// {kDLCPU, 0} and managed CUDA memory {kDLCUDA, id}: the device that computes.
xent_status resolve_options(const xent_plan_desc &desc, xent_options *out, xent_error *err);

inline bool on_cpu(const xent_options &options) { return options.device.device_type == kDLCPU; }

// The type of losses, statistics and row outputs: float32, or float64 for float64 logits.
inline DLDataType accumulator_dtype(const xent_options &options) {
  const bool wide = options.logits_dtype.code == kDLFloat && options.logits_dtype.bits == 64;
  return DLDataType{kDLFloat, static_cast<uint8_t>(wide ? 64 : 32), 1};
}

}  // namespace xent
