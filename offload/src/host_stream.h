// Streams and events of the host device: one thread per stream, a bounded ring of work, events as places in a ring.
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <sys/types.h>

#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <exception>
#include <functional>
#include <memory>
#include <mutex>
#include <string>
#include <thread>
#include <vector>

#include "ballast/offload/device.h"

namespace ballast::offload {

// How far a stream has come. Outlives the stream, for events that still point at it.
class StreamProgress {
 public:
  // Items finished so far. Any thread.
  std::uint64_t done() const { return done_.load(std::memory_order_acquire); }
  // Blocks until `count` items are finished. Throws UsageError on the stream's own thread, which would wait for ever.
  void wait_for(std::uint64_t count);
  void advance();
  void set_thread(std::thread::id id) { thread_ = id; }
  bool is_own_thread() const { return std::this_thread::get_id() == thread_; }

 private:
  std::atomic<std::uint64_t> done_{0};
  std::thread::id thread_;  // set before any work is queued
  std::mutex mutex_;
  std::condition_variable changed_;
  int waiters_ = 0;  // guarded by mutex_
};

// An event is (stream, number of items queued before the record). A wait takes that pair when it is queued, so a later
// record does not move it, and no event state changes when work finishes.
struct EventPoint {
  std::shared_ptr<StreamProgress> progress;  // null: never recorded
  std::uint64_t count = 0;
  bool reached() const { return progress == nullptr || progress->done() >= count; }
};

class HostEvent final : public Event {
 public:
  bool reached() const override { return point().reached(); }
  void synchronize() override;
  EventPoint point() const;
  void set_point(EventPoint point);

 private:
  mutable std::mutex mutex_;
  EventPoint point_;  // guarded by mutex_
};

// The order that a stream's work takes; see Stream for the contract.
class HostStream final : public Stream {
 public:
  using CopyHook = std::function<void(std::string_view stream, std::size_t bytes)>;
  // Throws IoError where no thread is to be had.
  HostStream(std::string_view name, std::shared_ptr<const CopyHook> before_copy);
  // Waits for the work in the queue. A failure that nobody asked for is dropped with it.
  ~HostStream() override;

  void copy(void* destination, const void* source, std::size_t bytes) override;
  void fill_zero(void* destination, std::size_t bytes) override;
  void call(HostCall host_call) override;
  void enqueue(std::function<void()> work) override;
  void record(Event& event) override;
  void wait(Event& event) override;
  void synchronize() override;
  void* native_handle() const override { return nullptr; }
  std::uint64_t closure_ns() const override { return shared_->closure_ns.load(std::memory_order_relaxed); }
  std::uint64_t closures() const override { return shared_->closures.load(std::memory_order_relaxed); }
  ClosureSpans closure_spans() const override;

 private:
  enum class Kind : std::uint8_t { copy, zero, call, closure, wait };
  struct Item {
    Kind kind = Kind::copy;
    void* destination = nullptr;
    const void* source = nullptr;
    std::size_t bytes = 0;
    HostCall host_call;
    std::function<void()> closure;
    EventPoint point;
  };
  // What the thread uses; shared with it, so that a forked child, which has no such thread, can let go of it.
  struct Shared {
    std::string name;
    std::shared_ptr<const CopyHook> before_copy;
    std::shared_ptr<StreamProgress> progress = std::make_shared<StreamProgress>();
    std::mutex mutex;
    std::condition_variable work;  // the thread: something to do, or the end
    std::condition_variable room;  // callers: the ring is full
    std::vector<Item> ring;        // fixed size; item n is at n % size
    std::uint64_t queued = 0;      // items ever queued; guarded by mutex, as all below
    std::uint64_t taken = 0;       // items whose place is free again
    bool idle = false;             // the thread sleeps on `work`
    int callers_waiting = 0;
    bool ending = false;
    // The ring of the last closures' times, made with the first one; span n is at n % size.
    std::vector<ClosureSpans::Span> closure_spans;
    std::uint64_t closure_span_count = 0;
    std::exception_ptr failure;                             // the first since the last synchronize()
    std::atomic<std::uint64_t> closure_ns{0}, closures{0};  // written by the thread alone
  };

  template <class Fill>
  void push(const Fill& fill);
  static void run(const std::shared_ptr<Shared>& shared);
  static void run_item(Shared& shared, Item& item, ClosureSpans::Span* closure);
  static void note_closure(Shared& shared, const ClosureSpans::Span& closure);

  std::shared_ptr<Shared> shared_;
  pid_t owner_;
  std::unique_ptr<std::thread> thread_;
};

}  // namespace ballast::offload
