// Loading hwloc's topology.
// SPDX-License-Identifier: Apache-2.0
#include "hwloc_tree.h"

#include <sched.h>

#include <cerrno>
#include <cstring>

namespace ballast::offload {

HwlocTree::HwlocTree() {
  // hwloc asks with ever larger masks until it is answered: for ever, where a filter answers no.
  cpu_set_t mask;
  if (sched_getaffinity(0, sizeof mask, &mask) != 0 && errno != EINVAL) {
    error_ = std::string("the affinity mask cannot be read (") + std::strerror(errno) + ")";
    return;
  }
  if (hwloc_topology_init(&tree_) != 0) {
    tree_ = nullptr;
    error_ = "hwloc cannot start";
    return;
  }
  // Plug-ins that would start a GPU's run time or talk to a display; those that are not installed are no loss.
  for (const char* component : {"cuda", "nvml", "opencl", "rsmi", "levelzero", "gl"}) {
    static_cast<void>(hwloc_topology_set_components(tree_, HWLOC_TOPOLOGY_COMPONENTS_FLAG_BLACKLIST, component));
  }
  // Caches and packages are not asked about; machine, nodes and CPUs are always kept. A refusal only costs time.
  static_cast<void>(hwloc_topology_set_all_types_filter(tree_, HWLOC_TYPE_FILTER_KEEP_NONE));
  if (hwloc_topology_load(tree_) != 0) {
    error_ = std::string("hwloc cannot read the topology (") + std::strerror(errno) +
             "); look at HWLOC_SYNTHETIC and HWLOC_XMLFILE";
    hwloc_topology_destroy(tree_);
    tree_ = nullptr;
  }
}

HwlocTree::~HwlocTree() {
  if (tree_ != nullptr) hwloc_topology_destroy(tree_);
}

}  // namespace ballast::offload
