// Names and attributes of PCI devices.
// SPDX-License-Identifier: Apache-2.0
#include "pci.h"

#include <cuda_runtime_api.h>

#include <algorithm>
#include <cctype>
#include <charconv>
#include <fstream>

namespace ballast::cuda {

std::string pci_name(int device) {
  char bus[32] = {};
  if (cudaDeviceGetPCIBusId(bus, sizeof bus, device) != cudaSuccess) {
    static_cast<void>(cudaGetLastError());
    return {};
  }
  std::string name(bus);
  std::transform(name.begin(), name.end(), name.begin(), [](unsigned char c) { return std::tolower(c); });
  return name;
}

std::string pci_attribute(const std::string& sysfs_root, const std::string& name, const char* file) {
  std::string line;
  if (name.empty()) return line;
  std::ifstream in(sysfs_root + "/bus/pci/devices/" + name + "/" + file);
  std::getline(in, line);
  return line;
}

int pci_number(const std::string& sysfs_root, const std::string& name, const char* file) {
  const std::string text = pci_attribute(sysfs_root, name, file);
  int number = -1;
  const auto parsed = std::from_chars(text.data(), text.data() + text.size(), number);
  return parsed.ec == std::errc() ? number : -1;
}

}  // namespace ballast::cuda
