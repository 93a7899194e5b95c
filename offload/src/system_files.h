// What the files under /proc and /sys say: parsing, apart from where they are, so that tests hand in trees of their
// own. SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

namespace ballast::offload {

// The file's text (at most 1 MiB of it); nothing where it cannot be read.
std::optional<std::string> read_system_file(const std::string& path);
// A file that holds one unsigned number; nothing where it holds anything else.
std::optional<std::uint64_t> read_system_number(const std::string& path);

struct MemoryInfo {
  std::uint64_t total_bytes = 0;
  std::uint64_t available_bytes = 0;  // MemAvailable, or free plus cached where the kernel has no such line
  std::uint64_t huge_page_bytes = 0;  // the default size
};
// `root` stands before "/proc" ("" on a real system).
MemoryInfo read_memory_info(const std::string& root, std::vector<std::string>& notes);

struct HugePageInfo {
  std::uint64_t page_bytes = 0;  // 2 MiB where there are such, else the default size; 0: none
  std::uint64_t pages_free = 0;  // free and not promised to another mapping
  bool transparent = false;
};
HugePageInfo read_huge_page_info(const std::string& root, std::uint64_t default_page_bytes);

struct CgroupLimits {
  double cpu_quota = 0;                  // CPUs; 0: none
  std::uint64_t memory_limit_bytes = 0;  // of the level that leaves the least; 0: none
  std::uint64_t memory_used_bytes = 0;   // of that level, without file cache that the kernel can drop
};
// Follows this process's groups (version 1, version 2 and both at once) from /proc/self/cgroup up to the mount point.
CgroupLimits read_cgroup_limits(const std::string& root, std::vector<std::string>& notes);

// The NUMA node of a block device by its numbers, through /sys/dev/block; -1 where it is not known, or where the
// devices under a combined one (RAID, LVM) differ.
int read_block_device_node(const std::string& root, unsigned major, unsigned minor);

}  // namespace ballast::offload
