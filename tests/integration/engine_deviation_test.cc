// Trainers that do not do what was expected: other orders, nested and repeated leases, questions in the middle,
// abandoned steps. Values stay right, nothing stands still, and misuse is an error that leaves the engine usable.
// SPDX-License-Identifier: Apache-2.0
#include <gtest/gtest.h>

#include <algorithm>
#include <chrono>
#include <thread>

#include "support/engine_support.h"

namespace ballast {
namespace {

using testing::contribute;
using testing::plain_config;
using testing::read_one;
using testing::small_model;
using testing::SyntheticTrainer;
using testing::SyntheticUnit;
using testing::TemporaryDirectory;
using testing::Watchdog;

struct World {
  TemporaryDirectory directory;
  Watchdog watchdog;
  std::vector<SyntheticUnit> model = small_model();
  std::vector<UnitId> ids;
  std::unique_ptr<Engine> engine;

  explicit World(Tier tier = Tier::nvme, Timing timing = Timing::just_in_time,
                 std::uint64_t device_bytes = std::uint64_t{64} << 20) {
    Config config = plain_config(directory.path(), tier, timing);
    config.budget.device_bytes = device_bytes;
    config.budget.host_bytes = std::uint64_t{2} << 20;
    config.optimizer.weight_decay = 0;
    engine = std::make_unique<Engine>(config);
    for (const SyntheticUnit& unit : model) ids.push_back(engine->add_unit(unit.name, unit.parameters));
    engine->commit();
    engine->initialize([](ParameterId id, std::int64_t first, std::span<float> values) {
      for (std::size_t i = 0; i < values.size(); ++i) {
        values[i] = SyntheticTrainer::initial(id, first + static_cast<std::int64_t>(i));
      }
    });
  }
  Stream stream() const { return engine->stream(); }
  void touch(std::size_t u) { engine->acquire(ids[u], stream()).release(stream()); }
  void touch_outside() {
    auto pass = engine->begin_pass({.kind = Pass::evaluate});
    auto first = engine->acquire(ids[0], stream());
    auto second = engine->acquire(ids[0], stream());
    second.wait();
  }
  void backward(std::size_t u, float gradient) {
    contribute(*engine, ids[u], model[u].parameters, [=](std::uint32_t) { return gradient; });
  }
  // Forward and backward over the units in an order.
  void step(const std::vector<std::size_t>& order, float gradient) {
    auto running = engine->begin_step();
    {
      auto pass = running.begin_pass();
      for (std::size_t u : order) touch(u);
      for (std::size_t i = order.size(); i-- > 0;) backward(order[i], gradient);
    }
    EXPECT_TRUE(running.finish_backward().finite);
    running.update();
  }
  std::vector<float> values() {
    std::vector<float> all;
    for (std::size_t u = 0; u < ids.size(); ++u) {
      for (std::uint32_t p = 0; p < model[u].parameters.size(); ++p) {
        std::int64_t count = 1;
        for (std::int64_t d : model[u].parameters[p].shape) count *= d;
        std::vector<float> part(static_cast<std::size_t>(count));
        engine->read({ids[u].index, p}, 0, part);
        all.insert(all.end(), part.begin(), part.end());
      }
    }
    return all;
  }
};

class DeviationTest : public ::testing::TestWithParam<std::tuple<Tier, Timing>> {
 protected:
  Tier tier() const { return std::get<0>(GetParam()); }
  Timing timing() const { return std::get<1>(GetParam()); }
};

TEST_P(DeviationTest, UnitsLeftOutAndOrdersTurnedAroundGiveTheSameBits) {
  const auto run = [](World& world) {
    base::Random random(5);
    for (int round = 0; round < 24; ++round) {
      std::vector<std::size_t> order = {0, 1, 2, 3};
      if (round % 4 == 1) order = {0, 2, 3};
      if (round % 4 == 2) order = {3, 2, 1, 0};
      if (round % 4 == 3) order = {1};
      if (round > 12) {
        order.clear();
        for (std::size_t u = 0; u < 4; ++u) {
          if (random.below(3) > 0) order.insert(order.begin() + static_cast<long>(random.below(order.size() + 1)), u);
        }
      }
      world.step(order, 0.01f * static_cast<float>(round + 1));
    }
    return world.values();
  };
  World reference(Tier::device, Timing::after_backward);
  const std::vector<float> expected = run(reference);
  World world(tier(), timing());
  EXPECT_EQ(run(world), expected);
}

TEST_P(DeviationTest, QuestionsInTheMiddleOfEverythingAreAnsweredRight) {
  const auto run = [](World& world, bool ask) {
    Engine& engine = *world.engine;
    for (int s = 0; s < 4; ++s) {
      const auto question = [&](std::uint32_t u) {
        if (!ask) return;
        float values[4];
        engine.read({u, 0}, 3, {values, 1});
        engine.read_moments({u, 0}, 3, {values + 1, 1}, {values + 2, 1});
        engine.step_count({u, 0});
        engine.report();
      };
      question(0);
      auto step = engine.begin_step();
      question(1);
      if (ask) engine.settle();
      {
        auto pass = step.begin_pass();
        for (std::size_t u = 0; u < 4; ++u) {
          auto lease = engine.acquire(world.ids[u], world.stream());
          question(static_cast<std::uint32_t>(u));
          lease.release(world.stream());
          question((static_cast<std::uint32_t>(u) + 1) % 4);
        }
        for (std::size_t u = 4; u-- > 0;) {
          world.backward(u, 0.02f * static_cast<float>(s + 1));
          question(static_cast<std::uint32_t>(u));
          if (u > 0) question(static_cast<std::uint32_t>(u) - 1);
          if (ask) engine.settle();
        }
      }
      question(2);
      step.finish_backward();
      question(3);
      if (ask) engine.settle();
      step.update();
      question(1);
    }
    return world.values();
  };
  World reference(Tier::device, Timing::after_backward);
  const std::vector<float> expected = run(reference, false);
  World world(tier(), timing());
  EXPECT_EQ(run(world, true), expected);
}

TEST_P(DeviationTest, QuestionsWhileALeaseWaitsForItsGradientDoNotStandStill) {
  World world(tier(), timing());
  Engine& engine = *world.engine;
  std::vector<float> before = world.values();
  for (int s = 0; s < 3; ++s) {
    auto step = engine.begin_step();
    {
      auto pass = step.begin_pass();
      for (std::size_t u = 0; u < 4; ++u) world.touch(u);
      for (std::size_t u = 4; u-- > 0;) {
        auto lease = engine.acquire(world.ids[u], world.stream());
        const auto id = static_cast<std::uint32_t>(u);
        read_one(engine, {id, 0});
        engine.settle();
        auto gradients = engine.gradients(world.ids[u], world.stream());
        read_one(engine, {id, 1});
        engine.settle();
        for (std::uint32_t p = 0; p < 3; ++p) {
          const Tensor out = gradients[{id, p}];
          world.stream().enqueue([out] { testing::fill_gradient(out, 0.5f); });
        }
        gradients.commit(world.stream());
        lease.release(world.stream());
      }
    }
    step.finish_backward();
    step.update();
  }
  const std::vector<float> after = world.values();
  for (std::size_t i = 0; i < after.size(); ++i) ASSERT_LT(after[i], before[i]) << i;
}

TEST_P(DeviationTest, LeasesMayBeReleasedOnAnotherStreamThanTheyWereAcquiredOn) {
  World world(tier(), timing());
  Engine& engine = *world.engine;
  Stream other = engine.make_stream("other");
  for (int round = 0; round < 40; ++round) {
    auto pass = engine.begin_pass({.kind = Pass::evaluate});
    for (std::size_t u = 0; u < 4; ++u) {
      auto lease = engine.acquire(world.ids[u], world.stream());
      if (round % 2 == 0) {
        // Busy: the gate of the lease comes to its turn late.
        world.stream().enqueue([] { std::this_thread::sleep_for(std::chrono::microseconds(200)); });
      }
      if (round % 3 == 0) lease.wait();
      lease.release(other);
    }
  }
  world.stream().synchronize();
  other.synchronize();
  world.step({0, 1, 2, 3}, 0.1f);
}

TEST_P(DeviationTest, AUnitMayBeHeldFromForwardThroughItsOwnGradientAgainstTheTrace) {
  // What was expected at a held unit's place cannot have it: each further lease of it has to find its own bytes.
  for (int order = 0; order < 24; ++order) {
    SCOPED_TRACE(order);
    World world(tier(), timing(), std::uint64_t{1} << 20);
    Engine& engine = *world.engine;
    base::Random random(static_cast<std::uint64_t>(order));
    for (int s = 0; s < 2; ++s) {
      auto step = engine.begin_step();
      auto pass = step.begin_pass();
      std::vector<ParameterLease> held;
      std::vector<bool> done(4, false);
      for (int k = 0; k < 8; ++k) {
        const auto u = static_cast<std::size_t>(random.below(3));
        if (done[u] && timing() == Timing::eager) continue;
        try {
          held.push_back(engine.acquire(world.ids[u], world.stream()));
          if (!done[u] && random.below(2) == 0) {
            world.backward(u, 0.1f);
            done[u] = true;
          }
        } catch (const PlanError&) {
          held.clear();
        }
        if (random.below(2) == 0 && !held.empty()) held.pop_back();
      }
      held.clear();
      pass.end();
      step.finish_backward();
      step.update();
    }
  }
}

TEST_P(DeviationTest, ALeaseMayBeHeldAcrossTheUpdate) {
  if (tier() == Tier::device) return;  // there the update writes what the lease shows
  World world(tier(), timing());
  Engine& engine = *world.engine;
  world.step({0, 1, 2, 3}, 0.1f);
  ParameterLease held;
  for (int s = 0; s < 3; ++s) {
    auto step = engine.begin_step();
    {
      auto pass = step.begin_pass();
      held = engine.acquire(world.ids[0], world.stream());
      for (std::size_t u = 4; u-- > 0;) world.backward(u, 0.1f);
    }
    step.finish_backward();
    step.update();
    world.touch_outside();
  }
  const float now = read_one(engine, {0, 0});
  held.release();
  auto pass = engine.begin_pass({.kind = Pass::evaluate});
  auto lease = engine.acquire(world.ids[0], world.stream());
  lease.wait();
  EXPECT_NEAR(testing::bf16_value(*static_cast<const std::uint16_t*>(lease[{0, 0}].data)), now, 0.004 * std::abs(now));
}

TEST_P(DeviationTest, NestedAndRepeatedLeasesStayValidUntilTheirOwnRelease) {
  World world(tier(), timing());
  Engine& engine = *world.engine;
  for (int s = 0; s < 3; ++s) {
    auto step = engine.begin_step();
    {
      auto pass = step.begin_pass();
      auto a = engine.acquire(world.ids[0], world.stream());
      auto b = engine.acquire(world.ids[1], world.stream());
      auto again = engine.acquire(world.ids[0], world.stream());
      a.wait();
      again.wait();
      const auto bits = *static_cast<const std::uint16_t*>(a[{0, 0}].data);
      EXPECT_EQ(bits, *static_cast<const std::uint16_t*>(again[{0, 0}].data));
      again.release(world.stream());
      world.stream().synchronize();
      EXPECT_EQ(*static_cast<const std::uint16_t*>(a[{0, 0}].data), bits);
      b.wait();
      a = ParameterLease();
      b.release();
      for (std::size_t u = 4; u-- > 0;) world.backward(u, 0.1f);
    }
    step.finish_backward();
    step.update();
  }
}

TEST_P(DeviationTest, AStepLeftHalfWayChangesNothingOrSaysSo) {
  World world(tier(), timing());
  Engine& engine = *world.engine;
  world.step({0, 1, 2, 3}, 0.1f);
  const std::vector<float> before = world.values();
  if (timing() == Timing::eager) {
    // Nothing committed: nothing happened. Something committed: the state is half a step's, and says so for good.
    {
      auto step = engine.begin_step();
      auto pass = step.begin_pass();
      world.touch(0);
    }
    EXPECT_EQ(world.values(), before);
    {
      auto step = engine.begin_step();
      auto pass = step.begin_pass();
      world.backward(3, 1);
    }
    EXPECT_THROW(world.values(), UsageError);
    EXPECT_THROW(engine.begin_step(), UsageError);
    return;
  }
  for (int where = 0; where < 5; ++where) {
    try {
      auto step = engine.begin_step();
      auto pass = step.begin_pass();
      for (std::size_t u = 0; u < 4; ++u) world.touch(u);
      if (where == 0) throw std::runtime_error("left");
      world.backward(3, 1);
      if (where == 1) throw std::runtime_error("left");
      auto lease = engine.acquire(world.ids[2], world.stream());
      auto gradients = engine.gradients(world.ids[2], world.stream());
      if (where == 2) throw std::runtime_error("left");
      gradients = GradientLease();
      lease.release(world.stream());
      pass.end();
      step.finish_backward();
      if (where == 3) throw std::runtime_error("left");
      step.discard();
    } catch (const std::runtime_error&) {
    }
    EXPECT_EQ(world.values(), before) << where;
  }
  EXPECT_EQ(engine.step_count({0, 0}), 1u);
  world.step({0, 1, 2, 3}, 0.1f);
  EXPECT_EQ(engine.step_count({0, 0}), 2u);
  EXPECT_NE(world.values(), before);
}

TEST_P(DeviationTest, EvaluationInOtherOrdersBetweenAndWithinSteps) {
  const auto run = [](World& world, bool evaluate) {
    for (int s = 0; s < 6; ++s) {
      if (evaluate) {
        auto pass = world.engine->begin_pass({.kind = Pass::evaluate, .key = static_cast<std::uint64_t>(s % 2)});
        for (std::size_t u : s % 2 == 0 ? std::vector<std::size_t>{3, 0, 0, 2} : std::vector<std::size_t>{1, 2, 3}) {
          world.touch(u);
        }
      }
      auto step = world.engine->begin_step();
      {
        auto pass = step.begin_pass();
        for (std::size_t u = 0; u < 4; ++u) world.touch(u);
        for (std::size_t u = 4; u-- > 0;) world.backward(u, 0.1f * static_cast<float>(s));
      }
      if (evaluate && s % 3 == 0) {
        auto pass = step.begin_pass({.kind = Pass::evaluate});
        world.touch(2);
      }
      step.finish_backward();
      step.update();
    }
    return world.values();
  };
  World reference(Tier::device, Timing::after_backward);
  const std::vector<float> expected = run(reference, false);
  World world(tier(), timing());
  EXPECT_EQ(run(world, true), expected);
}

// A hundred rounds of a, b, c; a, c; c, b, a; a alone; and an end while more is on its way.
TEST_P(DeviationTest, WhatWasReadAheadAndIsNeverUsedIsDroppedWithoutAWord) {
  std::vector<std::string> complaints;
  std::size_t seen = 0;
  const TemporaryDirectory directory;
  const Watchdog watchdog(60);
  {
    Config config = plain_config(directory.path(), tier(), timing());
    config.budget.host_bytes = std::uint64_t{2} << 20;
    EngineEnvironment environment;
    environment.log = [&](LogLevel level, std::string_view text) {
      if (level == LogLevel::error || level == LogLevel::warning) complaints.emplace_back(text);
    };
    Engine engine(config, environment);
    std::vector<UnitId> units;
    for (const char* name : {"a", "b", "c"}) units.push_back(engine.add_unit(name, {{"w", {20000}}}));
    engine.commit();
    engine.initialize([](ParameterId id, std::int64_t, std::span<float> values) {
      std::fill(values.begin(), values.end(), static_cast<float>(id.unit + 1));
    });
    const std::vector<std::vector<std::uint32_t>> orders = {{0, 1, 2}, {0, 2}, {2, 1, 0}, {0}};
    const Report before = engine.report();
    for (std::size_t round = 0; round < 100; ++round) {
      auto pass = engine.begin_pass({.kind = Pass::evaluate});
      for (const std::uint32_t u : orders[round % orders.size()]) {
        auto lease = engine.acquire(units[u], engine.stream());
        lease.wait();
        const auto* const bits = static_cast<const std::uint16_t*>(lease[{u, 0}].data);
        for (const std::size_t i : {std::size_t{0}, std::size_t{19999}})
          seen += testing::bf16_value(bits[i]) == static_cast<float>(u + 1);
        lease.release();
      }
    }
    const Report after = engine.report();
    EXPECT_EQ(after.peak_device_bytes, before.peak_device_bytes);
    EXPECT_EQ(after.peak_host_bytes, before.peak_host_bytes);
    for (int looks = 0; looks < 10'000 && !engine.report().at_rest; ++looks)
      std::this_thread::sleep_for(std::chrono::milliseconds(1));
    EXPECT_TRUE(engine.report().at_rest);
    auto pass = engine.begin_pass({.kind = Pass::evaluate});
    engine.acquire(units[0], engine.stream());
  }
  EXPECT_EQ(seen, 2u * 25 * (3 + 2 + 3 + 1));
  EXPECT_TRUE(complaints.empty()) << complaints.front();
}

INSTANTIATE_TEST_SUITE_P(All, DeviationTest,
                         ::testing::Combine(::testing::Values(Tier::device, Tier::host, Tier::nvme),
                                            ::testing::Values(Timing::after_backward, Timing::just_in_time,
                                                              Timing::eager)),
                         [](const auto& param) {
                           return std::string(to_string(std::get<0>(param.param))) + "_" +
                                  std::string(to_string(std::get<1>(param.param)));
                         });

TEST(WindowTest, MoreHeldThanTheWindowTakesIsRefusedWithNumbersAndTheEngineGoesOn) {
  for (Timing timing : {Timing::after_backward, Timing::just_in_time, Timing::eager}) {
    SCOPED_TRACE(to_string(timing));
    World world(Tier::nvme, timing, 96 << 10);
    world.step({0, 1, 2, 3}, 0.1f);
    std::string text;
    for (int round = 0; round < 3; ++round) {
      try {
        auto pass = world.engine->begin_pass({.kind = Pass::evaluate});
        std::vector<ParameterLease> held;
        for (std::size_t u = 0; u < 4; ++u) held.push_back(world.engine->acquire(world.ids[u], world.stream()));
        FAIL() << "more fits than the budget allows";
      } catch (const PlanError& error) {
        text = error.what();
      }
      EXPECT_NE(text.find("KiB"), std::string::npos) << text;
      EXPECT_NE(text.find("budget.device"), std::string::npos) << text;
      world.step({0, 1, 2, 3}, 0.1f);
    }
    EXPECT_EQ(world.engine->step_count({0, 0}), 4u);
  }
}

}  // namespace
}  // namespace ballast
