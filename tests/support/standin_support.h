// Trainers and ranks over the stand-in.
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <ballast/communicators/nccl.h>
#include <ballast/cuda/cuda_device.h>
#include <standin/standin.h>

#include <cstdlib>
#include <functional>
#include <memory>
#include <vector>

#include "support/on_ranks.h"
#include "support/random_case.h"

namespace ballast::testing {

// The trainer's kernels are host code here too, in order with the stream.
inline void on_device(SyntheticOptions& options) {
  options.run = [](Stream stream, std::function<void()> work) {
    const auto on = static_cast<cudaStream_t>(stream.native_handle());
    if (const cudaError_t result = standin::launch(on, std::move(work)); result != cudaSuccess) {
      throw Error(std::string("launch of the trainer's kernel: ") + cudaGetErrorName(result));
    }
  };
  options.view = [](void* data) { return standin::host_view(data); };
}

// A number from the environment.
inline std::uint64_t number_from(const char* variable, std::uint64_t otherwise) {
  const char* text = std::getenv(variable);
  return text != nullptr ? std::strtoull(text, nullptr, 10) : otherwise;
}

inline Case of_rank(Case c, int rank, int world_size) {
  c.options.micro_stride = world_size;
  c.options.micro_offset = rank;
  return c;
}

// What one rank on a GPU has: its device, and NCCL between it and the others. `control`: null, or for small calls.
inline EngineEnvironment gpu_rank(int rank, int world_size, std::span<const std::byte> id,
                                  const std::shared_ptr<Communicator>& control, std::chrono::milliseconds timeout) {
  NcclOptions options;
  options.communicator.timeout = timeout;
  options.control = control;
  options.device = rank;
  EngineEnvironment environment;
  environment.device = std::shared_ptr<offload::Device>(cuda::make_cuda_device({.device = rank}));
  environment.communicator = make_nccl_communicator(options, rank, world_size, id);
  return environment;
}

}  // namespace ballast::testing
