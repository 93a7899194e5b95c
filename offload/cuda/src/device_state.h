// What a CudaDevice shares with its streams, events and kernels: which device it is, its latched failure, what host
// memory is pinned. Outlives the device for what still refers to it.
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cuda_runtime_api.h>

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <exception>
#include <functional>
#include <mutex>
#include <span>
#include <string>
#include <string_view>
#include <vector>

namespace ballast::cuda {

// The text for a result that is not cudaSuccess: call, native name and number, place, and what to do.
std::string error_text(cudaError_t result, std::string_view call, std::string_view where);
// After these the process can use the device no more.
bool is_sticky(cudaError_t result);

class DeviceState {
 public:
  // cuStreamWaitValue32: holds the stream until (int)(*address - value) >= 0.
  using WaitValue = int (*)(cudaStream_t stream, unsigned long long address, unsigned value, unsigned flags);

  DeviceState(int number, std::string text, WaitValue hold, std::uint64_t piece_bytes)
      : device_(number), description_(std::move(text)), wait_value_(hold), piece_bytes_(piece_bytes) {}

  int device() const { return device_; }
  const std::string& description() const { return description_; }  // "CUDA device 0 (NVIDIA H200)"
  WaitValue wait_value() const { return wait_value_; }

  // Throws for a result other than cudaSuccess: PlanError where memory is lacking (with the numbers), else IoError.
  // Sticky ones are latched.
  void require(cudaError_t result, std::string_view call, std::string_view what = {});
  // Latches instead; true for cudaSuccess. Never throws.
  bool expect(cudaError_t result, std::string_view call, std::string_view what = {}) noexcept;
  bool failed() const { return failed_.load(std::memory_order_acquire); }
  void check() const;  // throws what is latched
  void set_failure_handler(std::function<void(std::exception_ptr)> handler);

  // Pinned in pieces; see split().
  void register_memory(std::span<std::byte> memory);
  void unregister_memory(std::span<std::byte> memory) noexcept;
  // The bytes from `address` on, at most `bytes`, that lie within one pinned piece or outside all of them.
  std::size_t contiguous(const void* address, std::size_t bytes) const;

 private:
  struct Range {
    std::uintptr_t begin, end;
  };
  void latch(std::exception_ptr failure) noexcept;

  const int device_;
  const std::string description_;
  const WaitValue wait_value_;
  const std::uint64_t piece_bytes_;
  std::atomic<bool> failed_{false};
  mutable std::mutex mutex_;
  std::exception_ptr failure_;  // guarded by mutex_, as below
  std::function<void(std::exception_ptr)> handler_;
  std::vector<Range> ranges_;
};

// The device is the caller's current one for as long as this lives; then the one before is again.
class DeviceScope {
 public:
  explicit DeviceScope(DeviceState& state);
  ~DeviceScope();
  DeviceScope(const DeviceScope&) = delete;
  DeviceScope& operator=(const DeviceScope&) = delete;

 private:
  int before_ = -1;  // -1: nothing to restore
};

}  // namespace ballast::cuda
