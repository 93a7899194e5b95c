// Whole blocks of 8-bit moments from and to fp32 values, the same bits on every instruction set. Included once per
// instruction set by the loops beside it.
// SPDX-License-Identifier: Apache-2.0

// A toggle in place of a plain include guard: the file is compiled again for each instruction set.
#if defined(BALLAST_KERNELS_MOMENTS_INL_H) == defined(HWY_TARGET_TOGGLE)
#ifdef BALLAST_KERNELS_MOMENTS_INL_H
#undef BALLAST_KERNELS_MOMENTS_INL_H
#else
#define BALLAST_KERNELS_MOMENTS_INL_H
#endif

#include <hwy/highway.h>

#include <algorithm>
#include <bit>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <limits>

#include "ballast/kernels/moments.h"
#include "cpu/lanes-inl.h"
#include "cpu/moment_map.h"
#include "moment_lookup.h"

HWY_BEFORE_NAMESPACE();
namespace ballast::kernels::HWY_NAMESPACE {

template <bool kSigned>
void decode_block(const std::byte* block, float* values) {
  float scale;
  std::memcpy(&scale, block, sizeof scale);
  look_up_values<kSigned>(reinterpret_cast<const std::uint8_t*>(block + sizeof scale), values);
  const Vf scales = hn::Set(F32(), scale);
  for (std::size_t i = 0; i < kMomentBlock; i += kLanes) {
    hn::StoreU(hn::Mul(load(values + i), scales), F32(), values + i);
  }
}

// The element of largest magnitude, the positive one of two: NaN and infinity are larger than all numbers.
inline float largest_of_block(const float* values) {
  // As whole numbers they are ordered by magnitude once the sign, turned over, has become the last bit.
  Vu largest = constant(0);
  for (std::size_t i = 0; i < kMomentBlock; i += kLanes) {
    const Vu bits = bits_of(load(values + i));
    largest = hn::Max(largest, hn::Xor(hn::Or(hn::ShiftLeft<1>(bits), hn::ShiftRight<31>(bits)), constant(1)));
  }
  std::uint32_t lanes[kLanes];
  hn::StoreU(largest, U32(), lanes);
  const std::uint32_t key = *std::max_element(lanes, lanes + kLanes) ^ 1;
  return std::bit_cast<float>((key >> 1) | (key << 31));
}

template <bool kSigned>
void encode_block(const float* values, std::byte* block) {
  float scale = largest_of_block(values);
  if (!(scale - scale == 0.0F)) scale = std::numeric_limits<float>::quiet_NaN();
  if (scale == 0.0F) scale = 0.0F;  // not -0
  std::memcpy(block, &scale, sizeof scale);
  auto* const codes = reinterpret_cast<std::uint8_t*>(block + sizeof scale);
  if (!(scale != 0.0F && scale == scale)) {
    std::memset(codes, 0, kMomentBlock);
    return;
  }
  const Vf scales = hn::Set(F32(), scale);
  const auto zero = hn::Zero(I32());
  alignas(64) float magnitudes[kMomentBlock];
  alignas(64) std::int32_t buckets[kMomentBlock];
  for (std::size_t i = 0; i < kMomentBlock; i += kLanes) {
    const Vf value = load(values + i);
    const Vf share = hn::Div(value, scales);
    const Vf magnitude = hn::Abs(share);
    const auto upper = hn::BitCast(I32(), hn::ShiftRight<16>(bits_of(magnitude)));
    auto bucket = hn::Max(hn::Sub(upper, hn::Set(I32(), kFirstMomentBucket)), zero);
    if constexpr (kSigned) {
      const auto negative = hn::Lt(hn::BitCast(I32(), bits_of(share)), zero);
      bucket = hn::IfThenElse(negative, hn::Or(bucket, hn::Set(I32(), kNegativeMoment)), bucket);
    } else {
      const auto is_zero = hn::RebindMask(I32(), hn::Eq(value, hn::Zero(F32())));
      bucket = hn::IfThenElse(is_zero, hn::Set(I32(), kMomentBuckets), bucket);
    }
    hn::StoreU(magnitude, F32(), magnitudes + i);
    hn::StoreU(bucket, I32(), buckets + i);
  }
  look_up_codes<kSigned>(magnitudes, buckets, codes);
}

}  // namespace ballast::kernels::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#endif  // per-target include guard
