// How bodies run on a CUDA device. (The tests have a header of the same name that runs them on the host.)
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cuda_runtime.h>

#include <cstdint>

namespace ballast::kernels::cuda {

constexpr unsigned kThreads = 256;
constexpr std::uint64_t kMostBlocks = 1u << 30;

template <class Body>
__global__ void __launch_bounds__(kThreads) run_items(const __grid_constant__ Body body, std::uint64_t items) {
  const std::uint64_t stride = std::uint64_t{gridDim.x} * kThreads;
  for (std::uint64_t i = std::uint64_t{blockIdx.x} * kThreads + threadIdx.x; i < items; i += stride) body(i);
}

template <class Body>
__global__ void __launch_bounds__(kThreads) run_warps(const __grid_constant__ Body body, std::uint64_t warps) {
  const std::uint64_t stride = std::uint64_t{gridDim.x} * (kThreads / 32);
  const unsigned lane = threadIdx.x % 32;
  for (std::uint64_t w = std::uint64_t{blockIdx.x} * (kThreads / 32) + threadIdx.x / 32; w < warps; w += stride) {
    double sum = body.lane(w, lane);
    for (unsigned half = 16; half != 0; half /= 2) sum += __shfl_down_sync(0xFFFFFFFFu, sum, half);
    if (lane == 0) body.finish(w, sum);
  }
}

inline unsigned blocks_for(std::uint64_t items, unsigned per_block) {
  const std::uint64_t blocks = (items + per_block - 1) / per_block;
  return static_cast<unsigned>(blocks < kMostBlocks ? blocks : kMostBlocks);
}

// Calls body(i) for every i below `items`, in any order.
template <class Body>
cudaError_t launch_items(const Body& body, std::uint64_t items, cudaStream_t stream) {
  if (items == 0) return cudaSuccess;
  run_items<<<blocks_for(items, kThreads), kThreads, 0, stream>>>(body, items);
  return cudaGetLastError();
}

// body.finish(w, sum over the 32 lanes of body.lane(w, lane)) for every w below `warps`.
template <class Body>
cudaError_t launch_warps(const Body& body, std::uint64_t warps, cudaStream_t stream) {
  if (warps == 0) return cudaSuccess;
  run_warps<<<blocks_for(warps, kThreads / 32), kThreads, 0, stream>>>(body, warps);
  return cudaGetLastError();
}

}  // namespace ballast::kernels::cuda
