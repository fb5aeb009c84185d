// SPDX-FileCopyrightText: the libxent authors
// SPDX-License-Identifier: Apache-2.0

// Blocks between memory and vectors. Every layout and element type becomes a packed block of acc in L1, so that the
// arithmetic, and with it the bits, are those of a packed row at any address. Nothing outside the columns is touched:
// the last, partial vector goes through a temporary.
//
// The 16-bit conversions use integer operations and exact additions alone: every instruction set rounds alike (to
// nearest even; NaN becomes quiet).

#if defined(XENT_CPU_LOAD_INL_HPP) == defined(HWY_TARGET_TOGGLE)
#ifdef XENT_CPU_LOAD_INL_HPP
#undef XENT_CPU_LOAD_INL_HPP
#else
#define XENT_CPU_LOAD_INL_HPP
#endif

#include <cstring>
#include <type_traits>

#include "cpu/kernels.hpp"
#include "cpu/math-inl.hpp"
#include "hwy/cache_control.h"
#include "hwy/highway.h"

HWY_BEFORE_NAMESPACE();
namespace xent::cpu::HWY_NAMESPACE {
namespace hn = hwy::HWY_NAMESPACE;

// The first `n` lanes are those at `from`, the others `fill`.
template <class D, class A = hn::TFromD<D>>
HWY_INLINE hn::Vec<D> LoadTail(D d, const A *from, size_t n, A fill) {
  HWY_ALIGN A lanes[64];
  hn::Store(hn::Set(d, fill), d, lanes);
  std::memcpy(lanes, from, n * sizeof(A));
  return hn::Load(d, lanes);
}
template <class D, class A = hn::TFromD<D>>
HWY_INLINE void StoreTail(hn::Vec<D> v, D d, A *to, size_t n) {
  HWY_ALIGN A lanes[64];
  hn::Store(v, d, lanes);
  std::memcpy(to, lanes, n * sizeof(A));
}

template <class DF, class VU, class D32 = hn::RebindToUnsigned<DF>>
HWY_INLINE hn::Vec<DF> Widen(DF df, VU bits, BF16) {
  const D32 du;
  return hn::BitCast(df, hn::ShiftLeft<16>(hn::PromoteTo(du, bits)));
}
template <class DF, class VU, class D32 = hn::RebindToUnsigned<DF>>
HWY_INLINE hn::Vec<DF> Widen(DF df, VU bits, F16) {
  const D32 du;
  const hn::RebindToSigned<DF> di;
  const auto h = hn::PromoteTo(du, bits);
  const auto sign = hn::ShiftLeft<16>(hn::And(h, hn::Set(du, 0x8000u)));
  const auto mag = hn::And(h, hn::Set(du, 0x7FFFu));
  const auto bias = hn::Set(du, 112u << 23);
  auto normal = hn::Add(hn::ShiftLeft<13>(mag), bias);
  const auto mag_i = hn::BitCast(di, mag);
  const auto special = hn::BitCast(du, hn::VecFromMask(di, hn::Gt(mag_i, hn::Set(di, 0x7BFF))));
  normal = hn::Add(normal, hn::And(special, bias));
  // 0.5 + mag * 2^-24 is exact, and so is taking 0.5 away.
  const auto half = hn::Set(df, 0.5f);
  const auto subnormal = hn::Sub(hn::BitCast(df, hn::Or(mag, hn::BitCast(du, half))), half);
  const auto is_subnormal = hn::RebindMask(df, hn::Lt(mag_i, hn::Set(di, 0x0400)));
  const auto value = hn::IfThenElse(is_subnormal, subnormal, hn::BitCast(df, normal));
  return hn::Or(value, hn::BitCast(df, sign));
}

template <class DF, class D32 = hn::RebindToUnsigned<DF>>
HWY_INLINE hn::Vec<hn::Rebind<uint16_t, DF>> Narrow(DF df, hn::Vec<DF> v, BF16) {
  const D32 du;
  const hn::RebindToSigned<DF> di;
  const auto bits = hn::BitCast(du, v);
  const auto odd = hn::And(hn::ShiftRight<16>(bits), hn::Set(du, 1u));
  const auto rounded = hn::Add(bits, hn::Add(odd, hn::Set(du, 0x7FFFu)));
  const auto quiet = hn::Or(bits, hn::Set(du, 0x00400000u));
  const auto number = hn::RebindMask(du, hn::Eq(v, v));
  const auto out = hn::ShiftRight<16>(hn::IfThenElse(number, rounded, quiet));
  (void)df;
  return hn::DemoteTo(hn::Rebind<uint16_t, DF>(), hn::BitCast(di, out));
}
template <class DF, class D32 = hn::RebindToUnsigned<DF>>
HWY_INLINE hn::Vec<hn::Rebind<uint16_t, DF>> Narrow(DF df, hn::Vec<DF> v, F16) {
  const D32 du;
  const hn::RebindToSigned<DF> di;
  const auto bits = hn::BitCast(du, v);
  const auto mag = hn::And(bits, hn::Set(du, 0x7FFFFFFFu));
  const auto sign = hn::ShiftRight<16>(hn::Xor(bits, mag));
  const auto mag_i = hn::BitCast(di, mag);
  // 2^16 and more become infinity, whose pattern follows the largest number's.
  const auto capped = hn::BitCast(du, hn::Min(mag_i, hn::Set(di, 0x47800000)));
  const auto odd = hn::And(hn::ShiftRight<13>(capped), hn::Set(du, 1u));
  const auto bias = hn::Set(du, 112u << 23);
  const auto normal = hn::ShiftRight<13>(hn::Sub(hn::Add(capped, hn::Add(odd, hn::Set(du, 0x0FFFu))), bias));
  // Below 2^-14: adding 0.5 rounds to multiples of 2^-24.
  const auto half = hn::Set(df, 0.5f);
  const auto subnormal = hn::Sub(hn::BitCast(du, hn::Add(hn::BitCast(df, mag), half)), hn::BitCast(du, half));
  const auto is_subnormal = hn::RebindMask(du, hn::Lt(mag_i, hn::Set(di, 0x38800000)));
  const auto number = hn::RebindMask(du, hn::Eq(v, v));
  auto out = hn::IfThenElse(is_subnormal, subnormal, normal);
  out = hn::IfThenElse(number, out, hn::Set(du, 0x7E00u));
  return hn::DemoteTo(hn::Rebind<uint16_t, DF>(), hn::BitCast(di, hn::Or(out, sign)));
}

template <class T>
void WidenBlock(const T *from, float *to, size_t n) {
  const Tag<float> df;
  const hn::Rebind<uint16_t, Tag<float>> du16;
  const size_t lanes = hn::Lanes(df);
  const uint16_t *bits = reinterpret_cast<const uint16_t *>(from);
  size_t i = 0;
  for (; i + lanes <= n; i += lanes) hn::StoreU(Widen(df, hn::LoadU(du16, bits + i), T{}), df, to + i);
  if (i < n) StoreTail(Widen(df, LoadTail(du16, bits + i, n - i, uint16_t{0}), T{}), df, to + i, n - i);
}
template <class T>
void NarrowBlock(const float *from, T *to, size_t n) {
  const Tag<float> df;
  const hn::Rebind<uint16_t, Tag<float>> du16;
  const size_t lanes = hn::Lanes(df);
  uint16_t *bits = reinterpret_cast<uint16_t *>(to);
  size_t i = 0;
  for (; i + lanes <= n; i += lanes) hn::StoreU(Narrow(df, hn::LoadU(df, from + i), T{}), du16, bits + i);
  if (i < n) StoreTail(Narrow(df, LoadTail(df, from + i, n - i, 0.0f), T{}), du16, bits + i, n - i);
}

// The 2 * Lanes(d) columns at `from`: acc in order, bfloat16 as those of even and those of odd position.
template <class D, class A = hn::TFromD<D>, class V = hn::Vec<D>>
HWY_INLINE void LoadPair(D d, const A *from, V &a, V &b) {
  a = hn::LoadU(d, from);
  b = hn::LoadU(d, from + hn::Lanes(d));
}
template <class DF, class V = hn::Vec<DF>>
HWY_INLINE void LoadPair(DF df, const BF16 *from, V &a, V &b) {
  const hn::RebindToUnsigned<DF> du;
  const auto bits = hn::LoadU(du, reinterpret_cast<const uint32_t *>(from));
  a = hn::BitCast(df, hn::ShiftLeft<16>(bits));
  b = hn::BitCast(df, hn::And(bits, hn::Set(du, 0xFFFF0000u)));
}

// The same of the first `n` of them, 0 < n < 2 * Lanes(d); `fill`, or what it is in bfloat16, elsewhere.
template <class D, class A = hn::TFromD<D>, class V = hn::Vec<D>>
HWY_INLINE void LoadPairTail(D d, const A *from, size_t n, A fill, V &a, V &b) {
  const size_t lanes = hn::Lanes(d);
  a = n < lanes ? LoadTail(d, from, n, fill) : hn::LoadU(d, from);
  b = LoadTail(d, from + lanes, n < lanes ? 0 : n - lanes, fill);
}
template <class DF, class V = hn::Vec<DF>>
HWY_INLINE void LoadPairTail(DF df, const BF16 *from, size_t n, float fill, V &a, V &b) {
  HWY_ALIGN BF16 columns[128];
  std::memcpy(columns, from, n * sizeof(BF16));
  uint32_t bits;
  std::memcpy(&bits, &fill, sizeof bits);
  for (size_t i = n; i < 2 * hn::Lanes(df); ++i) columns[i].bits = static_cast<uint16_t>(bits >> 16);
  LoadPair(df, columns, a, b);
}

template <bool kStream, class D, class V, class A>
HWY_INLINE void StoreOrStream(D d, V v, A *to) {
  if constexpr (kStream) {
    hn::Stream(v, d, to);
  } else {
    hn::StoreU(v, d, to);
  }
}

// The inverse of LoadPair, rounding to nearest even. bfloat16: a NaN whose low 16 bits are all set would not stay one;
// none comes of arithmetic on NaN constants of arithmetic's own and NaN of bfloat16.
template <bool kStream, class D, class V = hn::Vec<D>, class A = hn::TFromD<D>>
HWY_INLINE void StorePair(D d, V a, V b, A *to) {
  StoreOrStream<kStream>(d, a, to);
  StoreOrStream<kStream>(d, b, to + hn::Lanes(d));
}
template <bool kStream, class DF, class V = hn::Vec<DF>>
HWY_INLINE void StorePair(DF df, V a, V b, BF16 *to) {
  const hn::RebindToUnsigned<DF> du;
  (void)df;
  const auto rounded = [&](V v) {
    const auto bits = hn::BitCast(du, v);
    const auto odd = hn::And(hn::ShiftRight<16>(bits), hn::Set(du, 1u));
    return hn::Add(hn::Add(bits, hn::Set(du, 0x7FFFu)), odd);
  };
  const auto both = hn::Or(hn::ShiftRight<16>(rounded(a)), hn::And(rounded(b), hn::Set(du, 0xFFFF0000u)));
  StoreOrStream<kStream>(du, both, reinterpret_cast<uint32_t *>(to));
}
template <class D, class V = hn::Vec<D>, class S>
HWY_INLINE void StorePairTail(D d, V a, V b, S *to, size_t n) {
  HWY_ALIGN S columns[128];
  StorePair<false>(d, a, b, columns);
  std::memcpy(to, columns, n * sizeof(S));
}

// Whether sums take a row's columns by LoadPair from bfloat16. What wants them one after the other widens them before.
template <class T>
bool IsPaired(const RowMath &math) {
  return std::is_same_v<T, BF16> && !math.predicted && math.softcap == 0;
}

// Which lanes of the two vectors hold the first `n` columns of a pair.
template <class S, class D>
HWY_INLINE hn::Mask<D> FirstOfPair(D d, size_t n) {
  if constexpr (std::is_same_v<S, BF16>) return hn::FirstN(d, (n + 1) / 2);
  return hn::FirstN(d, n);
}
template <class S, class D>
HWY_INLINE hn::Mask<D> SecondOfPair(D d, size_t n) {
  if constexpr (std::is_same_v<S, BF16>) return hn::FirstN(d, n / 2);
  return hn::FirstN(d, n < hn::Lanes(d) ? 0 : n - hn::Lanes(d));
}

// What is fetched while a block is computed, so many bytes with every four vectors: a burst would wait for the few
// lines that a core can have under way.
struct Fetch {
  const char *near;  // the next block, into L1
  const char *far;   // one so far ahead that memory has the time, into L2
  size_t near_step, far_step;
};
template <int kLocality>  // 3: into L1, 2: into L2
HWY_INLINE void FetchLines(const char *from, size_t bytes) {
  for (size_t i = 0; i < bytes; i += 64) __builtin_prefetch(from + i, 0, kLocality);
}

// The blocks of a span, from the first on or, `backwards`, from the last.
template <class T>
class Blocks {
 public:
  Blocks(const Span &span, bool backwards)
      : span_(span), count_((span.end - span.begin + kBlock - 1) / kBlock), backwards_(backwards) {}

  int64_t count() const { return count_; }
  int64_t begin(int64_t i) const { return span_.begin + (backwards_ ? count_ - 1 - i : i) * kBlock; }
  size_t size(int64_t i) const { return static_cast<size_t>(HWY_MIN(span_.end - begin(i), kBlock)); }

  // For block `i`, of which A is computed in `passes`.
  template <class A>
  Fetch fetch(int64_t i, size_t passes) const {
    constexpr int64_t kFar = kAhead / (kBlock * static_cast<int64_t>(sizeof(T)));
    const size_t step = span_.stride == 1 ? 4 * hn::Lanes(Tag<A>()) * sizeof(T) : 0;
    return {block(i, 1), block(i, backwards_ && i + kFar < count_ ? 0 : kFar), step, step / passes};
  }

 private:
  // `ahead` blocks after `i`; past the last one, in what is read next, taken to be as long, or, where that is not
  // known, block `i` again.
  const char *block(int64_t i, int64_t ahead) const {
    const int64_t past = i + ahead - count_;
    const bool next = past >= 0 && past < count_ && span_.next != nullptr;
    const int64_t column = next ? past * kBlock : begin(past < 0 ? i + ahead : i);
    const T *const row = static_cast<const T *>(next ? span_.next : span_.row);
    return reinterpret_cast<const char *>(row + column * span_.stride);
  }

  const Span &span_;
  const int64_t count_;
  const bool backwards_;
};

// The exponentials that are kept of the block that begins at a column. NULL: none.
template <class A>
A *KeptTerms(const Span &span, int64_t begin) {
  const Kept *const kept = span.kept;
  return kept != nullptr && begin >= kept->begin ? static_cast<A *>(kept->terms) + (begin - kept->begin) : nullptr;
}

// Columns [begin, begin + n) of a row, packed: where they lie, or in `packed`.
template <class T>
const T *PackedColumns(const Span &span, int64_t begin, size_t n, T *packed) {
  const T *from = static_cast<const T *>(span.row) + begin * span.stride;
  if (span.stride == 1) return from;
  for (size_t i = 0; i < n; ++i) packed[i] = from[static_cast<int64_t>(i) * span.stride];
  return packed;
}

// The same as acc: where they lie, or in `block`.
template <class T>
const Acc<T> *PackedBlock(const Span &span, int64_t begin, size_t n, Acc<T> *block) {
  HWY_ALIGN T packed[kBlock];
  T *to = packed;
  if constexpr (std::is_same_v<T, Acc<T>>) to = block;
  const T *from = PackedColumns(span, begin, n, to);
  if constexpr (std::is_same_v<T, Acc<T>>) {
    return from;
  } else {
    WidenBlock(from, block, n);
    return block;
  }
}

// Past the caches, byte for byte; the ends that do not fill a vector go the usual way. from == NULL: zeros.
HWY_INLINE void StreamBytes(const void *from, void *to, size_t bytes) {
  const hn::CappedTag<uint8_t, 64> d;
  const size_t lanes = hn::Lanes(d);
  const uint8_t *src = static_cast<const uint8_t *>(from);
  uint8_t *dst = static_cast<uint8_t *>(to);
  const auto usual = [&](size_t begin, size_t end) {
    if (src == nullptr) {
      std::memset(dst + begin, 0, end - begin);
    } else {
      std::memcpy(dst + begin, src + begin, end - begin);
    }
  };
  const size_t head = HWY_MIN(bytes, (lanes - reinterpret_cast<uintptr_t>(dst) % lanes) % lanes);
  usual(0, head);
  size_t i = head;
  for (; i + lanes <= bytes; i += lanes) hn::Stream(src == nullptr ? hn::Zero(d) : hn::LoadU(d, src + i), d, dst + i);
  usual(i, bytes);
}

// The inverse of PackedBlock; `block` may be where the columns lie.
template <class O, class A>
void StoreBlock(const A *block, const GradOut &out, int64_t begin, size_t n) {
  O *to = static_cast<O *>(out.row) + begin * out.stride;
  HWY_ALIGN O packed[kBlock];
  const O *from;
  if constexpr (std::is_same_v<O, A>) {
    from = block;
  } else {
    O *narrow = out.stride == 1 && !out.stream ? to : packed;
    NarrowBlock(block, narrow, n);
    from = narrow;
  }
  if (out.stride != 1) {
    for (size_t i = 0; i < n; ++i) to[static_cast<int64_t>(i) * out.stride] = from[i];
  } else if (out.stream) {
    StreamBytes(from, to, n * sizeof(O));
  } else if (from != to) {
    std::memcpy(to, from, n * sizeof(O));
  }
}

}  // namespace xent::cpu::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#endif
