// The maps of 8-bit moments and what finds the nearest entry in them, made when compiled. See moments.h.
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <array>
#include <bit>
#include <cstddef>
#include <cstdint>
#include <limits>

namespace ballast::kernels {

// Magnitudes in [0, 1] fall into buckets by the upper 16 bits of their fp32 form, those below 2^-23 into the first. A
// bucket is so narrow that at most one border between entries lies in it. After them comes that of what stays 0.
constexpr int kFirstMomentBucket = (127 - 23) << 7;
constexpr int kMomentBuckets = (127 << 7) - kFirstMomentBucket + 1;

template <bool kSigned>
struct MomentMap {
  static constexpr int kLast = kSigned ? 128 : 255;                    // the magnitude that is 1
  alignas(64) std::array<float, 256> value{};                          // by stored byte
  alignas(64) std::array<float, kLast + 1> border{};                   // the largest number that still is entry k
  alignas(64) std::array<std::uint8_t, kMomentBuckets + 1> nearest{};  // entry of a bucket's least number
  bool narrow = true;                                                  // every bucket holds one border at most

  constexpr MomentMap() {
    constexpr std::array<double, 7> kDecades = {1e-6, 1e-5, 1e-4, 1e-3, 1e-2, 1e-1, 1.0};
    std::array<float, kLast + 1> magnitude{};
    int next = 1;
    for (std::size_t i = 0; i < kDecades.size(); ++i) {
      const int parts = 1 << (kSigned ? i : i + 1);
      for (int part = 0; part < parts; ++part) {
        magnitude[next++] = static_cast<float>(kDecades[i] * (0.1 + 0.9 * (part + 0.5) / parts));
      }
    }
    magnitude[next] = 1.0F;
    for (int k = 0; k <= kLast; ++k) value[k] = magnitude[k];
    for (int k = 1; kSigned && k < kLast; ++k) value[256 - k] = -magnitude[k];

    for (int k = 0; k < kLast; ++k) {
      const double middle = (double{magnitude[k]} + double{magnitude[k + 1]}) / 2;  // exact
      border[k] = static_cast<float>(middle);
      if (double{border[k]} > middle) border[k] = std::bit_cast<float>(std::bit_cast<std::uint32_t>(border[k]) - 1);
    }
    border[kLast] = std::numeric_limits<float>::infinity();
    int k = 0;
    for (int bucket = 0; bucket < kMomentBuckets; ++bucket) {
      const int before = k;
      const auto least = std::bit_cast<float>(static_cast<std::uint32_t>(bucket + kFirstMomentBucket) << 16);
      while (bucket > 0 && border[k] < least) ++k;
      narrow = narrow && k - before <= 1;
      // Without a sign only 0 itself becomes entry 0.
      nearest[bucket] = static_cast<std::uint8_t>(kSigned || k > 0 ? k : 1);
    }
  }
};

template <bool kSigned>
inline constexpr MomentMap<kSigned> kMomentMap{};
static_assert(kMomentMap<true>.narrow && kMomentMap<false>.narrow);

}  // namespace ballast::kernels
