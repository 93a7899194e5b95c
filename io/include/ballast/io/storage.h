// Storage: the one seam around files. Requests are submitted in batches, finish in any order, and are collected by
// poll(). Implementations: io_uring, a thread pool, and the doubles in testing/.
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <ballast/base/wake_event.h>

#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <string_view>

namespace ballast::io {

enum class Direction : std::uint8_t { read, write };
enum class Priority : std::uint8_t { high, low };

// idle -> queued -> in_flight -> done | cancelled. Fields other than `state` may be read or changed by the owner only
// while the operation is idle, done or cancelled.
enum class OperationState : std::uint8_t { idle, queued, in_flight, done, cancelled };

// One transfer of any length (beyond 4 GiB too) between one file and contiguous memory. Owned by the caller, who keeps
// it and its memory alive and in place until poll() hands it back. offset, bytes and data are multiples of
// Storage::alignment().
struct Operation {
  Direction direction = Direction::read;
  Priority priority = Priority::high;
  std::uint32_t file = 0;  // as returned by Storage::open
  std::uint64_t offset_bytes = 0;
  std::byte* data = nullptr;
  std::uint64_t bytes = 0;
  std::uint64_t tag = 0;  // the caller's own

  OperationState state = OperationState::idle;  // set by the storage
  int error_number = 0;                         // 0, or a positive errno; valid once done. ENODATA: it reads beyond the
                                                // end; EINVAL: not aligned; EBADF: no such file; ECANCELED: cancelled
  std::uint64_t transferred_bytes = 0;          // equals bytes where error_number is 0

  std::uint64_t reserved[6] = {};  // the storage's bookkeeping while in its hands
};

struct StorageOptions {
  std::uint64_t block_bytes = std::uint64_t{1} << 20;  // requests are cut into pieces of at most this size
  std::uint32_t queue_depth = 32;                      // pieces in flight at most
  base::WakeEvent* wake = nullptr;                     // notified after completions; may be null; outlives the storage
};

// Counters since construction. What went over the seam, not what was asked for.
struct StorageCounters {
  std::uint64_t read_bytes = 0;
  std::uint64_t written_bytes = 0;
  std::uint64_t read_requests = 0;
  std::uint64_t write_requests = 0;
  std::uint64_t retries = 0;  // EINTR, EAGAIN, EBUSY and short counts resumed
};

// One thread at a time. The destructor cancels what is queued and waits for what is in flight: afterwards no memory is
// touched any more.
class Storage {
 public:
  virtual ~Storage() = default;

  // Adds an open descriptor (borrowed; open until the storage is destroyed). Returns its index. Throws IoError.
  virtual std::uint32_t add_file(int descriptor) = 0;
  // Registers memory that later operations may use; memory that was not registered works too, slower. Returns false,
  // with the reason in *reason, where it cannot (a small memlock limit, say). Only while nothing is in flight.
  virtual bool register_memory(std::span<std::byte> memory, std::string* reason) = 0;

  // Queues all operations (each idle, done or cancelled before). Never blocks, never drops. High priority goes first;
  // low priority is not starved for ever. Zero-byte operations complete at the next poll.
  virtual void submit(std::span<Operation* const> operations) = 0;
  // Moves finished operations into `finished` and returns how many. Starts queued ones as room appears: call it after
  // submit, and whenever the wake event fires. With wait, blocks until at least one is finished, unless nothing is
  // outstanding. A failed operation is one that is done with an error number; poll itself throws IoError only where the
  // ring is unusable.
  virtual std::size_t poll(std::span<Operation*> finished, bool wait) = 0;
  // Asks for an early end: a queued operation becomes cancelled, one in flight ends as done or cancelled. Either way it
  // still comes back through poll().
  virtual void cancel(Operation& operation) = 0;
  // Makes durable what operations on the file have written that came back through poll() before this call. Blocks. Any
  // thread, beside the one of the other calls. 0 or an errno; after a failure what was written may be lost for good,
  // and a second try may claim success: not to be repeated.
  virtual int flush(std::uint32_t file) = 0;

  virtual std::size_t outstanding() const = 0;        // submitted and not yet handed back
  virtual std::uint64_t alignment_bytes() const = 0;  // the largest over its files; 1 where there is none
  virtual std::string_view name() const = 0;          // "io_uring", "threads", "memory", ...
  virtual const StorageCounters& counters() const = 0;
};

}  // namespace ballast::io
