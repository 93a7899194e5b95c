// ChunkStore and its places: paths and what they cannot be, locks, space, leftovers of other runs, probes.
// SPDX-License-Identifier: Apache-2.0
#include <ballast/base/error.h>
#include <ballast/base/size.h>
#include <ballast/io/chunk_store.h>
#include <ballast/io/directories.h>
#include <fcntl.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <linux/magic.h>
#include <sched.h>
#include <sys/file.h>
#include <sys/mount.h>
#include <sys/stat.h>
#include <sys/statfs.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <chrono>
#include <filesystem>
#include <fstream>
#include <thread>

#include "support/chunk_store_support.h"

namespace ballast::io {
namespace {

using ::testing::AllOf;
using ::testing::Contains;
using ::testing::HasSubstr;
using ::testing::Not;

TEST(ChunkStore, SpaceIsReservedAheadAndGivenBackAtTheEnd) {
  test::ScratchDirectory directory;
  {
    ChunkStore store(options_for({directory / "deep/er"}, {3 << 20, 5000}));
    struct stat status;
    ASSERT_EQ(::stat((directory / "deep/er/ballast-rank0.chunks").c_str(), &status), 0);
    EXPECT_EQ(static_cast<std::uint64_t>(status.st_size), store.reserved_bytes());
    EXPECT_GE(static_cast<std::uint64_t>(status.st_blocks) * 512, store.reserved_bytes());
  }
  EXPECT_FALSE(std::filesystem::exists(directory / "deep")) << "directories that it made are left";
}

TEST(ChunkStore, DirectoriesThatHoldSomethingElseStay) {
  test::ScratchDirectory directory;
  {
    ChunkStore store(options_for({directory / "deep/er"}, {4096}));
    std::ofstream(directory / "deep/note.txt") << "mine";
  }
  EXPECT_FALSE(std::filesystem::exists(directory / "deep/er"));
  EXPECT_TRUE(std::filesystem::exists(directory / "deep/note.txt"));
}

TEST(ChunkStore, RanksShareADirectory) {
  test::ScratchDirectory directory;
  ChunkStoreOptions options = options_for({directory.path()}, {8192});
  ChunkStore first(options);
  options.rank = 1;
  ChunkStore second(options);
  write_and_read_all(first, options.chunk_bytes, 1);
  write_and_read_all(second, options.chunk_bytes, 1);
}

TEST(ChunkStore, ADirectoryInUseIsRefusedWithTheHoldersPid) {
  test::ScratchDirectory directory;
  ChunkStore holder(options_for({directory.path()}, {8192}));
  test::AlignedMemory memory(8192);
  test::fill_pattern(memory.span(), 1);
  std::vector<Transfer> write = {transfer(Direction::write, 0, 0, memory.data(), 8192)};
  run_all(holder, write);
  ChunkStoreOptions other = options_for({directory.path()}, {8192});
  other.run_identity = kRunB;
  try {
    ChunkStore second(other);
    FAIL() << "two stores share a file";
  } catch (const IoError& error) {
    EXPECT_THAT(error.what(), AllOf(HasSubstr(directory.path()), HasSubstr(std::to_string(::getpid()))));
  }
  const int status = test::in_child([&] {
    // A process of its own: this child does not keep the lock that its parent has.
    try {
      ChunkStore second(other);
      return 1;
    } catch (const IoError& error) {
      return std::string(error.what()).find(std::to_string(::getppid())) != std::string::npos ? 0 : 2;
    }
  });
  EXPECT_TRUE(test::exited_with(status, 0)) << status;
  test::AlignedMemory back(8192);
  std::vector<Transfer> read = {transfer(Direction::read, 0, 0, back.data(), 8192)};
  run_all(holder, read);
  EXPECT_TRUE(test::holds_pattern(back.span(), 1));
}

TEST(ChunkStore, AHolderThatEndsWhileAnotherWaitsHandsItsPlaceOver) {
  test::ScratchDirectory directory;
  auto holder = std::make_unique<ChunkStore>(options_for({directory.path()}, {8192}));
  std::thread ending([&] {
    std::this_thread::sleep_for(std::chrono::milliseconds(100));
    holder.reset();
  });
  ChunkStoreOptions options = options_for({directory.path()}, {8192});
  options.lock_wait_ms = 20'000;
  ChunkStore next(options);
  ending.join();
  // The file that it waited for is gone; it holds a new one.
  EXPECT_TRUE(std::filesystem::exists(directory / "ballast-rank0.chunks"));
  write_and_read_all(next, options.chunk_bytes, 1);
}

TEST(ChunkStore, AForkedChildKeepsNeitherLockNorDescriptors) {
  for (const Backend backend : {Backend::automatic, Backend::threads}) {
    test::ScratchDirectory directory;
    ChunkStoreOptions options = options_for({directory.path()}, {8192});
    options.backend = backend;
    auto store = std::make_unique<ChunkStore>(options);
    int gate[2];
    ASSERT_EQ(::pipe(gate), 0);
    std::fflush(nullptr);
    const pid_t child = ::fork();
    ASSERT_GE(child, 0);
    if (child == 0) {
      ::close(gate[1]);
      char byte;
      [[maybe_unused]] const ssize_t ignored = ::read(gate[0], &byte, 1);  // until the parent is done
      store.reset();                                                       // must not hang, close or remove anything
      ::_exit(0);
    }
    ::close(gate[0]);
    write_and_read_all(*store, options.chunk_bytes, 1);
    store.reset();
    EXPECT_NO_THROW(store = std::make_unique<ChunkStore>(options)) << "the child keeps the lock";
    ::close(gate[1]);
    int status = 0;
    ASSERT_EQ(::waitpid(child, &status, 0), child);
    EXPECT_TRUE(test::exited_with(status, 0)) << status;
    EXPECT_TRUE(std::filesystem::exists(directory / "ballast-rank0.chunks")) << "the child removed the parent's file";
    write_and_read_all(*store, options.chunk_bytes, 1);
  }
}

TEST(ChunkStore, AKilledRunLeavesOneFileThatTheNextRunUsesAgain) {
  test::ScratchDirectory directory;
  std::uint64_t first_bytes = 0;
  for (int round = 0; round < 5; ++round) {
    const int status = test::in_child([&] {
      ChunkStoreOptions options = options_for({directory.path()}, {1 << 20, 1 << 20});
      options.run_identity[0] = static_cast<std::uint8_t>(round);
      options.lock_wait_ms = 10'000;
      ChunkStore store(options);
      test::AlignedMemory memory(2 << 20);
      std::vector<Transfer> writes = {transfer(Direction::write, 0, 0, memory.data(), 1 << 20),
                                      transfer(Direction::write, 1, 0, memory.data() + (1 << 20), 1 << 20)};
      std::vector<Transfer*> pointers = {&writes[0], &writes[1]};
      store.submit(pointers);
      ::kill(::getpid(), SIGKILL);
      return 0;
    });
    ASSERT_TRUE(WIFSIGNALED(status));
    std::uint64_t bytes = 0;
    for (const auto& entry : std::filesystem::directory_iterator(directory.path())) bytes += entry.file_size();
    if (round == 0) first_bytes = bytes;
    EXPECT_EQ(bytes, first_bytes) << "round " << round;
  }
  Notes notes;
  ChunkStoreOptions options = options_for({directory.path()}, {1 << 20, 1 << 20});
  options.run_identity = kRunB;
  options.note = notes.sink();
  options.lock_wait_ms = 10'000;
  {
    ChunkStore store(options);
    EXPECT_THAT(notes.lines, Contains(HasSubstr("another run")));
    write_and_read_all(store, options.chunk_bytes, 1);
  }
  EXPECT_TRUE(std::filesystem::is_empty(directory.path()));
}

TEST(ChunkStore, ALeftoverOfAnotherRunIsNeverReadAsCurrentAndAKeptOneOfThisRunIs) {
  test::ScratchDirectory directory;
  ChunkStoreOptions options = options_for({directory.path()}, {8192});
  options.keep_on_close = true;
  {
    ChunkStore store(options);
    write_and_read_all(store, options.chunk_bytes, 1);
  }
  test::AlignedMemory memory(8192);
  {
    ChunkStore same(options);
    std::vector<Transfer> read = {transfer(Direction::read, 0, 0, memory.data(), 8192)};
    run_all(same, read);
    EXPECT_TRUE(test::holds_pattern(memory.span(), 0));
  }
  options.run_identity = kRunB;
  ChunkStore other(options);
  std::vector<Transfer> read = {transfer(Direction::read, 0, 0, memory.data(), 8192)};
  run_all(other, read);
  EXPECT_TRUE(std::all_of(memory.data(), memory.data() + 8192, [](std::byte b) { return b == std::byte{0}; }));
}

TEST(ChunkStore, AnythingWrittenIntoItsPlaceIsReplacedWithANote) {
  test::ScratchDirectory directory;
  for (const std::string& text : {std::string("hello"), std::string(100'000, 'x'), std::string()}) {
    std::ofstream(directory / "ballast-rank0.chunks") << text;
    Notes notes;
    ChunkStoreOptions options = options_for({directory.path()}, {8192});
    options.note = notes.sink();
    ChunkStore store(options);
    if (!text.empty()) {
      EXPECT_THAT(notes.lines, Contains(HasSubstr("replaced")));
    }
    write_and_read_all(store, options.chunk_bytes, 1);
  }
}

void expect_refused(ChunkStoreOptions options, const std::string& wanted_words) {
  try {
    ChunkStore store(std::move(options));
    ADD_FAILURE() << "accepted: " << wanted_words;
  } catch (const Error& error) {
    EXPECT_THAT(error.what(), HasSubstr(wanted_words));
    EXPECT_THAT(error.what(), Not(HasSubstr("Success")));
    EXPECT_THAT(error.what(), Not(HasSubstr("\n")));
  }
}

TEST(ChunkStore, UnusablePathsAreRefusedByNameAndLeaveNothingBehind) {
  test::ScratchDirectory directory;
  std::ofstream(directory / "file") << "text";
  expect_refused(options_for({directory / "file"}, {4096}), directory / "file is a file");
  expect_refused(options_for({directory / "file/below"}, {4096}), directory / "file");
  expect_refused(options_for({"/proc/ballast"}, {4096}), "/proc/ballast");
  expect_refused(options_for({"/proc"}, {4096}), "/proc");
  expect_refused(options_for({""}, {4096}), "empty");
  expect_refused(options_for({}, {4096}), "no storage path");
  for (const std::string& path : {directory / "file", directory / "file/below", std::string("/proc/ballast"),
                                  std::string(), directory / std::string(300, 'x')}) {
    EXPECT_THROW(ChunkStore(options_for({path}, {4096})), UnusablePath) << path;
    EXPECT_THROW(ChunkStore::probe_alignment_bytes({path}), UnusablePath) << path;
  }
  // A directory that takes no files and says ENOENT.
  EXPECT_THROW(ChunkStore::probe_alignment_bytes({"/proc"}), UnusablePath);
  expect_refused(options_for({directory / "a", directory / "a/"}, {4096}), "same directory");
  expect_refused(options_for({directory / "new/one", directory / "file"}, {4096}), "is a file");
  EXPECT_FALSE(std::filesystem::exists(directory / "new"));
  std::filesystem::create_directory(directory / "ballast-rank0.chunks");
  expect_refused(options_for({directory.path()}, {4096}), "ballast-rank0.chunks");
  ChunkStoreOptions slots = options_for({directory / "a"}, {4096});
  slots.slots_per_chunk = 3;
  expect_refused(slots, "slots");
  EXPECT_FALSE(std::filesystem::exists(directory / "a"));
}

TEST(ChunkStore, MoreThanTheDiskHoldsIsRefusedBeforeAnyFileIsMade) {
  test::ScratchDirectory directory;
  // 2e9 fp32 elements are 8e9 bytes, far above 32 bits; a million such chunks fit no disk.
  expect_refused(options_for({directory / "new"}, std::vector<std::uint64_t>(1'000'000, 8'000'000'000)),
                 "wanted 7275.96 TiB");
  expect_refused(options_for({directory / "new"}, {UINT64_MAX}), "EiB");
  EXPECT_TRUE(std::filesystem::is_empty(directory.path()));
}

TEST(ChunkStore, AFullFileSystemIsRefusedWithNumbersAndAnEnoughBigOneIsNot) {
  test::ScratchDirectory directory;
  const int status = test::in_child([&] {
    if (::unshare(CLONE_NEWNS) != 0 && ::unshare(CLONE_NEWUSER | CLONE_NEWNS) != 0) return 77;
    ::mount(nullptr, "/", nullptr, MS_REC | MS_PRIVATE, nullptr);
    if (::mount("tmpfs", directory.path().c_str(), "tmpfs", 0, "size=64m") != 0) return 77;
    try {
      ChunkStore store(options_for({directory / "swap"}, {50 << 20, 50 << 20}));
      return 1;
    } catch (const IoError& error) {
      const std::string text = error.what();
      for (const char* word : {"swap", "wanted 100", "free 64 MiB"}) {
        if (text.find(word) == std::string::npos) {
          std::fprintf(stderr, "%s\n", text.c_str());
          return 2;
        }
      }
    }
    if (!std::filesystem::is_empty(directory.path())) return 3;
    Notes notes;
    ChunkStoreOptions options = options_for({directory / "swap"}, {20 << 20, 20 << 20});
    options.note = notes.sink();
    ChunkStore store(options);
    write_and_read_all(store, options.chunk_bytes, 1);
    return ::testing::Test::HasFailure() ? 4 : 0;
  });
  if (test::exited_with(status, 77)) GTEST_SKIP() << "no right to mount a tmpfs here";
  EXPECT_TRUE(test::exited_with(status, 0)) << status;
}

TEST(ChunkStore, AFileSystemInMemoryIsUsedBufferedWithOneNote) {
  struct statfs system = {};
  if (::access("/dev/shm", W_OK) != 0 || ::statfs("/dev/shm", &system) != 0 || system.f_type != TMPFS_MAGIC) {
    GTEST_SKIP() << "no writable tmpfs at /dev/shm";
  }
  test::ScratchDirectory directory("/dev/shm");
  Notes notes;
  ChunkStoreOptions options = options_for({directory.path()}, {100'000, 1 << 20});
  options.note = notes.sink();
  ChunkStore store(options);
  const auto count = std::count_if(notes.lines.begin(), notes.lines.end(),
                                   [](const std::string& line) { return line.find("buffered") != std::string::npos; });
  EXPECT_FALSE(store.direct());
  EXPECT_EQ(count, 1);
  write_and_read_all(store, options.chunk_bytes, 1);
  EXPECT_GE(ChunkStore::probe_alignment_bytes({directory.path()}), 512u);
}

TEST(ChunkStore, TheProbedAlignmentIsThatOfTheStoreAndLeavesNothing) {
  test::ScratchDirectory directory;
  const std::uint64_t probed = ChunkStore::probe_alignment_bytes({directory / "x/y", directory / "z"});
  EXPECT_TRUE(std::filesystem::is_empty(directory.path()));
  ChunkStore store(options_for({directory / "x/y", directory / "z"}, {4096}));
  EXPECT_EQ(store.alignment_bytes(), probed);
  EXPECT_GE(probed, 512u);
  EXPECT_THROW(ChunkStore::probe_alignment_bytes({"/proc/x"}), IoError);
}

// As another rank does, which may be kept from running then.
TEST(ChunkStore, AProbeWaitsForWhoeverLooksWhetherItIsLeftOver) {
  const test::ScratchDirectory directory;
  std::atomic<bool> done{false};
  std::atomic<int> held{0};
  std::thread other([&] {
    while (!done) {
      std::error_code error;
      for (const auto& entry : std::filesystem::directory_iterator(directory.path(), error)) {
        const int descriptor = ::open(entry.path().c_str(), O_RDONLY | O_CLOEXEC);
        if (descriptor < 0) continue;
        const bool holds = ::flock(descriptor, LOCK_EX | LOCK_NB) == 0 && std::filesystem::exists(entry.path(), error);
        if (holds) {
          ++held;
          std::this_thread::sleep_for(std::chrono::milliseconds(20));
        }
        ::close(descriptor);
        // Who looks does so once: it must not take the lock again before the prober has had its turn.
        if (holds) std::this_thread::sleep_for(std::chrono::milliseconds(50));
      }
    }
  });
  for (int i = 0; i < 100'000 && held < 3; ++i) {
    EXPECT_NO_THROW(ChunkStore::probe_alignment_bytes({directory.path()}));
  }
  done = true;
  other.join();
  EXPECT_GE(held, 3) << "it has never been looked at";
}
}  // namespace
}  // namespace ballast::io
