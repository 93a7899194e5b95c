// The host device: the engine's device on CPU threads, with a capped memory of its own.
// SPDX-License-Identifier: Apache-2.0
#include <mutex>
#include <utility>

#include "ballast/base/error.h"
#include "ballast/base/size.h"
#include "ballast/offload/device.h"
#include "ballast/offload/topology.h"
#include "host_stream.h"
#include "mapped_memory.h"

namespace ballast::offload {
namespace {

class HostDevice final : public Device {
 public:
  explicit HostDevice(const HostDeviceOptions& options)
      : capacity_bytes_(options.capacity_bytes),
        check_interrupt_(options.check_interrupt),
        before_copy_(std::make_shared<const HostStream::CopyHook>(options.before_copy)) {}
  ~HostDevice() override { unmap_memory(slab_); }
  HostDevice(const HostDevice&) = delete;
  HostDevice& operator=(const HostDevice&) = delete;

  std::string_view name() const override { return "host"; }

  std::byte* take_slab(std::uint64_t bytes) override {
    const std::lock_guard lock(mutex_);
    if (slab_.data != nullptr) throw UsageError("the memory of the host device is taken already");
    if (capacity_bytes_ != 0 && bytes > capacity_bytes_) {
      throw PlanError("device memory of " + std::to_string(bytes) + " bytes (" + base::format_size(bytes) +
                      ") exceeds the capacity of the host device, " + std::to_string(capacity_bytes_) + " bytes (" +
                      base::format_size(capacity_bytes_) + "). Lower budget.device");
    }
    std::vector<std::string> notes;  // device memory on small pages is slower, not wrong
    slab_ = map_memory({"device memory (host device)", bytes, -1, true, check_interrupt_}, discover_topology(), notes);
    return slab_.data;
  }

  std::uint64_t capacity_bytes() const override {
    return capacity_bytes_ != 0 ? capacity_bytes_ : takeable_bytes(discover_topology());
  }

  bool host_addressable() const override { return true; }

  std::unique_ptr<Stream> make_stream(std::string_view stream_name) override {
    return std::make_unique<HostStream>(stream_name, before_copy_);
  }

  std::unique_ptr<Event> make_event() override { return std::make_unique<HostEvent>(); }

 private:
  std::uint64_t capacity_bytes_;
  std::function<void()> check_interrupt_;
  std::shared_ptr<const HostStream::CopyHook> before_copy_;
  std::mutex mutex_;
  MappedMemory slab_;  // guarded by mutex_
};

}  // namespace

std::unique_ptr<Stream> Device::adopt_stream(void*, std::string_view stream_name) {
  throw UsageError("stream \"" + std::string(stream_name) + "\" cannot be adopted: the " + std::string(name()) +
                   " device has no streams but its own (Engine::make_stream)");
}

std::unique_ptr<Device> make_host_device(const HostDeviceOptions& options) {
  return std::make_unique<HostDevice>(options);
}

}  // namespace ballast::offload
