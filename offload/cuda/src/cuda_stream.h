// Streams and events of a CudaDevice.
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <condition_variable>
#include <cstdint>
#include <memory>
#include <mutex>
#include <string>
#include <string_view>
#include <thread>
#include <vector>

#include "ballast/offload/device.h"
#include "device_state.h"

namespace ballast::cuda {

class CudaEvent final : public offload::Event {
 public:
  explicit CudaEvent(std::shared_ptr<DeviceState> state);
  ~CudaEvent() override;
  bool reached() const override;
  void synchronize() override;
  cudaEvent_t handle() const { return event_; }

 private:
  std::shared_ptr<DeviceState> state_;
  cudaEvent_t event_ = nullptr;
};

class CudaStream final : public offload::Stream {
 public:
  enum class Priority : std::uint8_t { normal, highest };
  CudaStream(std::shared_ptr<DeviceState> state, std::string_view name, Priority priority);
  CudaStream(std::shared_ptr<DeviceState> state, std::string_view name, cudaStream_t adopted);
  ~CudaStream() override;  // waits for the work in the queue

  void copy(void* destination, const void* source, std::size_t bytes) override;
  void fill_zero(void* destination, std::size_t bytes) override;
  void call(offload::HostCall host_call) override { queue(host_call, true); }
  void notify(offload::HostCall host_call) override { queue(host_call, false); }
  void enqueue(std::function<void()> work) override;
  void record(offload::Event& event) override;
  void wait(offload::Event& event) override;
  void synchronize() override;
  void* native_handle() const override { return stream_; }

 private:
  // Host calls that may be queued; more make the caller wait.
  static constexpr std::size_t kRingItems = 256;
  struct Item {
    cudaEvent_t event = nullptr;  // of its own, used again
    offload::HostCall host_call;
    bool recorded = false;  // false: the device had failed; nothing to wait for
  };

  bool good(cudaError_t result, const char* call, std::size_t bytes = 0) noexcept;
  void open();
  void close() noexcept;
  void queue(offload::HostCall host_call, bool holds);
  void run();
  void drain();
  std::string place() const { return "stream \"" + name_ + "\""; }

  std::shared_ptr<DeviceState> state_;
  std::string name_;
  cudaStream_t stream_ = nullptr;
  bool owned_ = true;
  std::uint32_t* word_ = nullptr;  // pinned; the number of the last call that ended

  std::mutex order_mutex_;  // held by who queues: numbers and the stream's order agree
  std::mutex mutex_;
  std::condition_variable work_, room_, ended_;
  std::vector<Item> ring_;    // item n is at n % size; the queuer's until queued_ passes it, then the thread's
  std::uint64_t queued_ = 0;  // guarded by mutex_, as all below
  std::uint64_t taken_ = 0;
  bool ending_ = false;
  std::thread thread_;
};

}  // namespace ballast::cuda
