// SPDX-FileCopyrightText: the libxent authors
// SPDX-License-Identifier: Apache-2.0

// Finding and loading backend plugins.
#pragma once

#include "core/context.hpp"

namespace xent {

// `path` as in xent_backend_load. `prefix` heads messages: the function, and what for if that helps.
xent_status load_backend(xent_context *ctx, const char *prefix, const char *path, xent_error *err);

}  // namespace xent
