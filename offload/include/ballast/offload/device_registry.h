// Kinds of device that a configuration can name. The host device is always there; a back end that the program links
// adds itself by its own register function, so that nothing below knows of it.
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <ballast/offload/device.h>

#include <memory>
#include <string>
#include <string_view>

namespace ballast::offload {

struct DeviceBackend {
  std::string name;  // as in the configuration: "cuda"
  // Whether there is such a device here; where not, why.
  bool (*available)(std::string* reason) = nullptr;
  // local_rank tells the ranks of one machine apart; -1: as the launcher's environment says.
  std::unique_ptr<Device> (*make)(int local_rank) = nullptr;
};

// Any thread; registering a name again replaces it.
void register_device_backend(const DeviceBackend& backend);
// Throws ConfigError where no such back end is linked.
DeviceBackend device_backend(std::string_view name);
// What "auto" takes: the first that is available here, in the order of registration; else "host".
std::string automatic_device();

}  // namespace ballast::offload
