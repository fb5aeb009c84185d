// SPDX-FileCopyrightText: the libxent authors
// SPDX-License-Identifier: Apache-2.0

// The CUDA plugin under hosts that are older than it.

#include <dlfcn.h>

#include <algorithm>
#include <cstddef>
#include <cstdlib>
#include <cstring>
#include <string>

#include "harness.hpp"
#include "xent/xent_plugin.h"

namespace xent_test {
namespace {

TEST(CudaPlugin, FillsWhatTheHostKnows) {
  std::string why;
  if (device_for(Backend::kCuda, &why) == nullptr) GTEST_SKIP() << why;
  const char *folder = std::getenv("XENT_PLUGIN_PATH");
  if (folder == nullptr || std::strchr(folder, ':') != nullptr) GTEST_SKIP() << "XENT_PLUGIN_PATH is not one folder";
  void *plugin = dlopen((std::string(folder) + "/libxent_cuda.so").c_str(), RTLD_NOW | RTLD_LOCAL);
  ASSERT_NE(plugin, nullptr) << dlerror();
  const auto entry = reinterpret_cast<xent_plugin_entry_fn>(dlsym(plugin, XENT_PLUGIN_ENTRY_NAME));
  ASSERT_NE(entry, nullptr);
  const xent_host_api host = {sizeof(xent_host_api), 0, 0, nullptr, [](void *, int32_t, const char *) {}};

  constexpr size_t minor0 = offsetof(xent_backend_api, scale_grad);
  xent_error err = {};
  err.struct_size = sizeof(err);
  for (const size_t known : {minor0, sizeof(xent_backend_api), sizeof(xent_backend_api) + 64}) {
    alignas(xent_backend_api) unsigned char bytes[sizeof(xent_backend_api) + 64];
    std::memset(bytes, 0xA5, sizeof(bytes));
    auto *api = reinterpret_cast<xent_backend_api *>(bytes);
    api->struct_size = known;
    ASSERT_EQ(entry(&host, api, &err), XENT_OK) << err.message;
    EXPECT_EQ(api->struct_size, std::min(known, sizeof(xent_backend_api)));
    EXPECT_STREQ(api->name, "cuda");
    EXPECT_NE(api->combine, nullptr);
    for (size_t i = api->struct_size; i < sizeof(bytes); ++i)
      ASSERT_EQ(bytes[i], 0xA5) << "byte " << i << " of " << known;
  }
  xent_backend_api api = {};
  api.struct_size = minor0 - 1;
  EXPECT_EQ(entry(&host, &api, &err), XENT_PLUGIN_ERROR);
  EXPECT_NE(std::string(err.message).find(std::to_string(minor0 - 1) + " bytes"), std::string::npos) << err.message;
  EXPECT_EQ(api.name, nullptr);
}

}  // namespace
}  // namespace xent_test
