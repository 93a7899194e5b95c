// 8-bit moments keep the engine's promises: the same numbers to the last bit in every tier, timing and chunk size, on
// several ranks at every stage, and in a run that goes on from a checkpoint cut into other chunks.
// SPDX-License-Identifier: Apache-2.0
#include <gtest/gtest.h>

#include <cmath>
#include <filesystem>

#include "support/durable_runs.h"
#include "support/on_ranks.h"

namespace ballast::testing {
namespace {

// Sizes around a block's 256 elements, and one of several chunks.
std::vector<SyntheticUnit> model() {
  return {{"first", {{"a", {255}}, {"b", {1}}, {"c", {257}}, {"d", {40, 60}}}},
          {"second", {{"e", {130}}, {"f", {70001}}, {"g", {256}}}}};
}

Config eight_bit_config(const std::string& directory, Tier tier, Timing timing) {
  Config config = plain_config(directory, tier, timing);
  config.precision.moments = MomentType::int8;
  config.optimizer.learning_rate = 0.01;
  return config;
}

void expect_same(const Outcome& found, const Outcome& expected) {
  EXPECT_EQ(found.values, expected.values);
  EXPECT_EQ(found.moments, expected.moments);
  EXPECT_EQ(found.counts, expected.counts);
}

class EightBitMoments : public ::testing::Test {
 protected:
  const Watchdog watchdog_{300};
  const TemporaryDirectory directory_;
  const std::string path_ = directory_.path();
};

TEST_F(EightBitMoments, EveryTierTimingAndChunkSizeGivesTheSameNumbers) {
  Course course;
  course.synthetic.absent = [](int step, int, ParameterId id) { return step == 2 && id.unit == 1 && id.index == 0; };
  const Outcome expected = run(eight_bit_config(path_, Tier::device, Timing::after_backward), model(), course);
  ASSERT_FALSE(expected.moments.empty());
  for (const Tier tier : {Tier::device, Tier::host, Tier::nvme}) {
    for (const Timing timing : {Timing::after_backward, Timing::just_in_time, Timing::eager}) {
      for (const std::uint64_t host_bytes : {std::uint64_t{64} << 20, std::uint64_t{3} << 19}) {
        SCOPED_TRACE(std::string(to_string(tier)) + " " + std::string(to_string(timing)));
        Config config = eight_bit_config(path_, tier, timing);
        config.budget.host_bytes = host_bytes;
        const Outcome found = run(config, model(), course);
        expect_same(found, expected);
        EXPECT_EQ(found.losses, expected.losses);
      }
    }
  }
}

TEST_F(EightBitMoments, RanksAtEveryStageGiveTheNumbersOfOneThatTakesAllMicroBatches) {
  for (const int world_size : {2, 3}) {
    Course course;
    course.synthetic.micro_batches = world_size;
    const Outcome expected = run(eight_bit_config(path_, Tier::host, Timing::after_backward), model(), course);
    for (const int stage : {0, 1, 2, 3}) {
      for (const Tier tier : {Tier::host, Tier::nvme}) {
        SCOPED_TRACE(std::to_string(world_size) + " ranks, stage " + std::to_string(stage) + ", " +
                     std::string(to_string(tier)));
        on_ranks(world_size, [&](int rank, const std::shared_ptr<Communicator>& communicator) {
          Config config = eight_bit_config(path_, tier, Timing::just_in_time);
          config.zero_stage = stage;
          Course mine;
          mine.synthetic.micro_stride = world_size;
          mine.synthetic.micro_offset = rank;
          mine.environment.communicator = communicator;
          expect_same(run(config, model(), mine), expected);
        });
      }
    }
  }
}

TEST_F(EightBitMoments, ARunThatGoesOnInOtherTiersAndChunksIsTheOneThatWasNeverStopped) {
  Course all;
  all.steps = 6;
  const Outcome whole = run(eight_bit_config(path_, Tier::host, Timing::just_in_time), model(), all);
  for (const Tier first : {Tier::device, Tier::host, Tier::nvme}) {
    for (const std::uint64_t durable_steps : {0, 1}) {
      SCOPED_TRACE(std::string(to_string(first)) + (durable_steps > 0 ? " durable" : ""));
      const std::string half = path_ + "/half";
      Config config = eight_bit_config(path_ + "/one", first, Timing::just_in_time);
      config.durability.every_steps = durable_steps;
      Course course;
      course.steps = 3;
      course.save_to = half + "/step-3";
      run(config, model(), course);
      Config other = eight_bit_config(path_ + "/other", Tier::nvme, Timing::after_backward);
      other.budget.host_bytes = std::uint64_t{3} << 19;
      other.durability.every_steps = durable_steps;
      course.steps = 6;
      course.save_to.clear();
      course.options = {ExistingRun::resume, half};
      const Outcome next = run(other, model(), course);
      EXPECT_EQ(next.resumed_at, 3U);
      expect_same(next, whole);
      for (const char* name : {"/half", "/one", "/other"}) std::filesystem::remove_all(path_ + name);
    }
  }
}

// A block's largest element is stored exactly, every other one of exp_avg within half the widest gap of its map: 0.0225
// of the largest (between 0.1 and its neighbour below, 0.09933, it is less).
TEST_F(EightBitMoments, AfterOneStepTheyAreTheGradientsAsNearAsTheMapAllows) {
  Config wide = eight_bit_config(path_, Tier::nvme, Timing::just_in_time);
  wide.precision.moments = MomentType::fp32;
  Course course;
  course.steps = 1;
  const Outcome exact = run(wide, model(), course);
  const Outcome found = run(eight_bit_config(path_, Tier::nvme, Timing::just_in_time), model(), course);
  EXPECT_EQ(found.values, exact.values) << "the first step is taken before anything is rounded";
  ASSERT_EQ(found.moments.size(), exact.moments.size());
  float largest = 0.0F;
  for (const float value : exact.moments) largest = std::max(largest, std::abs(value));
  std::size_t differ = 0;
  for (std::size_t i = 0; i < found.moments.size(); ++i) {
    EXPECT_NEAR(found.moments[i], exact.moments[i], 0.0225 * largest) << "element " << i;
    differ += found.moments[i] != exact.moments[i];
  }
  EXPECT_GT(differ, found.moments.size() / 2) << "they are rounded at all";
}

}  // namespace
}  // namespace ballast::testing
