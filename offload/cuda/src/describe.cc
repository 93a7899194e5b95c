// A description of the devices, for people.
// SPDX-License-Identifier: Apache-2.0
#include "ballast/cuda/describe.h"

#include <cuda_runtime_api.h>

#include <algorithm>

#include "ballast/cuda/cuda_device.h"
#include "device_state.h"
#include "pci.h"

namespace ballast::cuda {
namespace {

// Empty where the result is good.
std::string trouble_of(cudaError_t result, const char* call, int device) {
  if (result == cudaSuccess) return {};
  static_cast<void>(cudaGetLastError());
  return error_text(result, call, "CUDA device " + std::to_string(device));
}

std::string examine_memory(DeviceDescription& device) {
  std::size_t free_bytes = 0, total_bytes = 0;
  std::string trouble = trouble_of(cudaSetDevice(device.number), "cudaSetDevice", device.number);
  if (trouble.empty()) {
    trouble = trouble_of(cudaMemGetInfo(&free_bytes, &total_bytes), "cudaMemGetInfo", device.number);
  }
  device.free_bytes = free_bytes;
  return trouble;
}

DeviceDescription describe_device(int number, const std::string& sysfs_root) {
  DeviceDescription device;
  device.number = number;
  device.pci = pci_name(number);
  device.numa_node = pci_number(sysfs_root, device.pci, "numa_node");
  device.link_speed_most = pci_attribute(sysfs_root, device.pci, "max_link_speed");
  device.link_speed_now = pci_attribute(sysfs_root, device.pci, "current_link_speed");
  device.link_width_most = std::max(0, pci_number(sysfs_root, device.pci, "max_link_width"));
  device.link_width_now = std::max(0, pci_number(sysfs_root, device.pci, "current_link_width"));
  cudaDeviceProp properties{};
  device.trouble = trouble_of(cudaGetDeviceProperties(&properties, number), "cudaGetDeviceProperties", number);
  if (!device.trouble.empty()) return device;
  device.name = properties.name;
  device.compute_major = properties.major;
  device.compute_minor = properties.minor;
  device.memory_bytes = properties.totalGlobalMem;
  device.trouble = examine_memory(device);
  return device;
}

}  // namespace

Description describe(const std::string& sysfs_root) {
  Description all;
  if (cudaRuntimeGetVersion(&all.runtime_version) != cudaSuccess) static_cast<void>(cudaGetLastError());
  if (cudaDriverGetVersion(&all.driver_version) != cudaSuccess) static_cast<void>(cudaGetLastError());
  const int count = device_count(&all.trouble);
  if (count == 0) return all;
  int before = 0;
  const bool known = cudaGetDevice(&before) == cudaSuccess;
  for (int number = 0; number < count; ++number) all.devices.push_back(describe_device(number, sysfs_root));
  if (!known || cudaSetDevice(before) != cudaSuccess) static_cast<void>(cudaGetLastError());
  return all;
}

}  // namespace ballast::cuda
