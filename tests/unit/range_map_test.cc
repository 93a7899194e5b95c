// Who was the last to take which bytes, against a byte by byte account.
// SPDX-License-Identifier: Apache-2.0
#include <ballast/base/random.h>
#include <ballast/schedule/range_map.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <array>
#include <set>
#include <vector>

namespace ballast::schedule {
namespace {

constexpr std::uint64_t kBytes = 64;
using Bytes = std::array<std::uint32_t, kBytes>;

Bytes bytes_of(const RangeMap& map) {
  Bytes bytes;
  bytes.fill(0);
  map.for_each([&](std::uint64_t begin, std::uint64_t end, const RangeMap::Owner& owner) {
    for (std::uint64_t at = begin; at < std::min(end, kBytes); ++at) bytes[at] = owner.entry;
  });
  return bytes;
}

TEST(RangeMap, KnowsTheLastOwnerOfEveryByteAndTellsOfThoseBefore) {
  for (std::uint64_t seed = 0; seed < 200; ++seed) {
    base::Random random(seed);
    RangeMap map(2 * kBytes);
    Bytes expected;
    expected.fill(RangeMap::kNobody);
    for (std::uint32_t taking = 1; taking <= 300; ++taking) {
      const std::uint64_t begin = random.below(kBytes);
      const std::uint64_t end = begin + 1 + random.below(std::min<std::uint64_t>(kBytes - begin, 1 + random.below(64)));
      std::set<std::uint32_t> seen, before(expected.begin() + static_cast<std::ptrdiff_t>(begin),
                                           expected.begin() + static_cast<std::ptrdiff_t>(end));
      map.take(begin, end, {taking, taking, 0}, [&](const RangeMap::Owner& owner) { seen.insert(owner.entry); });
      EXPECT_EQ(seen, before) << "seed " << seed << ", taking " << taking;
      std::fill(expected.begin() + static_cast<std::ptrdiff_t>(begin),
                expected.begin() + static_cast<std::ptrdiff_t>(end), taking);
      ASSERT_EQ(bytes_of(map), expected) << "seed " << seed << ", taking " << taking;
    }
    map.clear();
    expected.fill(RangeMap::kNobody);
    EXPECT_EQ(bytes_of(map), expected);
  }
}

TEST(RangeMap, RangesThatAreCoveredMakeRoomAgain) {
  RangeMap map(13);
  std::uint32_t taking = 0;
  for (int round = 0; round < 1000; ++round) {
    for (std::uint64_t at = 0; at < 10; ++at) {
      ASSERT_TRUE(map.room());
      map.take(10 * at, 10 * at + 10, {++taking, taking, 0}, [](const RangeMap::Owner&) {});
    }
    int covered = 0;
    ASSERT_TRUE(map.room());
    map.take(0, 100, {++taking, taking, 0}, [&](const RangeMap::Owner&) { ++covered; });
    EXPECT_EQ(covered, 10);
  }
}

TEST(RangeMap, IsFullOnlyWhenItHoldsWhatItWasMadeFor) {
  RangeMap map(8);
  std::uint32_t taking = 0;
  while (map.room()) {
    ++taking;
    map.take(20 * taking, 20 * taking + 10, {taking, taking, 0}, [](const RangeMap::Owner&) {});
  }
  EXPECT_EQ(taking, 3u);  // two cuts each, and what lies before
  map.clear();
  EXPECT_TRUE(map.room());
}

}  // namespace
}  // namespace ballast::schedule
