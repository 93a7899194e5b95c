// Calls on NCCL, checked; the watchdog.
// SPDX-License-Identifier: Apache-2.0
#include "nccl_state.h"

#include <ballast/base/error.h>
#include <pthread.h>
#include <signal.h>

#include <algorithm>
#include <cstring>
#include <utility>

namespace ballast::communicators {
namespace {

constexpr std::size_t kSliceBytes = 64 * 1024;  // per rank
constexpr auto kLookEvery = std::chrono::milliseconds(10);

// The communicator's device is current for as long as this lives, where result() is good.
class OnDevice {
 public:
  explicit OnDevice(int device) {
    int current = -1;
    result_ = cudaGetDevice(&current);
    if (result_ != cudaSuccess || current == device) return;
    call_ = "cudaSetDevice";
    result_ = cudaSetDevice(device);
    if (result_ == cudaSuccess) before_ = current;
  }
  // What was the current device a moment ago is so again; where it can no longer be, the trainer's next call says so.
  ~OnDevice() {
    if (result_ != cudaSuccess || (before_ >= 0 && cudaSetDevice(before_) != cudaSuccess)) {
      static_cast<void>(cudaGetLastError());
    }
  }
  OnDevice(const OnDevice&) = delete;
  OnDevice& operator=(const OnDevice&) = delete;

  cudaError_t result() const { return result_; }
  const char* call() const { return call_; }

 private:
  int before_ = -1;  // -1: nothing to restore
  const char* call_ = "cudaGetDevice";
  cudaError_t result_ = cudaSuccess;
};

}  // namespace

std::string nccl_text(const char* call, ncclResult_t result, ncclComm_t comm) {
  std::string text = std::string(call) + " failed: " + ncclGetErrorString(result) + " (" +
                     std::to_string(static_cast<int>(result)) + ")";
  const char* last = comm != nullptr ? ncclGetLastError(comm) : nullptr;
  if (last != nullptr && *last != '\0') text += ", " + std::string(last);
  return text;
}

ncclResult_t settled(ncclComm_t comm, ncclResult_t result, std::chrono::nanoseconds timeout) {
  const auto deadline = std::chrono::steady_clock::now() + timeout;
  while (result == ncclInProgress && comm != nullptr) {
    ncclResult_t state = ncclSuccess;
    const ncclResult_t asked = ncclCommGetAsyncError(comm, &state);
    if (asked != ncclSuccess) return asked;
    result = state;
    if (result != ncclInProgress || std::chrono::steady_clock::now() > deadline) break;
    std::this_thread::sleep_for(std::chrono::microseconds(50));
  }
  return result;
}

NcclState::NcclState(ncclComm_t comm, bool owned, Members members, int device, std::chrono::nanoseconds timeout,
                     std::shared_ptr<Communicator> control)
    : owned_(owned),
      members_(std::move(members)),
      device_(device),
      timeout_(timeout),
      control_(std::move(control)),
      comm_(comm) {}

// A failure of the control communicator, too, before the watchdog has seen it.
void NcclState::check() {
  latch_.throw_if_failed();
  if (control_ == nullptr) return;
  try {
    control_->check();
  } catch (const CommunicationError& error) {
    fail(error.what(), false);
    latch_.throw_if_failed();
  }
}

void NcclState::require(cudaError_t result, const char* call) {
  if (result == cudaSuccess) return;
  static_cast<void>(cudaGetLastError());
  const std::string text = cuda_text(result, call);
  fail(text);
  throw CommunicationError(text);
}

std::string NcclState::cuda_text(cudaError_t result, const char* call) const {
  return members_.name(members_.rank()) + ": " + call + " failed: " + cudaGetErrorName(result) + " (" +
         std::to_string(static_cast<int>(result)) + "), " + cudaGetErrorString(result);
}

// Asks under the lock, each time anew: a failure seen elsewhere aborts, and so frees, what is waited for.
void NcclState::require(ncclResult_t result, const char* call, const ncclComm_t& comm) {
  const auto deadline = Clock::now() + timeout_;
  while (result == ncclInProgress) {
    {
      const std::lock_guard lock(mutex_);
      if (comm != nullptr) {
        const ncclResult_t asked = ncclCommGetAsyncError(comm, &result);
        if (asked != ncclSuccess) result = asked;
      }
    }
    if (result != ncclInProgress) break;
    check();
    if (Clock::now() > deadline) break;
    std::this_thread::sleep_for(std::chrono::microseconds(50));
  }
  if (result == ncclSuccess) return;
  check();  // another failure may be why
  std::string text = members_.name(members_.rank()) + ": ";
  if (result == ncclInProgress) {
    text += std::string(call) + " did not get under way within " + format_seconds(timeout_);
  } else {
    const std::lock_guard lock(mutex_);
    text += nccl_text(call, result, comm);
  }
  fail(text);
  throw CommunicationError(text);
}

ncclResult_t NcclState::split_off(int color, ncclComm_t& made) {
  ncclConfig_t config = NCCL_CONFIG_INITIALIZER;
  config.blocking = 0;
  const std::lock_guard lock(mutex_);
  return comm_ == nullptr ? ncclInvalidUsage : ncclCommSplit(comm_, color, members_.rank(), &made, &config);
}

void NcclState::start() {
  const OnDevice on(device_);
  require(on.result(), on.call());
  if (control_ != nullptr) {
    watch_control_ = control_->duplicate();
  } else {
    require(split_off(0, small_), "ncclCommSplit", comm_);
    require(ncclInProgress, "ncclCommSplit", small_);
    require(cudaStreamCreateWithPriority(&small_stream_, cudaStreamNonBlocking, 0), "cudaStreamCreateWithPriority");
    require(cudaEventCreateWithFlags(&small_done_, cudaEventDisableTiming), "cudaEventCreateWithFlags");
    void* buffer = nullptr;
    require(cudaMalloc(&buffer, kSliceBytes * static_cast<std::size_t>(members_.count())), "cudaMalloc");
    small_buffer_ = static_cast<std::byte*>(buffer);
  }
  sigset_t all;
  sigset_t before;
  sigfillset(&all);
  const bool masked = pthread_sigmask(SIG_SETMASK, &all, &before) == 0;  // signals belong to the trainer's threads
  watchdog_ = std::thread([this] { watch(); });
  if (masked) static_cast<void>(pthread_sigmask(SIG_SETMASK, &before, nullptr));
}

NcclState::~NcclState() {
  const OnDevice on(device_);
  {
    std::unique_lock lock(mutex_);
    // What is under way ends, or the watchdog ends it.
    changed_.wait_for(lock, timeout_ + std::chrono::seconds(1),
                      [&] { return pending_.empty() || latch_.failed() || !watchdog_.joinable(); });
    stopping_ = true;
  }
  changed_.notify_all();
  if (watchdog_.joinable()) watchdog_.join();
  const bool good = !latch_.failed();
  if (good && comm_ != nullptr) {
    for (const Registered& each : registered_) {
      if (each.handle != nullptr) static_cast<void>(ncclCommDeregister(comm_, each.handle));  // it goes with comm_
    }
  }
  for (ncclComm_t* comm : {&small_, &comm_}) {
    if (*comm == nullptr || (comm == &comm_ && !owned_)) continue;
    const ncclResult_t finalized = good ? settled(*comm, ncclCommFinalize(*comm), timeout_) : ncclInProgress;
    // There is nobody left to tell; either way it is gone.
    static_cast<void>(finalized == ncclSuccess ? ncclCommDestroy(*comm) : ncclCommAbort(*comm));
    *comm = nullptr;
  }
  if (small_stream_ != nullptr) {
    static_cast<void>(cudaStreamSynchronize(small_stream_));
    static_cast<void>(cudaStreamDestroy(small_stream_));
  }
  if (small_done_ != nullptr) static_cast<void>(cudaEventDestroy(small_done_));
  if (small_buffer_ != nullptr) static_cast<void>(cudaFree(small_buffer_));
  for (Pending& p : pending_) free_.push_back(p);
  for (Pending& p : free_) {
    static_cast<void>(cudaEventDestroy(p.begin));
    static_cast<void>(cudaEventDestroy(p.end));
  }
}

void NcclState::fail(std::string_view text, bool tell_control) noexcept {
  if (!latch_.set(text)) return;
  // Before those made from it: whoever sees one of them fail finds this one failed.
  if (tell_control && control_ != nullptr) control_->abort(text);
  std::vector<std::weak_ptr<NcclState>> children;
  {
    const std::lock_guard lock(mutex_);
    for (ncclComm_t* comm : {&small_, &comm_}) {
      if (*comm != nullptr) static_cast<void>(ncclCommAbort(*comm));  // the failure is latched already
      *comm = nullptr;
    }
    registered_.clear();
    children.swap(children_);
  }
  changed_.notify_all();
  for (const auto& child : children) {
    if (const auto alive = child.lock()) alive->fail(text);
  }
}

void NcclState::abort(std::string_view reason) noexcept {
  if (control_ != nullptr) control_->abort(reason);
  try {
    const std::string text = members_.name(members_.rank()) + " gave up: " + std::string(reason);
    fail(text, false);
  } catch (const std::bad_alloc&) {
    fail("this rank gave up", false);
  }
}

NcclState::Pending NcclState::take_pending() {
  {
    const std::lock_guard lock(mutex_);
    if (!free_.empty()) {
      Pending p = free_.back();
      free_.pop_back();
      p.begun = false;
      return p;
    }
  }
  Pending p;
  require(cudaEventCreateWithFlags(&p.begin, cudaEventDisableTiming), "cudaEventCreateWithFlags");
  const cudaError_t result = cudaEventCreateWithFlags(&p.end, cudaEventDisableTiming);
  if (result != cudaSuccess) static_cast<void>(cudaEventDestroy(p.begin));
  require(result, "cudaEventCreateWithFlags");
  return p;
}

void NcclState::run_on(cudaStream_t stream, Large kind, const Signature& signature, const std::byte* source,
                       std::byte* destination, std::size_t elements, ncclDataType_t type) {
  const OnDevice on(device_);
  const std::lock_guard order(order_mutex_);
  check();
  require(on.result(), on.call());
  Pending p = take_pending();
  p.signature = signature;
  // Given back, or watched, whatever happens.
  const auto keep = [&](std::deque<Pending>* watched) {
    const std::lock_guard lock(mutex_);
    if (watched != nullptr) {
      watched->push_back(p);
    } else {
      free_.push_back(p);
    }
  };
  try {
    launch(stream, kind, p, source, destination, elements, type);
  } catch (...) {
    keep(nullptr);
    throw;
  }
  keep(&pending_);
}

void NcclState::launch(cudaStream_t stream, Large kind, const Pending& p, const std::byte* source,
                       std::byte* destination, std::size_t elements, ncclDataType_t type) {
  require(cudaEventRecord(p.begin, stream), "cudaEventRecord");
  ncclResult_t result = ncclInvalidUsage;
  const char* name = "";
  {
    // Together with abort, which frees what it ends.
    const std::lock_guard lock(mutex_);
    if (comm_ != nullptr) {
      switch (kind) {
        case Large::all_gather:
          name = "ncclAllGather";
          result = ncclAllGather(source, destination, elements, type, comm_, stream);
          break;
        case Large::reduce_scatter:
          name = "ncclReduceScatter";
          result = ncclReduceScatter(source, destination, elements, type, ncclSum, comm_, stream);
          break;
        case Large::all_reduce:
          name = "ncclAllReduce";
          result = ncclAllReduce(source, destination, elements, type, ncclSum, comm_, stream);
          break;
      }
    }
  }
  check();
  require(result, name, comm_);
  require(cudaEventRecord(p.end, stream), "cudaEventRecord");
}

void NcclState::gather_slice(std::span<const std::byte> mine, std::span<std::byte> all) {
  const std::size_t bytes = mine.size();
  std::byte* const own = small_buffer_ + static_cast<std::size_t>(members_.rank()) * bytes;
  require(cudaMemcpyAsync(own, mine.data(), bytes, cudaMemcpyDefault, small_stream_), "cudaMemcpyAsync");
  ncclResult_t result = ncclInvalidUsage;
  {
    const std::lock_guard lock(mutex_);
    if (small_ != nullptr) result = ncclAllGather(own, small_buffer_, bytes, ncclUint8, small_, small_stream_);
  }
  check();
  require(result, "ncclAllGather", small_);
  require(cudaEventRecord(small_done_, small_stream_), "cudaEventRecord");
  const auto deadline = Clock::now() + timeout_;
  for (;;) {
    check();
    const cudaError_t state = cudaEventQuery(small_done_);
    if (state == cudaSuccess) break;
    if (state != cudaErrorNotReady) require(state, "cudaEventQuery");
    static_cast<void>(cudaGetLastError());  // "not ready" would be the next that the trainer finds
    if (Clock::now() > deadline) {
      const std::string text = members_.name(members_.rank()) + " waited " + format_seconds(timeout_) +
                               " in a small call for the other ranks; see what became of them";
      fail(text);
      throw CommunicationError(text);
    }
    std::this_thread::sleep_for(std::chrono::microseconds(20));
  }
  require(cudaMemcpyAsync(all.data(), small_buffer_, all.size(), cudaMemcpyDefault, small_stream_), "cudaMemcpyAsync");
  require(cudaStreamSynchronize(small_stream_), "cudaStreamSynchronize");
}

bool NcclState::register_buffer(std::span<std::byte> buffer, std::string* reason) {
  const OnDevice on(device_);
  const std::lock_guard order(order_mutex_);
  check();
  require(on.result(), on.call());
  const std::lock_guard lock(mutex_);
  void* handle = nullptr;
  const ncclResult_t result = comm_ == nullptr || buffer.empty()
                                  ? ncclInvalidUsage
                                  : ncclCommRegister(comm_, buffer.data(), buffer.size(), &handle);
  if (result == ncclSuccess) {
    registered_.push_back({buffer.data(), handle});
    return true;
  }
  if (reason != nullptr) *reason = nccl_text("ncclCommRegister", result, comm_);
  return false;
}

void NcclState::unregister_buffer(std::span<std::byte> buffer) noexcept {
  const OnDevice on(device_);
  ncclResult_t result = ncclSuccess;
  {
    const std::lock_guard lock(mutex_);
    const auto found = std::find_if(registered_.begin(), registered_.end(),
                                    [&](const Registered& each) { return each.data == buffer.data(); });
    if (found == registered_.end()) return;  // aborted since
    if (found->handle != nullptr) result = ncclCommDeregister(comm_, found->handle);
    registered_.erase(found);
  }
  // What the transport may still refer to is about to go: it must not be used any more. The others have ended too.
  if (result != ncclSuccess) fail("ncclCommDeregister failed", false);
}

void NcclState::gather(Signature signature, std::span<const std::byte> mine, std::span<std::byte> all) {
  const OnDevice on(device_);
  const std::lock_guard order(order_mutex_);
  check();
  require(on.result(), on.call());
  const auto ranks = static_cast<std::size_t>(members_.count());
  std::vector<Signature> signatures(ranks);
  gather_slice(std::as_bytes(std::span(&signature, 1)), std::as_writable_bytes(std::span(signatures)));
  std::vector<int> numbers(ranks);
  for (std::size_t r = 0; r < ranks; ++r) numbers[r] = static_cast<int>(r);
  if (const auto text = disagreement(signatures, numbers, members_)) {
    fail(*text);
    throw CommunicationError(*text);
  }
  std::vector<std::byte> slice(ranks * std::min(mine.size(), kSliceBytes));
  for (std::size_t at = 0; at < mine.size(); at += kSliceBytes) {
    const std::size_t bytes = std::min(kSliceBytes, mine.size() - at);
    gather_slice(mine.subspan(at, bytes), std::span(slice).first(ranks * bytes));
    for (std::size_t r = 0; r < ranks; ++r) {
      std::memcpy(all.data() + r * mine.size() + at, slice.data() + r * bytes, bytes);
    }
  }
}

std::shared_ptr<NcclState> NcclState::split(int color, Members members, std::shared_ptr<Communicator> control) {
  const OnDevice on(device_);
  std::shared_ptr<NcclState> child;
  {
    const std::lock_guard order(order_mutex_);
    check();
    require(on.result(), on.call());
    ncclComm_t made = nullptr;
    const ncclResult_t result = split_off(color, made);
    child = std::make_shared<NcclState>(made, true, std::move(members), device_, timeout_, std::move(control));
    {
      const std::lock_guard lock(mutex_);
      std::erase_if(children_, [](const auto& other) { return other.expired(); });
      children_.push_back(child);
    }
    require(result, "ncclCommSplit", comm_);
    child->require(ncclInProgress, "ncclCommSplit", child->comm_);
  }
  child->start();
  check();  // a failure before it stood among the children has not reached it
  return child;
}

// Over the control communicator: who stands where. Those that do not come either are named by it.
std::string NcclState::who_is_missing(const Signature& signature) {
  const std::string own = members_.name(members_.rank()) + " waited " + format_seconds(timeout_) + " in " +
                          place(signature) + " for the other ranks";
  if (watch_control_ == nullptr) return own + "; see what became of them";
  try {
    std::vector<Signature> signatures(static_cast<std::size_t>(members_.count()));
    watch_control_->all_gather(std::as_bytes(std::span(&signature, 1)), std::as_writable_bytes(std::span(signatures)));
    std::vector<int> numbers(signatures.size());
    for (std::size_t r = 0; r < numbers.size(); ++r) numbers[r] = static_cast<int>(r);
    return disagreement(signatures, numbers, members_).value_or(own + ", which all have come to: the link is stuck");
  } catch (const CommunicationError& error) {
    return own + "; " + error.what();
  }
}

void NcclState::watch() {
  if (const cudaError_t result = cudaSetDevice(device_); result != cudaSuccess) {
    static_cast<void>(cudaGetLastError());
    fail(cuda_text(result, "cudaSetDevice"));
  }
  std::unique_lock lock(mutex_);
  while (!stopping_) {
    changed_.wait_for(lock, kLookEvery, [&] { return stopping_; });
    if (latch_.failed()) {
      for (Pending& p : pending_) free_.push_back(p);
      pending_.clear();
      changed_.notify_all();
      return;
    }
    std::string text;
    if (comm_ != nullptr) {
      ncclResult_t state = ncclSuccess;
      const ncclResult_t asked = ncclCommGetAsyncError(comm_, &state);
      if (asked != ncclSuccess) state = asked;
      if (state != ncclSuccess && state != ncclInProgress) {
        text = members_.name(members_.rank()) + ": " + nccl_text("a collective", state, comm_);
      }
    }
    const auto reached = [&](cudaEvent_t event) {
      const cudaError_t result = cudaEventQuery(event);
      if (result == cudaSuccess) return true;
      static_cast<void>(cudaGetLastError());
      if (result != cudaErrorNotReady) text = cuda_text(result, "cudaEventQuery");
      return false;
    };
    while (text.empty() && !pending_.empty()) {
      Pending& p = pending_.front();
      if (!p.begun) {
        p.begun = reached(p.begin);
        p.since = Clock::now();
        if (!p.begun) break;
      }
      if (reached(p.end)) {
        free_.push_back(p);
        pending_.pop_front();
        continue;
      }
      if (text.empty() && Clock::now() - p.since > timeout_) {
        const Signature signature = p.signature;
        lock.unlock();
        text = who_is_missing(signature);
        lock.lock();
      }
      break;
    }
    changed_.notify_all();
    lock.unlock();
    if (!text.empty()) fail(text);
    if (control_ != nullptr && !latch_.failed()) {
      try {
        control_->check();
      } catch (const std::exception& error) {
        fail(error.what(), false);
      }
    }
    lock.lock();
  }
}

}  // namespace ballast::communicators
