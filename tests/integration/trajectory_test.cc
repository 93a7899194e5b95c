// One trajectory: where states live, when they are updated, what carries the bytes and how many threads work never
// changes a number.
// SPDX-License-Identifier: Apache-2.0
#include <gtest/gtest.h>

#include "support/synthetic_trainer.h"

namespace ballast {
namespace {

using testing::small_model;
using testing::SyntheticOptions;
using testing::SyntheticTrainer;
using testing::TemporaryDirectory;

struct Setting {
  std::string placement = "in-memory";  // in-memory, host, nvme, auto
  Timing timing = Timing::just_in_time;
  std::string backend = "auto";
  int threads = 2;
  std::uint64_t host_bytes = std::uint64_t{64} << 20;
  std::uint64_t device_bytes = std::uint64_t{64} << 20;
  bool clip = false;
};

Config make_config(const Setting& setting, const std::string& path) {
  Config config;
  config.device = "host";
  config.budget.device_bytes = setting.device_bytes;
  config.budget.host_bytes = setting.host_bytes;
  config.nvme.paths = {path + "/nvme"};
  config.nvme.backend = setting.backend;
  config.placement.automatic = setting.placement == "auto";
  const Tier tier = setting.placement == "in-memory" ? Tier::device
                    : setting.placement == "host"    ? Tier::host
                                                     : Tier::nvme;
  config.placement.parameters = tier;
  config.placement.optimizer = tier;
  config.placement.gradients = tier == Tier::device ? Tier::device : Tier::host;
  config.optimizer.timing = setting.timing;
  config.optimizer.learning_rate = 0.01;
  if (!setting.clip) config.optimizer.clip_global_norm.reset();
  if (setting.clip) config.optimizer.clip_global_norm = 0.05;
  config.threads = setting.threads;
  return config;
}

struct Trajectory {
  std::vector<double> losses;
  std::vector<float> values;
  bool operator==(const Trajectory&) const = default;
};

void PrintTo(const Trajectory& trajectory, std::ostream* out) {
  out->precision(17);
  for (double loss : trajectory.losses) *out << loss << ' ';
  double sum = 0;
  for (float value : trajectory.values) sum += value;
  *out << "| " << sum;
}

Trajectory run(const Setting& setting, const SyntheticOptions& options, int steps = 6) {
  const TemporaryDirectory directory;
  EngineEnvironment environment;
  Engine engine(make_config(setting, directory.path()), environment);
  SyntheticTrainer trainer(engine, small_model(), options);
  engine.commit();
  trainer.initialize();
  Trajectory trajectory;
  for (int s = 0; s < steps; ++s) trajectory.losses.push_back(trainer.step());
  trajectory.values = trainer.values();
  return trajectory;
}

class TrajectoryTest : public ::testing::TestWithParam<std::tuple<int, bool, bool>> {};  // micro-batches, tied, clip

TEST_P(TrajectoryTest, IsTheSameInEveryPlacementTimingAndBackEnd) {
  const auto [micro_batches, tied, clip] = GetParam();
  SyntheticOptions options;
  options.micro_batches = micro_batches;
  options.tied = tied;
  Setting reference;
  reference.timing = Timing::after_backward;
  reference.threads = 1;
  reference.clip = clip;
  const Trajectory expected = run(reference, options);
  ASSERT_NE(expected.losses[0], expected.losses[5]);
  for (const char* placement : {"in-memory", "host", "nvme", "auto"}) {
    for (Timing timing : {Timing::after_backward, Timing::just_in_time, Timing::eager}) {
      if (timing == Timing::eager && clip) continue;
      for (const char* backend : {"io_uring", "threads"}) {
        if (backend == std::string("threads") && placement != std::string("nvme")) continue;
        Setting setting = reference;
        setting.placement = placement;
        setting.timing = timing;
        setting.backend = backend;
        setting.threads = 2;
        SCOPED_TRACE(std::string(placement) + " " + std::string(to_string(timing)) + " " + backend);
        EXPECT_EQ(run(setting, options), expected);
      }
    }
  }
}

INSTANTIATE_TEST_SUITE_P(All, TrajectoryTest,
                         ::testing::Combine(::testing::Values(1, 3), ::testing::Bool(), ::testing::Bool()));

// The smallest budgets that the plan allows, found from its own refusal, and up.
TEST(BudgetTest, TheSmallestBudgetThatARefusalNamesWorksAndAPageLessDoesNot) {
  for (Timing timing : {Timing::after_backward, Timing::just_in_time, Timing::eager}) {
    SCOPED_TRACE(to_string(timing));
    Setting setting;
    setting.placement = "nvme";
    setting.timing = timing;
    const SyntheticOptions options;
    const Trajectory expected = run(setting, options);
    for (bool device : {false, true}) {
      Setting small = setting;
      (device ? small.device_bytes : small.host_bytes) = 4096;
      std::string refusal;
      try {
        run(small, options);
      } catch (const PlanError& error) {
        refusal = error.what();
      }
      const std::string key = device ? "smallest budget.device: " : "smallest budget.host: ";
      ASSERT_NE(refusal.find(key), std::string::npos) << refusal;
      const std::uint64_t smallest = std::stoull(refusal.substr(refusal.find(key) + key.size())) * 1024;
      (device ? small.device_bytes : small.host_bytes) = smallest;
      EXPECT_EQ(run(small, options), expected);
      (device ? small.device_bytes : small.host_bytes) = smallest - 4096;
      EXPECT_THROW(run(small, options), PlanError);
      (device ? small.device_bytes : small.host_bytes) = 2 * smallest;
      EXPECT_EQ(run(small, options), expected);
    }
  }
}

TEST(DiscardTest, AStepThatIsNotFiniteIsDiscardedAndNamedAndChangesNothing) {
  SyntheticOptions options;
  options.poison = [](int step) { return step == 2 || step == 3; };
  Setting reference;
  reference.timing = Timing::after_backward;
  const Trajectory expected = run(reference, options);
  EXPECT_EQ(expected.losses[2], expected.losses[3]);
  EXPECT_EQ(expected.losses[3], expected.losses[4]);
  EXPECT_NE(expected.losses[4], expected.losses[5]);
  for (const char* placement : {"host", "nvme"}) {
    for (Timing timing : {Timing::after_backward, Timing::just_in_time}) {
      Setting setting = reference;
      setting.placement = placement;
      setting.timing = timing;
      EXPECT_EQ(run(setting, options), expected) << placement << " " << to_string(timing);
    }
  }
}

TEST(AbsentTest, AbsentGradientsAndEvaluationBetweenStepsAgreeInEveryPlacement) {
  SyntheticOptions options;
  options.micro_batches = 2;
  options.absent = [](int step, int micro, ParameterId id) {
    if (id.unit == 1) return step == 1;  // a whole unit
    return id.index == 1 && (step + micro + static_cast<int>(id.unit)) % 3 == 0;
  };
  options.evaluate_before = [](int step) { return step % 2 == 1; };
  Setting reference;
  reference.timing = Timing::after_backward;
  const Trajectory expected = run(reference, options);
  for (const char* placement : {"in-memory", "host", "nvme"}) {
    for (Timing timing : {Timing::after_backward, Timing::just_in_time, Timing::eager}) {
      Setting setting = reference;
      setting.placement = placement;
      setting.timing = timing;
      EXPECT_EQ(run(setting, options), expected) << placement << " " << to_string(timing);
    }
  }
}

}  // namespace
}  // namespace ballast
