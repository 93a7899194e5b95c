// Durable steps and checkpoints through the public interface: what goes on is what would have gone on.
// SPDX-License-Identifier: Apache-2.0
#include <ballast/base/error.h>
#include <fcntl.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sys/file.h>
#include <unistd.h>

#include <algorithm>
#include <cmath>
#include <filesystem>
#include <fstream>
#include <optional>

#include "durable/manifest.h"
#include "support/durable_runs.h"
#include "support/on_ranks.h"

// GCC 12 takes the strings of the temporaries that are handed to run() for uninitialised.
#if defined(__GNUC__) && !defined(__clang__)
#pragma GCC diagnostic ignored "-Wmaybe-uninitialized"
#endif

namespace ballast::testing {
namespace {

using ::testing::HasSubstr;

const CommitOptions kResume{ExistingRun::resume, {}};

class Durability : public ::testing::Test {
 protected:
  const Watchdog watchdog_{300};
  const TemporaryDirectory directory_;
  const std::string path_ = directory_.path();
  const std::vector<SyntheticUnit> model_ = small_model(3);
};

TEST_F(Durability, ARunGoesOnWhereItWasCommittedAtEveryTimingAndPlacement) {
  for (const Timing timing : {Timing::eager, Timing::just_in_time, Timing::after_backward}) {
    const Outcome whole = run(plain_config(path_ + "/whole", Tier::host, timing), model_, {.steps = 6});
    for (const Tier tier : {Tier::nvme, Tier::host, Tier::device}) {
      SCOPED_TRACE(std::string(to_string(timing)) + " " + std::string(to_string(tier)));
      const std::string place = path_ + "/" + std::string(to_string(timing)) + std::string(to_string(tier));
      const Config config = durable_config(place, tier, timing);
      const Outcome first = run(config, model_, {.steps = 4});
      EXPECT_EQ(first.resumed_at, UINT64_MAX);
      const Outcome second = run(config, model_, {.steps = 6, .options = kResume});
      EXPECT_EQ(second.resumed_at, 4U);
      EXPECT_EQ(second.values, whole.values);
      EXPECT_EQ(second.moments, whole.moments);
      EXPECT_EQ(second.counts, whole.counts);
      EXPECT_EQ(second.losses, std::vector<double>(whole.losses.begin() + 4, whole.losses.end()));
    }
  }
}

TEST_F(Durability, OtherChunksBudgetsAndPlacementsGoOnWithTheSameNumbers) {
  const Outcome whole = run(plain_config(path_ + "/whole", Tier::host, Timing::just_in_time), model_, {.steps = 8});
  Config config = durable_config(path_, Tier::nvme, Timing::just_in_time);
  run(config, model_, {.steps = 2});
  int steps = 2;
  for (const auto& [tier, host_bytes] :
       {std::pair(Tier::nvme, std::uint64_t{1200} << 10), {Tier::host, {64 << 20}}, {Tier::device, {64 << 20}}}) {
    Config other = durable_config(path_, tier, Timing::just_in_time);
    other.budget.host_bytes = host_bytes;
    const Outcome next = run(other, model_, {.steps = steps + 2, .options = kResume});
    EXPECT_EQ(next.resumed_at, static_cast<std::uint64_t>(steps));
    EXPECT_EQ(next.losses, std::vector<double>(whole.losses.begin() + steps, whole.losses.begin() + steps + 2));
    EXPECT_FALSE(std::filesystem::exists(path_ + "/nvme/ballast-moved"));
    steps += 2;
  }
}

TEST_F(Durability, ACommittedRunIsNotOverwrittenUnasked) {
  const Config config = durable_config(path_, Tier::nvme, Timing::just_in_time);
  run(config, model_, {.steps = 3});
  EXPECT_THAT(text_of<ConfigError>([&] { run(config, model_, {}); }), HasSubstr("holds a committed run, step 3"));
  Config none = config;
  none.durability.every_steps = 0;
  EXPECT_THAT(text_of<ConfigError>([&] { run(none, model_, {}); }), HasSubstr("--overwrite"));
  EXPECT_THAT(text_of<ConfigError>([&] { run(none, model_, {.options = kResume}); }), HasSubstr("would destroy it"));
  EXPECT_EQ(run(config, model_, {.steps = 3, .options = kResume}).resumed_at, 3U);
  const Outcome again = run(config, model_, {.steps = 1, .options = {ExistingRun::overwrite, {}}});
  EXPECT_EQ(again.resumed_at, UINT64_MAX);
  EXPECT_EQ(run(config, model_, {.steps = 1, .options = kResume}).resumed_at, 1U);
}

TEST_F(Durability, OtherPathsThanThoseOfTheRunHarmNothing) {
  Config config = durable_config(path_, Tier::nvme, Timing::just_in_time);
  const std::string a = path_ + "/a", b = path_ + "/b", c = path_ + "/c";
  config.nvme.paths = {a, b};
  run(config, model_, {.steps = 2});
  const auto refused = [&](const std::vector<std::string>& paths, ExistingRun existing, const std::string& why) {
    Config other = config;
    other.nvme.paths = paths;
    EXPECT_THAT(text_of<ConfigError>([&] {
                  run(other, model_, {.steps = 3, .options = {existing, {}}});
                }),
                AllOf(HasSubstr(why), HasSubstr("name that run's paths in their order")));
  };
  for (const ExistingRun existing : {ExistingRun::refuse, ExistingRun::resume}) {
    refused({a}, existing, a + " holds chunks of a run with durable steps, of whose 2 paths it is number 1");
    refused({b}, existing, b + " holds chunks of a run with durable steps, of whose 2 paths it is number 2");
    refused({b, a}, existing, "of whose 2 paths");
    refused({a, b, c}, existing, "of whose 2 paths");
    refused({c, b, a}, existing, "of whose 2 paths");
  }
  EXPECT_EQ(run(config, model_, {.steps = 3, .options = kResume}).resumed_at, 2U);
  config.nvme.paths = {b, a};
  run(config, model_, {.steps = 1, .options = {ExistingRun::overwrite, {}}});
  EXPECT_EQ(run(config, model_, {.steps = 2, .options = kResume}).resumed_at, 1U);
}

TEST_F(Durability, AnotherModelOrOptimizerIsRefusedWithWhatDiffers) {
  const Config config = durable_config(path_, Tier::nvme, Timing::just_in_time);
  run(config, model_, {.steps = 1});
  Config other = config;
  other.optimizer.beta1 = 0.8;
  EXPECT_THAT(text_of<ConfigError>([&] { run(other, model_, {.options = kResume}); }),
              AllOf(HasSubstr("optimizer.betas.0"), HasSubstr("0.8 here")));
  auto model = model_;
  model[1].parameters[0].shape = {7, 33};
  EXPECT_THAT(text_of<ConfigError>([&] { run(config, model, {.options = kResume}); }),
              AllOf(HasSubstr("in unit u.1: weight"), HasSubstr("[7, 33] bf16")));
  EXPECT_EQ(run(config, model_, {.steps = 1, .options = kResume}).resumed_at, 1U);
}

TEST_F(Durability, NothingToGoOnFromBegins) {
  const Config config = durable_config(path_, Tier::nvme, Timing::just_in_time);
  EXPECT_EQ(run(config, model_, {.steps = 1, .options = {ExistingRun::resume, path_ + "/none"}}).resumed_at,
            UINT64_MAX);
}

// The last byte of each file, cut or changed: an older step that is whole, or an error; never other numbers.
TEST_F(Durability, DamageIsSeenAndTheStepBeforeGoesOn) {
  const Config config = durable_config(path_, Tier::nvme, Timing::after_backward);
  const Outcome whole = run(config, model_, {.steps = 4});
  const std::string manifest = path_ + "/nvme/ballast-rank0.step-4.manifest";
  std::filesystem::resize_file(manifest, std::filesystem::file_size(manifest) - 1);
  const Outcome next = run(config, model_, {.steps = 4, .options = kResume});
  EXPECT_EQ(next.resumed_at, 3U);
  EXPECT_EQ(next.values, whole.values);
  // A chunk: one byte of the parameters of every slot.
  const std::string chunks = path_ + "/nvme/ballast-rank0.chunks";
  std::fstream file(chunks, std::ios::in | std::ios::out | std::ios::binary);
  for (std::uint64_t at = 4096; at + 1 < std::filesystem::file_size(chunks); at += 4096) {
    file.seekg(static_cast<std::streamoff>(at));
    const int byte = file.get();
    file.seekp(static_cast<std::streamoff>(at));
    file.put(static_cast<char>(byte ^ 1));
  }
  file.close();
  EXPECT_THAT(text_of<CorruptionError>([&] { run(config, model_, {.steps = 6, .options = kResume}); }),
              AllOf(HasSubstr("chunk 0 of unit"), HasSubstr(chunks)));
}

TEST_F(Durability, EveryNthStepIsCommittedAndTheRestIsMadeAgain) {
  for (const Tier tier : {Tier::nvme, Tier::host}) {
    Config config = durable_config(path_ + "/" + std::string(to_string(tier)), tier, Timing::just_in_time);
    config.durability.every_steps = 3;
    const Outcome first = run(config, model_, {.steps = 5});
    const Outcome second = run(config, model_, {.steps = 5, .options = kResume});
    EXPECT_EQ(second.resumed_at, 3U);
    EXPECT_EQ(second.values, first.values);
  }
}

TEST_F(Durability, ACheckpointGoesOnInAnyPlacement) {
  const std::string folder = path_ + "/checkpoints";
  const Outcome whole = run(plain_config(path_ + "/whole", Tier::host, Timing::just_in_time), model_, {.steps = 6});
  for (const Tier from : {Tier::nvme, Tier::device}) {
    run(plain_config(path_ + "/a", from, Timing::just_in_time), model_, {.steps = 4, .save_to = folder + "/step-4"});
    for (const Tier to : {Tier::nvme, Tier::host, Tier::device}) {
      for (const std::string& where : {folder, folder + "/step-4"}) {
        const Outcome next = run(plain_config(path_ + "/b", to, Timing::just_in_time), model_,
                                 {.steps = 6, .options = {ExistingRun::resume, where}});
        EXPECT_EQ(next.resumed_at, 4U);
        EXPECT_EQ(next.resumed_from, folder + "/step-4");
        EXPECT_EQ(next.values, whole.values);
        EXPECT_EQ(next.counts, whole.counts);
      }
    }
  }
}

TEST_F(Durability, TheLaterOfCheckpointAndCommittedStepGoesOn) {
  const std::string folder = path_ + "/checkpoints";
  const Config config = durable_config(path_, Tier::nvme, Timing::just_in_time);
  run(config, model_, {.steps = 3, .save_to = folder + "/step-3"});
  EXPECT_THAT(run(config, model_, {.steps = 4, .options = {ExistingRun::resume, folder}}).resumed_from,
              HasSubstr("step-3.manifest"));
  run(plain_config(path_ + "/elsewhere", Tier::host, Timing::just_in_time), model_,
      {.steps = 6, .save_to = folder + "/step-6"});
  const Outcome next = run(config, model_, {.steps = 7, .options = {ExistingRun::resume, folder}});
  EXPECT_EQ(next.resumed_at, 6U);
  EXPECT_EQ(next.resumed_from, folder + "/step-6");
  EXPECT_EQ(run(config, model_, {.steps = 7, .options = {ExistingRun::resume, folder}}).resumed_at, 7U);
}

TEST_F(Durability, ADamagedOrHalfWrittenCheckpointGivesWayToAnOlderOne) {
  const std::string folder = path_ + "/checkpoints";
  const Config config = plain_config(path_, Tier::host, Timing::just_in_time);
  for (const int steps : {2, 3, 4}) {
    run(config, model_, {.steps = steps, .save_to = folder + "/step-" + std::to_string(steps)});
  }
  std::filesystem::rename(folder + "/step-4", folder + "/step-4.new");  // as an interruption leaves it
  const auto chunks = folder + "/step-3/ballast-rank0.chunks";
  std::filesystem::resize_file(chunks, std::filesystem::file_size(chunks) / 2);
  const Outcome next = run(config, model_, {.steps = 4, .options = {ExistingRun::resume, folder}});
  EXPECT_EQ(next.resumed_at, 2U);
}

TEST_F(Durability, ACheckpointNeverTakesThePlaceOfTheRunItself) {
  Config config = durable_config(path_, Tier::nvme, Timing::just_in_time);
  config.nvme.paths = {path_ + "/runs/a", path_ + "/runs/b"};
  {
    Engine engine(config);
    SyntheticTrainer trainer(engine, model_);
    engine.commit();
    trainer.initialize();
    trainer.step();
    for (const char* place : {"/runs/a", "/runs/b/", "/runs/./b", "/runs", ""}) {
      EXPECT_THAT(text_of<UsageError>([&] { engine.save_checkpoint(path_ + place); }), HasSubstr("of its own"))
          << place;
    }
    engine.save_checkpoint(path_ + "/runs/a/saves/step-1");
    engine.save_checkpoint(path_ + "/runs/b2");
    trainer.step();
    engine.settle();
  }
  EXPECT_EQ(run(config, model_, {.steps = 2, .options = kResume}).resumed_at, 2U);
}

// Kept as whole numbers: no float of any width counts on here.
TEST_F(Durability, StepCountsGoOnFromAnyNumber) {
  const std::string saved = path_ + "/saved/step-1", next = path_ + "/next";
  const Config config = plain_config(path_, Tier::nvme, Timing::just_in_time);
  run(config, model_, {.steps = 1, .save_to = saved});
  for (const std::uint64_t count : {std::uint64_t{256}, std::uint64_t{2048}, std::uint64_t{1} << 24,
                                    (std::uint64_t{1} << 32) - 1, std::uint64_t{1} << 53}) {
    engine::ManifestLog log(io::make_small_files(saved), 0);
    engine::StoredLayout layout;
    engine::Manifest manifest;
    log.load(1, &layout, &manifest);
    for (auto& unit : manifest.step_counts) std::fill(unit.begin(), unit.end(), count);
    log.publish(engine::encode_layout(layout), manifest);
    const Outcome on =
        run(config, model_, {.steps = 2, .options = {ExistingRun::resume, saved}, .save_to = next + "/step-2"});
    EXPECT_EQ(on.resumed_at, 1U);
    for (const float value : on.values) ASSERT_TRUE(std::isfinite(value));
    engine::ManifestLog(io::make_small_files(next + "/step-2"), 0).load(2, &layout, &manifest);
    std::size_t index = 0;
    for (const auto& unit : manifest.step_counts) {
      for (const std::uint64_t saved_count : unit) {
        EXPECT_EQ(saved_count, on.counts[index]);
        EXPECT_TRUE(saved_count == count + 1 || saved_count == count) << saved_count;  // without a gradient it stands
        ++index;
      }
    }
    EXPECT_GT(std::count(on.counts.begin(), on.counts.end(), count + 1), 0);
    std::filesystem::remove_all(next);
  }
}

TEST_F(Durability, AFolderInUseAndOneThatCannotBeWrittenAreErrorsAndTrainingGoesOn) {
  const std::string folder = path_ + "/checkpoints";
  std::filesystem::create_directories(folder);
  const int lock = ::open(folder.c_str(), O_RDONLY | O_DIRECTORY | O_CLOEXEC);
  ASSERT_EQ(::flock(lock, LOCK_EX), 0);
  Engine engine(plain_config(path_, Tier::nvme, Timing::just_in_time));
  SyntheticTrainer trainer(engine, model_);
  engine.commit();
  trainer.initialize();
  trainer.step();
  EXPECT_THAT(text_of<IoError>([&] { engine.save_checkpoint(folder + "/step-1"); }), HasSubstr("another run"));
  ::close(lock);
  EXPECT_THAT(text_of<IoError>([&] { engine.save_checkpoint("/proc/nowhere/step-1"); }), HasSubstr("/proc/nowhere"));
  trainer.step();
  for (const int steps : {2, 10, 9}) engine.save_checkpoint(folder + "/step-" + std::to_string(steps), 2);
  EXPECT_FALSE(std::filesystem::exists(folder + "/step-2"));
  EXPECT_TRUE(std::filesystem::exists(folder + "/step-10"));
}

// A checkpoint of any world, loaded by any other; and a committed run by another number of ranks.
TEST_F(Durability, RanksMayBeMoreOrFewer) {
  const std::string folder = path_ + "/checkpoints";
  const auto on = [&](int world_size, const Config& config, Course course) {
    std::vector<Outcome> runs(static_cast<std::size_t>(world_size));
    on_ranks(world_size, [&](int rank, const std::shared_ptr<Communicator>& communicator) {
      Course mine = course;
      mine.environment.communicator = communicator;
      runs[static_cast<std::size_t>(rank)] = run(config, model_, mine);
    });
    return runs.front();
  };
  Config config = plain_config(path_ + "/a", Tier::nvme, Timing::just_in_time);
  const Outcome saved = on(11, config, {.steps = 3, .save_to = folder + "/step-3"});
  for (const int world_size : {1, 4, 5}) {
    for (const int stage : {0, 3}) {
      Config other = plain_config(path_ + "/b", stage == 0 ? Tier::device : Tier::nvme, Timing::just_in_time);
      other.zero_stage = stage;
      const Outcome loaded = on(world_size, other, {.steps = 3, .options = {ExistingRun::resume, folder}});
      EXPECT_EQ(loaded.resumed_at, 3U);
      EXPECT_EQ(loaded.values, saved.values);
      EXPECT_EQ(loaded.moments, saved.moments);
      EXPECT_EQ(loaded.counts, saved.counts);
    }
  }
  config = durable_config(path_ + "/c", Tier::nvme, Timing::just_in_time);
  std::vector<float> before = on(2, config, {.steps = 2}).values;
  for (const int world_size : {2, 3, 1, 2}) {
    const Outcome next = on(world_size, config, {.steps = 2, .options = kResume});
    EXPECT_EQ(next.resumed_at, 2U);
    EXPECT_EQ(next.values, before);
  }
}

}  // namespace
}  // namespace ballast::testing
