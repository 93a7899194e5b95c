// Whole steps against values computed by hand: bias correction, decay, accumulation, master copies, groups, loss scale.
// SPDX-License-Identifier: Apache-2.0
#include <gtest/gtest.h>

#include <array>
#include <chrono>
#include <filesystem>
#include <limits>
#include <thread>

#include "support/engine_support.h"

namespace ballast {
namespace {

using testing::contribute;
using testing::plain_config;
using testing::read_one;
using testing::TemporaryDirectory;
using testing::Watchdog;

constexpr double kFourUlps = 2.4e-7;
const std::vector<Timing> kTimings = {Timing::after_backward, Timing::just_in_time, Timing::eager};

struct World {
  TemporaryDirectory directory;
  Watchdog watchdog;
  std::vector<ParameterSpec> parameters = {{"p", {3}}};
  UnitId unit;
  std::unique_ptr<Engine> engine;
  Config config;

  explicit World(Tier tier = Tier::nvme, Timing timing = Timing::just_in_time)
      : config(plain_config(directory.path(), tier, timing)) {
    config.optimizer.beta2 = 0.999;
    config.optimizer.weight_decay = 0;
    config.optimizer.learning_rate = 0.01;
    config.precision.parameters = DataType::fp32;
  }
  void start(float initial, int micro_batches = 1, int uses = 1) {
    engine = std::make_unique<Engine>(config);
    unit = engine->add_unit("unit", parameters);
    if (micro_batches > 1 || uses > 1) {
      engine->expect_order(
          std::vector<ExpectedAccess>(static_cast<std::size_t>(uses), ExpectedAccess{unit, true, true}), micro_batches);
    }
    engine->commit();
    engine->initialize([&](ParameterId, std::int64_t, std::span<float> values) {
      for (float& value : values) value = initial;
    });
  }
  // One micro-batch each.
  GradientNorm step(const std::vector<float>& gradients, StepOptions options = {}) {
    options.micro_batches = static_cast<int>(gradients.size());
    auto running = engine->begin_step(options);
    for (float gradient : gradients) {
      auto pass = running.begin_pass();
      contribute(*engine, unit, parameters, [=](std::uint32_t) { return gradient; });
    }
    const GradientNorm norm = running.finish_backward();
    if (norm.finite) running.update();
    return norm;
  }
  float value(std::uint32_t parameter = 0) { return read_one(*engine, {unit.index, parameter}); }
};

TEST(ValuesTest, TheFirstStepMovesByTheLearningRate) {
  for (float gradient : {0.1f, -0.1f}) {
    World world;
    world.config.optimizer.learning_rate = 1e-3;
    world.start(0);
    world.step({gradient});
    const double expected = gradient > 0 ? -9.999999e-4 : 9.999999e-4;
    EXPECT_NEAR(world.value(), expected, 1e-9);
  }
}

TEST(ValuesTest, TenStepsWithAlternatingGradientsMatchThoseByHandInEveryTierPair) {
  const double p[] = {0.990000001000, 0.993661036039, 0.990228625395, 0.992554030216, 0.990325736470,
                      0.992119111722, 0.990383449655, 0.991895440551, 0.990422528140, 0.991763455567};
  const double m[] = {0.01,       -0.011,     0.0201,       -0.02191,     0.030281,
                      -0.0327471, 0.04052761, -0.043525151, 0.0508273641, -0.05425537231};
  const double v[] = {1e-05,           4.999e-05,      0.00013994001,  0.00029980007,  0.0005495002699,
                      0.0009089507697, 0.001398041819, 0.002036643777, 0.002844607133, 0.003841762526};
  std::vector<float> all_bits;
  for (Tier parameters : {Tier::device, Tier::host, Tier::nvme}) {
    for (Tier optimizer : {Tier::device, Tier::host, Tier::nvme}) {
      for (Tier gradients : {Tier::device, Tier::host, Tier::nvme}) {
        for (Timing timing : kTimings) {
          SCOPED_TRACE(std::string(to_string(parameters)) + " " + std::string(to_string(optimizer)) + " " +
                       std::string(to_string(gradients)) + " " + std::string(to_string(timing)));
          World world(parameters, timing);
          world.config.placement.optimizer = optimizer;
          world.config.placement.gradients = gradients;
          world.start(1);
          std::vector<float> bits;
          for (int t = 1; t <= 10; ++t) {
            world.step({static_cast<float>((t % 2 == 1 ? 1 : -1) * 0.1 * t)});
            bits.push_back(world.value());
            EXPECT_NEAR(bits.back(), p[t - 1], kFourUlps);
            float moments[2];
            world.engine->read_moments({0, 0}, 1, {moments, 1}, {moments + 1, 1});
            EXPECT_NEAR(moments[0], m[t - 1], 1e-6 * 0.06);
            EXPECT_NEAR(moments[1], v[t - 1], 1e-6 * 0.004);
            EXPECT_EQ(world.engine->step_count({0, 0}), static_cast<std::uint64_t>(t));
          }
          if (all_bits.empty()) all_bits = bits;
          EXPECT_EQ(bits, all_bits);
        }
      }
    }
  }
}

TEST(ValuesTest, DecayIsDecoupledOrAddedToTheGradientAsTheTypeSays) {
  for (bool decoupled : {true, false}) {
    World world;
    world.config.optimizer.type = decoupled ? "adamw" : "adam";
    world.config.optimizer.weight_decay = 0.1;
    world.start(1);
    const double expected[2][3] = {{0.9900000005, 0.987375197, 0.980811595}, {0.989000001, 0.991672036, 0.987247953}};
    for (int t = 0; t < 3; ++t) {
      world.step({std::vector<float>{0.1f, -0.2f, 0.3f}[static_cast<std::size_t>(t)]});
      EXPECT_NEAR(world.value(), expected[decoupled][t], kFourUlps);
    }
  }
}

TEST(ValuesTest, GradientsAreAveragedOverTheMicroBatchesOfTheirOwnStep) {
  for (Timing timing : kTimings) {
    World world(Tier::nvme, timing);
    world.config.optimizer.epsilon = 1;
    world.config.optimizer.learning_rate = 0.1;
    world.start(1, 2);
    world.step({1, 3});
    EXPECT_NEAR(world.value(), 0.933333333, kFourUlps);
    // A last window that is not full is divided by what it holds.
    world.step({5});
    EXPECT_NEAR(world.value(), 0.858904912, kFourUlps);
  }
}

TEST(ValuesTest, ThreeMicroBatchesGiveTheMean) {
  World world;
  world.config.optimizer.epsilon = 1;
  world.config.optimizer.learning_rate = 0.1;
  world.start(1);
  world.step({1, 2, 4});
  EXPECT_NEAR(world.value(), 0.93, kFourUlps);
}

TEST(ValuesTest, SmallContributionsAreNotLostBesideALargeSum) {
  World world;
  world.config.optimizer.epsilon = 1;
  world.config.optimizer.learning_rate = 0.1;
  world.start(1);
  std::vector<float> gradients(101, 1.0f);
  gradients[0] = 256;
  const GradientNorm norm = world.step(gradients);
  EXPECT_NEAR(norm.value, 3.524752475 * std::sqrt(3.0), 1e-5);
  EXPECT_NEAR(world.value(), 0.922100656, kFourUlps);
}

TEST(ValuesTest, AUnitUsedTwiceIsUpdatedOnceWithTheSum) {
  for (Timing timing : kTimings) {
    World world(Tier::nvme, timing);
    world.config.optimizer.epsilon = 1;
    world.config.optimizer.learning_rate = 0.1;
    world.start(1, 1, 2);
    {
      auto step = world.engine->begin_step();
      {
        auto pass = step.begin_pass();
        contribute(
            *world.engine, world.unit, world.parameters, [](std::uint32_t) { return 1.0f; }, true);
        contribute(*world.engine, world.unit, world.parameters, [](std::uint32_t) { return 3.0f; });
      }
      step.finish_backward();
      step.update();
    }
    EXPECT_NEAR(world.value(), 0.92, kFourUlps);
    EXPECT_EQ(world.engine->step_count({0, 0}), 1u);
    // What two updates would give is something else.
    World twice(Tier::nvme, timing);
    twice.config.optimizer = world.config.optimizer;
    twice.start(1);
    twice.step({1});
    twice.step({3});
    EXPECT_NEAR(twice.value(), 0.886578964, kFourUlps);
  }
}

TEST(ValuesTest, OnePassOverAllMicroBatchesOfAUnitInTurnGivesTheSameMean) {
  for (Timing timing : kTimings) {
    for (Tier tier : {Tier::device, Tier::host, Tier::nvme}) {
      World world(tier, timing);
      world.config.optimizer.epsilon = 1;
      world.config.optimizer.learning_rate = 0.1;
      world.start(1, 3, 3);
      for (int s = 0; s < 2; ++s) {
        auto step = world.engine->begin_step({.micro_batches = 3});
        {
          auto pass = step.begin_pass({.micro_batches = 3});
          for (float gradient : {1.0f, 2.0f, 4.0f}) {
            contribute(
                *world.engine, world.unit, world.parameters, [=](std::uint32_t) { return gradient; }, gradient < 4);
          }
        }
        EXPECT_NEAR(step.finish_backward().value, 7.0 / 3 * std::sqrt(3.0), 1e-5);
        step.update();
        if (s == 0) {
          EXPECT_NEAR(world.value(), 0.93, kFourUlps);
        }
      }
      EXPECT_EQ(world.engine->step_count({0, 0}), 2u);
    }
  }
}

TEST(ValuesTest, PartialGradientsWithoutTheirCommitAreNamedAndTheStepIsDiscarded) {
  World world;
  world.start(1);
  {
    auto step = world.engine->begin_step();
    {
      auto pass = step.begin_pass();
      contribute(
          *world.engine, world.unit, world.parameters, [](std::uint32_t) { return 1.0f; }, true);
    }
    EXPECT_THROW(step.finish_backward(), UsageError);
  }
  EXPECT_EQ(world.value(), 1.0f);
  world.step({0.1f});
  EXPECT_NEAR(world.value(), 0.99, kFourUlps);
}

TEST(ValuesTest, TheMasterOfABf16ParameterMovesWhereItsRoundingWouldNot) {
  World world;
  world.config.precision.parameters = DataType::bf16;
  world.config.optimizer.learning_rate = 1e-4;
  world.start(1);
  for (int s = 0; s < 100; ++s) world.step({0.5f});
  EXPECT_NEAR(world.value(), 0.98999834, 3e-6);
  auto pass = world.engine->begin_pass({.kind = Pass::evaluate});
  auto lease = world.engine->acquire(world.unit, world.engine->stream());
  lease.wait();
  const Tensor tensor = lease[{0, 0}];
  EXPECT_EQ(testing::bf16_value(static_cast<const std::uint16_t*>(tensor.data)[0]), 0.98828125f);
}

TEST(ValuesTest, DecayActsOnTheMaster) {
  World world(Tier::host);
  world.config.precision.parameters = DataType::bf16;
  world.config.optimizer.learning_rate = 1e-3;
  world.config.optimizer.weight_decay = 0.01;
  world.start(1);
  for (int s = 0; s < 1000; ++s) world.step({0});
  EXPECT_NEAR(world.value(), 0.99004, 3e-5);
  EXPECT_NE(world.value(), 1.0f);
}

TEST(ValuesTest, ManyParametersOfOneCallEachGetTheirOwnUpdate) {
  const auto specs = [] {
    std::vector<ParameterSpec> parameters;
    for (int i = 0; i < 64; ++i) parameters.push_back({"p" + std::to_string(i), {2 * i + 1}});
    return parameters;
  }();
  World world;
  world.parameters = specs;
  world.engine = std::make_unique<Engine>(world.config);
  world.unit = world.engine->add_unit("unit", specs);
  world.engine->commit();
  world.engine->initialize([](ParameterId id, std::int64_t, std::span<float> values) {
    for (float& value : values) value = static_cast<float>(id.index);
  });
  {
    auto step = world.engine->begin_step();
    {
      auto pass = step.begin_pass();
      contribute(*world.engine, world.unit, specs, [](std::uint32_t p) { return static_cast<float>(p) / 100; });
    }
    step.finish_backward();
    step.update();
  }
  for (std::uint32_t i = 0; i < 64; i += i < 4 ? 1 : 10) {
    World alone(Tier::host);
    alone.start(static_cast<float>(i));
    alone.step({static_cast<float>(i) / 100});
    std::vector<float> values(2 * i + 1);
    world.engine->read({0, i}, 0, values);
    EXPECT_EQ(values, std::vector<float>(values.size(), alone.value())) << i;
  }
}

TEST(ValuesTest, GroupsHaveRatesOfTheirOwn) {
  World world;
  world.parameters = {{"a", {5}}, {"b", {5}, {.group = 1}}, {"c", {5}, {.group = 2}}};
  world.start(1);
  StepOptions options;
  options.learning_rate = 0.02;
  options.group_rates = {{1, 0.03, 0.5}, {2, 0.0, std::nullopt}};
  world.step({0.1f}, options);
  EXPECT_NEAR(world.value(0), 0.98, kFourUlps);
  EXPECT_NEAR(world.value(1), 1 * (1 - 0.03 * 0.5) - 0.03, kFourUlps);
  EXPECT_EQ(world.value(2), 1.0f);
}

TEST(ValuesTest, FrozenParametersKeepTheirBitsAlsoWithDecay) {
  for (DataType dtype : {DataType::bf16, DataType::fp16, DataType::fp32}) {
    World world;
    world.config.precision.parameters = dtype;
    world.config.optimizer.weight_decay = 0.1;
    world.parameters = {{"a", {700}, {.trainable = false}}, {"b", {5}}, {"c", {}, {.trainable = false}}};
    world.start(0.3125f);
    for (int s = 0; s < 3; ++s) world.step({0.1f});
    EXPECT_EQ(world.value(0), 0.3125f);
    EXPECT_NE(world.value(1), 0.3125f);
    EXPECT_EQ(world.value(2), 0.3125f);
    float moments[2];
    EXPECT_THROW((world.engine->read_moments({0, 0}, 0, {moments, 1}, {moments + 1, 1})), UsageError);
  }
}

class GradientTierTest : public ::testing::TestWithParam<Tier> {};
INSTANTIATE_TEST_SUITE_P(Tiers, GradientTierTest, ::testing::Values(Tier::device, Tier::host, Tier::nvme),
                         [](const auto& tier) { return std::string(to_string(tier.param)); });

TEST(ValuesTest, GradientsOnNvmeMoveTheirBytesOnceMoreEachWayForEveryContribution) {
  constexpr std::uint64_t kElements = 1 << 20;
  for (const int micro_batches : {1, 3}) {
    std::array<std::uint64_t, 2> read{}, written{};
    for (const Tier gradients : {Tier::host, Tier::nvme}) {
      World world(Tier::nvme);
      world.config.placement.gradients = gradients;
      world.config.precision.parameters = DataType::bf16;
      world.parameters = {{"p", {kElements}}};
      world.start(1, micro_batches);
      // What is read ahead of the next step counts as well: the same before and after.
      const auto lanes = [&] {
        for (int quiet = 0; quiet < 4;) {
          std::this_thread::sleep_for(std::chrono::milliseconds(5));
          quiet = world.engine->report().at_rest ? quiet + 1 : 0;
        }
        return world.engine->report().lanes;
      };
      const std::vector<float> contributions(static_cast<std::size_t>(micro_batches), 0.25f);
      for (int s = 0; s < 2; ++s) world.step(contributions);
      const auto before = lanes();
      for (int s = 0; s < 3; ++s) world.step(contributions);
      const auto after = lanes();
      const auto moved = [&](Lane lane) {
        return after[static_cast<std::size_t>(lane)].bytes - before[static_cast<std::size_t>(lane)].bytes;
      };
      read[gradients == Tier::nvme] = moved(Lane::nvme_read);
      written[gradients == Tier::nvme] = moved(Lane::nvme_write);
    }
    const std::uint64_t expected = std::uint64_t{3} * 4 * kElements * static_cast<std::uint64_t>(micro_batches);
    EXPECT_EQ(written[1] - written[0], expected);
    EXPECT_EQ(read[1] - read[0], expected);
  }
}

TEST_P(GradientTierTest, ADynamicLossScaleHalvesAndTheSkippedStepLeavesNoTrace) {
  World world;
  world.config.placement.gradients = GetParam();
  world.config.optimizer.learning_rate = 1e-3;
  world.config.precision.parameters = DataType::fp16;
  world.config.loss_scale.kind = Config::LossScale::Kind::dynamic;
  world.start(1);
  for (float bad : {std::numeric_limits<float>::infinity(), -std::numeric_limits<float>::infinity(),
                    std::numeric_limits<float>::quiet_NaN()}) {
    const GradientNorm norm = world.step({bad});
    EXPECT_FALSE(norm.finite);
    EXPECT_EQ(norm.non_finite_parameter, "unit/p");
  }
  EXPECT_EQ(world.engine->step_count({0, 0}), 0u);
  EXPECT_EQ(world.value(), 1.0f);
  const double scale = world.engine->begin_step().loss_scale();
  const GradientNorm norm = world.step({static_cast<float>(0.1 * scale)});
  EXPECT_NEAR(norm.value, 0.1 * std::sqrt(3.0), 1e-6);
  EXPECT_NEAR(world.value(), 0.999, kFourUlps);
  EXPECT_EQ(world.engine->step_count({0, 0}), 1u);
}

TEST(ValuesTest, EveryOverflowHalvesTheScaleOnce) {
  World world;
  world.config.loss_scale.kind = Config::LossScale::Kind::dynamic;
  world.start(1);
  for (int k = 1; k <= 18; ++k) {
    auto step = world.engine->begin_step();
    EXPECT_EQ(step.loss_scale(), std::max(1.0, 65536.0 / std::pow(2.0, k - 1)));
    {
      auto pass = step.begin_pass();
      contribute(*world.engine, world.unit, world.parameters, [](std::uint32_t) { return HUGE_VALF; });
    }
    EXPECT_FALSE(step.finish_backward().finite);
    EXPECT_THROW(step.update(), UsageError);
    step.discard();
  }
}

TEST(ValuesTest, RateZeroAndGradientZeroChangeNothing) {
  World world;
  world.start(1);
  StepOptions options;
  options.learning_rate = 0;
  world.step({0.1f}, options);
  EXPECT_EQ(world.value(), 1.0f);
  EXPECT_EQ(world.engine->step_count({0, 0}), 1u);
}

TEST(ValuesTest, EmptyParametersAndScalarsWork) {
  for (Timing timing : kTimings) {
    for (Tier tier : {Tier::device, Tier::host, Tier::nvme}) {
      SCOPED_TRACE(std::string(to_string(timing)) + " " + std::string(to_string(tier)));
      const TemporaryDirectory directory;
      const Watchdog watchdog;
      Config config = plain_config(directory.path(), tier, timing);
      config.optimizer.weight_decay = 0;
      config.optimizer.learning_rate = 0.01;
      Engine engine(config);
      const std::vector<std::vector<ParameterSpec>> units = {
          {{"first", {0}}, {"scalar", {}}, {"middle", {8, 0}}, {"row", {1}}, {"last", {0, 3, 4}}},
          {{"only empty", {0}}},
          {{"w", {5}}},
          {}};
      std::vector<UnitId> ids;
      for (std::size_t u = 0; u < units.size(); ++u) ids.push_back(engine.add_unit("u" + std::to_string(u), units[u]));
      engine.commit();
      engine.initialize([](ParameterId, std::int64_t, std::span<float> values) {
        EXPECT_FALSE(values.empty());
        for (float& value : values) value = 1;
      });
      for (int s = 0; s < 3; ++s) {
        auto step = engine.begin_step();
        {
          auto pass = step.begin_pass();
          for (UnitId id : ids) {
            auto lease = engine.acquire(id, engine.stream());
            lease.release(engine.stream());
          }
          for (std::size_t u = 3; u-- > 0;) contribute(engine, ids[u], units[u], [](std::uint32_t) { return 0.1f; });
          EXPECT_THROW(engine.gradients(ids[3], engine.stream()), UsageError) << "no parameters";
        }
        step.finish_backward();
        step.update();
      }
      EXPECT_NEAR(read_one(engine, {0, 1}), 0.97, kFourUlps);
      EXPECT_NEAR(read_one(engine, {0, 3}), 0.97, kFourUlps);
      EXPECT_NEAR(read_one(engine, {2, 0}, 4), 0.97, kFourUlps);
      EXPECT_EQ(engine.step_count({0, 0}), 3u);
      engine.read({0, 0}, 0, {});
      EXPECT_THROW(read_one(engine, {0, 0}), UsageError);
    }
  }
}

TEST(ValuesTest, SixHundredParametersWithStrangeNamesInOneUnit) {
  World world;
  world.parameters.clear();
  for (int i = 0; i < 600; ++i)
    world.parameters.push_back({"../a b%/\xc3\xa9" + std::string(300, 'x') + std::to_string(i), {7}});
  world.start(1);
  world.step({0.1f});
  for (std::uint32_t i : {0u, 299u, 599u}) EXPECT_NEAR(world.value(i), 0.99, kFourUlps);
  EXPECT_EQ(world.engine->parameter(world.unit, world.parameters[77].name).index, 77u);
  EXPECT_THROW(world.engine->parameter(world.unit, "missing"), UsageError);
}

TEST(ReportTest, ItIsAtRestOnceNothingMovesAnyMoreAndNamesTheFiles) {
  for (Timing timing : kTimings) {
    World world(Tier::nvme, timing);
    world.start(1);
    for (int step = 0; step < 5; ++step) {
      world.step({1.0f});
      Report report = world.engine->report();
      for (int looks = 0; !report.at_rest && looks < 10'000; ++looks) {
        std::this_thread::sleep_for(std::chrono::milliseconds(1));
        report = world.engine->report();
      }
      ASSERT_TRUE(report.at_rest) << to_string(timing) << " step " << step;
      for (const LaneReport& lane : report.lanes) EXPECT_EQ(lane.running, 0u);
      std::this_thread::sleep_for(std::chrono::milliseconds(5));
      const Report later = world.engine->report();
      for (std::size_t lane = 0; lane < report.lanes.size(); ++lane)
        EXPECT_EQ(later.lanes[lane].tasks, report.lanes[lane].tasks);
    }
    const std::vector<std::string> files = world.engine->report().nvme_files;
    ASSERT_EQ(files.size(), 1u);
    EXPECT_GE(std::filesystem::file_size(files[0]), world.engine->report().nvme_stored_bytes);
  }
}

}  // namespace
}  // namespace ballast
