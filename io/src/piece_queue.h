// PieceQueue: which operation is served next, how it is cut into pieces, and when it is finished. Pure bookkeeping,
// shared by the back ends: no system calls, no locks, no allocation. The links live in Operation::reserved.
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <ballast/io/storage.h>

#include <cstddef>
#include <cstdint>
#include <span>

namespace ballast::io {

// One request to the kernel: a range of one operation, and how far it has come.
struct Piece {
  Operation* operation = nullptr;
  std::uint64_t begin_bytes = 0;  // within the operation
  std::uint64_t bytes = 0;
  std::uint64_t done_bytes = 0;  // a multiple of the alignment while the piece is unfinished
  std::uint32_t attempts = 0;    // results without progress since the last progress

  std::uint64_t file_offset_bytes() const { return operation->offset_bytes + begin_bytes + done_bytes; }
  std::byte* data() const { return operation->data + begin_bytes + done_bytes; }
  std::uint64_t remaining_bytes() const { return bytes - done_bytes; }
};

enum class PieceStep : std::uint8_t {
  complete,
  resume,  // a short count: issue the rest
  retry,   // EINTR, EAGAIN, EBUSY and the like: issue the same again
  failed,
};

struct PieceResult {
  PieceStep step = PieceStep::complete;
  int error_number = 0;  // with failed
};

// Results without progress that a piece may have in a row before it fails.
constexpr std::uint32_t kMaxAttempts = 128;
// From here on a back end pauses before it tries again.
constexpr std::uint32_t kPatientAttempts = 8;
// A piece is at most this long whatever block size is asked for: the kernel moves at most 2,147,479,552 bytes a
// request.
constexpr std::uint64_t kMaxPieceBytes = std::uint64_t{1} << 30;

// Applies the result of a read or write of the piece's rest (a count, or a negated errno). A read that ends at the end
// of the file fails with ENODATA, a write that moves nothing with EIO.
PieceResult apply_result(Piece& piece, std::int64_t result, std::uint64_t alignment_bytes);

// Throws ConfigError for a block size or depth that means nothing.
void check_options(const StorageOptions& options);

class PieceQueue {
 public:
  static constexpr std::uint32_t kHighPerLow = 8;      // high pieces served while a low one waits
  static constexpr std::uint32_t kMaxDepth = 1 << 15;  // the kernel's own limit

  explicit PieceQueue(std::uint64_t block_bytes) : block_bytes_(block_bytes) {}

  // Pieces are cut at multiples of this.
  void set_alignment(std::uint64_t alignment_bytes) { alignment_bytes_ = alignment_bytes; }
  std::uint64_t alignment() const { return alignment_bytes_; }

  // Queues an operation; one of no bytes, or that is not aligned (EINVAL) or names no file (EBADF), is finished at
  // once.
  void add(Operation& operation, std::size_t file_count);
  // The next piece, not yet taken; false where nothing is queued. The caller may shorten it before it takes it.
  bool peek(Piece* piece);
  void take(const Piece& piece);
  // Ends a taken piece; error_number 0 means that all its bytes went over. True where its operation is finished now.
  bool finish(const Piece& piece, int error_number);
  // True where the operation is finished now.
  bool cancel(Operation& operation);
  void cancel_all_queued();
  // True where a piece of it need not be tried again: cancelled or failed already.
  static bool abandoned(const Operation& operation);

  std::size_t pop_finished(std::span<Operation*> finished);
  bool has_finished() const { return finished_.first != nullptr; }
  bool has_queued() const { return queued_[0].first != nullptr || queued_[1].first != nullptr; }
  std::size_t outstanding() const { return outstanding_; }

 private:
  struct List {
    Operation* first = nullptr;
    Operation* last = nullptr;
  };
  static void append(List& list, Operation& operation);
  static void remove(List& list, Operation& operation);
  void end(Operation& operation, OperationState state, int error_number);
  bool end_if_idle(Operation& operation);

  std::uint64_t block_bytes_;
  std::uint64_t alignment_bytes_ = 1;
  List queued_[2];  // by priority
  List finished_;
  std::size_t outstanding_ = 0;
  std::uint32_t high_since_low_ = 0;
};

}  // namespace ballast::io
