// The static map of the device slab: every small trace, and random larger ones.
// SPDX-License-Identifier: Apache-2.0
#include <ballast/base/random.h>
#include <ballast/schedule/device_map.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <functional>
#include <string>
#include <vector>

namespace ballast::schedule {
namespace {

// Empty, or what is wrong with the map.
std::string broken(const std::vector<Opening>& openings, const DeviceMap& map, std::uint64_t slab_bytes) {
  if (!map.fits) return "does not fit";
  std::uint64_t used = 0;
  for (std::size_t a = 0; a < openings.size(); ++a) {
    if (openings[a].bytes == 0) continue;
    used = std::max(used, map.offsets[a] + openings[a].bytes);
    for (std::size_t b = 0; b < a; ++b) {
      if (openings[b].bytes == 0) continue;
      const bool together = openings[a].open_at < openings[b].close_at && openings[b].open_at < openings[a].close_at;
      const bool overlap =
          map.offsets[a] < map.offsets[b] + openings[b].bytes && map.offsets[b] < map.offsets[a] + openings[a].bytes;
      if (together && overlap) return "openings " + std::to_string(b) + " and " + std::to_string(a) + " share memory";
    }
  }
  if (used > slab_bytes) return "beyond the slab";
  if (used != map.used_bytes) return "used_bytes is wrong";
  return {};
}

// The most that is open at once: no map can do with less.
std::uint64_t most_open(const std::vector<Opening>& openings) {
  std::uint64_t most = 0;
  for (const Opening& at : openings) {
    std::uint64_t open = 0;
    for (const Opening& o : openings) {
      if (o.open_at <= at.open_at && at.open_at < o.close_at) open += o.bytes;
    }
    most = std::max(most, open);
  }
  return most;
}

std::string broken_anywhere(const std::vector<Opening>& openings) {
  const std::uint64_t smallest = compile_device_map(openings, ~0ull >> 1).smallest_bytes;
  if (smallest < most_open(openings)) return "smallest_bytes is less than what is open at once";
  if (smallest > 0 && compile_device_map(openings, smallest - 1).fits) return "fits in less than smallest_bytes";
  std::uint64_t all = 0;
  for (const Opening& o : openings) all += o.bytes;
  for (const std::uint64_t slab : {smallest, smallest + 1, smallest + 2, smallest + 5, 2 * smallest, smallest + all}) {
    const DeviceMap map = compile_device_map(openings, slab);
    if (map.smallest_bytes != smallest) return "smallest_bytes depends on the slab";
    const std::string what = broken(openings, map, slab);
    if (!what.empty()) return what + " in a slab of " + std::to_string(slab);
  }
  return {};
}

std::string text_of(const std::vector<Opening>& openings) {
  std::string text;
  for (const Opening& o : openings) {
    text += (o.gradient ? "\ngradients " : "\nparameters ") + std::to_string(o.unit) + ": " + std::to_string(o.bytes) +
            " bytes from " + std::to_string(o.open_at) + " to " + std::to_string(o.close_at);
  }
  return text;
}

TEST(DeviceMap, IsRightForEveryTraceOfUpToFourOpenings) {
  std::uint64_t traces = 0;
  for (std::size_t count = 1; count <= 4; ++count) {
    // Every way to pair opens and closes: each open takes the first free time, its close any later free one.
    std::vector<Opening> openings;
    std::vector<bool> taken(2 * count, false);
    const std::function<void()> place = [&] {
      if (openings.size() == count) {
        for (std::uint32_t kinds = 0; kinds < 1u << (3 * count); ++kinds) {
          for (std::size_t i = 0; i < count; ++i) {
            openings[i].gradient = (kinds >> (3 * i) & 1) != 0;
            openings[i].bytes = 1 + 2 * (kinds >> (3 * i + 1) & 1);
            openings[i].unit = kinds >> (3 * i + 2) & 1;
          }
          const std::string what = broken_anywhere(openings);
          ASSERT_EQ(what, "") << text_of(openings);
          ++traces;
        }
        return;
      }
      std::uint32_t open = 0;
      while (taken[open]) ++open;
      taken[open] = true;
      for (std::uint32_t close = open + 1; close < 2 * count; ++close) {
        if (taken[close]) continue;
        taken[close] = true;
        openings.push_back({0, false, 1, open, close});
        place();
        openings.pop_back();
        taken[close] = false;
      }
      taken[open] = false;
    };
    place();
  }
  EXPECT_GT(traces, 400'000u);
}

TEST(DeviceMap, IsRightForRandomTraces) {
  for (std::uint64_t seed = 0; seed < 2'000; ++seed) {
    base::Random random(seed);
    const std::size_t count = 1 + random.below(60);
    const std::uint32_t units = 1 + static_cast<std::uint32_t>(random.below(12));
    const std::size_t at_once = 1 + random.below(6);
    std::vector<Opening> openings;
    std::vector<std::size_t> open;
    std::uint32_t now = 0;
    while (openings.size() < count || !open.empty()) {
      if (openings.size() < count && open.size() < at_once && random.below(2) == 0) {
        open.push_back(openings.size());
        openings.push_back(
            {static_cast<std::uint32_t>(random.below(units)), random.below(3) == 0, 256 * random.below(9), now++, 0});
      } else if (!open.empty()) {
        const std::size_t which = random.below(open.size());
        openings[open[which]].close_at = now++;
        open.erase(open.begin() + static_cast<std::ptrdiff_t>(which));
      }
    }
    ASSERT_EQ(broken_anywhere(openings), "") << "seed " << seed << text_of(openings);
  }
}

// Forward over all units, then backward in reverse.
std::vector<Opening> usual_pass(std::uint32_t units) {
  std::vector<Opening> openings;
  std::uint32_t now = 0;
  for (std::uint32_t u = 0; u < units; ++u, now += 2) openings.push_back({u, false, 2, now, now + 1});
  for (std::uint32_t u = units; u-- > 0; now += 4) {
    openings.push_back({u, false, 2, now, now + 3});
    openings.push_back({u, true, 4, now + 1, now + 2});
  }
  return openings;
}

TEST(DeviceMap, LetsBackwardFindTheLastUnitsOfForwardInPlace) {
  const std::vector<Opening> openings = usual_pass(6);
  const DeviceMap map = compile_device_map(openings, 12);
  ASSERT_EQ(broken(openings, map, 12), "");
  EXPECT_EQ(map.offsets[6], map.offsets[5]);  // the last unit, forward and backward
  EXPECT_EQ(map.offsets[8], map.offsets[4]);  // the one before
}

TEST(DeviceMap, FetchesEachUnitOnceWhereEverythingFits) {
  const std::vector<Opening> openings = usual_pass(50);
  const std::uint64_t slab = 50 * 2 + 2 * 4;  // every unit, and two gradients in turn
  const DeviceMap map = compile_device_map(openings, slab);
  ASSERT_EQ(broken(openings, map, slab), "");
  for (std::size_t i = 50; i < openings.size(); ++i) {
    if (openings[i].gradient) continue;
    EXPECT_EQ(map.offsets[i], map.offsets[openings[i].unit]);
  }
}

TEST(DeviceMap, TakesNothingForOpeningsWithoutBytes) {
  const std::vector<Opening> openings = {{0, false, 0, 0, 3}, {1, false, 0, 1, 2}};
  const DeviceMap map = compile_device_map(openings, 0);
  EXPECT_TRUE(map.fits);
  EXPECT_EQ(map.smallest_bytes, 0u);
  EXPECT_EQ(map.used_bytes, 0u);
  EXPECT_TRUE(compile_device_map({}, 0).fits);
}

TEST(DeviceMap, HoldsTenThousandUnits) {
  const std::vector<Opening> openings = usual_pass(10'000);
  EXPECT_EQ(openings.size(), 30'000u);
  const DeviceMap map = compile_device_map(openings, 64);
  EXPECT_TRUE(map.fits);
  EXPECT_EQ(map.smallest_bytes, 6u);
  EXPECT_LE(map.used_bytes, 64u);
}

}  // namespace
}  // namespace ballast::schedule
