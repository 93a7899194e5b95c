// Taking large memory: reserved huge pages, else transparent ones, else plain pages.
// SPDX-License-Identifier: Apache-2.0
#include "mapped_memory.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstdio>
#include <cstring>
#include <optional>

#include "ballast/base/check.h"
#include "ballast/base/error.h"
#include "ballast/base/size.h"
#include "hwloc_tree.h"

#ifndef MADV_POPULATE_WRITE
#define MADV_POPULATE_WRITE 23
#endif
#ifndef MAP_HUGE_SHIFT
#define MAP_HUGE_SHIFT 26
#endif

namespace ballast::offload {
namespace {

using base::format_size;

constexpr std::uint64_t kAlignmentBytes = 2 * base::kMiB;
// Memory is touched in pieces, so that a signal can come between, and be acted on.
constexpr std::uint64_t kPopulateBytes = 64 * base::kMiB;

std::uint64_t small_page_bytes() { return static_cast<std::uint64_t>(std::max(sysconf(_SC_PAGESIZE), 4096L)); }

std::string errno_text(int error) { return std::string(std::strerror(error)) + ", errno " + std::to_string(error); }

// Backs every page, without the signal that touching an impossible page would raise. Returns 0 or an errno. What
// check_interrupt throws leaves the memory unmapped.
int populate(const MapRequest& request, const MappedMemory& memory) {
  try {
    for (std::uint64_t at = 0; at < memory.mapped_bytes;) {
      if (request.check_interrupt) request.check_interrupt();
      std::byte* const data = memory.data + at;
      const std::uint64_t piece = std::min(kPopulateBytes, memory.mapped_bytes - at);
      int error = madvise(data, piece, MADV_POPULATE_WRITE) == 0 ? 0 : errno;
      if (error == EINVAL) error = populate_by_reading(data, piece);  // a kernel before 5.14
      if (error == 0) at += piece;
      if (error != 0 && error != EINTR && error != EAGAIN) return error;
    }
  } catch (...) {
    unmap_memory(memory);
    throw;
  }
  return 0;
}

void advise(std::byte* data, std::uint64_t bytes, int advice, const char* what, std::vector<std::string>& notes) {
  if (madvise(data, bytes, advice) != 0) notes.push_back(std::string(what) + ": refused (" + errno_text(errno) + ")");
}

void bind_to_node(std::byte* data, std::uint64_t bytes, int node_index, std::vector<std::string>& notes) {
  const std::string what = "binding memory to NUMA node " + std::to_string(node_index) + " did not work: ";
  const HwlocTree hwloc;
  const hwloc_topology_t tree = hwloc.get();
  if (tree == nullptr) {
    notes.push_back(what + hwloc.error());
  } else if (!hwloc.is_this_system()) {
    notes.push_back(what + "the environment hands hwloc another machine's topology");
  } else if (const hwloc_obj_t node = hwloc_get_numanode_obj_by_os_index(tree, static_cast<unsigned>(node_index));
             node == nullptr) {
    notes.push_back(what + "there is no such node here");
  } else if (hwloc_set_area_membind(tree, data, bytes, node->nodeset, HWLOC_MEMBIND_BIND, HWLOC_MEMBIND_BYNODESET) !=
             0) {
    notes.push_back(what + errno_text(errno));
  }
}

// What every mapping gets, whatever its pages; before any page is there, so that the binding governs them all.
void prepare(const MapRequest& request, const MappedMemory& memory, std::vector<std::string>& notes) {
  advise(memory.data, memory.mapped_bytes, MADV_DONTFORK, "keeping the memory out of forked children", notes);
  advise(memory.data, memory.mapped_bytes, MADV_DONTDUMP, "keeping the memory out of core dumps", notes);
  if (request.numa_node >= 0) bind_to_node(memory.data, memory.mapped_bytes, request.numa_node, notes);
}

std::optional<MappedMemory> map_reserved(const MapRequest& request, const Topology& topology,
                                         std::vector<std::string>& notes) {
  const std::uint64_t page_bytes = topology.huge_page_bytes;
  if (page_bytes == 0 || topology.huge_pages_free == 0) return std::nullopt;
  const std::uint64_t pages = base::ceil_div(request.bytes, page_bytes);
  if (pages > topology.huge_pages_free || page_bytes < kAlignmentBytes) {
    notes.push_back("reserved huge pages are not used: " + std::to_string(pages) + " of " + format_size(page_bytes) +
                    " are needed, " + std::to_string(topology.huge_pages_free) + " are free");
    return std::nullopt;
  }
  int shift = 0;
  while ((std::uint64_t{1} << shift) < page_bytes) ++shift;
  MappedMemory memory{nullptr, pages * page_bytes, kReservedHugePages, getpid()};
  void* const address = mmap(nullptr, memory.mapped_bytes, PROT_READ | PROT_WRITE,
                             MAP_PRIVATE | MAP_ANONYMOUS | MAP_HUGETLB | (shift << MAP_HUGE_SHIFT), -1, 0);
  if (address == MAP_FAILED) {
    notes.push_back("reserved huge pages are not used: " + errno_text(errno));
    return std::nullopt;
  }
  memory.data = static_cast<std::byte*>(address);
  prepare(request, memory, notes);
  // Always backed at once: a huge page that a limit takes away later would end the process with a signal.
  if (const int error = populate(request, memory); error != 0) {
    notes.push_back("reserved huge pages are not used: backing them failed (" + errno_text(error) + ")");
    unmap_memory(memory);
    return std::nullopt;
  }
  return memory;
}

// Bytes of [data, data + bytes) on transparent huge pages, as far as /proc/self/smaps says.
std::optional<std::uint64_t> huge_bytes(const std::byte* data, std::uint64_t bytes) {
  std::FILE* const file = std::fopen("/proc/self/smaps", "re");
  if (file == nullptr) return std::nullopt;
  const auto begin = reinterpret_cast<std::uintptr_t>(data);
  std::uint64_t total = 0;
  bool inside = false;
  bool found = false;
  char line[512];
  while (std::fgets(line, sizeof(line), file) != nullptr) {
    unsigned long long from = 0;
    unsigned long long to = 0;
    unsigned long long kibibytes = 0;
    if (std::sscanf(line, "%llx-%llx ", &from, &to) == 2) {
      inside = from < begin + bytes && to > begin;
    } else if (inside && std::sscanf(line, "AnonHugePages: %llu kB", &kibibytes) == 1) {
      total += kibibytes << 10;
      found = true;
    }
  }
  const bool failed = std::ferror(file) != 0;
  std::fclose(file);
  if (failed || !found) return std::nullopt;
  return std::min(total, bytes);
}

}  // namespace

int populate_by_reading(std::byte* data, std::uint64_t bytes) {
  // Reading zeros into memory makes the kernel touch it: EFAULT comes back where a store would end the process.
  const int zero = open("/dev/zero", O_RDONLY | O_CLOEXEC);
  if (zero < 0) return errno;
  int error = 0;
  for (std::uint64_t at = 0; at < bytes && error == 0;) {
    const ssize_t count = read(zero, data + at, std::min(kAlignmentBytes, bytes - at));
    if (count > 0) {
      at += static_cast<std::uint64_t>(count);
    } else if (count == 0) {
      error = EIO;
    } else if (errno != EINTR) {
      error = errno;
    }
  }
  close(zero);
  return error;
}

std::uint64_t takeable_bytes(const Topology& topology) {
  const std::uint64_t free_bytes = free_memory_bytes(topology);
  return free_bytes > kHeadroomBytes ? free_bytes - kHeadroomBytes : 0;
}

void check_free_memory(std::string_view purpose, std::uint64_t bytes, const Topology& topology) {
  const std::uint64_t takeable = takeable_bytes(topology);
  if (bytes <= takeable) return;
  std::string text = std::string(purpose) + " of " + std::to_string(bytes) + " bytes (" + format_size(bytes) +
                     ") cannot be had: " + std::to_string(takeable) + " bytes (" + format_size(takeable) +
                     ") are free, without the " + format_size(kHeadroomBytes) +
                     " left for the process itself. The machine has " + format_size(topology.memory_bytes) +
                     ", of which " + format_size(topology.memory_available_bytes) + " are available";
  if (topology.cgroup_limit_bytes != 0) {
    text += "; the memory cgroup allows " + std::to_string(topology.cgroup_limit_bytes) + " bytes (" +
            format_size(topology.cgroup_limit_bytes) + ") and uses " + format_size(topology.cgroup_used_bytes);
  }
  throw PlanError(text + ". Lower the budget, raise the limit, or end what uses the memory");
}

MappedMemory map_memory(const MapRequest& request, const Topology& topology, std::vector<std::string>& notes) {
  MapRequest whole = request;
  whole.bytes = std::max<std::uint64_t>(request.bytes, 1);
  if (whole.bytes > (std::uint64_t{1} << 46)) check_free_memory(request.purpose, request.bytes, topology);
  if (auto reserved = map_reserved(whole, topology, notes)) return *reserved;

  check_free_memory(request.purpose, request.bytes, topology);
  MappedMemory memory{nullptr, base::round_up(whole.bytes, small_page_bytes()), kPlainPages, getpid()};
  // Room to align by, given back at both ends.
  const std::uint64_t roomy_bytes = memory.mapped_bytes + kAlignmentBytes;
  void* const address =
      mmap(nullptr, roomy_bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (address == MAP_FAILED) {
    throw PlanError(std::string(request.purpose) + " of " + std::to_string(request.bytes) + " bytes (" +
                    format_size(request.bytes) + ") is refused by the system: " + errno_text(errno) +
                    ". Lower the budget, or raise the address-space limit (ulimit -v)");
  }
  std::byte* const start = static_cast<std::byte*>(address);
  const std::uint64_t head = base::round_up(reinterpret_cast<std::uintptr_t>(start), kAlignmentBytes) -
                             reinterpret_cast<std::uintptr_t>(start);
  memory.data = start + head;
  if (head != 0) BALLAST_CHECK(munmap(start, head) == 0);
  if (const std::uint64_t tail = kAlignmentBytes - head; tail != 0) {
    BALLAST_CHECK(munmap(memory.data + memory.mapped_bytes, tail) == 0);
  }

  prepare(whole, memory, notes);
  if (!topology.transparent_huge_pages) {
    notes.push_back("transparent huge pages are off (/sys/kernel/mm/transparent_hugepage/enabled)");
  } else if (memory.mapped_bytes < kAlignmentBytes) {
    notes.push_back("less than one huge page is asked for");
  } else if (madvise(memory.data, memory.mapped_bytes, MADV_HUGEPAGE) != 0) {
    notes.push_back("transparent huge pages are refused (" + errno_text(errno) + ")");
  } else {
    memory.page_kind = kTransparentHugePages;
  }
  if (!request.populate) return memory;

  if (const int error = populate(request, memory); error != 0) {
    unmap_memory(memory);
    throw PlanError(std::string(request.purpose) + " of " + std::to_string(request.bytes) + " bytes (" +
                    format_size(request.bytes) + ") cannot be backed with pages: " + errno_text(error) + ". " +
                    format_size(free_memory_bytes(topology)) +
                    " were free before; another process may have taken them. Lower the budget");
  }
  if (memory.page_kind == kTransparentHugePages) {
    const auto huge = huge_bytes(memory.data, memory.mapped_bytes);
    if (huge && *huge < memory.mapped_bytes / 2) {
      memory.page_kind = kPlainPages;
      notes.push_back("only " + format_size(*huge) + " of " + format_size(memory.mapped_bytes) +
                      " came on huge pages: the machine's memory is fragmented");
    }
  }
  return memory;
}

void unmap_memory(const MappedMemory& memory) {
  // A forked child does not have it, and may have other memory in its place.
  if (memory.data == nullptr || memory.owner != getpid()) return;
  BALLAST_CHECK(munmap(memory.data, memory.mapped_bytes) == 0);
}

}  // namespace ballast::offload
