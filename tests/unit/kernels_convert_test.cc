// Number formats, on every instruction set, against arithmetic in double.
// SPDX-License-Identifier: Apache-2.0
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <vector>

#include "ballast/kernels/convert.h"
#include "unit/kernels_support.h"

namespace ballast::kernels {
namespace {

using testing::bits_of;
using testing::Edge;
using testing::float_of;
using testing::GuardedArray;
using testing::kSanitized;
using testing::on_each_target;

bool is_nan_bits(std::uint32_t bits) { return (bits & 0x7FFFFFFFu) > 0x7F800000u; }

// A number format by its sizes: the nearest-even rounding of `value`, through the scaled integer nearest to it.
std::uint16_t round_in_double(float value, int mantissa_bits, int smallest_exponent) {
  const std::uint32_t bits = bits_of(value);
  const std::uint16_t sign = static_cast<std::uint16_t>(bits >> 16 & 0x8000u);
  const std::uint32_t infinity = 0x7FFFu >> mantissa_bits << mantissa_bits;
  if (is_nan_bits(bits)) {
    const std::uint32_t payload = (bits & 0x7FFFFFu) >> (23 - mantissa_bits);
    return static_cast<std::uint16_t>(sign | infinity | payload | 1u << (mantissa_bits - 1));
  }
  if (std::isinf(value)) return static_cast<std::uint16_t>(sign | infinity);
  const double magnitude = std::abs(static_cast<double>(value));
  int exponent = magnitude == 0.0 ? smallest_exponent : std::max(std::ilogb(magnitude), smallest_exponent);
  const double quanta = std::nearbyint(std::ldexp(magnitude, mantissa_bits - exponent));
  // The implicit one of a normal number adds the exponent's unit; a carry moves into the next exponent by itself.
  const double code = quanta + std::ldexp(exponent - smallest_exponent, mantissa_bits);
  return static_cast<std::uint16_t>(sign | std::min(static_cast<std::uint32_t>(code), infinity));
}

std::uint16_t bf16_in_double(float value) { return round_in_double(value, 7, -126); }
std::uint16_t fp16_in_double(float value) { return round_in_double(value, 10, -14); }

float fp16_in_double(std::uint16_t half) {
  const std::uint32_t sign = static_cast<std::uint32_t>(half & 0x8000u) << 16;
  const std::uint32_t mantissa = half & 0x3FFu;
  const int exponent = half >> 10 & 0x1F;
  if (exponent == 31) {
    return float_of(sign | 0x7F800000u | mantissa << 13 | (mantissa != 0 ? 0x400000u : 0u));
  }
  const double magnitude = exponent == 0 ? std::ldexp(mantissa, -24) : std::ldexp(1024.0 + mantissa, exponent - 25);
  return static_cast<float>((half & 0x8000u) != 0 ? -magnitude : magnitude);
}

struct Pair {
  std::uint32_t from;
  std::uint16_t to;
};

TEST(Convert, Bf16RoundsToNearestEven) {
  const std::vector<Pair> pairs = {
      {0x3F808000, 0x3F80}, {0x3F818000, 0x3F82}, {0x3F808001, 0x3F81}, {0x3F807FFF, 0x3F80}, {0x3E89CCD5, 0x3E8A},
      {0x4048F5C3, 0x4049}, {0x7F7FFFFF, 0x7F80}, {0x7F7F7FFF, 0x7F7F}, {0x7F7F8000, 0x7F80}, {0x00008000, 0x0000},
      {0x00008001, 0x0001}, {0x00018000, 0x0002}, {0x807FFFFF, 0x8080}, {0x80000000, 0x8000}, {0x7F800000, 0x7F80},
      {0xFF800000, 0xFF80}, {0x7FC00000, 0x7FC0}, {0x7F800001, 0x7FC0}, {0xFFFFFFFF, 0xFFFF}, {0x7FBFFFFF, 0x7FFF}};
  on_each_target([&] {
    for (const Pair& pair : pairs) {
      const std::vector<float> source(21, float_of(pair.from));  // a vector's lanes and a tail's
      std::vector<std::uint16_t> got(source.size());
      fp32_to_bf16(source.data(), got.data(), got.size());
      EXPECT_EQ(got, std::vector<std::uint16_t>(got.size(), pair.to)) << std::hex << pair.from;
      EXPECT_EQ(bf16_in_double(float_of(pair.from)), pair.to) << std::hex << pair.from;
    }
  });
}

TEST(Convert, Fp16RoundsToNearestEvenAndOverflowsToInfinity) {
  const std::vector<Pair> pairs = {{bits_of(65504.0f), 0x7BFF}, {bits_of(65519.996f), 0x7BFF},
                                   {bits_of(65520.0f), 0x7C00}, {bits_of(1e6f), 0x7C00},
                                   {bits_of(-1e6f), 0xFC00},    {bits_of(0x1p-24f), 0x0001},
                                   {bits_of(0x1p-25f), 0x0000}, {bits_of(0x1.000002p-25f), 0x0001},
                                   {bits_of(1e-8f), 0x0000},    {bits_of(2049.0f), 0x6800},
                                   {bits_of(2051.0f), 0x6802},  {bits_of(0.1f), 0x2E66},
                                   {0x7F800001, 0x7E00},        {0x7FFFE000, 0x7FFF},
                                   {0x00000001, 0x0000},        {0x80000000, 0x8000}};
  on_each_target([&] {
    for (const Pair& pair : pairs) {
      const std::vector<float> source(21, float_of(pair.from));
      std::vector<std::uint16_t> got(source.size());
      fp32_to_fp16(source.data(), got.data(), got.size());
      EXPECT_EQ(got, std::vector<std::uint16_t>(got.size(), pair.to)) << std::hex << pair.from;
      EXPECT_EQ(fp16_in_double(float_of(pair.from)), pair.to) << std::hex << pair.from;
    }
  });
}

// Every 16-bit pattern; signalling NaNs come back quiet.
TEST(Convert, EveryBf16PatternSurvivesTheWayThroughFp32) {
  std::vector<std::uint16_t> patterns(65536);
  for (std::size_t i = 0; i < patterns.size(); ++i) patterns[i] = static_cast<std::uint16_t>(i);
  on_each_target([&] {
    std::vector<float> wide(patterns.size());
    std::vector<std::uint16_t> back(patterns.size());
    bf16_to_fp32(patterns.data(), wide.data(), wide.size());
    fp32_to_bf16(wide.data(), back.data(), back.size());
    for (std::uint32_t i = 0; i < patterns.size(); ++i) {
      ASSERT_EQ(bits_of(wide[i]), i << 16);
      ASSERT_EQ(back[i], is_nan_bits(i << 16) ? i | 0x40u : i);
    }
  });
}

TEST(Convert, EveryFp16PatternSurvivesTheWayThroughFp32) {
  std::vector<std::uint16_t> patterns(65536);
  for (std::size_t i = 0; i < patterns.size(); ++i) patterns[i] = static_cast<std::uint16_t>(i);
  on_each_target([&] {
    std::vector<float> wide(patterns.size());
    std::vector<std::uint16_t> back(patterns.size());
    fp16_to_fp32(patterns.data(), wide.data(), wide.size());
    fp32_to_fp16(wide.data(), back.data(), back.size());
    for (std::uint32_t i = 0; i < patterns.size(); ++i) {
      ASSERT_EQ(bits_of(wide[i]), bits_of(fp16_in_double(patterns[i]))) << std::hex << i;
      ASSERT_EQ(back[i], (i & 0x7FFFu) > 0x7C00u ? i | 0x200u : i) << std::hex << i;
    }
  });
}

// Patterns spread over all of fp32 by a prime stride, and each pattern around a rounding boundary of both formats.
std::vector<float> spread_patterns() {
  std::vector<float> values;
  const std::uint64_t stride = kSanitized ? 104729 : 10007;
  for (std::uint64_t bits = 0; bits < std::uint64_t{1} << 32; bits += stride) {
    values.push_back(float_of(static_cast<std::uint32_t>(bits)));
  }
  for (std::uint32_t upper = 0; upper < 65536; upper += kSanitized ? 17 : 1) {
    for (const std::uint32_t lower :
         {0x0000u, 0x0FFFu, 0x1000u, 0x1001u, 0x2FFFu, 0x3000u, 0x7FFFu, 0x8000u, 0x8001u, 0xF000u, 0xFFFFu}) {
      values.push_back(float_of(upper << 16 | lower));
    }
  }
  return values;
}

TEST(Convert, RoundingAgreesWithDoubleArithmeticAllOverFp32) {
  const std::vector<float> values = spread_patterns();
  std::vector<std::uint16_t> bf16(values.size());
  std::vector<std::uint16_t> fp16(values.size());
  std::transform(values.begin(), values.end(), bf16.begin(), bf16_in_double);
  std::transform(values.begin(), values.end(), fp16.begin(), [](float value) { return fp16_in_double(value); });
  on_each_target([&] {
    std::vector<std::uint16_t> got(values.size());
    fp32_to_bf16(values.data(), got.data(), got.size());
    for (std::size_t i = 0; i < got.size(); ++i) ASSERT_EQ(got[i], bf16[i]) << std::hex << bits_of(values[i]);
    fp32_to_fp16(values.data(), got.data(), got.size());
    for (std::size_t i = 0; i < got.size(); ++i) ASSERT_EQ(got[i], fp16[i]) << std::hex << bits_of(values[i]);
  });
}

TEST(Convert, SplitGivesTheNearestBf16AndTheSignedRest) {
  struct Split {
    std::uint32_t bits;
    std::uint16_t parameter;
    std::uint16_t remainder;
    std::uint32_t merged;
  };
  const std::vector<Split> splits = {{0x3F7FFFFF, 0x3F80, 0xFFFF, 0x3F7FFFFF}, {0x3F7F8000, 0x3F80, 0x8000, 0x3F7F8000},
                                     {0x3F808000, 0x3F81, 0x8000, 0x3F808000}, {0x3F818000, 0x3F82, 0x8000, 0x3F818000},
                                     {0x3F80FFFF, 0x3F81, 0xFFFF, 0x3F80FFFF}, {0x3F807FFF, 0x3F80, 0x7FFF, 0x3F807FFF},
                                     {0x7F7FFFFF, 0x7F80, 0xFFFF, 0x7F7FFFFF}, {0xFF7FFFFF, 0xFF80, 0xFFFF, 0xFF7FFFFF},
                                     {0x7F800000, 0x7F80, 0x0000, 0x7F800000}, {0xFF800000, 0xFF80, 0x0000, 0xFF800000},
                                     {0x00000001, 0x0000, 0x0001, 0x00000001}, {0x80000001, 0x8000, 0x0001, 0x80000001},
                                     {0x80000000, 0x8000, 0x0000, 0x80000000}, {0x7F800001, 0x7FC0, 0x0001, 0x7FC00001},
                                     {0x7F80FFFF, 0x7FC0, 0xFFFF, 0x7FC0FFFF}, {0x7FFFFFFF, 0x7FFF, 0xFFFF, 0x7FFFFFFF},
                                     {0xFFBF8000, 0xFFFF, 0x8000, 0xFFFF8000}};
  on_each_target([&] {
    for (const Split& split : splits) {
      const std::vector<float> source(21, float_of(split.bits));
      std::vector<std::uint16_t> parameter(21);
      std::vector<std::uint16_t> remainder(21);
      std::vector<float> merged(21);
      split_fp32(source.data(), parameter.data(), remainder.data(), 21);
      merge_fp32(parameter.data(), remainder.data(), merged.data(), 21);
      for (std::size_t i = 0; i < 21; ++i) {
        EXPECT_EQ(parameter[i], split.parameter) << std::hex << split.bits;
        EXPECT_EQ(remainder[i], split.remainder) << std::hex << split.bits;
        EXPECT_EQ(bits_of(merged[i]), split.merged) << std::hex << split.bits;
      }
    }
  });
}

// Splits and merges `kBlock` patterns from `first`, `stride` apart; returns the first that fails or 2^32.
constexpr std::uint64_t kBlock = 4096;
constexpr std::uint64_t kNone = std::uint64_t{1} << 32;

std::uint64_t first_not_rebuilt(std::uint32_t first, std::uint32_t stride) {
  alignas(64) static std::uint32_t bits[kBlock];
  alignas(64) static std::uint16_t parameter[kBlock];
  alignas(64) static std::uint16_t remainder[kBlock];
  alignas(64) static std::uint32_t merged[kBlock];
  for (std::uint32_t i = 0; i < kBlock; ++i) bits[i] = first + i * stride;
  split_fp32(reinterpret_cast<const float*>(bits), parameter, remainder, kBlock);
  merge_fp32(parameter, remainder, reinterpret_cast<float*>(merged), kBlock);
  std::uint32_t wrong = 0;
  for (std::uint32_t i = 0; i < kBlock; ++i) {
    const std::uint32_t nan = (bits[i] & 0x7FFFFFFFu) > 0x7F800000u ? ~0u : 0u;
    wrong |= merged[i] ^ (bits[i] | (nan & 0x00400000u));
    const std::uint32_t rounded = (bits[i] + 0x8000u) >> 16;
    const std::uint32_t quiet = bits[i] >> 16 | 0x40u;
    wrong |= parameter[i] ^ ((nan & quiet) | (~nan & rounded));
  }
  if (wrong == 0) return kNone;
  for (std::uint32_t i = 0; i < kBlock; ++i) {
    const bool nan = is_nan_bits(bits[i]);
    if (merged[i] != (nan ? bits[i] | 0x00400000u : bits[i])) return bits[i];
    if (parameter[i] != (nan ? bits[i] >> 16 | 0x40u : (bits[i] + 0x8000u) >> 16)) return bits[i];
  }
  return kNone;
}

TEST(Convert, SplitAndMergeRebuildAll4294967296PatternsWithTheBestInstructions) {
  if (kSanitized) {  // an odd stride still visits every residue of the low half
    for (std::uint64_t first = 0; first < kNone; first += kBlock * 1021) {
      ASSERT_EQ(first_not_rebuilt(static_cast<std::uint32_t>(first), 1021), kNone) << "from pattern " << first;
    }
    return;
  }
  for (std::uint64_t first = 0; first < kNone; first += kBlock) {
    ASSERT_EQ(first_not_rebuilt(static_cast<std::uint32_t>(first), 1), kNone) << "from pattern " << first;
  }
}

TEST(Convert, SplitAndMergeRebuildPatternsAllOverFp32OnEachInstructionSet) {
  const std::uint32_t stride = kSanitized ? 16381 : 251;
  on_each_target([&] {
    for (std::uint64_t first = 0; first < kNone; first += kBlock * stride) {
      ASSERT_EQ(first_not_rebuilt(static_cast<std::uint32_t>(first), stride), kNone) << "from pattern " << first;
    }
  });
}

float sample(std::size_t i) { return float_of(static_cast<std::uint32_t>(i * 2654435761u)); }

// Each conversion, each length, both ends against a guard page, so that any element order or access beyond shows.
TEST(Convert, EachLengthConvertsAllElementsAndTouchesNothingElse) {
  on_each_target([&] {
    for (const std::size_t count : testing::lengths()) {
      for (const Edge edge : {Edge::front, Edge::back}) {
        GuardedArray<float> wide(count, edge);
        GuardedArray<std::uint16_t> half(count, edge);
        GuardedArray<std::uint16_t> rest(count, edge);
        GuardedArray<float> back(count, edge);
        for (std::size_t i = 0; i < count; ++i) wide[i] = sample(i);

        fp32_to_bf16(wide.data(), half.data(), count);
        bf16_to_fp32(half.data(), back.data(), count);
        for (std::size_t i = 0; i < count; ++i) {
          ASSERT_EQ(half[i], bf16_in_double(wide[i])) << i << " of " << count;
          ASSERT_EQ(bits_of(back[i]), std::uint32_t{half[i]} << 16) << i << " of " << count;
        }
        fp32_to_fp16(wide.data(), half.data(), count);
        fp16_to_fp32(half.data(), back.data(), count);
        for (std::size_t i = 0; i < count; ++i) {
          ASSERT_EQ(half[i], fp16_in_double(wide[i])) << i << " of " << count;
          ASSERT_EQ(bits_of(back[i]), bits_of(fp16_in_double(half[i]))) << i << " of " << count;
        }
        split_fp32(wide.data(), half.data(), rest.data(), count);
        merge_fp32(half.data(), rest.data(), back.data(), count);
        for (std::size_t i = 0; i < count; ++i) {
          const std::uint32_t bits = bits_of(wide[i]);
          ASSERT_EQ(bits_of(back[i]), is_nan_bits(bits) ? bits | 0x400000u : bits) << i << " of " << count;
        }
      }
    }
  });
}

TEST(Convert, PointersNeedNoMoreThanTheirElementsAlignment) {
  constexpr std::size_t kCount = 100;
  on_each_target([&] {
    for (std::size_t offset = 0; offset < 33; ++offset) {
      std::vector<float> wide(kCount + 64);
      std::vector<std::uint16_t> half(kCount + 64, 0xABCD);
      for (std::size_t i = 0; i < wide.size(); ++i) wide[i] = sample(i);
      fp32_to_bf16(wide.data() + offset, half.data() + offset, kCount);
      for (std::size_t i = 0; i < half.size(); ++i) {
        const bool inside = i >= offset && i < offset + kCount;
        ASSERT_EQ(half[i], inside ? bf16_in_double(wide[i]) : 0xABCD) << "offset " << offset;
      }
    }
  });
}

}  // namespace
}  // namespace ballast::kernels
