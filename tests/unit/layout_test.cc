// Flat parameters, chunks and shards.
// SPDX-License-Identifier: Apache-2.0
#include "layout.h"

#include <ballast/base/random.h>
#include <ballast/kernels/reduce.h>
#include <gtest/gtest.h>

#include <algorithm>

namespace ballast::engine {
namespace {

constexpr std::uint64_t kGranule = std::max<std::uint64_t>(kernels::kSumBlock, 2048);

Layout layout_of(std::vector<UnitSpec> units, std::uint64_t chunk_elements = 4 * kGranule,
                 const Config::Precision& precision = {}) {
  return make_layout(units, precision, chunk_elements, kGranule);
}

// Everything that must hold of any layout.
void check(const std::vector<UnitSpec>& specs, const Layout& layout, std::uint64_t chunk_elements,
           const Config::Precision& precision) {
  ASSERT_EQ(layout.units.size(), specs.size());
  std::uint64_t blocks = 0;
  std::uint64_t parameters = 0;
  std::uint32_t next_chunk = 0;
  for (std::size_t u = 0; u < specs.size(); ++u) {
    const UnitLayout& unit = layout.units[u];
    ASSERT_EQ(unit.first_chunk, next_chunk);
    next_chunk += unit.chunk_count;
    std::uint64_t begin = 0;
    std::uint64_t device = 0;
    bool frozen_seen = false;
    for (std::uint32_t c = unit.first_chunk; c < next_chunk; ++c) {
      const ChunkLayout& chunk = layout.chunks[c];
      ASSERT_EQ(chunk.unit, u);
      ASSERT_EQ(chunk.begin, begin) << "chunks lie one after another";
      ASSERT_EQ(chunk.device_offset, device);
      ASSERT_GT(chunk.elements, 0u);
      ASSERT_EQ(chunk.elements % kGranule, 0u);
      ASSERT_LE(chunk.elements, chunk_elements);
      ASSERT_EQ(chunk.parameter_bytes, chunk.elements * element_bytes(chunk.dtype));
      begin += chunk.elements;
      device += chunk.parameter_bytes;
      ASSERT_FALSE(frozen_seen && chunk.trainable) << "trainable first";
      frozen_seen |= !chunk.trainable;
      if (chunk.trainable) {
        ASSERT_EQ(chunk.first_block, blocks);
        blocks += chunk.elements / kernels::kSumBlock;
        const std::uint64_t least = moment_bytes(precision.moments, chunk.elements);
        ASSERT_EQ(chunk.moment_bytes, (least + kGranule - 1) / kGranule * kGranule);
        ASSERT_EQ(chunk.parameter_bytes + chunk.master_bytes, chunk.elements * (chunk.dtype == DataType::fp16 ? 6 : 4));
        ASSERT_EQ(unit.gradient_elements >= begin, true);
      } else {
        ASSERT_EQ(chunk.moment_bytes, 0u);
      }
      std::uint64_t end = 0;
      for (std::uint32_t s = chunk.first_segment; s < chunk.first_segment + chunk.segment_count; ++s) {
        const Segment& segment = layout.segments[s];
        const ParameterLayout& p = unit.parameters[segment.parameter];
        ASSERT_GE(segment.begin, end);
        ASSERT_GT(segment.count, 0u);
        end = segment.begin + segment.count;
        ASSERT_LE(end, chunk.elements);
        ASSERT_EQ(p.dtype, chunk.dtype);
        ASSERT_EQ(p.trainable, chunk.trainable);
        ASSERT_EQ(p.counted, chunk.counted);
        ASSERT_EQ(chunk.begin + segment.begin, p.begin + segment.parameter_first);
      }
    }
    ASSERT_EQ(unit.device_bytes, device);
    std::vector<std::uint64_t> covered(unit.parameters.size(), 0);
    for (std::uint32_t c = unit.first_chunk; c < next_chunk; ++c) {
      const ChunkLayout& chunk = layout.chunks[c];
      for (std::uint32_t s = chunk.first_segment; s < chunk.first_segment + chunk.segment_count; ++s) {
        const Segment& segment = layout.segments[s];
        ASSERT_EQ(segment.parameter_first, covered[segment.parameter]) << "each element once, in order";
        covered[segment.parameter] += segment.count;
      }
    }
    std::uint64_t trainable_elements = 0;
    for (std::size_t p = 0; p < unit.parameters.size(); ++p) {
      const ParameterLayout& parameter = unit.parameters[p];
      ASSERT_EQ(parameter.name, specs[u].parameters[p].name) << "as registered";
      ASSERT_EQ(covered[p], parameter.elements);
      const std::uint64_t alignment = precision.moments == MomentType::int8 ? 256 : 128;
      ASSERT_EQ(parameter.begin % alignment, 0u);
      ASSERT_EQ(parameter.device_offset % (alignment * 2), 0u);
      parameters += parameter.elements;
      if (parameter.trainable) trainable_elements += parameter.elements;
    }
    std::uint64_t gaps = 0;
    for (const Gap& gap : unit.gradient_gaps) {
      ASSERT_LE(gap.begin + gap.count, unit.gradient_elements);
      gaps += gap.count;
    }
    ASSERT_EQ(trainable_elements + gaps, unit.gradient_elements) << "gaps are all that is not gradient";
  }
  ASSERT_EQ(layout.chunks.size(), next_chunk);
  ASSERT_EQ(layout.blocks, blocks);
  ASSERT_EQ(layout.parameters, parameters);
}

TEST(LayoutTest, RandomUnitsKeepEveryRule) {
  for (std::uint64_t seed = 1; seed <= 60; ++seed) {
    SCOPED_TRACE("seed " + std::to_string(seed));
    base::Random random(seed);
    Config::Precision precision;
    precision.parameters = static_cast<DataType>(random.below(3));
    precision.moments = static_cast<MomentType>(random.below(3));
    std::vector<UnitSpec> units;
    for (std::uint64_t u = 0; u <= random.below(4); ++u) {
      UnitSpec unit{"u" + std::to_string(u), {}};
      for (std::uint64_t p = 0, n = random.below(9); p < n; ++p) {
        ParameterSpec spec{"p" + std::to_string(p), {}};
        if (random.below(5) > 0) spec.shape = {static_cast<std::int64_t>(random.below(random.below(2) ? 40000 : 300))};
        spec.options.group = static_cast<int>(random.below(3));
        if (random.below(2) == 0) spec.options.dtype = static_cast<DataType>(random.below(3));
        spec.options.trainable = random.below(3) > 0;
        spec.options.in_norm = random.below(4) > 0;
        unit.parameters.push_back(spec);
      }
      units.push_back(unit);
    }
    const std::uint64_t chunk_elements = kGranule << random.below(5);
    check(units, layout_of(units, chunk_elements, precision), chunk_elements, precision);
    if (HasFatalFailure()) return;
  }
}

TEST(LayoutTest, ParametersAreSortedByTrainableTypeAndGroupAndOtherwiseAsRegistered) {
  const Layout layout = layout_of({{"u",
                                    {{"frozen", {10}, {.trainable = false}},
                                     {"wide", {10}, {.dtype = DataType::fp32}},
                                     {"second group", {10}, {.group = 1}},
                                     {"a", {130}},
                                     {"b", {10}}}}});
  const auto& p = layout.units[0].parameters;
  EXPECT_EQ(p[3].begin, 0u);
  EXPECT_EQ(p[4].begin, 256u) << "130 elements end in the second 128";
  EXPECT_EQ(p[2].begin, 384u);
  EXPECT_EQ(p[1].begin, kGranule) << "another type: another section";
  EXPECT_EQ(p[1].device_offset, 2 * kGranule);
  EXPECT_EQ(p[0].begin, 2 * kGranule);
  EXPECT_EQ(layout.units[0].gradient_elements, 2 * kGranule);
  EXPECT_EQ(layout.chunks.size(), 3u);
}

TEST(LayoutTest, WhatIsNotCountedInTheNormHasASectionOfItsOwn) {
  const Layout layout = layout_of({{"u",
                                    {{"a", {10}, {.in_norm = false}},
                                     {"b", {10}},
                                     {"c", {10}, {.group = 1}},
                                     {"frozen", {10}, {.trainable = false, .in_norm = false}}}}});
  const auto& p = layout.units[0].parameters;
  EXPECT_EQ(p[1].begin, 0u);
  EXPECT_EQ(p[2].begin, 128u);
  EXPECT_EQ(p[0].begin, kGranule);
  EXPECT_EQ(p[3].begin, 2 * kGranule);
  ASSERT_EQ(layout.chunks.size(), 3u);
  EXPECT_TRUE(layout.chunks[0].counted);
  EXPECT_FALSE(layout.chunks[1].counted);
  EXPECT_TRUE(layout.chunks[2].counted) << "frozen: in no norm either way";
}

TEST(LayoutTest, AUnitsOwnPartitionIsItsAlone) {
  const std::int64_t elements = 8 * static_cast<std::int64_t>(kGranule);
  for (bool all_shards : {false, true}) {
    const Layout layout = make_layout({{"all", {{"p", {elements}}}}, {"pair", {{"p", {elements}}}, 1, Partition{2, 1}}},
                                      {}, 4 * kGranule, kGranule, {4, 2, all_shards});
    EXPECT_EQ(layout.units[0].sections[0].shard_elements, 2 * kGranule);
    EXPECT_EQ(layout.units[1].sections[0].shard_elements, 4 * kGranule);
    EXPECT_EQ(layout.units[0].chunk_count, all_shards ? 4u : 1u);
    EXPECT_EQ(layout.units[1].chunk_count, all_shards ? 2u : 1u);
    EXPECT_EQ(layout.chunks.front().begin, all_shards ? 0 : 4 * kGranule);
    EXPECT_EQ(layout.chunks.back().begin, 4 * kGranule);
    EXPECT_EQ(layout.chunks.back().shard, 1u);
    EXPECT_EQ(layout.units[1].partition.all_shards, all_shards);
  }
}

TEST(LayoutTest, ThreeThousandMillionElementsKeepTheirCounts) {
  const Layout layout = layout_of({{"u", {{"p", {3'000'000'000}}}}}, (std::uint64_t{1} << 20) / kGranule * kGranule);
  const UnitLayout& unit = layout.units[0];
  EXPECT_EQ(unit.parameters[0].elements, 3'000'000'000u);
  const ChunkLayout& last = layout.chunks.back();
  EXPECT_GE(last.begin + last.elements, 3'000'000'000u);
  EXPECT_LT(last.begin + last.elements, 3'000'000'000u + kGranule);
  std::uint64_t optimizer = 0;
  for (const ChunkLayout& chunk : layout.chunks) optimizer += chunk.optimizer_bytes() + chunk.parameter_bytes;
  EXPECT_EQ(optimizer, unit.gradient_elements * 12);
  EXPECT_GE(optimizer, 36'000'000'000u);
  const Segment& segment = layout.segments.back();
  EXPECT_EQ(segment.parameter_first + segment.count, 3'000'000'000u);
}

TEST(LayoutTest, ABlockOfEightBitMomentsIsOneParametersAloneWhateverTheChunksAndTheRanks) {
  Config::Precision precision;
  precision.moments = MomentType::int8;
  const std::vector<UnitSpec> units = {{"u", {{"a", {1}}, {"b", {255}}, {"c", {257}}, {"d", {100'003}}, {"e", {130}}}}};
  for (const std::uint32_t world : {1U, 2U, 3U, 7U}) {
    for (const std::uint64_t chunk_elements : {kGranule, 4 * kGranule, 64 * kGranule}) {
      for (std::uint32_t rank = 0; rank < world; ++rank) {
        const Layout layout = make_layout(units, precision, chunk_elements, kGranule, {world, rank});
        for (const Segment& segment : layout.segments) {
          EXPECT_EQ(segment.begin % 256, 0U);
          EXPECT_EQ(segment.parameter_first % 256, 0U);
        }
        for (const ChunkLayout& chunk : layout.chunks) {
          // 2 bytes of parameter, 2 of remainder, and of each moment 1 and a 256th of 4, filled up to what drives want.
          const std::uint64_t moment = (chunk.elements * 65 / 64 + kGranule - 1) / kGranule * kGranule;
          EXPECT_EQ(chunk.parameter_bytes + chunk.optimizer_bytes(), chunk.elements * 4 + 2 * moment);
          EXPECT_EQ(chunk.optimizer_bytes() % (2 * kGranule), 0U);
        }
      }
    }
  }
}

TEST(LayoutTest, ElementCountsAreRefusedWhereTheyOverflowOrAreNegative) {
  EXPECT_EQ(element_count({}, "p"), 1u);
  EXPECT_EQ(element_count({8, 0}, "p"), 0u);
  EXPECT_EQ(element_count({2, 3, 5, 7}, "p"), 210u);
  EXPECT_EQ(element_count({3'000'000'000}, "p"), 3'000'000'000u);
  EXPECT_THROW(element_count({-1}, "p"), UsageError);
  EXPECT_THROW(element_count({0, -1}, "p"), UsageError);
  EXPECT_THROW(element_count({INT64_MAX, INT64_MAX, INT64_MAX}, "p"), UsageError);
  EXPECT_THROW(element_count({std::int64_t{1} << 32, std::int64_t{1} << 32}, "p"), UsageError);
}

TEST(ShardTest, EqualPartsOfWhichTheLastAreShortOrEmpty) {
  struct Expected {
    std::uint64_t elements;
    std::uint32_t world;
    std::vector<std::uint64_t> counts;
  };
  const std::vector<Expected> cases = {{5, 8, {1, 1, 1, 1, 1, 0, 0, 0}},
                                       {1, 4, {1, 0, 0, 0}},
                                       {10, 4, {3, 3, 3, 1}},
                                       {10, 3, {4, 4, 2}},
                                       {0, 3, {0, 0, 0}},
                                       {7, 1, {7}}};
  for (const Expected& expected : cases) {
    std::uint64_t at = 0;
    for (std::uint32_t rank = 0; rank < expected.world; ++rank) {
      const ShardRange range = shard_range(expected.elements, expected.world, rank);
      EXPECT_EQ(range.count, expected.counts[rank]) << expected.elements << " over " << expected.world;
      if (range.count > 0) {
        EXPECT_EQ(range.begin, at);
      }
      EXPECT_LE(range.count, range.padded);
      at += range.count;
    }
    EXPECT_EQ(at, expected.elements);
  }
}

TEST(ShardTest, PartsAreMultiplesOfTheGranuleAndLargeCountsDoNotWrap) {
  for (std::uint64_t elements : {std::uint64_t{1}, std::uint64_t{1001}, std::uint64_t{3'000'000'000'001}}) {
    for (std::uint32_t world : {1u, 3u, 7u, 64u}) {
      std::uint64_t sum = 0;
      for (std::uint32_t rank = 0; rank < world; ++rank) {
        const ShardRange range = shard_range(elements, world, rank, 128);
        EXPECT_EQ(range.padded % 128, 0u);
        EXPECT_GE(range.padded * world, elements);
        sum += range.count;
      }
      EXPECT_EQ(sum, elements);
    }
  }
}

}  // namespace
}  // namespace ballast::engine
