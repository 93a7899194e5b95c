// Everything at once, by seed: dtypes mixed in units of several chunks, frozen parts, budgets from the smallest up,
// every placement, timing and pass order, delayed copies and drives. Each run equals the plain one (in memory, after
// backward) bit by bit. SPDX-License-Identifier: Apache-2.0
#include <ballast/io/testing/faulty_storage.h>
#include <gtest/gtest.h>

#include <chrono>
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
using testing::smallest;
using testing::TemporaryDirectory;
using testing::Watchdog;

class MatrixTest : public ::testing::TestWithParam<int> {};

TEST_P(MatrixTest, EveryRunEqualsThePlainOne) {
  const auto seed = static_cast<std::uint64_t>(GetParam());
  SCOPED_TRACE("repeat with --gtest_filter=*EveryRunEqualsThePlainOne/" + std::to_string(seed - 1));
  const Watchdog watchdog(200);
  Case c = make_case(seed);
  const TemporaryDirectory directory;
  const Outcome expected = run_case(c, plain_config(directory.path(), Tier::device, Timing::after_backward), {});
  base::Random random(seed * 77);
  for (Timing timing : {Timing::after_backward, Timing::just_in_time, Timing::eager}) {
    if (c.clip && timing == Timing::eager) continue;
    for (int round = 0; round < 3; ++round) {
      Config config = plain_config(directory.path(), Tier::nvme, timing);
      const char* tiers[] = {"nvme", "random", "auto"};
      SCOPED_TRACE(std::string(to_string(timing)) + " " + tiers[round]);
      if (round == 1) {
        config.placement.parameters = static_cast<Tier>(random.below(3));
        config.placement.optimizer = static_cast<Tier>(random.below(3));
        config.placement.gradients = static_cast<Tier>(random.below(3));
      }
      config = smallest(c, config);
      const Config least = config;
      const std::uint64_t more[] = {0, random.below(config.budget.host_bytes), random.below(4) << 20};
      config.budget.host_bytes += more[random.below(3)];
      config.budget.device_bytes += random.below(2) * random.below(config.budget.device_bytes);
      config.placement.automatic = round == 2;
      config.nvme.backend = random.below(2) == 0 ? "threads" : "io_uring";
      config.nvme.block_bytes = std::uint64_t{1} << (14 + random.below(7));
      config.nvme.queue_depth = static_cast<std::uint32_t>(1 + random.below(32));
      config.threads = static_cast<int>(1 + random.below(3));
      EngineEnvironment environment;
      auto hooks = std::make_shared<engine::TestHooks>();
      if (seed % 2 == 0) hooks->memory_fill = 0xFF;  // NaN, until something is put there
      if (random.below(2) == 0) {
        hooks->before_copy = [seed](std::string_view stream, std::size_t bytes) {
          std::this_thread::sleep_for(std::chrono::microseconds(base::mix(seed ^ bytes ^ stream.size()) % 200));
        };
      }
      if (random.below(2) == 0) {
        hooks->storage_factory = [seed](io::Backend backend, const io::StorageOptions& options, const std::string&) {
          io::OpenedStorage opened = io::open_storage(backend, options);
          opened.storage = std::make_unique<io::testing::FaultyStorage>(
              std::move(opened.storage), io::testing::Faults{.seed = seed, .delay_polls_max = 4}, options.wake);
          return opened;
        };
      }
      environment.test_hooks = hooks;
      const Outcome outcome = run_case(c, config, environment);
      EXPECT_EQ(outcome.losses, expected.losses);
      EXPECT_EQ(outcome.norms, expected.norms);
      ASSERT_EQ(outcome.values.size(), expected.values.size());
      EXPECT_EQ(std::memcmp(outcome.values.data(), expected.values.data(), 4 * expected.values.size()), 0);
      if (round < 2) {
        // The smallest budgets are exact.
        config.budget = least.budget;
        config.budget.host_bytes -= std::min<std::uint64_t>(config.budget.host_bytes - 1, 4096);
        if (config.budget.host_bytes > 4096 && least.budget.host_bytes < std::uint64_t{64} << 20) {
          EXPECT_THROW(run_case(c, config, {}), PlanError);
        }
      }
    }
  }
}

INSTANTIATE_TEST_SUITE_P(Seeds, MatrixTest, ::testing::Range(1, 17));

// Units of more than a chunk of the largest size, through few slots.
TEST(LargeUnitTest, UnitsOfSeveralLargeChunksEqualThePlainRun) {
  const Watchdog watchdog(200);
  Case c;
  for (int u = 0; u < 2; ++u) c.model.push_back({"u" + std::to_string(u), {{"w", {1100003}}, {"b", {777}}}, true});
  c.type = "adamw";
  c.options.micro_batches = 2;
  const TemporaryDirectory directory;
  const Outcome expected = run_case(c, plain_config(directory.path(), Tier::device, Timing::after_backward), {});
  for (Timing timing : {Timing::just_in_time, Timing::eager}) {
    Config config = plain_config(directory.path(), Tier::nvme, timing);
    const Config least = smallest(c, config);
    for (std::uint64_t more : {std::uint64_t{0}, std::uint64_t{1} << 20, std::uint64_t{20} << 20}) {
      config.budget = least.budget;
      config.budget.host_bytes += more;
      const Outcome outcome = run_case(c, config, {});
      EXPECT_EQ(outcome.losses, expected.losses) << more;
      EXPECT_EQ(outcome.values, expected.values) << more;
    }
  }
}

}  // namespace
}  // namespace ballast
