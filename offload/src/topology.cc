// What this process may use, from hwloc, the affinity mask, /proc and control groups.
// SPDX-License-Identifier: Apache-2.0
#include "ballast/offload/topology.h"

#include <sched.h>
#include <sys/prctl.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <sys/sysmacros.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cmath>
#include <cstring>

#include "hwloc_tree.h"
#include "system_files.h"

namespace ballast::offload {
namespace {

// The CPUs of the affinity mask, ascending; empty where the system does not say. The mask grows until it fits.
std::vector<int> affinity_cpus() {
  for (int cpus_max = 1024; cpus_max <= 1 << 20; cpus_max *= 2) {
    cpu_set_t* mask = CPU_ALLOC(cpus_max);
    if (mask == nullptr) return {};
    const std::size_t mask_bytes = CPU_ALLOC_SIZE(cpus_max);
    CPU_ZERO_S(mask_bytes, mask);
    const bool read = sched_getaffinity(0, mask_bytes, mask) == 0;
    const int error = errno;
    std::vector<int> cpus;
    if (read) {
      for (int cpu = 0; cpu < cpus_max; ++cpu) {
        if (CPU_ISSET_S(cpu, mask_bytes, mask)) cpus.push_back(cpu);
      }
    }
    CPU_FREE(mask);
    if (read || error != EINVAL) return cpus;
  }
  return {};
}

void discover_nodes(Topology& topology, const std::vector<int>& allowed) {
  const HwlocTree hwloc;
  const hwloc_topology_t tree = hwloc.get();
  if (tree == nullptr) {
    topology.notes.push_back("NUMA nodes are not known: " + hwloc.error());
    return;
  }
  if (!hwloc.is_this_system()) {
    topology.notes.push_back("the environment hands hwloc a topology that is not this machine's: memory is not bound");
  }
  const int node_count = hwloc_get_nbobjs_by_type(tree, HWLOC_OBJ_NUMANODE);
  for (int i = 0; i < node_count; ++i) {
    const hwloc_obj_t object = hwloc_get_obj_by_type(tree, HWLOC_OBJ_NUMANODE, static_cast<unsigned>(i));
    if (object == nullptr) continue;
    NumaNode node;
    node.os_index = static_cast<int>(object->os_index);
    node.memory_bytes = object->attr != nullptr ? object->attr->numanode.local_memory : 0;
    if (node.memory_bytes == 0) {
      topology.notes.push_back("NUMA node " + std::to_string(node.os_index) + " has no memory: left out");
      continue;
    }
    for (const int cpu : allowed) {
      if (object->cpuset != nullptr && hwloc_bitmap_isset(object->cpuset, static_cast<unsigned>(cpu))) {
        node.cpus.push_back(cpu);
      }
    }
    topology.nodes.push_back(std::move(node));
  }
}

}  // namespace

Topology discover_topology() {
  Topology topology;
  const long online = sysconf(_SC_NPROCESSORS_ONLN);
  if (online > 0) {
    topology.cpus_online = static_cast<int>(online);
  } else {
    topology.notes.push_back("the number of CPUs is not known: one is assumed");
  }
  std::vector<int> allowed = affinity_cpus();
  if (allowed.empty()) {
    topology.notes.push_back("the affinity mask cannot be read: all CPUs online are assumed");
    for (int cpu = 0; cpu < topology.cpus_online; ++cpu) allowed.push_back(cpu);
  }
  topology.cpus_allowed = static_cast<int>(allowed.size());
  topology.cpus = allowed;

  const MemoryInfo memory = read_memory_info("", topology.notes);
  topology.memory_bytes = memory.total_bytes;
  topology.memory_available_bytes = memory.available_bytes;
  if (memory.total_bytes == 0) {
    const std::uint64_t page_bytes = static_cast<std::uint64_t>(std::max(sysconf(_SC_PAGESIZE), 0L));
    topology.memory_bytes = page_bytes * static_cast<std::uint64_t>(std::max(sysconf(_SC_PHYS_PAGES), 0L));
    topology.memory_available_bytes = page_bytes * static_cast<std::uint64_t>(std::max(sysconf(_SC_AVPHYS_PAGES), 0L));
  }
  const HugePageInfo huge = read_huge_page_info("", memory.huge_page_bytes);
  topology.huge_page_bytes = huge.page_bytes;
  topology.huge_pages_free = huge.pages_free;
  topology.transparent_huge_pages = huge.transparent;
  if (huge.transparent && prctl(PR_GET_THP_DISABLE, 0, 0, 0, 0) == 1) {
    topology.transparent_huge_pages = false;
    topology.notes.push_back("transparent huge pages are switched off for this process (PR_SET_THP_DISABLE)");
  }

  const CgroupLimits limits = read_cgroup_limits("", topology.notes);
  topology.cpu_quota = limits.cpu_quota;
  topology.cgroup_limit_bytes = limits.memory_limit_bytes;
  topology.cgroup_used_bytes = limits.memory_used_bytes;

  rlimit locked{};
  if (getrlimit(RLIMIT_MEMLOCK, &locked) == 0) {
    topology.memlock_limit_bytes = locked.rlim_cur == RLIM_INFINITY ? UINT64_MAX : locked.rlim_cur;
  } else {
    topology.notes.push_back(std::string("the limit on locked memory is not known: ") + std::strerror(errno));
  }

  discover_nodes(topology, allowed);
  if (topology.nodes.empty()) {
    topology.notes.push_back("no NUMA node is known: the machine counts as one");
    topology.nodes.push_back({0, topology.memory_bytes, allowed});
  }
  return topology;
}

int default_thread_count(const Topology& topology, int ranks_on_this_machine) {
  double cpus = std::max(topology.cpus_allowed, 1);
  if (topology.cpu_quota > 0) cpus = std::min(cpus, std::ceil(topology.cpu_quota));
  return std::max(1, static_cast<int>(cpus) / std::max(ranks_on_this_machine, 1));
}

std::uint64_t free_memory_bytes(const Topology& topology) {
  std::uint64_t bytes = topology.memory_available_bytes;
  if (topology.cgroup_limit_bytes != 0) {
    const std::uint64_t left = topology.cgroup_limit_bytes > topology.cgroup_used_bytes
                                   ? topology.cgroup_limit_bytes - topology.cgroup_used_bytes
                                   : 0;
    bytes = std::min(bytes, left);
  }
  return bytes;
}

int numa_node_of_path(const std::string& directory) {
  struct stat status {};
  if (stat(directory.c_str(), &status) != 0) return -1;
  return read_block_device_node("", major(status.st_dev), minor(status.st_dev));
}

}  // namespace ballast::offload
