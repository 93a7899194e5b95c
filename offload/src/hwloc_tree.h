// HwlocTree: hwloc's picture of NUMA nodes and CPUs, for as long as the object lives.
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <hwloc.h>

#include <string>

namespace ballast::offload {

class HwlocTree {
 public:
  // Reads only nodes and CPUs, and asks no library of a GPU. Honours HWLOC_XMLFILE and HWLOC_SYNTHETIC, as hwloc does.
  HwlocTree();
  ~HwlocTree();
  HwlocTree(const HwlocTree&) = delete;
  HwlocTree& operator=(const HwlocTree&) = delete;

  hwloc_topology_t get() const { return tree_; }  // null where error() is not empty
  const std::string& error() const { return error_; }
  // False where the environment hands in a picture of another machine: memory cannot be bound by it.
  bool is_this_system() const { return tree_ != nullptr && hwloc_topology_is_thissystem(tree_) != 0; }

 private:
  hwloc_topology_t tree_ = nullptr;
  std::string error_;
};

}  // namespace ballast::offload
