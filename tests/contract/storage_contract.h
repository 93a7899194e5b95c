// The contract of Storage as tests: every implementation and every double passes it.
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <ballast/base/error.h>
#include <ballast/io/storage.h>
#include <fcntl.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <functional>
#include <memory>
#include <set>
#include <string>
#include <vector>

#include "support/io_support.h"

namespace ballast::io {

struct StorageCase {
  std::string name;
  std::function<std::unique_ptr<Storage>(const StorageOptions&)> make;
  std::function<std::string()> missing = [] { return std::string(); };  // what the place lacks, or nothing
};

inline void PrintTo(const StorageCase& storage_case, std::ostream* stream) { *stream << storage_case.name; }

class StorageContract : public ::testing::TestWithParam<StorageCase> {
 protected:
  void SetUp() override {
    if (const std::string missing = GetParam().missing(); !missing.empty()) GTEST_SKIP() << missing;
  }

  std::unique_ptr<Storage> make(StorageOptions options) {
    options.wake = &wake_;
    return GetParam().make(options);
  }

  // A direct file of that many bytes on the disk under the build tree.
  int file(std::uint64_t bytes, const std::string& name = "data") {
    const std::string path = directory_ / name;
    int descriptor = ::open(path.c_str(), O_RDWR | O_CREAT | O_CLOEXEC | O_DIRECT, 0600);
    if (descriptor < 0) descriptor = ::open(path.c_str(), O_RDWR | O_CREAT | O_CLOEXEC, 0600);
    EXPECT_GE(descriptor, 0);
    EXPECT_EQ(::ftruncate(descriptor, static_cast<off_t>(bytes)), 0);
    descriptors_.push_back(std::make_unique<test::Descriptor>(descriptor));
    return descriptor;
  }

  static Operation operation(Direction direction, std::uint32_t file, std::uint64_t offset, std::byte* data,
                             std::uint64_t bytes, std::uint64_t tag = 0) {
    Operation made;
    made.direction = direction;
    made.file = file;
    made.offset_bytes = offset;
    made.data = data;
    made.bytes = bytes;
    made.tag = tag;
    return made;
  }

  static void submit(Storage& storage, std::vector<Operation>& operations) {
    std::vector<Operation*> pointers;
    for (Operation& one : operations) pointers.push_back(&one);
    storage.submit(pointers);
  }

  static std::vector<Operation*> drain(Storage& storage) {
    std::vector<Operation*> all;
    std::array<Operation*, 8> some;
    while (const std::size_t count = storage.poll(some, true))
      all.insert(all.end(), some.begin(), some.begin() + count);
    EXPECT_EQ(storage.outstanding(), 0u);
    return all;
  }

  static void expect_done(const std::vector<Operation>& operations) {
    for (const Operation& one : operations) {
      EXPECT_EQ(one.state, OperationState::done);
      EXPECT_EQ(one.error_number, 0);
      EXPECT_EQ(one.transferred_bytes, one.bytes);
    }
  }

  base::WakeEvent wake_;  // outlives the storages that a test makes
  test::ScratchDirectory directory_;
  std::vector<std::unique_ptr<test::Descriptor>> descriptors_;
};

TEST_P(StorageContract, BytesComeBackForLengthsAroundTheBlockSize) {
  const std::uint64_t block = 64 << 10;
  auto storage = make({.block_bytes = block, .queue_depth = 4});
  const std::uint32_t index = storage->add_file(file(0));
  const std::uint64_t a = std::max<std::uint64_t>(storage->alignment_bytes(), 512);
  for (const std::uint64_t bytes : {a, block - a, block, block + a, 3 * block, 7 * block + 5 * a}) {
    test::AlignedMemory out(bytes), in(bytes);
    test::fill_pattern(out.span(), bytes);
    std::vector<Operation> operations = {operation(Direction::write, index, 2 * a, out.data(), bytes, 1)};
    submit(*storage, operations);
    drain(*storage);
    expect_done(operations);
    operations = {operation(Direction::read, index, 2 * a, in.data(), bytes, 2)};
    submit(*storage, operations);
    const auto finished = drain(*storage);
    ASSERT_EQ(finished.size(), 1u);
    EXPECT_EQ(finished[0]->tag, 2u);
    expect_done(operations);
    EXPECT_TRUE(test::holds_pattern(in.span(), bytes)) << bytes;
  }
  EXPECT_GE(storage->counters().written_bytes, 12 * block);
}

TEST_P(StorageContract, EachOfManyOperationsComesBackExactlyOnceAtAnyDepth) {
  for (const std::uint32_t depth : {1u, 2u, 3u, 32u}) {
    auto storage = make({.block_bytes = 4096, .queue_depth = depth});
    const std::uint64_t count = 300, bytes = 8192;
    const std::uint32_t index = storage->add_file(file(count * bytes));
    test::AlignedMemory memory(count * bytes), back(count * bytes);
    test::fill_pattern(memory.span(), depth);
    for (const Direction direction : {Direction::write, Direction::read}) {
      std::vector<Operation> operations;
      for (std::uint64_t i = 0; i < count; ++i) {
        std::byte* const data = (direction == Direction::write ? memory : back).data() + i * bytes;
        operations.push_back(operation(direction, index, i * bytes, data, bytes, i));
        operations.back().priority = i % 3 == 0 ? Priority::low : Priority::high;
      }
      submit(*storage, operations);
      std::set<std::uint64_t> tags;
      for (const Operation* one : drain(*storage))
        EXPECT_TRUE(tags.insert(one->tag).second) << one->tag << " came twice";
      EXPECT_EQ(tags.size(), count);
      expect_done(operations);
    }
    EXPECT_TRUE(test::holds_pattern(back.span(), depth)) << "depth " << depth;
  }
}

TEST_P(StorageContract, SeveralFilesDoNotMix) {
  auto storage = make({.block_bytes = 16384, .queue_depth = 8});
  const std::uint64_t bytes = 65536;
  std::vector<std::uint32_t> files;
  for (int i = 0; i < 3; ++i) files.push_back(storage->add_file(file(0, "file" + std::to_string(i))));
  std::vector<std::unique_ptr<test::AlignedMemory>> out, in;
  std::vector<Operation> writes, reads;
  for (std::uint32_t i = 0; i < 3; ++i) {
    out.push_back(std::make_unique<test::AlignedMemory>(bytes));
    in.push_back(std::make_unique<test::AlignedMemory>(bytes));
    test::fill_pattern(out[i]->span(), 100 + i);
    writes.push_back(operation(Direction::write, files[i], 4096, out[i]->data(), bytes));
    reads.push_back(operation(Direction::read, files[i], 4096, in[i]->data(), bytes));
  }
  submit(*storage, writes);
  drain(*storage);
  submit(*storage, reads);
  drain(*storage);
  expect_done(writes);
  expect_done(reads);
  for (std::uint32_t i = 0; i < 3; ++i) EXPECT_TRUE(test::holds_pattern(in[i]->span(), 100 + i));
}

TEST_P(StorageContract, RewritingOneRangeLeavesItsNeighboursAlone) {
  auto storage = make({.block_bytes = 8192, .queue_depth = 4});
  const std::uint64_t bytes = 12288;
  const std::uint32_t index = storage->add_file(file(0));
  test::AlignedMemory all(5 * bytes), one(bytes), back(5 * bytes);
  test::fill_pattern(all.span(), 1);
  test::fill_pattern(one.span(), 2);
  std::vector<Operation> first = {operation(Direction::write, index, 4096, all.data(), all.size())};
  submit(*storage, first);
  drain(*storage);
  std::vector<Operation> second = {operation(Direction::write, index, 4096 + 2 * bytes, one.data(), bytes)};
  submit(*storage, second);
  drain(*storage);
  std::vector<Operation> reading = {operation(Direction::read, index, 4096, back.data(), back.size())};
  submit(*storage, reading);
  drain(*storage);
  expect_done(reading);
  std::memcpy(all.data() + 2 * bytes, one.data(), bytes);
  EXPECT_EQ(std::memcmp(all.data(), back.data(), all.size()), 0);
}

TEST_P(StorageContract, RegisteredMemoryWorksWholeAndInPartAndBesideOther) {
  auto storage = make({.block_bytes = 16384, .queue_depth = 8});
  const std::uint32_t index = storage->add_file(file(0));
  test::AlignedMemory memory(1 << 20), back(1 << 20);
  std::string reason;
  // Two ranges apart: a transfer over all of it crosses registered and other memory.
  const bool registered = storage->register_memory(memory.span().subspan(65536, 131072), &reason) &&
                          storage->register_memory(memory.span().subspan(524288, 65536), &reason);
  EXPECT_TRUE(registered || !reason.empty());
  test::fill_pattern(memory.span(), 5);
  std::vector<Operation> writing = {operation(Direction::write, index, 0, memory.data(), memory.size())};
  submit(*storage, writing);
  drain(*storage);
  expect_done(writing);
  std::vector<Operation> reading = {operation(Direction::read, index, 0, back.data(), back.size())};
  submit(*storage, reading);
  drain(*storage);
  EXPECT_TRUE(test::holds_pattern(back.span(), 5));
}

TEST_P(StorageContract, NoBytesIsAnOrdinaryOperation) {
  auto storage = make({});
  const std::uint32_t index = storage->add_file(file(4096));
  std::vector<Operation> operations = {operation(Direction::read, index, 0, nullptr, 0, 7)};
  submit(*storage, operations);
  EXPECT_EQ(storage->outstanding(), 1u);
  const auto finished = drain(*storage);
  ASSERT_EQ(finished.size(), 1u);
  EXPECT_EQ(finished[0]->tag, 7u);
  expect_done(operations);
}

TEST_P(StorageContract, PollWithNothingOutstandingReturnsAtOnce) {
  auto storage = make({});
  storage->add_file(file(4096));
  std::array<Operation*, 4> finished;
  EXPECT_EQ(storage->poll(finished, false), 0u);
  EXPECT_EQ(storage->poll(finished, true), 0u);
}

TEST_P(StorageContract, ReadingBeyondTheEndFailsAndOtherOperationsSucceed) {
  auto storage = make({.block_bytes = 4096, .queue_depth = 4});
  const std::uint32_t index = storage->add_file(file(65536));
  // Memory of its own for each: both are under way at once.
  test::AlignedMemory beyond(131072), within(65536);
  std::vector<Operation> operations = {operation(Direction::read, index, 0, beyond.data(), 131072),
                                       operation(Direction::read, index, 0, within.data(), 65536)};
  submit(*storage, operations);
  EXPECT_EQ(drain(*storage).size(), 2u);
  EXPECT_EQ(operations[0].state, OperationState::done);
  EXPECT_EQ(operations[0].error_number, ENODATA);
  EXPECT_LT(operations[0].transferred_bytes, operations[0].bytes);
  EXPECT_EQ(operations[1].error_number, 0);
}

TEST_P(StorageContract, WhatMeansNothingFailsAloneWithItsErrno) {
  auto storage = make({});
  const std::uint32_t index = storage->add_file(file(65536));
  test::AlignedMemory memory(65536);
  std::vector<Operation> operations = {operation(Direction::read, index + 1, 0, memory.data(), 4096),
                                       operation(Direction::read, index, 0, memory.data(), 4096)};
  if (storage->alignment_bytes() > 1) {
    operations.push_back(operation(Direction::read, index, 0, memory.data() + 4, 4096));
    operations.push_back(operation(Direction::read, index, 4, memory.data(), 4096));
    operations.push_back(operation(Direction::read, index, 0, memory.data(), 4100));
  }
  submit(*storage, operations);
  EXPECT_EQ(drain(*storage).size(), operations.size());
  EXPECT_EQ(operations[0].error_number, EBADF);
  EXPECT_EQ(operations[1].error_number, 0);
  for (std::size_t i = 2; i < operations.size(); ++i) EXPECT_EQ(operations[i].error_number, EINVAL) << i;
}

TEST_P(StorageContract, CancelledOperationsComeBackOnceAndTheirMemoryIsFree) {
  const test::Seed seed(11);
  base::Random random(seed.value());
  auto storage = make({.block_bytes = 4096, .queue_depth = 2});
  const std::uint32_t index = storage->add_file(file(1 << 20));
  test::AlignedMemory memory(1 << 20);
  for (int round = 0; round < 20; ++round) {
    std::vector<Operation> operations;
    for (std::uint64_t i = 0; i < 16; ++i) {
      operations.push_back(operation(Direction::read, index, i * 65536, memory.data() + i * 65536, 65536, i));
    }
    submit(*storage, operations);
    for (Operation& one : operations) {
      if (random.below(2) == 0) storage->cancel(one);
    }
    EXPECT_EQ(drain(*storage).size(), operations.size());
    for (const Operation& one : operations) {
      if (one.state == OperationState::cancelled) {
        EXPECT_EQ(one.error_number, ECANCELED);
        EXPECT_LT(one.transferred_bytes, one.bytes);
      } else {
        EXPECT_EQ(one.state, OperationState::done);
        EXPECT_EQ(one.transferred_bytes, one.bytes);
      }
    }
    // An operation may be used again.
    submit(*storage, operations);
    EXPECT_EQ(drain(*storage).size(), operations.size());
    expect_done(operations);
  }
}

TEST_P(StorageContract, CancellingAQueuedOperationStopsItBeforeItBegins) {
  auto storage = make({.block_bytes = 4096, .queue_depth = 1});
  const std::uint32_t index = storage->add_file(file(8 << 20));
  test::AlignedMemory memory(8 << 20);
  std::vector<Operation> operations = {operation(Direction::read, index, 0, memory.data(), 8 << 20, 0),
                                       operation(Direction::read, index, 0, memory.data(), 4096, 1)};
  operations[1].priority = Priority::low;
  submit(*storage, operations);
  // The first takes two thousand requests one by one; every ninth may be the second's, so cancel at once.
  storage->cancel(operations[1]);
  const bool was_cancelled = operations[1].state == OperationState::cancelled;
  EXPECT_EQ(drain(*storage).size(), 2u);
  EXPECT_EQ(operations[0].error_number, 0);
  if (was_cancelled) {
    EXPECT_EQ(operations[1].transferred_bytes, 0u);
  }
}

TEST_P(StorageContract, DestructionWithEverythingInFlightTouchesNoMemoryLater) {
  const test::Seed seed(3);
  base::Random random(seed.value());
  for (int round = 0; round < 25; ++round) {
    auto storage = make({.block_bytes = 65536, .queue_depth = 8});
    const std::uint32_t index = storage->add_file(file(4 << 20));
    auto memory = std::make_unique<test::AlignedMemory>(4 << 20);
    std::vector<Operation> operations;
    for (std::uint64_t i = 0; i < 8; ++i) {
      operations.push_back(operation(Direction::read, index, i * 524288, memory->data() + i * 524288, 524288));
    }
    submit(*storage, operations);
    const timespec pause{0, static_cast<long>(random.below(500'000))};
    ::nanosleep(&pause, nullptr);
    storage.reset();
    // Pages that a late request would still write to.
    test::fill_pattern(memory->span(), 77);
    EXPECT_TRUE(test::holds_pattern(memory->span(), 77));
    memory.reset();
    for (const Operation& one : operations) {
      EXPECT_TRUE(one.state == OperationState::done || one.state == OperationState::cancelled);
    }
  }
}

TEST_P(StorageContract, TheWakeEventFiresForWhoeverSleepsOnIt) {
  auto storage = make({.block_bytes = 65536, .queue_depth = 4});
  const std::uint32_t index = storage->add_file(file(4 << 20));
  test::AlignedMemory memory(4 << 20);
  for (int round = 0; round < 50; ++round) {
    std::vector<Operation> operations;
    for (std::uint64_t i = 0; i < 8; ++i) {
      operations.push_back(operation(Direction::read, index, i * 524288, memory.data() + i * 524288, 524288));
    }
    submit(*storage, operations);
    std::size_t back = 0;
    std::array<Operation*, 3> finished;
    while (back < operations.size()) {
      const std::size_t count = storage->poll(finished, false);
      back += count;
      if (count == 0 && back < operations.size()) {
        ASSERT_TRUE(wake_.wait(10'000)) << "nobody rang with " << storage->outstanding() << " outstanding";
      }
    }
    expect_done(operations);
  }
}

TEST_P(StorageContract, ImpossibleOptionsAreRefused) {
  EXPECT_THROW(make({.queue_depth = 0}), ConfigError);
  EXPECT_THROW(make({.queue_depth = 1u << 20}), ConfigError);
  EXPECT_THROW(make({.block_bytes = 0}), ConfigError);
}

TEST_P(StorageContract, ADescriptorThatIsNotOpenIsRefused) {
  auto storage = make({});
  EXPECT_THROW(storage->add_file(1 << 20), IoError);
}

TEST_P(StorageContract, ADescriptorThatCannotBeWrittenFailsTheWriteOnly) {
  auto storage = make({});
  ::close(file(65536));
  descriptors_.clear();
  const test::Descriptor reader(::open((directory_ / "data").c_str(), O_RDONLY | O_CLOEXEC));
  const std::uint32_t index = storage->add_file(reader.get());
  test::AlignedMemory memory(65536);
  std::vector<Operation> operations = {operation(Direction::write, index, 0, memory.data(), 65536),
                                       operation(Direction::read, index, 0, memory.data(), 65536)};
  submit(*storage, operations);
  drain(*storage);
  EXPECT_EQ(operations[0].error_number, EBADF);
  EXPECT_EQ(operations[0].transferred_bytes, 0u);
  EXPECT_EQ(operations[1].error_number, 0);
}

}  // namespace ballast::io
