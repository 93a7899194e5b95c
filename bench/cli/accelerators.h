// What the doctor says about GPUs, NCCL and MPI. The facts are found apart from the text, so that tests can make them
// up.
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "doctor.h"

namespace ballast::cli {

struct GpuFacts {
  int number = 0;
  std::string name;
  int compute_major = 0, compute_minor = 0;
  std::uint64_t memory_bytes = 0, free_bytes = 0;
  std::string pci;
  int numa_node = -1;                           // -1: not known
  std::string link_speed_most, link_speed_now;  // "32.0 GT/s PCIe"; empty: not known
  int link_width_most = 0, link_width_now = 0;  // lanes; 0: not known
  std::string trouble;                          // why it cannot be used
};

struct AcceleratorFacts {
  // Of this build.
  bool cuda_built = false, nccl_built = false, mpi_built = false;
  // Of the machine, seen without CUDA: a device node, libcuda, libnccl, mpirun, libmpi.
  bool device_node = false, driver_library = false, nccl_library = false, mpirun = false, mpi_library = false;
  int started_ranks = 1;  // by mpirun, this process among them
  // As CUDA tells, where built in. Versions as CUDA and NCCL write them: 13000, 22809; 0: not known.
  int runtime_version = 0, driver_version = 0, nccl_version = 0;
  std::string cuda_trouble;
  std::vector<GpuFacts> gpus;
};

// What can be seen without any of the three.
AcceleratorFacts machine_facts();

std::vector<DoctorLine> accelerator_lines(const AcceleratorFacts& facts);

}  // namespace ballast::cli
