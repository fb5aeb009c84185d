// SPDX-FileCopyrightText: the libxent authors
// SPDX-License-Identifier: Apache-2.0

// The overlap decision, compared with the bytes themselves.
#include "core/overlap.hpp"

#include <gtest/gtest.h>

#include <algorithm>
#include <cstdlib>
#include <map>
#include <random>
#include <string>
#include <vector>

#include "common/dtype.hpp"
#include "common/view.hpp"

namespace xent {
namespace {

constexpr uintptr_t kBase = 1 << 20;

struct Layout {
  uintptr_t address = kBase;
  uint8_t bits = 32;
  std::vector<int64_t> shape;
  std::vector<int64_t> stride;
  int64_t columns = 1;
  int64_t col_stride = 1;
};

xent_view view_of(const Layout &layout) {
  xent_view view{};
  view.data = reinterpret_cast<void *>(layout.address);
  view.dtype = DLDataType{kDLInt, layout.bits, 1};
  view.rank = static_cast<int32_t>(layout.shape.size());
  std::copy(layout.shape.begin(), layout.shape.end(), view.shape);
  std::copy(layout.stride.begin(), layout.stride.end(), view.stride);
  view.col_stride = layout.col_stride;
  return view;
}

Overlap pair(const Layout &a, const Layout &b) {
  const xent_view view_a = view_of(a);
  const xent_view view_b = view_of(b);
  const Overlap found = find_overlap(Region{&view_a, a.columns}, Region{&view_b, b.columns});
  EXPECT_EQ(found, find_overlap(Region{&view_b, b.columns}, Region{&view_a, a.columns}));
  return found;
}

Overlap self(const Layout &layout) {
  const xent_view view = view_of(layout);
  return find_self_overlap(Region{&view, layout.columns});
}

// How many elements hold each byte.
std::map<uintptr_t, int> bytes_of(const Layout &layout) {
  std::map<uintptr_t, int> bytes;
  const xent_view view = view_of(layout);
  int64_t rows = 1;
  for (const int64_t extent : layout.shape) rows *= extent;
  for (int64_t row = 0; row < rows; ++row) {
    for (int64_t col = 0; col < layout.columns; ++col) {
      const int64_t offset = row_offset(view, row) + col * layout.col_stride;
      for (int byte = 0; byte < layout.bits / 8; ++byte) ++bytes[layout.address + offset * (layout.bits / 8) + byte];
    }
  }
  return bytes;
}

TEST(Overlap, RangesApart) {
  EXPECT_EQ(pair({kBase, 32, {4}, {8}, 8}, {kBase + 128, 32, {4}, {8}, 8}), Overlap::kNone);
  EXPECT_EQ(pair({kBase, 32, {4}, {8}, 8}, {kBase + 124, 32, {4}, {8}, 8}), Overlap::kSome);
  EXPECT_EQ(pair({kBase, 32, {}, {}, 1}, {kBase + 2, 16, {}, {}, 1}), Overlap::kSome);
  EXPECT_EQ(pair({kBase, 32, {}, {}, 1}, {kBase + 4, 16, {}, {}, 1}), Overlap::kNone);
}

TEST(Overlap, InterleavedRowsAreDisjoint) {
  const int64_t rows = 100000;
  const int64_t vocab = 128256;
  EXPECT_EQ(pair({kBase, 32, {rows}, {2 * vocab}, vocab}, {kBase + 4 * vocab, 32, {rows}, {2 * vocab}, vocab}),
            Overlap::kNone);
  EXPECT_EQ(pair({kBase, 32, {rows}, {2 * vocab}, vocab}, {kBase + 4 * vocab - 4, 32, {rows}, {2 * vocab}, vocab}),
            Overlap::kSome);
  // bfloat16 logits and a float32 gradient, in one allocation of 6 * vocab bytes a row.
  EXPECT_EQ(pair({kBase, 16, {rows}, {3 * vocab}, vocab}, {kBase + 2 * vocab, 32, {rows}, {3 * vocab / 2}, vocab}),
            Overlap::kNone);
}

TEST(Overlap, InterleavedColumnsAreDisjoint) {
  EXPECT_EQ(pair({kBase, 32, {64}, {2000}, 1000, 2}, {kBase + 4, 32, {64}, {2000}, 1000, 2}), Overlap::kNone);
  EXPECT_EQ(pair({kBase, 16, {64}, {2000}, 1000, 2}, {kBase + 2, 32, {64}, {1000}, 500, 2}), Overlap::kSome);
  EXPECT_EQ(pair({kBase, 32, {8, 64}, {64000, 1}, 1000, 64}, {kBase, 32, {8, 64}, {64000, 1}, 1000, 64}),
            Overlap::kSome);
}

TEST(Overlap, NegativeStrides) {
  EXPECT_EQ(pair({kBase + 252, 32, {32}, {-2}, 1}, {kBase, 32, {32}, {2}, 1}), Overlap::kNone);
  EXPECT_EQ(pair({kBase + 248, 32, {32}, {-2}, 1}, {kBase, 32, {32}, {2}, 1}), Overlap::kSome);
}

TEST(Overlap, SelfOverlap) {
  EXPECT_EQ(self({kBase, 32, {4}, {8}, 8}), Overlap::kNone);
  EXPECT_EQ(self({kBase, 32, {4}, {7}, 8}), Overlap::kSome);
  EXPECT_EQ(self({kBase, 32, {4}, {0}, 8}), Overlap::kSome);
  EXPECT_EQ(self({kBase, 32, {4}, {8}, 8, 0}), Overlap::kSome);
  EXPECT_EQ(self({kBase, 32, {4}, {-8}, 8}), Overlap::kNone);
  EXPECT_EQ(self({kBase, 32, {5, 3}, {1, 40}, 8, 5}), Overlap::kNone);
  // Strides 3 and 2 meet at 6: from the third row on.
  EXPECT_EQ(self({kBase, 32, {2}, {3}, 3, 2}), Overlap::kNone);
  EXPECT_EQ(self({kBase, 32, {3}, {3}, 4, 2}), Overlap::kSome);
  EXPECT_EQ(self({kBase, 32, {}, {}, 1}), Overlap::kNone);
}

TEST(Overlap, BeyondInt32) {
  const int64_t far = int64_t{1} << 40;
  EXPECT_EQ(self({kBase, 32, {1000}, {far}, 1000, 1}), Overlap::kNone);
  EXPECT_EQ(pair({kBase, 32, {1000}, {far}, 1000, 1}, {kBase + 4000, 32, {1000}, {far}, 1000, 1}), Overlap::kNone);
  EXPECT_EQ(pair({kBase, 32, {1000}, {far}, 1000, 1}, {kBase + 3996, 32, {1000}, {far}, 1000, 1}), Overlap::kSome);
}

TEST(Overlap, HardProblemsAreGivenUpNotGuessed) {
  // Many large, nearly equal, coprime steps: a subset-sum problem without a short cut.
  Layout hard{kBase, 64, {9001, 9011, 9013, 9029, 9041, 9043, 9049, 9059}, {}, 1, 1};
  for (const int64_t prime :
       {9000000011, 9000000031, 9000000041, 9000000043, 9000000053, 9000000071, 9000000083, 9000000097})
    hard.stride.push_back(prime);
  Layout other = hard;
  other.address += 8 * 4500000000001;
  EXPECT_NE(pair(hard, other), Overlap::kNone);
}

TEST(Overlap, RandomLayoutsAgainstTheirBytes) {
  const char *given = std::getenv("XENT_TEST_SEED");
  const unsigned seed = given != nullptr ? static_cast<unsigned>(std::atoll(given)) : std::random_device{}();
  SCOPED_TRACE("XENT_TEST_SEED=" + std::to_string(seed));
  std::mt19937 random(seed);
  const auto pick = [&](int64_t low, int64_t high) {
    return std::uniform_int_distribution<int64_t>(low, high)(random);
  };
  const auto layout = [&](bool wide) {
    Layout out;
    out.bits = static_cast<uint8_t>(8 << pick(0, 3));
    const int64_t element = out.bits / 8;
    out.address = kBase + static_cast<uintptr_t>(element * pick(0, (wide ? 400 : 60) / element));
    const int64_t rank = pick(0, 3);
    for (int64_t dim = 0; dim < rank; ++dim) {
      out.shape.push_back(pick(2, 5));
      out.stride.push_back(pick(-24, 24));
    }
    out.columns = pick(1, 6);
    out.col_stride = pick(-9, 9);
    return out;
  };
  int64_t seen[2] = {0, 0};
  int64_t seen_self[2] = {0, 0};
  for (int round = 0; round < 6000; ++round) {
    const Layout a = layout(round % 2 == 0);
    const Layout b = layout(false);
    const auto bytes_a = bytes_of(a);
    bool common = false;
    for (const auto &byte : bytes_of(b)) common = common || bytes_a.count(byte.first) != 0;
    bool twice = false;
    for (const auto &byte : bytes_a) twice = twice || byte.second > 1;
    const auto print = [](const Layout &l) {
      std::string s = std::to_string(l.address - kBase) + " bits " + std::to_string(l.bits) + ":";
      for (size_t i = 0; i < l.shape.size(); ++i)
        s += " " + std::to_string(l.shape[i]) + "/" + std::to_string(l.stride[i]);
      return s + " columns " + std::to_string(l.columns) + "/" + std::to_string(l.col_stride);
    };
    ASSERT_EQ(pair(a, b), common ? Overlap::kSome : Overlap::kNone) << print(a) << "\n" << print(b);
    ASSERT_EQ(self(a), twice ? Overlap::kSome : Overlap::kNone) << print(a);
    ++seen[common];
    ++seen_self[twice];
  }
  EXPECT_GT(std::min(seen[0], seen[1]), 300) << "the layouts no longer try both answers";
  EXPECT_GT(std::min(seen_self[0], seen_self[1]), 300);
}

TEST(Overlap, SameStorage) {
  const Layout layout{kBase, 32, {4, 3}, {100, 8}, 8, 1};
  const xent_view view = view_of(layout);
  EXPECT_TRUE(same_storage(view, view));
  const auto differs = [&](auto change) {
    Layout other = layout;
    change(other);
    return !same_storage(view, view_of(other));
  };
  EXPECT_TRUE(differs([](Layout &l) { l.address += 4; }));
  EXPECT_TRUE(differs([](Layout &l) { l.bits = 16; }));
  EXPECT_TRUE(differs([](Layout &l) { l.shape[0] = 3; }));
  EXPECT_TRUE(differs([](Layout &l) { l.stride[1] = 9; }));
  EXPECT_TRUE(differs([](Layout &l) { l.col_stride = -1; }));
  EXPECT_TRUE(differs([](Layout &l) {
    l.shape.pop_back();
    l.stride.pop_back();
  }));
}

}  // namespace
}  // namespace xent
