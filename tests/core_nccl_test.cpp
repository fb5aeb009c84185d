// SPDX-FileCopyrightText: the libxent authors
// SPDX-License-Identifier: Apache-2.0

// xent_comm_from_nccl with a libnccl that is told what to answer, under a CUDA backend that computes nothing.
#include <optional>

#include "core_plugin.hpp"
#include "plugins/fake_nccl.hpp"

namespace {

FakeState *backend = nullptr;
xent_problem partial_problem;

class NcclTest : public PluginTest {
 protected:
  NcclTest() {
    library_ = dlopen((kPlugins + "/fake_nccl.so").c_str(), RTLD_NOW | RTLD_LOCAL);
    nccl_ = state_of(library_);
    *nccl_ = FakeNccl{};
  }
  ~NcclTest() override {
    xent_plan_destroy(plan_);
    xent_comm_destroy(comm_);
  }
  static FakeNccl *state_of(void *library) { return reinterpret_cast<FakeNcclFunction>(dlsym(library, "fake_nccl"))(); }

  xent_status make(void *library) {
    xent_comm_destroy(comm_);
    comm_ = nullptr;
    return xent_comm_from_nccl(ctx, this, library, &comm_, &err);
  }
  xent_status make_plan(int32_t rank, int32_t device) {
    xent_plan_destroy(plan_);
    plan_ = nullptr;
    static const int64_t offsets[] = {0, 4, 8, 12};
    xent_plan_desc desc{};
    desc.struct_size = sizeof desc;
    desc.device = DLDevice{kDLCUDA, device};
    desc.vocab = 4;
    desc.max_rows = 6;
    desc.class_offsets = offsets;
    desc.rank = rank;
    desc.ranks = 3;
    desc.comm = comm_;
    return xent_plan_create(ctx, &desc, &plan_, &err);
  }
  // Five rows; the tensors need not be there, as the backend does not look.
  xent_status forward() {
    xent_plan_info info{};
    info.struct_size = sizeof info;
    EXPECT_EQ(xent_plan_get_info(plan_, &info, &err), XENT_OK) << err.message;
    alignas(256) static char memory[65536];
    needed_ = info.forward_workspace_bytes;
    int64_t matrix[] = {5, 4}, rows[] = {5};
    const auto tensor = [](void *data, int32_t ndim, int64_t *shape, DLDataType type) {
      DLTensor t{};
      t.data = data;
      t.device = DLDevice{kDLCUDA, 0};
      t.ndim = ndim;
      t.dtype = type;
      t.shape = shape;
      return t;
    };
    const DLTensor logits = tensor(memory + 32768, 2, matrix, {kDLFloat, 32, 1});
    const DLTensor targets = tensor(memory + 36864, 1, rows, {kDLInt, 64, 1});
    const DLTensor loss = tensor(memory + 40960, 1, rows, {kDLFloat, 32, 1});
    xent_forward_args args{};
    args.struct_size = sizeof args;
    args.stream = &needed_;
    args.workspace = memory;
    args.workspace_bytes = needed_;
    args.logits = &logits;
    args.targets = &targets;
    args.loss = &loss;
    workspace_ = memory;
    return xent_forward(plan_, &args, &err);
  }
  void ready() {
    if (backend_loaded_) {
      *nccl_ = FakeNccl{};
    } else {
      backend = load_fake("fake_cuda");
      backend_loaded_ = true;
    }
    ASSERT_EQ(make(library_), XENT_OK) << err.message;
    ASSERT_EQ(make_plan(1, 0), XENT_OK) << err.message;
  }

  void *library_;
  FakeNccl *nccl_;
  xent_comm *comm_ = nullptr;
  xent_plan *plan_ = nullptr;
  char *workspace_ = nullptr;
  size_t needed_ = 0;
  bool backend_loaded_ = false;
};

TEST_F(NcclTest, PartialGatherCombine) {
  ready();
  nccl_->on_gather = [] { partial_problem = backend->problem; };
  const int before = backend->calls;
  ASSERT_EQ(forward(), XENT_OK) << err.message;
  EXPECT_EQ(backend->calls, before + 2);
  EXPECT_EQ(nccl_->gathers, 1);
  EXPECT_EQ(nccl_->comm, this);
  EXPECT_EQ(nccl_->stream, &needed_);
  EXPECT_EQ(nccl_->count, 5u * 3 * sizeof(float));
  EXPECT_EQ(nccl_->data_type, 1);  // ncclUint8
  // Partial wrote what was sent; combine reads what was received.
  EXPECT_EQ(partial_problem.partial.data, nccl_->send);
  EXPECT_EQ(partial_problem.partial.shape[0], 5);
  EXPECT_EQ(partial_problem.partial.stride[0], 3);
  EXPECT_EQ(backend->problem.partial.data, nccl_->recv);
  EXPECT_EQ(backend->problem.partial.shape[0], 15);
  // send, recv and the backend's own bytes lie in the workspace, one after the other.
  const auto *send = static_cast<const char *>(nccl_->send);
  const auto *recv = static_cast<const char *>(nccl_->recv);
  const auto *rest = static_cast<const char *>(backend->problem.workspace);
  EXPECT_GE(send, workspace_);
  EXPECT_GE(recv, send + nccl_->count);
  EXPECT_GE(rest, recv + 3 * nccl_->count);
  EXPECT_EQ(rest + backend->problem.workspace_bytes, workspace_ + needed_);
  EXPECT_GE(backend->problem.workspace_bytes, backend->workspace_bytes);
}

TEST_F(NcclTest, RankRanksAndDeviceAreNccls) {
  load_fake("fake_cuda");
  ASSERT_EQ(make(library_), XENT_OK) << err.message;
  EXPECT_EQ(make_plan(0, 0), XENT_INVALID_ARGUMENT);
  says("comm: is rank 1 of 3; the plan is rank 0 of 3");
  EXPECT_EQ(make_plan(1, 1), XENT_INVALID_ARGUMENT);
  says("comm: gathers on CUDA:0; the plan's device is CUDA:1");
  nccl_->ranks = 4;
  ASSERT_EQ(make(library_), XENT_OK) << err.message;
  EXPECT_EQ(make_plan(1, 0), XENT_INVALID_ARGUMENT);
  says("comm: is rank 1 of 4; the plan is rank 1 of 3");
}

TEST_F(NcclTest, ANonBlockingCommunicatorIsWaitedFor) {
  ready();
  nccl_->gather_result = 7;
  nccl_->pending = 5;
  EXPECT_EQ(forward(), XENT_OK) << err.message;
  EXPECT_GE(nccl_->polls, 5);
  // It may fail in the end.
  nccl_->pending = 2;
  nccl_->on_gather = [] { backend->message = ""; };
  nccl_->state = 6;
  EXPECT_EQ(forward(), XENT_COMM_ERROR);
  EXPECT_EQ(err.native_code, 6);
}

TEST_F(NcclTest, AFailedGather) {
  ready();
  nccl_->gather_result = 5;
  nccl_->last_error = "socketProgress: connection closed";
  EXPECT_EQ(forward(), XENT_COMM_ERROR);
  EXPECT_EQ(err.native_code, 5);
  says("xent_forward: comm: rank 1 of 3: it failed and needs to be made anew");
  says("ncclAllGather: some NCCL error: socketProgress: connection closed (ncclResult_t 5)");
  nccl_->gather_result = 0;
  EXPECT_EQ(forward(), XENT_COMM_ERROR);
  EXPECT_EQ(nccl_->gathers, 1);
  // A new communicator, and a new plan with it.
  ASSERT_EQ(make(library_), XENT_OK) << err.message;
  ASSERT_EQ(make_plan(1, 0), XENT_OK) << err.message;
  EXPECT_EQ(forward(), XENT_OK) << err.message;
}

TEST_F(NcclTest, AnErrorThatShowsLater) {
  ready();
  nccl_->on_gather = [] { state_of(dlopen((kPlugins + "/fake_nccl.so").c_str(), RTLD_NOW))->state = 6; };
  EXPECT_EQ(forward(), XENT_COMM_ERROR) << "seen in the same call";
  says("the communicator: remote process exited (ncclResult_t 6)");
  ready();
  nccl_->state = 6;
  const int before = backend->calls;
  EXPECT_EQ(forward(), XENT_COMM_ERROR) << "seen before the next one";
  EXPECT_EQ(backend->calls, before);
  ready();
  nccl_->state = 0;
  nccl_->async_result = 4;  // what NCCL says of a communicator that was aborted
  EXPECT_EQ(forward(), XENT_COMM_ERROR);
  says("ncclCommGetAsyncError: some NCCL error (ncclResult_t 4)");
}

TEST_F(NcclTest, WhatIsRefused) {
  EXPECT_EQ(xent_comm_from_nccl(nullptr, this, library_, &comm_, &err), XENT_INVALID_ARGUMENT);
  EXPECT_EQ(xent_comm_from_nccl(ctx, nullptr, library_, &comm_, &err), XENT_INVALID_ARGUMENT);
  says("xent_comm_from_nccl: nccl_comm: is NULL");
  EXPECT_EQ(xent_comm_from_nccl(ctx, this, library_, nullptr, &err), XENT_INVALID_ARGUMENT);
  const auto fails = [&](int FakeNccl::*member, const char *what) {
    *nccl_ = FakeNccl{};
    nccl_->*member = 4;
    EXPECT_EQ(make(library_), XENT_COMM_ERROR) << what;
    EXPECT_EQ(err.native_code, 4);
    says(std::string("xent_comm_from_nccl: nccl_comm: ") + what);
  };
  fails(&FakeNccl::count_result, "ncclCommCount: some NCCL error (ncclResult_t 4)");
  fails(&FakeNccl::rank_result, "ncclCommUserRank: some NCCL error");
  fails(&FakeNccl::device_result, "ncclCommCuDevice: some NCCL error");
  fails(&FakeNccl::async_result, "ncclCommGetAsyncError: some NCCL error");
  fails(&FakeNccl::state, "the communicator: some NCCL error");
  *nccl_ = FakeNccl{};
  nccl_->state = 7;  // still being set up
  EXPECT_EQ(make(library_), XENT_OK) << err.message;
  void *other = dlopen((kPlugins + "/other_major.so").c_str(), RTLD_NOW | RTLD_LOCAL);
  EXPECT_EQ(make(other), XENT_PLUGIN_ERROR);
  says("nccl_library: the library has no ncclCommCount");
}

TEST_F(NcclTest, AnOlderLibraryHasNoLastError) {
  void *old = dlopen((kPlugins + "/fake_nccl_old.so").c_str(), RTLD_NOW | RTLD_LOCAL);
  ASSERT_NE(old, nullptr);
  *state_of(old) = FakeNccl{};
  state_of(old)->count_result = 3;
  EXPECT_EQ(make(old), XENT_COMM_ERROR);
  says("ncclCommCount: some NCCL error (ncclResult_t 3)");
}

// NULL stands for the libnccl.so of this process, by its file's name, if there is one and only one.
TEST_F(NcclTest, TheLoadedLibraryIsFound) {
  EXPECT_EQ(make(nullptr), XENT_PLUGIN_ERROR);
  says("nccl_library: this process has loaded no libnccl.so and has no ncclCommCount");
  Folder one, two;
  const std::string first = one.copy(kPlugins + "/fake_nccl.so", "libnccl.so.2");
  const std::string second = two.copy(kPlugins + "/fake_nccl.so", "libnccl.so.2.99");
  void *loaded = dlopen(first.c_str(), RTLD_NOW | RTLD_LOCAL);
  ASSERT_NE(loaded, nullptr) << dlerror();
  state_of(loaded)->count_result = 5;
  EXPECT_EQ(make(nullptr), XENT_COMM_ERROR) << "this one was asked";
  state_of(loaded)->count_result = 0;
  EXPECT_EQ(make(nullptr), XENT_OK) << err.message;
  void *again = dlopen(second.c_str(), RTLD_NOW | RTLD_LOCAL);
  ASSERT_NE(again, nullptr) << dlerror();
  EXPECT_EQ(make(nullptr), XENT_INVALID_ARGUMENT);
  says("nccl_library: is NULL, but this process has loaded ");
  says(first + " and " + second);
  EXPECT_EQ(make(again), XENT_OK) << err.message;
  xent_comm_destroy(comm_);
  comm_ = nullptr;
  dlclose(again);
  dlclose(loaded);
}

}  // namespace
