// 8-bit moments on every instruction set: the maps are the published ones, each element gets the nearest entry, what
// was read is stored as the same again, and an update with them is the fp32 update between a reading and a storing.
// SPDX-License-Identifier: Apache-2.0
#include <gtest/gtest.h>

#include <cmath>
#include <cstring>
#include <vector>

#include "ballast/kernels/adam.h"
#include "ballast/kernels/moments.h"
#include "reference/moments_reference.h"
#include "unit/kernels_adam_support.h"
#include "unit/kernels_support.h"

namespace ballast::kernels {
namespace {

using testing::AdamState;
using testing::bits_of;
using testing::float_of;
using testing::kSanitized;
using testing::on_each_target;

constexpr auto kBoth = {Moment::exp_avg, Moment::exp_avg_sq};

std::size_t blocks_bytes(std::size_t count) { return (count + kMomentBlock - 1) / kMomentBlock * kMomentBlockBytes; }
std::vector<std::byte> store(Moment moment, const std::vector<float>& values) {
  std::vector<std::byte> blocks(blocks_bytes(values.size()), std::byte{0xEE});
  fp32_to_int8_blocks(moment, values.data(), blocks.data(), values.size());
  return blocks;
}
std::vector<float> read(Moment moment, const std::vector<std::byte>& blocks, std::size_t first, std::size_t count) {
  std::vector<float> values(count);
  int8_blocks_to_fp32(moment, blocks.data(), first, values.data(), count);
  return values;
}
std::vector<float> stored(Moment moment, const std::vector<float>& values) {
  return read(moment, store(moment, values), 0, values.size());
}

void expect_same_bits(const std::vector<float>& got, const std::vector<float>& expected) {
  ASSERT_EQ(got.size(), expected.size());
  for (std::size_t i = 0; i < got.size(); ++i) {
    if (std::isnan(expected[i])) {
      ASSERT_TRUE(std::isnan(got[i])) << "element " << i;
    } else {
      ASSERT_EQ(got[i], expected[i]) << "element " << i;
    }
  }
}

// Magnitudes over a number of decades, as far as exp_avg allows with both signs.
std::vector<float> random_values(Moment moment, std::size_t count, std::uint64_t seed, double decades) {
  base::Random random(seed);
  std::vector<float> values(count);
  for (float& value : values) {
    const double magnitude = 1e-3 * std::pow(10.0, -decades * random.uniform());
    const std::uint64_t choice = random.below(16);
    value = static_cast<float>(choice == 0                                       ? 0.0
                               : choice % 2 == 0 || moment == Moment::exp_avg_sq ? magnitude
                                                                                 : -magnitude);
  }
  return values;
}

TEST(Moments, TheMapsHaveThePublishedEntries) {
  // Of bitsandbytes' create_dynamic_map: its length, ends, and the entries around 0 and 0.1.
  const std::vector<float> signed_map = reference::dynamic_map(Moment::exp_avg);
  const std::vector<float> unsigned_map = reference::dynamic_map(Moment::exp_avg_sq);
  ASSERT_EQ(signed_map.size(), 256U);
  ASSERT_EQ(unsigned_map.size(), 256U);
  EXPECT_EQ(signed_map.front(), -0.99296875F);
  EXPECT_EQ(signed_map[126], -5.5e-7F);
  EXPECT_EQ(signed_map[127], 0.0F);
  EXPECT_EQ(signed_map[128], 5.5e-7F);
  EXPECT_EQ(signed_map[254], 0.99296875F);
  EXPECT_EQ(signed_map[255], 1.0F);
  EXPECT_EQ(unsigned_map[0], 0.0F);
  EXPECT_EQ(unsigned_map[1], 3.25e-7F);
  EXPECT_EQ(unsigned_map[2], 7.75e-7F);
  EXPECT_EQ(unsigned_map[254], 0.996484375F);
  EXPECT_EQ(unsigned_map[255], 1.0F);
}

TEST(Moments, EveryEntryTimesAPowerOfTwoIsStoredExactly) {
  on_each_target([&] {
    for (const Moment moment : kBoth) {
      for (const float scale : {1.0F, -0.5F, 0x1p-100F, 0x1p100F}) {
        if (moment == Moment::exp_avg_sq && scale < 0) continue;
        std::vector<float> values = reference::dynamic_map(moment);
        for (float& value : values) value *= scale;
        expect_same_bits(stored(moment, values), values);
      }
    }
  });
}

TEST(Moments, EachElementGetsTheNearestEntryAndOfTwoTheOneNearerToZero) {
  on_each_target([&] {
    for (const Moment moment : kBoth) {
      const std::vector<float> map = reference::dynamic_map(moment);
      // Around every border between two entries, beside a 1 that makes the block's scale 1.
      std::vector<float> values;
      for (std::size_t k = 0; k + 1 < map.size(); ++k) {
        const auto middle = static_cast<float>((double{map[k]} + double{map[k + 1]}) / 2);
        for (const float value : {std::nextafter(middle, -1.0F), middle, std::nextafter(middle, 1.0F)}) {
          if (values.size() % kMomentBlock == 0) values.push_back(1.0F);
          values.push_back(value);
        }
      }
      const std::vector<float> got = stored(moment, values);
      for (std::size_t begin = 0; begin < values.size(); begin += kMomentBlock) {
        const std::size_t end = std::min(values.size(), begin + kMomentBlock);
        const auto part = [&](const std::vector<float>& all) {
          return std::vector<float>(all.begin() + static_cast<std::ptrdiff_t>(begin),
                                    all.begin() + static_cast<std::ptrdiff_t>(end));
        };
        expect_same_bits(part(got), reference::stored(moment, part(values)));
      }
    }
  });
}

TEST(Moments, RandomBlocksAreStoredAsTheReferenceStoresThem) {
  on_each_target([&] {
    for (const Moment moment : kBoth) {
      for (std::uint64_t seed = 1; seed <= (kSanitized ? 3 : 20); ++seed) {
        for (const double decades : {0.5, 3.0, 9.0, 30.0}) {
          SCOPED_TRACE("seed " + std::to_string(seed));
          const std::vector<float> values = random_values(moment, kMomentBlock, seed, decades);
          expect_same_bits(stored(moment, values), reference::stored(moment, values));
        }
      }
    }
  });
}

TEST(Moments, WhatWasReadIsStoredAsTheSameAgain) {
  on_each_target([&] {
    for (const Moment moment : kBoth) {
      for (std::uint64_t seed = 1; seed <= 20; ++seed) {
        SCOPED_TRACE("seed " + std::to_string(seed));
        std::vector<float> values = random_values(moment, 1000, seed, 8.0);
        if (seed == 1 && moment == Moment::exp_avg) values[5] = -1.0F;  // the largest is negative
        if (seed == 2) values.assign(values.size(), 1e-45F);
        const std::vector<float> once = stored(moment, values);
        expect_same_bits(stored(moment, once), once);
      }
    }
  });
}

TEST(Moments, ASecondMomentThatIsNotZeroIsNeverStoredAsZeroAndAZeroIs) {
  on_each_target([&] {
    std::vector<float> values(kMomentBlock, 0.0F);
    values[0] = 1.0F;
    values[1] = 1e-30F;
    values[2] = 1e-45F;
    values[3] = 1.6e-7F;
    const std::vector<float> got = stored(Moment::exp_avg_sq, values);
    EXPECT_EQ(got[0], 1.0F);
    for (const int i : {1, 2, 3}) EXPECT_EQ(got[i], 3.25e-7F) << "element " << i;
    for (std::size_t i = 4; i < values.size(); ++i) EXPECT_EQ(got[i], 0.0F) << "element " << i;
    EXPECT_EQ(stored(Moment::exp_avg, values)[1], 0.0F);
  });
}

TEST(Moments, BytesOfZeroAreZerosAndAShortBlockEndsInThem) {
  on_each_target([&] {
    for (const Moment moment : kBoth) {
      const std::vector<std::byte> zeros(2 * kMomentBlockBytes);
      expect_same_bits(read(moment, zeros, 0, 512), std::vector<float>(512, 0.0F));
      EXPECT_EQ(store(moment, std::vector<float>(512, -0.0F)), zeros);
      const std::vector<std::byte> blocks = store(moment, std::vector<float>(300, 0.25F));
      const std::vector<float> got = read(moment, blocks, 0, 512);
      for (std::size_t i = 0; i < got.size(); ++i) ASSERT_EQ(got[i], i < 300 ? 0.25F : 0.0F) << "element " << i;
    }
  });
}

TEST(Moments, NaNOrInfinityMakesItsBlockNaNAndNoOther) {
  on_each_target([&] {
    for (const Moment moment : kBoth) {
      for (const float special : {float_of(0x7FC00000), float_of(0xFF800001), INFINITY}) {
        std::vector<float> values(3 * kMomentBlock, 0.5F);
        values[kMomentBlock + 17] = special;
        const std::vector<float> got = stored(moment, values);
        for (std::size_t i = 0; i < got.size(); ++i) {
          ASSERT_EQ(std::isnan(got[i]), i / kMomentBlock == 1) << "element " << i;
        }
      }
    }
  });
}

TEST(Moments, AnyRangeIsReadAsThePartOfTheWhole) {
  on_each_target([&] {
    for (const Moment moment : kBoth) {
      const std::vector<std::byte> blocks = store(moment, random_values(moment, 700, 3, 5.0));
      const std::vector<float> whole = read(moment, blocks, 0, 700);
      for (const std::size_t first : {0U, 1U, 255U, 256U, 300U, 699U}) {
        for (const std::size_t count : {0U, 1U, 256U, 257U, 400U}) {
          if (first + count > 700) continue;
          const auto begin = whole.begin() + static_cast<std::ptrdiff_t>(first);
          expect_same_bits(read(moment, blocks, first, count), {begin, begin + static_cast<std::ptrdiff_t>(count)});
        }
      }
    }
  });
}

// The published form: moments are read, the update runs in fp32, and what it gives is stored.
TEST(Moments, AnUpdateIsThatOfFp32MomentsBetweenReadingAndStoring) {
  constexpr AdamHyperparameters kUpdate{
      .learning_rate = 0.01, .beta1 = 0.9, .beta2 = 0.95, .epsilon = 1e-8, .weight_decay = 0.1, .decoupled = true};
  on_each_target([&] {
    for (const auto parameter : {ParameterFormat::split_bf16, ParameterFormat::fp16, ParameterFormat::fp32}) {
      for (const auto gradient : {ElementType::fp32, ElementType::bf16}) {
        for (const std::size_t count : {1U, 255U, 256U, 257U, 1500U}) {
          AdamState wide = AdamState::random({parameter, ElementType::fp32, gradient}, count, count);
          std::vector<std::byte> m = store(Moment::exp_avg, wide.get(AdamState::kExpAvg));
          std::vector<std::byte> v = store(Moment::exp_avg_sq, wide.get(AdamState::kExpAvgSq));
          wide.set(AdamState::kExpAvg, read(Moment::exp_avg, m, 0, count));
          wide.set(AdamState::kExpAvgSq, read(Moment::exp_avg_sq, v, 0, count));
          AdamState narrow = wide;
          wide.update(adam_scalars(kUpdate, 3, 0.5));
          AdamArrays arrays = narrow.arrays();
          arrays.moment_type = ElementType::int8;
          arrays.exp_avg = m.data();
          arrays.exp_avg_sq = v.data();
          adam(adam_scalars(kUpdate, 3, 0.5), arrays, count);
          for (const int s : {AdamState::kParameter, AdamState::kMaster, AdamState::kPublished}) {
            ASSERT_EQ(narrow.bytes(s), wide.bytes(s)) << "stream " << s << ", " << count << " elements";
          }
          ASSERT_EQ(m, store(Moment::exp_avg, wide.get(AdamState::kExpAvg)));
          ASSERT_EQ(v, store(Moment::exp_avg_sq, wide.get(AdamState::kExpAvgSq)));
        }
      }
    }
  });
}

TEST(Moments, BitsDoNotDependOnTheInstructionSetNorOnWhichBlocksACallTakes) {
  constexpr AdamHyperparameters kUpdate{
      .learning_rate = 0.002, .beta1 = 0.8, .beta2 = 0.99, .epsilon = 1e-6, .weight_decay = 0.1, .decoupled = false};
  constexpr std::size_t kCount = 5000;
  const AdamState start =
      AdamState::random({ParameterFormat::split_bf16, ElementType::fp32, ElementType::fp32}, kCount, 5);
  std::vector<std::byte> first;
  on_each_target([&] {
    for (const std::size_t piece : {256U, 1024U, 8192U}) {
      AdamState state = start;
      std::vector<std::byte> m(blocks_bytes(kCount)), v(blocks_bytes(kCount));
      for (std::uint64_t step = 1; step <= 5; ++step) {
        for (std::size_t begin = 0; begin < kCount; begin += piece) {
          AdamArrays arrays = state.arrays(begin);
          arrays.moment_type = ElementType::int8;
          arrays.exp_avg = m.data() + blocks_bytes(begin);
          arrays.exp_avg_sq = v.data() + blocks_bytes(begin);
          adam(adam_scalars(kUpdate, step, 1.0), arrays, std::min(piece, kCount - begin));
        }
      }
      std::vector<std::byte> all = state.bytes(AdamState::kMaster);
      for (const auto& more : {state.bytes(AdamState::kParameter), m, v}) {
        all.insert(all.end(), more.begin(), more.end());
      }
      if (first.empty()) first = all;
      EXPECT_EQ(all, first) << "pieces of " << piece;
    }
  });
}

}  // namespace
}  // namespace ballast::kernels
