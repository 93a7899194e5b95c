// ChunkStore over real files: bytes, slots, scratch, and transfers that fail or must be refused.
// SPDX-License-Identifier: Apache-2.0
#include <ballast/base/error.h>
#include <ballast/base/size.h>
#include <ballast/io/chunk_store.h>
#include <ballast/io/testing/faulty_storage.h>
#include <ballast/io/testing/memory_storage.h>
#include <ballast/io/testing/throttled_storage.h>
#include <gtest/gtest.h>

#include <array>
#include <chrono>
#include <thread>

#include "support/chunk_store_support.h"

namespace ballast::io {
namespace {

class ChunkStoreOverBackends : public ::testing::TestWithParam<Backend> {
 protected:
  void SetUp() override {
    if (GetParam() != Backend::io_uring) return;
    if (const std::string reason = io_uring_unavailable_reason(); !reason.empty())
      GTEST_SKIP() << "no io_uring: " << reason;
  }
};

TEST_P(ChunkStoreOverBackends, EveryLengthComesBackOverAnyNumberOfPathsAndSlots) {
  test::ScratchDirectory directory;
  // Around sectors and pages, and one whose remainder is 448 for both 512 and 4096.
  const std::vector<std::uint64_t> lengths = {
      0, 2, 510, 512, 514, 4094, 4096, 4098, 3 * 4096 + 448, 100'000, 2 << 20, (5 << 20) + 448};
  for (const std::size_t path_count : {1u, 2u, 3u}) {
    for (const std::uint32_t slots : {1u, 2u}) {
      std::vector<std::string> paths;
      for (std::size_t i = 0; i < path_count; ++i) paths.push_back(directory / ("path" + std::to_string(i)));
      ChunkStoreOptions options = options_for(paths, lengths);
      options.backend = GetParam();
      options.slots_per_chunk = slots;
      options.storage.block_bytes = 256 << 10;
      options.storage.queue_depth = 5;
      ChunkStore store(options);
      EXPECT_EQ(store.backend_name(), GetParam() == Backend::threads ? "threads" : "io_uring");
      write_and_read_all(store, lengths, slots);
    }
  }
}

TEST_P(ChunkStoreOverBackends, OddElementCountsKeepTheirLengthRuleAcrossRunsAndSettings) {
  // 20 parameters of 12,001 + 7 k fp32 elements; written with one block size and depth, read with another.
  test::ScratchDirectory directory;
  std::vector<std::uint64_t> lengths;
  for (std::uint64_t k = 0; k < 20; ++k) lengths.push_back((12'001 + 7 * k) * 4);
  ChunkStoreOptions options = options_for({directory / "a"}, lengths);
  options.backend = GetParam();
  options.keep_on_close = true;
  options.storage = {.block_bytes = 1 << 20, .queue_depth = 32};
  {
    ChunkStore store(options);
    write_and_read_all(store, lengths, 1);
  }
  options.storage = {.block_bytes = 4096, .queue_depth = 3};
  ChunkStore store(options);
  for (std::uint32_t chunk = 0; chunk < lengths.size(); ++chunk) {
    test::AlignedMemory memory(padded(store, lengths[chunk]));
    std::vector<Transfer> reads = {transfer(Direction::read, chunk, 0, memory.data(), memory.size())};
    run_all(store, reads);
    EXPECT_TRUE(test::holds_pattern(memory.span(), chunk * 2)) << chunk;
  }
}

TEST_P(ChunkStoreOverBackends, AParameterWhoseLengthEndsInsideASectorKeepsItsLastBlock) {
  // 14,412,000 bf16 elements: 28,824,000 bytes, 448 beyond a sector and a page.
  test::ScratchDirectory directory;
  ChunkStoreOptions options = options_for({directory / "a"}, {28'824'000});
  options.backend = GetParam();
  ChunkStore store(options);
  EXPECT_EQ(padded(store, 28'824'000), base::round_up(28'824'000, store.alignment_bytes()));
  if (store.alignment_bytes() == 4096) {
    EXPECT_EQ(padded(store, 28'824'000), 28'827'648u);
  }
  write_and_read_all(store, options.chunk_bytes, 1);
}

TEST_P(ChunkStoreOverBackends, RewritingOneChunkInPartChangesNothingElse) {
  test::ScratchDirectory directory;
  const std::vector<std::uint64_t> lengths(5, 10'000);
  ChunkStoreOptions options = options_for({directory / "a"}, lengths);
  options.backend = GetParam();
  ChunkStore store(options);
  write_and_read_all(store, lengths, 1);
  const std::uint64_t tail = padded(store, 10'000) - 8192;
  test::AlignedMemory changed(tail);
  test::fill_pattern(changed.span(), 1234);
  std::vector<Transfer> write = {transfer(Direction::write, 3, 0, changed.data(), tail, 8192)};
  run_all(store, write);
  for (std::uint32_t chunk = 0; chunk < 5; ++chunk) {
    test::AlignedMemory memory(padded(store, 10'000)), expected(padded(store, 10'000));
    std::vector<Transfer> read = {transfer(Direction::read, chunk, 0, memory.data(), memory.size())};
    run_all(store, read);
    test::fill_pattern(expected.span(), chunk * 2);
    if (chunk == 3) std::memcpy(expected.data() + 8192, changed.data(), tail);
    EXPECT_EQ(std::memcmp(memory.data(), expected.data(), memory.size()), 0) << chunk;
  }
}

INSTANTIATE_TEST_SUITE_P(Every, ChunkStoreOverBackends, ::testing::Values(Backend::io_uring, Backend::threads),
                         [](const auto& one) { return one.param == Backend::threads ? "threads" : "io_uring"; });

TEST(ChunkStore, DestructionInTheMiddleOfTransfersTouchesNoMemoryLaterAndIsQuick) {
  const test::Seed seed(71);
  base::Random random(seed.value());
  for (int round = 0; round < 30; ++round) {
    test::ScratchDirectory directory;
    ChunkStoreOptions options = options_for({directory / "a", directory / "b"}, {8 << 20, 8 << 20});
    options.backend = round % 2 == 0 ? Backend::automatic : Backend::threads;
    test::AlignedMemory memory(16 << 20), guard(1 << 20);
    test::fill_pattern(guard.span(), 6);
    std::vector<Transfer> reads = {transfer(Direction::read, 0, 0, memory.data(), 8 << 20),
                                   transfer(Direction::read, 1, 0, memory.data() + (8 << 20), 8 << 20)};
    std::vector<Transfer*> pointers = {&reads[0], &reads[1]};
    {
      ChunkStore store(options);
      store.submit(pointers);
      std::this_thread::sleep_for(std::chrono::microseconds(random.below(2000)));
    }
    test::fill_pattern(memory.span(), 5);
    EXPECT_TRUE(test::holds_pattern(memory.span(), 5));
    EXPECT_TRUE(test::holds_pattern(guard.span(), 6));
  }
}

TEST(ChunkStore, ScratchHasOneSlotBehindAllOthersAndMayChangeWhileTheRestStays) {
  test::ScratchDirectory directory;
  ChunkStoreOptions options = options_for({directory.path()}, {8192, 4096});
  options.slots_per_chunk = 2;
  options.keep_on_close = true;
  const auto with_scratch = [&](std::vector<std::uint64_t> scratch) {
    ChunkStoreOptions all = options;
    all.lasting_chunks = 2;
    all.chunk_bytes.insert(all.chunk_bytes.end(), scratch.begin(), scratch.end());
    return all;
  };
  test::AlignedMemory memory(8192);
  const auto expect_kept = [&](ChunkStore& store) {
    std::vector<Transfer> read = {transfer(Direction::read, 0, 1, memory.data(), 8192)};
    run_all(store, read);
    EXPECT_TRUE(test::holds_pattern(memory.span(), 5));
  };
  {
    ChunkStore store(options);
    test::fill_pattern(memory.span(), 5);
    std::vector<Transfer> write = {transfer(Direction::write, 0, 1, memory.data(), 8192)};
    run_all(store, write);
  }
  options.must_exist = true;
  {
    ChunkStore store(with_scratch({8192, 0, 4096}));
    expect_kept(store);
    EXPECT_EQ(store.offset_bytes(2), store.offset_bytes(1) + 2 * store.slot_bytes(1));
    EXPECT_EQ(store.offset_bytes(4), store.offset_bytes(2) + store.slot_bytes(2));
    test::fill_pattern(memory.span(), 6);
    std::vector<Transfer> write = {transfer(Direction::write, 2, 0, memory.data(), 8192)};
    run_all(store, write);
    std::vector<Transfer> beyond = {transfer(Direction::write, 2, 1, memory.data(), 8192)};
    Transfer* pointer = beyond.data();
    EXPECT_THROW(store.submit({&pointer, 1}), UsageError);
    expect_kept(store);
  }
  {
    ChunkStore store(with_scratch({16384}));
    expect_kept(store);
  }
  ChunkStore store(options);
  expect_kept(store);
}

TEST(ChunkStore, ExtentsAreWholePagesWhateverTheLength) {
  const test::ScratchDirectory directory;
  const ChunkStore store(options_for({directory.path()}, {513, 4095, 4096, 4097, 28'824'000}));
  if (store.alignment_bytes() != 4096) GTEST_SKIP() << "this drive asks for " << store.alignment_bytes();
  const std::vector<std::uint64_t> expected = {4096, 4096, 4096, 8192, 28'827'648};
  for (std::uint32_t chunk = 0; chunk < expected.size(); ++chunk) EXPECT_EQ(store.slot_bytes(chunk), expected[chunk]);
  EXPECT_EQ(store.reserved_bytes(), 4096u + 3 * 4096 + 8192 + 28'827'648);
}

// One path answers later than a wait takes, the other at once.
TEST(ChunkStore, TransfersThatOutlastAWaitComeBackOnceBesidePromptOnes) {
  const test::ScratchDirectory directory;
  ChunkStoreOptions options = options_for({directory / "prompt", directory / "slow"}, {8192, 8192});
  options.storage_factory = [](Backend backend, const StorageOptions& storage_options, const std::string& path) {
    OpenedStorage opened = open_storage(backend, storage_options);
    if (path.ends_with("slow")) {
      opened.storage = std::make_unique<testing::ThrottledStorage>(
          std::move(opened.storage), testing::Throttle{.latency = std::chrono::milliseconds(1200)},
          storage_options.wake);
    }
    return opened;
  };
  ChunkStore store(options);
  test::AlignedMemory out(8192), in(8192), prompt(8192);
  for (int round = 0; round < 2; ++round) {
    test::fill_pattern(out.span(), static_cast<std::uint64_t>(round));
    for (const Direction direction : {Direction::write, Direction::read}) {
      std::byte* const data = (direction == Direction::write ? out : in).data();
      Transfer slow = transfer(direction, 1, 0, data, 8192);
      Transfer* pointer = &slow;
      store.submit({&pointer, 1});
      int slow_back = 0;
      std::array<Transfer*, 3> finished;
      for (int i = 0; i < 50; ++i) {
        Transfer quick = transfer(Direction::write, 0, 0, prompt.data(), 8192);
        pointer = &quick;
        store.submit({&pointer, 1});
        for (bool quick_back = false; !quick_back;) {
          const std::size_t count = store.poll(finished, true);
          for (std::size_t k = 0; k < count; ++k) {
            EXPECT_EQ(finished[k]->error_number, 0);
            quick_back |= finished[k] == &quick;
            slow_back += finished[k] == &slow;
          }
        }
      }
      while (const std::size_t count = store.poll(finished, true)) {
        for (std::size_t k = 0; k < count; ++k) slow_back += finished[k] == &slow;
      }
      EXPECT_EQ(slow_back, 1);
      EXPECT_EQ(slow.error_number, 0);
    }
    EXPECT_TRUE(test::holds_pattern(in.span(), static_cast<std::uint64_t>(round)));
  }
}

TEST(ChunkStore, TransfersOutsideTheirChunkOrOffAlignmentAreRefusedAtOnce) {
  test::ScratchDirectory directory;
  ChunkStore store(options_for({directory.path()}, {8192, 0}));
  test::AlignedMemory memory(65536);
  std::vector<Transfer> wrong = {transfer(Direction::read, 2, 0, memory.data(), 4096),
                                 transfer(Direction::read, 0, 1, memory.data(), 4096),
                                 transfer(Direction::read, 0, 0, memory.data(), 12288),
                                 transfer(Direction::read, 0, 0, memory.data(), 8192, 4096),
                                 transfer(Direction::read, 1, 0, memory.data(), 4096),
                                 transfer(Direction::read, 0, 0, memory.data() + 64, 4096),
                                 transfer(Direction::read, 0, 0, memory.data(), 4096, 100),
                                 transfer(Direction::read, 0, 0, memory.data(), 100),
                                 transfer(Direction::read, 0, 0, memory.data(), UINT64_MAX - 4095, 4096)};
  for (Transfer& one : wrong) {
    std::vector<Transfer*> pointers = {&one};
    EXPECT_THROW(store.submit(pointers), UsageError);
  }
  EXPECT_EQ(store.outstanding(), 0u);
}

TEST(ChunkStore, AFailedTransferSaysWhereItWasGoing) {
  test::ScratchDirectory directory;
  ChunkStoreOptions options = options_for({directory / "a", directory / "b"}, {8192, 8192, 8192});
  options.storage_factory = [](Backend, const StorageOptions& storage_options, const std::string&) {
    auto memory = std::make_unique<testing::MemoryStorage>(storage_options, testing::MemoryStorageOptions{});
    return OpenedStorage{std::make_unique<testing::FaultyStorage>(
                             std::move(memory), testing::Faults{.errors_per_mille = 1000}, storage_options.wake),
                         "a double"};
  };
  ChunkStore store(options);
  test::AlignedMemory memory(8192);
  Transfer one = transfer(Direction::write, 2, 0, memory.data(), 4096, 4096);
  std::vector<Transfer*> pointers = {&one};
  store.submit(pointers);
  std::array<Transfer*, 1> finished;
  ASSERT_EQ(store.poll(finished, true), 1u);
  EXPECT_EQ(finished[0]->error_number, EIO);
  EXPECT_EQ(store.describe(one), directory / "a/ballast-rank0.chunks at 16384");
}

}  // namespace
}  // namespace ballast::io
