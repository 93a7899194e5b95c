// Sums, accumulation and the finite check on every instruction set.
// SPDX-License-Identifier: Apache-2.0
#include <gtest/gtest.h>

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>
#include <vector>

#include "ballast/base/random.h"
#include "ballast/kernels/convert.h"
#include "ballast/kernels/reduce.h"
#include "unit/kernels_support.h"

namespace ballast::kernels {
namespace {

using testing::bits_of;
using testing::Edge;
using testing::float_of;
using testing::GuardedArray;
using testing::on_each_target;

std::vector<float> random_values(std::size_t count, std::uint64_t seed) {
  base::Random random(seed);
  std::vector<float> values(count);
  for (float& value : values) {
    const double magnitude = std::pow(10.0, 12.0 * random.uniform() - 8.0);
    value = static_cast<float>(random.below(2) == 0 ? magnitude : -magnitude);
  }
  return values;
}

std::vector<std::uint16_t> as_bf16(const std::vector<float>& values) {
  std::vector<std::uint16_t> half(values.size());
  fp32_to_bf16(values.data(), half.data(), half.size());
  return half;
}

float widened(std::uint16_t half) { return float_of(std::uint32_t{half} << 16); }

std::size_t blocks_of(std::size_t count) { return (count + kSumBlock - 1) / kSumBlock; }

// The order of the sums spelled out: element i of a block goes to sum i % 32; the upper half of the sums is added to
// the lower until one is left.
double block_sum_in_order(const float* values, std::size_t count) {
  double sums[32] = {};
  for (std::size_t i = 0; i < count; ++i)
    sums[i % 32] += static_cast<double>(values[i]) * static_cast<double>(values[i]);
  for (std::size_t half = 16; half != 0; half /= 2) {
    for (std::size_t lane = 0; lane < half; ++lane) sums[lane] += sums[lane + half];
  }
  return sums[0];
}

TEST(Reduce, SumsOfSquaresHaveTheirOrderForEachLengthAndTouchNothingElse) {
  std::vector<std::size_t> lengths = testing::lengths();
  for (const std::size_t count : {kSumBlock - 1, kSumBlock, kSumBlock + 1, 3 * kSumBlock + 77}) {
    lengths.push_back(count);
  }
  on_each_target([&] {
    for (const std::size_t count : lengths) {
      const std::vector<float> values = random_values(count, 3 + count);
      const std::vector<std::uint16_t> halves = as_bf16(values);
      std::vector<float> wide(count);
      bf16_to_fp32(halves.data(), wide.data(), count);
      for (const Edge edge : {Edge::front, Edge::back}) {
        GuardedArray<float> source(count, edge);
        GuardedArray<std::uint16_t> source_bf16(count, edge);
        GuardedArray<double> sums(blocks_of(count), edge);
        std::copy(values.begin(), values.end(), source.begin());
        std::copy(halves.begin(), halves.end(), source_bf16.begin());
        sum_of_squares_fp32(source.data(), count, sums.data());
        for (std::size_t b = 0; b < sums.size(); ++b) {
          const std::size_t begin = b * kSumBlock;
          ASSERT_EQ(sums[b], block_sum_in_order(values.data() + begin, std::min(kSumBlock, count - begin)))
              << "block " << b << " of " << count << " elements";
        }
        sum_of_squares_bf16(source_bf16.data(), count, sums.data());
        for (std::size_t b = 0; b < sums.size(); ++b) {
          const std::size_t begin = b * kSumBlock;
          ASSERT_EQ(sums[b], block_sum_in_order(wide.data() + begin, std::min(kSumBlock, count - begin)))
              << "block " << b << " of " << count << " elements";
        }
      }
    }
  });
}

TEST(Reduce, SumsDoNotDependOnCutsAtBlocksOrOnAlignment) {
  const std::size_t count = 9 * kSumBlock + 1234;
  const std::vector<float> values = random_values(count, 5);
  std::vector<double> whole(blocks_of(count));
  sum_of_squares_fp32(values.data(), count, whole.data());
  on_each_target([&] {
    for (const std::size_t blocks : {1u, 2u, 4u, 7u}) {
      std::vector<double> cut(whole.size());
      for (std::size_t begin = 0; begin < count; begin += blocks * kSumBlock) {
        std::vector<float> moved(count + 7);  // another alignment for each cut
        const std::size_t size = std::min(blocks * kSumBlock, count - begin);
        float* const place = moved.data() + begin / kSumBlock % 7;
        std::copy_n(values.begin() + static_cast<std::ptrdiff_t>(begin), size, place);
        sum_of_squares_fp32(place, size, cut.data() + begin / kSumBlock);
      }
      EXPECT_EQ(cut, whole) << blocks << " blocks a call";
    }
  });
}

TEST(Reduce, ABlocksSumIsFiniteExactlyWhereAllItsElementsAre) {
  on_each_target([&] {
    for (const float bad : {INFINITY, -INFINITY, float_of(0x7F800001), NAN}) {
      for (const std::size_t position : {0u, 31u, 4095u, 4096u, 5000u, 12287u, 12290u}) {
        std::vector<float> values(3 * kSumBlock + 10, std::numeric_limits<float>::max());
        std::vector<double> sums(4);
        sum_of_squares_fp32(values.data(), values.size(), sums.data());
        for (const double sum : sums) EXPECT_TRUE(std::isfinite(sum));
        values[position] = bad;
        sum_of_squares_fp32(values.data(), values.size(), sums.data());
        for (std::size_t b = 0; b < sums.size(); ++b) EXPECT_EQ(std::isfinite(sums[b]), b != position / kSumBlock);
        const std::vector<std::uint16_t> halves(values.size(), 0x7F7F);
        std::vector<std::uint16_t> with_bad = halves;
        with_bad[position] = static_cast<std::uint16_t>(bits_of(bad) >> 16 | (std::isnan(bad) ? 0x40 : 0));
        sum_of_squares_bf16(with_bad.data(), with_bad.size(), sums.data());
        for (std::size_t b = 0; b < sums.size(); ++b) EXPECT_EQ(std::isfinite(sums[b]), b != position / kSumBlock);
      }
    }
  });
}

TEST(Reduce, SubnormalSquaresAreKept) {
  const std::vector<float> values(100, std::numeric_limits<float>::denorm_min());
  on_each_target([&] {
    double sum = 0.0;
    sum_of_squares_fp32(values.data(), values.size(), &sum);
    EXPECT_EQ(sum, 100.0 * std::ldexp(1.0, -298));
  });
}

TEST(Reduce, AccumulationRoundsTheProductThenTheSumForEachLength) {
  on_each_target([&] {
    for (const std::size_t count : testing::lengths()) {
      const std::vector<float> values = random_values(count, 7 + count);
      const std::vector<float> start = random_values(count, 8 + count);
      const std::vector<std::uint16_t> values_bf16 = as_bf16(values);
      const std::vector<std::uint16_t> start_bf16 = as_bf16(start);
      const float scale = 0.3f;
      std::vector<float> expected(count);
      std::vector<float> expected_wide(count);
      for (std::size_t i = 0; i < count; ++i) {
        const volatile float product = scale * values[i];
        expected[i] = start[i] + product;
        const volatile float product_bf16 = scale * widened(values_bf16[i]);
        expected_wide[i] = widened(start_bf16[i]) + product_bf16;
      }
      const std::vector<std::uint16_t> expected_bf16 = as_bf16(expected_wide);
      for (const Edge edge : {Edge::front, Edge::back}) {
        GuardedArray<float> source(count, edge);
        GuardedArray<float> destination(count, edge);
        std::copy(values.begin(), values.end(), source.begin());
        std::copy(start.begin(), start.end(), destination.begin());
        accumulate_fp32(destination.data(), source.data(), scale, count);
        for (std::size_t i = 0; i < count; ++i) ASSERT_EQ(bits_of(destination[i]), bits_of(expected[i])) << i;
        GuardedArray<std::uint16_t> source_bf16(count, edge);
        GuardedArray<std::uint16_t> destination_bf16(count, edge);
        std::copy(values_bf16.begin(), values_bf16.end(), source_bf16.begin());
        std::copy(start_bf16.begin(), start_bf16.end(), destination_bf16.begin());
        accumulate_bf16(destination_bf16.data(), source_bf16.data(), scale, count);
        for (std::size_t i = 0; i < count; ++i) ASSERT_EQ(destination_bf16[i], expected_bf16[i]) << i;
      }
    }
  });
}

TEST(Reduce, OneValueThatIsNotFiniteIsFoundAtEachPositionOfEachLength) {
  on_each_target([&] {
    for (const std::size_t count : testing::lengths()) {
      for (const Edge edge : {Edge::front, Edge::back}) {
        GuardedArray<float> values(count, edge);
        GuardedArray<std::uint16_t> halves(count, edge);
        std::fill(values.begin(), values.end(), -std::numeric_limits<float>::max());
        std::fill(halves.begin(), halves.end(), std::uint16_t{0xFF7F});
        ASSERT_TRUE(all_finite_fp32(values.data(), count)) << count;
        ASSERT_TRUE(all_finite_bf16(halves.data(), count)) << count;
        const std::size_t step = count > 100 ? count / 37 : 1;
        for (std::size_t i = 0; i < count; i += step) {
          for (const std::uint32_t bad : {0x7F800000u, 0xFF800000u, 0x7F800001u, 0xFFFFFFFFu}) {
            const float kept = values[i];
            const std::uint32_t word = bad;
            std::memcpy(&values[i], &word, sizeof word);
            ASSERT_FALSE(all_finite_fp32(values.data(), count)) << i << " of " << count;
            values[i] = kept;
          }
          for (const std::uint16_t bad : {0x7F80, 0xFF80, 0x7F81, 0xFFFF}) {
            const std::uint16_t kept = halves[i];
            halves[i] = bad;
            ASSERT_FALSE(all_finite_bf16(halves.data(), count)) << i << " of " << count;
            halves[i] = kept;
          }
        }
      }
    }
  });
}

}  // namespace
}  // namespace ballast::kernels
