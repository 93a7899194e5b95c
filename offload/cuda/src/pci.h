// What the system tells about a PCI device.
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <string>

namespace ballast::cuda {

// As the system writes it ("0000:17:00.0"); empty where CUDA does not tell.
std::string pci_name(int device);

// The first line of a file of the device; empty where there is none.
std::string pci_attribute(const std::string& sysfs_root, const std::string& name, const char* file);

// -1 where it is not told.
int pci_number(const std::string& sysfs_root, const std::string& name, const char* file);

}  // namespace ballast::cuda
