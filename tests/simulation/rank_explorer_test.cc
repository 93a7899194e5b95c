// Every order of events of small plans on two ranks: no stall, the same collectives in the same order, nothing gathered
// before its own chunks have come or over what is read, every shard at the right version, reductions before what reads
// them, every chunk updated exactly once for each decision. SPDX-License-Identifier: Apache-2.0
#include <ballast/simulate/rank_group.h>
#include <gtest/gtest.h>

#include <cstdio>
#include <string>

namespace ballast::simulate {
namespace {

using schedule::Tier;

constexpr Timing kTimings[] = {Timing::just_in_time, Timing::eager, Timing::after_backward};
constexpr Tier kTiers[] = {Tier::device, Tier::host, Tier::nvme};

const char* name_of(Timing timing) {
  return timing == Timing::eager ? "eager" : timing == Timing::just_in_time ? "just in time" : "after backward";
}

Plan start_plan(Shape shape, Timing timing, Index passes) {
  if (shape.ranks == 1) shape.ranks = 2;
  Plan plan = make_plan(shape, timing);
  plan.run_ahead = 1000;
  schedule::Limits& l = plan.limits;
  l.fetch_slots = l.update_slots = l.gradient_slots = 1;
  l.reads = l.writes = l.copies_in = l.copies_out = l.cpu_tasks = 1;
  expect_default_pass(plan, passes);
  // What the engine's formulas give, without what they add for good measure.
  l.entries = static_cast<Index>(2 * plan.expected.size() + 4);
  l.jobs = static_cast<Index>(6 * plan.expected.size() * shape.chunks_per_unit + 6 * shape.chunks_per_unit);
  static const char* const kTierNames[] = {"device", "host", "nvme"};
  plan.text = std::string(name_of(timing)) + ", " + std::to_string(shape.units) + " units of " +
              std::to_string(shape.chunks_per_unit) + " chunks on " + kTierNames[static_cast<int>(shape.parameters)] +
              ", " + std::to_string(passes) + " passes" + (shape.stored_gradients ? "" : ", consumed at once") +
              (shape.whole ? ", stage 0" : "");
  return plan;
}

void three_steps(Plan& plan, Index passes, int discarded) {
  ProgramWriter writer(plan);
  for (int s = 0; s < 3; ++s) writer.step(passes, s != discarded || plan.timing == Timing::eager);
  writer.settle();
}

class RankExplorerTest : public testing::Test {
 protected:
  void cover(const Plan& plan, const RankOptions& ranks = {}) {
    if (HasFatalFailure()) return;
    RankExplorerOptions options;
    options.ranks = ranks;
    const RankExploration result = explore_ranks(plan, options);
    ASSERT_TRUE(result.failure.empty()) << result.failure;
    ASSERT_TRUE(result.complete) << plan.text;
    ASSERT_GT(result.ends, 0u) << plan.text;
    ASSERT_GT(result.collectives, 0u) << plan.text;
    ++plans_;
    states_ += result.states;
    if (result.states <= most_) return;
    most_ = result.states;
    largest_ = plan.text;
  }
  void TearDown() override {
    std::printf("%llu plans on two ranks, %llu states; the largest has %llu: %s\n",
                static_cast<unsigned long long>(plans_), static_cast<unsigned long long>(states_),
                static_cast<unsigned long long>(most_), largest_.c_str());
  }
  std::uint64_t plans_ = 0, states_ = 0, most_ = 0;
  std::string largest_;
};

TEST_F(RankExplorerTest, CoversThreeStepsWithMinimalSlots) {
  for (const Timing timing : kTimings) {
    for (const Tier parameters : kTiers) {
      for (Index units = 1; units <= 3; ++units) {
        for (Index passes = 1; passes <= (units == 3 ? 1u : 2u); ++passes) {
          for (const bool stored : {true, false}) {
            if (!stored && (timing != Timing::eager || passes != 1 || parameters == Tier::device)) continue;
            for (int discarded = 0; discarded < (timing == Timing::eager ? 1 : 3); ++discarded) {
              Shape shape;
              shape.units = units;
              shape.parameters = parameters;
              shape.stored_gradients = stored;
              Plan plan = start_plan(shape, timing, passes);
              three_steps(plan, passes, discarded);
              cover(plan);
            }
          }
        }
      }
    }
  }
}

}  // namespace
}  // namespace ballast::simulate
