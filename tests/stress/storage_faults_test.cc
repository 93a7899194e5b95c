// What kernels do to busy programs, done to both back ends on purpose: refusals, short counts, signals, depth.
// SPDX-License-Identifier: Apache-2.0
#include <ballast/base/error.h>
#include <ballast/io/chunk_store.h>
#include <ballast/io/open_storage.h>
#include <fcntl.h>
#include <gtest/gtest.h>
#include <signal.h>
#include <sys/mman.h>

#include <array>
#include <atomic>
#include <cerrno>
#include <functional>
#include <mutex>
#include <thread>

#include "support/io_support.h"
#include "thread_storage.h"
#include "uring_storage.h"

namespace ballast::io {
namespace {

#if defined(__has_feature)
#if __has_feature(thread_sanitizer)
#define BALLAST_TEST_UNDER_TSAN
#endif
#endif
#ifdef BALLAST_TEST_UNDER_TSAN
constexpr bool kThreadSanitizer = true;
#else
constexpr bool kThreadSanitizer = false;
#endif

struct BackendCase {
  const char* name;
  std::unique_ptr<Storage> (*make)(const StorageOptions&, ResultHook);
  bool uring;
};

class StorageUnderFaults : public ::testing::TestWithParam<BackendCase> {
 protected:
  void SetUp() override {
    if (!GetParam().uring) return;
    if (const std::string reason = io_uring_unavailable_reason(); !reason.empty())
      GTEST_SKIP() << "no io_uring: " << reason;
  }
  std::unique_ptr<Storage> make(const StorageOptions& options, ResultHook hook = {}) {
    return GetParam().make(options, std::move(hook));
  }
  int open_file(std::uint64_t bytes, int extra_flags) {
    const int descriptor = ::open((directory_ / "data").c_str(), O_RDWR | O_CREAT | O_CLOEXEC | extra_flags, 0600);
    EXPECT_GE(descriptor, 0);
    EXPECT_EQ(::ftruncate(descriptor, static_cast<off_t>(bytes)), 0);
    return descriptor;
  }
  // Moves memory to the file and back, in operations of random length; true where all of it came through.
  bool round_trip(Storage& storage, std::uint32_t file, std::uint64_t bytes, base::Random& random) {
    test::AlignedMemory out(bytes), in(bytes);
    test::fill_pattern(out.span(), bytes);
    for (const Direction direction : {Direction::write, Direction::read}) {
      std::vector<Operation> operations;
      for (std::uint64_t at = 0; at < bytes;) {
        Operation one;
        one.direction = direction;
        one.priority = random.below(2) == 0 ? Priority::low : Priority::high;
        one.file = file;
        one.offset_bytes = at;
        one.bytes = std::min(bytes - at, 4096 * (1 + random.below(48)));
        one.data = (direction == Direction::write ? out : in).data() + at;
        at += one.bytes;
        operations.push_back(one);
      }
      std::vector<Operation*> pointers;
      for (Operation& one : operations) pointers.push_back(&one);
      storage.submit(pointers);
      std::array<Operation*, 7> finished;
      std::size_t back = 0;
      while (const std::size_t count = storage.poll(finished, true)) {
        for (std::size_t i = 0; i < count; ++i) {
          EXPECT_EQ(finished[i]->error_number, 0);
          EXPECT_EQ(finished[i]->transferred_bytes, finished[i]->bytes);
        }
        back += count;
      }
      EXPECT_EQ(back, operations.size());
    }
    return test::holds_pattern(in.span(), bytes);
  }

  test::ScratchDirectory directory_;
};

TEST_P(StorageUnderFaults, EveryThirdResultRefusedOrCutShortStillMovesAllBytes) {
  const test::Seed seed(31);
  std::mutex mutex;
  base::Random random(seed.value());
  ResultHook hook;
  hook.request = [&](Direction, std::uint64_t requested, std::int64_t result) -> std::int64_t {
    const std::lock_guard lock(mutex);
    if (result <= 0 || random.below(3) != 0) return result;
    switch (random.below(4)) {
      case 0:
        return -EAGAIN;
      case 1:
        return -EINTR;
      case 2:
        return -EBUSY;
      default:
        return requested <= 512 ? result : static_cast<std::int64_t>(512 * (1 + random.below(requested / 512 - 1)));
    }
  };
  const test::Descriptor file(open_file(0, O_DIRECT));
  base::Random lengths(seed.value() + 1);
  for (const std::uint32_t depth : {1u, 8u, 64u}) {
    auto storage = make({.block_bytes = 65536, .queue_depth = depth}, hook);
    const std::uint32_t index = storage->add_file(file.get());
    EXPECT_TRUE(round_trip(*storage, index, 3 << 20, lengths));
    EXPECT_GT(storage->counters().retries, 0u);
  }
}

TEST_P(StorageUnderFaults, ARefusalWithoutEndFailsAfterBoundedTriesAndOthersGoOn) {
  std::atomic<int> refusals{0};
  ResultHook hook;
  hook.request = [&](Direction direction, std::uint64_t, std::int64_t result) -> std::int64_t {
    if (direction == Direction::read) return result;
    ++refusals;
    return -EAGAIN;
  };
  const test::Descriptor file(open_file(65536, O_DIRECT));
  auto storage = make({.queue_depth = 4}, hook);
  const std::uint32_t index = storage->add_file(file.get());
  test::AlignedMemory memory(8192);
  Operation write, read;
  write.direction = Direction::write;
  write.file = read.file = index;
  write.bytes = read.bytes = 4096;
  write.data = memory.data();
  read.data = memory.data() + 4096;
  std::array<Operation*, 2> pointers = {&write, &read}, finished;
  storage->submit(pointers);
  std::size_t back = 0;
  while (const std::size_t count = storage->poll(finished, true)) back += count;
  EXPECT_EQ(back, 2u);
  EXPECT_EQ(write.error_number, EAGAIN);
  EXPECT_EQ(read.error_number, 0);
  EXPECT_LT(refusals.load(), 1000);
}

TEST_P(StorageUnderFaults, AnErrorInTheMiddleIsReportedOnceWithItsErrno) {
  std::atomic<int> count{0};
  ResultHook hook;
  hook.request = [&](Direction, std::uint64_t, std::int64_t result) -> std::int64_t {
    return ++count == 5 ? -EIO : result;
  };
  const test::Descriptor file(open_file(1 << 20, O_DIRECT));
  auto storage = make({.block_bytes = 4096, .queue_depth = 3}, hook);
  Operation operation;
  test::AlignedMemory memory(1 << 20);
  operation.file = storage->add_file(file.get());
  operation.bytes = memory.size();
  operation.data = memory.data();
  std::array<Operation*, 2> finished;
  Operation* pointer = &operation;
  storage->submit({&pointer, 1});
  ASSERT_EQ(storage->poll(finished, true), 1u);
  EXPECT_EQ(operation.error_number, EIO);
  EXPECT_LT(operation.transferred_bytes, operation.bytes);
  EXPECT_LT(count.load(), 20) << "after the failure the rest is not read any more";
}

TEST_P(StorageUnderFaults, AStormOfSignalsChangesNothing) {
  const test::Seed seed(41);
  struct sigaction action = {}, before;
  action.sa_handler = [](int) {};  // without SA_RESTART: calls come back with EINTR
  ASSERT_EQ(::sigaction(SIGUSR1, &action, &before), 0);
  std::atomic<bool> stop{false};
  const pthread_t target = ::pthread_self();
  std::thread storm([&] {
    while (!stop.load()) {
      ::pthread_kill(target, SIGUSR1);
      const timespec pause{0, 50'000};
      ::nanosleep(&pause, nullptr);
    }
  });
  const test::Descriptor file(open_file(0, O_DIRECT));
  base::Random lengths(seed.value());
  {
    auto storage = make({.block_bytes = 65536, .queue_depth = 8});
    const std::uint32_t index = storage->add_file(file.get());
    for (int i = 0; i < 5; ++i) EXPECT_TRUE(round_trip(*storage, index, 4 << 20, lengths));
  }
  stop = true;
  storm.join();
  ::sigaction(SIGUSR1, &before, nullptr);
}

TEST_P(StorageUnderFaults, ThousandsOfOperationsOverAFewSlotsEachComeBackOnce) {
  // Far more operations than the queues have entries, given before any is collected; many rounds.
  const test::Descriptor file(open_file(4 << 20, 0));  // cached, so completions come at once and in bulk
  auto storage = make({.block_bytes = 4096, .queue_depth = 8});
  const std::uint32_t index = storage->add_file(file.get());
  test::AlignedMemory memory(8 << 20);
  std::vector<Operation> operations(2048);
  std::vector<Operation*> pointers;
  for (std::size_t i = 0; i < operations.size(); ++i) {
    operations[i].file = index;
    operations[i].data = memory.data() + i * 4096;
    operations[i].offset_bytes = (i % 1024) * 4096;
    operations[i].tag = i;
    pointers.push_back(&operations[i]);
  }
  const test::Seed seed(51);
  base::Random random(seed.value());
  std::array<Operation*, 64> finished;
  for (int round = 0; round < 20; ++round) {
    for (Operation& one : operations) one.bytes = random.below(4097);
    storage->submit(pointers);
    std::vector<char> seen(operations.size(), 0);
    std::size_t back = 0;
    while (const std::size_t count = storage->poll(finished, true)) {
      for (std::size_t i = 0; i < count; ++i) {
        EXPECT_EQ(finished[i]->error_number, 0);
        EXPECT_EQ(seen[finished[i]->tag]++, 0);
      }
      back += count;
    }
    ASSERT_EQ(back, operations.size());
  }
}

TEST_P(StorageUnderFaults, BufferedTransfersAtDepth256KeepTheNumberOfThreadsSmall) {
  const test::Descriptor file(open_file(64 << 20, 0));
  const std::size_t before = test::threads_now();
  auto storage = make({.block_bytes = 16384, .queue_depth = 256});
  const std::uint32_t index = storage->add_file(file.get());
  test::AlignedMemory memory(64 << 20);
  std::size_t most = 0;
  for (const Direction direction : {Direction::write, Direction::read}) {
    std::vector<Operation> operations(4096);
    std::vector<Operation*> pointers;
    for (std::size_t i = 0; i < operations.size(); ++i) {
      operations[i].direction = direction;
      operations[i].file = index;
      operations[i].bytes = 16384;
      operations[i].offset_bytes = i * 16384;
      operations[i].data = memory.data() + i * 16384;
      pointers.push_back(&operations[i]);
    }
    storage->submit(pointers);
    std::array<Operation*, 64> finished;
    while (storage->poll(finished, true) > 0) most = std::max(most, test::threads_now());
  }
  // The pool's cap; the kernel's own workers for a ring are at most four for each CPU, and as many again.
  const std::size_t cap = GetParam().uring ? 8 * std::max(1u, std::thread::hardware_concurrency()) : kMaxStorageThreads;
  EXPECT_LE(most, before + cap);
}

TEST_P(StorageUnderFaults, ATransferBeyond4GiBReachesItsLastByte) {
  if (kThreadSanitizer && !GetParam().uring) {
    GTEST_SKIP() << "the thread sanitizer would need many GiB of shadow memory for one pread of this length";
  }
  // A sparse file, and memory whose middle is the same few pages over and over: only both ends are real.
  constexpr std::uint64_t kEnd = 1 << 20, kWindow = 64 << 20, kBytes = (std::uint64_t{4} << 30) + 8192;
  const test::Descriptor file(open_file(kBytes, O_DIRECT));
  test::AlignedMemory first(4096), last(4096);
  test::fill_pattern(first.span(), 1);
  test::fill_pattern(last.span(), 2);
  ASSERT_EQ(::pwrite(file.get(), first.data(), 4096, 0), 4096);
  ASSERT_EQ(::pwrite(file.get(), last.data(), 4096, static_cast<off_t>(kBytes - 4096)), 4096);

  const test::Descriptor window(::memfd_create("window", MFD_CLOEXEC));
  ASSERT_EQ(::ftruncate(window.get(), kWindow), 0);
  void* const reserved = ::mmap(nullptr, kBytes, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  ASSERT_NE(reserved, MAP_FAILED);
  auto* const memory = static_cast<std::byte*>(reserved);
  for (std::uint64_t at = kEnd; at < kBytes - kEnd; at += kWindow) {
    const std::uint64_t length = std::min(kWindow, kBytes - kEnd - at);
    ASSERT_NE(::mmap(memory + at, length, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_FIXED, window.get(), 0), MAP_FAILED);
  }
  for (std::byte* const end : {memory, memory + kBytes - kEnd}) {
    ASSERT_NE(::mmap(end, kEnd, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_FIXED, -1, 0), MAP_FAILED);
  }
  {
    auto storage = make({.block_bytes = std::uint64_t{8} << 30, .queue_depth = 2});
    Operation operation;
    operation.file = storage->add_file(file.get());
    operation.bytes = kBytes;
    operation.data = memory;
    Operation* pointer = &operation;
    storage->submit({&pointer, 1});
    std::array<Operation*, 1> finished;
    ASSERT_EQ(storage->poll(finished, true), 1u);
    EXPECT_EQ(operation.error_number, 0);
    EXPECT_EQ(operation.transferred_bytes, kBytes);
    EXPECT_EQ(storage->counters().read_bytes, kBytes);
  }
  EXPECT_TRUE(test::holds_pattern({memory, 4096}, 1));
  EXPECT_TRUE(test::holds_pattern({memory + kBytes - 4096, 4096}, 2));
  ::munmap(reserved, kBytes);
}

TEST_P(StorageUnderFaults, AThreadThatSubmittedMayEndBeforeItsTransfers) {
  const test::Descriptor file(open_file(8 << 20, O_DIRECT));
  for (int round = 0; round < 20; ++round) {
    auto storage = make({.block_bytes = 262144, .queue_depth = 16});
    Operation operation;
    test::AlignedMemory memory(8 << 20);
    operation.file = storage->add_file(file.get());
    operation.bytes = memory.size();
    operation.data = memory.data();
    std::thread([&] {
      Operation* pointer = &operation;
      storage->submit({&pointer, 1});
    }).join();
    std::array<Operation*, 1> finished;
    ASSERT_EQ(storage->poll(finished, true), 1u);
    EXPECT_EQ(operation.error_number, 0);
  }
}

INSTANTIATE_TEST_SUITE_P(Every, StorageUnderFaults,
                         ::testing::Values(BackendCase{"io_uring", make_uring_storage, true},
                                           BackendCase{"threads", make_thread_storage, false}),
                         [](const auto& one) { return one.param.name; });

class UringStorage : public ::testing::Test {
 protected:
  void SetUp() override {
    if (const std::string reason = io_uring_unavailable_reason(); !reason.empty())
      GTEST_SKIP() << "no io_uring: " << reason;
  }
};

TEST_F(UringStorage, CallsIntoTheRingThatAreRefusedForAWhileAreRepeated) {
  const test::Seed seed(61);
  base::Random random(seed.value());
  ResultHook hook;
  hook.enter = [&] { return random.below(3) == 0 ? -std::array{EINTR, EAGAIN, EBUSY}[random.below(3)] : 0; };
  test::ScratchDirectory directory;
  const test::Descriptor file(::open((directory / "data").c_str(), O_RDWR | O_CREAT | O_CLOEXEC | O_DIRECT, 0600));
  ASSERT_EQ(::ftruncate(file.get(), 4 << 20), 0);
  auto storage = make_uring_storage({.block_bytes = 16384, .queue_depth = 4}, hook);
  test::AlignedMemory memory(4 << 20);
  Operation operation;
  operation.file = storage->add_file(file.get());
  operation.bytes = memory.size();
  operation.data = memory.data();
  Operation* pointer = &operation;
  storage->submit({&pointer, 1});
  std::array<Operation*, 1> finished;
  ASSERT_EQ(storage->poll(finished, true), 1u);
  EXPECT_EQ(operation.error_number, 0);
  EXPECT_GT(storage->counters().retries, 0u);
}

TEST_F(UringStorage, ARingThatFailsForGoodThrowsItsErrnoAndIsDestroyedInPeace) {
  std::atomic<bool> broken{false};
  ResultHook hook;
  hook.enter = [&] { return broken ? -EBADF : 0; };
  test::ScratchDirectory directory;
  const test::Descriptor file(::open((directory / "data").c_str(), O_RDWR | O_CREAT | O_CLOEXEC | O_DIRECT, 0600));
  ASSERT_EQ(::ftruncate(file.get(), 1 << 20), 0);
  auto storage = make_uring_storage({.block_bytes = 4096, .queue_depth = 4}, hook);
  test::AlignedMemory memory(1 << 20);
  Operation operation;
  operation.file = storage->add_file(file.get());
  operation.bytes = memory.size();
  operation.data = memory.data();
  Operation* pointer = &operation;
  storage->submit({&pointer, 1});
  broken = true;
  std::array<Operation*, 1> finished;
  try {
    storage->poll(finished, true);
    FAIL() << "a broken ring went on";
  } catch (const IoError& error) {
    EXPECT_NE(std::string(error.what()).find("EBADF"), std::string::npos) << error.what();
  }
  broken = false;
  storage.reset();
  EXPECT_NE(operation.state, OperationState::in_flight);
}

TEST_F(UringStorage, MemoryAbove1GiBIsRegisteredInPiecesThatNoTransferCrosses) {
  // Registered whole; a transfer lies across the first border at 512 MiB.
  constexpr std::uint64_t kBytes = std::uint64_t{1088} << 20;
  void* const made =
      ::mmap(nullptr, kBytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  ASSERT_NE(made, MAP_FAILED);
  ::madvise(made, kBytes, MADV_HUGEPAGE);
  auto* const memory = static_cast<std::byte*>(made);
  test::ScratchDirectory directory;
  const test::Descriptor file(::open((directory / "data").c_str(), O_RDWR | O_CREAT | O_CLOEXEC | O_DIRECT, 0600));
  {
    auto storage = make_uring_storage({.block_bytes = 1 << 20, .queue_depth = 8});
    const std::uint32_t index = storage->add_file(file.get());
    std::string reason;
    if (!storage->register_memory({memory, kBytes}, &reason)) {
      EXPECT_NE(reason.find("ENOMEM"), std::string::npos) << reason;
    }
    constexpr std::uint64_t kPiece = std::uint64_t{512} << 20;
    const std::uint64_t border = kPiece - reinterpret_cast<std::uintptr_t>(memory) % kPiece;
    std::byte* const data = memory + border - 3 * 4096;
    test::fill_pattern({data, 5 << 20}, 9);
    std::array<Operation*, 1> finished;
    Operation operation;
    Operation* pointer = &operation;
    operation.file = index;
    operation.bytes = 5 << 20;
    operation.data = data;
    for (const Direction direction : {Direction::write, Direction::read}) {
      operation.direction = direction;
      storage->submit({&pointer, 1});
      ASSERT_EQ(storage->poll(finished, true), 1u);
      ASSERT_EQ(operation.error_number, 0);
      if (direction == Direction::write) std::memset(data, 0, 5 << 20);
    }
    EXPECT_TRUE(test::holds_pattern({data, 5 << 20}, 9));
    EXPECT_GE(storage->counters().read_requests, 6u) << "five megabytes, cut once more at the border";
  }
  ::munmap(made, kBytes);
}

}  // namespace
}  // namespace ballast::io
