// Storage where the place is unkind: filters on system calls, small limits, many storages at once, devices and file
// systems with demands of their own. Each runs in a child process, so that nothing sticks.
// SPDX-License-Identifier: Apache-2.0
#include <ballast/base/error.h>
#include <ballast/io/chunk_store.h>
#include <ballast/io/directories.h>
#include <ballast/io/open_storage.h>
#include <fcntl.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <linux/loop.h>
#include <sched.h>
#include <sys/ioctl.h>
#include <sys/mount.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <sys/syscall.h>

#include <array>
#include <cerrno>
#include <cstddef>
#include <filesystem>
#include <string>
#include <thread>
#include <vector>

#include "support/unkind_places.h"

namespace ballast::io {
namespace {

using test::become_ordinary;
using test::contains;
using test::deny;
using test::expect;
using test::expect_child;
using test::kMissing;
using test::limit;
using test::Wrong;

void expect_store_works(const std::vector<std::string>& paths, Backend backend = Backend::automatic) {
  ChunkStoreOptions options;
  options.paths = paths;
  options.backend = backend;
  options.chunk_bytes = {100'000, 513, 4095, 4097, 1 << 20};
  ChunkStore store(options);
  for (std::uint32_t chunk = 0; chunk < options.chunk_bytes.size(); ++chunk) {
    const std::uint64_t bytes =
        (options.chunk_bytes[chunk] + store.alignment_bytes() - 1) / store.alignment_bytes() * store.alignment_bytes();
    test::AlignedMemory memory(bytes);
    test::fill_pattern(memory.span(), chunk);
    for (const Direction direction : {Direction::write, Direction::read}) {
      Transfer transfer;
      transfer.direction = direction;
      transfer.chunk = chunk;
      transfer.data = memory.data();
      transfer.bytes = bytes;
      Transfer* pointer = &transfer;
      store.submit({&pointer, 1});
      std::array<Transfer*, 1> finished;
      expect(store.poll(finished, true) == 1 && transfer.error_number == 0,
             "a transfer failed at " + store.describe(transfer));
      if (direction == Direction::write) std::memset(memory.data(), 0, bytes);
    }
    expect(test::holds_pattern(memory.span(), chunk), "other bytes came back");
  }
}

TEST(StorageEnvironment, ADeniedRingFallsBackToThreadsAndSaysWhyByTheRightName) {
  struct Case {
    std::initializer_list<long> calls;
    int error_number;
    const char* name;
    const char* call;
  };
  for (const Case& one :
       {Case{{SYS_io_uring_setup, SYS_io_uring_enter, SYS_io_uring_register}, EPERM, "EPERM", "io_uring_setup"},
        Case{{SYS_io_uring_setup, SYS_io_uring_enter, SYS_io_uring_register}, ENOSYS, "ENOSYS", "io_uring_setup"},
        Case{{SYS_io_uring_setup}, EACCES, "EACCES", "io_uring_setup"},
        Case{{SYS_io_uring_setup}, ENOMEM, "ENOMEM", "io_uring_setup"},
        Case{{SYS_io_uring_enter}, EPERM, "EPERM", "io_uring_enter"},
        Case{{SYS_io_uring_register}, EPERM, "EPERM", "io_uring_register"}}) {
    test::ScratchDirectory directory;
    expect_child(
        [&] {
          if (!io_uring_unavailable_reason().empty() && contains(one.call, "enter")) return kMissing;
          deny(one.calls, one.error_number);
          const std::string reason = io_uring_unavailable_reason();
          expect(contains(reason, one.name) && contains(reason, one.call), "reason: " + reason);
          expect(!contains(reason, "Success"), "reason: " + reason);
          const std::size_t descriptors = test::open_descriptors();
          const OpenedStorage opened = open_storage(Backend::automatic, {});
          expect(opened.storage->name() == "threads", "not the threads");
          expect(contains(opened.reason, one.name) && contains(opened.reason, "threads"), opened.reason);
          expect(test::open_descriptors() == descriptors, "a failed ring leaves a descriptor");
          try {
            open_storage(Backend::io_uring, {});
            throw Wrong("a forced ring was accepted");
          } catch (const IoError& error) {
            expect(contains(error.what(), one.name), error.what());
          }
          expect_store_works({directory.path()});
          return 0;
        },
        "io_uring is not available here already");
  }
}

TEST(StorageEnvironment, ASmallLockedMemoryLimitRefusesRegistrationWithTheNumbersAndTransfersWork) {
  for (const rlim_t bytes : {rlim_t{64} << 10, rlim_t{8} << 20}) {
    test::ScratchDirectory directory;
    ::chmod(directory.path().c_str(), 0777);
    expect_child(
        [&] {
          limit(RLIMIT_MEMLOCK, bytes);
          become_ordinary();
          if (!io_uring_unavailable_reason().empty()) return kMissing;
          const OpenedStorage opened = open_storage(Backend::automatic, {});
          const int file = ::open((directory / "data").c_str(), O_RDWR | O_CREAT | O_DIRECT, 0600);
          if (file < 0) return kMissing;
          Operation operation;
          operation.file = opened.storage->add_file(file);
          test::AlignedMemory memory(16 << 20);
          std::string reason;
          if (!opened.storage->register_memory(memory.span(), &reason)) {
            expect(contains(reason, "ENOMEM") && contains(reason, "16 MiB"), reason);
            expect(contains(reason, bytes == 65536 ? "64 KiB" : "8 MiB"), reason);
          } else {
            std::fprintf(stderr, "this kernel registers beyond the limit\n");
          }
          test::fill_pattern(memory.span(), 3);
          operation.direction = Direction::write;
          operation.bytes = memory.size();
          operation.data = memory.data();
          Operation* pointer = &operation;
          std::array<Operation*, 1> finished;
          opened.storage->submit({&pointer, 1});
          expect(opened.storage->poll(finished, true) == 1 && operation.error_number == 0, "write");
          std::memset(memory.data(), 0, memory.size());
          operation.direction = Direction::read;
          opened.storage->submit({&pointer, 1});
          expect(opened.storage->poll(finished, true) == 1 && operation.error_number == 0, "read");
          expect(test::holds_pattern(memory.span(), 3), "other bytes came back");
          return 0;
        },
        "no io_uring for an ordinary user, or no directory that one can write to");
  }
}

TEST(StorageEnvironment, AHundredStoragesLiveAtOnceUnderASmallLimitAndLeaveNoDescriptor) {
  expect_child(
      [] {
        if (!io_uring_unavailable_reason().empty()) return kMissing;
        limit(RLIMIT_MEMLOCK, 64 << 10);
        become_ordinary();
        const std::size_t before = test::open_descriptors();
        for (int round = 0; round < 2; ++round) {
          std::vector<OpenedStorage> all;
          for (int i = 0; i < 100; ++i) all.push_back(open_storage(Backend::automatic, {.queue_depth = 1024}));
        }
        expect(test::open_descriptors() == before, "descriptors are left");
        return 0;
      },
      "no io_uring here");
}

TEST(StorageEnvironment, AProcessLimitLeavesFewerThreadsOrAClearRefusal) {
  test::ScratchDirectory directory;
  ::chmod(directory.path().c_str(), 0777);
  expect_child(
      [&] {
        if (::geteuid() != 0) return kMissing;
        limit(RLIMIT_NPROC, 4);
        become_ordinary();
        try {
          const OpenedStorage opened = open_storage(Backend::threads, {.queue_depth = 32});
          expect(test::threads_now() <= 5, "more threads than the limit");
        } catch (const IoError& error) {
          expect(contains(error.what(), "EAGAIN"), error.what());
        }
        limit(RLIMIT_NPROC, 1);
        try {
          open_storage(Backend::threads, {});
          throw Wrong("threads beyond the limit");
        } catch (const IoError& error) {
          expect(contains(error.what(), "EAGAIN") && contains(error.what(), "ulimit -u"), error.what());
        }
        return 0;
      },
      "not root, so this user's other processes count too");
}

TEST(StorageEnvironment, BufferedTransfersAtDepth256WorkUnderAProcessLimitOf64) {
  for (const Backend backend : {Backend::threads, Backend::automatic}) {
    test::ScratchDirectory directory;
    ::chmod(directory.path().c_str(), 0777);
    expect_child(
        [&] {
          if (::geteuid() != 0) return kMissing;
          limit(RLIMIT_NPROC, 64);
          become_ordinary();
          const test::Descriptor file(::open((directory / "data").c_str(), O_RDWR | O_CREAT | O_CLOEXEC, 0600));
          const OpenedStorage opened = open_storage(backend, {.block_bytes = 4096, .queue_depth = 256});
          const std::uint32_t index = opened.storage->add_file(file.get());
          test::AlignedMemory memory(40 << 20);  // 10,240 requests each way
          test::fill_pattern(memory.span(), 4);
          std::size_t most = 0;
          for (const Direction direction : {Direction::write, Direction::read}) {
            std::vector<Operation> operations(640);
            std::vector<Operation*> pointers;
            for (std::size_t i = 0; i < operations.size(); ++i) {
              operations[i].direction = direction;
              operations[i].file = index;
              operations[i].bytes = 65536;
              operations[i].offset_bytes = i * 65536;
              operations[i].data = memory.data() + i * 65536;
              pointers.push_back(&operations[i]);
            }
            opened.storage->submit(pointers);
            std::array<Operation*, 64> finished;
            while (const std::size_t count = opened.storage->poll(finished, true)) {
              most = std::max(most, test::threads_now());
              for (std::size_t i = 0; i < count; ++i) expect(finished[i]->error_number == 0, "a transfer failed");
            }
            if (direction == Direction::write) std::memset(memory.data(), 0, memory.size());
          }
          expect(test::holds_pattern(memory.span(), 4), "other bytes came back");
          expect(most <= 64, std::to_string(most) + " threads");
          return 0;
        },
        "not root, so this user's other processes count too");
  }
}

TEST(StorageEnvironment, ADeviceOf4096ByteSectorsIsAskedForItsAlignment) {
  test::ScratchDirectory directory;
  expect_child(
      [&] {
        const test::Descriptor control(::open("/dev/loop-control", O_RDWR | O_CLOEXEC));
        const int number = control.get() < 0 ? -1 : ::ioctl(control.get(), LOOP_CTL_GET_FREE);
        if (number < 0) return kMissing;
        const std::string path = "/dev/loop" + std::to_string(number);
        const test::Descriptor loop(::open(path.c_str(), O_RDWR | O_CLOEXEC));
        const test::Descriptor backing(::open((directory / "image").c_str(), O_RDWR | O_CREAT | O_CLOEXEC, 0600));
        loop_config configuration = {};
        configuration.fd = static_cast<std::uint32_t>(backing.get());
        configuration.block_size = 4096;
        configuration.info.lo_flags = LO_FLAGS_AUTOCLEAR;
        if (loop.get() < 0 || ::ftruncate(backing.get(), 8 << 20) != 0 ||
            ::ioctl(loop.get(), LOOP_CONFIGURE, &configuration) != 0) {
          return kMissing;
        }
        const test::Descriptor direct(::open(path.c_str(), O_RDWR | O_CLOEXEC | O_DIRECT));
        for (const Backend backend : {Backend::threads, Backend::automatic}) {
          const OpenedStorage opened = open_storage(backend, {.block_bytes = 10'000, .queue_depth = 3});
          Operation operation;
          operation.file = opened.storage->add_file(direct.get());
          expect(opened.storage->alignment_bytes() == 4096,
                 "alignment " + std::to_string(opened.storage->alignment_bytes()));
          test::AlignedMemory memory(5 * 4096);
          test::fill_pattern(memory.span(), 8);
          Operation* pointer = &operation;
          std::array<Operation*, 1> finished;
          operation.data = memory.data();
          operation.bytes = memory.size();
          operation.offset_bytes = 3 * 4096;
          for (const Direction direction : {Direction::write, Direction::read}) {
            operation.direction = direction;
            opened.storage->submit({&pointer, 1});
            expect(opened.storage->poll(finished, true) == 1 && operation.error_number == 0, "transfer");
            if (direction == Direction::write) std::memset(memory.data(), 0, memory.size());
          }
          expect(test::holds_pattern(memory.span(), 8), "other bytes came back");
        }
        return 0;
      },
      "no loop device can be made here");
}

TEST(StorageEnvironment, OverlayAndTmpfsAreUsedDirectlyOrBufferedAsTheyAllow) {
  test::ScratchDirectory directory;
  for (const char* part : {"lower", "upper", "work", "merged", "tmpfs"})
    std::filesystem::create_directory(directory / part);
  expect_child(
      [&] {
        if (::unshare(CLONE_NEWNS) != 0 && ::unshare(CLONE_NEWUSER | CLONE_NEWNS) != 0) return kMissing;
        ::mount(nullptr, "/", nullptr, MS_REC | MS_PRIVATE, nullptr);
        const std::string layers =
            "lowerdir=" + directory / "lower" + ",upperdir=" + directory / "upper" + ",workdir=" + directory / "work";
        const bool overlay = ::mount("overlay", (directory / "merged").c_str(), "overlay", 0, layers.c_str()) == 0;
        const bool tmpfs = ::mount("tmpfs", (directory / "tmpfs").c_str(), "tmpfs", 0, "size=16m") == 0;
        if (!overlay && !tmpfs) return kMissing;
        std::vector<std::string> all;
        if (overlay) all.push_back(directory / "merged");
        if (tmpfs) all.push_back(directory / "tmpfs");
        for (const Backend backend : {Backend::threads, Backend::automatic}) {
          for (const std::string& path : all) expect_store_works({path}, backend);
          expect_store_works(all, backend);
        }
        for (const std::string& path : all) expect(std::filesystem::is_empty(path), path + " is not empty");
        return 0;
      },
      "no right to mount here");
}

TEST(StorageEnvironment, ALimitOnTheSizeOfFilesIsRefusedInsteadOfEndingTheProcess) {
  test::ScratchDirectory directory;
  for (const rlim_t bytes : {rlim_t{1} << 10, rlim_t{1} << 20}) {
    const int status = test::in_child([&] {
      limit(RLIMIT_FSIZE, bytes);
      try {
        expect_store_works({directory.path()});
        throw Wrong("accepted");
      } catch (const IoError& error) {
        expect(contains(error.what(), "ulimit -f") && contains(error.what(), directory.path()), error.what());
      }
      return 0;
    });
    EXPECT_TRUE(test::exited_with(status, 0)) << status;
    EXPECT_TRUE(std::filesystem::is_empty(directory.path()));
  }
}

TEST(StorageEnvironment, AFileSystemWithoutLocksIsRefusedAndNothingStays) {
  test::ScratchDirectory directory;
  for (const int error_number : {ENOLCK, ENOSYS}) {
    const int status = test::in_child([&] {
      deny({SYS_flock}, error_number);
      try {
        expect_store_works({directory / "states"});
        throw Wrong("accepted");
      } catch (const IoError& error) {
        expect(contains(error.what(), "locked") && contains(error.what(), "flock"), error.what());
      }
      return 0;
    });
    EXPECT_TRUE(test::exited_with(status, 0)) << status;
    EXPECT_TRUE(std::filesystem::is_empty(directory.path()));
  }
}

TEST(StorageEnvironment, ADirectoryWithoutTheRightToWriteIsRefusedByNameInTheCallersThread) {
  test::ScratchDirectory directory;
  ::chmod(directory.path().c_str(), 0555);
  for (const Backend backend : {Backend::automatic, Backend::threads}) {
    const int status = test::in_child([&] {
      become_ordinary();
      for (const std::string& path : {directory.path(), directory / "below"}) {
        try {
          expect_store_works({path}, backend);
          throw Wrong("accepted");
        } catch (const UnusablePath& error) {
          expect(contains(error.what(), path) && contains(error.what(), "EACCES"), error.what());
        }
      }
      return 0;
    });
    EXPECT_TRUE(test::exited_with(status, 0)) << status;
  }
  ::chmod(directory.path().c_str(), 0755);
}

TEST(StorageEnvironment, RanksThatMakeProbeAndRemoveTheSameDirectoriesDoNotDisturbOneAnother) {
  test::ScratchDirectory directory;
  std::array<std::string, 4> errors;
  std::vector<std::thread> ranks;
  for (std::size_t i = 0; i < errors.size(); ++i) {
    ranks.emplace_back([&, i] {
      try {
        // Some are always on their way in, the others always on their way out.
        for (int round = 0; round < 200; ++round) {
          if (i < 2) {
            ChunkStore::probe_alignment_bytes({directory / "a/b"});
          } else {
            for (int k = 0; k < 50; ++k) {
              ::mkdir((directory / "a").c_str(), 0755);
              ::mkdir((directory / "a/b").c_str(), 0755);
              ::rmdir((directory / "a/b").c_str());
              ::rmdir((directory / "a").c_str());
            }
          }
        }
      } catch (const Error& caught) {
        errors[i] = caught.what();
      }
    });
  }
  for (std::thread& rank : ranks) rank.join();
  for (const std::string& error : errors) EXPECT_EQ(error, "");
  // A directory may stay: who made it saw another's in it.
  for (const auto& left : std::filesystem::recursive_directory_iterator(directory.path()))
    EXPECT_TRUE(left.is_directory()) << left.path();
}

}  // namespace
}  // namespace ballast::io
