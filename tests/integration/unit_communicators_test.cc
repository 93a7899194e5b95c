// Units that only some ranks have: dense units over four ranks, experts over groups of them. Their numbers are those of
// engines of their own, each of one rank that takes all micro-batches of its group.
// SPDX-License-Identifier: Apache-2.0
#include <gtest/gtest.h>

#include <chrono>
#include <numeric>

#include "support/on_ranks.h"
#include "support/random_case.h"

namespace ballast {
namespace {

using testing::Case;
using testing::on_ranks;
using testing::Outcome;
using testing::plain_config;
using testing::run_case;
using testing::SyntheticUnit;
using testing::TemporaryDirectory;
using testing::Watchdog;

constexpr int kRanks = 4;
constexpr int kExpert = 2;  // its place among the units

// Units 0, 1 and 3 are dense. All that follows from a unit's place is the same whoever shares it.
std::vector<SyntheticUnit> model_with_expert(const std::string& name = "expert") {
  std::vector<SyntheticUnit> model = testing::small_model(4);
  model[kExpert].name = name;
  return model;
}

Case plain_case(const std::vector<SyntheticUnit>& model, bool clip) {
  Case c;
  c.model = model;
  c.type = "adamw";
  c.clip = clip;
  return c;
}

void set_in_norm(SyntheticUnit& unit, bool in_norm) {
  for (ParameterSpec& parameter : unit.parameters) parameter.options.in_norm = in_norm;
}

AddOthers adding_over(const std::shared_ptr<Communicator>& communicator) {
  return [communicator](GradientTotal& total) {
    double values[2] = {total.norm_squared, total.finite ? 0.0 : 1.0};
    communicator->all_reduce_sum(values);
    total = {values[0], values[1] == 0};
  };
}

// How ranks are grouped: group i has ranks offset, offset + stride, ...
struct Grouping {
  int color(int rank) const { return contiguous ? rank / 2 : rank % 2; }
  int first(int group) const { return contiguous ? 2 * group : group; }
  int stride() const { return contiguous ? 1 : 2; }
  bool contiguous = true;
};

// Three engines of one rank: the dense units with all micro-batches, and each group's expert with its own. Their norms
// are joined. The result of engine 1 + g holds the values of group g's expert.
std::vector<Outcome> separate_engines(const Config& config, bool clip, const Grouping& grouping,
                                      std::optional<double> divisor) {
  std::vector<Outcome> outcomes(3);
  on_ranks(3, [&](int which, const std::shared_ptr<Communicator>& communicator) {
    Case c = plain_case(model_with_expert(), clip);
    for (std::size_t u = 0; u < c.model.size(); ++u) set_in_norm(c.model[u], (u == kExpert) == (which != 0));
    c.options.micro_batches = which == 0 ? kRanks : 2;
    c.options.micro_offset = which == 0 ? 0 : grouping.first(which - 1);
    c.options.micro_stride = which == 0 ? 1 : grouping.stride();
    if (divisor && which != 0) c.model[kExpert].options.gradient_divisor = *divisor / 2;
    c.options.add_others = adding_over(communicator);
    outcomes[static_cast<std::size_t>(which)] = run_case(c, config, {});
  });
  return outcomes;
}

using Grouped = std::function<std::shared_ptr<Communicator>(const std::shared_ptr<Communicator>& world, int rank)>;

std::vector<Outcome> with_experts(const Config& config, const Case& all, const Grouped& group_of,
                                  std::optional<double> divisor = {}) {
  std::vector<Outcome> outcomes(kRanks);
  on_ranks(kRanks, [&](int rank, const std::shared_ptr<Communicator>& world) {
    Case c = all;
    c.options.micro_stride = kRanks;
    c.options.micro_offset = rank;
    c.model[kExpert].options = {group_of(world, rank), divisor};
    int first = rank;
    c.model[kExpert].options.communicator->broadcast(std::as_writable_bytes(std::span(&first, 1)), 0);
    c.model[kExpert].name = "expert." + std::to_string(first);
    EngineEnvironment environment;
    environment.communicator = world;
    outcomes[static_cast<std::size_t>(rank)] = run_case(c, config, environment);
  });
  return outcomes;
}

Grouped split_by(const Grouping& grouping) {
  return
      [grouping](const std::shared_ptr<Communicator>& world, int rank) { return world->split(grouping.color(rank)); };
}

// The values of one unit among those of all.
std::pair<std::size_t, std::size_t> values_of_unit(const std::vector<SyntheticUnit>& model, std::size_t unit) {
  std::size_t begin = 0, count = 0;
  for (std::size_t u = 0; u <= unit; ++u) {
    begin += count;
    count = 0;
    for (const ParameterSpec& p : model[u].parameters) {
      count += static_cast<std::size_t>(
          std::accumulate(p.shape.begin(), p.shape.end(), std::int64_t{1}, std::multiplies<>()));
    }
  }
  return {begin, count};
}

void expect_values(const Outcome& outcome, const std::vector<Outcome>& expected, int group, bool exact) {
  const auto model = model_with_expert();
  for (std::size_t u = 0; u < model.size(); ++u) {
    const auto [begin, count] = values_of_unit(model, u);
    const Outcome& from = expected[u == kExpert ? static_cast<std::size_t>(1 + group) : 0];
    ASSERT_EQ(outcome.values.size(), from.values.size());
    const float* const mine = outcome.values.data() + begin;
    const float* const theirs = from.values.data() + begin;
    if (exact) {
      EXPECT_EQ(std::memcmp(mine, theirs, 4 * count), 0) << "unit " << u;
      continue;
    }
    for (std::size_t i = 0; i < count; ++i) ASSERT_NEAR(mine[i], theirs[i], 1e-6) << "unit " << u;
  }
  for (std::size_t s = 0; s < expected[0].norms.size(); ++s)
    EXPECT_NEAR(outcome.norms[s], expected[0].norms[s], 1e-12 * expected[0].norms[s]);
}

TEST(UnitCommunicatorsTest, ExpertsOverGroupsHaveTheNumbersOfEnginesOfTheirOwn) {
  const Watchdog watchdog(300);
  const TemporaryDirectory directory;
  for (bool contiguous : {true, false}) {
    const Grouping grouping{contiguous};
    for (std::optional<double> divisor : {std::optional<double>(), std::optional<double>(kRanks)}) {
      for (bool clip : {false, true}) {
        const std::vector<Outcome> expected = separate_engines(
            plain_config(directory.path(), Tier::device, Timing::after_backward), clip, grouping, divisor);
        for (int stage : {0, 1, 3}) {
          if (!contiguous && stage != 3) continue;
          for (Tier tier : {Tier::host, Tier::nvme}) {
            for (Timing timing : {Timing::just_in_time, Timing::eager}) {
              if (timing == Timing::eager && clip) continue;
              SCOPED_TRACE("stage " + std::to_string(stage) + ", " + std::string(to_string(tier)) + ", " +
                           std::string(to_string(timing)) + (clip ? ", clipped" : "") +
                           (divisor ? ", divided by all ranks" : "") + (contiguous ? "" : ", strided"));
              Config config = plain_config(directory.path(), tier, timing);
              config.zero_stage = stage;
              const std::vector<Outcome> outcomes =
                  with_experts(config, plain_case(model_with_expert(), clip), split_by(grouping), divisor);
              for (int rank = 0; rank < kRanks; ++rank) {
                SCOPED_TRACE("rank " + std::to_string(rank));
                const Outcome& outcome = outcomes[static_cast<std::size_t>(rank)];
                expect_values(outcome, expected, grouping.color(rank), !clip);
                EXPECT_EQ(outcome.norms, outcomes[0].norms);
              }
            }
          }
        }
      }
    }
  }
}

TEST(UnitCommunicatorsTest, TheWorldByAnotherNameGivesTheSameBits) {
  const Watchdog watchdog(200);
  const TemporaryDirectory directory;
  const auto none = [](const std::shared_ptr<Communicator>&) { return std::shared_ptr<Communicator>(); };
  const auto itself = [](const std::shared_ptr<Communicator>& world) { return world; };
  const auto duplicate = [](const std::shared_ptr<Communicator>& world) { return world->duplicate(); };
  const auto split = [](const std::shared_ptr<Communicator>& world) { return world->split(7); };
  using Make = std::function<std::shared_ptr<Communicator>(const std::shared_ptr<Communicator>&)>;
  for (int stage : {0, 1, 3}) {
    Config config = plain_config(directory.path(), Tier::nvme, Timing::just_in_time);
    config.zero_stage = stage;
    const auto run = [&](const std::vector<Make>& makes) {
      std::vector<Outcome> outcomes(kRanks);
      on_ranks(kRanks, [&](int rank, const std::shared_ptr<Communicator>& world) {
        Case c = plain_case(testing::small_model(4), true);
        c.options.micro_stride = kRanks;
        c.options.micro_offset = rank;
        for (std::size_t u = 0; u < c.model.size(); ++u)
          c.model[u].options.communicator = makes[u % makes.size()](world);
        EngineEnvironment environment;
        environment.communicator = world;
        outcomes[static_cast<std::size_t>(rank)] = run_case(c, config, environment);
      });
      return outcomes;
    };
    const std::vector<Outcome> expected = run({none});
    for (const std::vector<Make>& makes :
         {std::vector<Make>{itself}, std::vector<Make>{duplicate}, std::vector<Make>{none, split, itself, duplicate}}) {
      const std::vector<Outcome> outcomes = run(makes);
      for (std::size_t rank = 0; rank < kRanks; ++rank) {
        EXPECT_EQ(outcomes[rank].norms, expected[rank].norms);
        EXPECT_EQ(outcomes[rank].losses, expected[rank].losses);
        EXPECT_EQ(outcomes[rank].values, expected[rank].values);
      }
    }
  }
}

TEST(UnitCommunicatorsTest, MembersMayStandInAnotherOrderAndComeFromElsewhere) {
  const Watchdog watchdog(100);
  const TemporaryDirectory directory;
  for (int stage : {0, 1, 3}) {
    Config config = plain_config(directory.path(), Tier::host, Timing::just_in_time);
    config.zero_stage = stage;
    const Case c = plain_case(model_with_expert(), true);
    const std::vector<Outcome> expected =
        with_experts(config, c, [](const std::shared_ptr<Communicator>& world, int) { return world; });
    // Not made from the engine's communicator, and the other way round.
    const auto reversed = make_in_process_communicators(kRanks, {.timeout = std::chrono::seconds(20)});
    const std::vector<Outcome> outcomes = with_experts(config, c, [&](const std::shared_ptr<Communicator>&, int rank) {
      return reversed[static_cast<std::size_t>(kRanks - 1 - rank)];
    });
    for (std::size_t rank = 0; rank < kRanks; ++rank) {
      EXPECT_EQ(outcomes[rank].norms, outcomes[0].norms);
      for (std::size_t s = 0; s < outcomes[rank].norms.size(); ++s)
        EXPECT_NEAR(outcomes[rank].norms[s], expected[0].norms[s], 1e-6 * expected[0].norms[s]);
      for (std::size_t i = 0; i < outcomes[rank].values.size(); ++i)
        ASSERT_NEAR(outcomes[rank].values[i], expected[0].values[i], 1e-5);
    }
  }
}

TEST(UnitCommunicatorsTest, AUnitOfOneRankAloneIsThatRanksOwn) {
  const Watchdog watchdog(200);
  const TemporaryDirectory directory;
  std::vector<Outcome> own(kRanks);  // an engine of one rank, with that rank's micro-batch
  for (int rank = 0; rank < kRanks; ++rank) {
    Case c = plain_case(model_with_expert(), false);
    c.options.micro_offset = rank;
    own[static_cast<std::size_t>(rank)] =
        run_case(c, plain_config(directory.path(), Tier::device, Timing::after_backward), {});
  }
  const auto [begin, count] = values_of_unit(model_with_expert(), kExpert);
  const Grouped alone[2] = {[](const std::shared_ptr<Communicator>& world, int rank) { return world->split(rank); },
                            [](const std::shared_ptr<Communicator>&, int) { return make_single_communicator(); }};
  for (const Grouped& group_of : alone) {
    for (int stage : {0, 2, 3}) {
      for (Timing timing : {Timing::just_in_time, Timing::eager}) {
        Config config = plain_config(directory.path(), Tier::nvme, timing);
        config.zero_stage = stage;
        const std::vector<Outcome> outcomes = with_experts(config, plain_case(model_with_expert(), false), group_of);
        for (std::size_t rank = 0; rank < kRanks; ++rank) {
          EXPECT_EQ(std::memcmp(outcomes[rank].values.data() + begin, own[rank].values.data() + begin, 4 * count), 0);
          EXPECT_EQ(outcomes[rank].norms, outcomes[0].norms);
        }
      }
    }
  }
}

TEST(UnitCommunicatorsTest, ShardGroupsAreForTheUnitsOfAllRanks) {
  const Watchdog watchdog(200);
  const TemporaryDirectory directory;
  const Grouping grouping{false};
  const std::vector<Outcome> expected =
      separate_engines(plain_config(directory.path(), Tier::device, Timing::after_backward), false, grouping, {});
  Config config = plain_config(directory.path(), Tier::host, Timing::just_in_time);
  config.communication.shard_group_size = 2;
  const std::vector<Outcome> outcomes =
      with_experts(config, plain_case(model_with_expert(), false), split_by(grouping));
  const auto [begin, count] = values_of_unit(model_with_expert(), kExpert);
  for (int rank = 0; rank < kRanks; ++rank) {
    const Outcome& outcome = outcomes[static_cast<std::size_t>(rank)];
    const Outcome& expert = expected[static_cast<std::size_t>(1 + grouping.color(rank))];
    EXPECT_EQ(std::memcmp(outcome.values.data() + begin, expert.values.data() + begin, 4 * count), 0);
    // The dense ones are summed in another order than one rank's.
    for (std::size_t i = 0; i < begin; ++i) ASSERT_NEAR(outcome.values[i], expected[0].values[i], 1e-5);
    for (std::size_t s = 0; s < outcome.norms.size(); ++s)
      EXPECT_NEAR(outcome.norms[s], expected[0].norms[s], 1e-5 * expected[0].norms[s]);
  }
}

// Gradients that are the same for all elements: the norm by hand.
TEST(UnitCommunicatorsTest, TheNormIsTheSumOverDistinctParametersByHand) {
  const Watchdog watchdog(100);
  const TemporaryDirectory directory;
  const std::vector<ParameterSpec> dense = {{"w", {5000}}}, expert = {{"w", {7000}}, {"b", {3}, {.in_norm = false}}};
  for (int stage : {0, 1, 3}) {
    for (std::optional<double> divisor : {std::optional<double>(), std::optional<double>(3)}) {
      Config config = plain_config(directory.path(), Tier::host, Timing::just_in_time);
      config.zero_stage = stage;
      on_ranks(kRanks, [&](int rank, const std::shared_ptr<Communicator>& world) {
        EngineEnvironment environment;
        environment.communicator = world;
        Engine engine(config, environment);
        const UnitId d = engine.add_unit("dense", dense);
        const UnitId e = engine.add_unit("expert", expert, {world->split(rank / 2), divisor});
        engine.commit();
        engine.initialize(
            [](ParameterId, std::int64_t, std::span<float> values) { std::fill(values.begin(), values.end(), 0.0f); });
        auto step = engine.begin_step();
        auto pass = step.begin_pass();
        const auto value = [&](std::uint32_t) { return static_cast<float>(1 << rank); };  // 1, 2, 4, 8
        testing::contribute(engine, d, dense, value);
        testing::contribute(engine, e, expert, value);
        pass.end();
        const double of = divisor.value_or(2);
        const double expected = 5000 * (15.0 / 4) * (15.0 / 4) + 7000 * ((3 / of) * (3 / of) + (12 / of) * (12 / of));
        EXPECT_NEAR(step.finish_backward().value, std::sqrt(expected), 1e-12 * std::sqrt(expected));
        step.update();
      });
    }
  }
}

TEST(UnitCommunicatorsTest, AnOverflowInOneGroupSkipsTheStepOnAllRanks) {
  const Watchdog watchdog(100);
  const TemporaryDirectory directory;
  for (bool in_norm : {true, false}) {
    Config config = plain_config(directory.path(), Tier::nvme, Timing::just_in_time);
    config.loss_scale.kind = Config::LossScale::Kind::dynamic;
    std::vector<std::string> names(kRanks);
    on_ranks(kRanks, [&](int rank, const std::shared_ptr<Communicator>& world) {
      EngineEnvironment environment;
      environment.communicator = world;
      Engine engine(config, environment);
      auto model = testing::small_model(3);
      model.back().name = "expert." + std::to_string(rank / 2);
      model.back().options.communicator = world->split(rank / 2);
      set_in_norm(model.back(), in_norm);
      testing::SyntheticTrainer trainer(engine, model, {.poison = [rank](int step) { return rank == 3 && step == 1; }});
      engine.commit();
      trainer.initialize();
      for (int s = 0; s < 3; ++s) {
        trainer.step();
        EXPECT_EQ(trainer.last_norm().finite, s != 1);
        EXPECT_EQ(std::isfinite(trainer.last_norm().value), s != 1);
        if (s == 1) names[static_cast<std::size_t>(rank)] = trainer.last_norm().non_finite_parameter;
      }
      EXPECT_EQ(engine.report().steps_discarded, 1u);
      for (UnitId unit : trainer.ids()) EXPECT_EQ(engine.step_count({unit.index, 0}), 2u);
    });
    for (const std::string& name : names) EXPECT_EQ(name, "expert.1/weight");
  }
}

TEST(UnitCommunicatorsTest, AnExpertWithoutWorkStaysAsItIs) {
  const Watchdog watchdog(100);
  const TemporaryDirectory directory;
  for (int stage : {0, 1, 3}) {
    for (Timing timing : {Timing::just_in_time, Timing::after_backward}) {
      Config config = plain_config(directory.path(), Tier::nvme, timing);
      config.zero_stage = stage;
      on_ranks(kRanks, [&](int rank, const std::shared_ptr<Communicator>& world) {
        EngineEnvironment environment;
        environment.communicator = world;
        Engine engine(config, environment);
        auto model = model_with_expert();
        model[kExpert].options.communicator = world->split(rank / 2);
        // From step 1 on the second group's expert has none.
        testing::SyntheticTrainer trainer(engine, model, {.absent = [rank](int step, int, ParameterId id) {
                                            return step > 0 && rank / 2 == 1 && id.unit == kExpert;
                                          }});
        engine.commit();
        trainer.initialize();
        trainer.step();
        const std::vector<float> before = trainer.values();
        trainer.step();
        trainer.step();
        const std::vector<float> after = trainer.values();
        const auto [begin, count] = values_of_unit(model, kExpert);
        const bool same = std::memcmp(before.data() + begin, after.data() + begin, 4 * count) == 0;
        EXPECT_EQ(same, rank / 2 == 1);
        EXPECT_EQ(engine.step_count({kExpert, 0}), rank / 2 == 1 ? 1u : 3u);
        EXPECT_EQ(engine.step_count({0, 0}), 3u);
      });
    }
  }
}

// --- random models ---------------------------------------------------------------------------------------------------

class UnitCommunicatorsMatrixTest : public ::testing::TestWithParam<int> {};

TEST_P(UnitCommunicatorsMatrixTest, EveryStagePlacementAndTimingGivesTheSame) {
  const auto seed = static_cast<std::uint64_t>(GetParam());
  SCOPED_TRACE("repeat with --gtest_filter=*UnitCommunicatorsMatrixTest.*/" + std::to_string(seed - 1));
  const Watchdog watchdog(300);
  const Case all = testing::make_case(1000 + seed);
  base::Random random(seed * 91);
  const TemporaryDirectory directory;
  std::vector<std::uint64_t> kinds;
  for (std::size_t u = 0; u < all.model.size(); ++u) kinds.push_back(random.below(4));
  const auto run = [&](const Config& config) {
    std::vector<Outcome> outcomes(kRanks);
    on_ranks(kRanks, [&](int rank, const std::shared_ptr<Communicator>& world) {
      Case c = all;
      c.options.micro_stride = kRanks;
      c.options.micro_offset = rank;
      const std::shared_ptr<Communicator> kind[4] = {nullptr, world->split(rank / 2), world->split(rank % 2),
                                                     world->split(rank == 3 || rank == 1)};
      for (std::size_t u = 0; u < c.model.size(); ++u) c.model[u].options.communicator = kind[kinds[u]];
      EngineEnvironment environment;
      environment.communicator = world;
      outcomes[static_cast<std::size_t>(rank)] = run_case(c, config, environment);
    });
    return outcomes;
  };
  Config plain = plain_config(directory.path(), Tier::device, Timing::after_backward);
  plain.zero_stage = 0;
  const std::vector<Outcome> expected = run(plain);
  for (Timing timing : {Timing::after_backward, Timing::just_in_time, Timing::eager}) {
    if (timing == Timing::eager && (all.clip || all.options.absent)) continue;
    for (int stage : {0, 1, 3}) {
      Config config = plain_config(directory.path(), Tier::nvme, timing);
      config.zero_stage = stage;
      config.placement.parameters = static_cast<Tier>(random.below(3));
      config.placement.optimizer = static_cast<Tier>(random.below(3));
      config.placement.gradients = static_cast<Tier>(random.below(3));
      config.budget.host_bytes = (std::uint64_t{8} << 20) + random.below(std::uint64_t{32} << 20);
      SCOPED_TRACE(std::string(to_string(timing)) + ", stage " + std::to_string(stage));
      const std::vector<Outcome> outcomes = run(config);
      for (std::size_t rank = 0; rank < kRanks; ++rank) {
        EXPECT_EQ(outcomes[rank].losses, expected[rank].losses);
        EXPECT_EQ(outcomes[rank].norms, expected[rank].norms);
        EXPECT_EQ(outcomes[rank].values.size(), expected[rank].values.size());
        EXPECT_EQ(
            std::memcmp(outcomes[rank].values.data(), expected[rank].values.data(), 4 * expected[rank].values.size()),
            0);
      }
    }
  }
}

INSTANTIATE_TEST_SUITE_P(Seeds, UnitCommunicatorsMatrixTest, ::testing::Range(1, 9));

}  // namespace
}  // namespace ballast
