// SPDX-FileCopyrightText: the libxent authors
// SPDX-License-Identifier: Apache-2.0

// Whether views share memory, decided exactly: tensors may be interleaved without sharing a byte.
#pragma once

#include <xent/xent_plugin.h>

namespace xent {

// `columns`: extent of the view's col_stride axis, 1 where it has none. Views are present, and span at most
// kMaximumSpan bytes.
struct Region {
  const xent_view *view;
  int64_t columns;
};

// The bytes [first, end) between which a region lies.
struct ByteRange {
  uint64_t first;
  uint64_t end;
  bool meets(const ByteRange &other) const { return first < other.end && other.first < end; }
};

enum class Overlap { kNone, kSome, kUndecided };  // kUndecided: the search reached its work limit

ByteRange byte_range(const Region &region);
// Do two elements, one of each, share a byte? Exact; for regions whose byte ranges meet.
Overlap find_overlap(const Region &a, const Region &b);
// Do two different elements of one region share a byte?
Overlap find_self_overlap(const Region &region);
// The same elements at the same addresses in the same order.
bool same_storage(const xent_view &a, const xent_view &b);

}  // namespace xent
