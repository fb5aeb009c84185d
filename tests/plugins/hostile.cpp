// SPDX-FileCopyrightText: the libxent authors
// SPDX-License-Identifier: Apache-2.0

// A plugin that breaks one rule, named by XENT_TEST_HOSTILE, when its entry is called.
#include <xent/xent_plugin.h>

#include <cstdlib>
#include <stdexcept>
#include <string>

#include "common/error.hpp"

namespace {

std::string broken_rule() {
  const char *given = std::getenv("XENT_TEST_HOSTILE");
  return given == nullptr ? "" : given;
}

int32_t probe(void *, const xent_options *, char *, size_t) { return broken_rule() == "minor 0" ? 1000 : 0; }
xent_status plan_create(void *, const xent_options *, void **, xent_plan_info *, xent_error *) { return XENT_OK; }
void plan_destroy(void *, void *) {}
xent_status call(void *, void *, const xent_problem *, xent_error *) { return XENT_OK; }
void release(void *) { setenv("XENT_TEST_RELEASED", "yes", 1); }

}  // namespace

extern "C" XENT_API xent_status xent_plugin_entry_v1(const xent_host_api *host, xent_backend_api *out, xent_error *err);
extern "C" XENT_API xent_status xent_plugin_entry_v1(const xent_host_api *host, xent_backend_api *out,
                                                     xent_error *err) {
  static const std::string long_name(100, 'n');
  const std::string breaks = broken_rule();
  *out = xent_backend_api{sizeof *out,  0,    kDLCPU, "hostile", "1.0",   nullptr, probe,   plan_create,
                          plan_destroy, call, call,   call,      nullptr, nullptr, release, call};
  if (breaks == "host" && (host->struct_size != sizeof *host || host->log == nullptr)) throw 1;
  if (breaks == "error") return xent::fail_native(err, XENT_DEVICE_ERROR, 35, "no driver here");
  if (breaks == "silent error") return XENT_UNSUPPORTED;
  if (breaks == "unknown status") return -12345;
  if (breaks == "throws exception") throw std::runtime_error("a C++ exception");
  if (breaks == "throws int") throw 5;
  if (breaks == "size zero") out->struct_size = 0;
  if (breaks == "size short") out->struct_size = offsetof(xent_backend_api, release);
  if (breaks == "size huge") out->struct_size = SIZE_MAX;
  if (breaks == "minor 0") out->struct_size = offsetof(xent_backend_api, scale_grad);  // what follows is not the host's
  if (breaks == "name") out->name = nullptr;
  if (breaks == "name empty") out->name = "";
  if (breaks == "name long") out->name = long_name.c_str();
  if (breaks == "name duplicate") out->name = "cpu";
  if (breaks == "version") out->version = nullptr;
  if (breaks == "probe") out->probe = nullptr;
  if (breaks == "plan_create") out->plan_create = nullptr;
  if (breaks == "plan_destroy") out->plan_destroy = nullptr;
  if (breaks == "forward") out->forward = nullptr;
  if (breaks == "backward") out->backward = nullptr;
  if (breaks == "loss_and_grad") out->loss_and_grad = nullptr;
  if (breaks == "device") out->device_type = 0;
  if (breaks == "no release") out->release = nullptr;
  return XENT_OK;
}
