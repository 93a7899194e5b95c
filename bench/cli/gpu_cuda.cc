// A build with CUDA, and with NCCL where that was found too.
// SPDX-License-Identifier: Apache-2.0
#include <ballast/base/error.h>
#include <ballast/cuda/cuda_device.h>
#include <ballast/cuda/describe.h>
#include <ballast/kernels/cuda.h>

#include "gpu.h"
#if BALLAST_HAVE_NCCL
#include <ballast/communicators/nccl.h>
#endif

namespace ballast::cli {

void register_gpus() { cuda::register_device(); }

void add_gpu_communicators([[maybe_unused]] CommunicatorFactories& factories) {
#if BALLAST_HAVE_NCCL
  factories.nccl = [](const CommunicatorOptions& options, const LaunchInfo& launch,
                      const std::shared_ptr<Communicator>& bootstrap) {
    return make_nccl_communicator(options, launch, bootstrap);
  };
#endif
}

void add_gpu_facts(AcceleratorFacts& facts) {
  const cuda::Description all = cuda::describe();
  facts.cuda_built = true;
  facts.runtime_version = all.runtime_version;
  facts.driver_version = all.driver_version;
  facts.cuda_trouble = all.trouble;
  for (const cuda::DeviceDescription& d : all.devices) {
    facts.gpus.push_back({.number = d.number,
                          .name = d.name,
                          .compute_major = d.compute_major,
                          .compute_minor = d.compute_minor,
                          .memory_bytes = d.memory_bytes,
                          .free_bytes = d.free_bytes,
                          .pci = d.pci,
                          .numa_node = d.numa_node,
                          .link_speed_most = d.link_speed_most,
                          .link_speed_now = d.link_speed_now,
                          .link_width_most = d.link_width_most,
                          .link_width_now = d.link_width_now,
                          .trouble = d.trouble});
  }
#if BALLAST_HAVE_NCCL
  facts.nccl_built = true;
  facts.nccl_version = nccl_version();
#endif
}

void differentiate_on_gpu(const Tensor& parameter, const Tensor& gradient, float scale, const Stream& stream) {
  const auto count = static_cast<std::uint64_t>(gradient.elements);
  void* const on = stream.native_handle();
  const auto type = gradient.dtype == DataType::fp32 ? kernels::ElementType::fp32 : kernels::ElementType::bf16;
  int result = 0;
  if (gradient.dtype == parameter.dtype) {
    result = kernels::cuda::fill(type, gradient.data, 0.0F, count, on);
    if (result == 0) result = kernels::cuda::accumulate(type, gradient.data, parameter.data, 0.01F * scale, count, on);
  } else if (gradient.dtype == DataType::fp32) {
    const auto* const source = static_cast<const std::uint16_t*>(parameter.data);
    auto* const destination = static_cast<float*>(gradient.data);
    result = parameter.dtype == DataType::bf16 ? kernels::cuda::bf16_to_fp32(source, destination, count, on)
                                               : kernels::cuda::fp16_to_fp32(source, destination, count, on);
  } else {
    result = kernels::cuda::fill(type, gradient.data, 0.001F * scale, count, on);
  }
  if (result != 0) throw IoError("a kernel of the synthetic model failed: cudaError_t " + std::to_string(result));
}

}  // namespace ballast::cli
