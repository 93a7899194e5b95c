// Checked results, the latched failure, pinned memory.
// SPDX-License-Identifier: Apache-2.0
#include "device_state.h"

#include <ballast/base/error.h>
#include <ballast/base/size.h>

#include <algorithm>

namespace ballast::cuda {

std::string error_text(cudaError_t result, std::string_view call, std::string_view where) {
  std::string text(call);
  text += " on " + std::string(where) + " failed: " + cudaGetErrorName(result) + " (" +
          std::to_string(static_cast<int>(result)) + "), " + cudaGetErrorString(result);
  if (is_sticky(result)) {
    text += "; this process can use the device no more: end it and go on from the last committed state";
  }
  return text;
}

bool is_sticky(cudaError_t result) {
  switch (result) {
    case cudaErrorIllegalAddress:
    case cudaErrorIllegalInstruction:
    case cudaErrorMisalignedAddress:
    case cudaErrorInvalidAddressSpace:
    case cudaErrorInvalidPc:
    case cudaErrorHardwareStackError:
    case cudaErrorAssert:
    case cudaErrorLaunchFailure:
    case cudaErrorLaunchTimeout:
    case cudaErrorECCUncorrectable:
    case cudaErrorNvlinkUncorrectable:
    case cudaErrorContextIsDestroyed:
    case cudaErrorMpsConnectionFailed:
    case cudaErrorUnknown:
      return true;
    default:
      return false;
  }
}

namespace {

// Left set, an error of ours would be the next that the trainer finds.
void clear_last_error() { static_cast<void>(cudaGetLastError()); }

}  // namespace

void DeviceState::require(cudaError_t result, std::string_view call, std::string_view what) {
  if (result == cudaSuccess) return;
  clear_last_error();
  std::string where = description_;
  if (!what.empty()) where += ", " + std::string(what);
  std::string text = error_text(result, call, where);
  if (result == cudaErrorMemoryAllocation) {
    std::size_t free_bytes = 0;
    std::size_t total_bytes = 0;
    if (cudaMemGetInfo(&free_bytes, &total_bytes) == cudaSuccess) {
      text += "; " + std::to_string(free_bytes) + " of " + std::to_string(total_bytes) + " bytes of device memory (" +
              base::format_size(free_bytes) + " of " + base::format_size(total_bytes) + ") are free";
    } else {
      clear_last_error();
    }
    throw PlanError(text);
  }
  if (is_sticky(result)) latch(std::make_exception_ptr(IoError(text)));
  throw IoError(text);
}

bool DeviceState::expect(cudaError_t result, std::string_view call, std::string_view what) noexcept {
  if (result == cudaSuccess) return true;
  clear_last_error();
  try {
    std::string where = description_;
    if (!what.empty()) where += ", " + std::string(what);
    latch(std::make_exception_ptr(IoError(error_text(result, call, where))));
  } catch (...) {
    latch(std::current_exception());
  }
  return false;
}

void DeviceState::latch(std::exception_ptr failure) noexcept {
  std::function<void(std::exception_ptr)> handler;
  {
    const std::lock_guard lock(mutex_);
    if (failure_) return;
    failure_ = failure;
    failed_.store(true, std::memory_order_release);
    // Under the mutex, so that nobody goes on before the handler knows, and an empty one can be set in peace.
    if (handler_) handler_(failure);
  }
}

void DeviceState::check() const {
  if (!failed()) return;
  const std::lock_guard lock(mutex_);
  std::rethrow_exception(failure_);
}

void DeviceState::set_failure_handler(std::function<void(std::exception_ptr)> handler) {
  const std::lock_guard lock(mutex_);
  handler_ = std::move(handler);
  if (handler_ && failure_) handler_(failure_);
}

void DeviceState::register_memory(std::span<std::byte> memory) {
  const DeviceScope scope(*this);
  std::vector<Range> pieces;
  const auto base = reinterpret_cast<std::uintptr_t>(memory.data());
  for (std::uint64_t at = 0; at < memory.size(); at += piece_bytes_) {
    const std::uint64_t bytes = std::min<std::uint64_t>(piece_bytes_, memory.size() - at);
    const cudaError_t result = cudaHostRegister(memory.data() + at, bytes, cudaHostRegisterPortable);
    if (result == cudaSuccess) {
      pieces.push_back({base + at, base + at + bytes});
      continue;
    }
    clear_last_error();
    for (const Range& piece : pieces) {
      expect(cudaHostUnregister(reinterpret_cast<void*>(piece.begin)), "cudaHostUnregister");
    }
    const std::string text = error_text(result, "cudaHostRegister", description_) + "; pinning " +
                             std::to_string(memory.size()) + " bytes of host memory (" +
                             base::format_size(memory.size()) + ") stopped at byte " + std::to_string(at) +
                             ". Lower budget.host, or raise what this process may pin (ulimit -l, the container's)";
    if (is_sticky(result)) latch(std::make_exception_ptr(IoError(text)));
    if (result == cudaErrorMemoryAllocation) throw PlanError(text);
    throw IoError(text);
  }
  const std::lock_guard lock(mutex_);
  ranges_.insert(ranges_.end(), pieces.begin(), pieces.end());
  std::sort(ranges_.begin(), ranges_.end(), [](const Range& a, const Range& b) { return a.begin < b.begin; });
}

void DeviceState::unregister_memory(std::span<std::byte> memory) noexcept {
  const auto begin = reinterpret_cast<std::uintptr_t>(memory.data());
  std::vector<Range> pieces;
  {
    const std::lock_guard lock(mutex_);
    for (const Range& range : ranges_) {
      if (range.begin >= begin && range.end <= begin + memory.size()) pieces.push_back(range);
    }
    std::erase_if(ranges_, [&](const Range& r) { return r.begin >= begin && r.end <= begin + memory.size(); });
  }
  for (const Range& piece : pieces) {
    expect(cudaHostUnregister(reinterpret_cast<void*>(piece.begin)), "cudaHostUnregister");
  }
}

std::size_t DeviceState::contiguous(const void* address, std::size_t bytes) const {
  const auto begin = reinterpret_cast<std::uintptr_t>(address);
  const std::lock_guard lock(mutex_);
  for (const Range& range : ranges_) {
    if (range.end <= begin) continue;
    if (range.begin >= begin + bytes) break;
    return range.begin > begin ? range.begin - begin : std::min<std::size_t>(bytes, range.end - begin);
  }
  return bytes;
}

DeviceScope::DeviceScope(DeviceState& state) {
  int current = -1;
  state.require(cudaGetDevice(&current), "cudaGetDevice");
  if (current == state.device()) return;
  state.require(cudaSetDevice(state.device()), "cudaSetDevice");
  before_ = current;
}

DeviceScope::~DeviceScope() {
  // It was the current device a moment ago; where it can no longer be, the trainer's next call says so.
  if (before_ >= 0 && cudaSetDevice(before_) != cudaSuccess) clear_last_error();
}

}  // namespace ballast::cuda
