// SPDX-FileCopyrightText: the libxent authors
// SPDX-License-Identifier: Apache-2.0

// Loading backends: where they are looked for, what is refused, how long they live.
#include <dlfcn.h>
#include <gtest/gtest.h>
#include <unistd.h>
#include <xent/xent.h>

#include <atomic>
#include <cstdlib>
#include <fstream>
#include <string>
#include <thread>
#include <vector>

#include "plugins/fake.hpp"

namespace {

const std::string kPlugins = XENT_TEST_PLUGINS;

FakeState *fake_state(const std::string &path) {
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
    for (const std::string &file : files_) unlink(file.c_str());
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

TEST_F(PluginTest, TheCpuBackendIsBuiltInAndFirst) {
  ASSERT_EQ(xent_backend_count(ctx), 1u);
  EXPECT_STREQ(xent_backend_name(ctx, 0), "cpu");
  EXPECT_EQ(xent_backend_name(ctx, 1), nullptr);
  EXPECT_EQ(xent_backend_count(nullptr), 0u);
  EXPECT_EQ(xent_backend_name(nullptr, 0), nullptr);
}

TEST_F(PluginTest, BadPaths) {
  EXPECT_EQ(xent_backend_load(nullptr, "cuda", &err), XENT_INVALID_ARGUMENT);
  says("xent_backend_load: ctx: is NULL");
  EXPECT_EQ(xent_backend_load(ctx, nullptr, &err), XENT_INVALID_ARGUMENT);
  says("xent_backend_load: path: is NULL");
  EXPECT_EQ(load(""), XENT_INVALID_ARGUMENT);
  says("path: is empty");
  EXPECT_EQ(load("a b"), XENT_INVALID_ARGUMENT);
  says("'a b' is neither a file");
  EXPECT_EQ(load("/no/such/file.so"), XENT_PLUGIN_ERROR);
  says("/no/such/file.so cannot be loaded: ");
  EXPECT_EQ(xent_backend_load(ctx, "/no/such/file.so", nullptr), XENT_PLUGIN_ERROR);
}

TEST_F(PluginTest, AFileThatIsNoLibrary) {
  Folder folder;
  folder.text("libxent_text.so");
  EXPECT_EQ(load(folder.path() + "/libxent_text.so"), XENT_PLUGIN_ERROR);
  says("cannot be loaded: ");
}

TEST_F(PluginTest, AnotherMajorVersion) {
  EXPECT_EQ(load(kPlugins + "/other_major.so"), XENT_PLUGIN_ERROR);
  says("exports no xent_plugin_entry_v1");
}

TEST_F(PluginTest, HostilePluginsAreRefused) {
  const std::vector<std::pair<std::string, std::string>> cases = {
      {"error", "no driver here (XENT_DEVICE_ERROR)"},
      {"silent error", "no message given (XENT_UNSUPPORTED)"},
      {"unknown status", "no message given (XENT_UNKNOWN)"},
      {"throws exception", "its entry threw an exception: a C++ exception"},
      {"throws int", "its entry threw an exception"},
      {"size zero", "struct_size 0"},
      {"size short", "struct_size "},
      {"size huge", "struct_size 18446744073709551615"},
      {"name", "name of its table is NULL"},
      {"name empty", "its name has no characters"},
      {"name long", "its name has too many characters"},
      {"name duplicate", "a backend named cpu is already loaded (built in)"},
      {"version", "version of its table is NULL"},
      {"probe", "probe of its table is NULL"},
      {"plan_create", "plan_create of its table is NULL"},
      {"plan_destroy", "plan_destroy of its table is NULL"},
      {"forward", "forward of its table is NULL"},
      {"backward", "backward of its table is NULL"},
      {"loss_and_grad", "loss_and_grad of its table is NULL"},
      {"device", "serves device type 0"},
  };
  for (const auto &[rule, text] : cases) {
    SCOPED_TRACE(rule);
    setenv("XENT_TEST_HOSTILE", rule.c_str(), 1);
    err = xent_error{sizeof err, 0, 0, ""};
    EXPECT_EQ(load(kPlugins + "/hostile.so"), XENT_PLUGIN_ERROR);
    says("xent_backend_load: " + kPlugins + "/hostile.so: ");
    says(text);
    EXPECT_EQ(err.native_code, rule == "error" ? 35 : 0);
    EXPECT_EQ(xent_backend_count(ctx), 1u);
  }
  for (const char *rule : {"host", "no release"}) {
    setenv("XENT_TEST_HOSTILE", rule, 1);
    xent_context *other = nullptr;
    ASSERT_EQ(xent_context_create(nullptr, &other, &err), XENT_OK);
    EXPECT_EQ(xent_backend_load(other, (kPlugins + "/hostile.so").c_str(), &err), XENT_OK) << err.message;
    xent_context_destroy(other);
  }
}

TEST_F(PluginTest, ARefusedDuplicateIsReleased) {
  unsetenv("XENT_TEST_RELEASED");
  setenv("XENT_TEST_HOSTILE", "name duplicate", 1);
  EXPECT_EQ(load(kPlugins + "/hostile.so"), XENT_PLUGIN_ERROR);
  EXPECT_NE(std::getenv("XENT_TEST_RELEASED"), nullptr);
}

TEST_F(PluginTest, NamesAreLookedForInThePluginPath) {
  Folder first;
  Folder second;
  second.link(kPlugins + "/fake_cpu.so", "libxent_fake.so");
  setenv("XENT_PLUGIN_PATH", (first.path() + ":" + second.path()).c_str(), 1);
  ASSERT_EQ(load("fake"), XENT_OK) << err.message;
  EXPECT_STREQ(xent_backend_name(ctx, 1), "fake");
  EXPECT_EQ(load("fake"), XENT_PLUGIN_ERROR);
  says("a backend named fake is already loaded (" + second.path() + "/libxent_fake.so)");
  EXPECT_EQ(load("absent"), XENT_PLUGIN_ERROR);
  says("libxent_absent.so was not found in " + first.path() + ", " + second.path());
  says("/xent");
}

TEST_F(PluginTest, TheFirstFileFoundDecides) {
  Folder empty;
  Folder broken;
  Folder good;
  broken.text("libxent_fake.so");
  good.link(kPlugins + "/fake_cpu.so", "libxent_fake.so");
  setenv("XENT_PLUGIN_PATH", (empty.path() + ":" + broken.path() + ":" + good.path()).c_str(), 1);
  EXPECT_EQ(load("fake"), XENT_PLUGIN_ERROR);
  says(broken.path() + "/libxent_fake.so cannot be loaded");
  says("; not found in " + empty.path());
}

TEST_F(PluginTest, TheCurrentFolderIsNeverSearched) {
  Folder here;
  here.link(kPlugins + "/fake_cpu.so", "libxent_fake.so");
  char before[4096];
  ASSERT_NE(getcwd(before, sizeof before), nullptr);
  ASSERT_EQ(chdir(here.path().c_str()), 0);
  for (const char *path : {"", ".", ":", "./", "..:", "/nowhere::"}) {
    setenv("XENT_PLUGIN_PATH", path, 1);
    EXPECT_EQ(load("fake"), XENT_PLUGIN_ERROR) << "XENT_PLUGIN_PATH=" << path;
  }
  unsetenv("XENT_PLUGIN_PATH");
  EXPECT_EQ(load("fake"), XENT_PLUGIN_ERROR);
  EXPECT_EQ(load("libxent_fake.so"), XENT_PLUGIN_ERROR);
  EXPECT_EQ(load("./libxent_fake.so"), XENT_OK) << err.message;  // asked for by the caller
  EXPECT_EQ(chdir(before), 0);
}

TEST_F(PluginTest, CudaIsLoadedOnDemand) {
  Folder folder;
  folder.link(kPlugins + "/fake_cuda.so", "libxent_cuda.so");
  setenv("XENT_PLUGIN_PATH", folder.path().c_str(), 1);
  xent_plan *plan = nullptr;
  ASSERT_EQ(plan_on(DLDevice{kDLCUDAManaged, 2}, &plan), XENT_OK) << err.message;
  EXPECT_EQ(xent_backend_count(ctx), 2u);
  const FakeState *state = fake_state(folder.path() + "/libxent_cuda.so");
  EXPECT_EQ(state->options.device.device_type, kDLCUDA);
  EXPECT_EQ(state->options.device.device_id, 2);
  xent_plan_destroy(plan);
  ASSERT_EQ(plan_on(DLDevice{kDLCUDA, 0}, &plan), XENT_OK) << err.message;
  EXPECT_EQ(xent_backend_count(ctx), 2u);
  xent_plan_destroy(plan);
}

TEST_F(PluginTest, CudaThatCannotRunIsUnsupportedWithTheReason) {
  Folder empty;
  Folder folder;
  folder.link(kPlugins + "/hostile.so", "libxent_cuda.so");
  setenv("XENT_PLUGIN_PATH", (empty.path() + ":" + folder.path()).c_str(), 1);
  setenv("XENT_TEST_HOSTILE", "error", 1);
  xent_plan *plan = nullptr;
  EXPECT_EQ(plan_on(DLDevice{kDLCUDA, 0}, &plan), XENT_UNSUPPORTED);
  EXPECT_EQ(plan, nullptr);
  EXPECT_EQ(err.native_code, 35);
  says("xent_plan_create: device: no backend for CUDA:0: " + folder.path() + "/libxent_cuda.so: no driver here");
  says("; not found in " + empty.path());
  EXPECT_EQ(xent_backend_count(ctx), 1u);
}

TEST_F(PluginTest, ADeviceThatNobodyServes) {
  xent_plan *plan = nullptr;
  EXPECT_EQ(plan_on(DLDevice{kDLROCM, 0}, &plan), XENT_UNSUPPORTED);
  says("xent_plan_create: no backend can run this plan on ROCm:0: none serves this device");
}

TEST_F(PluginTest, TheHighestPreferenceWins) {
  FakeState *state = load_fake("fake_cpu");
  xent_plan *plan = nullptr;
  const auto backend = [&] {
    EXPECT_EQ(plan_on(DLDevice{kDLCPU, 0}, &plan), XENT_OK) << err.message;
    xent_plan_info info{};
    info.struct_size = sizeof info;
    EXPECT_EQ(xent_plan_get_info(plan, &info, &err), XENT_OK);
    const std::string name = info.backend_name;
    xent_plan_destroy(plan);
    return name;
  };
  state->preference = 1000;
  EXPECT_EQ(backend(), "fake");
  state->preference = 0;
  EXPECT_EQ(backend(), "cpu");
  state->preference = -5;
  EXPECT_EQ(backend(), "cpu");
}

TEST_F(PluginTest, RefusalsOfEveryBackendAreTold) {
  FakeState *state = load_fake("fake_cuda");
  state->preference = 0;
  state->why = "the moon is not full";
  xent_plan *plan = nullptr;
  EXPECT_EQ(plan_on(DLDevice{kDLCUDA, 0}, &plan), XENT_UNSUPPORTED);
  says("no backend can run this plan on CUDA:0: cuda: the moon is not full");
}

TEST_F(PluginTest, PlanInfoIsTheBackends) {
  FakeState *state = load_fake("fake_cpu");
  xent_plan *plan = nullptr;
  ASSERT_EQ(plan_on(DLDevice{kDLCPU, 0}, &plan), XENT_OK) << err.message;
  xent_plan_info info{};
  EXPECT_EQ(xent_plan_get_info(plan, &info, &err), XENT_INVALID_STRUCT);
  info.struct_size = sizeof info;
  EXPECT_EQ(xent_plan_get_info(nullptr, &info, &err), XENT_INVALID_ARGUMENT);
  EXPECT_EQ(xent_plan_get_info(plan, nullptr, &err), XENT_INVALID_ARGUMENT);
  ASSERT_EQ(xent_plan_get_info(plan, &info, &err), XENT_OK);
  EXPECT_EQ(info.forward_workspace_bytes, state->workspace_bytes);
  EXPECT_EQ(info.saved_bytes, 11u);
  EXPECT_EQ(info.alignment, 64u);
  EXPECT_EQ(info.capabilities, uint32_t{XENT_CAP_ONE_PASS});
  EXPECT_STREQ(info.backend_name, "fake");
  EXPECT_EQ(info.reserved, 0);
  xent_plan_destroy(plan);
}

TEST_F(PluginTest, FailuresOfPlanCreationPassThrough) {
  FakeState *state = load_fake("fake_cpu");
  xent_plan *plan = nullptr;
  state->status = XENT_DEVICE_ERROR;
  state->message = "the device is on fire";
  EXPECT_EQ(plan_on(DLDevice{kDLCPU, 0}, &plan), XENT_DEVICE_ERROR);
  says("xent_plan_create: backend fake: the device is on fire");
  EXPECT_EQ(err.native_code, 77);
  state->message = "";
  EXPECT_EQ(plan_on(DLDevice{kDLCPU, 0}, &plan), XENT_DEVICE_ERROR);
  says("backend fake: no message given");
  state->status = XENT_OK;
  state->throws = true;
  EXPECT_EQ(plan_on(DLDevice{kDLCPU, 0}, &plan), XENT_INTERNAL);
  state->throws = false;
  state->alignment = 48;
  EXPECT_EQ(plan_on(DLDevice{kDLCPU, 0}, &plan), XENT_PLUGIN_ERROR);
  says("an alignment of 48, which is no power of two");
  EXPECT_EQ(plan, nullptr);
  EXPECT_EQ(state->live_plans, 0);
}

TEST_F(PluginTest, AnyOrderOfDestruction) {
  FakeState *state = load_fake("fake_cpu");
  xent_plan *first = nullptr;
  xent_plan *second = nullptr;
  ASSERT_EQ(plan_on(DLDevice{kDLCPU, 0}, &first), XENT_OK) << err.message;
  ASSERT_EQ(plan_on(DLDevice{kDLCPU, 0}, &second), XENT_OK) << err.message;
  EXPECT_EQ(state->live_plans, 2);
  xent_context_destroy(ctx);
  ctx = nullptr;
  EXPECT_EQ(state->releases, 0) << "plans keep their context alive";
  xent_plan_destroy(first);
  EXPECT_EQ(state->releases, 0);
  xent_plan_destroy(second);
  EXPECT_EQ(state->live_plans, 0);
  EXPECT_EQ(state->releases, 1);
  xent_plan_destroy(nullptr);
  xent_context_destroy(nullptr);
}

TEST_F(PluginTest, LoadingWhileOthersCreatePlans) {
  std::atomic<int> failures{0};
  std::vector<std::thread> threads;
  for (int i = 0; i < 4; ++i) {
    threads.emplace_back([&] {
      for (int round = 0; round < 50; ++round) {
        xent_plan_desc desc{};
        desc.struct_size = sizeof desc;
        desc.vocab = 8;
        xent_plan *plan = nullptr;
        if (xent_plan_create(ctx, &desc, &plan, nullptr) != XENT_OK) ++failures;
        xent_plan_destroy(plan);
        for (size_t index = 0; index < xent_backend_count(ctx); ++index) {
          if (xent_backend_name(ctx, index) == nullptr) ++failures;
        }
      }
    });
  }
  EXPECT_EQ(load(kPlugins + "/fake_cuda.so"), XENT_OK) << err.message;
  for (std::thread &thread : threads) thread.join();
  EXPECT_EQ(failures, 0);
}

TEST_F(PluginTest, CudaIsLoadedOnceByManyThreads) {
  Folder folder;
  folder.link(kPlugins + "/fake_cuda.so", "libxent_cuda.so");
  setenv("XENT_PLUGIN_PATH", folder.path().c_str(), 1);
  std::atomic<int> failures{0};
  std::vector<std::thread> threads;
  for (int i = 0; i < 4; ++i) {
    threads.emplace_back([&] {
      xent_plan_desc desc{};
      desc.struct_size = sizeof desc;
      desc.vocab = 8;
      desc.device = DLDevice{kDLCUDA, 0};
      xent_plan *plan = nullptr;
      if (xent_plan_create(ctx, &desc, &plan, nullptr) != XENT_OK) ++failures;
      xent_plan_destroy(plan);
    });
  }
  for (std::thread &thread : threads) thread.join();
  EXPECT_EQ(failures, 0);
  EXPECT_EQ(xent_backend_count(ctx), 2u);
}

TEST(Context, DescriptionsThatAreRefused) {
  xent_error err{};
  err.struct_size = sizeof err;
  xent_context *ctx = nullptr;
  xent_context_desc desc{};
  const auto refused = [&](xent_status status, const std::string &text) {
    EXPECT_EQ(xent_context_create(&desc, &ctx, &err), status);
    EXPECT_NE(std::string(err.message).find(text), std::string::npos) << err.message;
    EXPECT_EQ(ctx, nullptr);
    desc = xent_context_desc{};
    desc.struct_size = sizeof desc;
  };
  refused(XENT_INVALID_STRUCT, "xent_context_create: desc: struct_size is 0");
  desc.flags = 1;
  refused(XENT_INVALID_ARGUMENT, "xent_context_create: flags: 0x1 must be 0");
  desc.threads = -1;
  refused(XENT_INVALID_ARGUMENT, "xent_context_create: threads: is -1");
  desc.next = &desc;
  refused(XENT_INVALID_STRUCT, "next is not NULL");
  EXPECT_EQ(xent_context_create(nullptr, nullptr, &err), XENT_INVALID_ARGUMENT);
}

TEST(Context, LogAndThreadsReachBackends) {
  std::vector<std::string> lines;
  xent_context_desc desc{};
  desc.struct_size = sizeof desc;
  desc.threads = 3;
  desc.log_user = &lines;
  desc.log = [](void *user, int32_t, const char *message) {
    static_cast<std::vector<std::string> *>(user)->push_back(message);
  };
  xent_context *ctx = nullptr;
  ASSERT_EQ(xent_context_create(&desc, &ctx, nullptr), XENT_OK);
  ASSERT_EQ(xent_backend_load(ctx, (kPlugins + "/fake_cpu.so").c_str(), nullptr), XENT_OK);
  EXPECT_EQ(fake_state(kPlugins + "/fake_cpu.so")->host.threads, 3);
  bool found = false;
  for (const std::string &line : lines) found = found || line == "fake: entry";
  EXPECT_TRUE(found);
  xent_context_destroy(ctx);
}

TEST(Version, Names) {
  EXPECT_EQ(xent_abi_version(), uint32_t{XENT_ABI_VERSION});
  EXPECT_STREQ(xent_version_string(), "0.1.0");
  EXPECT_STREQ(xent_status_name(XENT_OK), "XENT_OK");
  EXPECT_STREQ(xent_status_name(XENT_INTERNAL), "XENT_INTERNAL");
  EXPECT_STREQ(xent_status_name(-1), "XENT_UNKNOWN");
  EXPECT_STREQ(xent_status_name(10), "XENT_UNKNOWN");
}

}  // namespace
