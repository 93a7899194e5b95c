// What fails below the engine reaches the caller as a typed error that names the place, is latched, and never hangs;
// and an engine may end at any moment.
// SPDX-License-Identifier: Apache-2.0
#include <ballast/io/testing/faulty_storage.h>
#include <gtest/gtest.h>

#include <chrono>
#include <string>
#include <thread>

#include "executor.h"
#include "support/synthetic_trainer.h"

namespace ballast {
namespace {

using testing::small_model;
using testing::SyntheticOptions;
using testing::SyntheticTrainer;
using testing::TemporaryDirectory;

Config nvme_config(const std::string& path, Timing timing) {
  Config config;
  config.device = "host";
  config.budget.device_bytes = std::uint64_t{16} << 20;
  config.budget.host_bytes = std::uint64_t{4} << 20;
  config.nvme.paths = {path + "/nvme"};
  config.placement.automatic = false;
  config.optimizer.timing = timing;
  config.optimizer.clip_global_norm.reset();
  config.threads = 2;
  return config;
}

EngineEnvironment with_faults(const io::testing::Faults& faults) {
  auto hooks = std::make_shared<engine::TestHooks>();
  hooks->storage_factory = [faults](io::Backend backend, const io::StorageOptions& options, const std::string&) {
    io::OpenedStorage opened = io::open_storage(backend, options);
    opened.storage = std::make_unique<io::testing::FaultyStorage>(std::move(opened.storage), faults, options.wake);
    return opened;
  };
  EngineEnvironment environment;
  environment.test_hooks = hooks;
  return environment;
}

// Runs until something is thrown; the text of it.
template <class Expected>
std::string first_failure(Engine& engine, SyntheticTrainer& trainer) {
  try {
    trainer.initialize();
    for (int s = 0; s < 200; ++s) trainer.step();
  } catch (const Expected& error) {
    // Latched: every later call says the same.
    EXPECT_THROW(engine.begin_step(), Expected);
    EXPECT_THROW(engine.settle(), Expected);
    return error.what();
  }
  return "";
}

class FailureTest : public ::testing::TestWithParam<Timing> {};

TEST_P(FailureTest, AFailedTransferIsLatchedAndNamesItsFileAndAnEngineBuiltAfterItWorks) {
  for (std::uint64_t seed = 1; seed <= 4; ++seed) {
    SCOPED_TRACE(seed);
    const TemporaryDirectory directory;
    {
      Engine engine(nvme_config(directory.path(), GetParam()),
                    with_faults({.seed = seed, .delay_polls_max = 2, .errors_per_mille = 4}));
      SyntheticTrainer trainer(engine, small_model());
      engine.commit();
      const std::string text = first_failure<IoError>(engine, trainer);
      EXPECT_NE(text.find("ballast-rank0.chunks"), std::string::npos) << text;
      EXPECT_NE(text.find("chunk"), std::string::npos) << text;
    }
    Engine engine(nvme_config(directory.path(), GetParam()));
    SyntheticTrainer trainer(engine, small_model());
    engine.commit();
    trainer.initialize();
    EXPECT_NE(trainer.step(), 0);
  }
}

TEST_P(FailureTest, AFlippedBitIsNeverComputedWith) {
  for (std::uint64_t seed = 1; seed <= 4; ++seed) {
    SCOPED_TRACE(seed);
    const TemporaryDirectory directory;
    Engine engine(nvme_config(directory.path(), GetParam()), with_faults({.seed = seed, .flips_per_mille = 10}));
    SyntheticTrainer trainer(engine, small_model());
    engine.commit();
    const std::string text = first_failure<CorruptionError>(engine, trainer);
    EXPECT_NE(text.find("ballast-rank0.chunks"), std::string::npos) << text;
  }
}

TEST_P(FailureTest, AFlippedBitOfAGradientIsNeverComputedWith) {
  const TemporaryDirectory directory;
  Config config = nvme_config(directory.path(), GetParam());
  config.budget.host_bytes = std::uint64_t{16} << 20;
  config.placement.parameters = config.placement.optimizer = Tier::host;
  config.placement.gradients = Tier::nvme;
  Engine engine(config, with_faults({.seed = 1, .flips_per_mille = 10}));
  SyntheticTrainer trainer(engine, small_model(), {.micro_batches = 2});
  engine.commit();
  const std::string text = first_failure<CorruptionError>(engine, trainer);
  EXPECT_NE(text.find("of gradients of chunk"), std::string::npos) << text;
  EXPECT_NE(text.find("ballast-rank0.chunks"), std::string::npos) << text;
}

TEST_P(FailureTest, LateAndReorderedCompletionsChangeNothing) {
  std::vector<double> expected;
  for (std::uint64_t seed = 0; seed <= 3; ++seed) {
    SCOPED_TRACE(seed);
    const TemporaryDirectory directory;
    EngineEnvironment environment;
    if (seed > 0) {
      environment = with_faults({.seed = seed, .delay_polls_max = 5});
      auto* hooks = static_cast<engine::TestHooks*>(environment.test_hooks.get());
      hooks->before_copy = [seed](std::string_view, std::size_t bytes) {
        std::this_thread::sleep_for(std::chrono::microseconds(base::mix(seed ^ bytes) % 300));
      };
    }
    Engine engine(nvme_config(directory.path(), GetParam()), environment);
    SyntheticTrainer trainer(engine, small_model(6));
    engine.commit();
    trainer.initialize();
    std::vector<double> losses;
    for (int s = 0; s < 6; ++s) losses.push_back(trainer.step());
    if (expected.empty()) expected = losses;
    EXPECT_EQ(losses, expected);
  }
}

INSTANTIATE_TEST_SUITE_P(Timings, FailureTest,
                         ::testing::Values(Timing::just_in_time, Timing::eager, Timing::after_backward),
                         [](const auto& timing) { return std::string(to_string(timing.param)); });

TEST(EndTest, AnEngineEndsAtAnyMomentOfAStep) {
  const TemporaryDirectory directory;
  for (int round = 0; round < 60; ++round) {
    Engine engine(nvme_config(directory.path(), round % 2 == 0 ? Timing::just_in_time : Timing::after_backward));
    SyntheticTrainer trainer(engine, small_model());
    engine.commit();
    trainer.initialize();
    if (round % 3 > 0) trainer.step();
    // Into a step, and away: what is under way is called back, and no memory is touched afterwards.
    auto step = engine.begin_step();
    auto pass = step.begin_pass();
    for (int u = 0; u <= round % 4; ++u) {
      auto lease = engine.acquire(trainer.ids()[static_cast<std::size_t>(u)], engine.stream());
      if (round % 5 == 0) lease.wait();
    }
    std::this_thread::sleep_for(std::chrono::microseconds(base::mix(static_cast<std::uint64_t>(round)) % 2000));
  }
}

TEST(ExceptionTest, WhatATrainersClosureThrowsReachesFinishBackwardAndTheStepIsDiscarded) {
  const TemporaryDirectory directory;
  Engine engine(nvme_config(directory.path(), Timing::just_in_time));
  SyntheticTrainer trainer(engine, small_model());
  engine.commit();
  trainer.initialize();
  const std::vector<float> before = trainer.values();
  {
    auto step = engine.begin_step();
    {
      auto pass = step.begin_pass();
      Stream stream = engine.stream();
      auto lease = engine.acquire(trainer.ids()[0], stream);
      auto gradients = engine.gradients(trainer.ids()[0], stream);
      stream.enqueue([] { throw std::runtime_error("backward failed"); });
      gradients.commit(stream);
    }
    try {
      step.finish_backward();
      FAIL() << "nothing was thrown";
    } catch (const std::runtime_error& error) {
      EXPECT_STREQ(error.what(), "backward failed");
    }
  }
  EXPECT_EQ(trainer.values(), before);
  trainer.step();
  EXPECT_NE(trainer.values(), before);
}

TEST(UsageTest, MisuseIsAnErrorAndTheEngineGoesOn) {
  const TemporaryDirectory directory;
  Engine engine(nvme_config(directory.path(), Timing::just_in_time));
  SyntheticTrainer trainer(engine, small_model());
  EXPECT_THROW(engine.begin_step(), UsageError);
  engine.commit();
  EXPECT_THROW(engine.add_unit("late", {}), UsageError);
  EXPECT_THROW(engine.begin_step(), UsageError) << "before initialize";
  trainer.initialize();
  Stream stream = engine.stream();
  EXPECT_THROW(engine.acquire(trainer.ids()[0], stream), UsageError) << "outside a pass";
  {
    auto step = engine.begin_step();
    EXPECT_THROW(engine.begin_step(), UsageError);
    EXPECT_THROW(step.finish_backward(), UsageError) << "no pass yet";
    EXPECT_THROW(step.update(), UsageError);
    auto pass = step.begin_pass();
    EXPECT_THROW(step.begin_pass(), UsageError);
    auto one = engine.acquire(trainer.ids()[1], stream);
    auto again = engine.acquire(trainer.ids()[1], stream);
    EXPECT_EQ((one[{1, 0}].elements), (again[{1, 0}].elements));
    EXPECT_THROW((one[{0, 0}]), UsageError);
    one.release(stream);
    EXPECT_THROW(one.release(stream), UsageError);
    again.wait();
  }
  trainer.step();
  trainer.step();
}

TEST(HeldTest, MoreUnitsHeldThanFitIsAPlanErrorAndTheEngineGoesOn) {
  const TemporaryDirectory directory;
  Config config = nvme_config(directory.path(), Timing::just_in_time);
  config.budget.device_bytes = 256 * 1024;
  Engine engine(config);
  SyntheticTrainer trainer(engine, small_model(12));
  engine.commit();
  trainer.initialize();
  Stream stream = engine.stream();
  {
    auto pass = engine.begin_pass({.kind = Pass::evaluate});
    std::vector<ParameterLease> held;
    EXPECT_THROW(
        {
          for (UnitId unit : trainer.ids()) held.push_back(engine.acquire(unit, stream));
          for (UnitId unit : trainer.ids()) held.push_back(engine.acquire(unit, stream));
        },
        PlanError);
  }
  const double loss = trainer.step();
  EXPECT_NE(trainer.step(), loss);
}

}  // namespace
}  // namespace ballast
