// Runs that ended where they could not be gone on from as they lie: within the first commit, or while they were being
// moved aside. Nothing that a rank has committed together with all others is lost.
// SPDX-License-Identifier: Apache-2.0
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <filesystem>
#include <fstream>

#include "support/durable_runs.h"
#include "support/on_ranks.h"

namespace ballast::testing {
namespace {

namespace fs = std::filesystem;
using ::testing::HasSubstr;

constexpr int kSteps = 5;

class ResumeInterrupted : public ::testing::Test {
 protected:
  Config config() const {
    Config config = durable_config(path_, Tier::nvme, Timing::just_in_time);
    config.nvme.paths = {first_, second_};
    return config;
  }

  // Every rank takes the micro-batches of its number, so that all worlds see the same ones.
  Outcome train(int world_size, int steps, const std::string& checkpoints = "") {
    std::vector<Outcome> runs(static_cast<std::size_t>(world_size));
    on_ranks(world_size, [&](int rank, const std::shared_ptr<Communicator>& communicator) {
      Course course;
      course.steps = steps;
      course.options = {ExistingRun::resume, checkpoints};
      course.synthetic.micro_batches = 6 / world_size;
      course.synthetic.micro_offset = rank;
      course.synthetic.micro_stride = world_size;
      course.environment.communicator = communicator;
      runs[static_cast<std::size_t>(rank)] = run(config(), model_, course);
    });
    return runs.front();
  }

  static std::vector<fs::path> files_of(const fs::path& folder) {
    std::vector<fs::path> files;
    if (!fs::exists(folder)) return files;
    for (const auto& entry : fs::directory_iterator(folder)) {
      if (entry.path().filename().string().starts_with("ballast-rank")) files.push_back(entry.path());
    }
    std::sort(files.begin(), files.end());
    return files;
  }

  void keep(const std::string& as) const { copy(path_ + "/run", path_ + "/" + as); }
  void put_back(const std::string& from) const {
    fs::remove_all(path_ + "/run");
    copy(path_ + "/" + from, path_ + "/run");
  }
  static void copy(const std::string& from, const std::string& to) { fs::copy(from, to, fs::copy_options::recursive); }
  // The run that was kept, as moved aside.
  void put_aside(const std::string& kept) const {
    for (const char* path : {"/first", "/second"}) {
      copy(path_ + "/" + kept + path, path_ + "/run" + path + "/ballast-moved");
    }
  }
  void remove_manifests_of_rank(int rank) const {
    for (const fs::path& file : files_of(first_)) {
      const std::string name = file.filename();
      if (name.starts_with("ballast-rank" + std::to_string(rank) + ".step-")) fs::remove(file);
    }
  }
  // As long as it has the first commit alone.
  void remove_manifests_but_of_step(int step) const {
    for (const fs::path& file : files_of(first_)) {
      const std::string name = file.filename();
      if (name.ends_with(".manifest") && !name.ends_with("step-" + std::to_string(step) + ".manifest")) {
        fs::remove(file);
      }
    }
  }

  const Watchdog watchdog_{300};
  const TemporaryDirectory directory_;
  const std::string path_ = directory_.path();
  const std::string first_ = path_ + "/run/first", second_ = path_ + "/run/second";
  const std::vector<SyntheticUnit> model_ = small_model(4);
};

TEST_F(ResumeInterrupted, ARunThatEndedWithinItsFirstCommitBeginsAnew) {
  for (const int killed : {0, 1, 2}) {
    for (const int world_size : {3, 2}) {
      SCOPED_TRACE(std::to_string(killed) + " of 3 not committed, then " + std::to_string(world_size));
      train(3, 0);
      ASSERT_TRUE(fs::exists(first_ + "/ballast-rank2.step-0.manifest"));
      remove_manifests_of_rank(killed);
      const Outcome outcome = train(world_size, 2);
      EXPECT_EQ(outcome.resumed_at, UINT64_MAX);
      EXPECT_EQ(outcome.losses.size(), 2U);
      EXPECT_EQ(train(world_size, 2).resumed_at, 2U);
      fs::remove_all(path_ + "/run");
    }
  }
}

TEST_F(ResumeInterrupted, OneThatHadAlreadyCommittedIsNotTakenForNothing) {
  train(3, 1);
  remove_manifests_of_rank(1);
  const auto text = [&] { return text_of<CorruptionError>([&] { train(3, 2); }); };
  EXPECT_THAT(text(), HasSubstr("nothing whole to go on from"));
  EXPECT_THAT(text(), HasSubstr("nothing whole to go on from"));  // it is still there
}

TEST_F(ResumeInterrupted, TheRunThatWasMovedAsideOutlivesAnInterruptedFirstCommit) {
  const Outcome expected = train(2, kSteps);
  fs::remove_all(path_ + "/run");
  train(2, 3);
  keep("three");
  train(3, 3);  // loads it and commits
  remove_manifests_but_of_step(3);
  remove_manifests_of_rank(2);
  put_aside("three");
  keep("interrupted");
  for (const int world_size : {1, 2, 3}) {
    put_back("interrupted");
    const Outcome outcome = train(world_size, kSteps);
    EXPECT_EQ(outcome.resumed_at, 3U);
    EXPECT_TRUE(files_of(first_ + "/ballast-moved").empty());
    if (world_size == 2) {
      EXPECT_EQ(outcome.values, expected.values);
    }
  }
}

TEST_F(ResumeInterrupted, OnceAllHaveCommittedTheRunInPlaceIsTheNewest) {
  train(2, 2);
  keep("two");
  train(3, 4);
  put_aside("two");
  keep("both");
  for (const int world_size : {1, 3}) {
    put_back("both");
    EXPECT_EQ(train(world_size, kSteps).resumed_at, 4U);
    EXPECT_TRUE(files_of(first_ + "/ballast-moved").empty());
  }
}

TEST_F(ResumeInterrupted, AMoveThatWasInterruptedAnywhereIsGoneOnWith) {
  train(2, 3);
  keep("whole");
  std::vector<fs::path> names = files_of(first_);
  const std::size_t in_first = names.size();
  const std::vector<fs::path> others = files_of(second_);
  names.insert(names.end(), others.begin(), others.end());
  ASSERT_EQ(in_first, 6U);
  ASSERT_EQ(others.size(), 2U);
  for (std::size_t moved = 0; moved <= names.size(); ++moved) {
    for (const int world_size : {2, 3}) {
      SCOPED_TRACE(std::to_string(moved) + " files moved, then " + std::to_string(world_size) + " ranks");
      put_back("whole");
      std::ofstream(first_ + "/ballast-moving") << "2";
      for (std::size_t i = 0; i < moved; ++i) {
        const fs::path folder = names[i].parent_path() / "ballast-moved";
        fs::create_directories(folder);
        fs::rename(names[i], folder / names[i].filename());
      }
      EXPECT_EQ(train(world_size, kSteps).resumed_at, 3U);
      EXPECT_FALSE(fs::exists(first_ + "/ballast-moving"));
    }
  }
  put_back("whole");
  std::ofstream(first_ + "/ballast-moving") << "3";
  EXPECT_THAT(text_of<ConfigError>([&] { train(1, kSteps); }), HasSubstr("which had 3 paths, and here are 2"));
}

}  // namespace
}  // namespace ballast::testing
