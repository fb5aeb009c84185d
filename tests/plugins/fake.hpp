// SPDX-FileCopyrightText: the libxent authors
// SPDX-License-Identifier: Apache-2.0

// A backend that computes nothing: it records what the core hands it and answers as it is told.
#pragma once

#include <xent/xent_plugin.h>

struct FakeState {
  int calls = 0;
  int live_plans = 0;
  int releases = 0;
  xent_host_api host = {};
  xent_options options = {};  // of the last plan
  xent_problem problem = {};  // of the last call

  // Answers.
  int32_t preference = 1000;
  const char *why = "";
  xent_status status = XENT_OK;
  const char *message = "";
  bool throws = false;
  size_t workspace_bytes = 256;
  size_t alignment = 64;
};

// Exported by the plugin as fake_state.
using FakeStateFunction = FakeState *(*)();
