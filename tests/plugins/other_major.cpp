// SPDX-FileCopyrightText: the libxent authors
// SPDX-License-Identifier: Apache-2.0

// A plugin for another major version of the interface.
#include <xent/xent_plugin.h>

extern "C" XENT_API xent_status xent_plugin_entry_v2(const xent_host_api *host, xent_backend_api *out, xent_error *err);
extern "C" XENT_API xent_status xent_plugin_entry_v2(const xent_host_api *, xent_backend_api *, xent_error *) {
  return XENT_OK;
}
