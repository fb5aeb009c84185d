// SPDX-FileCopyrightText: the libxent authors
// SPDX-License-Identifier: Apache-2.0

// Plans and communicators of a split vocabulary: those that fit, and those that are refused.

#include "ranks_fixture.hpp"

namespace xent_test {
namespace {

class RanksPlan : public RanksFixture {
 protected:
  RanksPlan() {
    desc_.struct_size = sizeof(desc_);
    desc_.max_rows = 4;
    desc_.vocab = 10;
    desc_.class_offsets = offsets_.data();
    desc_.rank = 1;
    desc_.ranks = 3;
  }

  using Change = std::function<void(xent_plan_desc &)>;
  std::shared_ptr<xent_plan> plan(const Change &change = {}) {
    xent_plan_desc desc = desc_;
    if (change) change(desc);
    xent_plan *made = nullptr;
    err_ = xent_error{sizeof(xent_error), 0, 0, ""};
    if (xent_plan_create(context_with(0), &desc, &made, &err_) != XENT_OK) return nullptr;
    return {made, xent_plan_destroy};
  }
  void refused(const Change &change, const std::string &text) {
    EXPECT_EQ(plan(change), nullptr) << text;
    EXPECT_EQ(err_.status, XENT_INVALID_ARGUMENT);
    says(text);
  }

  std::vector<int64_t> offsets_ = {0, 10, 20, 25};
  xent_plan_desc desc_ = {};
};

TEST_F(RanksPlan, PlansThatFit) {
  EXPECT_NE(plan(), nullptr) << err_.message;
  EXPECT_NE(plan([](auto &d) { d.vocab = 24; }), nullptr) << err_.message;  // padded
  EXPECT_NE(plan([](auto &d) { d.classes = 25; }), nullptr) << err_.message;
  for (const int32_t rank : {0, 1, 2}) {
    EXPECT_NE(plan([&](auto &d) { d.rank = rank; }), nullptr) << err_.message;
  }
  offsets_ = {0, 25, 25, 25};
  EXPECT_NE(plan([](auto &d) { d.vocab = 0; }), nullptr) << err_.message;
  EXPECT_NE(plan([](auto &d) { d.vocab = 100; }), nullptr) << err_.message;  // no column is read
  EXPECT_NE(plan([](auto &d) { d.rank = 0, d.vocab = 100; }), nullptr) << err_.message;
  EXPECT_NE(plan([&](auto &d) { d.rank = 0, d.ranks = 1, d.vocab = 25; }), nullptr) << err_.message;
}

TEST_F(RanksPlan, TheOffsetsAreCopied) {
  const auto made = plan();
  ASSERT_NE(made, nullptr);
  Problem p = problem(3);
  p.vocab = 25;
  p.logits.resize(5 * 25);
  draw_targets(rng_, p);
  p.split.offsets = offsets_;
  p.split.padding = {0, 0, 0};
  for (int64_t &offset : offsets_) offset = -1;
  verify_ranks(p);  // plans of its own; the one above must only survive
  xent_plan_info info = {};
  info.struct_size = sizeof(info);
  EXPECT_EQ(xent_plan_get_info(made.get(), &info, &err_), XENT_OK);
  EXPECT_EQ(info.partial_width, 3);
}

TEST_F(RanksPlan, Info) {
  const auto info_of = [&](const Change &change) {
    xent_plan_info info = {};
    info.struct_size = sizeof(info);
    const auto made = plan(change);
    EXPECT_EQ(xent_plan_get_info(made.get(), &info, &err_), XENT_OK) << err_.message;
    return info;
  };
  EXPECT_EQ(info_of({}).partial_width, 3);
  EXPECT_EQ(info_of([](auto &d) { d.label_smoothing = 0.1; }).partial_width, 4);
  EXPECT_EQ(info_of([](auto &d) { d.flags = XENT_PLAN_ENTROPY; }).partial_width, 4);
  EXPECT_EQ(info_of([](auto &d) {
              d.flags = XENT_PLAN_ENTROPY | XENT_PLAN_PREDICTED;
              d.label_smoothing = 1;
            }).partial_width,
            6);
  const xent_plan_info whole = info_of([](auto &d) { d.class_offsets = nullptr, d.rank = d.ranks = 0; });
  EXPECT_EQ(whole.partial_width, 0);
  EXPECT_NE(whole.capabilities & unsigned{XENT_CAP_ONE_PASS}, 0u);
  EXPECT_EQ(info_of({}).capabilities & unsigned{XENT_CAP_ONE_PASS}, 0u);
}

TEST_F(RanksPlan, RanksAndOffsets) {
  refused([](auto &d) { d.ranks = -1; }, "ranks: is -1; it must be in [0, 65536]");
  refused([](auto &d) { d.ranks = 65537; }, "ranks: is 65537");
  refused([](auto &d) { d.rank = 3; }, "rank: is 3; it must be in [0, ranks = 3)");
  refused([](auto &d) { d.rank = -1; }, "rank: is -1");
  refused([](auto &d) { d.class_offsets = nullptr; }, "class_offsets: is NULL; ranks is 3");
  refused([](auto &d) { d.ranks = d.rank = 0; }, "the vocabulary is not split, but class_offsets, rank or comm is set");
  refused([](auto &d) { d.ranks = 0, d.class_offsets = nullptr; }, "the vocabulary is not split");
  refused([](auto &d) { d.classes = 24; }, "classes: is 24; it must be 0 or class_offsets[ranks] = 25");
  refused([](auto &d) { d.vocab = -1; }, "vocab: is -1; it must be at least 0");
  refused([](auto &d) { d.vocab = 9; }, "rank 1 holds 10 classes, but its vocab is 9 columns");
}

TEST_F(RanksPlan, GapsAndOverlaps) {
  offsets_ = {1, 10, 20, 25};
  refused({}, "class_offsets: [0] is 1; it must be 0, or classes before it are on no rank");
  offsets_ = {0, 10, 8, 25};
  refused([](auto &d) { d.rank = 0; },
          "class_offsets: [1] is 10 and [2] is 8; they must not decrease, or shards overlap");
  offsets_ = {0, 0, 0, 0};
  refused([](auto &d) { d.vocab = 0; }, "class_offsets: [3] is 0; there must be a class");
}

// Logits that every rank has gathered already would be counted once a rank: Megatron's loss is then off by log(ranks).
TEST_F(RanksPlan, LogitsThatAreGatheredAlready) {
  for (const int64_t vocab : {25, 32}) {
    refused([&](auto &d) { d.vocab = vocab; }, "rank 1 holds 10 of 25 classes: the logits seem to be gathered already");
  }
}

TEST_F(RanksPlan, PredictedNeedsShardsOfLessThanTwoToThe31) {
  offsets_ = {0, 10, 20, 20 + (int64_t{1} << 31)};
  EXPECT_NE(plan(), nullptr) << err_.message;
  refused([](auto &d) { d.flags = XENT_PLAN_PREDICTED; }, "rank 2 holds 2147483648 classes; with XENT_PLAN_PREDICTED");
  EXPECT_NE(plan([](auto &d) { d.flags = XENT_PLAN_PREDICTED, d.logits_dtype = kF64; }), nullptr) << err_.message;
  offsets_[3] = int64_t{20} + INT32_MAX;
  EXPECT_NE(plan([](auto &d) { d.flags = XENT_PLAN_PREDICTED; }), nullptr) << err_.message;
}

// ---- Communicators

TEST_F(RanksPlan, CommunicatorsThatDoNotFitThePlan) {
  ThreadGather gather(device_, 3), other(device_, 2);
  EXPECT_NE(plan([&](auto &d) { d.comm = gather.comm(1); }), nullptr) << err_.message;
  refused([&](auto &d) { d.comm = gather.comm(0); }, "comm: is rank 0 of 3; the plan is rank 1 of 3");
  refused([&](auto &d) { d.comm = other.comm(1); }, "comm: is rank 1 of 2; the plan is rank 1 of 3");
  refused([&](auto &d) { d.device = {kDLCUDA, 0}, d.comm = gather.comm(1); },
          "comm: gathers on CPU; the plan's device is CUDA:0");
}

TEST_F(RanksPlan, CommunicatorDescriptions) {
  xent_comm *comm = nullptr;
  xent_comm_desc good = {};
  good.struct_size = sizeof(good);
  good.ranks = 2;
  good.all_gather = [](void *, const void *, void *, size_t, void *, xent_error *) -> xent_status { return XENT_OK; };
  ASSERT_EQ(xent_comm_create(context_with(0), &good, &comm, &err_), XENT_OK) << err_.message;
  xent_comm_destroy(comm);
  xent_comm_destroy(nullptr);
  const auto bad = [&](const std::function<void(xent_comm_desc &)> &change, const std::string &text) {
    xent_comm_desc desc = good;
    change(desc);
    EXPECT_EQ(xent_comm_create(context_with(0), &desc, &comm, &err_), XENT_INVALID_ARGUMENT);
    says("xent_comm_create: " + text);
  };
  bad([](auto &d) { d.all_gather = nullptr; }, "all_gather: is NULL");
  bad([](auto &d) { d.ranks = 0; }, "ranks: is 0; it must be in [1, 65536]");
  bad([](auto &d) { d.rank = 2; }, "rank: is 2; it must be in [0, ranks = 2)");
  bad([](auto &d) { d.rank = -1; }, "rank: is -1");
  bad([](auto &d) { d.flags = 6; }, "flags: bits 0x6 are unknown");
  bad([](auto &d) { d.reserved = 1; }, "reserved: is 0x1");
  bad([](auto &d) { d.device.device_id = 1; }, "device: {0, 1} is not a DLPack device");
  EXPECT_EQ(xent_comm_create(nullptr, &good, &comm, &err_), XENT_INVALID_ARGUMENT);
  EXPECT_EQ(xent_comm_create(context_with(0), &good, nullptr, &err_), XENT_INVALID_ARGUMENT);
  EXPECT_EQ(xent_comm_create(context_with(0), nullptr, &comm, &err_), XENT_INVALID_ARGUMENT);
}

TEST_F(RanksPlan, PlansKeepTheirCommunicator) {
  int released = 0;
  xent_comm_desc desc = {};
  desc.struct_size = sizeof(desc);
  desc.rank = 1;
  desc.ranks = 3;
  desc.user = &released;
  desc.all_gather = [](void *, const void *, void *, size_t, void *, xent_error *) -> xent_status { return XENT_OK; };
  desc.release = [](void *user) { ++*static_cast<int *>(user); };
  xent_comm *comm = nullptr;
  ASSERT_EQ(xent_comm_create(context_with(0), &desc, &comm, &err_), XENT_OK) << err_.message;
  auto made = plan([&](auto &d) { d.comm = comm; });
  auto again = plan([&](auto &d) { d.comm = comm; });
  xent_comm_destroy(comm);
  EXPECT_EQ(released, 0);
  made.reset();
  EXPECT_EQ(released, 0);
  again.reset();
  EXPECT_EQ(released, 1);
}

}  // namespace
}  // namespace xent_test
