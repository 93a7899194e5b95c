// Ranks on CUDA devices with NCCL between them, over the stand-in: the numbers of ranks on host devices with threads
// between them, bit for bit, at every stage; with small calls over a control communicator, and over NCCL alone.
// SPDX-License-Identifier: Apache-2.0
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "support/standin_support.h"

namespace ballast {
namespace {

using testing::Case;
using testing::gpu_rank;
using testing::make_case;
using testing::number_from;
using testing::of_rank;
using testing::on_device;
using testing::on_ranks;
using testing::Outcome;
using testing::plain_config;
using testing::run_case;
using testing::TemporaryDirectory;
using testing::Watchdog;

// Unit 1 is then over halves of the ranks.
void group(Case& c, const std::shared_ptr<Communicator>& world) {
  c.model[1].options.communicator = world->split(world->rank() < world->world_size() / 2);
}

std::vector<Outcome> run_on_hosts(int world_size, const Case& c, const Config& config, bool grouped = false) {
  std::vector<Outcome> outcomes(static_cast<std::size_t>(world_size));
  on_ranks(world_size, [&](int rank, const std::shared_ptr<Communicator>& communicator) {
    EngineEnvironment environment;
    environment.communicator = communicator;
    Case mine = of_rank(c, rank, world_size);
    if (grouped) group(mine, communicator);
    outcomes[static_cast<std::size_t>(rank)] = run_case(mine, config, environment);
  });
  return outcomes;
}

std::vector<Outcome> run_on_gpus(int world_size, const Case& c, const Config& config, bool with_control,
                                 std::uint64_t timing_seed, bool grouped = false) {
  standin::reset();
  standin::configure({.devices = world_size, .timing_seed = timing_seed});
  const std::vector<std::byte> id = make_nccl_id();
  std::vector<Outcome> outcomes(static_cast<std::size_t>(world_size));
  on_ranks(world_size, [&](int rank, const std::shared_ptr<Communicator>& communicator) {
    Case mine = of_rank(c, rank, world_size);
    on_device(mine.options);
    const EngineEnvironment environment =
        gpu_rank(rank, world_size, id, with_control ? communicator : nullptr, std::chrono::seconds(20));
    if (grouped) group(mine, environment.communicator);
    outcomes[static_cast<std::size_t>(rank)] = run_case(mine, config, environment);
    EXPECT_EQ(cudaGetLastError(), cudaSuccess) << "left for the trainer to find";
  });
  EXPECT_EQ(standin::live().total(), 0U) << to_string(standin::live());
  return outcomes;
}

TEST(StandInRanks, EveryStageGivesTheNumbersOfHostRanks) {
  const Watchdog watchdog(300);
  const TemporaryDirectory directory;
  Case c;
  c.model = testing::small_model(3);
  c.type = "adamw";
  for (const int world_size : {2, 4}) {
    for (int stage = 0; stage <= 3; ++stage) {
      for (const Tier tier : {Tier::device, Tier::host}) {
        Config config = plain_config(directory.path(), tier, Timing::just_in_time);
        config.zero_stage = stage;
        if (stage < 3) config.placement.parameters = Tier::device;
        const std::vector<Outcome> expected = run_on_hosts(world_size, c, config);
        const bool with_control = (stage + world_size / 2) % 2 == 0;
        SCOPED_TRACE("world size " + std::to_string(world_size) + ", stage " + std::to_string(stage) + ", tier " +
                     std::string(to_string(tier)) + (with_control ? ", with" : ", without") + " control");
        const std::vector<Outcome> found = run_on_gpus(world_size, c, config, with_control, 0);
        for (std::size_t r = 0; r < found.size(); ++r) {
          EXPECT_EQ(found[r].losses, expected[r].losses);
          EXPECT_EQ(found[r].norms, expected[r].norms);
          EXPECT_EQ(found[r].values, expected[r].values);
        }
      }
    }
  }
}

TEST(StandInRanks, AUnitOverHalvesOfTheRanksHasTheNumbersOfHostRanks) {
  const Watchdog watchdog(300);
  const TemporaryDirectory directory;
  Case c;
  c.model = testing::small_model(3);
  c.type = "adamw";
  c.clip = true;
  for (int stage : {0, 1, 3}) {
    Config config = plain_config(directory.path(), Tier::host, Timing::just_in_time);
    config.zero_stage = stage;
    const std::vector<Outcome> expected = run_on_hosts(4, c, config, true);
    for (const bool with_control : {false, true}) {
      SCOPED_TRACE("stage " + std::to_string(stage) + (with_control ? ", with" : ", without") + " control");
      const std::vector<Outcome> found =
          run_on_gpus(4, c, config, with_control, static_cast<std::uint64_t>(stage), true);
      for (std::size_t r = 0; r < found.size(); ++r) {
        EXPECT_EQ(found[r].norms, expected[r].norms);
        EXPECT_EQ(found[r].values, expected[r].values);
      }
    }
  }
}

// BALLAST_STANDIN_SEEDS sets how many; a seed is the test's only input: model, stage, placement, timing, streams.
TEST(StandInRanks, RandomModelsInRandomStreamTimingsEqualHostRanks) {
  const std::uint64_t seeds = number_from("BALLAST_STANDIN_SEEDS", 6);
  const std::uint64_t begin = number_from("BALLAST_STANDIN_FIRST_SEED", 1);
  const TemporaryDirectory directory;
  for (std::uint64_t seed = begin; seed < begin + seeds; ++seed) {
    SCOPED_TRACE("repeat with BALLAST_STANDIN_FIRST_SEED=" + std::to_string(seed) + " BALLAST_STANDIN_SEEDS=1");
    const Watchdog watchdog(200);
    const Case c = make_case(seed);
    base::Random random(seed * 53);
    auto timing = static_cast<Timing>(1 + random.below(3));
    if (timing == Timing::eager && (c.clip || c.options.absent)) timing = Timing::just_in_time;
    Config config = plain_config(directory.path(), Tier::nvme, timing);
    config.zero_stage = static_cast<int>(random.below(4));
    config.placement.parameters = config.zero_stage < 3 ? Tier::device : static_cast<Tier>(random.below(3));
    config.placement.optimizer = static_cast<Tier>(random.below(3));
    config.placement.gradients = static_cast<Tier>(random.below(3));
    config.placement.automatic = random.below(4) == 0;
    Config plain = plain_config(directory.path(), Tier::device, Timing::after_backward);
    plain.zero_stage = 0;
    const std::vector<Outcome> expected = run_on_hosts(4, c, plain);
    const std::vector<Outcome> found = run_on_gpus(4, c, config, random.below(2) == 0, seed);
    for (std::size_t r = 0; r < found.size(); ++r) {
      SCOPED_TRACE("rank " + std::to_string(r));
      EXPECT_EQ(found[r].losses, expected[r].losses);
      EXPECT_EQ(found[r].norms, expected[r].norms);
      ASSERT_EQ(found[r].values.size(), expected[r].values.size());
      EXPECT_EQ(std::memcmp(found[r].values.data(), expected[r].values.data(), 4 * found[r].values.size()), 0);
    }
    if (HasFailure()) return;
  }
}

TEST(StandInRanks, AFailureOfNcclEndsEveryRankWithItsError) {
  const TemporaryDirectory directory;
  Case c;
  c.model = testing::small_model(2);
  c.type = "adamw";
  const Config config = plain_config(directory.path(), Tier::host, Timing::just_in_time);
  for (const char* function : {"ncclAllGather", "ncclReduceScatter", "ncclCommGetAsyncError"}) {
    SCOPED_TRACE(function);
    const Watchdog watchdog(100);
    standin::reset();
    standin::configure({.devices = 2});
    const std::vector<std::byte> id = make_nccl_id();
    std::array<std::string, 2> texts;
    on_ranks(2, [&](int rank, const std::shared_ptr<Communicator>& communicator) {
      try {
        const EngineEnvironment environment = gpu_rank(rank, 2, id, communicator, std::chrono::seconds(5));
        if (rank == 0) standin::fail(function, 4, cudaErrorUnknown);
        Case mine = of_rank(c, rank, 2);
        on_device(mine.options);
        for (int round = 0; round < 100; ++round) run_case(mine, config, environment);
      } catch (const Error& error) {
        texts[static_cast<std::size_t>(rank)] = error.what();
      }
    });
    for (const std::string& text : texts) EXPECT_THAT(text, ::testing::HasSubstr("system error (2)"));
    EXPECT_EQ(standin::live().total(), 0U) << to_string(standin::live());
  }
}

}  // namespace
}  // namespace ballast
