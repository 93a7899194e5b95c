// Two halves of a run, each in a configuration of its own, by seed: the same as one whole in the plainest one.
// SPDX-License-Identifier: Apache-2.0
#include <gtest/gtest.h>
#include <linux/magic.h>
#include <sys/statfs.h>
#include <unistd.h>

#include <filesystem>

#include "support/random_case.h"

namespace ballast::testing {
namespace {

// Pairs of everything, by seed: model, dtypes, clipping, accumulation, absent gradients; for each half of the run
// placement, timing, budgets, back end, block size, depth, threads, with and without direct I/O, saved or committed.
TEST(ResumeMatrix, AnyTwoHalvesMakeTheWhole) {
  const Watchdog watchdog(300);
  const TemporaryDirectory directory;
  const std::string path = directory.path();
  struct statfs system = {};
  const bool memory =
      ::access("/dev/shm", W_OK) == 0 && ::statfs("/dev/shm", &system) == 0 && system.f_type == TMPFS_MAGIC;
  const TemporaryDirectory in_memory(memory ? "/dev/shm" : path);
  for (std::uint64_t seed = 101; seed < 107; ++seed) {
    SCOPED_TRACE("seed " + std::to_string(seed));
    Case one = make_case(seed);
    base::Random random(seed * 31);
    const auto configured = [&](const std::string& place) {
      Config config = plain_config(place, static_cast<Tier>(random.below(3)), static_cast<Timing>(1 + random.below(3)));
      config.placement.optimizer = static_cast<Tier>(random.below(3));
      config.placement.gradients = static_cast<Tier>(random.below(3));
      config.budget.device_bytes = config.budget.host_bytes = std::uint64_t{192} << 20;
      config.precision = one.precision;
      config.optimizer.type = one.type;
      config.optimizer.learning_rate = 0.01;
      if (one.clip) {
        config.optimizer.clip_global_norm = 0.05;
        if (config.optimizer.timing == Timing::eager) config.optimizer.timing = Timing::just_in_time;
      }
      config.nvme.backend = random.below(2) == 0 ? "threads" : "auto";
      config.nvme.block_bytes = std::uint64_t{1} << (14 + random.below(7));
      config.nvme.queue_depth = static_cast<std::uint32_t>(1 + random.below(32));
      config.threads = static_cast<int>(1 + random.below(3));
      return config;
    };
    Config plain = configured(path + "/plain");
    plain.placement.parameters = plain.placement.optimizer = plain.placement.gradients = Tier::device;
    plain.optimizer.timing = Timing::after_backward;
    const Outcome whole = [&] {
      Engine engine(plain);
      SyntheticTrainer trainer(engine, one.model, one.options);
      engine.commit();
      trainer.initialize();
      Outcome result;
      for (int s = 0; s < 4; ++s) result.losses.push_back(trainer.step());
      result.values = trainer.values();
      return result;
    }();
    const std::string place = random.below(2) == 0 ? path + "/run" : in_memory.path() + "/run";
    const bool committed = random.below(2) == 0;
    const std::string saves = path + "/saves";
    Config first = configured(place), second = configured(place);
    if (committed) first.durability.every_steps = second.durability.every_steps = 1 + random.below(2);
    std::vector<double> losses;
    for (const bool later : {false, true}) {
      Engine engine(later ? second : first);
      SyntheticTrainer trainer(engine, one.model, one.options);
      engine.commit({later ? ExistingRun::resume : ExistingRun::refuse, committed ? "" : saves});
      if (later) {
        ASSERT_TRUE(trainer.resume());
        ASSERT_EQ(trainer.next_step(), 2);
      } else {
        trainer.initialize();
      }
      while (trainer.next_step() < (later ? 4 : 2)) losses.push_back(trainer.step());
      if (!committed && !later) engine.save_checkpoint(saves + "/step-2");
      engine.settle();
      if (!later) continue;
      const std::vector<float> values = trainer.values();
      ASSERT_EQ(values.size(), whole.values.size());
      EXPECT_EQ(std::memcmp(values.data(), whole.values.data(), values.size() * 4), 0);
    }
    EXPECT_EQ(losses, whole.losses);
    std::filesystem::remove_all(saves);
    std::filesystem::remove_all(place);
  }
}

}  // namespace
}  // namespace ballast::testing
