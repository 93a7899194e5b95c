// Streams and events on the CUDA runtime.
// SPDX-License-Identifier: Apache-2.0
#include "cuda_stream.h"

#include <pthread.h>
#include <signal.h>

#include <algorithm>
#include <atomic>
#include <system_error>
#include <utility>

#include "ballast/base/check.h"
#include "ballast/base/error.h"

namespace ballast::cuda {
namespace {

constexpr unsigned kWaitGreaterOrEqual = 0;  // CU_STREAM_WAIT_VALUE_GEQ

CudaEvent& cuda_event(offload::Event& event) {
  auto* const own = dynamic_cast<CudaEvent*>(&event);
  if (own == nullptr) throw UsageError("an event of another device was given to a stream of a CUDA device");
  return *own;
}

}  // namespace

// --- events ----------------------------------------------------------------------------------------------------------

CudaEvent::CudaEvent(std::shared_ptr<DeviceState> state) : state_(std::move(state)) {
  const DeviceScope scope(*state_);
  state_->require(cudaEventCreateWithFlags(&event_, cudaEventDisableTiming | cudaEventBlockingSync),
                  "cudaEventCreateWithFlags");
}

CudaEvent::~CudaEvent() { state_->expect(cudaEventDestroy(event_), "cudaEventDestroy"); }

bool CudaEvent::reached() const {
  const cudaError_t result = cudaEventQuery(event_);
  if (result == cudaErrorNotReady) {
    static_cast<void>(cudaGetLastError());
    return false;
  }
  state_->expect(result, "cudaEventQuery");  // after a failure nothing is waited for
  return true;
}

void CudaEvent::synchronize() {
  state_->expect(cudaEventSynchronize(event_), "cudaEventSynchronize");
  state_->check();
}

// --- streams ---------------------------------------------------------------------------------------------------------

CudaStream::CudaStream(std::shared_ptr<DeviceState> state, std::string_view name, Priority priority)
    : state_(std::move(state)), name_(name), ring_(kRingItems) {
  const DeviceScope scope(*state_);
  int least = 0;
  int greatest = 0;
  state_->require(cudaDeviceGetStreamPriorityRange(&least, &greatest), "cudaDeviceGetStreamPriorityRange");
  state_->require(
      cudaStreamCreateWithPriority(&stream_, cudaStreamNonBlocking, priority == Priority::highest ? greatest : least),
      "cudaStreamCreateWithPriority", place());
  open();
}

CudaStream::CudaStream(std::shared_ptr<DeviceState> state, std::string_view name, cudaStream_t adopted)
    : state_(std::move(state)), name_(name), stream_(adopted), owned_(false), ring_(kRingItems) {
  open();
}

void CudaStream::open() {
  try {
    const DeviceScope scope(*state_);
    void* word = nullptr;
    state_->require(cudaHostAlloc(&word, sizeof(std::uint32_t), cudaHostAllocPortable | cudaHostAllocMapped),
                    "cudaHostAlloc", place());
    word_ = static_cast<std::uint32_t*>(word);
    *word_ = 0;
    for (Item& item : ring_) {
      state_->require(cudaEventCreateWithFlags(&item.event, cudaEventDisableTiming | cudaEventBlockingSync),
                      "cudaEventCreateWithFlags", place());
    }
    // New threads take no signals: those belong to the trainer's own threads.
    sigset_t all;
    sigset_t before;
    sigfillset(&all);
    BALLAST_CHECK(pthread_sigmask(SIG_SETMASK, &all, &before) == 0);
    try {
      thread_ = std::thread([this] { run(); });
    } catch (const std::system_error& error) {
      BALLAST_CHECK(pthread_sigmask(SIG_SETMASK, &before, nullptr) == 0);
      throw IoError("no thread for " + place() + ": " + error.what() +
                    ". Raise the limit on processes (ulimit -u, or pids.max of the cgroup)");
    }
    BALLAST_CHECK(pthread_sigmask(SIG_SETMASK, &before, nullptr) == 0);
  } catch (...) {
    close();
    throw;
  }
}

void CudaStream::close() noexcept {
  for (Item& item : ring_) {
    if (item.event != nullptr) good(cudaEventDestroy(item.event), "cudaEventDestroy");
  }
  if (word_ != nullptr) good(cudaFreeHost(word_), "cudaFreeHost");
  if (owned_ && stream_ != nullptr) good(cudaStreamDestroy(stream_), "cudaStreamDestroy");
}

CudaStream::~CudaStream() {
  drain();
  {
    const std::lock_guard lock(mutex_);
    ending_ = true;
  }
  work_.notify_all();
  thread_.join();
  close();
}

// True where the call succeeded; else its failure is latched, with the place.
bool CudaStream::good(cudaError_t result, const char* call, std::size_t bytes) noexcept {
  if (result == cudaSuccess) return true;
  try {
    return state_->expect(result, call, place() + (bytes > 0 ? ", " + std::to_string(bytes) + " bytes" : ""));
  } catch (...) {
    return state_->expect(result, call);  // no memory for the place
  }
}

void CudaStream::copy(void* destination, const void* source, std::size_t bytes) {
  auto* to = static_cast<std::byte*>(destination);
  const auto* from = static_cast<const std::byte*>(source);
  while (bytes > 0) {
    const std::size_t part = state_->contiguous(from, state_->contiguous(to, bytes));
    if (!good(cudaMemcpyAsync(to, from, part, cudaMemcpyDefault, stream_), "cudaMemcpyAsync", part)) {
      return;
    }
    to += part;
    from += part;
    bytes -= part;
  }
}

void CudaStream::fill_zero(void* destination, std::size_t bytes) {
  if (bytes == 0) return;
  good(cudaMemsetAsync(destination, 0, bytes, stream_), "cudaMemsetAsync");
}

void CudaStream::enqueue(std::function<void()>) {
  throw UsageError(place() +
                   " is one of a CUDA device, which does not compute with host functions: launch kernels on "
                   "Stream::native_handle(), or set device to \"host\"");
}

void CudaStream::record(offload::Event& event) {
  const CudaEvent& own = cuda_event(event);
  good(cudaEventRecord(own.handle(), stream_), "cudaEventRecord");
}

void CudaStream::wait(offload::Event& event) {
  const CudaEvent& own = cuda_event(event);
  good(cudaStreamWaitEvent(stream_, own.handle(), 0), "cudaStreamWaitEvent");
}

void CudaStream::queue(offload::HostCall host_call, bool holds) {
  BALLAST_CHECK(host_call.function != nullptr);
  const std::lock_guard order(order_mutex_);
  std::uint64_t number = 0;
  {
    std::unique_lock lock(mutex_);
    if (queued_ - taken_ == kRingItems && std::this_thread::get_id() == thread_.get_id()) {
      throw UsageError(place() + " is full and was given more by its own calls: it would never end");
    }
    room_.wait(lock, [&] { return queued_ - taken_ < kRingItems; });
    number = queued_;
  }
  // Not under mutex_: CUDA may make this wait for the stream, which may wait for a call that the thread has yet to
  // take.
  Item& item = ring_[number % kRingItems];
  item.host_call = host_call;
  // After a failure the call still comes, since somebody may wait for it, and in order as long as the device lives:
  // what comes next may touch the memory of what came before.
  item.recorded = good(cudaEventRecord(item.event, stream_), "cudaEventRecord");
  if (holds && item.recorded) {
    const int result = state_->wait_value()(stream_, reinterpret_cast<std::uintptr_t>(word_),
                                            static_cast<std::uint32_t>(number + 1), kWaitGreaterOrEqual);
    // The driver's numbers are the runtime's for what can happen here.
    good(static_cast<cudaError_t>(result), "cuStreamWaitValue32");
  }
  {
    const std::lock_guard lock(mutex_);
    ++queued_;
  }
  work_.notify_one();
}

void CudaStream::run() {
  pthread_setname_np(pthread_self(), ("bl-" + name_).substr(0, 15).c_str());  // for debuggers only
  good(cudaSetDevice(state_->device()), "cudaSetDevice");
  std::unique_lock lock(mutex_);
  for (;;) {
    work_.wait(lock, [&] { return ending_ || taken_ < queued_; });
    if (taken_ == queued_) return;
    Item& item = ring_[taken_ % kRingItems];
    const auto number = static_cast<std::uint32_t>(taken_ + 1);
    lock.unlock();
    // What comes next may touch the memory of what came before: where waiting fails and the device lives, once more.
    if (item.recorded && !good(cudaEventSynchronize(item.event), "cudaEventSynchronize"))
      good(cudaEventSynchronize(item.event), "cudaEventSynchronize");
    item.host_call.function(item.host_call.context, item.host_call.argument);
    // Notifications write it too, so that a held stream never waits for a number that was passed over.
    std::atomic_ref(*word_).store(number, std::memory_order_release);
    lock.lock();
    ++taken_;
    room_.notify_one();
    ended_.notify_all();
  }
}

// Everything queued so far has been done, calls included.
void CudaStream::drain() {
  if (std::this_thread::get_id() == thread_.get_id()) {
    throw UsageError("a call on " + place() + " waits for later work of the same stream: it would never end");
  }
  good(cudaStreamSynchronize(stream_), "cudaStreamSynchronize");
  std::unique_lock lock(mutex_);
  const std::uint64_t target = queued_;
  ended_.wait(lock, [&] { return taken_ >= target; });
}

void CudaStream::synchronize() {
  drain();
  state_->check();
}

}  // namespace ballast::cuda
