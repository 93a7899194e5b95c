// Several writers of one checkpoint, or of one folder of safetensors: ranks of which one is late when all are killed,
// and processes that do not know of each other. What has its name is whole and of one writer. Each in child processes.
// SPDX-License-Identifier: Apache-2.0
#include <ballast/base/error.h>
#include <ballast/engine/checkpoint.h>
#include <ballast/engine/safetensors.h>
#include <ballast/io/testing/throttled_storage.h>
#include <gtest/gtest.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <unistd.h>

#include <array>
#include <atomic>
#include <cerrno>
#include <chrono>
#include <csignal>
#include <filesystem>
#include <new>
#include <thread>

#include "durable/checkpoints.h"
#include "executor.h"
#include "support/engine_support.h"
#include "support/on_ranks.h"
#include "support/safetensors_support.h"
#include "support/unkind_places.h"

namespace ballast::testing {
namespace {

using test::contains;
using test::expect;
using test::in_child;

constexpr int kRanks = 4;

Config config_of(const std::string& path) {
  Config config = plain_config(path, Tier::host, Timing::just_in_time);
  config.budget.device_bytes = config.budget.host_bytes = std::uint64_t{8} << 20;
  config.threads = 1;
  return config;
}

// The drive of the last rank answers late from the second checkpoint on.
std::shared_ptr<engine::TestHooks> late_hooks(int rank) {
  auto hooks = std::make_shared<engine::TestHooks>();
  hooks->checkpoint_storage = [rank](io::Backend, const io::StorageOptions& options, const std::string& path) {
    io::OpenedStorage opened = io::open_storage(io::Backend::threads, options);
    if (rank == kRanks - 1 && contains(path, "step-2")) {
      opened.storage = std::make_unique<io::testing::ThrottledStorage>(
          std::move(opened.storage), io::testing::Throttle{.latency = std::chrono::seconds(5)}, options.wake);
    }
    return opened;
  };
  return hooks;
}

TEST(CheckpointWriters, RanksKilledWhileOneIsLateGoOnFromTheCheckpointBefore) {
  const TemporaryDirectory directory;
  const std::string saves = directory.path() + "/saves", unpublished = saves + "/step-2.new";
  for (const bool durable : {false, true}) {
    SCOPED_TRACE(durable ? "beside training" : "between steps");
    Config config = config_of(directory.path() + (durable ? "/durable" : "/plain"));
    config.durability.every_steps = durable ? 1 : 0;
    const int status = in_child([&] {
      std::thread([&] {  // once all but the last rank have written
        for (;;) {
          int there = 0;
          for (int rank = 0; rank < kRanks; ++rank) {
            there += std::filesystem::exists(unpublished + "/ballast-rank" + std::to_string(rank) + ".step-2.manifest");
          }
          if (there == kRanks - 1) ::kill(::getpid(), SIGKILL);
          std::this_thread::sleep_for(std::chrono::milliseconds(5));
        }
      })
          .detach();
      on_ranks(kRanks, [&](int rank, const std::shared_ptr<Communicator>& communicator) {
        EngineEnvironment environment;
        environment.communicator = communicator;
        environment.test_hooks = late_hooks(rank);
        Engine engine(config, environment);
        SyntheticTrainer trainer(engine, small_model(3));
        engine.commit();
        trainer.initialize();
        for (const char* name : {"/step-1", "/step-2"}) {
          trainer.step();
          engine.save_checkpoint(saves + name);
        }
        engine.settle();
      });
      return 1;  // the late rank was not late
    });
    ASSERT_TRUE(WIFSIGNALED(status) && WTERMSIG(status) == SIGKILL) << status;
    EXPECT_FALSE(std::filesystem::exists(saves + "/step-2"));
    EXPECT_TRUE(std::filesystem::exists(unpublished));
    EXPECT_FALSE(std::filesystem::exists(unpublished + "/ballast-rank3.step-2.manifest"));
    for (const int ranks : {kRanks, 1}) {
      const int resumed = in_child([&] {
        on_ranks(ranks, [&](int, const std::shared_ptr<Communicator>& communicator) {
          Config other = config_of(directory.path() + "/other");
          EngineEnvironment environment;
          environment.communicator = communicator;
          Engine engine(other, environment);
          SyntheticTrainer trainer(engine, small_model(3));
          engine.commit({ExistingRun::resume, saves});
          expect(engine.resumed() && engine.resumed()->path == saves + "/step-1" && engine.resumed()->step == 1,
                 "it does not go on from the one before");
          trainer.resume();
          trainer.step();
        });
        return 0;
      });
      EXPECT_TRUE(test::exited_with(resumed, 0)) << resumed;
      // Whoever goes on removes what was interrupted.
      EXPECT_FALSE(std::filesystem::exists(unpublished));
    }
    EXPECT_NO_THROW(CheckpointReader({saves}).verify());
    std::filesystem::remove_all(saves);
  }
}

// Runs `once` in each of two processes at once, until neither was refused `times` times: whoever is done goes on as
// long as the other is not, so that they meet to the end.
void in_two_processes(int times, const std::function<void(int)>& once) {
  struct Shared {
    std::array<std::atomic<int>, 2> done{};
  };
  void* const memory = ::mmap(nullptr, sizeof(Shared), PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
  ASSERT_NE(memory, MAP_FAILED);
  Shared& shared = *new (memory) Shared;
  std::array<pid_t, 2> children{};
  for (std::size_t which = 0; which < 2; ++which) {
    std::fflush(nullptr);
    children[which] = ::fork();
    if (children[which] != 0) continue;
    ::alarm(150);
    try {
      while (shared.done[0] < times || shared.done[1] < times) {
        try {
          once(static_cast<int>(which));
          ++shared.done[which];
        } catch (const IoError& error) {
          if (!contains(error.what(), "another run")) throw;
        }
        if (shared.done[which] >= times) std::this_thread::sleep_for(std::chrono::milliseconds(1));
      }
    } catch (const std::exception& error) {
      std::fprintf(stderr, "child: %s\n", error.what());
      shared.done[which] = times;
      ::_exit(1);
    }
    ::_exit(0);
  }
  for (const pid_t child : children) {
    int status = 0;
    EXPECT_EQ(::waitpid(child, &status, 0), child);
    EXPECT_TRUE(test::exited_with(status, 0))
        << status << ", " << shared.done[0] << " and " << shared.done[1] << " done";
  }
  ::munmap(memory, sizeof(Shared));
}

constexpr std::array<std::int64_t, 2> kElements = {1000, 60'000};

void make_source(const std::string& path, std::int64_t elements) {
  const std::string bytes = std::to_string(elements * 4);
  write_bytes(path, safetensors_bytes(R"({"u.w":{"dtype":"F32","shape":[)" + std::to_string(elements) +
                                          "],\"data_offsets\":[0," + bytes + "]}}",
                                      std::string(static_cast<std::size_t>(elements) * 4, '\1')));
}

TEST(CheckpointWriters, TwoProcessesThatSaveToOneNameLeaveAWholeOneOfEither) {
  const Watchdog watchdog(200);
  const TemporaryDirectory directory;
  const std::string path = directory.path() + "/saves/step-0";
  for (const std::int64_t elements : kElements)
    make_source(directory.path() + "/" + std::to_string(elements), elements);
  in_two_processes(10, [&](int which) {
    const std::int64_t elements = kElements[static_cast<std::size_t>(which)];
    SafetensorsReader source(directory.path() + "/" + std::to_string(elements));
    import_safetensors(source, {{"u", {{"w", {elements}}}}}, path);
  });
  CheckpointReader reader({path});
  reader.verify();
  const std::int64_t elements = reader.parameters().front().elements;
  EXPECT_TRUE(elements == kElements[0] || elements == kElements[1]) << elements;
  std::vector<std::string> left;
  for (const auto& entry : std::filesystem::directory_iterator(directory.path() + "/saves"))
    left.push_back(entry.path().filename());
  EXPECT_EQ(left, std::vector<std::string>{"step-0"});
}

TEST(CheckpointWriters, TwoProcessesThatExportIntoOneFolderLeaveAWholeFileOfEither) {
  const Watchdog watchdog(200);
  const TemporaryDirectory directory;
  for (const std::int64_t elements : kElements) {
    const std::string name = directory.path() + "/" + std::to_string(elements);
    make_source(name, elements);
    SafetensorsReader source(name);
    import_safetensors(source, {{"u", {{"w", {elements}}}}}, name + "-saves/step-0");
  }
  const std::string out = directory.path() + "/out";
  in_two_processes(50, [&](int which) {
    CheckpointReader reader(
        {directory.path() + "/" + std::to_string(kElements[static_cast<std::size_t>(which)]) + "-saves"});
    export_safetensors(reader, out);
  });
  SafetensorsReader reader(out);
  ASSERT_EQ(reader.tensors().size(), 1U);
  const std::int64_t elements = reader.tensors().front().elements;
  EXPECT_TRUE(elements == kElements[0] || elements == kElements[1]) << elements;
  std::vector<std::string> left;
  for (const auto& entry : std::filesystem::directory_iterator(out)) left.push_back(entry.path().filename());
  EXPECT_EQ(left, std::vector<std::string>{"model.safetensors"});
}

// As on file systems of the net, where only what is open for writing can be locked.
TEST(CheckpointWriters, AFolderThatCannotBeLockedIsHeldByAFileInIt) {
  const TemporaryDirectory directory;
  for (const int error_number : {EBADF, ENOLCK}) {
    const int status = in_child([&] {
      test::deny({SYS_flock}, error_number);
      {
        const engine::FolderLock held(directory.path());
        try {
          const engine::FolderLock again(directory.path());
          throw test::Wrong("two hold it");
        } catch (const IoError& error) {
          expect(contains(error.what(), "another run") && contains(error.what(), directory.path()), error.what());
        }
        const int other = in_child([&] {
          try {
            const engine::FolderLock again(directory.path());
            return 1;
          } catch (const IoError&) {
            return 0;
          }
        });
        expect(test::exited_with(other, 0), "another process holds it, too");
      }
      const engine::FolderLock afterwards(directory.path());
      return 0;
    });
    EXPECT_TRUE(test::exited_with(status, 0)) << status;
  }
}

}  // namespace
}  // namespace ballast::testing
