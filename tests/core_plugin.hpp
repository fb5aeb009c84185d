// SPDX-FileCopyrightText: the libxent authors
// SPDX-License-Identifier: Apache-2.0

// A context, the plugins of tests/plugins, and folders to look for them in.
#pragma once

#include <dlfcn.h>
#include <gtest/gtest.h>
#include <sys/stat.h>
#include <unistd.h>
#include <xent/xent.h>

#include <cstdio>
#include <cstdlib>
#include <fstream>
#include <string>
#include <vector>

#include "plugins/fake.hpp"

inline const std::string kPlugins = XENT_TEST_PLUGINS;

inline FakeState *fake_state(const std::string &path) {
  void *handle = dlopen(path.c_str(), RTLD_NOW | RTLD_NOLOAD);
  if (handle == nullptr) return nullptr;
  const auto function = reinterpret_cast<FakeStateFunction>(dlsym(handle, "fake_state"));
  return function == nullptr ? nullptr : function();
}

// A folder of its own, removed at the end.
class Folder {
 public:
  Folder() {
    char name[] = "/tmp/xent-plugins-XXXXXX";
    path_ = mkdtemp(name) != nullptr ? name : "";
  }
  ~Folder() {
    for (auto file = files_.rbegin(); file != files_.rend(); ++file) std::remove(file->c_str());
    rmdir(path_.c_str());
  }
  Folder(const Folder &) = delete;
  Folder &operator=(const Folder &) = delete;
  void link(const std::string &target, const std::string &name) {
    files_.push_back(path_ + "/" + name);
    EXPECT_EQ(symlink(target.c_str(), files_.back().c_str()), 0);
  }
  void text(const std::string &name) {
    files_.push_back(path_ + "/" + name);
    std::ofstream(files_.back()) << "not a shared library";
  }
  std::string copy(const std::string &source, const std::string &name) {
    files_.push_back(path_ + "/" + name);
    std::ofstream(files_.back(), std::ios::binary) << std::ifstream(source, std::ios::binary).rdbuf();
    return files_.back();
  }
  std::string folder(const std::string &name) {
    files_.push_back(path_ + "/" + name);
    EXPECT_EQ(mkdir(files_.back().c_str(), 0700), 0);
    return files_.back();
  }
  const std::string &path() const { return path_; }

 private:
  std::string path_;
  std::vector<std::string> files_;
};

class PluginTest : public testing::Test {
 protected:
  PluginTest() {
    err.struct_size = sizeof err;
    EXPECT_EQ(xent_context_create(nullptr, &ctx, &err), XENT_OK) << err.message;
    unsetenv("XENT_PLUGIN_PATH");
    // Plugins stay loaded, and with them what an earlier test told them.
    for (const char *name : {"fake_cpu", "fake_cuda"}) {
      if (FakeState *state = fake_state(kPlugins + "/" + name + ".so")) *state = FakeState{};
    }
  }
  ~PluginTest() override {
    xent_context_destroy(ctx);
    unsetenv("XENT_PLUGIN_PATH");
    unsetenv("XENT_TEST_HOSTILE");
  }

  xent_status load(const std::string &path) { return xent_backend_load(ctx, path.c_str(), &err); }
  void says(const std::string &text) {
    EXPECT_NE(std::string(err.message).find(text), std::string::npos) << "message: " << err.message;
  }
  xent_status plan_on(DLDevice device, xent_plan **plan) {
    xent_plan_desc desc{};
    desc.struct_size = sizeof desc;
    desc.device = device;
    desc.vocab = 8;
    desc.max_rows = 4;
    return xent_plan_create(ctx, &desc, plan, &err);
  }
  FakeState *load_fake(const std::string &name) {
    const std::string path = kPlugins + "/" + name + ".so";
    EXPECT_EQ(load(path), XENT_OK) << err.message;
    return fake_state(path);
  }

  xent_context *ctx = nullptr;
  xent_error err{};
};
