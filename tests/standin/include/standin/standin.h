// The stand-in: the calls of the CUDA runtime and of NCCL that our back ends make, on CPU threads, linked in place of
// the vendor's libraries in one test build, so that the very same sources run where there is no GPU.
//
// What it keeps to: device pointers are addresses that the host cannot read or write; an asynchronous copy reads its
// source when it runs, not when it is queued; copies of memory that is not pinned block the caller; a copy may not
// cross the end of a pinned range; waiting for an event that was never recorded holds nobody; streams run beside one
// another, in an order that a seed varies; a full queue makes the caller wait; a collective holds its stream until
// every rank has come; after a sticky error nothing runs any more on that device, and every call made while it is the
// current one returns it; an event that is not ready is a thread's last error, until that is asked for; memory that a
// communicator has registered cannot be freed. What it cannot show: launch geometry, memory order within a kernel,
// speeds.
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cuda_runtime_api.h>

#include <cstddef>
#include <cstdint>
#include <functional>
#include <string>
#include <vector>

namespace standin {

// Back to the start: one healthy device, nothing injected, call counts at zero. Only while nothing is alive.
void reset();

struct Settings {
  int devices = 1;
  std::size_t device_bytes = std::size_t{1} << 30;  // of each
  // Not 0: work is held up for some microseconds now and then, by this seed.
  std::uint64_t timing_seed = 0;
};
void configure(const Settings& settings);

// The nth call (from 1, counted from now on) of that function returns the error without doing anything. "execution"
// stands for the nth piece of work that a stream runs: it fails then, after its call returned success. A sticky error
// kills the current device (of the thread that makes the call, or of the stream).
void fail(const std::string& function, std::uint64_t nth, cudaError_t error);
std::uint64_t calls(const std::string& function);  // since reset()
std::vector<std::string> functions();              // all that fail() can make fail, in alphabetical order

// What the program holds and has not given back.
struct Live {
  std::size_t streams = 0, events = 0, device_allocations = 0, pinned_ranges = 0, communicators = 0, registrations = 0;
  std::size_t total() const {
    return streams + events + device_allocations + pinned_ranges + communicators + registrations;
  }
};
Live live();
std::string to_string(const Live& live);

// Where the host finds what lies at a device address; other addresses as they are. For launches and assertions.
void* host_view(const void* address);

// Queues work that runs in order with the rest of the stream.
cudaError_t launch(cudaStream_t stream, std::function<void()> work);

// Puts the host's view in place of each device pointer.
struct Translate {
  template <class T>
  void operator()(T*& pointer) const {
    pointer = static_cast<T*>(host_view(pointer));
  }
};

}  // namespace standin
