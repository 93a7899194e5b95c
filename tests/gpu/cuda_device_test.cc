// The contract of every device on a GPU, where there is one.
// SPDX-License-Identifier: Apache-2.0
#include <ballast/cuda/cuda_device.h>

#include "contract/device_contract.h"

namespace ballast::offload {
namespace {

INSTANTIATE_TEST_SUITE_P(Devices, DeviceContract,
                         testing::Values(Kind{"Cuda",
                                              []() -> std::unique_ptr<Device> {
                                                return cuda::device_count() > 0 ? cuda::make_cuda_device() : nullptr;
                                              }}),
                         [](const auto& chosen) { return std::string(chosen.param.name); });

}  // namespace
}  // namespace ballast::offload
