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
          for (int discarded = 0; discarded < (timing == Timing::eager ? 1 : 3); ++discarded) {
            Shape shape;
            shape.units = units;
            shape.parameters = parameters;
            Plan plan = start_plan(shape, timing, passes);
            three_steps(plan, passes, discarded);
            cover(plan);
          }
        }
      }
    }
  }
}

// Units with communicators of their own: on one rank each. The other units' collectives stay in one order, however far
// the ranks drift apart between them.
TEST_F(RankExplorerTest, CoversUnitsThatARankHasToItself) {
  for (const Timing timing : kTimings) {
    for (const Tier parameters : kTiers) {
      for (Index units = 1; units <= 3; ++units) {
        for (Index own = 0; own < units; ++own) {
          for (const bool both : {false, true}) {
            if (both && units < 3) continue;
            for (int discarded = 0; discarded < (timing == Timing::eager ? 1 : 3); ++discarded) {
              Shape shape;
              shape.units = units;
              shape.parameters = parameters;
              Plan plan = start_plan(shape, timing, 1);
              share_among(plan, own, 1);
              if (both) share_among(plan, (own + 1) % units, 1);
              expect_default_pass(plan, 1);
              plan.text += ", unit " + std::to_string(own) + (both ? " and the next" : "") + " of one rank";
              three_steps(plan, 1, discarded);
              cover(plan);
            }
          }
        }
      }
    }
  }
}

// The reduction is sound by argument; here is that it is made as argued: each rank is seen in the same states.
TEST_F(RankExplorerTest, LeavesOutNoStateOfAnyRankWhereItLeavesOutOrders) {
  std::uint64_t all_states = 0, reduced_states = 0;
  for (const Timing timing : kTimings) {
    for (const Tier parameters : {Tier::device, Tier::nvme}) {
      for (Index units = 1; units <= 2; ++units) {
        for (const bool late : {false, true}) {
          if (units == 2 && late) continue;
          Shape shape;
          shape.units = units;
          shape.parameters = parameters;
          Plan plan = start_plan(shape, timing, 1);
          ProgramWriter writer(plan);
          writer.step(1, true);
          if (!late) writer.step(1, timing == Timing::eager);
          writer.settle();
          RankExplorerOptions options;
          options.ranks.free_trainer = options.ranks.free_starts = late;
          options.keep_rank_states = true;
          const RankExploration reduced = explore_ranks(plan, options);
          ASSERT_EQ(reduced.failure, "");
          options.reduced = false;
          const RankExploration all = explore_ranks(plan, options);
          ASSERT_EQ(all.failure, "");
          ASSERT_TRUE(all.complete && reduced.complete) << plan.text;
          EXPECT_EQ(reduced.rank_states, all.rank_states) << plan.text;
          EXPECT_GT(all.states, reduced.states);
          all_states += all.states;
          reduced_states += reduced.states;
        }
      }
    }
  }
  std::printf("%llu states in all orders, %llu in those that are followed\n",
              static_cast<unsigned long long>(all_states), static_cast<unsigned long long>(reduced_states));
}

TEST_F(RankExplorerTest, CoversTrainersAndEnginesThatComeLateAtEveryPoint) {
  for (const Timing timing : kTimings) {
    for (const Tier parameters : kTiers) {
      for (Index units = 1; units <= 2; ++units) {
        if (units == 2 && parameters == Tier::host) continue;
        Shape shape;
        shape.units = units;
        shape.parameters = parameters;
        Plan plan = start_plan(shape, timing, 1);
        plan.text += ", everything comes late";
        ProgramWriter writer(plan);
        if (units == 1) writer.step(1, true);
        writer.step(1, timing == Timing::eager);
        writer.step(1, true);
        writer.settle();
        cover(plan, {units == 1, true});
      }
    }
  }
}

// A step whose pass differs from the trace in one way.
void other_step(ProgramWriter& writer, Index units, int how, bool update) {
  writer.begin_step(1);
  writer.begin_pass(false);
  const Index odd = units - 1;  // skipped, or whose gradient is given up
  for (Index i = 0; i < units; ++i) {
    const Index u = how == 0 ? units - 1 - i : i;
    if (how == 1 && u == odd) continue;
    writer.forward(u);
    if (how == 2 && i == 0) writer.forward(u);
  }
  for (Index i = units; i-- > 0;) {
    // Way 7: the last two the other way round, when the first of them may be gathered already.
    const Index u = how == 3 ? units - 1 - i : how == 7 && i < 2 ? 1 - i : i;
    if ((how == 1 || how == 4) && u == odd) continue;
    if (how == 5 && u == odd) {
      const Index p = writer.open_parameters(u);
      const Index g = writer.open_gradients(u);
      writer.compute(u);
      writer.give_up(g);
      writer.release(p);
    } else if (how == 6 && u == 0) {
      // Its gradient alone, while an update may be pending.
      const Index g = writer.open_gradients(u);
      writer.compute(u);
      writer.commit(g, true);
    } else {
      writer.backward(u, true);
    }
  }
  writer.end_pass();
  writer.decide(update);
}

TEST_F(RankExplorerTest, CoversTrainersThatLeaveTheTrace) {
  for (const Timing timing : kTimings) {
    for (const Tier parameters : kTiers) {
      for (Index units = 2; units <= 3; ++units) {
        for (int how = 0; how < 8; ++how) {
          for (const bool late : {false, true}) {
            if (late && (units == 3 || parameters == Tier::host)) continue;
            Shape shape;
            shape.units = units;
            shape.parameters = parameters;
            Plan plan = start_plan(shape, timing, 1);
            plan.slab_bytes += 4;
            if (!late) plan.run_ahead = 0;
            plan.text += ", leaves the trace in way " + std::to_string(how) + (late ? ", starts come late" : "");
            ProgramWriter writer(plan);
            writer.step(1, true);
            other_step(writer, units, how, true);
            writer.step(1, timing == Timing::eager);
            writer.settle();
            cover(plan, {false, late});
          }
        }
      }
    }
  }
}

// The order changes where what was expected may be gathered on one rank and not on the other, however much of forward
// is still on the device.
TEST_F(RankExplorerTest, CoversAnotherOrderInBackwardWithAnyRoomOnTheDevice) {
  for (const Timing timing : kTimings) {
    for (const Index slots : {1u, 3u}) {
      for (const std::uint64_t spare : {0u, 2u, 4u}) {
        Shape shape;
        shape.units = 4;
        Plan plan = start_plan(shape, timing, 1);
        plan.run_ahead = 0;  // so that something has begun by then
        plan.limits.update_slots = slots;
        plan.slab_bytes += spare;
        plan.text +=
            ", another order, spare bytes " + std::to_string(spare) + ", update slots " + std::to_string(slots);
        ProgramWriter writer(plan);
        writer.begin_step(1);
        writer.begin_pass(false);
        for (const Index u : {0u, 1u, 2u, 3u}) writer.forward(u);
        for (const Index u : {3u, 1u, 2u, 0u}) writer.backward(u, true);
        writer.end_pass();
        writer.decide(true);
        writer.settle();
        cover(plan);
      }
    }
  }
}

TEST_F(RankExplorerTest, CoversUnitsThatAreOpenedAgainWhileTheyAreHeld) {
  for (const Timing timing : kTimings) {
    for (const Tier parameters : {Tier::device, Tier::nvme}) {
      for (const bool taken_back : {false, true}) {
        for (const bool in_trace : {false, true}) {
          Shape shape;
          shape.parameters = parameters;
          Plan plan = start_plan(shape, timing, 1);
          plan.slab_bytes += 2;
          plan.text += taken_back ? ", held and opened again, taken back" : ", held and opened again";
          ProgramWriter writer(plan);
          writer.step(1, true);
          for (int s = 0; s < (in_trace ? 2 : 1); ++s) {
            writer.begin_step(1);
            writer.begin_pass(false);
            writer.forward(0);
            writer.forward(1);
            writer.backward(1, true);
            const Index p = writer.open_parameters(0);
            writer.compute(0);
            if (taken_back) writer.take_back();
            const Index again = writer.open_parameters(0);
            const Index g = writer.open_gradients(0);
            writer.compute(0);
            writer.commit(g, true);
            writer.release(again);
            writer.release(p);
            writer.end_pass();
            writer.decide(true);
          }
          writer.step(1, true);
          writer.settle();
          cover(plan);
        }
      }
    }
  }
}

TEST_F(RankExplorerTest, CoversEvaluationBetweenAndWithinSteps) {
  for (const Timing timing : kTimings) {
    for (const Tier parameters : kTiers) {
      for (Index passes = 1; passes <= 2; ++passes) {
        for (int where = 0; where < 4; ++where) {
          if (where == 1 && timing == Timing::eager) continue;
          for (const bool late : {false, true}) {
            Shape shape;
            shape.units = 2;
            shape.parameters = parameters;
            Plan plan = start_plan(shape, timing, passes);
            plan.text += ", evaluation " + std::to_string(where) + (late ? ", starts come late" : "");
            ProgramWriter writer(plan);
            writer.step(passes, true);
            if (where == 0) writer.evaluation_pass();
            writer.begin_step(passes);
            for (Index p = 0; p < passes; ++p) {
              writer.training_pass(p + 1 == passes);
              if (where == 1 && p == 0) writer.evaluation_pass();
            }
            writer.decide(timing == Timing::eager, true);
            if (where == 2) {
              writer.evaluation_pass();
              writer.settle();
              writer.evaluation_pass();
            }
            writer.step(passes, true);
            if (where == 3) writer.evaluation_pass();
            writer.settle();
            cover(plan, {false, late});
          }
        }
      }
    }
  }
}

TEST_F(RankExplorerTest, CoversTakingBackWhatIsExpectedAtEveryPoint) {
  for (const Timing timing : kTimings) {
    for (const Tier parameters : kTiers) {
      if (parameters == Tier::host) continue;
      for (const Index run_ahead : {0u, 1000u}) {
        for (const bool late : {false, true}) {
          if (late && run_ahead == 0) continue;
          Shape shape;
          shape.parameters = parameters;
          Plan plan = start_plan(shape, timing, 1);
          plan.run_ahead = run_ahead;
          ProgramWriter writer(plan);
          writer.step(1, true);
          writer.step(1, timing == Timing::eager);
          writer.settle();
          const std::string text = plan.text;
          const std::size_t calls = plan.program.size();
          for (std::size_t at = 1; at < calls; ++at) {
            Plan disturbed = plan;
            Operation take_back;
            take_back.verb = Verb::take_back;
            disturbed.program.insert(disturbed.program.begin() + static_cast<std::ptrdiff_t>(at), take_back);
            disturbed.text = text + ", taken back before call " + std::to_string(at) + ", run ahead " +
                             std::to_string(run_ahead) + (late ? ", starts come late" : "");
            cover(disturbed, {false, late});
          }
        }
      }
    }
  }
}

TEST_F(RankExplorerTest, CoversWholeParametersOnEveryRank) {
  for (const Timing timing : kTimings) {
    for (const Tier parameters : kTiers) {
      for (Index passes = 1; passes <= 2; ++passes) {
        Shape shape;
        shape.parameters = parameters;
        shape.whole = true;
        Plan plan = start_plan(shape, timing, passes);
        three_steps(plan, passes, 1);
        cover(plan, {false, true});
      }
    }
  }
}

TEST_F(RankExplorerTest, CoversUnitsOfTwoChunksAndTwoOfEverything) {
  for (const Timing timing : kTimings) {
    for (const Tier parameters : kTiers) {
      for (const Tier optimizer : kTiers) {
        for (const Tier gradients : {Tier::device, Tier::host, Tier::nvme}) {
          for (Index chunks = 1; chunks <= 2; ++chunks) {
            Shape shape{2, chunks, parameters, optimizer, gradients, true};
            Plan plan = start_plan(shape, timing, 1);
            schedule::Limits& l = plan.limits;
            if (chunks == 1) {
              l.fetch_slots = l.update_slots = l.gradient_slots = 2;
              l.reads = l.writes = l.copies_in = l.copies_out = l.cpu_tasks = 2;
              plan.slab_bytes += 2;
            }
            plan.text += ", tiers " + std::to_string(static_cast<int>(parameters)) +
                         std::to_string(static_cast<int>(optimizer)) + std::to_string(static_cast<int>(gradients));
            ProgramWriter writer(plan);
            writer.step(1, true);
            writer.step(1, timing == Timing::eager);
            writer.settle();
            cover(plan);
          }
        }
      }
    }
  }
}

}  // namespace
}  // namespace ballast::simulate
