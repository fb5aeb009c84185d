// SPDX-FileCopyrightText: the libxent authors
// SPDX-License-Identifier: Apache-2.0

// The tables of src/cuda/geometry.hpp: every shape is one that the kernels can run, for any vocabulary and any chip.
// Needs no GPU.
#include "cuda/geometry.hpp"

#include <gtest/gtest.h>

#include <vector>

namespace xent::cuda {
namespace {

// Of the kernels: vectors of a batch and of a unit, the most warps of a block.
constexpr int kBatchVectors = 128, kUnitVectors = 256, kForwardBatchVectors = 256;
constexpr int kBlockWarps = 24, kMostKept = 5;
// Shared memory of a block: 99 KB (compute capability 8.6, 12.0), 163 (8.0), 227 (9.0); and the warps whose stages fit.
struct Chip {
  int most_warps;
  int64_t stash_bytes;
  bool clusters;
};
constexpr Chip kChips[] = {{8, 97 << 10, false}, {14, 161 << 10, false}, {21, 225 << 10, true}};

std::vector<int64_t> vocabularies() {  // in vectors
  std::vector<int64_t> all;
  for (int64_t v = 1; v < 50000; ++v) all.push_back(v);
  for (int64_t v = 50000; v < int64_t{1} << 28; v += v / 7 + 1) all.push_back(v);
  return all;
}

TEST(CudaGeometry, TeamsHoldTheirRows) {
  for (int64_t v = 1; v <= kTeamVectors; ++v) {
    const RowShape shape = team_shape(v);
    EXPECT_EQ(shape.path, Path::team);
    EXPECT_TRUE(shape.span == 4 || shape.span == 8 || shape.span == 16 || shape.span == 32) << v;
    EXPECT_GE(shape.span * kTeamVectors / 32, v);
    for (const int64_t rows : {1, 7, 100, 5000, 1000000}) {
      const int taken = team_rows(rows, shape.span, 4224);
      EXPECT_GE(taken, 32 / shape.span);
      EXPECT_LE(taken, 32);
    }
  }
}

TEST(CudaGeometry, EveryShapeCanRun) {
  for (const int64_t v : vocabularies()) {
    const RowShape forward = forward_shape(v, kForwardBatchVectors);
    if (v > kTeamVectors) {
      ASSERT_EQ(forward.path, Path::stream) << v;
      ASSERT_EQ(forward.warps, 1) << v;
      ASSERT_EQ(forward.batches, ceil_div(v, kForwardBatchVectors)) << v;
    }
    for (const Chip &chip : kChips) {
      const RowShape both =
          both_shape(v, kBatchVectors, kUnitVectors, chip.most_warps, chip.stash_bytes, chip.clusters);
      ASSERT_EQ(both.path == Path::team, v <= kTeamVectors) << v;
      if (both.path == Path::block) {
        ASSERT_GE(both.warps, 1) << v;
        ASSERT_LE(both.warps, kBlockWarps) << v;
        ASSERT_EQ(both.batches, ceil_div(v, kUnitVectors)) << v;
        ASSERT_GE(both.keep, 0) << v;
        ASSERT_LE(int64_t{both.warps} * both.keep * kUnitVectors * 16, chip.stash_bytes) << v;
      } else if (both.path == Path::stream) {
        ASSERT_GE(both.warps, 1) << v;
        ASSERT_LE(both.warps / both.cluster, chip.most_warps) << v;
        ASSERT_EQ(both.warps % both.cluster, 0) << v;
        ASSERT_LE(both.warps, 32) << v;  // a warp merges them
        ASSERT_EQ(both.batches, ceil_div(v, kBatchVectors)) << v;
        ASSERT_GE(both.keep, 1) << v;
        ASSERT_LE(both.keep, kMostKept) << v;
        ASSERT_TRUE(both.cluster == 1 || chip.clusters) << v;
      }
    }
  }
}

TEST(CudaGeometry, WarpsOfARowOfForwardAreNeverTooMany) {
  for (const int64_t processors : {1, 20, 82, 132, 188}) {
    for (const int64_t rows : {1, 2, 11, 40, 128, 132, 1000, 1056, 1057, 100000}) {
      for (int64_t v = 400; v < 500000; v += v / 5) {
        const int pieces = static_cast<int>(ceil_div(v, 2 * kForwardBatchVectors));
        const int warps = row_warps(v, pieces, rows, processors * kBlockWarps, kBlockWarps);
        ASSERT_GE(warps, 1);
        ASSERT_LE(warps, kBlockWarps);
        ASSERT_LE(warps, std::max(pieces, 8));
      }
    }
  }
}

}  // namespace
}  // namespace xent::cuda
