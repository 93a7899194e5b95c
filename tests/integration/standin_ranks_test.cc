// Ranks on CUDA devices with NCCL between them, over the stand-in: the numbers of ranks on host devices with threads
// between them, bit for bit, at every stage; with small calls over a control communicator, and over NCCL alone.
// SPDX-License-Identifier: Apache-2.0
#include <ballast/communicators/nccl.h>
#include <ballast/cuda/cuda_device.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <standin/standin.h>

#include "support/on_ranks.h"
#include "support/random_case.h"

namespace ballast {
namespace {

using testing::Case;
using testing::on_ranks;
using testing::Outcome;
using testing::plain_config;
using testing::run_case;
using testing::TemporaryDirectory;
using testing::Watchdog;

Case of_rank(Case c, int rank, int world_size) {
  c.options.micro_stride = world_size;
  c.options.micro_offset = rank;
  return c;
}

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
    NcclOptions options;
    options.communicator.timeout = std::chrono::seconds(20);
    if (with_control) options.control = communicator;
    options.device = rank;
    EngineEnvironment environment;
    environment.device = std::shared_ptr<offload::Device>(cuda::make_cuda_device({.device = rank}));
    environment.communicator = make_nccl_communicator(options, rank, world_size, id);
    Case mine = of_rank(c, rank, world_size);
    mine.options.run = [](Stream stream, std::function<void()> work) {
      const auto on = static_cast<cudaStream_t>(stream.native_handle());
      if (standin::launch(on, std::move(work)) != cudaSuccess) throw Error("the trainer's kernel: cudaError");
    };
    mine.options.view = [](void* data) { return standin::host_view(data); };
    if (grouped) group(mine, environment.communicator);
    outcomes[static_cast<std::size_t>(rank)] = run_case(mine, config, environment);
  });
  EXPECT_EQ(standin::live().total(), 0U) << "something was not given back";
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

TEST(StandInRanks, RandomStreamTimingsChangeNothing) {
  const Watchdog watchdog(300);
  const TemporaryDirectory directory;
  Case c;
  c.model = testing::small_model(3);
  c.type = "adamw";
  Config config = plain_config(directory.path(), Tier::host, Timing::just_in_time);
  const std::vector<Outcome> expected = run_on_hosts(3, c, config);
  for (std::uint64_t seed = 1; seed <= 5; ++seed) {
    SCOPED_TRACE("timing seed " + std::to_string(seed));
    const std::vector<Outcome> found = run_on_gpus(3, c, config, seed % 2 == 0, seed);
    for (std::size_t r = 0; r < found.size(); ++r) EXPECT_EQ(found[r].values, expected[r].values);
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
        NcclOptions options;
        options.communicator.timeout = std::chrono::seconds(5);
        options.control = communicator;
        options.device = rank;
        EngineEnvironment environment;
        environment.device = std::shared_ptr<offload::Device>(cuda::make_cuda_device({.device = rank}));
        environment.communicator = make_nccl_communicator(options, rank, 2, id);
        if (rank == 0) standin::fail(function, 4, cudaErrorUnknown);
        Case mine = of_rank(c, rank, 2);
        mine.options.run = [](Stream stream, std::function<void()> work) {
          standin::launch(static_cast<cudaStream_t>(stream.native_handle()), std::move(work));
        };
        mine.options.view = [](void* data) { return standin::host_view(data); };
        for (int round = 0; round < 100; ++round) run_case(mine, config, environment);
      } catch (const Error& error) {
        texts[static_cast<std::size_t>(rank)] = error.what();
      }
    });
    for (const std::string& text : texts) EXPECT_THAT(text, ::testing::HasSubstr("system error (2)"));
    const standin::Live live = standin::live();
    EXPECT_EQ(live.total(), 0U) << live.streams << " streams, " << live.events << " events, " << live.device_allocations
                                << " allocations, " << live.pinned_ranges << " pinned ranges, " << live.communicators
                                << " communicators";
  }
}

}  // namespace
}  // namespace ballast
