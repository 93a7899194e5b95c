// The bookkeeping of queued operations and their pieces.
// SPDX-License-Identifier: Apache-2.0
#include "piece_queue.h"

#include <ballast/base/check.h>
#include <ballast/base/error.h>
#include <ballast/base/size.h>

#include <algorithm>
#include <cerrno>
#include <string>

namespace ballast::io {
namespace {

// What Operation::reserved holds while the operation is in the storage's hands.
enum Field : std::size_t { kNext, kPrevious, kIssuedBytes, kPieces, kFlags, kError };
constexpr std::uint64_t kInQueue = 1;  // linked into the list of its priority
constexpr std::uint64_t kCancelRequested = 2;

Operation* link(const Operation& operation, Field field) {
  return reinterpret_cast<Operation*>(static_cast<std::uintptr_t>(operation.reserved[field]));
}
void set_link(Operation& operation, Field field, Operation* other) {
  operation.reserved[field] = reinterpret_cast<std::uintptr_t>(other);
}

bool worth_retrying(int error_number) {
  // ECANCELED without our asking: the kernel cancels what a thread that ended had handed to its workers.
  return error_number == EINTR || error_number == EAGAIN || error_number == EBUSY || error_number == ECANCELED;
}

}  // namespace

PieceResult apply_result(Piece& piece, std::int64_t result, std::uint64_t alignment_bytes) {
  const bool reading = piece.operation->direction == Direction::read;
  if (result < 0) {
    const int error_number = static_cast<int>(-result);
    if (!worth_retrying(error_number)) return {PieceStep::failed, error_number};
    if (++piece.attempts > kMaxAttempts) return {PieceStep::failed, error_number};
    return {PieceStep::retry, 0};
  }
  const auto count = static_cast<std::uint64_t>(result);
  if (count > piece.remaining_bytes()) return {PieceStep::failed, EIO};
  if (count == piece.remaining_bytes()) {
    piece.done_bytes = piece.bytes;
    return {PieceStep::complete, 0};
  }
  // A short count: go on from the last aligned place, as the next request must be aligned too.
  const std::uint64_t progress = base::round_down(piece.done_bytes + count, alignment_bytes);
  if (progress > piece.done_bytes) {
    piece.done_bytes = progress;
    piece.attempts = 0;
    return {PieceStep::resume, 0};
  }
  constexpr std::uint32_t kStuckAttempts = 3;
  if (count == 0 || ++piece.attempts > kStuckAttempts) return {PieceStep::failed, reading ? ENODATA : EIO};
  return {PieceStep::resume, 0};
}

void check_options(const StorageOptions& options) {
  if (options.block_bytes < 512) {
    throw ConfigError("block size " + base::format_size(options.block_bytes) +
                      " is too small: at least 512 B, better 1 MiB");
  }
  if (options.queue_depth == 0 || options.queue_depth > PieceQueue::kMaxDepth) {
    throw ConfigError("queue depth " + std::to_string(options.queue_depth) + " is not possible: take 1 to " +
                      std::to_string(PieceQueue::kMaxDepth));
  }
}

void PieceQueue::append(List& list, Operation& operation) {
  set_link(operation, kNext, nullptr);
  set_link(operation, kPrevious, list.last);
  if (list.last != nullptr) {
    set_link(*list.last, kNext, &operation);
  } else {
    list.first = &operation;
  }
  list.last = &operation;
}

void PieceQueue::remove(List& list, Operation& operation) {
  Operation* const next = link(operation, kNext);
  Operation* const previous = link(operation, kPrevious);
  if (previous != nullptr) {
    set_link(*previous, kNext, next);
  } else {
    list.first = next;
  }
  if (next != nullptr) {
    set_link(*next, kPrevious, previous);
  } else {
    list.last = previous;
  }
}

void PieceQueue::end(Operation& operation, OperationState state, int error_number) {
  operation.error_number = error_number;
  operation.state = state;
  append(finished_, operation);
}

void PieceQueue::add(Operation& operation, std::size_t file_count) {
  BALLAST_CHECK(operation.state != OperationState::queued && operation.state != OperationState::in_flight);
  std::fill(std::begin(operation.reserved), std::end(operation.reserved), 0);
  operation.error_number = 0;
  operation.transferred_bytes = 0;
  ++outstanding_;
  if (operation.file >= file_count) return end(operation, OperationState::done, EBADF);
  const std::uint64_t misaligned =
      (operation.offset_bytes | operation.bytes | reinterpret_cast<std::uintptr_t>(operation.data)) % alignment_bytes_;
  const bool beyond = operation.offset_bytes > INT64_MAX || operation.bytes > INT64_MAX - operation.offset_bytes;
  if (misaligned != 0 || beyond) return end(operation, OperationState::done, EINVAL);
  if (operation.bytes == 0) return end(operation, OperationState::done, 0);
  operation.state = OperationState::queued;
  operation.reserved[kFlags] = kInQueue;
  append(queued_[static_cast<std::size_t>(operation.priority)], operation);
}

bool PieceQueue::peek(Piece* piece) {
  Operation* operation = queued_[0].first;
  Operation* const low = queued_[1].first;
  if (operation == nullptr || (low != nullptr && high_since_low_ >= kHighPerLow)) operation = low;
  if (operation == nullptr) return false;
  const std::uint64_t block =
      std::max(base::round_down(std::min(block_bytes_, kMaxPieceBytes), alignment_bytes_), alignment_bytes_);
  *piece = Piece{};
  piece->operation = operation;
  piece->begin_bytes = operation->reserved[kIssuedBytes];
  piece->bytes = std::min(block, operation->bytes - piece->begin_bytes);
  return true;
}

void PieceQueue::take(const Piece& piece) {
  Operation& operation = *piece.operation;
  BALLAST_CHECK(piece.bytes > 0 && piece.begin_bytes == operation.reserved[kIssuedBytes]);
  if (operation.priority == Priority::low || queued_[1].first == nullptr) {
    high_since_low_ = 0;
  } else {
    ++high_since_low_;
  }
  operation.state = OperationState::in_flight;
  operation.reserved[kIssuedBytes] += piece.bytes;
  ++operation.reserved[kPieces];
  if (operation.reserved[kIssuedBytes] == operation.bytes) {
    remove(queued_[static_cast<std::size_t>(operation.priority)], operation);
    operation.reserved[kFlags] &= ~kInQueue;
  }
}

bool PieceQueue::end_if_idle(Operation& operation) {
  if (operation.reserved[kPieces] != 0 || (operation.reserved[kFlags] & kInQueue) != 0) return false;
  const int error_number = static_cast<int>(operation.reserved[kError]);
  if (error_number != 0) {
    end(operation, OperationState::done, error_number);
  } else if (operation.transferred_bytes == operation.bytes) {
    end(operation, OperationState::done, 0);
  } else {
    BALLAST_CHECK((operation.reserved[kFlags] & kCancelRequested) != 0);
    end(operation, OperationState::cancelled, ECANCELED);
  }
  return true;
}

bool PieceQueue::finish(const Piece& piece, int error_number) {
  Operation& operation = *piece.operation;
  BALLAST_CHECK(operation.state == OperationState::in_flight && operation.reserved[kPieces] > 0);
  --operation.reserved[kPieces];
  operation.transferred_bytes += piece.done_bytes;
  const bool own_cancellation = error_number == ECANCELED && (operation.reserved[kFlags] & kCancelRequested) != 0;
  if (error_number != 0 && !own_cancellation) {
    if (operation.reserved[kError] == 0) operation.reserved[kError] = static_cast<std::uint64_t>(error_number);
    if ((operation.reserved[kFlags] & kInQueue) != 0) {  // the rest would be wasted
      remove(queued_[static_cast<std::size_t>(operation.priority)], operation);
      operation.reserved[kFlags] &= ~kInQueue;
    }
  }
  return end_if_idle(operation);
}

bool PieceQueue::cancel(Operation& operation) {
  if (operation.state != OperationState::queued && operation.state != OperationState::in_flight) return false;
  operation.reserved[kFlags] |= kCancelRequested;
  if ((operation.reserved[kFlags] & kInQueue) == 0) return false;
  remove(queued_[static_cast<std::size_t>(operation.priority)], operation);
  operation.reserved[kFlags] &= ~kInQueue;
  return end_if_idle(operation);
}

void PieceQueue::cancel_all_queued() {
  for (List& list : queued_) {
    while (list.first != nullptr) cancel(*list.first);
  }
}

bool PieceQueue::abandoned(const Operation& operation) {
  return (operation.reserved[kFlags] & kCancelRequested) != 0 || operation.reserved[kError] != 0;
}

std::size_t PieceQueue::pop_finished(std::span<Operation*> finished) {
  std::size_t count = 0;
  while (count < finished.size() && finished_.first != nullptr) {
    Operation* const operation = finished_.first;
    remove(finished_, *operation);
    finished[count++] = operation;
    --outstanding_;
  }
  return count;
}

}  // namespace ballast::io
