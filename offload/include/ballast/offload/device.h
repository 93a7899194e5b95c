// Device, Stream, Event: the seam to what computes. The host device implements it on CPU threads; a GPU back end plugs
// in beside it. Memory of a device is taken once, as one slab.
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstddef>
#include <cstdint>
#include <exception>
#include <functional>
#include <memory>
#include <span>
#include <string>
#include <string_view>
#include <vector>

namespace ballast::offload {

class DeviceKernels;  // device_kernels.h

// A point in a stream's work. Reusable: recording again moves it. Never recorded counts as reached.
class Event {
 public:
  virtual ~Event() = default;
  virtual bool reached() const = 0;  // any thread; does not block
  virtual void synchronize() = 0;    // any thread; blocks until reached
};

// What a stream calls on the host: a plain function, so that queueing it allocates nothing. It must not throw, block
// for long, or call into the device.
struct HostCall {
  void (*function)(void* context, std::uint64_t argument) = nullptr;
  void* context = nullptr;
  std::uint64_t argument = 0;
};

struct ClosureSpans {
  struct Span {
    std::uint64_t begin_ns = 0, end_ns = 0;
  };
  std::vector<Span> spans;
  std::uint64_t complete_from_ns = 0;  // none that ended after this is missing
};

// Work in order. Every call returns at once unless it says otherwise; the queue is bounded, and a full one makes the
// caller wait for room. Any thread; calls from one thread keep their order.
class Stream {
 public:
  virtual ~Stream() = default;
  // Copies between any two places that the device can reach. Source and destination stay valid until the copy is done.
  virtual void copy(void* destination, const void* source, std::size_t bytes) = 0;
  // Zeroes memory of the device.
  virtual void fill_zero(void* destination, std::size_t bytes) = 0;
  // Calls on the host once everything before it is done; later work waits for its return.
  virtual void call(HostCall host_call) = 0;
  // The same, but later work need not wait for it: cheaper where waiting for the host costs the device time. Calls and
  // notifications of one stream run one after the other, in the order given.
  virtual void notify(HostCall host_call) { call(host_call); }
  // A trainer's closure, in order; on the host device this is how it computes. An exception that escapes is latched and
  // rethrown by the next synchronize(). Throws UsageError on a device whose work is not host functions.
  virtual void enqueue(std::function<void()> work) = 0;
  virtual void record(Event& event) = 0;
  virtual void wait(Event& event) = 0;      // later work waits for the event's last record
  virtual void synchronize() = 0;           // blocks; rethrows a latched failure
  virtual void* native_handle() const = 0;  // a cudaStream_t; null on the host device
  // Time spent in closures so far, and how many ended; 0 where the device cannot tell. Any thread.
  virtual std::uint64_t closure_ns() const { return 0; }
  virtual std::uint64_t closures() const { return 0; }
  // When closures ran: the last few thousand, oldest first, those that follow one another within 20 microseconds as
  // one; empty where the device cannot tell. Times of std::chrono::steady_clock. Any thread.
  virtual ClosureSpans closure_spans() const { return {}; }
};

class Device {
 public:
  virtual ~Device() = default;
  virtual std::string_view name() const = 0;  // "host", "cuda"
  // Takes the device memory, once. Throws PlanError with the numbers where it is not to be had. Base aligned to at
  // least 4 KiB; released by the destructor.
  virtual std::byte* take_slab(std::uint64_t bytes) = 0;
  virtual std::uint64_t capacity_bytes() const = 0;  // the most that take_slab can give
  // True where CPU code may use device addresses directly (the host device).
  virtual bool host_addressable() const = 0;
  virtual std::unique_ptr<Stream> make_stream(std::string_view name) = 0;  // before the device is destroyed
  virtual std::unique_ptr<Event> make_event() = 0;

  // What follows has an answer for devices on which there is nothing to do.

  // The trainer's own stream (a cudaStream_t), not owned: it outlives the result. Throws UsageError on a device that
  // has no such thing.
  virtual std::unique_ptr<Stream> adopt_stream(void* native_handle, std::string_view name);
  // Host memory that copies go to and from: pinned once, as a whole, so that they run at full speed and never block
  // the caller. Throws PlanError with the numbers where it cannot be. Undone before the memory goes.
  virtual void register_host_memory(std::span<std::byte> memory) { static_cast<void>(memory); }
  virtual void unregister_host_memory(std::span<std::byte> memory) noexcept { static_cast<void>(memory); }
  // The NUMA node that the device hangs on, or -1.
  virtual int numa_node() const { return -1; }
  // The optimizer's work on states in device memory; not null where the host cannot address it.
  virtual DeviceKernels* kernels() { return nullptr; }
  // Called once, from any thread, when the device has failed for good; before whatever waits for its work goes on (its
  // results are then anything). An empty handler ends that. Not while another thread sets one.
  virtual void set_failure_handler(std::function<void(std::exception_ptr)> handler) { static_cast<void>(handler); }
};

struct HostDeviceOptions {
  std::uint64_t capacity_bytes = 0;  // 0: as much as the machine and its cgroup allow
  // Test hook: called on the stream's thread before each copy (delays, reordering between streams). May be empty.
  std::function<void(std::string_view stream, std::size_t bytes)> before_copy;
  std::function<void()> check_interrupt = {};  // while take_slab() fills memory; what it throws leaves that
};
std::unique_ptr<Device> make_host_device(const HostDeviceOptions& options = {});

}  // namespace ballast::offload
