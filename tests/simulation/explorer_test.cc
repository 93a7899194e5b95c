// Every order of completions of small plans: no stall, no slot or lane beyond its limit, nothing read before it
// arrived, every chunk updated exactly once for each decision. States are told apart by everything that behaviour
// depends on (Scheduler::serialize and the places of the model), so each plan is covered completely, not sampled.
// SPDX-License-Identifier: Apache-2.0
#include <ballast/simulate/explorer.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cstdio>
#include <functional>
#include <string>

namespace ballast::simulate {
namespace {

using schedule::Tier;

constexpr Timing kTimings[] = {Timing::just_in_time, Timing::eager, Timing::after_backward};

const char* name_of(Timing timing) {
  return timing == Timing::eager ? "eager" : timing == Timing::just_in_time ? "just in time" : "after backward";
}

// One slot of each kind, one task on each lane.
schedule::Limits minimal_limits(const Shape& shape) {
  schedule::Limits l;
  l.fetch_slots = l.update_slots = l.gradient_slots = 1;
  l.reads = l.writes = l.copies_in = l.copies_out = l.cpu_tasks = 1;
  l.entries = 2 * shape.units + 4;
  l.jobs = 12 * shape.units * shape.chunks_per_unit;
  return l;
}

Plan start_plan(const Shape& shape, Timing timing, Index passes) {
  Plan plan = make_plan(shape, timing);
  plan.limits = minimal_limits(shape);
  expect_default_pass(plan, passes);
  plan.text = std::string(name_of(timing)) + ", " + std::to_string(shape.units) + " units of " +
              std::to_string(shape.chunks_per_unit) + " chunks, " + std::to_string(passes) + " passes";
  return plan;
}

// Three steps, the one given discarded (not with eager timing), then all pending updates.
void three_steps(Plan& plan, Index passes, int discarded) {
  ProgramWriter writer(plan);
  for (int s = 0; s < 3; ++s) writer.step(passes, s != discarded || plan.timing == Timing::eager);
  writer.settle();
}

class Explorer : public testing::Test {
 protected:
  void cover(const Plan& plan, std::uint32_t disturbances = 0) {
    if (HasFatalFailure()) return;
    ExplorerOptions options;
    options.disturbances = disturbances;
    const Exploration result = explore(plan, options);
    ASSERT_TRUE(result.failure.empty()) << result.failure;
    ASSERT_TRUE(result.complete) << plan.text;
    ASSERT_GT(result.ends, 0u) << plan.text;
    ++plans_;
    states_ += result.states;
    if (result.states <= most_) return;
    most_ = result.states;
    largest_ = plan.text;
  }
  void TearDown() override {
    std::printf("%llu plans, %llu states; the largest has %llu: %s\n", static_cast<unsigned long long>(plans_),
                static_cast<unsigned long long>(states_), static_cast<unsigned long long>(most_), largest_.c_str());
  }
  std::uint64_t plans_ = 0, states_ = 0, most_ = 0;
  std::string largest_;
};

TEST_F(Explorer, CoversThreeStepsWithMinimalSlots) {
  for (const Timing timing : kTimings) {
    for (Index units = 1; units <= 4; ++units) {
      for (Index chunks = 1; chunks <= 2; ++chunks) {
        for (Index passes = 1; passes <= 3; ++passes) {
          for (int discarded = 0; discarded < (timing == Timing::eager ? 1 : 3); ++discarded) {
            Shape shape;
            shape.units = units;
            shape.chunks_per_unit = chunks;
            Plan plan = start_plan(shape, timing, passes);
            three_steps(plan, passes, discarded);
            cover(plan);
          }
        }
      }
    }
  }
}

TEST_F(Explorer, CoversDeeperLanesMoreSlotsAndATrainerWhoseHostRunsAhead) {
  for (const Timing timing : kTimings) {
    for (const Index run_ahead : {0u, 2u, 1000u}) {
      for (Index slots = 1; slots <= 3; ++slots) {
        for (Index passes = 1; passes <= 2; ++passes) {
          for (const std::uint64_t spare : {0u, 3u}) {
            Shape shape;
            shape.units = 3;
            Plan plan = start_plan(shape, timing, passes);
            plan.run_ahead = run_ahead;
            plan.limits.fetch_slots = slots;
            plan.limits.update_slots = slots;
            plan.limits.reads = plan.limits.writes = plan.limits.cpu_tasks = slots > 1 ? 2 : 1;
            plan.slab_bytes += spare;
            plan.text += ", " + std::to_string(slots) + " slots, run ahead " + std::to_string(run_ahead) +
                         ", spare bytes " + std::to_string(spare);
            three_steps(plan, passes, 1);
            cover(plan);
          }
        }
      }
    }
  }
}

TEST_F(Explorer, CoversFourUnitsWithTwoOfEverything) {
  for (const Timing timing : kTimings) {
    for (Index passes = 1; passes <= 2; ++passes) {
      for (const bool stored : {true, false}) {
        if (!stored && (timing != Timing::eager || passes != 1)) continue;
        Shape shape;
        shape.units = 4;
        shape.stored_gradients = stored;
        Plan plan = start_plan(shape, timing, passes);
        plan.run_ahead = 1000;
        plan.limits.fetch_slots = plan.limits.update_slots = plan.limits.gradient_slots = 2;
        plan.limits.reads = plan.limits.writes = plan.limits.copies_in = plan.limits.copies_out = 2;
        plan.limits.cpu_tasks = 2;
        plan.slab_bytes += 3;
        plan.text += ", two of everything";
        three_steps(plan, passes, 1);
        cover(plan);
      }
    }
  }
}

TEST_F(Explorer, CoversEveryCombinationOfTiers) {
  constexpr Tier kTiers[] = {Tier::device, Tier::host, Tier::nvme};
  for (const Timing timing : kTimings) {
    for (const Tier parameters : kTiers) {
      for (const Tier optimizer : kTiers) {
        for (const Tier gradients : kTiers) {
          for (Index chunks = 1; chunks <= 2; ++chunks) {
            for (const Index run_ahead : {0u, 1000u}) {
              Shape shape{2, chunks, parameters, optimizer, gradients, true};
              Plan plan = start_plan(shape, timing, 2);
              plan.run_ahead = run_ahead;
              plan.text += ", tiers " + std::to_string(static_cast<int>(parameters)) +
                           std::to_string(static_cast<int>(optimizer)) + std::to_string(static_cast<int>(gradients));
              three_steps(plan, 2, 1);
              cover(plan);
            }
          }
        }
      }
    }
  }
}

TEST_F(Explorer, CoversGradientsThatAreConsumedAtOnce) {
  for (const Tier optimizer : {Tier::host, Tier::nvme}) {
    for (Index units = 1; units <= 4; ++units) {
      for (Index chunks = 1; chunks <= 2; ++chunks) {
        for (Index slots = 1; slots <= 4; ++slots) {
          for (const Index run_ahead : {0u, 1000u}) {
            if (units * chunks * slots > 12) continue;
            Shape shape{units, chunks, Tier::nvme, optimizer, Tier::host, false};
            Plan plan = start_plan(shape, Timing::eager, 1);
            plan.limits.update_slots = slots;
            plan.run_ahead = run_ahead;
            plan.text += ", consumed at once, " + std::to_string(slots) + " update slots";
            three_steps(plan, 1, -1);
            cover(plan);
          }
        }
      }
    }
  }
}

TEST_F(Explorer, CoversAbsentGradientsAndEvaluationBetweenAndWithinSteps) {
  for (const Timing timing : kTimings) {
    for (Index chunks = 1; chunks <= 2; ++chunks) {
      for (std::uint32_t mask = 0; mask < 4; ++mask) {
        for (int where = 0; where < 4; ++where) {
          Shape shape;
          shape.units = 2;
          shape.chunks_per_unit = chunks;
          Plan plan = start_plan(shape, timing, 2);
          plan.slab_bytes += chunks;
          plan.text += ", mask " + std::to_string(mask) + ", evaluation " + std::to_string(where);
          ProgramWriter writer(plan);
          writer.step(2, true);
          if (where == 1) writer.evaluation_pass();
          writer.begin_step(2);
          writer.training_pass(false, mask);
          if (where == 2 && timing != Timing::eager) writer.evaluation_pass();
          writer.training_pass(true, mask == 3 ? 0 : ~0u);
          writer.decide(true);
          if (where == 3) {
            writer.evaluation_pass();
            writer.settle();
            writer.evaluation_pass();
          }
          writer.step(2, timing == Timing::eager);
          writer.settle();
          cover(plan);
        }
      }
    }
  }
}

// A unit that is used at both ends of forward, and contributes twice in backward.
void tied_pass(ProgramWriter& writer, Index units, bool last) {
  writer.begin_pass(false);
  for (Index u = 0; u < units; ++u) writer.forward(u);
  writer.forward(0);
  writer.backward(0, false);
  for (Index u = units; u-- > 0;) writer.backward(u, last);
  writer.end_pass();
}

TEST_F(Explorer, CoversUnitsThatContributeTwice) {
  for (const Timing timing : kTimings) {
    for (Index passes = 1; passes <= 2; ++passes) {
      for (Index chunks = 1; chunks <= 2; ++chunks) {
        for (const Index run_ahead : {0u, 1000u}) {
          Shape shape;
          shape.units = 2;
          shape.chunks_per_unit = chunks;
          Plan plan = start_plan(shape, timing, passes);
          plan.run_ahead = run_ahead;
          Plan usual = plan;
          ProgramWriter expected(usual);
          tied_pass(expected, 2, true);
          plan.expected = record_pass(usual.program, 1, usual.program.size() - 1);
          plan.slab_bytes = smallest_slab(plan, plan.expected);
          plan.text += ", tied";
          ProgramWriter writer(plan);
          for (int s = 0; s < 3; ++s) {
            writer.begin_step(passes);
            for (Index p = 0; p < passes; ++p) tied_pass(writer, 2, p + 1 == passes);
            writer.decide(s != 1 || timing == Timing::eager);
          }
          writer.settle();
          cover(plan);
        }
      }
    }
  }
}

// Both units' parameters are open when the gradients come, in the order of opening or the other way round.
void nested_pass(ProgramWriter& writer, bool last, bool reversed) {
  writer.begin_pass(false);
  writer.forward(0);
  writer.forward(1);
  const Index p1 = writer.open_parameters(1);
  const Index p0 = writer.open_parameters(0);
  const Index first = reversed ? 0 : 1;
  Index g = writer.open_gradients(first);
  writer.compute(first);
  writer.commit(g, last);
  g = writer.open_gradients(1 - first);
  writer.compute(1 - first);
  writer.commit(g, last);
  writer.release(p0);
  writer.release(p1);
  writer.end_pass();
}

TEST_F(Explorer, CoversLeasesThatOverlap) {
  for (const Timing timing : kTimings) {
    for (const bool stored : {true, false}) {
      for (const bool reversed : {false, true}) {
        for (Index slots = 1; slots <= 3; ++slots) {
          for (const Index run_ahead : {0u, 1000u}) {
            if (!stored && timing != Timing::eager) continue;
            Shape shape;
            shape.units = 2;
            shape.stored_gradients = stored;
            Plan plan = start_plan(shape, timing, 1);
            plan.run_ahead = run_ahead;
            plan.limits.update_slots = slots;
            Plan usual = plan;
            ProgramWriter expected(usual);
            nested_pass(expected, true, reversed);
            plan.expected = record_pass(usual.program, 1, usual.program.size() - 1);
            plan.slab_bytes = smallest_slab(plan, plan.expected);
            plan.text += std::string(", nested") + (reversed ? ", reversed" : "") +
                         (stored ? "" : ", consumed at once") + ", update slots " + std::to_string(slots);
            ProgramWriter writer(plan);
            for (int s = 0; s < 3; ++s) {
              writer.begin_step(1);
              nested_pass(writer, true, reversed);
              writer.decide(s != 1 || timing == Timing::eager);
            }
            writer.settle();
            cover(plan);
          }
        }
      }
    }
  }
}

TEST_F(Explorer, CoversTakingBackWhatIsExpectedAtEveryPoint) {
  for (const Timing timing : kTimings) {
    for (Index units = 1; units <= 3; ++units) {
      for (Index chunks = 1; chunks <= 2; ++chunks) {
        for (Index passes = 1; passes <= 2; ++passes) {
          for (const bool stored : {true, false}) {
            if (!stored && (timing != Timing::eager || passes != 1)) continue;
            Shape shape;
            shape.units = units;
            shape.chunks_per_unit = chunks;
            shape.stored_gradients = stored;
            Plan plan = start_plan(shape, timing, passes);
            plan.limits.update_slots = 2;
            plan.text += stored ? ", taken back once" : ", consumed at once, taken back once";
            three_steps(plan, passes, 1);
            cover(plan, 1);
          }
        }
      }
    }
  }
}

TEST_F(Explorer, CoversTrainersThatLeaveTheTrace) {
  for (const Timing timing : kTimings) {
    for (int how = 0; how < 6; ++how) {
      for (const Index run_ahead : {0u, 1000u}) {
        for (Index slots = 1; slots <= 2; ++slots) {
          Shape shape;
          shape.units = 3;
          Plan plan = start_plan(shape, timing, 1);
          plan.slab_bytes = 9;
          plan.run_ahead = run_ahead;
          plan.limits.update_slots = slots;
          plan.text += ", leaves the trace in way " + std::to_string(how);
          ProgramWriter writer(plan);
          writer.step(1, true);
          writer.begin_step(1);
          writer.begin_pass(false);
          for (Index u = 0; u < 3; ++u) {
            if (how != 0 || u != 1) writer.forward(how == 1 ? 2 - u : u);
          }
          for (Index i = 3; i-- > 0;) {
            const Index u = how == 2 ? 2 - i : i;
            if (how == 3 && u == 1) continue;
            if (how == 4 && u == 1) {
              // Its gradient is given up.
              const Index p = writer.open_parameters(u);
              const Index g = writer.open_gradients(u);
              writer.compute(u);
              writer.give_up(g);
              writer.release(p);
            } else if (how == 5 && u == 1) {
              // A gradient without its parameters, while an update of the unit may be pending.
              const Index g = writer.open_gradients(u);
              writer.compute(u);
              writer.commit(g, true);
            } else {
              writer.backward(u, true);
            }
          }
          writer.end_pass();
          writer.decide(true);
          writer.step(1, timing == Timing::eager);
          writer.step(1, true);
          writer.settle();
          cover(plan);
        }
      }
    }
  }
}

TEST_F(Explorer, CoversTablesThatHoldNoMoreThanTheTrainer) {
  for (const Timing timing : kTimings) {
    for (Index entries = 3; entries <= 6; ++entries) {
      for (Index jobs = 10; jobs <= 14; jobs += 2) {
        Shape shape;
        shape.units = 3;
        shape.chunks_per_unit = 2;
        Plan plan = start_plan(shape, timing, 1);
        plan.limits.entries = entries;
        plan.limits.jobs = jobs;
        plan.text += ", " + std::to_string(entries) + " entries, " + std::to_string(jobs) + " jobs";
        three_steps(plan, 1, 1);
        cover(plan);
      }
    }
  }
}

}  // namespace
}  // namespace ballast::simulate
