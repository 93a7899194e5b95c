// Storage over io_uring: pieces of operations in a fixed number of slots, refilled whenever results are collected.
// SPDX-License-Identifier: Apache-2.0
#include "uring_storage.h"

#include <ballast/base/check.h>
#include <ballast/base/error.h>
#include <time.h>

#include <array>
#include <cerrno>
#include <vector>

#include "errno_text.h"
#include "file_alignment.h"
#include "flush.h"
#include "piece_queue.h"
#include "uring_ring.h"

namespace ballast::io {
namespace {

void pause_ms(long milliseconds) {
  const timespec pause{0, milliseconds * 1'000'000};
  ::nanosleep(&pause, nullptr);
}

class UringStorage final : public Storage {
 public:
  UringStorage(const StorageOptions& options, ResultHook hook);
  ~UringStorage() override;

  std::uint32_t add_file(int descriptor) override;
  bool register_memory(std::span<std::byte> memory, std::string* reason) override;
  void submit(std::span<Operation* const> operations) override;
  std::size_t poll(std::span<Operation*> finished, bool wait) override;
  void cancel(Operation& operation) override;
  // A plain call, so that any thread may make it: the ring belongs to the thread that polls.
  int flush(std::uint32_t file) override { return file < descriptors_.size() ? flush_data(descriptors_[file]) : EBADF; }
  std::size_t outstanding() const override { return queue_.outstanding(); }
  std::uint64_t alignment_bytes() const override { return queue_.alignment(); }
  std::string_view name() const override { return "io_uring"; }
  const StorageCounters& counters() const override { return counters_; }

 private:
  struct File {
    int descriptor;  // an index into the ring's table where registered
    bool registered;
  };
  // A call into the ring may be refused for want of resources this often in a row, a millisecond apart.
  static constexpr int kMaxRefusals = 10'000;

  void start_pieces();
  bool prepare(std::uint32_t slot);
  int enter(unsigned wait_count);
  void collect();
  void apply(std::uint32_t slot, std::int64_t result);
  void notify() {
    if (wake_ != nullptr) wake_->notify();
  }

  base::WakeEvent* const wake_;
  const ResultHook hook_;
  UringRing ring_;
  PieceQueue queue_;
  std::vector<File> files_;
  std::vector<int> descriptors_;  // of the same, for flush
  std::vector<Piece> slots_;
  std::vector<std::uint32_t> free_slots_;
  std::vector<std::uint32_t> again_slots_;  // to be issued again: short counts and refusals
  std::uint32_t in_flight_ = 0;             // slots neither free nor to be issued again
  int refusals_ = 0;
  int ring_error_ = 0;  // latched: the ring is unusable
  StorageCounters counters_;
};

UringStorage::UringStorage(const StorageOptions& options, ResultHook hook)
    : wake_(options.wake),
      hook_(std::move(hook)),
      ring_(options.queue_depth, options.wake != nullptr ? options.wake->descriptor() : -1),
      queue_(options.block_bytes),
      slots_(options.queue_depth) {
  free_slots_.reserve(slots_.size());
  again_slots_.reserve(slots_.size());
  for (std::uint32_t slot = options.queue_depth; slot-- > 0;) free_slots_.push_back(slot);
}

UringStorage::~UringStorage() {
  if (!ring_.owned_here()) return;
  queue_.cancel_all_queued();
  ring_error_ = 0;
  refusals_ = 0;
  // What the kernel has will be written to or read from our caller's memory: only its results end that.
  for (int patience = 0; in_flight_ > 0; ++patience) {
    collect();
    if (in_flight_ == 0) break;
    if (enter(1) < 0) pause_ms(1);
    if (ring_error_ != 0) {
      BALLAST_CHECK(patience <
                    30'000);  // half a minute without the ring: better to end than to let memory be overwritten
      ring_error_ = 0;
    }
  }
  for (const std::uint32_t slot : again_slots_) queue_.finish(slots_[slot], ECANCELED);
}

std::uint32_t UringStorage::add_file(int descriptor) {
  const std::uint64_t alignment = stated_alignment_bytes(descriptor);
  const int index = ring_.add_file(descriptor);
  descriptors_.push_back(descriptor);
  files_.push_back(index >= 0 ? File{index, true} : File{descriptor, false});
  queue_.set_alignment(std::max(queue_.alignment(), alignment));
  return static_cast<std::uint32_t>(files_.size() - 1);
}

bool UringStorage::register_memory(std::span<std::byte> memory, std::string* reason) {
  if (in_flight_ > 0) throw UsageError("memory can be registered only while no transfer is in flight");
  return ring_.register_memory(memory, reason);
}

void UringStorage::submit(std::span<Operation* const> operations) {
  for (Operation* const operation : operations) queue_.add(*operation, files_.size());
  start_pieces();
  if (io_uring_sq_ready(ring_.get()) > 0) enter(0);
  if (queue_.has_finished() || ring_error_ != 0) notify();
}

std::size_t UringStorage::poll(std::span<Operation*> finished, bool wait) {
  BALLAST_CHECK(!finished.empty());
  for (;;) {
    collect();
    start_pieces();
    const bool must_wait = wait && !queue_.has_finished() && in_flight_ > 0;
    if (must_wait || io_uring_sq_ready(ring_.get()) > 0) {
      const int result = enter(must_wait ? 1 : 0);
      if (must_wait && (result == -EAGAIN || result == -EBUSY)) pause_ms(1);
    }
    if (ring_error_ != 0 && !queue_.has_finished()) {
      throw IoError("io_uring_enter failed: " + errno_text(ring_error_) + " with " + std::to_string(in_flight_) +
                    " requests in flight; the ring is unusable");
    }
    if (queue_.has_finished() || !wait || queue_.outstanding() == 0) break;
  }
  const std::size_t count = queue_.pop_finished(finished);
  // Whoever sleeps on the wake event must come back for these.
  if (queue_.has_finished() || !again_slots_.empty()) notify();
  return count;
}

void UringStorage::cancel(Operation& operation) {
  if (queue_.cancel(operation)) notify();
}

// Fills free slots and prepares their requests; at most queue_depth are with the kernel at any time.
void UringStorage::start_pieces() {
  if (!again_slots_.empty()) {
    bool pausing = false;
    std::size_t kept = 0;
    for (const std::uint32_t slot : again_slots_) {
      if (PieceQueue::abandoned(*slots_[slot].operation)) {
        queue_.finish(slots_[slot], ECANCELED);
        free_slots_.push_back(slot);
        continue;
      }
      pausing |= slots_[slot].attempts > kPatientAttempts;
      if (!prepare(slot)) again_slots_[kept++] = slot;
    }
    again_slots_.resize(kept);
    if (pausing) pause_ms(1);
  }
  Piece piece;
  while (!free_slots_.empty() && queue_.peek(&piece)) {
    ring_.find_buffer(piece.data(), &piece.bytes);  // a request lies within one registered piece of memory
    const std::uint32_t slot = free_slots_.back();
    free_slots_.pop_back();
    queue_.take(piece);
    slots_[slot] = piece;
    if (!prepare(slot)) {
      again_slots_.push_back(slot);
      break;
    }
  }
}

bool UringStorage::prepare(std::uint32_t slot) {
  io_uring_sqe* const entry = io_uring_get_sqe(ring_.get());
  if (entry == nullptr) return false;
  const Piece& piece = slots_[slot];
  const File& file = files_[piece.operation->file];
  std::uint64_t bytes = piece.remaining_bytes();
  const int buffer = ring_.find_buffer(piece.data(), &bytes);
  const auto length = static_cast<unsigned>(bytes);
  const std::uint64_t offset = piece.file_offset_bytes();
  if (piece.operation->direction == Direction::read) {
    ++counters_.read_requests;
    if (buffer >= 0) {
      io_uring_prep_read_fixed(entry, file.descriptor, piece.data(), length, offset, buffer);
    } else {
      io_uring_prep_read(entry, file.descriptor, piece.data(), length, offset);
    }
  } else {
    ++counters_.write_requests;
    if (buffer >= 0) {
      io_uring_prep_write_fixed(entry, file.descriptor, piece.data(), length, offset, buffer);
    } else {
      io_uring_prep_write(entry, file.descriptor, piece.data(), length, offset);
    }
  }
  if (file.registered) io_uring_sqe_set_flags(entry, IOSQE_FIXED_FILE);
  entry->user_data = slot;
  ++in_flight_;
  return true;
}

// Submits what is prepared and waits for wait_count results. Interruptions and shortage come back as negated errno, to
// be tried again by the caller; anything else is latched.
int UringStorage::enter(unsigned wait_count) {
  int result = hook_.enter ? hook_.enter() : 0;
  if (result == 0) result = io_uring_submit_and_wait(ring_.get(), wait_count);
  if (result >= 0) {
    refusals_ = 0;
    return result;
  }
  if (result == -EINTR || result == -EAGAIN || result == -EBUSY) {
    ++counters_.retries;
    if (result != -EINTR && ++refusals_ > kMaxRefusals) ring_error_ = -result;
    return result;
  }
  ring_error_ = -result;
  return result;
}

void UringStorage::collect() {
  std::array<io_uring_cqe*, 64> completions;
  unsigned count;
  while ((count = io_uring_peek_batch_cqe(ring_.get(), completions.data(), completions.size())) > 0) {
    for (unsigned i = 0; i < count; ++i) {
      apply(static_cast<std::uint32_t>(completions[i]->user_data), completions[i]->res);
    }
    io_uring_cq_advance(ring_.get(), count);
  }
}

void UringStorage::apply(std::uint32_t slot, std::int64_t result) {
  BALLAST_CHECK(slot < slots_.size() && in_flight_ > 0);
  --in_flight_;
  Piece& piece = slots_[slot];
  const Direction direction = piece.operation->direction;
  if (hook_.request) result = hook_.request(direction, piece.remaining_bytes(), result);
  if (result > 0) {
    (direction == Direction::read ? counters_.read_bytes : counters_.written_bytes) +=
        static_cast<std::uint64_t>(result);
  }
  const PieceResult next = apply_result(piece, result, queue_.alignment());
  if (next.step == PieceStep::resume || next.step == PieceStep::retry) {
    ++counters_.retries;
    again_slots_.push_back(slot);
    return;
  }
  queue_.finish(piece, next.error_number);
  free_slots_.push_back(slot);
}

}  // namespace

UringUnavailable::UringUnavailable(const std::string& call, int error)
    : IoError(call + ": " + errno_text(error)), error_number_(error) {}

std::unique_ptr<Storage> make_uring_storage(const StorageOptions& options, ResultHook hook) {
  check_options(options);
  return std::make_unique<UringStorage>(options, std::move(hook));
}

}  // namespace ballast::io
