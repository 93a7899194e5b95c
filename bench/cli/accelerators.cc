// GPUs, NCCL and MPI: facts of the machine, and what they mean.
// SPDX-License-Identifier: Apache-2.0
#include "accelerators.h"

#include <unistd.h>

#include <cstdlib>

#include "ballast/base/size.h"

namespace ballast::cli {
namespace {

using base::format_size;
using State = DoctorLine::State;

// Each part of a list that colons separate, in order.
std::vector<std::string> parts_of(const char* list) {
  std::vector<std::string> parts;
  for (std::string rest = list == nullptr ? "" : list; !rest.empty();) {
    const std::size_t colon = rest.find(':');
    if (colon != 0) parts.push_back(rest.substr(0, colon));
    rest = colon == std::string::npos ? "" : rest.substr(colon + 1);
  }
  return parts;
}

bool library_present(const std::string& name) {
  std::vector<std::string> folders = {
      "/usr/lib/x86_64-linux-gnu", "/usr/lib/aarch64-linux-gnu", "/usr/lib64", "/usr/lib", "/usr/local/lib",
      "/usr/local/cuda/lib64"};
  for (std::string& folder : parts_of(std::getenv("LD_LIBRARY_PATH"))) folders.push_back(std::move(folder));
  for (const std::string& folder : folders) {
    if (access((folder + "/" + name).c_str(), F_OK) == 0) return true;
  }
  return false;
}

bool program_present(const std::string& name) {
  for (const std::string& folder : parts_of(std::getenv("PATH"))) {
    if (access((folder + "/" + name).c_str(), X_OK) == 0) return true;
  }
  return false;
}

// 13010 is 13.1.
std::string cuda_version(int version) {
  return std::to_string(version / 1000) + "." + std::to_string(version % 1000 / 10);
}
// 22809 is 2.28.9.
std::string nccl_version(int version) {
  return std::to_string(version / 10000) + "." + std::to_string(version / 100 % 100) + "." +
         std::to_string(version % 100);
}

std::string link_text(const std::string& speed, int width) {
  if (speed.empty()) return width > 0 ? std::to_string(width) + " lanes" : "";
  return speed + (width > 0 ? " x " + std::to_string(width) : "");
}

DoctorLine gpu_line(const GpuFacts& gpu) {
  DoctorLine line{"GPU " + std::to_string(gpu.number), State::good, gpu.name.empty() ? "unnamed" : gpu.name, ""};
  if (!gpu.trouble.empty()) {
    line.state = State::bad;
    line.finding += ": " + gpu.trouble;
    line.cure =
        "End what uses it, see nvidia-smi and the kernel's log (dmesg | grep -i xid), or leave it out with "
        "CUDA_VISIBLE_DEVICES";
    return line;
  }
  line.finding += ", compute capability " + std::to_string(gpu.compute_major) + "." +
                  std::to_string(gpu.compute_minor) + ", " + format_size(gpu.memory_bytes) + " of which " +
                  format_size(gpu.free_bytes) + " are free";
  const std::string most = link_text(gpu.link_speed_most, gpu.link_width_most);
  const std::string now = link_text(gpu.link_speed_now, gpu.link_width_now);
  line.finding += most.empty() ? "; link to the host not known" : "; link to the host " + most;
  if (!most.empty() && !now.empty() && now != most) line.finding += " (now " + now + ")";
  line.finding += gpu.numa_node >= 0 ? "; NUMA node " + std::to_string(gpu.numa_node) : "; NUMA node not known";
  if (!gpu.pci.empty()) line.finding += "; PCI " + gpu.pci;
  if (gpu.compute_major < 8) {
    line.state = State::bad;
    line.finding += "; kernels need compute capability 8.0 or more";
    line.cure = "Set \"device\" to \"host\", or use another GPU (CUDA_VISIBLE_DEVICES)";
  } else if (gpu.link_width_now > 0 && gpu.link_width_now < gpu.link_width_most) {
    line.state = State::warning;
    line.cure = "A link of fewer lanes moves fewer bytes: another slot, or the firmware's settings for this one";
  } else if (gpu.free_bytes < gpu.memory_bytes / 2) {
    line.state = State::warning;
    line.cure = "budget.device must fit into what is free: end what else uses the GPU (nvidia-smi)";
  }
  return line;
}

DoctorLine gpu_summary(const AcceleratorFacts& facts) {
  const std::string versions =
      "CUDA " + cuda_version(facts.runtime_version) + " is built in; the driver serves " +
      (facts.driver_version > 0 ? "up to CUDA " + cuda_version(facts.driver_version) : std::string("none"));
  if (!facts.cuda_built) {
    if (facts.device_node) {
      return {"GPU", State::warning, "an NVIDIA GPU is here, and this build has no CUDA back end: the host computes",
              "Build with -DBALLAST_CUDA=ON, which needs nvcc of CUDA 12.5 or later"};
    }
    return {"GPU", State::good, "none, and no CUDA back end in this build: the host computes", ""};
  }
  if (!facts.gpus.empty()) {
    if (facts.driver_version < facts.runtime_version / 1000 * 1000) {
      return {"GPU", State::bad, versions, "Install a driver for CUDA " + cuda_version(facts.runtime_version)};
    }
    return {"GPU", State::good, std::to_string(facts.gpus.size()) + " to be used; " + versions, ""};
  }
  const std::string finding = versions + "; CUDA shows no device: " + facts.cuda_trouble;
  if (!facts.device_node) return {"GPU", State::good, finding + "; the host computes", ""};
  return {"GPU", State::bad, finding,
          facts.driver_version == 0 || !facts.driver_library
              ? "Install the NVIDIA driver; in a container, its libraries (docker run --gpus all)"
              : "See CUDA_VISIBLE_DEVICES, nvidia-smi and the rights of /dev/nvidia*; or set \"device\" to \"host\""};
}

DoctorLine nccl_line(const AcceleratorFacts& facts) {
  if (facts.nccl_built) {
    const std::string version = facts.nccl_version > 0 ? nccl_version(facts.nccl_version) : "of an unknown version";
    return {"NCCL", State::good, version + " is built in: ranks on GPUs use it", ""};
  }
  const std::string library = facts.nccl_library ? "its library is here" : "its library is not here";
  if (facts.gpus.size() > 1) {
    return {"NCCL", State::warning, "not in this build, " + library + ": several GPUs cannot train together",
            "Install NCCL 2.19 or later with its header and build with -DBALLAST_NCCL=ON"};
  }
  return {"NCCL", State::good, "not in this build, " + library + ": one GPU and ranks on CPUs do without", ""};
}

DoctorLine mpi_line(const AcceleratorFacts& facts) {
  if (facts.started_ranks > 1) {
    return {"MPI", State::warning,
            "mpirun started " + std::to_string(facts.started_ranks) + " processes; each examines the machine by itself",
            "Start the doctor without mpirun"};
  }
  const std::string finding = std::string(facts.mpi_built ? "built in" : "not in this build") + "; mpirun " +
                              (facts.mpirun ? "found" : "not found") + ", library " +
                              (facts.mpi_library ? "found" : "not found") +
                              "; several ranks on CPUs need it, one does not";
  if (facts.mpi_built && !facts.mpirun) {
    return {"MPI", State::warning, finding, "Install openmpi-bin, whose mpirun starts several ranks"};
  }
  return {"MPI", State::good, finding, ""};
}

}  // namespace

AcceleratorFacts machine_facts() {
  AcceleratorFacts facts;
  facts.device_node = access("/dev/nvidia0", F_OK) == 0;
  facts.driver_library = library_present("libcuda.so.1");
  facts.nccl_library = library_present("libnccl.so.2");
  facts.mpirun = program_present("mpirun");
  facts.mpi_library =
      library_present("libmpi.so") || library_present("libmpi.so.40") || library_present("libmpi.so.12");
  if (const char* size = std::getenv("OMPI_COMM_WORLD_SIZE")) facts.started_ranks = std::atoi(size);
  return facts;
}

std::vector<DoctorLine> accelerator_lines(const AcceleratorFacts& facts) {
  std::vector<DoctorLine> lines = {gpu_summary(facts)};
  for (const GpuFacts& gpu : facts.gpus) lines.push_back(gpu_line(gpu));
  lines.push_back(nccl_line(facts));
  lines.push_back(mpi_line(facts));
  return lines;
}

}  // namespace ballast::cli
