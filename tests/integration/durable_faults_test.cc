// Durable steps and checkpoints where the place fails in earnest: a file system that fills, one that becomes read-only,
// files that are cut or changed behind the engine's back, a denied ring, small limits. The run ends with an error of
// its kind that says where, and once the place is mended it goes on as if nothing had happened. Each in a child
// process. SPDX-License-Identifier: Apache-2.0
#include <ballast/base/error.h>
#include <ballast/io/open_storage.h>
#include <ballast/io/small_files.h>
#include <gtest/gtest.h>
#include <sys/stat.h>
#include <sys/syscall.h>

#include <algorithm>
#include <cerrno>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <string>
#include <vector>

#include "support/engine_support.h"
#include "support/unkind_places.h"

namespace ballast::testing {
namespace {

using test::contains;
using test::expect;
using test::expect_child;
using test::kMissing;

constexpr int kSteps = 8;

struct Undisturbed {
  std::vector<double> losses;
  std::vector<float> values;
};

Config durable_config(const std::string& directory, Tier tier = Tier::nvme) {
  Config config = plain_config(directory, tier, Timing::just_in_time);
  config.budget.device_bytes = config.budget.host_bytes = std::uint64_t{8} << 20;
  config.durability.every_steps = 1;
  return config;
}

// A run, its trainer beside it.
struct TrainingRun {
  Engine engine;
  SyntheticTrainer trainer;
  explicit TrainingRun(const Config& config, const CommitOptions& options = {ExistingRun::resume, {}},
                       std::vector<std::string>* warnings = nullptr)
      : engine(config, environment(warnings)), trainer(engine, small_model(3)) {
    engine.commit(options);
    if (!trainer.resume()) trainer.initialize();
  }
  static EngineEnvironment environment(std::vector<std::string>* warnings) {
    EngineEnvironment made;
    if (warnings == nullptr) return made;
    made.log = [warnings](LogLevel level, std::string_view text) {
      if (level == LogLevel::warning) warnings->emplace_back(text);
    };
    return made;
  }
  void steps_to(int last, const Undisturbed& expected) {
    while (trainer.next_step() < last) {
      const auto step = static_cast<std::size_t>(trainer.next_step());
      expect(trainer.step() == expected.losses[step], "the loss of step " + std::to_string(step) + " differs");
    }
  }
  // And the last one is committed.
  void durable_to(int last, const Undisturbed& expected) {
    steps_to(last, expected);
    engine.settle();
  }
};

Undisturbed undisturbed(const std::string& directory) {
  Config config = durable_config(directory, Tier::host);
  config.durability.every_steps = 0;
  TrainingRun run(config, {});
  Undisturbed result;
  for (int s = 0; s < kSteps; ++s) result.losses.push_back(run.trainer.step());
  result.values = run.trainer.values();
  return result;
}

// What a later start finds and makes of it.
void expect_goes_on(const Config& config, const Undisturbed& expected, std::uint64_t least, std::uint64_t most,
                    std::vector<std::string>* warnings = nullptr) {
  TrainingRun run(config, {ExistingRun::resume, {}}, warnings);
  expect(run.engine.resumed().has_value(), "nothing was found");
  const std::uint64_t at = run.engine.resumed()->step;
  expect(least <= at && at <= most, "it goes on from step " + std::to_string(at) + " instead of " +
                                        std::to_string(least) + " to " + std::to_string(most));
  run.steps_to(kSteps, expected);
  expect(run.trainer.values() == expected.values, "the values differ");
  run.engine.settle();
}

template <class Error>
std::string first_error(TrainingRun& run, const Undisturbed& expected) {
  try {
    run.steps_to(kSteps, expected);
    run.engine.settle();
  } catch (const Error& error) {
    return error.what();
  }
  throw test::Wrong("no error came");
}

// Why a run does not go on.
template <class Error>
std::string refusal(const Config& config) {
  try {
    TrainingRun run(config);
  } catch (const Error& error) {
    return error.what();
  }
  throw test::Wrong("it went on");
}

// A file that takes what is free but for `left_bytes`.
void fill(const std::string& directory, std::uint64_t left_bytes) {
  const std::string path = directory + "/filler";
  const test::Descriptor file(::open(path.c_str(), O_WRONLY | O_CREAT | O_CLOEXEC, 0600));
  const std::vector<char> block(64 << 10, 'x');
  off_t size = 0;
  for (std::size_t bytes = block.size(); bytes >= 512;) {
    const ssize_t count = ::pwrite(file.get(), block.data(), bytes, size);
    if (count > 0) {
      size += count;
    } else {
      bytes /= 2;
    }
  }
  expect(::fsync(file.get()) == 0 && size > 0, "the filler");
  const off_t kept = std::max<off_t>(size - static_cast<off_t>(left_bytes), 0);
  expect(::ftruncate(file.get(), kept) == 0 && ::fsync(file.get()) == 0, "the filler's length");
}
void make_room(const std::string& directory) { std::filesystem::remove(directory + "/filler"); }

std::vector<std::byte> contents(const std::string& path) {
  std::ifstream file(path, std::ios::binary);
  const std::string text{std::istreambuf_iterator<char>(file), {}};
  return {reinterpret_cast<const std::byte*>(text.data()),
          reinterpret_cast<const std::byte*>(text.data()) + text.size()};
}

void change_byte(const std::string& path, std::uint64_t offset) {
  const test::Descriptor file(::open(path.c_str(), O_RDWR | O_CLOEXEC));
  std::byte byte{};
  expect(::pread(file.get(), &byte, 1, static_cast<off_t>(offset)) == 1, "reading a byte");
  byte ^= std::byte{1};
  expect(::pwrite(file.get(), &byte, 1, static_cast<off_t>(offset)) == 1, "changing a byte");
}

class DurableFaults : public ::testing::Test {
 protected:
  void SetUp() override { std::filesystem::create_directory(place_); }

  // The body runs over a small file system of each kind.
  void on_small_file_systems(std::uint64_t bytes, const std::function<void()>& body) {
    for (const bool in_memory : {false, true}) {
      SCOPED_TRACE(in_memory ? "tmpfs" : "ext4 on a loop device");
      expect_child(
          [&] {
            if (!test::own_mounts()) return kMissing;
            if (!(in_memory ? test::mount_tmpfs(place_, bytes) : test::mount_ext4(place_, scratch_ / "image", bytes))) {
              return kMissing;
            }
            body();
            return 0;
          },
          in_memory ? "no right to mount a tmpfs here" : "no loop device, no mkfs.ext4, or no right to mount here");
    }
  }

  const test::ScratchDirectory scratch_{std::filesystem::temp_directory_path().string()};
  const std::string place_ = scratch_ / "place";
};

TEST_F(DurableFaults, AFileSystemThatFillsBetweenStepsEndsTheRunAndItGoesOnOnceThereIsRoom) {
  on_small_file_systems(24 << 20, [&] {
    const Undisturbed expected = undisturbed(scratch_ / "whole");
    for (const Tier tier : {Tier::nvme, Tier::host}) {
      // From no room at all to room for a manifest or two.
      for (const std::uint64_t left_bytes : {0, 2048, 4096, 12288}) {
        const std::string directory = place_ + "/run";
        const Config config = durable_config(directory, tier);
        std::uint64_t committed = 0;
        {
          TrainingRun run(config, {});
          run.durable_to(3, expected);
          fill(place_, left_bytes);
          try {
            run.steps_to(kSteps, expected);
            run.engine.settle();
            // Old manifests make room for new ones: it was enough.
            expect(left_bytes > 0, "no room, and no error");
            expect(run.trainer.values() == expected.values, "the values differ");
          } catch (const IoError& error) {
            expect(contains(error.what(), "manifest") && contains(error.what(), directory) &&
                       contains(error.what(), "free some space"),
                   error.what());
          }
          committed = run.engine.committed_step().value();
          expect(committed >= 3, "committed " + std::to_string(committed));
        }
        // As long as it is full: the same error or enough room, never harm.
        try {
          TrainingRun again(config);
          expect(again.engine.resumed() && again.engine.resumed()->step >= committed, "a committed step was lost");
          committed = again.engine.resumed()->step;
          again.steps_to(kSteps, expected);
          again.engine.settle();
        } catch (const IoError& error) {
          expect(contains(error.what(), directory), error.what());
        }
        make_room(place_);
        expect_goes_on(config, expected, committed, kSteps);
        for (const auto& entry : std::filesystem::directory_iterator(directory + "/nvme")) {
          expect(!contains(entry.path(), ".new"), entry.path());
        }
        std::filesystem::remove_all(directory);
      }
    }
  });
}

TEST_F(DurableFaults, AFileSystemThatFillsWhileACheckpointIsWrittenHarmsNeitherTheRunNorAnOlderOne) {
  on_small_file_systems(16 << 20, [&] {
    const Undisturbed expected = undisturbed(scratch_ / "whole");
    const std::string folder = place_ + "/saves";
    Config config = durable_config(scratch_ / "run", Tier::host);
    config.durability.every_steps = 0;
    TrainingRun run(config, {});
    run.steps_to(1, expected);
    run.engine.save_checkpoint(folder + "/step-1");
    const std::uint64_t bytes = std::filesystem::file_size(folder + "/step-1/ballast-rank0.chunks");
    int refused = 0;
    for (const std::uint64_t left_bytes : {std::uint64_t{0}, bytes / 2, bytes, bytes + 4096, bytes + 12288}) {
      fill(place_, left_bytes);
      try {
        run.engine.save_checkpoint(folder + "/step-2");
        std::filesystem::remove_all(folder + "/step-2");
      } catch (const IoError& error) {
        ++refused;
        expect(contains(error.what(), folder + "/step-2") && contains(error.what(), "space"), error.what());
      }
      std::vector<std::string> left;
      for (const auto& entry : std::filesystem::directory_iterator(folder)) left.push_back(entry.path().filename());
      expect(left == std::vector<std::string>{"step-1"}, "something else than the older one is left");
      make_room(place_);
    }
    expect(refused >= 2, "it was never refused");
    run.steps_to(4, expected);
    run.engine.save_checkpoint(folder + "/step-4");
    for (const char* name : {"/step-1", "/step-4"}) {
      Config other = config;
      other.nvme.paths = {scratch_ / "other"};
      TrainingRun next(other, {ExistingRun::resume, folder + name});
      expect(next.engine.resumed() && next.engine.resumed()->path == folder + name, "another one goes on");
      next.steps_to(kSteps, expected);
      expect(next.trainer.values() == expected.values, "the values differ");
    }
  });
}

TEST_F(DurableFaults, AFileSystemThatBecomesReadOnlyEndsTheRunAndItGoesOnAfterwards) {
  expect_child(
      [&] {
        if (!test::own_mounts()) return kMissing;
        const Undisturbed expected = undisturbed(scratch_ / "whole");
        const Config config = durable_config(place_);
        {
          TrainingRun run(config, {});
          run.steps_to(3, expected);
          // What is open stays open; what is opened from now on finds it read-only.
          if (::mount(place_.c_str(), place_.c_str(), nullptr, MS_BIND, nullptr) != 0) return kMissing;
          if (::mount(nullptr, place_.c_str(), nullptr, MS_REMOUNT | MS_BIND | MS_RDONLY, nullptr) != 0)
            return kMissing;
          const std::string text = first_error<IoError>(run, expected);
          expect(contains(text, "EROFS") && contains(text, place_), text);
        }
        const std::string text = refusal<IoError>(config);
        expect(contains(text, "EROFS") && contains(text, place_), text);
        expect(::umount(place_.c_str()) == 0, "umount");
        expect_goes_on(config, expected, 2, 4);
        return 0;
      },
      "no right to mount here");
}

TEST_F(DurableFaults, ADirectoryThatMayNotBeWrittenAnyMoreEndsTheRunAndItGoesOnAfterwards) {
  ::chmod(scratch_.path().c_str(), 0777);
  ::chmod(place_.c_str(), 0777);
  expect_child(
      [&] {
        test::become_ordinary();
        const Undisturbed expected = undisturbed(scratch_ / "whole");
        const Config config = durable_config(place_);
        const std::string directory = config.nvme.paths.front();
        {
          TrainingRun run(config, {});
          run.steps_to(3, expected);
          ::chmod(directory.c_str(), 0555);
          const std::string text = first_error<IoError>(run, expected);
          expect(contains(text, "EACCES") && contains(text, directory), text);
        }
        ::chmod(directory.c_str(), 0755);
        expect_goes_on(config, expected, 2, 4);
        return 0;
      },
      "");
}

TEST_F(DurableFaults, AnotherFileInTheChunksPlaceOrNoneIsRefused) {
  expect_child(
      [&] {
        const Undisturbed expected = undisturbed(scratch_ / "whole");
        const Config config = durable_config(place_);
        { TrainingRun(config, {}).durable_to(3, expected); }
        const std::string chunks = config.nvme.paths.front() + "/ballast-rank0.chunks";
        std::filesystem::rename(chunks, chunks + ".kept");
        for (const bool empty : {false, true}) {
          if (empty) std::ofstream(chunks).flush();
          const std::string text = refusal<IoError>(config);
          expect(contains(text, chunks) && contains(text, "put back"), text);
        }
        std::filesystem::rename(chunks + ".kept", chunks);
        expect_goes_on(config, expected, 3, 3);
        return 0;
      },
      "");
}

TEST_F(DurableFaults, AFileThatIsCutWhileTheRunUsesItIsCorruption) {
  expect_child(
      [&] {
        const Undisturbed expected = undisturbed(scratch_ / "whole");
        for (const std::string backend : {"io_uring", "threads"}) {
          if (backend == "io_uring" && !io::io_uring_unavailable_reason().empty()) continue;
          Config config = durable_config(place_ + "/" + backend);
          config.nvme.backend = backend;
          const std::string chunks = config.nvme.paths.front() + "/ballast-rank0.chunks";
          {
            TrainingRun run(config, {});
            run.durable_to(3, expected);
            std::filesystem::resize_file(chunks, 8192);
            const std::string text = first_error<CorruptionError>(run, expected);
            for (const std::string& part : {std::string("chunk "), std::string("unit u."), chunks + " at ",
                                            std::string("steps taken"), std::string("resume")}) {
              expect(contains(text, part), part + ": " + text);
            }
          }
          // Nothing whole is left: said, and nothing is computed.
          const std::string text = refusal<CorruptionError>(config);
          for (const char* part : {"chunk ", "unit u.", "step before it"}) expect(contains(text, part), text);
        }
        return 0;
      },
      "");
}

// The bytes that the last step has written, and only those.
TEST_F(DurableFaults, DamageToTheNewestStepIsSeenAndTheOneBeforeItGoesOn) {
  expect_child(
      [&] {
        const Undisturbed expected = undisturbed(scratch_ / "whole");
        for (const Tier tier : {Tier::nvme, Tier::host, Tier::device}) {
          for (const bool cut : {false, true}) {
            const Config config =
                durable_config(place_ + "/" + std::string(to_string(tier)) + (cut ? "-cut" : ""), tier);
            const std::string chunks = config.nvme.paths.front() + "/ballast-rank0.chunks";
            { TrainingRun(config, {}).durable_to(3, expected); }
            const std::vector<std::byte> before = contents(chunks);
            { TrainingRun(config).durable_to(4, expected); }
            const std::vector<std::byte> after = contents(chunks);
            expect(before.size() == after.size(), "the file's size");
            std::vector<std::uint64_t> written;
            for (std::uint64_t at = 4096; at < after.size(); ++at) {
              if (before[at] != after[at]) written.push_back(at);
            }
            expect(!written.empty(), "nothing was written");
            // Within the last of the newest step's slots; what lies behind it is of the step before, if anything.
            if (cut && written.back() + 8192 > after.size()) std::filesystem::resize_file(chunks, written.back());
            change_byte(chunks, written[written.size() / 2]);
            std::vector<std::string> warnings;
            expect_goes_on(config, expected, 3, 3, &warnings);
            expect(!warnings.empty(), "no warning came");
            const std::string& text = warnings.front();
            expect(contains(text, "going on from step 3, as step 4 is damaged") && contains(text, chunks + " at "),
                   text);
          }
        }
        return 0;
      },
      "");
}

// Seen by the run itself: the step before goes on where it is still whole.
TEST_F(DurableFaults, DamageThatARunMeetsEndsItAndNothingIsComputedWithIt) {
  expect_child(
      [&] {
        const Undisturbed expected = undisturbed(scratch_ / "whole");
        const Config config = durable_config(place_);
        const std::string chunks = config.nvme.paths.front() + "/ballast-rank0.chunks";
        { TrainingRun(config, {}).durable_to(3, expected); }
        const std::vector<std::byte> before = contents(chunks);
        {
          TrainingRun run(config);
          run.durable_to(4, expected);
          const std::vector<std::byte> after = contents(chunks);
          const auto [was, is] = std::mismatch(before.begin() + 4096, before.end(), after.begin() + 4096);
          expect(is != after.end(), "nothing was written");
          change_byte(chunks, static_cast<std::uint64_t>(is - after.begin()));
          const std::string text = first_error<CorruptionError>(run, expected);
          expect(
              (contains(text, "4 steps taken") || contains(text, "5 steps taken")) && contains(text, chunks + " at "),
              text);
        }
        // Updates of other chunks may have begun to take that one's place.
        try {
          expect_goes_on(config, expected, 3, 3);
        } catch (const CorruptionError& error) {
          expect(contains(error.what(), "nor is the committed step before it whole"), error.what());
        }
        return 0;
      },
      "");
}

TEST_F(DurableFaults, ADeniedRingGoesOnWithThreads) {
  expect_child(
      [&] {
        const Undisturbed expected = undisturbed(scratch_ / "whole");
        const Config config = durable_config(place_);
        { TrainingRun(config, {}).durable_to(3, expected); }
        test::deny({SYS_io_uring_setup, SYS_io_uring_enter, SYS_io_uring_register}, EPERM);
        expect_goes_on(config, expected, 3, 3);
        return 0;
      },
      "");
}

TEST_F(DurableFaults, ASmallLimitOnLockedMemoryIsNoHindrance) {
  ::chmod(scratch_.path().c_str(), 0777);
  ::chmod(place_.c_str(), 0777);
  for (const rlim_t bytes : {rlim_t{0}, rlim_t{64} << 10}) {
    expect_child(
        [&] {
          test::become_ordinary();
          test::limit(RLIMIT_MEMLOCK, bytes);
          const Undisturbed expected = undisturbed(scratch_ / "whole");
          const Config config = durable_config(place_ + "/" + std::to_string(bytes));
          { TrainingRun(config, {}).durable_to(3, expected); }
          expect_goes_on(config, expected, 3, 3);
          return 0;
        },
        "");
  }
}

TEST_F(DurableFaults, ALimitOnTheSizeOfFilesIsAnErrorAndNotTheEndOfTheProcess) {
  expect_child(
      [&] {
        const Undisturbed expected = undisturbed(scratch_ / "whole");
        const Config config = durable_config(place_);
        { TrainingRun(config, {}).durable_to(3, expected); }
        rlimit whole{};
        expect(::getrlimit(RLIMIT_FSIZE, &whole) == 0, "getrlimit");
        const rlimit small{64 << 10, whole.rlim_max};
        expect(::setrlimit(RLIMIT_FSIZE, &small) == 0, "setrlimit");
        const std::string refused = refusal<IoError>(config);
        expect(contains(refused, "ulimit -f"), refused);
        Config in_memory = durable_config(place_ + "/other", Tier::host);
        in_memory.durability.every_steps = 0;
        TrainingRun run(in_memory, {});
        run.steps_to(2, expected);
        try {
          run.engine.save_checkpoint(place_ + "/saves/step-2");
          throw test::Wrong("it was saved");
        } catch (const IoError& error) {
          expect(contains(error.what(), "ulimit -f"), error.what());
        }
        run.steps_to(kSteps, expected);
        const std::vector<std::byte> bytes((64 << 10) + 1);
        try {
          io::make_small_files(place_)->write("small", bytes);
          throw test::Wrong("it was written");
        } catch (const IoError& error) {
          expect(contains(error.what(), "ulimit -f") && contains(error.what(), place_ + "/small"), error.what());
        }
        expect(::setrlimit(RLIMIT_FSIZE, &whole) == 0, "setrlimit");
        expect_goes_on(config, expected, 3, 3);
        return 0;
      },
      "");
}

}  // namespace
}  // namespace ballast::testing
