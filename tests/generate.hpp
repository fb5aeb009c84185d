// SPDX-FileCopyrightText: the libxent authors
// SPDX-License-Identifier: Apache-2.0

// Random problems.
#pragma once

#include <vector>

#include "harness.hpp"

namespace xent_test {

enum class Family { kRandom, kPeaked, kFlat, kOffset, kHeavyTailed };
inline const std::vector<Family> kFamilies = {Family::kRandom, Family::kPeaked, Family::kFlat, Family::kOffset,
                                              Family::kHeavyTailed};
const char *name_of(Family family);

// A problem of the given size with random logits and targets in range; all else default.
Problem plain(Rng &rng, Backend backend, DLDataType dtype, std::vector<int64_t> shape, int64_t vocab,
              Family family = Family::kRandom);

// Redraws the logits; targets first, since a peak stands on the target.
void draw_logits(Rng &rng, Problem &p, Family family);
void draw_targets(Rng &rng, Problem &p);

std::vector<double> draw_normal(Rng &rng, int64_t count, double scale = 1, double mean = 0);
void add_weights(Rng &rng, Problem &p);                 // some zero, some negative where nothing is divided by them
void add_mask(Rng &rng, Problem &p, DLDataType dtype);  // about a quarter 0
void add_upstream(Rng &rng, Problem &p, DLDataType dtype, bool per_row);  // zero, negative and large ones
void add_ignored(Rng &rng, Problem &p, int64_t index);                    // about a quarter of the targets

// The logits' types that the backend takes.
std::vector<DLDataType> dtypes_of(Backend backend);

// Every option drawn at random, in combination.
Problem random_problem(Rng &rng, Backend backend, DLDataType dtype, int64_t rows, int64_t vocab);

}  // namespace xent_test
