// SPDX-FileCopyrightText: the libxent authors
// SPDX-License-Identifier: Apache-2.0

// Contexts and plans: which backend is chosen, how long things live, many threads.
#include "core_plugin.hpp"

#include <atomic>
#include <barrier>
#include <cmath>
#include <memory>
#include <thread>

namespace {

class ContextTest : public PluginTest {};

TEST_F(ContextTest, TheHighestPreferenceWins) {
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

TEST_F(ContextTest, RefusalsOfEveryBackendAreTold) {
  FakeState *state = load_fake("fake_cuda");
  state->preference = 0;
  state->why = "the moon is not full";
  xent_plan *plan = nullptr;
  EXPECT_EQ(plan_on(DLDevice{kDLCUDA, 0}, &plan), XENT_UNSUPPORTED);
  says("no backend can run this plan on CUDA:0: cuda: the moon is not full");
}

TEST_F(ContextTest, PlanInfoIsTheBackends) {
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
  EXPECT_EQ(info.partial_width, 0);
  xent_plan_destroy(plan);
}

TEST_F(ContextTest, FailuresOfPlanCreationPassThrough) {
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

TEST_F(ContextTest, AnyOrderOfDestruction) {
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

TEST_F(ContextTest, LoadingWhileOthersCreatePlans) {
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

TEST_F(ContextTest, CudaIsLoadedOnceByManyThreads) {
  Folder folder;
  folder.link(kPlugins + "/fake_cuda.so", "libxent_cuda.so");
  setenv("XENT_PLUGIN_PATH", folder.path().c_str(), 1);
  constexpr int kThreads = 4;
  for (int round = 0; round < 50; ++round) {
    xent_context *shared = nullptr;
    ASSERT_EQ(xent_context_create(nullptr, &shared, &err), XENT_OK) << err.message;
    std::atomic<int> failures{0};
    std::barrier start(kThreads);
    std::vector<std::thread> threads;
    for (int i = 0; i < kThreads; ++i) {
      threads.emplace_back([&] {
        xent_plan_desc desc{};
        desc.struct_size = sizeof desc;
        desc.vocab = 8;
        desc.device = DLDevice{kDLCUDA, 0};
        xent_plan *plan = nullptr;
        start.arrive_and_wait();
        if (xent_plan_create(shared, &desc, &plan, nullptr) != XENT_OK) {
          ++failures;
        } else {
          xent_plan_destroy(plan);
        }
      });
    }
    for (std::thread &thread : threads) thread.join();
    ASSERT_EQ(failures, 0) << "round " << round;
    EXPECT_EQ(xent_backend_count(shared), 2u);
    xent_context_destroy(shared);
  }
}

// Every thread has contexts of its own, each with workers and a plan that two threads run at once, the context gone.
TEST(Context, ComeAndGoOnManyThreads) {
  constexpr int64_t kRows = 3, kVocab = 40000;
  std::vector<float> zeros(kRows * kVocab);
  int64_t classes[kRows] = {0, 20000, 39999};
  int64_t shape[] = {kRows, kVocab};
  DLTensor logits{zeros.data(), {kDLCPU, 0}, 2, {kDLFloat, 32, 1}, shape, nullptr, 0};
  DLTensor targets{classes, {kDLCPU, 0}, 1, {kDLInt, 64, 1}, shape, nullptr, 0};
  std::atomic<int> failures{0};

  const auto compute = [&](const xent_plan *plan) {
    float losses[kRows] = {};
    DLTensor loss{losses, {kDLCPU, 0}, 1, {kDLFloat, 32, 1}, shape, nullptr, 0};
    xent_plan_info info{};
    info.struct_size = sizeof info;
    failures += xent_plan_get_info(plan, &info, nullptr) != XENT_OK;
    std::vector<char> workspace(info.forward_workspace_bytes + info.alignment);
    xent_forward_args args{};
    args.struct_size = sizeof args;
    void *start = workspace.data();
    size_t room = workspace.size();
    args.workspace = std::align(info.alignment, info.forward_workspace_bytes, start, room);
    args.workspace_bytes = info.forward_workspace_bytes;
    args.logits = &logits;
    args.targets = &targets;
    args.loss = &loss;
    failures += xent_forward(plan, &args, nullptr) != XENT_OK;
    for (const float value : losses) failures += std::abs(value - std::log(float{kVocab})) > 1e-4f;
  };
  std::vector<std::thread> threads;
  for (int i = 0; i < 4; ++i) {
    threads.emplace_back([&] {
      for (int round = 0; round < 8; ++round) {
        xent_context_desc context{};
        context.struct_size = sizeof context;
        context.threads = 3;
        xent_plan_desc desc{};
        desc.struct_size = sizeof desc;
        desc.vocab = kVocab;
        desc.max_rows = kRows;
        xent_context *ctx = nullptr;
        xent_plan *plan = nullptr;
        failures += xent_context_create(&context, &ctx, nullptr) != XENT_OK;
        failures += xent_plan_create(ctx, &desc, &plan, nullptr) != XENT_OK;
        std::thread other([&] {
          xent_context_destroy(ctx);
          compute(plan);
        });
        compute(plan);
        other.join();
        xent_plan_destroy(plan);
      }
    });
  }
  for (std::thread &thread : threads) thread.join();
  EXPECT_EQ(failures, 0);
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
  desc.threads = 4097;
  refused(XENT_INVALID_ARGUMENT, "xent_context_create: threads: is 4097; it must be in [0, 4096]");
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
