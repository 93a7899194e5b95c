// MemoryStorage over the same queue as the real back ends.
// SPDX-License-Identifier: Apache-2.0
#include <ballast/base/check.h>
#include <ballast/base/error.h>
#include <ballast/io/testing/memory_storage.h>
#include <fcntl.h>
#include <sys/stat.h>

#include <algorithm>
#include <cerrno>
#include <cstring>

#include "piece_queue.h"

namespace ballast::io::testing {

struct MemoryStorage::Queue {
  PieceQueue pieces{kMaxPieceBytes};
  std::vector<Piece> in_flight;
};

MemoryStorage::MemoryStorage(const StorageOptions& options, const MemoryStorageOptions& memory_options)
    : wake_(options.wake),
      memory_options_(memory_options),
      queue_depth_(options.queue_depth),
      random_(memory_options.seed),
      queue_(std::make_unique<Queue>()) {
  check_options(options);
  queue_->pieces.set_alignment(memory_options.alignment_bytes);
  queue_->in_flight.reserve(queue_depth_);
}

MemoryStorage::~MemoryStorage() {
  queue_->pieces.cancel_all_queued();
  while (!queue_->in_flight.empty()) finish(0, ECANCELED);
}

std::uint32_t MemoryStorage::add_file(int descriptor) {
  File file;
  struct stat status;
  if (descriptor >= 0) {
    if (::fstat(descriptor, &status) != 0)
      throw IoError("file descriptor " + std::to_string(descriptor) + " cannot be used");
    file.bytes = static_cast<std::uint64_t>(status.st_size);
    const int mode = ::fcntl(descriptor, F_GETFL) & O_ACCMODE;
    file.readable = mode != O_WRONLY;
    file.writable = mode != O_RDONLY;
  }
  files_.push_back(std::move(file));
  return static_cast<std::uint32_t>(files_.size() - 1);
}

void MemoryStorage::submit(std::span<Operation* const> operations) {
  for (Operation* const operation : operations) queue_->pieces.add(*operation, files_.size());
  start();
  if (wake_ != nullptr && !operations.empty()) wake_->notify();  // the next poll finishes some
}

void MemoryStorage::start() {
  Piece piece;
  while (queue_->in_flight.size() < queue_depth_ && queue_->pieces.peek(&piece)) {
    queue_->pieces.take(piece);
    queue_->in_flight.push_back(piece);
  }
}

std::size_t MemoryStorage::poll(std::span<Operation*> finished, bool wait) {
  BALLAST_CHECK(!finished.empty());
  start();
  std::vector<Piece>& in_flight = queue_->in_flight;
  if (!memory_options_.manual && !in_flight.empty()) {
    finish(memory_options_.seed == 0 ? 0 : random_.below(in_flight.size()));
  }
  while (wait && !queue_->pieces.has_finished() && !in_flight.empty()) finish(0);
  const std::size_t count = queue_->pieces.pop_finished(finished);
  const bool more = queue_->pieces.has_finished() || (!memory_options_.manual && !in_flight.empty());
  if (more && wake_ != nullptr) wake_->notify();
  return count;
}

void MemoryStorage::cancel(Operation& operation) {
  queue_->pieces.cancel(operation);
  if (wake_ != nullptr) wake_->notify();
}

std::size_t MemoryStorage::outstanding() const { return queue_->pieces.outstanding(); }

std::vector<const Operation*> MemoryStorage::in_flight() const {
  std::vector<const Operation*> operations;
  for (const Piece& piece : queue_->in_flight) operations.push_back(piece.operation);
  return operations;
}

void MemoryStorage::finish(std::size_t index, int error_number) {
  BALLAST_CHECK(index < queue_->in_flight.size());
  Piece piece = queue_->in_flight[index];
  queue_->in_flight.erase(queue_->in_flight.begin() + static_cast<std::ptrdiff_t>(index));
  const Operation& operation = *piece.operation;
  File& file = files_[operation.file];
  const std::uint64_t offset = piece.file_offset_bytes();
  const bool reading = operation.direction == Direction::read;
  ++(reading ? counters_.read_requests : counters_.write_requests);
  if (error_number == 0 && !(reading ? file.readable : file.writable)) error_number = EBADF;
  if (error_number == 0) {
    std::int64_t result = static_cast<std::int64_t>(piece.bytes);
    if (reading) {
      result = static_cast<std::int64_t>(offset >= file.bytes ? 0 : std::min(piece.bytes, file.bytes - offset));
      read(file, offset, piece.data(), static_cast<std::uint64_t>(result));
    } else {
      write(file, offset, piece.data(), piece.bytes);
    }
    (reading ? counters_.read_bytes : counters_.written_bytes) += static_cast<std::uint64_t>(result);
    piece.done_bytes = static_cast<std::uint64_t>(result);
    if (piece.done_bytes < piece.bytes) error_number = ENODATA;
  }
  if (queue_->pieces.finish(piece, error_number) && wake_ != nullptr) wake_->notify();
  start();
}

void MemoryStorage::read(const File& file, std::uint64_t offset, std::byte* data, std::uint64_t bytes) const {
  while (bytes > 0) {
    const std::uint64_t within = offset % kPageBytes;
    const std::uint64_t length = std::min(bytes, kPageBytes - within);
    const auto page = file.pages.find(offset / kPageBytes);
    if (page == file.pages.end()) {
      std::memset(data, 0, length);
    } else {
      std::memcpy(data, page->second.data() + within, length);
    }
    offset += length;
    data += length;
    bytes -= length;
  }
}

void MemoryStorage::write(File& file, std::uint64_t offset, const std::byte* data, std::uint64_t bytes) {
  file.bytes = std::max(file.bytes, offset + bytes);
  while (bytes > 0) {
    const std::uint64_t within = offset % kPageBytes;
    const std::uint64_t length = std::min(bytes, kPageBytes - within);
    std::vector<std::byte>& page = file.pages[offset / kPageBytes];
    page.resize(kPageBytes);
    std::memcpy(page.data() + within, data, length);
    offset += length;
    data += length;
    bytes -= length;
  }
}

std::vector<std::byte> MemoryStorage::contents(std::uint32_t file, std::uint64_t offset_bytes,
                                               std::uint64_t bytes) const {
  std::vector<std::byte> found(bytes);
  read(files_.at(file), offset_bytes, found.data(), bytes);
  return found;
}

}  // namespace ballast::io::testing
