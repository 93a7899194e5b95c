// What this process may use: CPUs (affinity, cgroup quota), memory (machine, cgroup), NUMA nodes.
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <string>
#include <vector>

namespace ballast::offload {

struct NumaNode {
  int os_index = 0;
  std::uint64_t memory_bytes = 0;
  std::vector<int> cpus;
};

struct Topology {
  int cpus_online = 1;
  int cpus_allowed = 1;                      // affinity mask
  std::vector<int> cpus;                     // ... its CPUs, ascending
  double cpu_quota = 0;                      // cgroup (v1 or v2); 0: none
  std::uint64_t memory_bytes = 0;            // the machine
  std::uint64_t memory_available_bytes = 0;  // MemAvailable
  std::uint64_t cgroup_limit_bytes = 0;      // the level that leaves the least, on the way up; 0: none
  std::uint64_t cgroup_used_bytes = 0;       // of that cgroup, without file cache that can be dropped
  std::uint64_t huge_page_bytes = 0;         // 0: none supported
  std::uint64_t huge_pages_free = 0;         // reserved and free, of that size
  bool transparent_huge_pages = false;       // "always" or "madvise"
  std::uint64_t memlock_limit_bytes = 0;     // RLIMIT_MEMLOCK; UINT64_MAX: unlimited
  std::vector<NumaNode> nodes;               // those with memory; their CPUs that this process may use (may be none)
  std::vector<std::string> notes;            // what could not be found out
};

// Reads it anew. Never throws: what is missing becomes a note and a safe value.
Topology discover_topology();

// min(affinity, ceil(quota)) / ranks_on_this_machine, at least 1.
int default_thread_count(const Topology& topology, int ranks_on_this_machine = 1);

// Bytes that a new allocation may take: the smaller of MemAvailable and what the cgroup leaves.
std::uint64_t free_memory_bytes(const Topology& topology);

// The NUMA node of the block device behind a directory, or -1.
int numa_node_of_path(const std::string& directory);

}  // namespace ballast::offload
