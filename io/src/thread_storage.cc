// Storage over pread and pwrite on a bounded set of threads, for places where io_uring is not permitted. Each thread
// takes one piece at a time, so that one operation is spread over all of them.
// SPDX-License-Identifier: Apache-2.0
#include "thread_storage.h"

#include <ballast/base/check.h>
#include <ballast/base/error.h>
#include <pthread.h>
#include <signal.h>
#include <sys/types.h>
#include <time.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <condition_variable>
#include <mutex>
#include <string>
#include <system_error>
#include <thread>
#include <vector>

#include "errno_text.h"
#include "file_alignment.h"
#include "flush.h"
#include "piece_queue.h"

namespace ballast::io {
namespace {

class ThreadStorage final : public Storage {
 public:
  ThreadStorage(const StorageOptions& options, ResultHook hook);
  ~ThreadStorage() override;

  std::uint32_t add_file(int descriptor) override;
  bool register_memory(std::span<std::byte>, std::string*) override { return true; }  // plain calls need none
  void submit(std::span<Operation* const> operations) override;
  std::size_t poll(std::span<Operation*> finished, bool wait) override;
  void cancel(Operation& operation) override;
  int flush(std::uint32_t file) override;
  std::size_t outstanding() const override;
  std::uint64_t alignment_bytes() const override;
  std::string_view name() const override { return "threads"; }
  const StorageCounters& counters() const override;

 private:
  void run();
  int transfer(Piece& piece, int descriptor, std::uint64_t alignment, StorageCounters& counted);
  void stop();

  base::WakeEvent* const wake_;
  const ResultHook hook_;
  const pid_t process_;

  mutable std::mutex mutex_;
  // On the heap, as a forked child must not destroy what its parent's threads wait on.
  std::unique_ptr<std::condition_variable> work_ = std::make_unique<std::condition_variable>();      // for the threads
  std::unique_ptr<std::condition_variable> finished_ = std::make_unique<std::condition_variable>();  // for poll
  // Guarded by mutex_.
  PieceQueue queue_;
  std::vector<int> files_;
  std::size_t idle_threads_ = 0;
  bool waiting_ = false;  // a poll sleeps
  bool stopping_ = false;
  StorageCounters counters_;

  mutable StorageCounters reported_;  // the caller's copy
  std::vector<std::thread> threads_;
};

ThreadStorage::ThreadStorage(const StorageOptions& options, ResultHook hook)
    : wake_(options.wake), hook_(std::move(hook)), process_(::getpid()), queue_(options.block_bytes) {
  const std::uint32_t wanted = std::min(options.queue_depth, kMaxStorageThreads);
  threads_.reserve(wanted);
  // Signals are the application's: its handlers must not run here.
  sigset_t all, before;
  ::sigfillset(&all);
  ::pthread_sigmask(SIG_SETMASK, &all, &before);
  int error_number = 0;
  try {
    for (std::uint32_t i = 0; i < wanted; ++i) threads_.emplace_back([this] { run(); });
  } catch (const std::system_error& error) {
    error_number = error.code().value();  // a process limit: fewer threads do as well
  }
  ::pthread_sigmask(SIG_SETMASK, &before, nullptr);
  if (threads_.empty()) {
    throw IoError("no thread can be started for storage: " + errno_text(error_number) +
                  "; raise the process limit (ulimit -u)");
  }
}

ThreadStorage::~ThreadStorage() {
  if (::getpid() != process_) {  // a forked child has none of these threads, and leaves all that is theirs
    static_cast<void>(new std::vector<std::thread>(std::move(threads_)));
    static_cast<void>(work_.release());
    static_cast<void>(finished_.release());
    return;
  }
  stop();
}

void ThreadStorage::stop() {
  {
    const std::lock_guard lock(mutex_);
    queue_.cancel_all_queued();
    stopping_ = true;
  }
  work_->notify_all();
  for (std::thread& thread : threads_) thread.join();
}

std::uint32_t ThreadStorage::add_file(int descriptor) {
  const std::uint64_t alignment = stated_alignment_bytes(descriptor);
  const std::lock_guard lock(mutex_);
  files_.push_back(descriptor);
  queue_.set_alignment(std::max(queue_.alignment(), alignment));
  return static_cast<std::uint32_t>(files_.size() - 1);
}

int ThreadStorage::flush(std::uint32_t file) {
  int descriptor = -1;
  {
    const std::lock_guard lock(mutex_);
    if (file >= files_.size()) return EBADF;
    descriptor = files_[file];
  }
  return flush_data(descriptor);
}

void ThreadStorage::submit(std::span<Operation* const> operations) {
  bool finished;
  std::size_t idle;
  {
    const std::lock_guard lock(mutex_);
    for (Operation* const operation : operations) queue_.add(*operation, files_.size());
    finished = queue_.has_finished();
    idle = queue_.has_queued() ? idle_threads_ : 0;
  }
  if (idle > 0) work_->notify_all();
  if (finished && wake_ != nullptr) wake_->notify();
}

std::size_t ThreadStorage::poll(std::span<Operation*> finished, bool wait) {
  BALLAST_CHECK(!finished.empty());
  std::unique_lock lock(mutex_);
  if (wait) {
    waiting_ = true;
    finished_->wait(lock, [this] { return queue_.has_finished() || queue_.outstanding() == 0; });
    waiting_ = false;
  }
  const std::size_t count = queue_.pop_finished(finished);
  const bool more = queue_.has_finished();
  lock.unlock();
  if (more && wake_ != nullptr) wake_->notify();
  return count;
}

void ThreadStorage::cancel(Operation& operation) {
  bool finished;
  {
    const std::lock_guard lock(mutex_);
    finished = queue_.cancel(operation);
  }
  if (finished && wake_ != nullptr) wake_->notify();
}

std::size_t ThreadStorage::outstanding() const {
  const std::lock_guard lock(mutex_);
  return queue_.outstanding();
}

std::uint64_t ThreadStorage::alignment_bytes() const {
  const std::lock_guard lock(mutex_);
  return queue_.alignment();
}

const StorageCounters& ThreadStorage::counters() const {
  const std::lock_guard lock(mutex_);
  reported_ = counters_;
  return reported_;
}

void ThreadStorage::run() {
  ::pthread_setname_np(::pthread_self(), "ballast-io");
  std::unique_lock lock(mutex_);
  for (;;) {
    Piece piece;
    if (!queue_.peek(&piece)) {
      if (stopping_) return;
      ++idle_threads_;
      work_->wait(lock);
      --idle_threads_;
      continue;
    }
    queue_.take(piece);
    const int descriptor = files_[piece.operation->file];
    const std::uint64_t alignment = queue_.alignment();
    lock.unlock();
    StorageCounters counted;
    const int error_number = transfer(piece, descriptor, alignment, counted);
    lock.lock();
    counters_.read_bytes += counted.read_bytes;
    counters_.written_bytes += counted.written_bytes;
    counters_.read_requests += counted.read_requests;
    counters_.write_requests += counted.write_requests;
    counters_.retries += counted.retries;
    if (!queue_.finish(piece, error_number)) continue;
    // Under the lock: once it is free, poll may hand the operation back and the storage may be destroyed.
    if (waiting_) finished_->notify_one();
    if (wake_ != nullptr) wake_->notify();
  }
}

// The whole piece, however many calls it takes. Returns 0 or an errno. Runs without the lock.
int ThreadStorage::transfer(Piece& piece, int descriptor, std::uint64_t alignment, StorageCounters& counted) {
  const bool reading = piece.operation->direction == Direction::read;
  for (;;) {
    const std::uint64_t remaining = piece.remaining_bytes();
    const auto offset = static_cast<off_t>(piece.file_offset_bytes());
    std::int64_t result = reading ? ::pread(descriptor, piece.data(), remaining, offset)
                                  : ::pwrite(descriptor, piece.data(), remaining, offset);
    if (result < 0) result = -errno;
    if (hook_.request) result = hook_.request(piece.operation->direction, remaining, result);
    ++(reading ? counted.read_requests : counted.write_requests);
    if (result > 0) (reading ? counted.read_bytes : counted.written_bytes) += static_cast<std::uint64_t>(result);
    const PieceResult next = apply_result(piece, result, alignment);
    if (next.step == PieceStep::complete || next.step == PieceStep::failed) return next.error_number;
    ++counted.retries;
    if (piece.attempts > kPatientAttempts) {
      const timespec pause{0, 1'000'000};
      ::nanosleep(&pause, nullptr);
    }
  }
}

}  // namespace

std::unique_ptr<Storage> make_thread_storage(const StorageOptions& options, ResultHook hook) {
  check_options(options);
  return std::make_unique<ThreadStorage>(options, std::move(hook));
}

}  // namespace ballast::io
