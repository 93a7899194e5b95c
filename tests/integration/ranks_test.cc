// Several ranks in one process. The same numbers at every stage, placement and timing at one world size; and those of
// one rank that takes all ranks' micro-batches, where the order of adding is the same.
// SPDX-License-Identifier: Apache-2.0
#include <ballast/io/testing/faulty_storage.h>
#include <ballast/offload/topology.h>
#include <gtest/gtest.h>

#include <chrono>
#include <cmath>
#include <thread>
#include <utility>

#include "executor.h"
#include "support/on_ranks.h"
#include "support/random_case.h"

namespace ballast {
namespace {

using testing::Case;
using testing::make_case;
using testing::on_ranks;
using testing::Outcome;
using testing::plain_config;
using testing::run_case;
using testing::SyntheticUnit;
using testing::TemporaryDirectory;
using testing::Watchdog;

std::vector<Outcome> run_ranks(int world_size, const Case& c, const Config& config,
                               const std::shared_ptr<engine::TestHooks>& hooks = nullptr) {
  std::vector<Outcome> outcomes(static_cast<std::size_t>(world_size));
  on_ranks(world_size, [&](int rank, const std::shared_ptr<Communicator>& communicator) {
    Case mine = c;
    mine.options.micro_stride = world_size;
    mine.options.micro_offset = rank;
    EngineEnvironment environment;
    environment.communicator = communicator;
    environment.test_hooks = hooks;
    outcomes[static_cast<std::size_t>(rank)] = run_case(mine, config, environment);
  });
  return outcomes;
}

void expect_same(const Outcome& a, const Outcome& b) {
  EXPECT_EQ(a.losses, b.losses);
  EXPECT_EQ(a.norms, b.norms);
  ASSERT_EQ(a.values.size(), b.values.size());
  EXPECT_EQ(std::memcmp(a.values.data(), b.values.data(), 4 * a.values.size()), 0);
}

Case plain_case(int units = 4) {
  Case c;
  c.model = testing::small_model(units);
  c.type = "adamw";
  return c;
}

TEST(RanksTest, EveryWorldSizeAndStageGivesTheValuesOfOneRankThatTakesAllMicroBatches) {
  const Watchdog watchdog(200);
  const TemporaryDirectory directory;
  for (int world_size : {1, 2, 3, 4, 7, 11}) {
    Case one = plain_case();
    one.options.micro_batches = world_size;
    const Outcome expected = run_case(one, plain_config(directory.path(), Tier::device, Timing::after_backward), {});
    for (int stage = 0; stage <= 3; ++stage) {
      SCOPED_TRACE("world size " + std::to_string(world_size) + ", stage " + std::to_string(stage));
      Config config = plain_config(directory.path(), Tier::host, Timing::just_in_time);
      config.zero_stage = stage;
      const std::vector<Outcome> outcomes = run_ranks(world_size, plain_case(), config);
      for (const Outcome& outcome : outcomes) {
        ASSERT_EQ(outcome.values.size(), expected.values.size());
        EXPECT_EQ(std::memcmp(outcome.values.data(), expected.values.data(), 4 * expected.values.size()), 0);
        EXPECT_EQ(outcome.norms, outcomes[0].norms);
      }
    }
  }
}

// Parameters whose elements no world size divides, down to fewer than there are ranks.
std::vector<SyntheticUnit> prime_model() {
  return {{"a", {{"weight", {9973}}, {"bias", {3}, {.group = 1}}}},
          {"b", {{"weight", {10007}}, {"scale", {}}}},
          {"c", {{"weight", {13}}, {"bias", {2}, {.group = 1}}}}};
}
constexpr std::int64_t kPrimeElements = 9973 + 3 + 10007 + 1 + 13 + 2;

// The norm of the first step's gradients, as the trainer makes them, from their definition.
double first_norm(int micro_batches) {
  double squares = 0;
  const auto model = prime_model();
  for (std::uint32_t u = 0; u < model.size(); ++u) {
    for (std::uint32_t p = 0; p < model[u].parameters.size(); ++p) {
      std::int64_t count = 1;
      for (const std::int64_t dimension : model[u].parameters[p].shape) count *= dimension;
      for (std::int64_t i = 0; i < count; ++i) {
        double mean = 0;
        for (int m = 0; m < micro_batches; ++m)
          mean += 0.01 * (testing::SyntheticTrainer::initial({u, p}, i) + 0.01 * ((i + m * 5) % 11)) / micro_batches;
        squares += mean * mean;
      }
    }
  }
  return std::sqrt(squares);
}

TEST(RanksTest, PaddingIsCountedNowhereWhereNoWorldSizeDividesTheElements) {
  const Watchdog watchdog(200);
  const TemporaryDirectory directory;
  for (const auto& [world_size, type] :
       {std::pair(7, DataType::bf16), std::pair(11, DataType::bf16), std::pair(11, DataType::fp32)}) {
    Case one;
    one.model = prime_model();
    one.type = "adamw";
    one.precision.parameters = type;
    Case whole = one;
    whole.options.micro_batches = world_size;
    const Outcome expected = run_case(whole, plain_config(directory.path(), Tier::host, Timing::after_backward), {});
    EXPECT_EQ(expected.values.size(), static_cast<std::size_t>(kPrimeElements));
    const double by_hand = first_norm(world_size);
    EXPECT_NEAR(expected.norms[0], by_hand, (type == DataType::fp32 ? 1e-6 : 1e-3) * by_hand);
    for (int stage = 0; stage <= 3; ++stage) {
      SCOPED_TRACE("world size " + std::to_string(world_size) + ", stage " + std::to_string(stage));
      Config config = plain_config(directory.path(), Tier::nvme, Timing::just_in_time);
      config.zero_stage = stage;
      for (const Outcome& outcome : run_ranks(world_size, one, config)) {
        ASSERT_EQ(outcome.values.size(), expected.values.size());
        EXPECT_EQ(std::memcmp(outcome.values.data(), expected.values.data(), 4 * expected.values.size()), 0);
        EXPECT_EQ(outcome.parameters, kPrimeElements);
        // The shards' sums are added in another order.
        for (std::size_t step = 0; step < expected.norms.size(); ++step)
          EXPECT_NEAR(outcome.norms[step], expected.norms[step], 1e-12 * expected.norms[step]);
      }
    }
  }
}

TEST(RanksTest, ShareTheCoresOfTheirMachine) {
  const TemporaryDirectory directory;
  Config config = plain_config(directory.path(), Tier::host, Timing::just_in_time);
  config.threads.reset();
  const int alone = offload::default_thread_count(offload::discover_topology());
  for (const int ranks : {1, 2, 5}) {
    on_ranks(ranks, [&](int, const std::shared_ptr<Communicator>& communicator) {
      EngineEnvironment environment;
      environment.communicator = communicator;
      Engine engine(config, environment);
      engine.add_unit("u", {{"w", {64}}});
      engine.commit();
      EXPECT_EQ(engine.report().ranks_on_machine, ranks);
      EXPECT_LE(engine.report().threads, std::max(1, alone / ranks + (alone % ranks != 0 ? 1 : 0)));
      EXPECT_GE(engine.report().threads, std::max(1, alone / ranks));
    });
  }
}

// Each of them would fit alone. Nothing is taken.
TEST(RanksTest, WhoseMemoryTogetherIsMoreThanTheMachineHasAreRefusedWithTheNumbers) {
  const TemporaryDirectory directory;
  const std::uint64_t free = offload::free_memory_bytes(offload::discover_topology());
  constexpr std::int64_t kUnits = 64, kStateBytes = 16;
  const auto elements = static_cast<std::int64_t>(free / 10 * 14) / kStateBytes / kUnits;
  Config config = plain_config(directory.path(), Tier::host, Timing::just_in_time);
  config.budget.host_bytes = free;
  config.budget.device_bytes = 16 * static_cast<std::uint64_t>(elements);
  std::string text;
  try {
    on_ranks(2, [&](int, const std::shared_ptr<Communicator>& communicator) {
      EngineEnvironment environment;
      environment.communicator = communicator;
      Engine engine(config, environment);
      for (std::int64_t u = 0; u < kUnits; ++u) engine.add_unit("u" + std::to_string(u), {{"w", {elements}}});
      engine.commit();
    });
  } catch (const PlanError& error) {
    text = error.what();
  }
  for (const char* const part : {"the 2 ranks on ", " of memory together (this one ", " are free", "per rank"})
    EXPECT_NE(text.find(part), std::string::npos) << text;
}

// One unit of every kind of state, large enough that padding to shards is small.
Case wide_case() {
  Case c;
  for (int u = 0; u < 4; ++u) c.model.push_back({"u" + std::to_string(u), {{"w", {300, 1024}}}, true});
  c.type = "adamw";
  return c;
}

std::uint64_t bytes_named(const std::vector<MemoryRange>& ranges, const std::string& name) {
  std::uint64_t bytes = 0;
  for (const MemoryRange& range : ranges) bytes += range.name == name ? range.bytes : 0;
  return bytes;
}

TEST(RanksTest, MemoryAndTrafficOfARankAreThoseOfZero) {
  const Watchdog watchdog(200);
  const TemporaryDirectory directory;
  constexpr double kParameters = 4 * 300 * 1024;
  for (int world_size : {2, 4}) {
    for (int stage = 0; stage <= 3; ++stage) {
      SCOPED_TRACE("world size " + std::to_string(world_size) + ", stage " + std::to_string(stage));
      Config config = plain_config(directory.path(), Tier::device, Timing::after_backward);
      config.zero_stage = stage;
      // Room for one unit and its gradients: what is gathered for forward is gathered again for backward.
      config.placement.parameters = Tier::host;
      config.budget.device_bytes = std::uint64_t{2} << 20;
      if (stage < 3) config.budget.device_bytes = std::uint64_t{64} << 20;
      config.placement.optimizer = config.placement.gradients = Tier::host;
      on_ranks(world_size, [&](int, const std::shared_ptr<Communicator>& communicator) {
        EngineEnvironment environment;
        environment.communicator = communicator;
        Engine engine(config, environment);
        testing::SyntheticTrainer trainer(engine, wide_case().model, {});
        engine.commit();
        trainer.initialize();
        trainer.step();
        // At rest, with all that is fetched ahead of the next step.
        const auto resting = [&] {
          engine.stream().synchronize();
          communicator->barrier();
          while (!engine.report().at_rest) std::this_thread::sleep_for(std::chrono::milliseconds(1));
          communicator->barrier();
          return engine.report();
        };
        const Report before = resting();
        trainer.step();
        trainer.step();
        const Report after = resting();
        const double shard = stage == 0 ? kParameters : kParameters / world_size;
        // Remainder and two moments; gradients in fp32. (Stages 1 and 2 are the same here: a gradient is reduced as
        // soon as its unit has it.)
        EXPECT_NEAR(static_cast<double>(bytes_named(after.host_memory, "resident optimizer states")), 10 * shard,
                    0.02 * 10 * shard);
        EXPECT_NEAR(static_cast<double>(bytes_named(after.host_memory, "gradients")), 4 * shard, 0.02 * 4 * shard);
        const double parameters = static_cast<double>(bytes_named(stage == 3 ? after.host_memory : after.device_memory,
                                                                  stage == 3 ? "resident parameters" : "parameters"));
        const double expected_parameters = stage == 3 ? 2 * kParameters / world_size : 2 * kParameters;
        EXPECT_NEAR(parameters, expected_parameters, 0.02 * expected_parameters);
        // That is all: beside the states only what passes through, and the plan's peak is their sum.
        const auto sum = [](const std::vector<MemoryRange>& ranges) {
          std::uint64_t bytes = 0;
          for (const MemoryRange& range : ranges) bytes += range.bytes;
          return bytes;
        };
        const std::uint64_t buffers =
            bytes_named(after.host_memory, "fetch slots") + bytes_named(after.host_memory, "update slots") +
            bytes_named(after.host_memory, "gradient slots") + bytes_named(after.device_memory, "window of open units");
        const double states = expected_parameters + 14 * shard;
        EXPECT_NEAR(static_cast<double>(after.peak_host_bytes + after.peak_device_bytes - buffers), states,
                    0.02 * states);
        EXPECT_NEAR(static_cast<double>(sum(after.host_memory)), static_cast<double>(after.peak_host_bytes), 4096);
        EXPECT_EQ(sum(after.device_memory), after.peak_device_bytes);
        // Received per step, times world_size / (world_size - 1): a reduction of fp32 gradients (stage 0: and their
        // gathering), and bf16 parameters once after the update (stages 1, 2) or for forward and for backward (stage 3;
        // the last unit's stay for backward).
        const std::size_t lane = static_cast<std::size_t>(Lane::collective);
        const double received =
            static_cast<double>(after.lanes[lane].bytes - before.lanes[lane].bytes) / 2 * world_size / (world_size - 1);
        const double expected = stage == 0  ? 8 * kParameters
                                : stage < 3 ? 6 * kParameters
                                            : (4 + 2 + 1.5) * kParameters;
        EXPECT_NEAR(received, expected, 0.02 * expected);
      });
    }
  }
}

TEST(RanksTest, ARankWhoseDriveFailsEndsTheOthersWithItsReason) {
  const Watchdog watchdog(100);
  const TemporaryDirectory directory;
  for (int stage : {0, 1, 3}) {
    Config config = plain_config(directory.path(), Tier::nvme, Timing::just_in_time);
    config.zero_stage = stage;
    std::vector<std::string> texts(3);
    on_ranks(3, [&](int rank, const std::shared_ptr<Communicator>& communicator) {
      auto hooks = std::make_shared<engine::TestHooks>();
      if (rank == 1) {
        hooks->storage_factory = [&](io::Backend backend, const io::StorageOptions& options, const std::string&) {
          io::OpenedStorage opened = io::open_storage(backend, options);
          opened.storage = std::make_unique<io::testing::FaultyStorage>(
              std::move(opened.storage), io::testing::Faults{.seed = 5, .errors_per_mille = 20}, options.wake);
          return opened;
        };
      }
      EngineEnvironment environment;
      environment.communicator = communicator;
      environment.test_hooks = hooks;
      try {
        Engine engine(config, environment);
        testing::SyntheticTrainer trainer(engine, testing::small_model(), {});
        engine.commit();
        trainer.initialize();
        for (int step = 0; step < 200; ++step) trainer.step();
      } catch (const Error& error) {
        texts[static_cast<std::size_t>(rank)] = error.what();
      }
    });
    EXPECT_NE(texts[1].find("failed"), std::string::npos) << texts[1];
    for (std::size_t rank : {0u, 2u}) {
      EXPECT_NE(texts[rank].find("rank 1"), std::string::npos) << texts[rank];
    }
  }
}

TEST(RanksTest, ShardGroupsHoldCopiesOfOneAnother) {
  const Watchdog watchdog(200);
  const TemporaryDirectory directory;
  Case one = plain_case();
  one.options.micro_batches = 4;
  const Outcome expected = run_case(one, plain_config(directory.path(), Tier::device, Timing::after_backward), {});
  for (int group : {1, 2, 4}) {
    std::vector<Outcome> first;
    for (int stage : {1, 2, 3}) {
      for (Timing timing : {Timing::just_in_time, Timing::eager}) {
        SCOPED_TRACE("groups of " + std::to_string(group) + ", stage " + std::to_string(stage));
        Config config = plain_config(directory.path(), Tier::nvme, timing);
        config.zero_stage = stage;
        config.communication.shard_group_size = group;
        const std::vector<Outcome> outcomes = run_ranks(4, plain_case(), config);
        if (first.empty()) first = outcomes;
        for (std::size_t rank = 0; rank < 4; ++rank) {
          expect_same(outcomes[rank], first[0]);
          // Sums in another order than one rank's, but for groups of one and of all.
          for (std::size_t i = 0; i < expected.values.size(); ++i)
            ASSERT_NEAR(outcomes[rank].values[i], expected.values[i], 1e-5);
        }
      }
    }
  }
  Config config = plain_config(directory.path(), Tier::host, Timing::just_in_time);
  config.communication.shard_group_size = 3;
  EXPECT_THROW(run_ranks(4, plain_case(), config), ConfigError);
}

class RanksMatrixTest : public ::testing::TestWithParam<int> {};

TEST_P(RanksMatrixTest, EveryStagePlacementAndTimingGivesTheSame) {
  const auto seed = static_cast<std::uint64_t>(GetParam());
  SCOPED_TRACE("repeat with --gtest_filter=*EveryStagePlacementAndTimingGivesTheSame/" + std::to_string(seed - 1));
  const Watchdog watchdog(300);
  Case c = make_case(seed);
  base::Random random(seed * 77);
  const int world_size = static_cast<int>(2 + random.below(3));
  const TemporaryDirectory directory;
  Config plain = plain_config(directory.path(), Tier::device, Timing::after_backward);
  plain.zero_stage = 0;
  const std::vector<Outcome> expected = run_ranks(world_size, c, plain);
  for (Timing timing : {Timing::after_backward, Timing::just_in_time, Timing::eager}) {
    if (timing == Timing::eager && (c.clip || c.options.absent)) continue;
    for (int stage = 0; stage <= 3; ++stage) {
      Config config = plain_config(directory.path(), Tier::nvme, timing);
      config.zero_stage = stage;
      config.placement.parameters = static_cast<Tier>(random.below(3));
      config.placement.optimizer = static_cast<Tier>(random.below(3));
      config.placement.gradients = static_cast<Tier>(random.below(3));
      config.placement.automatic = random.below(4) == 0;
      config.budget.host_bytes = (std::uint64_t{8} << 20) + random.below(std::uint64_t{32} << 20);
      config.threads = static_cast<int>(1 + random.below(2));
      SCOPED_TRACE(std::string(to_string(timing)) + ", stage " + std::to_string(stage) + ", " +
                   std::to_string(world_size) + " ranks");
      auto hooks = std::make_shared<engine::TestHooks>();
      if (seed % 2 == 0) hooks->memory_fill = 0xFF;  // NaN, until something is put there
      if (random.below(2) == 0) {
        hooks->before_copy = [seed](std::string_view stream, std::size_t bytes) {
          std::this_thread::sleep_for(std::chrono::microseconds(
              base::mix(seed ^ bytes ^ stream.size() ^ reinterpret_cast<std::uintptr_t>(&stream)) % 300));
        };
      }
      const std::vector<Outcome> outcomes = run_ranks(world_size, c, config, hooks);
      for (std::size_t rank = 0; rank < outcomes.size(); ++rank) {
        SCOPED_TRACE("rank " + std::to_string(rank));
        expect_same(outcomes[rank], expected[rank]);
      }
    }
  }
}

INSTANTIATE_TEST_SUITE_P(Seeds, RanksMatrixTest, ::testing::Range(1, 17));

}  // namespace
}  // namespace ballast
