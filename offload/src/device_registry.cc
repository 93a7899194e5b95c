// The kinds of device that this program has.
// SPDX-License-Identifier: Apache-2.0
#include "ballast/offload/device_registry.h"

#include <algorithm>
#include <mutex>
#include <vector>

#include "ballast/base/check.h"
#include "ballast/base/error.h"

namespace ballast::offload {
namespace {

struct Registry {
  std::mutex mutex;
  std::vector<DeviceBackend> backends;  // guarded by mutex
};

Registry& registry() {
  static Registry instance;
  return instance;
}

}  // namespace

void register_device_backend(const DeviceBackend& backend) {
  BALLAST_CHECK(backend.available != nullptr && backend.make != nullptr);
  Registry& r = registry();
  const std::lock_guard lock(r.mutex);
  const auto same = std::find_if(r.backends.begin(), r.backends.end(),
                                 [&](const DeviceBackend& other) { return other.name == backend.name; });
  if (same != r.backends.end()) {
    *same = backend;
  } else {
    r.backends.push_back(backend);
  }
}

DeviceBackend device_backend(std::string_view name) {
  Registry& r = registry();
  const std::lock_guard lock(r.mutex);
  for (const DeviceBackend& backend : r.backends) {
    if (backend.name == name) return backend;
  }
  throw ConfigError("device \"" + std::string(name) +
                    "\" is not part of this program: build with BALLAST_CUDA=ON and call "
                    "ballast::cuda::register_device() first, or set device to \"host\"");
}

std::string automatic_device() {
  std::vector<DeviceBackend> backends;
  {
    Registry& r = registry();
    const std::lock_guard lock(r.mutex);
    backends = r.backends;
  }
  for (const DeviceBackend& backend : backends) {
    if (backend.available(nullptr)) return backend.name;
  }
  return "host";
}

}  // namespace ballast::offload
