// The device itself: which one, its memory, its place in the machine.
// SPDX-License-Identifier: Apache-2.0
#include "ballast/cuda/cuda_device.h"

#include <cuda_runtime_api.h>

#include <algorithm>
#include <charconv>
#include <cstdlib>
#include <cstring>
#include <mutex>

#include "ballast/base/error.h"
#include "ballast/base/size.h"
#include "ballast/offload/device_registry.h"
#include "cuda_kernels.h"
#include "cuda_stream.h"
#include "device_state.h"
#include "pci.h"

namespace ballast::cuda {
namespace {

constexpr std::uint64_t kPage = 4096;
constexpr unsigned kStreamMemoryOperations = 12000;  // the interface of CUDA 12.0

// The local rank that a launcher tells, or 0.
int local_rank_from_environment() {
  for (const char* name : {"LOCAL_RANK", "OMPI_COMM_WORLD_LOCAL_RANK", "SLURM_LOCALID", "MPI_LOCALRANKID"}) {
    const char* text = std::getenv(name);
    if (text == nullptr) continue;
    int rank = 0;
    const char* end = text + std::strlen(text);
    const auto parsed = std::from_chars(text, end, rank);
    if (parsed.ec == std::errc() && parsed.ptr == end && rank >= 0) return rank;
  }
  return 0;
}

class CudaDevice final : public offload::Device {
 public:
  CudaDevice(std::shared_ptr<DeviceState> state, int numa_node)
      : state_(std::move(state)), numa_node_(numa_node), kernels_(state_) {}

  ~CudaDevice() override {
    if (allocated_ != nullptr) state_->expect(cudaFree(allocated_), "cudaFree", "the slab");
  }
  CudaDevice(const CudaDevice&) = delete;
  CudaDevice& operator=(const CudaDevice&) = delete;

  std::string_view name() const override { return "cuda"; }
  bool host_addressable() const override { return false; }
  int numa_node() const override { return numa_node_; }
  offload::DeviceKernels* kernels() override { return &kernels_; }

  std::byte* take_slab(std::uint64_t bytes) override {
    const std::lock_guard lock(mutex_);
    if (allocated_ != nullptr) throw UsageError("the memory of " + state_->description() + " is taken already");
    const DeviceScope scope(*state_);
    std::size_t free_bytes = 0;
    std::size_t total_bytes = 0;
    state_->require(cudaMemGetInfo(&free_bytes, &total_bytes), "cudaMemGetInfo");
    cudaError_t result = cudaErrorMemoryAllocation;
    const bool tried = bytes <= free_bytes;
    if (tried) {
      result = cudaMalloc(&allocated_, bytes + kPage);
      if (result != cudaSuccess) {
        static_cast<void>(cudaGetLastError());
        allocated_ = nullptr;
      }
    }
    if (result == cudaErrorMemoryAllocation) {
      throw PlanError("device memory of " + std::to_string(bytes) + " bytes (" + base::format_size(bytes) +
                      ") is not to be had on " + state_->description() + (tried ? ": cudaMalloc failed, " : ": ") +
                      "cudaErrorMemoryAllocation with " + std::to_string(free_bytes) + " of " +
                      std::to_string(total_bytes) + " bytes (" + base::format_size(free_bytes) + " of " +
                      base::format_size(total_bytes) + ") free. Lower budget.device, or end what else uses the device");
    }
    state_->require(result, "cudaMalloc", std::to_string(bytes) + " bytes");
    const auto address = reinterpret_cast<std::uintptr_t>(allocated_);
    return static_cast<std::byte*>(allocated_) + (base::round_up(address, kPage) - address);
  }

  std::uint64_t capacity_bytes() const override {
    const DeviceScope scope(*state_);
    std::size_t free_bytes = 0;
    std::size_t total_bytes = 0;
    state_->require(cudaMemGetInfo(&free_bytes, &total_bytes), "cudaMemGetInfo");
    return free_bytes - std::min<std::size_t>(free_bytes, kPage);
  }

  std::unique_ptr<offload::Stream> make_stream(std::string_view stream_name) override {
    const bool compute = stream_name == "compute";
    return std::make_unique<CudaStream>(state_, stream_name,
                                        compute ? CudaStream::Priority::normal : CudaStream::Priority::highest);
  }
  std::unique_ptr<offload::Event> make_event() override { return std::make_unique<CudaEvent>(state_); }

  std::unique_ptr<offload::Stream> adopt_stream(void* native_handle, std::string_view stream_name) override {
    if (native_handle == nullptr) {
      throw UsageError("stream \"" + std::string(stream_name) +
                       "\" is CUDA's null stream, which waits for all others and they for it; hand in a stream made "
                       "with cudaStreamNonBlocking");
    }
    return std::make_unique<CudaStream>(state_, stream_name, static_cast<cudaStream_t>(native_handle));
  }

  void register_host_memory(std::span<std::byte> memory) override { state_->register_memory(memory); }
  void unregister_host_memory(std::span<std::byte> memory) noexcept override { state_->unregister_memory(memory); }
  void set_failure_handler(std::function<void(std::exception_ptr)> handler) override {
    state_->set_failure_handler(std::move(handler));
  }

 private:
  std::shared_ptr<DeviceState> state_;
  int numa_node_;
  CudaKernels kernels_;
  std::mutex mutex_;
  void* allocated_ = nullptr;  // guarded by mutex_
};

// Before there is a device to blame.
void require_setup(cudaError_t result, const char* call, const std::string& where) {
  if (result == cudaSuccess) return;
  static_cast<void>(cudaGetLastError());
  throw ConfigError(error_text(result, call, where) + "; set device to \"host\" to go on without a GPU");
}

}  // namespace

int device_count(std::string* reason) {
  int count = 0;
  const cudaError_t result = cudaGetDeviceCount(&count);
  if (result != cudaSuccess) {
    static_cast<void>(cudaGetLastError());
    if (reason != nullptr) {
      *reason = std::string("cudaGetDeviceCount: ") + cudaGetErrorName(result) + ", " + cudaGetErrorString(result);
    }
    return 0;
  }
  if (count == 0 && reason != nullptr) *reason = "CUDA shows no device (CUDA_VISIBLE_DEVICES?)";
  return count;
}

std::unique_ptr<offload::Device> make_cuda_device(const CudaDeviceOptions& options) {
  std::string reason;
  const int count = device_count(&reason);
  if (count == 0) throw ConfigError("device \"cuda\": " + reason + "; set device to \"host\" to go on without a GPU");
  const int rank = options.local_rank >= 0 ? options.local_rank : local_rank_from_environment();
  const int device = options.device >= 0 ? options.device : rank % count;
  if (device >= count) {
    throw ConfigError("CUDA device " + std::to_string(device) + " is asked for, and CUDA shows " +
                      std::to_string(count) + " (numbered from 0)");
  }
  std::string description = "CUDA device " + std::to_string(device);
  cudaDeviceProp properties{};
  require_setup(cudaGetDeviceProperties(&properties, device), "cudaGetDeviceProperties", description);
  description += std::string(" (") + properties.name + ")";
  int unified = 0;
  require_setup(cudaDeviceGetAttribute(&unified, cudaDevAttrUnifiedAddressing, device), "cudaDeviceGetAttribute",
                description);
  if (unified == 0) throw ConfigError(description + " does not share its address space with the host, which is needed");
  void* entry = nullptr;
  cudaDriverEntryPointQueryResult found = cudaDriverEntryPointSymbolNotFound;
  require_setup(cudaGetDriverEntryPointByVersion("cuStreamWaitValue32", &entry, kStreamMemoryOperations,
                                                 cudaEnableDefault, &found),
                "cudaGetDriverEntryPointByVersion", description);
  if (found != cudaDriverEntryPointSuccess || entry == nullptr) {
    throw ConfigError("the driver of " + description + " has no cuStreamWaitValue32 (result " +
                      std::to_string(static_cast<int>(found)) + "); a driver for CUDA 12 or later is needed");
  }
  auto state = std::make_shared<DeviceState>(device, description, reinterpret_cast<DeviceState::WaitValue>(entry),
                                             options.pin_piece_bytes);
  const DeviceScope scope(*state);
  return std::make_unique<CudaDevice>(std::move(state), pci_number(options.sysfs_root, pci_name(device), "numa_node"));
}

void register_device() {
  offload::register_device_backend({"cuda", [](std::string* reason) { return device_count(reason) > 0; },
                                    [](int local_rank) {
                                      CudaDeviceOptions options;
                                      options.local_rank = local_rank;
                                      return make_cuda_device(options);
                                    }});
}

}  // namespace ballast::cuda
