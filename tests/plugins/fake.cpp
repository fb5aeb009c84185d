// SPDX-FileCopyrightText: the libxent authors
// SPDX-License-Identifier: Apache-2.0

#include "fake.hpp"

#include <cstdio>
#include <mutex>
#include <stdexcept>

#include "common/error.hpp"

namespace {

FakeState state;
std::mutex mutex;  // many threads may be inside at once

xent_status answer(xent_error *err) {
  if (state.throws) throw std::runtime_error("thrown by the fake backend");
  if (state.status == XENT_OK) return XENT_OK;
  if (state.message[0] == '\0') return state.status;
  return xent::fail_native(err, state.status, 77, "%s", state.message);
}

int32_t probe(void *, const xent_options *, char *why, size_t why_bytes) {
  const std::lock_guard<std::mutex> lock(mutex);
  if (state.throws) throw "no exception class";
  std::snprintf(why, why_bytes, "%s", state.why);
  return state.preference;
}

xent_status plan_create(void *, const xent_options *options, void **plan, xent_plan_info *info, xent_error *err) {
  const std::lock_guard<std::mutex> lock(mutex);
  state.options = *options;
  if (const xent_status status = answer(err)) return status;
  *plan = &state;
  info->forward_workspace_bytes = state.workspace_bytes;
  info->backward_workspace_bytes = state.workspace_bytes;
  info->loss_and_grad_workspace_bytes = state.workspace_bytes;
  info->saved_bytes = 11;
  info->alignment = state.alignment;
  info->capabilities = XENT_CAP_ONE_PASS;
  info->partial_width = 99;
  ++state.live_plans;
  return XENT_OK;
}

void plan_destroy(void *, void *) {
  const std::lock_guard<std::mutex> lock(mutex);
  --state.live_plans;
}

xent_status call(void *, void *, const xent_problem *problem, xent_error *err) {
  const std::lock_guard<std::mutex> lock(mutex);
  ++state.calls;
  state.problem = *problem;
  return answer(err);
}

void release(void *) {
  const std::lock_guard<std::mutex> lock(mutex);
  ++state.releases;
}

}  // namespace

extern "C" XENT_API FakeState *fake_state();
extern "C" XENT_API FakeState *fake_state() { return &state; }

extern "C" XENT_API xent_status xent_plugin_entry_v1(const xent_host_api *host, xent_backend_api *out, xent_error *err);
extern "C" XENT_API xent_status xent_plugin_entry_v1(const xent_host_api *host, xent_backend_api *out, xent_error *) {
  {
    const std::lock_guard<std::mutex> lock(mutex);
    state.host = *host;
  }
  host->log(host->host, XENT_LOG_INFO, "fake: entry");
  *out = xent_backend_api{sizeof *out,  0,    FAKE_DEVICE, FAKE_NAME, "1.0", &state, probe,   plan_create,
                          plan_destroy, call, call,        call,      call,  call,   release, call};
  return XENT_OK;
}
