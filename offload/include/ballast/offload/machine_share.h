// MachineShare: what is one rank's of a machine on which several ranks run: its CPUs, threads and NUMA node.
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <ballast/offload/topology.h>

#include <cstddef>
#include <span>
#include <string>
#include <vector>

namespace ballast::offload {

struct MachineShare {
  int ranks = 1;    // on this machine
  int threads = 1;  // the default number for this rank
  // Its CPUs where ranks were started with the same affinity mask and the machine has several NUMA nodes: threads that
  // work for the rank belong there. Empty: the mask alone says, as the launcher has set it.
  std::vector<int> cpus;
  int numa_node = -1;  // of all its CPUs, where there are several nodes; -1: of none in particular
};

// A line of text that tells other ranks where this one runs: the machine's name and the CPUs of the affinity mask.
std::string machine_text(const Topology& topology);

// The share of rank `mine` from every rank's machine_text(). Ranks of one mask cut it into parts of equal size, along
// NUMA nodes; where masks overlap otherwise each CPU counts by the ranks that may use it; a CPU quota is divided by the
// ranks on the machine. Throws CommunicationError where a text means nothing.
MachineShare machine_share(const Topology& topology, std::span<const std::string> texts, std::size_t mine);

// Restricts the calling thread to these CPUs. False, with nothing changed, where the system refuses; an empty list
// changes nothing.
bool keep_thread_on(std::span<const int> cpus);

}  // namespace ballast::offload
