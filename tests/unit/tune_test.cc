// The search for block size and depth, on drives made up of a latency, a rate and a noise.
// SPDX-License-Identifier: Apache-2.0
#include <ballast/base/random.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>

#include "cli/tune_search.h"

namespace ballast::cli {
namespace {

// Little's law up to the drive's rate: bytes in flight over the latency, plus a cost for each request. `sweet`: larger
// blocks than that are slower.
struct Drive {
  double latency_seconds, bytes_per_second, request_seconds;
  double sweet_bytes = 1e18;
  double noise = 0;
  double ideal(const TunePoint& point) const {
    const auto block = static_cast<double>(point.block_bytes);
    const double in_flight = block * point.queue_depth / (latency_seconds + block / bytes_per_second);
    const double requests = block / (request_seconds + block / bytes_per_second);
    const double large = block > sweet_bytes ? std::sqrt(sweet_bytes / block) : 1;
    return std::min(in_flight, requests) * large;
  }
};

double best_of(const TuneSpace& space, const Drive& drive) {
  double best = 0;
  for (const TunePoint& point : space.points()) best = std::max(best, drive.ideal(point));
  return best;
}

TEST(TuneTest, TheChoiceIsWithinThreePercentOfAFullSweepOnEveryDrive) {
  const TuneSpace space;
  for (const double latency : {20e-6, 100e-6, 1e-3, 10e-3})
    for (const double rate : {2e8, 3e9, 12e9})
      for (const double request : {1e-6, 1e-5})
        for (const double sweet : {1e18, 1.0 * (1 << 20), 1.0 * (256 << 10)})
          for (const double noise : {0.0, 0.01}) {
            const Drive drive{latency, rate, request, sweet, noise};
            base::Random random(7);
            std::size_t samples = 0;
            const TuneChoice choice = tune(
                space,
                [&](const TunePoint& point) {
                  ++samples;
                  const double uniform = static_cast<double>(random.next() >> 11) * 0x1p-53;
                  return drive.ideal(point) * (1 + noise * (2 * uniform - 1));
                },
                [] { return true; });
            EXPECT_GE(drive.ideal(choice.point), 0.97 * best_of(space, drive))
                << latency << " " << rate << " " << request << " " << sweet << " " << noise << ": "
                << choice.point.block_bytes << " x " << choice.point.queue_depth;
            EXPECT_LE(samples, 3 * space.points().size() / 2);
          }
}

TEST(TuneTest, OfEquallyGoodPointsTheOneWithTheLeastInFlightIsTaken) {
  const TuneChoice choice = tune(
      {}, [](const TunePoint&) { return 5e9; }, [] { return true; });
  std::uint64_t least = UINT64_MAX;
  for (const TuneSamples& each : choice.measured) least = std::min(least, each.point.bytes_in_flight());
  EXPECT_TRUE(choice.clear);
  EXPECT_LE(choice.point.bytes_in_flight(), 4 * least);
}

TEST(TuneTest, WithoutTimeItTakesTheBestOfWhatItSawAndSaysThatItIsNotClear) {
  int samples = 0;
  const TuneChoice choice = tune(
      {}, [&](const TunePoint&) { return 1e9 * ++samples; }, [&] { return samples < 4; });
  EXPECT_EQ(samples, 4);
  EXPECT_FALSE(choice.clear);
  EXPECT_EQ(choice.point, choice.measured.back().point);
  const TuneChoice none = tune(
      {}, [](const TunePoint&) { return 1e9; }, [] { return false; });
  EXPECT_EQ(none.measured.size(), 1u);
}

TEST(TuneTest, PointsThatWouldHoldTooMuchInFlightAreNotMeasured) {
  const TuneSpace space{.in_flight_bytes_most = std::uint64_t{4} << 20};
  const TuneChoice choice = tune(
      space,
      [&](const TunePoint& point) {
        EXPECT_LE(point.bytes_in_flight(), std::uint64_t{4} << 20);
        return static_cast<double>(point.bytes_in_flight());
      },
      [] { return true; });
  EXPECT_EQ(choice.point.bytes_in_flight(), std::uint64_t{4} << 20);
}

TEST(TuneTest, SpreadIsHalfTheRangeOverTheMedianAndUnknownBelowThree) {
  EXPECT_DOUBLE_EQ((TuneSamples{{}, {90, 110, 100}}.spread()), 0.1);
  EXPECT_DOUBLE_EQ((TuneSamples{{}, {90, 110, 100}}.median()), 100);
  EXPECT_DOUBLE_EQ((TuneSamples{{}, {90, 110}}.spread()), 1);
}

// 6 GB/s each way, both at once 6 in sum: 14 + 12 bytes take 26/6 ns. With 12 in sum the 24 that go both ways take
// half, the 2 read alone do not.
TEST(TuneTest, TheMixOfAStepIsFourteenReadForTwelveWritten) {
  EXPECT_DOUBLE_EQ(step_mix_rate(6e9, 6e9), 6e9);
  EXPECT_DOUBLE_EQ(step_mix_rate(12e9, 6e9), 26 / (24 / 12e9 + 2 / 6e9));
  EXPECT_DOUBLE_EQ(duplex_factor(6e9, 6e9, 6e9), 1);
  EXPECT_DOUBLE_EQ(duplex_factor(6e9, 6e9, 12e9), 2);
  EXPECT_DOUBLE_EQ(duplex_factor(6e9, 3e9, 4e9), 1);  // 1/6 + 1/3 is half a second for 2 GB
}

}  // namespace
}  // namespace ballast::cli
