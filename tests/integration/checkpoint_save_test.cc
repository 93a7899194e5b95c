// Checkpoints that are saved while training goes on: the same bytes as those saved while it stands still, whatever the
// drive under them does, and the same run beside them.
// SPDX-License-Identifier: Apache-2.0
#include <ballast/base/error.h>
#include <ballast/io/testing/faulty_storage.h>
#include <ballast/io/testing/throttled_storage.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <csignal>
#include <cstdlib>
#include <filesystem>
#include <fstream>

#include "durable/checkpoints.h"
#include "durable/stored_state.h"
#include "executor.h"
#include "support/durable_runs.h"
#include "support/on_ranks.h"

namespace ballast::testing {
namespace {

using engine::StoredState;
using std::chrono::milliseconds;
using ::testing::AllOf;
using ::testing::HasSubstr;

// Everything that is stored in a checkpoint, by parameter.
std::vector<float> contents(const std::string& folder, std::uint64_t step) {
  StoredState state({folder}, step);
  std::vector<float> all;
  for (std::uint32_t u = 0; u < state.layout().units.size(); ++u) {
    const auto& parameters = state.layout().units[u].parameters;
    for (std::uint32_t p = 0; p < parameters.size(); ++p) {
      const std::size_t count = parameters[p].elements;
      const std::size_t at = all.size();
      all.resize(at + 3 * count);
      const std::span<float> out(all.data() + at, 3 * count);
      state.read(u, p, 0, out.first(count), out.subspan(count, count), out.last(count));
    }
  }
  for (const auto& unit : state.manifest().step_counts) all.insert(all.end(), unit.begin(), unit.end());
  return all;
}

// The drive that checkpoints go to.
struct Drive {
  milliseconds latency{0};
  std::atomic<bool> fails{false};
  int failing_rank = -1;

  std::shared_ptr<engine::TestHooks> hooks(int rank = 0) {
    auto hooks = std::make_shared<engine::TestHooks>();
    hooks->checkpoint_storage = [this, rank](io::Backend, const io::StorageOptions& options, const std::string&) {
      io::OpenedStorage opened = io::open_storage(io::Backend::threads, options);
      if (fails && (failing_rank < 0 || failing_rank == rank)) {
        opened.storage = std::make_unique<io::testing::FaultyStorage>(
            std::move(opened.storage), io::testing::Faults{.errors_per_mille = 1000}, options.wake);
      }
      opened.storage = std::make_unique<io::testing::ThrottledStorage>(
          std::move(opened.storage), io::testing::Throttle{.latency = latency}, options.wake);
      return opened;
    };
    return hooks;
  }
};

class CheckpointSaving : public ::testing::Test {
 protected:
  // The same in a process that a test starts over.
  static std::string kept_path(const TemporaryDirectory& directory) {
    const char* given = std::getenv("BALLAST_CHECKPOINT_TEST_PATH");
    return given != nullptr ? given : directory.path();
  }
  std::string saved(const std::string& name, int step) const {
    return path_ + "/" + name + "/step-" + std::to_string(step);
  }

  const Watchdog watchdog_{300};
  const TemporaryDirectory directory_;
  const std::string path_ = kept_path(directory_);
  const std::vector<SyntheticUnit> model_ = small_model(6);
  Drive drive_;  // before the engines
};

constexpr int kSteps = 9;

// Saves after every second step and goes on at once.
struct SavedRun {
  std::vector<double> losses;
  std::vector<float> values;
  std::uint64_t asked_for = 0, from_updates = 0, copied_bytes = 0;
};

SavedRun run_and_save(const Config& config, const std::vector<SyntheticUnit>& model, const std::string& folder,
                      const EngineEnvironment& environment = {}) {
  Engine engine(config, environment);
  SyntheticTrainer trainer(engine, model);
  engine.commit();
  trainer.initialize();
  SavedRun run;
  for (int step = 1; step <= kSteps; ++step) {
    run.losses.push_back(trainer.step());
    if (step % 2 == 0) engine.save_checkpoint(folder + "/step-" + std::to_string(step));
  }
  engine.settle();
  run.values = trainer.values();
  run.asked_for = engine.report().checkpoint_chunks_asked_for;
  run.from_updates = engine.report().checkpoint_chunks_from_updates;
  run.copied_bytes = engine.report().checkpoint_bytes;
  return run;
}

TEST_F(CheckpointSaving, BesideTrainingGivesTheSameAsBetweenStepsAndLeavesTheRunAsItWas) {
  for (const Timing timing : {Timing::eager, Timing::just_in_time, Timing::after_backward}) {
    const std::string still = path_ + "/still-" + std::string(to_string(timing));
    const SavedRun expected = run_and_save(plain_config(path_, Tier::host, timing), model_, still);
    EXPECT_EQ(expected.copied_bytes, 0U);
    for (const Tier tier : {Tier::nvme, Tier::host, Tier::device}) {
      for (const int every : {1, 3}) {
        SCOPED_TRACE(std::string(to_string(timing)) + " " + std::string(to_string(tier)) + " " + std::to_string(every));
        const std::string name = "moving";
        Config config = durable_config(path_, tier, timing);
        config.durability.every_steps = static_cast<std::uint64_t>(every);
        SavedRun seen;
        bool met = false;
        // Several steps long: what falls due has to wait. Longer where the machine is busy and steps are slow.
        for (const int latency_ms : {10, 100, 500}) {
          drive_.latency = milliseconds(latency_ms);
          std::filesystem::remove_all(path_ + "/" + name);
          std::filesystem::remove_all(config.nvme.paths.front());
          seen = run_and_save(config, model_, path_ + "/" + name, {.test_hooks = drive_.hooks()});
          met = seen.from_updates + seen.asked_for > 0;
          if (met || every > 1) break;
        }
        EXPECT_EQ(seen.losses, expected.losses);
        EXPECT_EQ(seen.values, expected.values);
        EXPECT_GT(seen.copied_bytes, 0U);
        EXPECT_TRUE(met || every > 1) << "no update has read a chunk that was not copied yet, or no write has met one";
        EXPECT_TRUE(tier == Tier::nvme || seen.from_updates == 0) << "what updates read is not all of a chunk";
        for (int step = 2; step <= kSteps; step += 2) {
          EXPECT_EQ(contents(saved(name, step), static_cast<std::uint64_t>(step)),
                    contents(still + "/step-" + std::to_string(step), static_cast<std::uint64_t>(step)));
        }
      }
    }
  }
}

// A run whose engine a test holds in its hands.
struct LiveRun {
  LiveRun(const Config& config, const std::vector<SyntheticUnit>& model, EngineEnvironment environment = {})
      : engine(config, std::move(environment)), trainer(engine, model) {
    engine.commit();
    trainer.initialize();
  }
  Engine engine;
  SyntheticTrainer trainer;
};

TEST_F(CheckpointSaving, ReturnsBeforeItIsWrittenAndOneIsFinishedBeforeTheNextBegins) {
  drive_.latency = milliseconds(50);
  LiveRun run(durable_config(path_, Tier::nvme, Timing::just_in_time), model_, {.test_hooks = drive_.hooks()});
  run.trainer.step();
  run.engine.save_checkpoint(saved("s", 1));
  EXPECT_FALSE(std::filesystem::exists(saved("s", 1)));
  run.engine.save_checkpoint(saved("s", 2));  // of the same step, in another folder
  EXPECT_TRUE(std::filesystem::exists(saved("s", 1)));
  EXPECT_FALSE(std::filesystem::exists(saved("s", 2)));
  run.engine.finish_checkpoint();
  EXPECT_EQ(contents(saved("s", 1), 1), contents(saved("s", 2), 1));
  run.engine.finish_checkpoint();  // there is none
  // The newest two stay, also of those that were saved beside training.
  for (int step = 2; step <= 5; ++step) {
    run.trainer.step();
    run.engine.save_checkpoint(saved("k", step), 2);
  }
  run.engine.settle();
  EXPECT_FALSE(std::filesystem::exists(saved("k", 3)));
  EXPECT_EQ(engine::list_checkpoints(path_ + "/k").size(), 2U);
  // What has just been saved is kept, whatever lies beside it.
  std::filesystem::create_directory(saved("k", 90));
  std::filesystem::create_directory(saved("k", 80));
  run.trainer.step();
  run.engine.save_checkpoint(saved("k", 6), 2);
  run.engine.settle();
  EXPECT_TRUE(std::filesystem::exists(saved("k", 6)));
  EXPECT_TRUE(std::filesystem::exists(saved("k", 90)));
  EXPECT_EQ(engine::list_checkpoints(path_ + "/k").size(), 2U);
}

TEST_F(CheckpointSaving, WhatAnotherProgramHasPutThereStays) {
  LiveRun run(durable_config(path_, Tier::nvme, Timing::just_in_time), model_, {.test_hooks = drive_.hooks()});
  const auto weights = [&](int step) { return saved("o", step) + "/weights"; };
  for (const int step : {1, 3, 90}) {
    std::filesystem::create_directories(saved("o", step));
    std::ofstream(weights(step)) << "precious";
  }
  std::ofstream(saved("o", 80)) << "a file";
  run.trainer.step();
  EXPECT_THAT(text_of<IoError>([&] { run.engine.save_checkpoint(saved("o", 1), 1); }),
              AllOf(HasSubstr(saved("o", 1) + " is there and is no checkpoint"), HasSubstr("another folder")));
  for (int step = 4; step <= 6; ++step) {
    run.trainer.step();
    run.engine.save_checkpoint(saved("o", step), 2);
  }
  run.engine.settle();
  EXPECT_EQ(engine::list_checkpoints(path_ + "/o").size(), 2U);
  engine::remove_checkpoints(path_ + "/o");
  EXPECT_TRUE(engine::list_checkpoints(path_ + "/o").empty());
  for (const int step : {1, 3, 90}) EXPECT_TRUE(std::filesystem::exists(weights(step))) << step;
  EXPECT_TRUE(std::filesystem::exists(saved("o", 80)));
}

TEST_F(CheckpointSaving, AFailingDriveHarmsNeitherTheRunNorOlderOnesAndIsToldAtTheNextCall) {
  const SavedRun expected =
      run_and_save(plain_config(path_, Tier::host, Timing::just_in_time), model_, path_ + "/still");
  LiveRun run(durable_config(path_, Tier::nvme, Timing::just_in_time), model_, {.test_hooks = drive_.hooks()});
  std::vector<double> losses;
  const auto step = [&] { losses.push_back(run.trainer.step()); };
  step();
  step();
  run.engine.save_checkpoint(saved("f", 2));
  step();
  step();
  run.engine.finish_checkpoint();
  drive_.fails = true;
  run.engine.save_checkpoint(saved("f", 4));
  step();
  EXPECT_THAT(text_of<IoError>([&] { run.engine.finish_checkpoint(); }),
              AllOf(HasSubstr(saved("f", 4) + " is not written"), HasSubstr("writing"), HasSubstr("failed")));
  run.engine.finish_checkpoint();  // it is told once
  step();
  run.engine.save_checkpoint(saved("f", 6));
  step();
  step();
  // At the next save: that one is not begun.
  EXPECT_THAT(text_of<IoError>([&] { run.engine.save_checkpoint(saved("f", 8)); }), HasSubstr(saved("f", 6)));
  drive_.fails = false;
  run.engine.save_checkpoint(saved("f", 8));
  step();
  run.engine.settle();
  EXPECT_EQ(losses, expected.losses);
  EXPECT_EQ(run.trainer.values(), expected.values);
  std::vector<std::uint64_t> steps;
  for (const auto& [number, folder] : engine::list_checkpoints(path_ + "/f")) {
    steps.push_back(number);
    EXPECT_EQ(contents(folder, number), contents(path_ + "/still/step-" + std::to_string(number), number));
  }
  EXPECT_EQ(steps, (std::vector<std::uint64_t>{8, 2}));
  for (const int gone : {4, 6}) EXPECT_FALSE(std::filesystem::exists(saved("f", gone) + ".new"));
}

TEST_F(CheckpointSaving, AFolderThatGoesAwayIsAnErrorOfThatSave) {
  drive_.latency = milliseconds(500);  // it is not written before the folder goes
  LiveRun run(durable_config(path_, Tier::nvme, Timing::just_in_time), model_, {.test_hooks = drive_.hooks()});
  run.trainer.step();
  run.engine.save_checkpoint(saved("p", 1));
  // As when somebody cleans up.
  std::filesystem::remove_all(saved("p", 1) + ".new");
  std::ofstream(saved("p", 1) + ".new") << "in the way";
  EXPECT_THAT(text_of<IoError>([&] { run.engine.finish_checkpoint(); }), HasSubstr("is not written"));
  drive_.latency = milliseconds(0);
  run.trainer.step();
  run.engine.save_checkpoint(saved("p", 2));
  run.engine.settle();
  EXPECT_NO_THROW(contents(saved("p", 2), 2));
}

TEST_F(CheckpointSaving, DamageInTheHeldStepIsSeenAndNothingIsPutInPlace) {
  LiveRun run(durable_config(path_, Tier::nvme, Timing::just_in_time), model_);
  run.trainer.step();
  run.engine.settle();
  const std::string chunks = run.engine.report().nvme_files.front();
  // The states that the optimizer alone reads: parameters are read ahead meanwhile, and that would end the run.
  engine::StoredLayout layout;
  engine::Manifest manifest;
  engine::ManifestLog(io::make_small_files(std::filesystem::path(chunks).parent_path()), 0).load(1, &layout, &manifest);
  std::fstream file(chunks, std::ios::in | std::ios::out | std::ios::binary);
  for (std::size_t i = 0; i < layout.chunks.size(); ++i) {
    const engine::StoredLayout::Chunk& chunk = layout.chunks[i];
    const auto at = static_cast<std::streamoff>(chunk.offset_bytes + manifest.chunks[i].slot * chunk.slot_bytes +
                                                chunk.parameter_bytes);
    file.seekg(at);
    const int byte = file.get();
    file.seekp(at);
    file.put(static_cast<char>(byte ^ 1));
  }
  file.close();
  ASSERT_TRUE(file.good());
  run.engine.save_checkpoint(saved("d", 1));
  EXPECT_THAT(text_of<CorruptionError>([&] { run.engine.finish_checkpoint(); }),
              AllOf(HasSubstr("is not written"), HasSubstr("of unit u."), HasSubstr(chunks)));
  EXPECT_FALSE(std::filesystem::exists(saved("d", 1)));
  EXPECT_FALSE(std::filesystem::exists(saved("d", 1) + ".new"));
}

TEST_F(CheckpointSaving, TheEnginesEndFinishesItAndAnExceptionGivesItUp) {
  const Config config = durable_config(path_, Tier::nvme, Timing::just_in_time);
  drive_.latency = milliseconds(20);
  {
    LiveRun run(config, model_, {.test_hooks = drive_.hooks()});
    run.trainer.step();
    run.engine.save_checkpoint(saved("e", 1));
  }
  EXPECT_NO_THROW(contents(saved("e", 1), 1));
  std::filesystem::remove_all(config.nvme.paths.front());
  drive_.latency = milliseconds(300);
  try {
    LiveRun run(config, model_, {.test_hooks = drive_.hooks()});
    run.trainer.step();
    run.engine.save_checkpoint(saved("e", 2));
    run.trainer.step();
    throw std::runtime_error("the trainer's own");
  } catch (const std::runtime_error&) {
  }
  EXPECT_EQ(engine::list_checkpoints(path_ + "/e").size(), 1U);
  EXPECT_FALSE(std::filesystem::exists(saved("e", 2)));
  EXPECT_FALSE(std::filesystem::exists(saved("e", 2) + ".new"));
}

// SIGKILL while a checkpoint is being written: older ones are whole, the run goes on, and so does saving.
TEST_F(CheckpointSaving, AKilledProcessLeavesOlderOnesWhole) {
  GTEST_FLAG_SET(death_test_style, "threadsafe");
  ::setenv("BALLAST_CHECKPOINT_TEST_PATH", path_.c_str(), 1);
  const Config config = durable_config(path_, Tier::nvme, Timing::just_in_time);
  EXPECT_EXIT(
      {
        LiveRun run(config, model_, {.test_hooks = drive_.hooks()});
        run.trainer.step();
        run.engine.save_checkpoint(saved("x", 1));
        run.trainer.step();
        run.engine.finish_checkpoint();
        drive_.latency = milliseconds(200);
        run.engine.save_checkpoint(saved("x", 2));
        run.trainer.step();
        while (!std::filesystem::exists(saved("x", 2) + ".new/ballast-rank0.chunks")) ::usleep(1000);
        ::raise(SIGKILL);
      },
      ::testing::KilledBySignal(SIGKILL), "");
  ::unsetenv("BALLAST_CHECKPOINT_TEST_PATH");
  EXPECT_FALSE(std::filesystem::exists(saved("x", 2)));
  EXPECT_TRUE(std::filesystem::exists(saved("x", 2) + ".new"));
  EXPECT_NO_THROW(contents(saved("x", 1), 1));
  const SavedRun expected =
      run_and_save(plain_config(path_ + "/still", Tier::host, Timing::just_in_time), model_, path_ + "/still");
  Engine engine(config);
  SyntheticTrainer trainer(engine, model_);
  engine.commit({.existing = ExistingRun::resume});
  ASSERT_TRUE(trainer.resume());
  EXPECT_GE(trainer.next_step(), 2);
  std::vector<double> losses;
  const auto first = static_cast<std::ptrdiff_t>(trainer.next_step());
  engine.save_checkpoint(saved("x", 2));
  while (trainer.next_step() < kSteps) losses.push_back(trainer.step());
  engine.settle();
  EXPECT_EQ(losses, std::vector<double>(expected.losses.begin() + first, expected.losses.end()));
  EXPECT_NO_THROW(contents(saved("x", 2), static_cast<std::uint64_t>(first)));
  EXPECT_FALSE(std::filesystem::exists(saved("x", 2) + ".new"));
}

TEST_F(CheckpointSaving, SeveralRanksSaveBesideTraining) {
  for (const int stage : {0, 3}) {
    for (const Timing timing : {Timing::eager, Timing::just_in_time}) {
      SCOPED_TRACE(std::to_string(stage) + " " + std::string(to_string(timing)));
      const auto all = [&](const std::string& name, bool durable) {
        std::vector<SavedRun> runs(3);
        std::filesystem::remove_all(path_ + "/" + name);
        on_ranks(3, [&](int rank, const std::shared_ptr<Communicator>& communicator) {
          const Tier tier = stage == 0 ? Tier::device : Tier::nvme;
          Config config = durable ? durable_config(path_ + "/" + name, tier, timing)
                                  : plain_config(path_ + "/" + name, tier, timing);
          config.zero_stage = stage;
          EngineEnvironment environment;
          environment.communicator = communicator;
          environment.test_hooks = drive_.hooks(rank);
          runs[static_cast<std::size_t>(rank)] = run_and_save(config, model_, path_ + "/" + name, environment);
        });
        return runs;
      };
      drive_.latency = milliseconds(10);
      const auto still = all("still", false), moving = all("moving", true);
      for (std::size_t rank = 0; rank < 3; ++rank) {
        EXPECT_EQ(moving[rank].losses, still[rank].losses);
        EXPECT_EQ(moving[rank].values, still[rank].values);
      }
      for (int step = 2; step <= kSteps; step += 2) {
        EXPECT_EQ(contents(saved("moving", step), static_cast<std::uint64_t>(step)),
                  contents(saved("still", step), static_cast<std::uint64_t>(step)));
      }
    }
  }
}

TEST_F(CheckpointSaving, ARankThatCannotWriteItsPartIsToldToAllAndTheyGoOn) {
  drive_.failing_rank = 1;
  drive_.fails = true;
  std::vector<std::string> texts(3);
  std::vector<double> losses(3);
  on_ranks(3, [&](int rank, const std::shared_ptr<Communicator>& communicator) {
    EngineEnvironment environment;
    environment.communicator = communicator;
    environment.test_hooks = drive_.hooks(rank);
    LiveRun run(durable_config(path_, Tier::nvme, Timing::just_in_time), model_, environment);
    run.trainer.step();
    run.engine.save_checkpoint(saved("r", 1));
    for (int step = 2; step <= 4; ++step) run.trainer.step();
    texts[static_cast<std::size_t>(rank)] = text_of<IoError>([&] { run.engine.finish_checkpoint(); });
    communicator->barrier();
    drive_.fails = false;
    communicator->barrier();
    run.engine.save_checkpoint(saved("r", 4));
    losses[static_cast<std::size_t>(rank)] = run.trainer.step();
    run.engine.settle();
  });
  EXPECT_THAT(texts[0], HasSubstr("another rank"));
  EXPECT_THAT(texts[1], HasSubstr("writing"));
  EXPECT_THAT(texts[2], HasSubstr("another rank"));
  EXPECT_FALSE(std::filesystem::exists(saved("r", 1)));
  EXPECT_FALSE(std::filesystem::exists(saved("r", 1) + ".new"));
  EXPECT_NO_THROW(contents(saved("r", 4), 4));
}

TEST_F(CheckpointSaving, ItsBuffersAreInTheBudgetAndReported) {
  for (const Tier tier : {Tier::nvme, Tier::host, Tier::device}) {
    LiveRun run(durable_config(path_ + "/" + std::string(to_string(tier)), tier, Timing::just_in_time), model_);
    run.trainer.step();
    run.engine.settle();
    while (!run.engine.report().at_rest) ::usleep(1000);
    const Report before = run.engine.report();
    run.engine.save_checkpoint(saved("m" + std::string(to_string(tier)), 1));
    run.engine.finish_checkpoint();
    const Report after = run.engine.report();
    const auto named = std::find_if(after.host_memory.begin(), after.host_memory.end(),
                                    [](const MemoryRange& range) { return range.name == "copies for checkpoints"; });
    ASSERT_NE(named, after.host_memory.end());
    EXPECT_GT(named->bytes, 0U);
    std::uint64_t sum = 0;
    for (const MemoryRange& range : after.host_memory) sum += range.bytes;
    EXPECT_LE(sum, after.peak_host_bytes);  // each is named once
    EXPECT_LE(after.peak_host_bytes, after.budget_host_bytes);
    EXPECT_EQ(after.peak_host_bytes, before.peak_host_bytes);
    EXPECT_GE(after.checkpoint_bytes, static_cast<std::uint64_t>(after.parameters) * 12);
    // Nothing of it is counted as a step's own traffic.
    const auto read = [](const Report& report) { return report.lanes[static_cast<int>(Lane::nvme_read)].bytes; };
    EXPECT_EQ(read(after), read(before));
  }
}

}  // namespace
}  // namespace ballast::testing
