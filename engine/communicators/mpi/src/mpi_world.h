// MpiWorld: the duplicate of a trainer's MPI communicator that all traffic of one family of communicators goes over,
// with the tags that tell them apart, and MPI's beginning and end where those are ours.
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <ballast/communicators/mpi.h>
#include <mpi.h>

#include <atomic>
#include <chrono>
#include <cstdint>
#include <memory>
#include <mutex>
#include <string_view>
#include <vector>

namespace ballast::communicators {

class MpiRuntime;

// What a message is for. Part of its tag.
enum class MessageKind : std::uint8_t { greeting, data, second_data, abort };

// Sleeps of a rank that waits: next to none at first, then a small share of the time waited so far.
class Backoff {
 public:
  Backoff() { reset(); }
  void reset();
  void pause();
  bool sleeps() const { return tries_ >= kYields; }  // the next pause does

 private:
  static constexpr int kYields = 100;  // then the other side is not just about to answer
  int tries_ = 0;
  std::chrono::steady_clock::time_point since_;
};

class MpiWorld {
 public:
  static std::shared_ptr<MpiWorld> open(const MpiOptions& options, std::chrono::nanoseconds timeout);
  ~MpiWorld();
  MpiWorld(const MpiWorld&) = delete;
  MpiWorld& operator=(const MpiWorld&) = delete;

  MPI_Comm comm() const { return comm_; }
  int rank() const { return rank_; }
  int size() const { return size_; }

  int tag(std::uint32_t context, std::uint64_t sequence, MessageKind kind) const;
  // Contexts are numbers that communicators with a rank in common do not share. One is agreed at a time.
  std::timed_mutex& context_mutex() { return context_mutex_; }
  std::uint32_t next_context() const { return next_context_; }
  void take_context(std::uint32_t context);  // throws UsageError when they have run out

  // Signs of life. A rank that has waited for half the timeout says so to all, so that those who wait for it know that
  // it is not the one to blame.
  void tell_waiting() noexcept;
  void hear_waiting();
  bool waits(int rank, std::chrono::nanoseconds within) const;  // has said so in the time before now

  // Requests are left behind, or a rank is missing: nothing that waits for others is called any more.
  void set_broken() noexcept;
  // Messages may be left in it, so it is not freed; and at MPI's end the others are not waited for long.
  void set_failed() noexcept;

 private:
  MpiWorld() = default;

  std::shared_ptr<MpiRuntime> runtime_;
  MPI_Comm comm_ = MPI_COMM_NULL;
  int rank_ = 0;
  int size_ = 0;
  int context_bits_ = 0;
  int sequence_bits_ = 0;
  std::timed_mutex context_mutex_;
  std::uint32_t next_context_ = 1;                   // guarded by context_mutex_; 0 is the first communicator's
  std::vector<std::atomic<std::int64_t>> heard_ns_;  // by rank: steady clock of its last sign, 0 before
  std::atomic<bool> unclean_{false};
};

}  // namespace ballast::communicators
