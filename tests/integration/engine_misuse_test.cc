// What trainers do that they should not, or seldom do: late and double commits, scopes that outlive others, another
// working directory, forks, a commit that is tried again, very many names.
// SPDX-License-Identifier: Apache-2.0
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <cmath>
#include <filesystem>
#include <memory>
#include <stdexcept>

#include "executor.h"
#include "support/engine_support.h"

namespace ballast {
namespace {

using testing::small_model;
using testing::SyntheticTrainer;
using testing::TemporaryDirectory;

Config nvme_config(const std::string& path, Timing timing) {
  Config config = testing::plain_config(path, Tier::nvme, timing);
  config.budget.device_bytes = std::uint64_t{16} << 20;
  config.budget.host_bytes = std::uint64_t{4} << 20;
  return config;
}

// Ctrl-C while memory is filled: commit() is left at once, and has taken nothing.
TEST(UsageTest, AnInterruptLeavesCommitWhichMayBeTriedAgain) {
  const TemporaryDirectory directory;
  for (int which = 0; which < 2; ++which) {  // while the host's memory is filled, while the device's is
    int calls = 0;
    EngineEnvironment environment;
    environment.check_interrupt = [&] {
      if (calls++ == which) throw std::runtime_error("interrupted");
    };
    Engine engine(nvme_config(directory.path(), Timing::just_in_time), environment);
    SyntheticTrainer trainer(engine, small_model());
    EXPECT_THROW(engine.commit(), std::runtime_error);
    EXPECT_EQ(calls, which + 1);
    engine.commit();
    trainer.initialize();
    trainer.step();
    EXPECT_TRUE(std::isfinite(trainer.last_norm().value));
  }
}

TEST(UsageTest, EnginesThatAreGoneEmptyFunctionsAndUnknownGroupsAreErrors) {
  const TemporaryDirectory directory;
  Engine first(nvme_config(directory.path(), Timing::just_in_time));
  Engine engine(std::move(first));
  EXPECT_THROW(first.settle(), UsageError);  // NOLINT(bugprone-use-after-move)
  EXPECT_THROW(static_cast<void>(first.report()), UsageError);
  SyntheticTrainer trainer(engine, small_model());
  engine.commit();
  EXPECT_THROW(engine.initialize({}), UsageError);
  trainer.initialize();
  StepOptions options;
  options.group_rates = {{17, 0.1, {}}};
  EXPECT_THROW(engine.begin_step(options), UsageError);
  trainer.step();
}

TEST(UsageTest, GradientsBelongToThePassTheyWereOpenedIn) {
  for (const Timing timing : {Timing::eager, Timing::just_in_time, Timing::after_backward}) {
    SCOPED_TRACE(to_string(timing));
    const TemporaryDirectory directory;
    Engine engine(nvme_config(directory.path(), timing));
    SyntheticTrainer trainer(engine, small_model());
    engine.commit();
    trainer.initialize();
    const std::vector<float> before = trainer.values();
    Stream stream = engine.stream();
    for (int late = 0; late < 4; ++late) {  // by one call more each time
      GradientLease gradients;
      {
        auto step = engine.begin_step();
        auto pass = step.begin_pass();
        gradients = engine.gradients(trainer.ids()[0], stream);
        pass.end();
        if (late == 0) {
          EXPECT_THROW(gradients.commit(stream), UsageError);
        }
        EXPECT_EQ(step.finish_backward().value, 0);
        if (late == 1) {
          EXPECT_THROW(gradients.commit(stream), UsageError);
        }
        step.update();
      }
      if (late == 2) {
        EXPECT_THROW(gradients.commit(stream), UsageError);
      }
      if (late < 3) continue;
      auto step = engine.begin_step();
      auto pass = step.begin_pass();
      EXPECT_THROW(gradients.commit(stream), UsageError);
      pass.end();
      EXPECT_EQ(step.finish_backward().value, 0);
      step.update();
    }
    EXPECT_EQ(trainer.values(), before);
    trainer.step();
  }
}

// Two uses are a sum where all but the last say that more will come; else refused, whatever the timing.
TEST(UsageTest, ASecondLastContributionOfAPassIsRefusedAndPartialOnesAreSummed) {
  for (const Timing timing : {Timing::eager, Timing::just_in_time, Timing::after_backward}) {
    SCOPED_TRACE(to_string(timing));
    const TemporaryDirectory directory;
    Engine engine(nvme_config(directory.path(), timing));
    SyntheticTrainer trainer(engine, small_model(1), {.tied = true});
    engine.commit();
    trainer.initialize();
    Stream stream = engine.stream();
    const auto fill = [&](const GradientLease& lease) {
      for (std::uint32_t p = 0; p < 3; ++p) {
        stream.enqueue([out = lease[{0, p}]] {
          std::fill_n(static_cast<float*>(out.data), out.elements, 0.0f);
          *static_cast<float*>(out.data) = 0.5f;
        });
      }
    };
    for (const bool partial : {true, false}) {
      auto step = engine.begin_step();
      auto pass = step.begin_pass();
      auto first_use = engine.acquire(trainer.ids()[0], stream), second_use = engine.acquire(trainer.ids()[0], stream);
      auto one = engine.gradients(trainer.ids()[0], stream), two = engine.gradients(trainer.ids()[0], stream);
      fill(one);
      fill(two);
      if (partial) {
        one.commit_partial(stream);
        two.commit(stream);
      } else {
        one.commit(stream);
        EXPECT_THAT(testing::text_of<UsageError>([&] { two.commit(stream); }),
                    ::testing::AllOf(::testing::HasSubstr("unit u.0"), ::testing::HasSubstr("commit_partial")));
        EXPECT_THROW(engine.gradients(trainer.ids()[0], stream), UsageError);
      }
      first_use.release();
      second_use.release();
      pass.end();
      EXPECT_EQ(step.finish_backward().value, (partial ? 1 : 0.5) * std::sqrt(3.0));
      step.update();
    }
    EXPECT_EQ(engine.step_count({0, 0}), 2u);
  }
}

// Room for two units, and five of them: what is held stays, whatever else comes and goes.
TEST(UsageTest, LeasesAreCountedUnderPressureAndWrongReleasesAreErrors) {
  for (const Timing timing : {Timing::eager, Timing::just_in_time, Timing::after_backward}) {
    SCOPED_TRACE(to_string(timing));
    const TemporaryDirectory directory;
    Config config = nvme_config(directory.path(), timing);
    config.budget.device_bytes = 100 << 10;  // gradients of a unit are 32 KiB, parameters 16 KiB
    Engine engine(config);
    std::vector<UnitId> units;
    for (int u = 0; u < 5; ++u) units.push_back(engine.add_unit("u" + std::to_string(u), {{"w", {8192}}}));
    engine.commit();
    engine.initialize([](ParameterId id, std::int64_t, std::span<float> values) {
      std::fill(values.begin(), values.end(), static_cast<float>(id.unit + 1));
    });
    Stream stream = engine.stream();
    const auto all_are = [&](const ParameterLease& lease, std::uint32_t unit) {
      const Tensor tensor = lease[{unit, 0}];
      const auto* const bits = static_cast<const std::uint16_t*>(tensor.data);
      return std::all_of(bits, bits + tensor.elements,
                         [&](std::uint16_t each) { return testing::bf16_value(each) == static_cast<float>(unit + 1); });
    };
    EXPECT_THROW(engine.acquire(units[0], stream), UsageError) << "outside a pass";
    for (int round = 0; round < 3; ++round) {
      auto pass = engine.begin_pass({.kind = Pass::evaluate});
      auto first = engine.acquire(units[0], stream), second = engine.acquire(units[0], stream);
      first.wait();
      first.release(stream);
      EXPECT_THROW(first.release(stream), UsageError);
      EXPECT_THROW(static_cast<void>(first[{0, 0}]), UsageError);
      for (int turn = 0; turn < 2; ++turn) {
        for (std::uint32_t u = 1; u < 5; ++u) {
          auto other = engine.acquire(units[u], stream);
          other.wait();
          EXPECT_TRUE(all_are(other, u)) << u;
          EXPECT_TRUE(all_are(second, 0)) << u;
          other.release();
        }
      }
      second.release();
      EXPECT_THROW(second.release(), UsageError);
      EXPECT_THROW(ParameterLease().release(), UsageError);
      EXPECT_THROW(ParameterLease().wait(), UsageError);
      EXPECT_THROW(GradientLease().commit(stream), UsageError);
      EXPECT_THROW(engine.gradients(units[0], stream), UsageError) << "of an evaluation";
    }
  }
}

TEST(UsageTest, APassLeftBehindByItsStepEndsNoOther) {
  const TemporaryDirectory directory;
  Engine engine(nvme_config(directory.path(), Timing::just_in_time));
  SyntheticTrainer trainer(engine, small_model());
  engine.commit();
  trainer.initialize();
  PassScope old;
  {
    auto step = engine.begin_step();
    old = step.begin_pass();
  }
  auto step = engine.begin_step({.micro_batches = INT32_MAX});
  auto pass = step.begin_pass({.micro_batches = INT32_MAX});
  old.end();
  engine.acquire(trainer.ids()[0], engine.stream()).wait();
  pass.end();
  EXPECT_THROW(step.begin_pass({.micro_batches = INT32_MAX}), UsageError);
}

TEST(CommitTest, WhatFailedCanBeTriedAgain) {
  const TemporaryDirectory directory;
  auto hooks = std::make_shared<engine::TestHooks>();
  hooks->storage_factory = [tries = std::make_shared<int>(0)](io::Backend backend, const io::StorageOptions& options,
                                                              const std::string&) {
    if (++*tries == 1) throw IoError("the drive is not there yet");
    return io::open_storage(backend, options);
  };
  EngineEnvironment environment;
  environment.test_hooks = hooks;
  Engine engine(nvme_config(directory.path(), Timing::just_in_time), environment);
  SyntheticTrainer trainer(engine, small_model());
  EXPECT_THROW(engine.commit(), IoError);
  engine.commit();
  int calls = 0;
  EXPECT_THROW(engine.initialize([&](ParameterId, std::int64_t, std::span<float>) {
    if (++calls == 3) throw std::runtime_error("no values");
  }),
               std::runtime_error);
  EXPECT_THROW(engine.begin_step(), UsageError);
  trainer.initialize();
  Engine other(nvme_config(directory.path() + "/other", Timing::just_in_time));
  SyntheticTrainer plain(other, small_model());
  other.commit();
  plain.initialize();
  EXPECT_EQ(trainer.step(), plain.step());
  EXPECT_EQ(trainer.values(), plain.values());
}

// Relative paths mean the directory of the moment of commit.
TEST(DirectoryTest, TheWorkingDirectoryMayChange) {
  const TemporaryDirectory directory;
  const std::filesystem::path before = std::filesystem::current_path();
  std::filesystem::create_directory(directory.path() + "/here");
  std::filesystem::create_directory(directory.path() + "/there");
  std::filesystem::current_path(directory.path() + "/here");
  {
    Config config = nvme_config(directory.path(), Timing::just_in_time);
    config.nvme.paths = {"a/b", "c"};
    Engine engine(config);
    SyntheticTrainer trainer(engine, small_model());
    engine.commit();
    std::filesystem::current_path(directory.path() + "/there");
    trainer.initialize();
    trainer.step();
    for (const std::string& file : engine.report().nvme_files) EXPECT_TRUE(std::filesystem::exists(file)) << file;
  }
  std::filesystem::current_path(before);
  EXPECT_TRUE(std::filesystem::is_empty(directory.path() + "/here"));
  EXPECT_TRUE(std::filesystem::is_empty(directory.path() + "/there"));
}

TEST(ForkTest, AForkedChildCanLetGoOfAnEngineInUse) {
  const TemporaryDirectory directory;
  auto engine = std::make_unique<Engine>(nvme_config(directory.path(), Timing::just_in_time));
  auto trainer = std::make_unique<SyntheticTrainer>(*engine, small_model());
  engine->commit();
  trainer->initialize();
  for (int round = 0; round < 8; ++round) {
    trainer->step();
    auto step = engine->begin_step();
    auto pass = step.begin_pass();
    auto lease = engine->acquire(trainer->ids()[0], engine->stream());
    auto gradients = engine->gradients(trainer->ids()[0], engine->stream());
    const pid_t child = ::fork();
    if (child == 0) {
      ::alarm(20);
      gradients = {};
      lease = {};
      pass.end();
      { const Step gone = std::move(step); }
      engine.reset();
      ::_exit(0);
    }
    int status = -1;
    EXPECT_EQ(::waitpid(child, &status, 0), child);
    EXPECT_EQ(status, 0);
  }
  trainer->step();
  for (const std::string& file : engine->report().nvme_files) EXPECT_TRUE(std::filesystem::exists(file)) << file;
}

// Each name costs the same, however many there are.
TEST(NamesTest, AHundredThousandParametersInOneUnit) {
  const testing::Watchdog watchdog(100);
  const TemporaryDirectory directory;
  Config config = testing::plain_config(directory.path(), Tier::nvme, Timing::just_in_time);
  config.budget.device_bytes = config.budget.host_bytes = std::uint64_t{256} << 20;
  Engine engine(config);
  std::vector<ParameterSpec> parameters;
  for (int i = 0; i < 100'000; ++i) parameters.push_back({"parameter " + std::to_string(i), {i % 3}});
  const UnitId unit = engine.add_unit("unit", parameters);
  for (std::uint32_t i = 0; i < parameters.size(); ++i)
    ASSERT_EQ(engine.parameter(unit, parameters[i].name), (ParameterId{unit.index, i}));
  parameters.push_back(parameters.front());
  EXPECT_THROW(engine.add_unit("other", parameters), UsageError);
  EXPECT_THROW(engine.add_unit("unit", {}), UsageError);
  engine.commit();
  engine.initialize(
      [](ParameterId, std::int64_t, std::span<float> values) { std::fill(values.begin(), values.end(), 1.0f); });
  EXPECT_EQ(testing::read_one(engine, {unit.index, 99'998}, 1), 1.0f);
}

TEST(PlanTest, MoreElementsThanAnyMachineHoldsAreRefusedWithoutCountingThemOut) {
  const testing::Watchdog watchdog(60);
  const TemporaryDirectory directory;
  Engine engine(nvme_config(directory.path(), Timing::eager));
  engine.add_unit("huge", {{"p", {std::int64_t{1} << 60}}});
  EXPECT_THROW(engine.commit(), PlanError);
}

}  // namespace
}  // namespace ballast
