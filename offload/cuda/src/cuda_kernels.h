// The optimizer's work on a CUDA device: offload/device_kernels.h over kernels/cuda.
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <memory>
#include <mutex>
#include <span>

#include "ballast/offload/device_kernels.h"
#include "device_state.h"

namespace ballast::cuda {

class CudaKernels final : public offload::DeviceKernels {
 public:
  // Takes a little device memory for sums. Throws PlanError where even that is lacking.
  explicit CudaKernels(std::shared_ptr<DeviceState> state);
  ~CudaKernels() override;
  CudaKernels(const CudaKernels&) = delete;
  CudaKernels& operator=(const CudaKernels&) = delete;

  void update(offload::Stream& stream, const offload::ChunkArrays& arrays,
              std::span<const offload::UpdateSegment> segments) override;
  void accumulate(offload::Stream& stream, kernels::ElementType type, std::byte* destination, const std::byte* source,
                  std::uint64_t count, bool first) override;
  void sum_squares(offload::Stream& stream, kernels::ElementType type, const std::byte* source, std::uint64_t count,
                   double* block_sums) override;

 private:
  static constexpr std::uint64_t kSums = 8192;  // of 32 Mi elements

  std::shared_ptr<DeviceState> state_;
  std::mutex mutex_;            // sums_ and its event belong to one call at a time
  double* sums_ = nullptr;      // device memory
  cudaEvent_t free_ = nullptr;  // recorded where sums_ has been read
};

}  // namespace ballast::cuda
