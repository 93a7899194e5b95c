// HostSlab: the host memory of an engine, taken once: huge pages where they are to be had, bound to a NUMA node,
// excluded from fork and core dumps, registered with whatever transfers from it.
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

namespace ballast::offload {

struct HostSlabOptions {
  std::uint64_t bytes = 0;
  int numa_node = -1;                          // -1: no binding
  bool populate = true;                        // touch every page now, so that a lack of memory shows now
  std::function<void()> check_interrupt = {};  // called in between; what it throws leaves the constructor
};

class HostSlab {
 public:
  // Takes the memory: reserved huge pages, else transparent huge pages, else plain pages (page_kind() says which, and
  // notes() says why). Checks the machine's free memory and cgroup limit first. Throws PlanError with the numbers where
  // it is not to be had.
  explicit HostSlab(const HostSlabOptions& options);
  ~HostSlab();
  HostSlab(const HostSlab&) = delete;
  HostSlab& operator=(const HostSlab&) = delete;

  std::span<std::byte> memory() const { return memory_; }
  std::string_view page_kind() const {
    return page_kind_;
  }  // "reserved huge pages", "transparent huge pages", "4 KiB pages"
  const std::vector<std::string>& notes() const { return notes_; }

  // The base is aligned to 2 MiB; size is the bytes asked for. One thread at a time.
  // Names a range [offset, offset + bytes) for reports, and hands out the address. Ranges are taken from the front, in
  // order, aligned as asked (a power of two, at most 2 MiB). Throws PlanError where it does not fit.
  std::byte* take(std::string name, std::uint64_t bytes, std::uint64_t alignment_bytes);
  struct Range {
    std::string name;
    std::uint64_t offset_bytes;
    std::uint64_t bytes;
  };
  const std::vector<Range>& ranges() const { return ranges_; }
  std::uint64_t taken_bytes() const { return taken_bytes_; }

 private:
  std::span<std::byte> memory_;
  std::uint64_t mapped_bytes_ = 0;
  int owner_process_ = 0;
  std::string_view page_kind_;
  std::vector<std::string> notes_;
  std::vector<Range> ranges_;
  std::uint64_t taken_bytes_ = 0;
};

}  // namespace ballast::offload
