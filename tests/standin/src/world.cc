// Health, injected failures, devices and memory of the stand-in.
// SPDX-License-Identifier: Apache-2.0
#include "world.h"

#include <sys/mman.h>

#include <algorithm>
#include <array>
#include <cstdio>
#include <cstring>

namespace standin {
namespace {

struct Injected {
  std::uint64_t at_call;
  cudaError_t error;
};

struct World {
  std::mutex mutex;
  Settings settings;
  std::array<std::atomic<int>, 64> sticky{};  // by device
  std::map<std::string, std::uint64_t, std::less<>> calls;
  std::multimap<std::string, Injected, std::less<>> injected;
};
World& world() {
  static World instance;
  return instance;
}

thread_local cudaError_t last_error = cudaSuccess;
thread_local int current = 0;

struct Allocation {
  std::uintptr_t begin;  // what the program sees; nothing can be read there
  std::size_t bytes;
  std::byte* memory;  // where the bytes are
  int device;
};
struct Pinned {
  std::uintptr_t begin;
  std::size_t bytes;
  bool allocated;
};
struct Held {
  std::uint64_t number;
  std::uintptr_t begin;
  std::size_t bytes;
};
struct Memory {
  std::mutex mutex;
  std::vector<Held> held;
  std::uint64_t next_held = 1;
  std::vector<Allocation> allocations;
  std::vector<Pinned> pinned;
};
Memory& memory() {
  static Memory instance;
  return instance;
}

constexpr std::size_t kPage = 4096;
std::size_t pages(std::size_t bytes) { return (bytes + kPage - 1) / kPage * kPage; }

std::size_t used_bytes(int device) {
  std::size_t used = 0;
  for (const Allocation& allocation : memory().allocations) {
    if (allocation.device == device) used += allocation.bytes;
  }
  return used;
}

}  // namespace

void reset() {
  World& w = world();
  const std::lock_guard lock(w.mutex);
  w.settings = Settings();
  for (std::atomic<int>& each : w.sticky) each = 0;
  w.calls.clear();
  w.injected.clear();
  last_error = cudaSuccess;
  current = 0;
}

void configure(const Settings& settings) {
  World& w = world();
  const std::lock_guard lock(w.mutex);
  w.settings = settings;
}

void fail(const std::string& function, std::uint64_t nth, cudaError_t error) {
  World& w = world();
  const std::lock_guard lock(w.mutex);
  w.injected.insert({function, {w.calls[function] + nth, error}});
}

std::uint64_t calls(const std::string& function) {
  World& w = world();
  const std::lock_guard lock(w.mutex);
  const auto found = w.calls.find(function);
  return found == w.calls.end() ? 0 : found->second;
}

std::uint64_t timing_seed() {
  World& w = world();
  const std::lock_guard lock(w.mutex);
  return w.settings.timing_seed;
}

bool is_sticky(cudaError_t error) {
  return error == cudaErrorIllegalAddress || error == cudaErrorLaunchFailure || error == cudaErrorECCUncorrectable ||
         error == cudaErrorLaunchTimeout || error == cudaErrorAssert;
}

namespace {

std::atomic<int>& sticky_of_current() { return world().sticky[static_cast<std::size_t>(current) % 64]; }

std::vector<std::string>& listed() {
  static std::vector<std::string> instance;
  return instance;
}

}  // namespace

int& current_device() { return current; }

bool list_function(const char* function) {
  listed().emplace_back(function);
  return true;
}

std::vector<std::string> functions() {
  std::vector<std::string> all = listed();
  std::sort(all.begin(), all.end());
  all.erase(std::unique(all.begin(), all.end()), all.end());
  return all;
}

std::string to_string(const Live& live) {
  return std::to_string(live.streams) + " streams, " + std::to_string(live.events) + " events, " +
         std::to_string(live.device_allocations) + " allocations, " + std::to_string(live.pinned_ranges) +
         " pinned ranges, " + std::to_string(live.communicators) + " communicators, " +
         std::to_string(live.registrations) + " registrations";
}

cudaError_t sticky() { return static_cast<cudaError_t>(sticky_of_current().load(std::memory_order_acquire)); }

void kill(cudaError_t error) {
  // What runs has ended before anybody learns of the failure, and frees its memory.
  const std::unique_lock lock(execution());
  int none = 0;
  sticky_of_current().compare_exchange_strong(none, static_cast<int>(error));
}

cudaError_t enter(std::string_view function) {
  cudaError_t error = cudaSuccess;
  {
    World& w = world();
    const std::lock_guard lock(w.mutex);
    auto found = w.calls.find(function);
    if (found == w.calls.end()) found = w.calls.emplace(function, 0).first;
    const std::uint64_t number = ++found->second;
    if (sticky() != cudaSuccess) return sticky();
    const auto [begin, end] = w.injected.equal_range(function);
    for (auto injected = begin; injected != end; ++injected) {
      if (injected->second.at_call == number) error = injected->second.error;
    }
  }
  if (is_sticky(error)) kill(error);  // waits for what runs, which may have calls to make
  return error;
}

cudaError_t leave(cudaError_t error) {
  if (error != cudaSuccess) last_error = error;
  return error;
}

std::shared_mutex& execution() {
  static std::shared_mutex instance;
  return instance;
}

Counts& counts() {
  static Counts instance;
  return instance;
}

Live live() {
  Live result;
  result.streams = counts().streams.load();
  result.events = counts().events.load();
  result.communicators = counts().communicators.load();
  const std::lock_guard lock(memory().mutex);
  result.device_allocations = memory().allocations.size();
  result.pinned_ranges = memory().pinned.size();
  result.registrations = memory().held.size();
  return result;
}

void* host_view(const void* address) {
  const auto at = reinterpret_cast<std::uintptr_t>(address);
  const std::lock_guard lock(memory().mutex);
  for (const Allocation& a : memory().allocations) {
    if (at >= a.begin && at < a.begin + a.bytes) return a.memory + (at - a.begin);
  }
  return const_cast<void*>(address);
}

Place place_of(const void* address, std::size_t bytes) {
  const auto at = reinterpret_cast<std::uintptr_t>(address);
  const std::lock_guard lock(memory().mutex);
  for (const Allocation& a : memory().allocations) {
    if (at >= a.begin && at < a.begin + pages(a.bytes)) {
      return at + bytes <= a.begin + a.bytes ? Place::device : Place::bad;
    }
  }
  for (const Pinned& p : memory().pinned) {
    if (at >= p.begin && at < p.begin + p.bytes) return at + bytes <= p.begin + p.bytes ? Place::pinned : Place::bad;
    if (at < p.begin && at + bytes > p.begin) return Place::bad;
  }
  return Place::pageable;
}

std::uint64_t hold_memory(const void* address, std::size_t bytes) {
  if (place_of(address, bytes) != Place::device) return 0;
  Memory& m = memory();
  const std::lock_guard lock(m.mutex);
  m.held.push_back({m.next_held++, reinterpret_cast<std::uintptr_t>(address), bytes});
  return m.held.back().number;
}

bool release_memory(std::uint64_t number) {
  Memory& m = memory();
  const std::lock_guard lock(m.mutex);
  return std::erase_if(m.held, [&](const Held& each) { return each.number == number; }) > 0;
}

namespace {

cudaError_t allocate(void** pointer, std::size_t bytes) {
  std::size_t limit = 0;
  {
    const std::lock_guard lock(world().mutex);
    limit = world().settings.device_bytes;
  }
  Memory& m = memory();
  const std::lock_guard lock(m.mutex);
  if (bytes > limit - std::min(limit, used_bytes(current))) return cudaErrorMemoryAllocation;
  const std::size_t mapped = pages(bytes);
  // A page of nothing on either side of the bytes, so that what runs over the end is seen.
  void* const seen = mmap(nullptr, mapped, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  void* const guarded =
      mmap(nullptr, mapped + 2 * kPage, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (seen == MAP_FAILED || guarded == MAP_FAILED) return cudaErrorMemoryAllocation;
  std::byte* const bytes_at = static_cast<std::byte*>(guarded) + kPage;
  if (mprotect(bytes_at, mapped, PROT_READ | PROT_WRITE) != 0) return cudaErrorMemoryAllocation;
  std::memset(bytes_at, 0xA5, std::min<std::size_t>(mapped, std::size_t{1} << 20));  // not zero, as on a device
  m.allocations.push_back({reinterpret_cast<std::uintptr_t>(seen), bytes, bytes_at, current});
  *pointer = seen;
  return cudaSuccess;
}

}  // namespace
}  // namespace standin

using standin::leave;

extern "C" {

const char* cudaGetErrorName(cudaError_t error) {
  switch (error) {
    case cudaSuccess:
      return "cudaSuccess";
    case cudaErrorInvalidValue:
      return "cudaErrorInvalidValue";
    case cudaErrorMemoryAllocation:
      return "cudaErrorMemoryAllocation";
    case cudaErrorNoDevice:
      return "cudaErrorNoDevice";
    case cudaErrorInvalidDevice:
      return "cudaErrorInvalidDevice";
    case cudaErrorECCUncorrectable:
      return "cudaErrorECCUncorrectable";
    case cudaErrorIllegalAddress:
      return "cudaErrorIllegalAddress";
    case cudaErrorLaunchFailure:
      return "cudaErrorLaunchFailure";
    case cudaErrorNotReady:
      return "cudaErrorNotReady";
    case cudaErrorUnknown:
      return "cudaErrorUnknown";
    case cudaErrorHostMemoryAlreadyRegistered:
      return "cudaErrorHostMemoryAlreadyRegistered";
    case cudaErrorHostMemoryNotRegistered:
      return "cudaErrorHostMemoryNotRegistered";
    default:
      return "an error of the stand-in";
  }
}
const char* cudaGetErrorString(cudaError_t) { return "as the stand-in was told"; }

cudaError_t cudaGetLastError(void) {
  const cudaError_t error = standin::sticky() != cudaSuccess ? standin::sticky() : standin::last_error;
  standin::last_error = cudaSuccess;
  return error;
}

cudaError_t cudaRuntimeGetVersion(int* version) {
  STANDIN_ENTER("cudaRuntimeGetVersion");
  *version = 13000;
  return cudaSuccess;
}

cudaError_t cudaDriverGetVersion(int* version) {
  STANDIN_ENTER("cudaDriverGetVersion");
  const std::lock_guard lock(standin::world().mutex);
  *version = standin::world().settings.devices > 0 ? 13010 : 0;
  return cudaSuccess;
}

cudaError_t cudaGetDeviceCount(int* count) {
  STANDIN_ENTER("cudaGetDeviceCount");
  const std::lock_guard lock(standin::world().mutex);
  *count = standin::world().settings.devices;
  return *count == 0 ? leave(cudaErrorNoDevice) : cudaSuccess;
}

cudaError_t cudaGetDevice(int* device) {
  STANDIN_ENTER("cudaGetDevice");
  *device = standin::current;
  return cudaSuccess;
}

cudaError_t cudaSetDevice(int device) {
  STANDIN_ENTER("cudaSetDevice");
  {
    const std::lock_guard lock(standin::world().mutex);
    if (device < 0 || device >= standin::world().settings.devices) return leave(cudaErrorInvalidDevice);
  }
  standin::current = device;
  return cudaSuccess;
}

cudaError_t cudaGetDeviceProperties(cudaDeviceProp* properties, int device) {
  STANDIN_ENTER("cudaGetDeviceProperties");
  *properties = cudaDeviceProp{};
  std::snprintf(properties->name, sizeof properties->name, "stand-in %d", device);
  properties->major = 9;
  const std::lock_guard lock(standin::world().mutex);
  properties->totalGlobalMem = standin::world().settings.device_bytes;
  return cudaSuccess;
}

cudaError_t cudaDeviceGetAttribute(int* value, cudaDeviceAttr, int) {
  STANDIN_ENTER("cudaDeviceGetAttribute");
  *value = 1;
  return cudaSuccess;
}

cudaError_t cudaDeviceGetPCIBusId(char* text, int bytes, int device) {
  STANDIN_ENTER("cudaDeviceGetPCIBusId");
  std::snprintf(text, static_cast<std::size_t>(bytes), "0000:%02X:00.0", 0xA0 + device);
  return cudaSuccess;
}

cudaError_t cudaMemGetInfo(std::size_t* free_bytes, std::size_t* total_bytes) {
  STANDIN_ENTER("cudaMemGetInfo");
  {
    const std::lock_guard lock(standin::world().mutex);
    *total_bytes = standin::world().settings.device_bytes;
  }
  const std::lock_guard lock(standin::memory().mutex);
  *free_bytes = *total_bytes - std::min(*total_bytes, standin::used_bytes(standin::current));
  return cudaSuccess;
}

cudaError_t cudaMalloc(void** pointer, std::size_t bytes) {
  STANDIN_ENTER("cudaMalloc");
  return leave(standin::allocate(pointer, bytes));
}

cudaError_t cudaFree(void* pointer) {
  // The memory goes in any case, so that an error which was only injected leaves nothing behind.
  const cudaError_t error = standin::enter<"cudaFree">();
  auto& m = standin::memory();
  const std::lock_guard lock(m.mutex);
  for (auto a = m.allocations.begin(); a != m.allocations.end(); ++a) {
    if (a->begin != reinterpret_cast<std::uintptr_t>(pointer)) continue;
    for (const auto& each : m.held) {
      if (each.begin >= a->begin && each.begin < a->begin + a->bytes) return leave(cudaErrorInvalidValue);
    }
    const std::size_t mapped = standin::pages(a->bytes);
    munmap(pointer, mapped);
    munmap(a->memory - standin::kPage, mapped + 2 * standin::kPage);
    m.allocations.erase(a);
    return leave(error);
  }
  return leave(pointer == nullptr ? error : cudaErrorInvalidValue);
}

cudaError_t cudaHostRegister(void* pointer, std::size_t bytes, unsigned) {
  STANDIN_ENTER("cudaHostRegister");
  const auto begin = reinterpret_cast<std::uintptr_t>(pointer);
  auto& m = standin::memory();
  const std::lock_guard lock(m.mutex);
  for (const auto& p : m.pinned) {
    if (begin < p.begin + p.bytes && p.begin < begin + bytes) return leave(cudaErrorHostMemoryAlreadyRegistered);
  }
  m.pinned.push_back({begin, bytes, false});
  return cudaSuccess;
}

cudaError_t cudaHostUnregister(void* pointer) {
  const cudaError_t error = standin::enter<"cudaHostUnregister">();
  auto& m = standin::memory();
  const std::lock_guard lock(m.mutex);
  for (auto p = m.pinned.begin(); p != m.pinned.end(); ++p) {
    if (p->begin != reinterpret_cast<std::uintptr_t>(pointer) || p->allocated) continue;
    m.pinned.erase(p);
    return leave(error);
  }
  return leave(cudaErrorHostMemoryNotRegistered);
}

cudaError_t cudaHostAlloc(void** pointer, std::size_t bytes, unsigned) {
  STANDIN_ENTER("cudaHostAlloc");
  void* const data = mmap(nullptr, standin::pages(bytes), PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (data == MAP_FAILED) return leave(cudaErrorMemoryAllocation);
  auto& m = standin::memory();
  const std::lock_guard lock(m.mutex);
  m.pinned.push_back({reinterpret_cast<std::uintptr_t>(data), bytes, true});
  *pointer = data;
  return cudaSuccess;
}

cudaError_t cudaFreeHost(void* pointer) {
  const cudaError_t error = standin::enter<"cudaFreeHost">();
  auto& m = standin::memory();
  const std::lock_guard lock(m.mutex);
  for (auto p = m.pinned.begin(); p != m.pinned.end(); ++p) {
    if (p->begin != reinterpret_cast<std::uintptr_t>(pointer) || !p->allocated) continue;
    munmap(pointer, standin::pages(p->bytes));
    m.pinned.erase(p);
    return leave(error);
  }
  return leave(cudaErrorInvalidValue);
}

}  // extern "C"
