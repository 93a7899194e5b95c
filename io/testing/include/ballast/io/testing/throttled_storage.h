// ThrottledStorage: wraps a Storage and makes it as slow as a device of a given latency and bandwidth.
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <ballast/io/storage.h>

#include <chrono>
#include <condition_variable>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <memory>
#include <mutex>
#include <thread>

namespace ballast::io::testing {

struct Throttle {
  std::chrono::nanoseconds latency{0};  // from submission to completion, beside the bytes
  double bytes_per_second = 1e12;       // reads and writes together
};

// An operation comes back when the wrapped storage is done with it and its time is up, in the order of those times. One
// thread at a time. `wake`, the event of the wrapped storage, is also notified when a time is up.
class ThrottledStorage final : public Storage {
 public:
  ThrottledStorage(std::unique_ptr<Storage> inner, Throttle throttle, base::WakeEvent* wake);
  ~ThrottledStorage() override;

  std::uint32_t add_file(int descriptor) override { return inner_->add_file(descriptor); }
  bool register_memory(std::span<std::byte> memory, std::string* reason) override {
    return inner_->register_memory(memory, reason);
  }
  void submit(std::span<Operation* const> operations) override;
  std::size_t poll(std::span<Operation*> finished, bool wait) override;
  void cancel(Operation& operation) override { inner_->cancel(operation); }
  int flush(std::uint32_t file) override { return inner_->flush(file); }
  std::size_t outstanding() const override { return due_.size(); }
  std::uint64_t alignment_bytes() const override { return inner_->alignment_bytes(); }
  std::string_view name() const override { return "throttled"; }
  const StorageCounters& counters() const override { return inner_->counters(); }

 private:
  using Clock = std::chrono::steady_clock;
  struct Due {
    Operation* operation;
    Clock::time_point time;
    bool arrived;
  };
  void run();
  void ring_at(Clock::time_point time);

  std::unique_ptr<Storage> inner_;
  Throttle throttle_;
  base::WakeEvent* wake_;
  Clock::time_point busy_until_;
  std::deque<Due> due_;  // in order of time

  std::mutex mutex_;
  std::condition_variable changed_;
  Clock::time_point alarm_ = Clock::time_point::max();  // guarded by mutex_
  bool stopping_ = false;                               // guarded by mutex_
  std::thread alarm_thread_;                            // only where there is an event to notify
};

}  // namespace ballast::io::testing
