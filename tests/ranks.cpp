// SPDX-FileCopyrightText: the libxent authors
// SPDX-License-Identifier: Apache-2.0

#include "ranks.hpp"

#include <algorithm>
#include <cstdio>
#include <stdexcept>
#include <thread>

namespace xent_test {

Split draw_split(Rng &rng, int64_t classes, int32_t ranks) {
  Split split;
  split.offsets = {0, classes};
  // Two equal cuts make an empty shard.
  for (int32_t r = 1; r < ranks; ++r) split.offsets.push_back(pick(rng, 0, classes));
  if (ranks > 1 && pick(rng, 0, 2) == 0) split.offsets.back() = split.offsets[static_cast<size_t>(ranks) - 1];
  std::sort(split.offsets.begin(), split.offsets.end());
  for (int32_t r = 0; r < ranks; ++r) split.padding.push_back(pick(rng, 0, 2) == 0 ? pick(rng, 1, 40) : 0);
  return split;
}

Problem shard_of(const Problem &p, int32_t rank) {
  const auto r = static_cast<size_t>(rank);
  const int64_t begin = p.split.offsets[r], columns = p.split.offsets[r + 1] - begin, classes = p.vocab;
  // As many columns as classes would look like logits that are gathered already.
  const bool some = columns > 0 && columns < classes;
  const int64_t padding = std::min(p.split.padding[r], some ? classes - columns - 1 : p.split.padding[r]);
  Problem q = p;
  q.split = Split();
  q.class_offsets = p.split.offsets;
  q.rank = rank;
  q.vocab = columns + padding;
  q.classes = 0;
  q.interleave = 0;
  q.logits_layout = q.grad_layout = Layout();
  q.logits.clear();
  for (int64_t row = 0; row < p.rows(); ++row) {
    const auto first = p.logits.begin() + row * classes + begin;
    q.logits.insert(q.logits.end(), first, first + columns);
    q.logits.insert(q.logits.end(), static_cast<size_t>(padding), kNaN);
  }
  return q;
}

ThreadGather::ThreadGather(Device *device, int32_t ranks, std::chrono::milliseconds timeout)
    : device_(device), timeout_(timeout), sent_(static_cast<size_t>(ranks)) {
  for (int32_t r = 0; r < ranks; ++r) members_.push_back({this, r});
  for (Member &m : members_) {
    xent_comm_desc desc = {};
    desc.struct_size = sizeof(desc);
    desc.device = device->dl();
    desc.rank = m.rank;
    desc.ranks = ranks;
    desc.user = &m;
    desc.all_gather = all_gather;
    desc.async_error = async_error;
    desc.release = release;
    xent_error err = {};
    err.struct_size = sizeof(err);
    if (xent_comm_create(context_with(0), &desc, &m.comm, &err) != XENT_OK) throw std::runtime_error(err.message);
  }
}

ThreadGather::~ThreadGather() {
  for (const Member &m : members_) xent_comm_destroy(m.comm);
}

bool ThreadGather::meet() {
  std::unique_lock<std::mutex> lock(mutex_);
  if (broken_) return false;
  const int round = round_;
  if (++here_ == static_cast<int32_t>(members_.size())) {
    here_ = 0;
    ++round_;
    all_here_.notify_all();
    return true;
  }
  if (!all_here_.wait_for(lock, timeout_, [&] { return round_ != round || broken_; })) broken_ = true;
  if (broken_) all_here_.notify_all();
  return !broken_;
}

xent_status ThreadGather::all_gather(void *user, const void *send, void *recv, size_t bytes, void *, xent_error *err) {
  const Member &m = *static_cast<Member *>(user);
  ThreadGather &g = *m.gather;
  const auto timed_out = [&] {
    std::snprintf(err->message, sizeof(err->message), "rank %d waited for %d ms", m.rank,
                  static_cast<int>(g.timeout_.count()));
    err->native_code = 42;
    return xent_status{XENT_COMM_ERROR};
  };
  std::vector<uint8_t> &mine = g.sent_[static_cast<size_t>(m.rank)];
  mine.resize(bytes);
  g.device_->copy_out(mine.data(), send, bytes);
  if (!g.meet()) return timed_out();
  std::vector<uint8_t> all;
  for (const auto &part : g.sent_) all.insert(all.end(), part.begin(), part.end());
  g.device_->copy_in(recv, all.data(), all.size());
  if (m.rank == 0) ++g.gathers_;
  return g.meet() ? xent_status{XENT_OK} : timed_out();
}

xent_status ThreadGather::async_error(void *user, xent_error *err) {
  Member &m = *static_cast<Member *>(user);
  if (!m.fails) return XENT_OK;
  m.fails = false;
  std::snprintf(err->message, sizeof(err->message), "rank %d failed later", m.rank);
  return XENT_DEVICE_ERROR;
}

void ThreadGather::release(void *user) { ++static_cast<Member *>(user)->gather->released_; }

Ranks::Ranks(const Problem &p, Device *device, Door door, const Adjust &adjust, void *stream)
    : whole_(p), device_(device), door_(door), adjust_(adjust) {
  err_.struct_size = sizeof(err_);
  const auto ranks = static_cast<int32_t>(p.split.padding.size());
  if (door == Door::kComm) gather_ = std::make_unique<ThreadGather>(device, ranks);
  for (int32_t r = 0; r < ranks; ++r) {
    shards_.push_back(part(p, r));
    auto plan = make_plan(shards_.back(), &err_);
    if (!plan) return;
    sessions_.push_back(std::make_unique<Session>(shards_.back(), device, std::move(plan), stream));
  }
  if (door == Door::kComm) return;
  const int64_t bytes = ranks * p.rows() * partial_width(p) * p.partial_pitch * size_of(p.acc());
  partials_ = std::make_shared<Memory>(device, bytes, size_of(p.acc()), Guard::kCanary);
  if (bytes > 0) partials_->allow_writes(0, bytes);
  partials_->upload();
  for (auto &session : sessions_) session->share_partials(partials_, ranks);
}

Problem Ranks::part(const Problem &p, int32_t rank) const {
  Problem shard = shard_of(p, rank);
  if (gather_) shard.comm = gather_->comm(rank);
  if (adjust_) adjust_(shard, rank);
  return shard;
}

void Ranks::upload(const Problem &p) {
  whole_ = p;
  for (size_t r = 0; r < sessions_.size(); ++r) {
    shards_[r] = part(p, static_cast<int32_t>(r));
    sessions_[r]->upload(shards_[r]);
  }
  if (partials_) partials_->upload();
}

xent_status Ranks::enqueue(Mode mode, xent_error *err) {
  wrote_gradient_ = mode != Mode::kForward;
  xent_status status = XENT_OK;
  if (door_ == Door::kPartials) {
    for (auto &s : sessions_) status = status == XENT_OK ? s->enqueue_partial(err) : status;
    for (auto &s : sessions_) status = status == XENT_OK ? s->enqueue_combine(err) : status;
    if (mode == Mode::kForward) return status;
    for (auto &s : sessions_) status = status == XENT_OK ? s->enqueue_backward(err) : status;
    return status;
  }
  struct Answer {
    xent_status status = XENT_OK;
    xent_error err = {};
  };
  std::vector<Answer> outcomes(sessions_.size());
  std::vector<std::thread> threads;
  for (size_t r = 0; r < sessions_.size(); ++r) {
    threads.emplace_back([&, r] {
      device_->bind_thread();
      outcomes[r].err.struct_size = sizeof(xent_error);
      outcomes[r].status = sessions_[r]->enqueue(mode, &outcomes[r].err);
    });
  }
  for (std::thread &t : threads) t.join();
  for (const Answer &o : outcomes) {
    if (o.status == XENT_OK) continue;
    if (err != nullptr) *err = o.err;
    return o.status;
  }
  return XENT_OK;
}

Result Ranks::collect(std::string *difference) {
  difference->clear();
  if (partials_) {
    EXPECT_EQ(partials_->download(), "") << "a write outside of the partials";
  }
  std::vector<Result> parts;
  for (auto &s : sessions_) parts.push_back(s->collect());
  Result all = parts[0];
  const auto compare = [&](const char *name, std::vector<uint64_t> Result::*member) {
    for (size_t r = 1; r < parts.size(); ++r) {
      const auto &mine = parts[r].*member;
      const auto at = std::mismatch(mine.begin(), mine.end(), (all.*member).begin());
      if (at.first == mine.end() || !difference->empty()) continue;
      *difference = std::string(name) + " element " + std::to_string(at.first - mine.begin()) + " of rank " +
                    std::to_string(r) + " is not that of rank 0";
    }
  };
  compare("loss", &Result::loss);
  compare("stats", &Result::stats);
  compare("divisor", &Result::divisor);
  compare("lse", &Result::lse);
  compare("entropy", &Result::entropy);
  compare("predicted", &Result::predicted);
  compare("row_counts", &Result::counts);
  all.grad.clear();
  for (int64_t row = 0; row < whole_.rows() && wrote_gradient_; ++row) {
    for (size_t r = 0; r < parts.size(); ++r) {
      const int64_t columns = whole_.split.offsets[r + 1] - whole_.split.offsets[r];
      const auto first = parts[r].grad.begin() + row * shards_[r].vocab;
      all.grad.insert(all.grad.end(), first, first + columns);
      const bool zero = std::all_of(first + columns, first + shards_[r].vocab, [](uint64_t bits) { return bits == 0; });
      if (zero || !difference->empty()) continue;
      *difference = "gradient of the padding of rank " + std::to_string(r) + " is not +0 in row " + std::to_string(row);
    }
  }
  return all;
}

std::optional<Result> run_ranks(const Problem &p, Door door, Mode mode) {
  std::string why;
  Device *device = device_for(p.backend, &why);
  Ranks ranks(p, device, door);
  if (ranks.refusal() != nullptr) {
    ADD_FAILURE() << "xent_plan_create: " << ranks.refusal()->message << "\n" << p.describe();
    return std::nullopt;
  }
  xent_error err = {};
  err.struct_size = sizeof(err);
  const xent_status status = ranks.enqueue(mode, &err);
  device->synchronize();
  if (status != XENT_OK) {
    ADD_FAILURE() << xent_status_name(status) << ": " << err.message << "\n" << p.describe();
    return std::nullopt;
  }
  std::string difference;
  Result result = ranks.collect(&difference);
  EXPECT_EQ(difference, "") << p.describe();
  return result;
}

void verify_ranks(const Problem &p, Worst *worst) {
  SCOPED_TRACE(p.describe());
  const auto partials = run_ranks(p, Door::kPartials, Mode::kForwardBackward);
  const auto comm = run_ranks(p, Door::kComm, Mode::kForwardBackward);
  const auto both = run_ranks(p, Door::kComm, Mode::kLossAndGrad);
  if (!partials || !comm || !both) return;
  if (p.split.padding.size() > 1) {  // one rank alone computes as if there were no split
    EXPECT_TRUE(*partials == *comm) << "the doors differ";
    EXPECT_TRUE(*both == *comm) << "loss_and_grad differs from forward and backward";
  }
  check(p, {{Mode::kForwardBackward, &*partials}, {Mode::kLossAndGrad, &*both}}, worst);
}

}  // namespace xent_test
