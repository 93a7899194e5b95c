// Several ranks in one process. The same numbers at every stage, placement and timing at one world size; and those of
// one rank that takes all ranks' micro-batches, where the order of adding is the same.
// SPDX-License-Identifier: Apache-2.0
#include <ballast/communicators/in_process.h>
#include <gtest/gtest.h>

#include <chrono>
#include <mutex>
#include <thread>

#include "executor.h"
#include "support/random_case.h"

namespace ballast {
namespace {

using testing::Case;
using testing::make_case;
using testing::Outcome;
using testing::plain_config;
using testing::run_case;
using testing::TemporaryDirectory;
using testing::Watchdog;

// Runs `work` on every rank; rethrows the first exception.
template <class Work>
void on_ranks(int world_size, const Work& work) {
  const auto communicators = make_in_process_communicators(world_size, {.timeout = std::chrono::seconds(20)});
  std::mutex mutex;
  std::exception_ptr first;
  std::vector<std::thread> threads;
  for (int rank = 0; rank < world_size; ++rank) {
    threads.emplace_back([&, rank] {
      try {
        work(rank, communicators[static_cast<std::size_t>(rank)]);
      } catch (...) {
        {
          const std::lock_guard<std::mutex> lock(mutex);
          if (!first) first = std::current_exception();
        }
        communicators[static_cast<std::size_t>(rank)]->abort("a test rank has thrown");
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  if (first) std::rethrow_exception(first);
}

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
      config.placement.gradients = static_cast<Tier>(random.below(2));
      config.placement.automatic = random.below(4) == 0;
      config.budget.host_bytes = (std::uint64_t{8} << 20) + random.below(std::uint64_t{32} << 20);
      config.threads = static_cast<int>(1 + random.below(2));
      SCOPED_TRACE(std::string(to_string(timing)) + ", stage " + std::to_string(stage) + ", " +
                   std::to_string(world_size) + " ranks");
      auto hooks = std::make_shared<engine::TestHooks>();
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
