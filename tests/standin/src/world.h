// What the stand-in's calls share: the device's health, injected failures, memory, counts.
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <map>
#include <memory>
#include <mutex>
#include <shared_mutex>
#include <string>
#include <string_view>
#include <thread>
#include <vector>

#include "standin/standin.h"

namespace standin {

// Takes note of a call; what it must return at once, if anything.
cudaError_t enter(std::string_view function);
// Every function that is entered stands in the list of them from the program's start, called or not.
template <std::size_t N>
struct FunctionName {
  constexpr FunctionName(const char (&literal)[N]) {  // NOLINT: a literal is a name
    for (std::size_t i = 0; i < N; ++i) text[i] = literal[i];
  }
  char text[N];
};
bool list_function(const char* function);
template <FunctionName name>
struct Listed {
  static inline const bool done = list_function(name.text);
};
template <FunctionName name>
cudaError_t enter() {
  static_cast<void>(Listed<name>::done);
  return enter(name.text);
}
// What a call returns: kept for cudaGetLastError().
cudaError_t leave(cudaError_t error);
cudaError_t sticky();            // cudaSuccess while the thread's current device is well
std::shared_mutex& execution();  // shared by whatever runs, on any stream
void kill(cudaError_t error);    // the current device, with a sticky error
int& current_device();           // the thread's
bool is_sticky(cudaError_t error);
std::uint64_t timing_seed();

#define STANDIN_ENTER(name)                                                                     \
  if (const cudaError_t standin_error = ::standin::enter<name>(); standin_error != cudaSuccess) \
  return ::standin::leave(standin_error)

// How far a stream has come; outlives it for events.
class Progress {
 public:
  std::uint64_t done() const { return done_.load(std::memory_order_acquire); }
  void wait_for(std::uint64_t count);
  void advance();

 private:
  std::atomic<std::uint64_t> done_{0};
  std::mutex mutex_;
  std::condition_variable changed_;
};

struct Point {
  std::shared_ptr<Progress> progress;  // null: never recorded
  std::uint64_t count = 0;
  bool reached() const { return progress == nullptr || progress->done() >= count; }
};

// Whether all of a range is device memory, host memory that is pinned, or other host memory.
enum class Place { device, pinned, pageable, bad };
Place place_of(const void* address, std::size_t bytes);

// Device memory that a communicator refers to, which cannot be freed meanwhile. 0 where it is none; release() is false
// for a number that is not alive.
std::uint64_t hold_memory(const void* address, std::size_t bytes);
bool release_memory(std::uint64_t number);

struct Counts {
  std::atomic<std::size_t> streams{0}, events{0}, communicators{0};
};
Counts& counts();

}  // namespace standin

struct CUevent_st {
  std::mutex mutex;
  standin::Point point;  // guarded by mutex
};

struct CUstream_st {
 public:
  CUstream_st();
  ~CUstream_st();

  // A collective takes execution() itself, for as long as it does not wait for other ranks.
  enum class Kind : std::uint8_t { copy, zero, launch, collective, wait_event, wait_value };
  struct Item {
    Kind kind = Kind::copy;
    void* destination = nullptr;
    const void* source = nullptr;
    std::size_t bytes = 0;
    int value = 0;
    unsigned wanted = 0;
    standin::Point point;
    std::function<void()> work;
  };
  template <class Fill>
  standin::Point push(const Fill& fill);
  standin::Point end();  // of what is queued now

 private:
  static constexpr std::size_t kRingItems = 1024;
  void run();
  void run_item(Item& item);

  std::shared_ptr<standin::Progress> progress_ = std::make_shared<standin::Progress>();
  std::mutex mutex_;
  std::condition_variable work_, room_;
  std::vector<Item> ring_{kRingItems};  // guarded by mutex_, as all below
  std::uint64_t queued_ = 0, taken_ = 0;
  bool ending_ = false;
  std::uint64_t number_;
  int device_ = standin::current_device();
  std::thread thread_;
};

template <class Fill>
standin::Point CUstream_st::push(const Fill& fill) {
  std::unique_lock lock(mutex_);
  room_.wait(lock, [&] { return queued_ - taken_ < kRingItems; });
  fill(ring_[queued_ % kRingItems]);
  ++queued_;
  work_.notify_one();
  return {progress_, queued_};
}
