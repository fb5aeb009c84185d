// SPDX-FileCopyrightText: the libxent authors
// SPDX-License-Identifier: Apache-2.0

// Loading backends: where they are looked for and what is refused.
#include "core_plugin.hpp"

#include <utility>

namespace {

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
  Dl_info library;
  ASSERT_NE(dladdr(reinterpret_cast<void *>(xent_backend_load), &library), 0);
  const std::string file = library.dli_fname;
  says(", " + file.substr(0, file.rfind('/')) + "/xent, ");
}

// Installed beside the library, in xent/, or built there, in a folder of its own name.
TEST_F(PluginTest, NamesAreLookedForBesideTheLibrary) {
  Dl_info library;
  ASSERT_NE(dladdr(reinterpret_cast<void *>(xent_backend_load), &library), 0);
  for (const char *folder : {"xent", "fake"}) {
    Folder prefix;
    const std::string copy = prefix.copy(library.dli_fname, "libxent_copy.so");
    prefix.folder(folder);
    prefix.link(kPlugins + "/fake_cpu.so", std::string(folder) + "/libxent_fake.so");
    Folder links;
    links.link(copy, "libxent.so");
    for (const std::string &file : {copy, links.path() + "/libxent.so"}) {
      void *handle = dlopen(file.c_str(), RTLD_NOW | RTLD_LOCAL);
      ASSERT_NE(handle, nullptr) << dlerror();
      const auto create = reinterpret_cast<decltype(&xent_context_create)>(dlsym(handle, "xent_context_create"));
      const auto load_in = reinterpret_cast<decltype(&xent_backend_load)>(dlsym(handle, "xent_backend_load"));
      const auto destroy = reinterpret_cast<decltype(&xent_context_destroy)>(dlsym(handle, "xent_context_destroy"));
      xent_context *other = nullptr;
      ASSERT_EQ(create(nullptr, &other, &err), XENT_OK) << err.message;
      EXPECT_EQ(load_in(other, "fake", &err), XENT_OK) << err.message;
      destroy(other);
      dlclose(handle);
    }
  }
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

TEST_F(PluginTest, ABackendWithoutPartialServesNoSplitVocabulary) {
  ASSERT_EQ(load(kPlugins + "/reference.so"), XENT_OK) << err.message;  // preferred, but without partial
  const int64_t offsets[] = {0, 5, 8};
  const auto served = [&](int32_t ranks) {
    xent_plan_desc desc{};
    desc.struct_size = sizeof desc;
    desc.vocab = ranks == 0 ? 8 : 5;
    desc.max_rows = 4;
    desc.ranks = ranks;
    desc.class_offsets = ranks == 0 ? nullptr : offsets;
    xent_plan *plan = nullptr;
    EXPECT_EQ(xent_plan_create(ctx, &desc, &plan, &err), XENT_OK) << err.message;
    xent_plan_info info{};
    info.struct_size = sizeof info;
    EXPECT_EQ(xent_plan_get_info(plan, &info, &err), XENT_OK) << err.message;
    const std::string name = info.backend_name;
    xent_plan_destroy(plan);
    return name;
  };
  EXPECT_EQ(served(0), "reference.cpu");
  EXPECT_EQ(served(2), "cpu");
}

// An entry that is NULL, and a table of before there was one, in whose place anything may lie.
TEST_F(PluginTest, ABackendWithoutScaleGrad) {
  setenv("XENT_TEST_HOSTILE", "minor 0", 1);
  for (const auto &[plugin, name] : {std::pair{"reference", "reference.cpu"}, std::pair{"hostile", "hostile"}}) {
    xent_context *other = nullptr;
    ASSERT_EQ(xent_context_create(nullptr, &other, &err), XENT_OK);
    ASSERT_EQ(xent_backend_load(other, (kPlugins + "/" + plugin + ".so").c_str(), &err), XENT_OK) << err.message;
    xent_plan_desc desc{};
    desc.struct_size = sizeof desc;
    desc.vocab = 8;
    desc.max_rows = 4;
    xent_plan *plan = nullptr;
    ASSERT_EQ(xent_plan_create(other, &desc, &plan, &err), XENT_OK) << err.message;
    xent_scale_grad_args args{};
    args.struct_size = sizeof args;
    EXPECT_EQ(xent_scale_grad(plan, &args, &err), XENT_UNSUPPORTED);
    says("xent_scale_grad: plan: its backend " + std::string(name) + " has no scale_grad; use xent_backward");
    xent_plan_destroy(plan);
    xent_context_destroy(other);
  }
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

}  // namespace
