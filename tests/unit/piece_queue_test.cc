// How operations are cut, ordered, resumed and ended: pure bookkeeping, so every case by hand or by enumeration.
// SPDX-License-Identifier: Apache-2.0
#include "piece_queue.h"

#include <gtest/gtest.h>

#include <array>
#include <cerrno>
#include <vector>

#include "support/io_support.h"

namespace ballast::io {
namespace {

Operation operation_of(std::uint64_t bytes, std::uint64_t offset = 0, Direction direction = Direction::read) {
  Operation made;
  made.direction = direction;
  made.bytes = bytes;
  made.offset_bytes = offset;
  return made;
}

// All pieces of one operation, each ended well.
std::vector<Piece> pieces_of(std::uint64_t block, std::uint64_t alignment, Operation& operation) {
  PieceQueue queue(block);
  queue.set_alignment(alignment);
  queue.add(operation, 1);
  std::vector<Piece> pieces;
  Piece piece;
  while (queue.peek(&piece)) {
    queue.take(piece);
    piece.done_bytes = piece.bytes;
    pieces.push_back(piece);
  }
  for (const Piece& one : pieces) queue.finish(one, 0);
  std::array<Operation*, 2> finished;
  EXPECT_EQ(queue.pop_finished(finished), 1u);
  EXPECT_EQ(operation.transferred_bytes, operation.bytes);
  EXPECT_EQ(operation.error_number, 0);
  return pieces;
}

TEST(PieceQueue, PiecesCoverAnOperationWithoutGapWhateverItsLength) {
  for (const std::uint64_t alignment : {1u, 512u, 4096u}) {
    for (const std::uint64_t block : {4096u, 10'000u, 1u << 20}) {
      for (std::uint64_t units = 1; units < 40; ++units) {
        Operation operation = operation_of(units * alignment, 8 * alignment);
        std::uint64_t at = 0;
        for (const Piece& piece : pieces_of(block, alignment, operation)) {
          EXPECT_EQ(piece.begin_bytes, at);
          EXPECT_LE(piece.bytes, std::max(block, alignment));
          EXPECT_EQ(piece.bytes % alignment, 0u);
          at += piece.bytes;
        }
        EXPECT_EQ(at, operation.bytes);
      }
    }
  }
}

TEST(PieceQueue, LengthsBeyond32BitsAndTheKernelsLimitAreCutRight) {
  // 3 GiB + 4 KiB and 4 GiB + 8 KiB: a 32-bit length would turn the second into 8 KiB.
  for (const std::uint64_t bytes : {(3ull << 30) + 4096, (4ull << 30) + 8192, (9ull << 30) + 4096}) {
    Operation operation = operation_of(bytes, 5ull << 40);
    const auto pieces = pieces_of(std::uint64_t{1} << 62, 4096, operation);
    std::uint64_t sum = 0;
    for (const Piece& piece : pieces) {
      EXPECT_LE(piece.bytes, 2'147'479'552u);  // what one request can move
      sum += piece.bytes;
    }
    EXPECT_EQ(sum, bytes);
    EXPECT_EQ(pieces.back().begin_bytes + pieces.back().bytes, bytes);
    EXPECT_EQ(operation.offset_bytes + pieces.back().begin_bytes, (5ull << 40) + bytes - pieces.back().bytes);
  }
}

TEST(PieceQueue, LowPriorityGetsOneInNineWhileHighWaitsAndEverythingAlone) {
  PieceQueue queue(4096);
  Operation high = operation_of(4096 * 200), low = operation_of(4096 * 200);
  low.priority = Priority::low;
  queue.add(low, 1);
  queue.add(high, 1);
  std::vector<Piece> taken;
  Piece piece;
  int low_count = 0;
  for (int i = 0; i < 90; ++i) {
    ASSERT_TRUE(queue.peek(&piece));
    queue.take(piece);
    taken.push_back(piece);
    low_count += piece.operation == &low;
    if (i == 7) {
      EXPECT_EQ(low_count, 0) << "high priority goes first";
    }
  }
  EXPECT_EQ(low_count, 10);
  queue.cancel(high);
  ASSERT_TRUE(queue.peek(&piece));
  EXPECT_EQ(piece.operation, &low);
  queue.cancel(low);
  for (const Piece& one : taken) queue.finish(one, ECANCELED);
}

TEST(PieceQueue, AfterAFailureTheRestIsNotIssuedAndTheFirstErrorStays) {
  PieceQueue queue(4096);
  Operation operation = operation_of(4096 * 10);
  queue.add(operation, 1);
  Piece first, second, third;
  ASSERT_TRUE(queue.peek(&first));
  queue.take(first);
  ASSERT_TRUE(queue.peek(&second));
  queue.take(second);
  EXPECT_FALSE(queue.finish(first, EIO));
  EXPECT_FALSE(queue.peek(&third));
  EXPECT_TRUE(PieceQueue::abandoned(operation));
  EXPECT_TRUE(queue.finish(second, ENOSPC));
  EXPECT_EQ(operation.state, OperationState::done);
  EXPECT_EQ(operation.error_number, EIO);
}

TEST(PieceQueue, CancellingWaitsForWhatIsInFlight) {
  PieceQueue queue(4096);
  Operation operation = operation_of(4096 * 2);
  queue.add(operation, 1);
  Piece piece;
  ASSERT_TRUE(queue.peek(&piece));
  queue.take(piece);
  EXPECT_FALSE(queue.cancel(operation));
  EXPECT_EQ(operation.state, OperationState::in_flight);
  piece.done_bytes = piece.bytes;
  EXPECT_TRUE(queue.finish(piece, 0));
  EXPECT_EQ(operation.state, OperationState::cancelled);
  EXPECT_EQ(operation.error_number, ECANCELED);
  EXPECT_EQ(operation.transferred_bytes, 4096u);
  EXPECT_FALSE(queue.cancel(operation)) << "it has ended already";
}

TEST(PieceQueue, ACancelThatComesTooLateLeavesTheOperationDone) {
  PieceQueue queue(4096);
  Operation operation = operation_of(4096);
  queue.add(operation, 1);
  Piece piece;
  ASSERT_TRUE(queue.peek(&piece));
  queue.take(piece);
  queue.cancel(operation);
  piece.done_bytes = piece.bytes;
  queue.finish(piece, 0);
  EXPECT_EQ(operation.state, OperationState::done);
  EXPECT_EQ(operation.error_number, 0);
}

TEST(PieceQueue, OperationsLeaveTheMiddleOfTheQueueWhenCancelled) {
  PieceQueue queue(4096);
  std::array<Operation, 5> operations;
  for (Operation& one : operations) {
    one = operation_of(4096);
    queue.add(one, 1);
  }
  for (const int i : {2, 0, 4}) EXPECT_TRUE(queue.cancel(operations[static_cast<std::size_t>(i)]));
  Piece piece;
  for (const int i : {1, 3}) {
    ASSERT_TRUE(queue.peek(&piece));
    EXPECT_EQ(piece.operation, &operations[static_cast<std::size_t>(i)]);
    queue.take(piece);
    piece.done_bytes = 4096;
    queue.finish(piece, 0);
  }
  EXPECT_FALSE(queue.peek(&piece));
  std::array<Operation*, 8> finished;
  EXPECT_EQ(queue.pop_finished(finished), 5u);
  EXPECT_EQ(queue.outstanding(), 0u);
}

TEST(PieceQueue, OffsetsAndLengthsThatOverflowAreRefused) {
  PieceQueue queue(4096);
  Operation operation = operation_of(4096, INT64_MAX - 4000);
  queue.add(operation, 1);
  EXPECT_EQ(operation.error_number, EINVAL);
}

// A file that answers each request with a count, or a refusal, drawn by seed: whatever it does, the bytes add up.
TEST(ApplyResult, AnyMixOfShortCountsAndRefusalsEndsWithAllBytesOnce) {
  const test::Seed seed(17);
  base::Random random(seed.value());
  for (int round = 0; round < 2000; ++round) {
    const std::uint64_t alignment = std::uint64_t{1} << (9 * random.below(2));
    Operation operation = operation_of(alignment * (1 + random.below(64)));
    Piece piece{&operation, 0, operation.bytes, 0, 0};
    std::vector<char> covered(operation.bytes, 0);
    PieceResult next{PieceStep::resume, 0};
    for (int calls = 0; next.step != PieceStep::complete; ++calls) {
      ASSERT_LT(calls, 10'000);
      const std::uint64_t draw = random.below(4);
      const std::uint64_t begin = piece.done_bytes;
      std::int64_t result = static_cast<std::int64_t>(piece.remaining_bytes());
      if (draw == 0) result = -std::array{EINTR, EAGAIN, EBUSY}[random.below(3)];
      if (draw == 1) result = 1 + static_cast<std::int64_t>(random.below(piece.remaining_bytes()));
      if (draw == 1 && static_cast<std::uint64_t>(result) < alignment) result = static_cast<std::int64_t>(alignment);
      next = apply_result(piece, result, alignment);
      ASSERT_NE(next.step, PieceStep::failed);
      EXPECT_EQ(piece.done_bytes % alignment, 0u);
      if (result > 0) {
        for (std::uint64_t i = begin; i < begin + static_cast<std::uint64_t>(result); ++i) covered[i] = 1;
      }
    }
    EXPECT_EQ(std::count(covered.begin(), covered.end(), 1), static_cast<std::ptrdiff_t>(operation.bytes));
  }
}

TEST(ApplyResult, RefusalsWithoutEndAndOtherErrorsFailWithTheirErrno) {
  Operation operation = operation_of(4096);
  Piece piece{&operation, 0, 4096, 0, 0};
  for (std::uint32_t i = 0; i < kMaxAttempts; ++i) EXPECT_EQ(apply_result(piece, -EAGAIN, 512).step, PieceStep::retry);
  const PieceResult last = apply_result(piece, -EAGAIN, 512);
  EXPECT_EQ(last.step, PieceStep::failed);
  EXPECT_EQ(last.error_number, EAGAIN);
  for (const int error : {EIO, ENOSPC, EINVAL, EFAULT, ENOMEM}) {
    Piece other{&operation, 0, 4096, 0, 0};
    const PieceResult result = apply_result(other, -error, 512);
    EXPECT_EQ(result.step, PieceStep::failed);
    EXPECT_EQ(result.error_number, error);
  }
}

TEST(ApplyResult, TheEndOfTheFileAndImpossibleCountsFail) {
  Operation reading = operation_of(8192), writing = operation_of(8192, 0, Direction::write);
  Piece piece{&reading, 0, 8192, 0, 0};
  EXPECT_EQ(apply_result(piece, 0, 512).error_number, ENODATA);
  piece = {&writing, 0, 8192, 0, 0};
  EXPECT_EQ(apply_result(piece, 0, 512).error_number, EIO);
  piece = {&reading, 0, 8192, 0, 0};
  EXPECT_EQ(apply_result(piece, 8193, 512).error_number, EIO);
  // A file that ends within a sector: the last aligned place is reached, then nothing more comes.
  piece = {&reading, 0, 8192, 0, 0};
  EXPECT_EQ(apply_result(piece, 5000, 4096).step, PieceStep::resume);
  PieceResult result{PieceStep::resume, 0};
  for (int i = 0; i < 10 && result.step == PieceStep::resume; ++i) result = apply_result(piece, 904, 4096);
  EXPECT_EQ(result.step, PieceStep::failed);
  EXPECT_EQ(result.error_number, ENODATA);
}

}  // namespace
}  // namespace ballast::io
