// The optimizer's work on a CUDA device.
// SPDX-License-Identifier: Apache-2.0
#include "cuda_kernels.h"

#include <algorithm>
#include <array>

#include "ballast/base/check.h"
#include "ballast/kernels/cuda.h"
#include "ballast/kernels/reduce.h"

namespace ballast::cuda {
namespace {

cudaStream_t handle(offload::Stream& stream) { return static_cast<cudaStream_t>(stream.native_handle()); }

std::size_t element_bytes(kernels::ElementType type) { return type == kernels::ElementType::fp32 ? 4 : 2; }

}  // namespace

CudaKernels::CudaKernels(std::shared_ptr<DeviceState> state) : state_(std::move(state)) {
  const DeviceScope scope(*state_);
  void* sums = nullptr;
  state_->require(cudaMalloc(&sums, kSums * sizeof(double)), "cudaMalloc", "64 KiB for sums");
  sums_ = static_cast<double*>(sums);
  const cudaError_t result = cudaEventCreateWithFlags(&free_, cudaEventDisableTiming);
  if (result != cudaSuccess) state_->expect(cudaFree(sums_), "cudaFree");
  state_->require(result, "cudaEventCreateWithFlags");
}

CudaKernels::~CudaKernels() {
  state_->expect(cudaEventDestroy(free_), "cudaEventDestroy");
  state_->expect(cudaFree(sums_), "cudaFree", "memory for sums");
}

void CudaKernels::update(offload::Stream& stream, const offload::ChunkArrays& arrays,
                         std::span<const offload::UpdateSegment> segments) {
  BALLAST_CHECK(arrays.moment_type != kernels::ElementType::int8);  // a configuration that asks for it is refused
  const DeviceScope scope(*state_);
  kernels::AdamArrays a;
  a.parameter_format = arrays.parameter_format;
  a.moment_type = arrays.moment_type;
  a.gradient_type = arrays.gradient_type;
  a.parameter = arrays.parameter;
  a.master = arrays.master;
  a.exp_avg = arrays.exp_avg;
  a.exp_avg_sq = arrays.exp_avg_sq;
  a.gradient = arrays.gradient;
  a.published = arrays.published;
  std::array<kernels::cuda::AdamSegment, 64> some;
  while (!segments.empty()) {
    const std::size_t count = std::min(segments.size(), some.size());
    for (std::size_t i = 0; i < count; ++i) some[i] = {segments[i].begin, segments[i].count, segments[i].scalars};
    if (!state_->expect(static_cast<cudaError_t>(kernels::cuda::adam(a, some.data(), count, handle(stream))),
                        "the Adam kernel")) {
      return;
    }
    segments = segments.subspan(count);
  }
}

void CudaKernels::accumulate(offload::Stream& stream, kernels::ElementType type, std::byte* destination,
                             const std::byte* source, std::uint64_t count, bool first) {
  if (first) {
    stream.copy(destination, source, count * element_bytes(type));
    return;
  }
  const DeviceScope scope(*state_);
  state_->expect(
      static_cast<cudaError_t>(kernels::cuda::accumulate(type, destination, source, 1.0f, count, handle(stream))),
      "the accumulation kernel");
}

void CudaKernels::sum_squares(offload::Stream& stream, kernels::ElementType type, const std::byte* source,
                              std::uint64_t count, double* block_sums) {
  const DeviceScope scope(*state_);
  const std::lock_guard lock(mutex_);
  while (count > 0) {
    const std::uint64_t part = std::min(count, kSums * kernels::kSumBlock);
    const std::uint64_t blocks = (part + kernels::kSumBlock - 1) / kernels::kSumBlock;
    state_->expect(cudaStreamWaitEvent(handle(stream), free_, 0), "cudaStreamWaitEvent");
    state_->expect(static_cast<cudaError_t>(kernels::cuda::sum_of_squares(type, source, part, sums_, handle(stream))),
                   "the kernel for sums of squares");
    stream.copy(block_sums, sums_, blocks * sizeof(double));
    state_->expect(cudaEventRecord(free_, handle(stream)), "cudaEventRecord");
    source += part * element_bytes(type);
    block_sums += blocks;
    count -= part;
  }
}

}  // namespace ballast::cuda
