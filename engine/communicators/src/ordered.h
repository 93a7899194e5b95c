// What communicators of CPU ranks share: places in the order, calls queued on streams, the latch. A transport derives
// from OrderedState and carries out one call at a time per thread; make_communicator puts the public face before it.
//
// Calls get their place in the order when they are made, not when they run, and transports match them by it. So a
// blocking call may overtake one that still waits on its stream, at any rank, and still meets its like.
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <ballast/communicators/options.h>
#include <ballast/engine/communicator.h>

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <deque>
#include <memory>
#include <mutex>
#include <string>
#include <string_view>

#include "call.h"

namespace ballast::communicators {

// Between a millisecond and a month, so that deadlines can be computed. Throws UsageError where it is not positive.
std::chrono::nanoseconds effective_timeout(const CommunicatorOptions& options);

// The first failure stays. Any thread.
class FailureLatch {
 public:
  bool set(std::string_view text) noexcept;  // false where something was latched before
  bool failed() const { return failed_.load(std::memory_order_acquire); }
  std::string text() const;
  void throw_if_failed() const;  // CommunicationError

 private:
  std::atomic<bool> failed_{false};
  mutable std::mutex mutex_;
  std::string text_;  // guarded by mutex_
};

class OrderedState : public std::enable_shared_from_this<OrderedState> {
 public:
  OrderedState(Members members, std::chrono::nanoseconds timeout) : members_(std::move(members)), timeout_(timeout) {}
  virtual ~OrderedState() = default;
  OrderedState(const OrderedState&) = delete;
  OrderedState& operator=(const OrderedState&) = delete;

  virtual std::string_view name() const = 0;
  const Members& members() const { return members_; }
  std::chrono::nanoseconds timeout() const { return timeout_; }

  void run(Call call);                                 // blocks; throws
  void run_on(offload::Stream& stream, Call call);     // queues; throws what was latched before
  std::shared_ptr<OrderedState> run_child(Call call);  // duplicate and split
  virtual void check() = 0;
  virtual void abort(std::string_view reason) noexcept = 0;
  // The public face goes: waits, no longer than the timeout, for what is queued on streams; then gives up.
  void close() noexcept;

 protected:
  // Carries out one call, matched with the other ranks' by signature.sequence; what failed once fails always. Throws
  // CommunicationError, latched by the transport; anything else it throws ends the communicator.
  virtual void perform(const Call& call) = 0;
  virtual std::shared_ptr<OrderedState> perform_child(const Call& call) = 0;
  virtual void leave() noexcept {}  // close() has ended; no further calls from this rank

 private:
  struct Record {
    Call call;
    std::shared_ptr<OrderedState> owner;  // while queued
    Record* next_free = nullptr;
  };
  static void run_record(void* context, std::uint64_t);
  template <class Work>
  auto guarded(const Work& work);

  const Members members_;
  const std::chrono::nanoseconds timeout_;
  std::mutex mutex_;
  std::condition_variable idle_;
  std::deque<Record> records_;  // grows to the most that was ever queued at once
  Record* free_records_ = nullptr;
  std::uint64_t queued_ = 0;  // records with an owner, or under way
  std::atomic<std::uint64_t> next_sequence_{0};
};

std::shared_ptr<Communicator> make_communicator(std::shared_ptr<OrderedState> state);

}  // namespace ballast::communicators
