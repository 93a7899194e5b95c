// Streams and events of the stand-in: a thread and a bounded ring per stream.
// SPDX-License-Identifier: Apache-2.0
#include <chrono>
#include <cstring>

#include "world.h"

namespace standin {

void Progress::wait_for(std::uint64_t count) {
  if (done() >= count) return;
  std::unique_lock lock(mutex_);
  changed_.wait(lock, [&] { return done() >= count; });
}

void Progress::advance() {
  const std::lock_guard lock(mutex_);
  done_.store(done_.load(std::memory_order_relaxed) + 1, std::memory_order_release);
  changed_.notify_all();
}

namespace {

std::uint64_t mixed(std::uint64_t x) {
  x = (x + 0x9E3779B97F4A7C15u) * 0xBF58476D1CE4E5B9u;
  x = (x ^ (x >> 27)) * 0x94D049BB133111EBu;
  return x ^ (x >> 31);
}

std::atomic<std::uint64_t> streams_made{0};

// Whether every copy to or from that place is one that blocks its caller.
bool blocks(const void* destination, const void* source, std::size_t bytes) {
  return place_of(destination, bytes) == Place::pageable || place_of(source, bytes) == Place::pageable;
}

cudaError_t wait_until(const Point& point) {
  point.progress->wait_for(point.count);
  return leave(sticky());
}

int stream_wait_value(cudaStream_t stream, unsigned long long address, unsigned value, unsigned flags) {
  const cudaError_t error = enter<"cuStreamWaitValue32">();
  if (error != cudaSuccess) return static_cast<int>(error);
  if (flags != 0 || place_of(reinterpret_cast<void*>(address), 4) != Place::pinned) return cudaErrorInvalidValue;
  stream->push([&](CUstream_st::Item& item) {
    item.kind = CUstream_st::Kind::wait_value;
    item.source = reinterpret_cast<const void*>(address);
    item.wanted = value;
  });
  return 0;
}

}  // namespace

cudaError_t launch(cudaStream_t stream, std::function<void()> work) {
  STANDIN_ENTER("launch");
  stream->push([&](CUstream_st::Item& item) {
    item.kind = CUstream_st::Kind::launch;
    item.work = std::move(work);
  });
  return cudaSuccess;
}

}  // namespace standin

CUstream_st::CUstream_st() : number_(++standin::streams_made), thread_([this] { run(); }) {}

CUstream_st::~CUstream_st() {
  {
    const std::lock_guard lock(mutex_);
    ending_ = true;
    work_.notify_all();
  }
  thread_.join();
}

standin::Point CUstream_st::end() {
  const std::lock_guard lock(mutex_);
  return {progress_, queued_};
}

void CUstream_st::run_item(Item& item) {
  if (const std::uint64_t seed = standin::timing_seed(); seed != 0) {
    const std::uint64_t drawn = standin::mixed(standin::mixed(seed ^ number_ << 32) + taken_);
    if (drawn % 3 == 0) std::this_thread::sleep_for(std::chrono::microseconds(drawn / 3 % 150));
  }
  if (item.kind == Kind::wait_event) {
    item.point.progress->wait_for(item.point.count);
    return;
  }
  if (item.kind == Kind::wait_value) {
    auto& word = *static_cast<std::uint32_t*>(const_cast<void*>(item.source));
    while (standin::sticky() == cudaSuccess) {
      const std::uint32_t found = std::atomic_ref(word).load(std::memory_order_acquire);
      if (static_cast<std::int32_t>(found - item.wanted) >= 0) return;
      std::this_thread::sleep_for(std::chrono::microseconds(20));
    }
    return;
  }
  // After a failure nothing runs.
  if (standin::sticky() != cudaSuccess || standin::enter<"execution">() != cudaSuccess) {
    standin::kill(cudaErrorLaunchFailure);
    return;
  }
  if (item.kind == Kind::collective) {
    item.work();
    return;
  }
  const std::shared_lock running(standin::execution());
  if (standin::sticky() != cudaSuccess) return;
  switch (item.kind) {
    case Kind::copy:
      std::memmove(standin::host_view(item.destination), standin::host_view(item.source), item.bytes);
      return;
    case Kind::zero:
      std::memset(standin::host_view(item.destination), item.value, item.bytes);
      return;
    case Kind::launch:
      item.work();
      return;
    default:
      return;
  }
}

void CUstream_st::run() {
  standin::current_device() = device_;
  std::unique_lock lock(mutex_);
  for (;;) {
    work_.wait(lock, [&] { return ending_ || taken_ < queued_; });
    if (taken_ == queued_) return;
    Item& item = ring_[taken_ % kRingItems];
    lock.unlock();
    run_item(item);
    item.work = nullptr;
    item.point = {};
    lock.lock();
    ++taken_;
    room_.notify_one();
    progress_->advance();
  }
}

using standin::leave;
using standin::Place;

extern "C" {

cudaError_t cudaDeviceGetStreamPriorityRange(int* least, int* greatest) {
  STANDIN_ENTER("cudaDeviceGetStreamPriorityRange");
  *least = 0;
  *greatest = -5;
  return cudaSuccess;
}

cudaError_t cudaStreamCreateWithPriority(cudaStream_t* stream, unsigned, int) {
  STANDIN_ENTER("cudaStreamCreateWithPriority");
  *stream = new CUstream_st;
  ++standin::counts().streams;
  return cudaSuccess;
}

cudaError_t cudaStreamDestroy(cudaStream_t stream) {
  const cudaError_t error = standin::enter<"cudaStreamDestroy">();
  delete stream;
  --standin::counts().streams;
  return leave(error);
}

cudaError_t cudaStreamSynchronize(cudaStream_t stream) {
  STANDIN_ENTER("cudaStreamSynchronize");
  return standin::wait_until(stream->end());
}

cudaError_t cudaStreamWaitEvent(cudaStream_t stream, cudaEvent_t event, unsigned) {
  STANDIN_ENTER("cudaStreamWaitEvent");
  standin::Point point;
  {
    const std::lock_guard lock(event->mutex);
    point = event->point;
  }
  if (point.reached()) return cudaSuccess;
  // A stream's own past is waited for by its order.
  if (point.progress == stream->end().progress) return cudaSuccess;
  stream->push([&](CUstream_st::Item& item) {
    item.kind = CUstream_st::Kind::wait_event;
    item.point = point;
  });
  return cudaSuccess;
}

cudaError_t cudaEventCreateWithFlags(cudaEvent_t* event, unsigned) {
  STANDIN_ENTER("cudaEventCreateWithFlags");
  *event = new CUevent_st;
  ++standin::counts().events;
  return cudaSuccess;
}

cudaError_t cudaEventDestroy(cudaEvent_t event) {
  const cudaError_t error = standin::enter<"cudaEventDestroy">();
  delete event;
  --standin::counts().events;
  return leave(error);
}

cudaError_t cudaEventRecord(cudaEvent_t event, cudaStream_t stream) {
  STANDIN_ENTER("cudaEventRecord");
  const standin::Point point = stream->end();
  const std::lock_guard lock(event->mutex);
  event->point = point;
  return cudaSuccess;
}

cudaError_t cudaEventQuery(cudaEvent_t event) {
  STANDIN_ENTER("cudaEventQuery");
  const std::lock_guard lock(event->mutex);
  return leave(event->point.reached() ? cudaSuccess : cudaErrorNotReady);
}

cudaError_t cudaEventSynchronize(cudaEvent_t event) {
  STANDIN_ENTER("cudaEventSynchronize");
  standin::Point point;
  {
    const std::lock_guard lock(event->mutex);
    point = event->point;
  }
  if (point.progress == nullptr) return cudaSuccess;
  return standin::wait_until(point);
}

cudaError_t cudaMemcpyAsync(void* destination, const void* source, std::size_t bytes, cudaMemcpyKind kind,
                            cudaStream_t stream) {
  STANDIN_ENTER("cudaMemcpyAsync");
  if (kind != cudaMemcpyDefault || standin::place_of(destination, bytes) == Place::bad ||
      standin::place_of(source, bytes) == Place::bad) {
    return leave(cudaErrorInvalidValue);
  }
  const standin::Point point = stream->push([&](CUstream_st::Item& item) {
    item.kind = CUstream_st::Kind::copy;
    item.destination = destination;
    item.source = source;
    item.bytes = bytes;
  });
  if (standin::blocks(destination, source, bytes)) return standin::wait_until(point);
  return cudaSuccess;
}

cudaError_t cudaMemsetAsync(void* destination, int value, std::size_t bytes, cudaStream_t stream) {
  STANDIN_ENTER("cudaMemsetAsync");
  if (standin::place_of(destination, bytes) != Place::device) return leave(cudaErrorInvalidValue);
  stream->push([&](CUstream_st::Item& item) {
    item.kind = CUstream_st::Kind::zero;
    item.destination = destination;
    item.value = value;
    item.bytes = bytes;
  });
  return cudaSuccess;
}

cudaError_t cudaGetDriverEntryPointByVersion(const char* symbol, void** function, unsigned, unsigned long long,
                                             cudaDriverEntryPointQueryResult* result) {
  STANDIN_ENTER("cudaGetDriverEntryPointByVersion");
  const bool known = std::strcmp(symbol, "cuStreamWaitValue32") == 0;
  *function = known ? reinterpret_cast<void*>(&standin::stream_wait_value) : nullptr;
  *result = known ? cudaDriverEntryPointSuccess : cudaDriverEntryPointSymbolNotFound;
  return cudaSuccess;
}

}  // extern "C"
