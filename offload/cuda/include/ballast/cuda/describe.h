// What CUDA shows on this machine, for people: nothing here is needed to train.
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <string>
#include <vector>

namespace ballast::cuda {

struct DeviceDescription {
  int number = 0;  // CUDA's
  std::string name;
  int compute_major = 0, compute_minor = 0;  // compute capability
  std::uint64_t memory_bytes = 0;
  std::uint64_t free_bytes = 0;  // now
  std::string pci;               // "0000:17:00.0"; empty where CUDA does not tell
  int numa_node = -1;            // -1: not known
  // The link to the host as the system tells it, in transfers per second and lane ("32.0 GT/s PCIe") and in lanes: at
  // best, and now (a GPU at rest lowers its speed). Empty and 0 where the system does not tell.
  std::string link_speed_most, link_speed_now;
  int link_width_most = 0, link_width_now = 0;
  std::string trouble;  // why the device cannot be used; empty where it can
};

struct Description {
  int runtime_version = 0;  // as CUDA writes versions: 13000 is 13.0
  int driver_version = 0;   // the newest CUDA that the driver serves; 0: there is no driver
  std::string trouble;      // why CUDA shows no device; empty where it shows some
  std::vector<DeviceDescription> devices;
};

// Opens each device for a moment, which takes part of a second and some of its memory until the process ends. Never
// throws for what it finds. The caller's current device stays.
Description describe(const std::string& sysfs_root = "/sys");

}  // namespace ballast::cuda
