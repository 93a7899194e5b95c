// Passes: recording, comparing, compiling.
// SPDX-License-Identifier: Apache-2.0
#include "trace.h"

#include <gtest/gtest.h>

namespace ballast::engine {
namespace {

std::vector<UnitSpec> units(int count) {
  std::vector<UnitSpec> specs;
  for (int u = 0; u < count; ++u) specs.push_back({"u" + std::to_string(u), {{"p", {20000 + 5000 * u}}}});
  return specs;
}

Plan plan_for(const std::vector<UnitSpec>& specs, Timing timing, const std::vector<TraceOpening>& openings,
              std::uint64_t device_bytes = std::uint64_t{64} << 20,
              std::uint64_t host_bytes = std::uint64_t{64} << 20) {
  Config config;
  config.placement.automatic = false;
  config.optimizer.timing = timing;
  config.optimizer.clip_global_norm.reset();
  config.budget.device_bytes = device_bytes;
  config.budget.host_bytes = host_bytes;
  PlanInputs inputs;
  inputs.openings = openings;
  return make_plan(specs, config, inputs);
}

TEST(RecorderTest, SeesNestingRepetitionAndWhatIsLeftOpen) {
  TraceRecorder recorder;
  recorder.begin();
  const auto a = recorder.open(0, false);
  const auto b = recorder.open(1, false);
  recorder.close(a);
  const auto g = recorder.open(1, true);
  recorder.close(g, true);
  recorder.close(g, false);  // no second time
  recorder.open(0, false);
  recorder.close(99);  // of another pass
  const std::vector<TraceOpening> seen = recorder.end();
  ASSERT_EQ(seen.size(), 4u);
  EXPECT_TRUE(same_openings(
      seen, {{0, false, false, 0, 2}, {1, false, false, 1, 6}, {1, true, true, 3, 4}, {0, false, false, 5, 7}}));
  EXPECT_FALSE(same_openings(seen, {}));
  EXPECT_EQ(b, 1u);
  recorder.begin();
  EXPECT_TRUE(recorder.end().empty());
}

TEST(TraceTest, TheOrderExpectedAtFirstIsForwardThenBackwardAndFrozenUnitsHaveNoGradient) {
  const auto openings = default_openings({true, false, true});
  std::vector<std::pair<std::uint32_t, bool>> order;
  for (const TraceOpening& o : openings) {
    order.emplace_back(o.unit, o.gradient);
    EXPECT_LT(o.open_at, o.close_at);
    EXPECT_EQ(o.last, o.gradient);
  }
  const std::vector<std::pair<std::uint32_t, bool>> expected = {{0, false}, {1, false}, {2, false}, {2, false},
                                                                {2, true},  {1, false}, {0, false}, {0, true}};
  EXPECT_EQ(order, expected);
}

TEST(TraceTest, PlacesOfWhatIsOpenAtOnceNeverOverlap) {
  const auto specs = units(5);
  const auto openings = default_openings(std::vector<bool>(5, true));
  for (std::uint64_t device : {std::uint64_t{64} << 20, std::uint64_t{400} << 10, std::uint64_t{300} << 10}) {
    const Plan plan = plan_for(specs, Timing::just_in_time, openings, device);
    Trace trace;
    trace.openings = openings;
    ASSERT_TRUE(compile_trace(plan, 4, trace));
    const auto maps = device_openings(plan, openings, 4);
    for (std::size_t i = 0; i < openings.size(); ++i) {
      EXPECT_LE(trace.offsets[i] + maps[i].bytes, plan.device_window_bytes);
      for (std::size_t j = 0; j < i; ++j) {
        if (openings[j].close_at < openings[i].open_at || maps[i].bytes == 0 || maps[j].bytes == 0) continue;
        EXPECT_TRUE(trace.offsets[i] + maps[i].bytes <= trace.offsets[j] ||
                    trace.offsets[j] + maps[j].bytes <= trace.offsets[i])
            << i << " and " << j;
      }
    }
    EXPECT_EQ(trace.forward_end, 6u) << "the first gradient";
  }
}

TEST(TraceTest, APassThatDoesNotFitTheWindowIsNotCompiled) {
  const auto specs = units(5);
  const Plan plan =
      plan_for(specs, Timing::just_in_time, default_openings(std::vector<bool>(5, true)), std::uint64_t{260} << 10);
  Trace trace;
  for (std::uint32_t u = 0; u < 5; ++u) trace.openings.push_back({u, false, false, u, 10});
  EXPECT_FALSE(compile_trace(plan, 4, trace));
}

TEST(TraceTest, EagerUnitsCarryTheirStatesWithTheParametersOnlyWhileSlotsLast) {
  const auto specs = units(4);
  const auto openings = default_openings(std::vector<bool>(4, true));
  const Plan plan = plan_for(specs, Timing::eager, openings);
  Trace trace;
  trace.openings = openings;
  ASSERT_TRUE(compile_trace(plan, 4, trace));
  for (std::size_t i = 0; i < openings.size(); ++i) {
    if (openings[i].gradient) {
      EXPECT_NE(trace.queues_update[i], trace.carries_update[i - 1]) << "exactly one of them brings the update";
    } else if (i < 4) {
      EXPECT_FALSE(trace.carries_update[i]) << "not in forward";
    }
  }
  // A unit used twice is updated by its last gradient.
  Trace twice;
  twice.openings = {{0, false, false, 0, 3}, {0, true, false, 1, 2}, {0, false, false, 4, 7}, {0, true, true, 5, 6}};
  ASSERT_TRUE(compile_trace(plan, 4, twice));
  EXPECT_EQ(twice.carries_update, std::vector<std::uint8_t>(4, 0));
  EXPECT_EQ(twice.queues_update, (std::vector<std::uint8_t>{0, 0, 0, 1}));
}

}  // namespace
}  // namespace ballast::engine
