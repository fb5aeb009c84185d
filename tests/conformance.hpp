// SPDX-FileCopyrightText: the libxent authors
// SPDX-License-Identifier: Apache-2.0

// Conformance of a backend: random problems over types, shapes, layouts and options in combination, each held against
// the reference and against the bitwise promises; a failure is shrunk to a small problem.
#pragma once

#include <cstdint>
#include <functional>
#include <map>
#include <set>
#include <string>
#include <vector>

#include "harness.hpp"

namespace xent_test::conformance {

struct Case {
  uint64_t seed = 0;
  std::string family;          // of the logits
  std::set<std::string> rows;  // of what kinds, where adversarial
  Problem problem;
};

// The case of a seed; the same on every machine with the same standard library. Its vocabulary is split over one of
// `ranks`, not split where that is empty.
Case draw(uint64_t seed, Backend device, const std::vector<int32_t> &ranks = {});
// The layouts of one shard of a split problem.
void draw_shard_layouts(Problem &shard, uint64_t seed);
// What a case has of types, layouts and options, in words.
std::vector<std::string> features(const Case &c);
// All of it; with the values where it is small.
std::string describe(const Problem &p);
bool ignored(const Problem &p, size_t row);
// Whether the specification says what the result is, and the inputs' own rounding leaves the bars reachable.
bool well_posed(const Problem &p);

// A backend under test: its name, and the kind of memory that it works on.
struct Target {
  Backend device = Backend::kCpu;
  std::string name;
  // A backend of this project serves all that the specification names; others may refuse.
  bool may_refuse = false;
};
// Finds the backend of this name, or the one in the plugin file `path` where that is not empty. Null: `why` tells.
std::optional<Target> find_target(const std::string &name, const std::string &path, std::string *why);

using xent_test::name_of;
enum class Kind { kNone, kRefused, kCall, kDevice, kWrite, kValue, kRepeat, kAlone, kRanks };
const char *name_of(Kind kind);
struct Verdict {
  Kind kind = Kind::kNone;
  std::string what;  // the first wrong element
  bool failed() const { return kind > Kind::kRefused; }
};
Verdict attempt(const Target &target, const Problem &p, uint64_t seed, Worst *worst = nullptr);

// The smallest problem found that fails in the same way.
struct Shrunk {
  Problem problem;
  Verdict verdict;
  int attempts = 0;
};
Shrunk shrink(const Target &target, const Problem &p, const Verdict &verdict, uint64_t seed, double seconds);

struct Limits {
  double seconds = 60;         // used where `problems` is 0
  int64_t problems = 0;        // exactly so many
  uint64_t seed = 0;           // of the first problem; the next has the next
  std::vector<int32_t> ranks;  // to split the vocabularies over; empty: none is split
  double shrink_seconds = 20;
  int reported = 5;  // failures that are shrunk and told
};

struct Count {
  int64_t drawn = 0, failed = 0;
};
struct TypeCount : Count {
  Worst worst;
};
struct Report {
  Count all;
  int64_t refused = 0;
  bool stopped = false;  // the device is lost
  double seconds = 0;
  std::map<std::string, Count> features;
  std::map<std::string, TypeCount> types;
  std::vector<Shrunk> failures;
  bool passed() const { return all.failed == 0 && all.drawn > 0; }
  std::string table() const;
};
struct Listener {
  std::function<void(uint64_t seed)> before = [](uint64_t) {};
  std::function<void(const std::string &line)> progress = [](const std::string &) {};  // every few seconds
  std::function<void(const std::string &text)> failure = [](const std::string &) {};
};
Report campaign(const Target &target, const Limits &limits, const Listener &listener = {});

}  // namespace xent_test::conformance
