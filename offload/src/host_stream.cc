// The host device's streams and events.
// SPDX-License-Identifier: Apache-2.0
#include "host_stream.h"

#include <pthread.h>
#include <signal.h>
#include <unistd.h>

#include <chrono>
#include <cstring>
#include <system_error>
#include <utility>

#include "ballast/base/check.h"
#include "ballast/base/error.h"

namespace ballast::offload {
namespace {

// Deep enough for the work of several units; a caller that is further ahead than this waits.
constexpr std::size_t kRingItems = 1024;

constexpr std::size_t kClosureSpans = 8192;
constexpr std::uint64_t kJoinedWithinNs = 20'000;

std::uint64_t now_ns() {
  return static_cast<std::uint64_t>(
      std::chrono::nanoseconds(std::chrono::steady_clock::now().time_since_epoch()).count());
}

HostEvent& host_event(Event& event) {
  auto* const own = dynamic_cast<HostEvent*>(&event);
  if (own == nullptr) throw UsageError("an event of another device was given to a stream of the host device");
  return *own;
}

// New threads take no signals: those belong to the trainer's own threads.
class SignalsBlocked {
 public:
  SignalsBlocked() {
    sigset_t all;
    sigfillset(&all);
    BALLAST_CHECK(pthread_sigmask(SIG_SETMASK, &all, &before_) == 0);
  }
  ~SignalsBlocked() { BALLAST_CHECK(pthread_sigmask(SIG_SETMASK, &before_, nullptr) == 0); }
  SignalsBlocked(const SignalsBlocked&) = delete;
  SignalsBlocked& operator=(const SignalsBlocked&) = delete;

 private:
  sigset_t before_;
};

}  // namespace

void StreamProgress::wait_for(std::uint64_t count) {
  if (done() >= count) return;
  if (is_own_thread()) throw UsageError("work on a stream waits for later work of the same stream: it would never end");
  std::unique_lock lock(mutex_);
  ++waiters_;
  changed_.wait(lock, [&] { return done() >= count; });
  --waiters_;
}

void StreamProgress::advance() {
  const std::lock_guard lock(mutex_);
  done_.store(done_.load(std::memory_order_relaxed) + 1, std::memory_order_release);
  if (waiters_ != 0) changed_.notify_all();
}

void HostEvent::synchronize() {
  const EventPoint now = point();
  if (now.progress != nullptr) now.progress->wait_for(now.count);
}

EventPoint HostEvent::point() const {
  const std::lock_guard lock(mutex_);
  return point_;
}

void HostEvent::set_point(EventPoint point) {
  const std::lock_guard lock(mutex_);
  point_ = std::move(point);
}

HostStream::HostStream(std::string_view name, std::shared_ptr<const CopyHook> before_copy)
    : shared_(std::make_shared<Shared>()), owner_(getpid()) {
  shared_->name = name;
  shared_->before_copy = std::move(before_copy);
  shared_->ring.resize(kRingItems);
  const SignalsBlocked blocked;
  try {
    // The lock keeps the thread from its first item until the progress knows it.
    const std::lock_guard lock(shared_->mutex);
    thread_ = std::make_unique<std::thread>([shared = shared_] { run(shared); });
    shared_->progress->set_thread(thread_->get_id());
  } catch (const std::system_error& error) {
    throw IoError("no thread for stream \"" + shared_->name + "\": " + error.what() +
                  ". Raise the limit on processes (ulimit -u, or pids.max of the cgroup)");
  }
  const std::string label = ("bl-" + shared_->name).substr(0, 15);  // what the kernel has room for
  pthread_setname_np(thread_->native_handle(), label.c_str());      // for debuggers only
}

HostStream::~HostStream() {
  if (getpid() != owner_) {
    // A forked child has no such thread, and its locks may be held for ever: nothing is touched. The thread's own copy
    // of shared_ keeps that alive.
    static_cast<void>(thread_.release());
    return;
  }
  {
    const std::lock_guard lock(shared_->mutex);
    shared_->ending = true;
    shared_->work.notify_one();
  }
  thread_->join();
}

template <class Fill>
void HostStream::push(const Fill& fill) {
  std::unique_lock lock(shared_->mutex);
  if (shared_->queued - shared_->taken == kRingItems) {
    if (shared_->progress->is_own_thread()) {
      throw UsageError("stream \"" + shared_->name +
                       "\" is full and was given more by its own work: it would never end");
    }
    ++shared_->callers_waiting;
    shared_->room.wait(lock, [&] { return shared_->queued - shared_->taken < kRingItems; });
    --shared_->callers_waiting;
  }
  fill(shared_->ring[shared_->queued % kRingItems]);
  ++shared_->queued;
  if (shared_->idle) shared_->work.notify_one();
}

void HostStream::copy(void* destination, const void* source, std::size_t bytes) {
  push([&](Item& item) {
    item.kind = Kind::copy;
    item.destination = destination;
    item.source = source;
    item.bytes = bytes;
  });
}

void HostStream::fill_zero(void* destination, std::size_t bytes) {
  push([&](Item& item) {
    item.kind = Kind::zero;
    item.destination = destination;
    item.bytes = bytes;
  });
}

void HostStream::call(HostCall host_call) {
  BALLAST_CHECK(host_call.function != nullptr);
  push([&](Item& item) {
    item.kind = Kind::call;
    item.host_call = host_call;
  });
}

void HostStream::enqueue(std::function<void()> work) {
  if (!work) throw UsageError("an empty function was enqueued on stream \"" + shared_->name + "\"");
  push([&](Item& item) {
    item.kind = Kind::closure;
    item.closure = std::move(work);
  });
}

void HostStream::record(Event& event) {
  HostEvent& own = host_event(event);
  const std::lock_guard lock(shared_->mutex);
  own.set_point({shared_->progress, shared_->queued});
}

void HostStream::wait(Event& event) {
  EventPoint point = host_event(event).point();
  // Its own past is waited for by order alone; what is reached stays reached.
  if (point.progress == shared_->progress || point.reached()) return;
  push([&](Item& item) {
    item.kind = Kind::wait;
    item.point = std::move(point);
  });
}

void HostStream::synchronize() {
  std::uint64_t queued = 0;
  {
    const std::lock_guard lock(shared_->mutex);
    queued = shared_->queued;
  }
  shared_->progress->wait_for(queued);
  std::exception_ptr failure;
  {
    const std::lock_guard lock(shared_->mutex);
    std::swap(failure, shared_->failure);
  }
  if (failure) std::rethrow_exception(failure);
}

ClosureSpans HostStream::closure_spans() const {
  const std::lock_guard lock(shared_->mutex);
  const std::vector<ClosureSpans::Span>& ring = shared_->closure_spans;
  const std::uint64_t count = shared_->closure_span_count;
  ClosureSpans result;
  const std::uint64_t first = count > ring.size() ? count - ring.size() : 0;
  for (std::uint64_t i = first; i < count; ++i) result.spans.push_back(ring[i % ring.size()]);
  if (first > 0) result.complete_from_ns = result.spans.front().end_ns;
  return result;
}

// Under the mutex.
void HostStream::note_closure(Shared& shared, const ClosureSpans::Span& closure) {
  std::vector<ClosureSpans::Span>& ring = shared.closure_spans;
  if (ring.empty()) ring.resize(kClosureSpans);
  if (shared.closure_span_count > 0) {
    ClosureSpans::Span& last = ring[(shared.closure_span_count - 1) % ring.size()];
    if (closure.begin_ns - last.end_ns <= kJoinedWithinNs) {
      last.end_ns = closure.end_ns;
      return;
    }
  }
  ring[shared.closure_span_count++ % ring.size()] = closure;
}

void HostStream::run_item(Shared& shared, Item& item, ClosureSpans::Span* closure) {
  switch (item.kind) {
    case Kind::copy:
      if (*shared.before_copy) (*shared.before_copy)(shared.name, item.bytes);
      if (item.bytes != 0) std::memcpy(item.destination, item.source, item.bytes);
      return;
    case Kind::zero:
      if (item.bytes != 0) std::memset(item.destination, 0, item.bytes);
      return;
    case Kind::call:
      item.host_call.function(item.host_call.context, item.host_call.argument);
      return;
    case Kind::closure: {
      const std::uint64_t begin_ns = now_ns();
      item.closure();
      *closure = {begin_ns, now_ns()};
      shared.closure_ns += closure->end_ns - begin_ns;
      ++shared.closures;
      return;
    }
    case Kind::wait:
      item.point.progress->wait_for(item.point.count);
      return;
  }
}

void HostStream::run(const std::shared_ptr<Shared>& shared) {
  std::unique_lock lock(shared->mutex);
  for (;;) {
    if (shared->taken == shared->queued) {
      if (shared->ending) return;
      shared->idle = true;
      shared->work.wait(lock);
      shared->idle = false;
      continue;
    }
    Item& item = shared->ring[shared->taken % kRingItems];
    lock.unlock();
    std::exception_ptr failure;
    ClosureSpans::Span closure;
    try {
      run_item(*shared, item, &closure);
    } catch (...) {
      failure = std::current_exception();
    }
    // What the closure holds goes before the item counts as done: its owner may destroy what it refers to.
    item.closure = nullptr;
    item.point = {};
    lock.lock();
    if (closure.end_ns != 0) note_closure(*shared, closure);
    if (failure && !shared->failure) shared->failure = failure;
    ++shared->taken;
    if (shared->callers_waiting != 0) shared->room.notify_one();
    shared->progress->advance();
  }
}

}  // namespace ballast::offload
