// Examining a machine. Each function tries the thing itself where it can, instead of guessing from versions.
// SPDX-License-Identifier: Apache-2.0
#include "doctor.h"

#include <fcntl.h>
#include <sys/stat.h>
#include <sys/statvfs.h>
#include <sys/vfs.h>
#include <unistd.h>

#include <cerrno>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <memory>
#include <utility>

#include "accelerators.h"
#include "ballast/base/error.h"
#include "ballast/base/size.h"
#include "ballast/io/open_storage.h"
#include "ballast/kernels/targets.h"
#include "ballast/offload/slab.h"
#include "ballast/offload/topology.h"

namespace ballast::cli {
namespace {

namespace fs = std::filesystem;
using base::format_size;
using State = DoctorLine::State;

std::string errno_text(int error) {
  return std::string(std::strerror(error)) + " (errno " + std::to_string(error) + ")";
}

std::string joined(const std::vector<std::string>& words) {
  std::string text;
  for (const std::string& word : words) text += (text.empty() ? "" : ", ") + word;
  return text;
}

std::string decimal(double value) {
  char text[32];
  std::snprintf(text, sizeof(text), "%.3g", value);
  return text;
}

std::string count(double value) {
  char text[48];
  if (value >= 1e9) {
    std::snprintf(text, sizeof(text), "%.1f billion", value / 1e9);
  } else {
    std::snprintf(text, sizeof(text), "%.0f million", value / 1e6);
  }
  return text;
}

// --- I/O -------------------------------------------------------------------------------------------------------------

DoctorLine examine_io_uring(const std::string& unavailable) {
  if (unavailable.empty()) return {"io_uring", State::good, "permitted: transfers use it", ""};
  return {"io_uring", State::warning, unavailable + "; transfers use a pool of threads, at more CPU time per byte",
          "Allow it: sysctl kernel.io_uring_disabled=0; in a container, a seccomp profile that permits io_uring_setup, "
          "io_uring_enter and io_uring_register"};
}

// Registers memory with a ring: the limit counts for some users and not for others.
DoctorLine examine_memlock(const offload::Topology& topology, bool io_uring) {
  const std::string limit = topology.memlock_limit_bytes == UINT64_MAX
                                ? "no limit"
                                : "a limit of " + format_size(topology.memlock_limit_bytes);
  if (!io_uring) return {"locked memory", State::good, limit + "; not needed without io_uring", ""};
  constexpr std::uint64_t kTrialBytes = 64 * base::kMiB;
  std::string reason;
  try {
    const offload::HostSlab slab({.bytes = kTrialBytes});
    const io::OpenedStorage opened = io::open_storage(io::Backend::io_uring, {});
    if (opened.storage->register_memory(slab.memory(), &reason)) {
      return {"locked memory", State::good, limit + "; " + format_size(kTrialBytes) + " were registered with a ring",
              ""};
    }
  } catch (const Error& error) {
    reason = error.what();
  }
  return {
      "locked memory", State::warning,
      limit + "; registering " + format_size(kTrialBytes) + " with a ring did not work: " + reason +
          ". Transfers work without, at more CPU time per byte",
      "Raise it: ulimit -l unlimited; LimitMEMLOCK=infinity in a systemd unit; --ulimit memlock=-1 for a container"};
}

struct Descriptor {
  int value = -1;
  explicit Descriptor(int descriptor) : value(descriptor) {}
  ~Descriptor() {
    if (value >= 0) close(value);
  }
  Descriptor(const Descriptor&) = delete;
  Descriptor& operator=(const Descriptor&) = delete;
};

// A file without a name where the file system has such, else one whose name is gone at once. -1 and errno on failure.
int open_temporary(const std::string& directory, int flags) {
  const int nameless = open(directory.c_str(), O_TMPFILE | O_RDWR | O_CLOEXEC | flags, 0600);
  if (nameless >= 0) return nameless;
  std::string name = directory + "/.ballast-doctor-XXXXXX";
  const int named = mkostemp(name.data(), O_CLOEXEC | flags);
  const int error = errno;
  // Some file systems make the file and then refuse the flags.
  if (unlink(name.c_str()) != 0 && named >= 0) {
    const int unlink_error = errno;
    close(named);
    errno = unlink_error;
    return -1;
  }
  errno = error;
  return named;
}

// Writes one aligned block, reads it back and compares. Empty where that worked.
std::string try_block(int descriptor) {
  constexpr std::size_t kBlockBytes = 64 * 1024;
  const std::unique_ptr<void, decltype(&std::free)> memory(std::aligned_alloc(4096, 2 * kBlockBytes), &std::free);
  if (!memory) return "no memory for the trial";
  auto* const written = static_cast<unsigned char*>(memory.get());
  auto* const read_back = written + kBlockBytes;
  for (std::size_t i = 0; i < kBlockBytes; ++i) written[i] = static_cast<unsigned char>(i * 131 + (i >> 8));
  std::memset(read_back, 0, kBlockBytes);
  const ssize_t write_count = pwrite(descriptor, written, kBlockBytes, 0);
  if (write_count < 0) return "writing failed: " + errno_text(errno);
  if (write_count != static_cast<ssize_t>(kBlockBytes)) return "only part of a block was written: the disk is full?";
  const ssize_t read_count = pread(descriptor, read_back, kBlockBytes, 0);
  if (read_count < 0) return "reading failed: " + errno_text(errno);
  if (read_count != static_cast<ssize_t>(kBlockBytes)) return "only part of a block could be read back";
  if (std::memcmp(written, read_back, kBlockBytes) != 0) return "what was read is not what was written";
  return "";
}

DoctorLine examine_direct_io(const std::string& path, const std::string& directory) {
  const std::string what = "direct I/O: " + path;
  struct statfs system {};
  constexpr long kTmpfsMagic = 0x01021994;
  const bool in_memory = statfs(directory.c_str(), &system) == 0 && static_cast<long>(system.f_type) == kTmpfsMagic;
  const Descriptor direct(open_temporary(directory, O_DIRECT));
  const int direct_error = errno;
  std::string trouble =
      direct.value < 0 ? "opening a file for it failed: " + errno_text(direct_error) : try_block(direct.value);
  if (trouble.empty() && !in_memory) return {what, State::good, "a block was written, read back and compared", ""};
  if (in_memory) {
    return {what, State::warning, "this is a file system in memory: what it holds counts as memory, not as NVMe",
            "Name a directory on a local NVMe drive in nvme.paths"};
  }
  const Descriptor buffered(open_temporary(directory, 0));
  const std::string buffered_trouble =
      buffered.value < 0 ? "opening a file failed: " + errno_text(errno) : try_block(buffered.value);
  if (!buffered_trouble.empty()) {
    return {what, State::bad, buffered_trouble, "Name a directory in nvme.paths that this user may write to"};
  }
  return {what, State::warning, trouble + "; transfers go through the page cache, slower and with more memory",
          "Use a file system with O_DIRECT (ext4 or xfs on a local drive; not a network or overlay file system)"};
}

DoctorLine examine_space(const std::string& path, const std::string& directory) {
  const std::string what = "free space: " + path;
  struct statvfs space {};
  if (statvfs(directory.c_str(), &space) != 0) {
    return {what, State::warning, "not known: " + errno_text(errno), "Look at it with df"};
  }
  const std::uint64_t free_bytes = static_cast<std::uint64_t>(space.f_bavail) * space.f_frsize;
  const std::string finding = format_size(free_bytes) + ": room for about " +
                              count(static_cast<double>(free_bytes) / 12) + " parameters at 12 bytes each";
  const std::string cure = "Free some, or add a directory on another drive to nvme.paths";
  if (free_bytes < 64 * base::kMiB) return {what, State::bad, finding, cure};
  if (free_bytes < base::kGiB) return {what, State::warning, finding, cure};
  return {what, State::good, finding, ""};
}

void examine_path(const std::string& path, std::vector<DoctorLine>& lines) {
  std::error_code error;
  fs::path directory = fs::absolute(path, error);
  while (!error && !fs::exists(directory, error) && directory.has_relative_path()) directory = directory.parent_path();
  if (error || !fs::is_directory(directory, error)) {
    const std::string reason = error ? error.message() : directory.string() + " is not a directory";
    lines.push_back(
        {"path: " + path, State::bad, reason, "Name a directory in nvme.paths that this user may write to"});
    return;
  }
  lines.push_back(examine_direct_io(path, directory.string()));
  lines.push_back(examine_space(path, directory.string()));
  const int node = offload::numa_node_of_path(directory.string());
  if (node >= 0) {
    lines.push_back({"drive: " + path, State::good, "belongs to NUMA node " + std::to_string(node), ""});
  }
}

// --- Memory and CPUs -------------------------------------------------------------------------------------------------

DoctorLine examine_huge_pages(const offload::Topology& topology) {
  const std::string reserved = std::to_string(topology.huge_pages_free) + " reserved huge pages are free";
  const std::string reserve = "Reserve some: sysctl vm.nr_hugepages=N, N being budget.host in units of 2 MiB";
  if (topology.huge_pages_free > 0) {
    return {"huge pages", State::good,
            reserved + " (" + format_size(topology.huge_pages_free * topology.huge_page_bytes) +
                "); they are used where they suffice for the whole budget",
            ""};
  }
  if (topology.transparent_huge_pages) {
    try {
      const offload::HostSlab slab({.bytes = 32 * base::kMiB});
      if (slab.page_kind() != "4 KiB pages") {
        return {"huge pages", State::good, "transparent huge pages are given; " + reserved, ""};
      }
      return {"huge pages", State::warning, joined(slab.notes()), reserve};
    } catch (const Error& error) {
      return {"huge pages", State::warning, error.what(), reserve};
    }
  }
  return {"huge pages", State::warning,
          "transparent huge pages are off and " + reserved + ": transfers from small pages are slower and swing more",
          "echo madvise > /sys/kernel/mm/transparent_hugepage/enabled. " + reserve};
}

DoctorLine examine_numa(const offload::Topology& topology) {
  std::string finding = std::to_string(topology.nodes.size()) + (topology.nodes.size() == 1 ? " node" : " nodes");
  for (const offload::NumaNode& node : topology.nodes) {
    finding += "; node " + std::to_string(node.os_index) + ": " + format_size(node.memory_bytes) + ", " +
               std::to_string(node.cpus.size()) + " CPUs for this process";
  }
  return {"NUMA", State::good, finding, ""};
}

DoctorLine examine_cpus(const offload::Topology& topology) {
  const int threads = offload::default_thread_count(topology);
  std::string finding = std::to_string(threads) + " threads by default: " + std::to_string(topology.cpus_online) +
                        " CPUs online, " + std::to_string(topology.cpus_allowed) + " in the affinity mask, ";
  finding +=
      topology.cpu_quota > 0 ? "a cgroup quota of " + decimal(topology.cpu_quota) : std::string("no cgroup quota");
  if (const char* omp = std::getenv("OMP_NUM_THREADS")) finding += "; OMP_NUM_THREADS is " + std::string(omp);
  if (topology.cpu_quota > 0 && topology.cpu_quota < topology.cpus_allowed) {
    return {"CPUs", State::warning, finding, "A higher quota would be used (cpu.max, docker run --cpus)"};
  }
  return {"CPUs", State::good, finding, ""};
}

DoctorLine examine_memory(const offload::Topology& topology) {
  const std::uint64_t free_bytes = offload::free_memory_bytes(topology);
  std::string finding = format_size(free_bytes) + " can be taken: " + format_size(topology.memory_available_bytes) +
                        " of " + format_size(topology.memory_bytes) + " are available";
  if (topology.cgroup_limit_bytes != 0) {
    finding += ", the cgroup allows " + format_size(topology.cgroup_limit_bytes) + " and uses " +
               format_size(topology.cgroup_used_bytes);
  } else {
    finding += ", no cgroup limit";
  }
  const std::string cure = "End what uses memory, or raise the limit (memory.max, docker run --memory)";
  if (free_bytes < 256 * base::kMiB) return {"memory", State::bad, finding, cure};
  if (free_bytes < 2 * base::kGiB) return {"memory", State::warning, finding, cure};
  return {"memory", State::good, finding, ""};
}

DoctorLine examine_instructions() {
  const std::vector<std::string> targets = kernels::supported_targets();
  std::string finding = "kernels run on " + kernels::active_target() + " (of " + joined(targets) + ")";
#if defined(__x86_64__)
  if (!__builtin_cpu_supports("avx2")) {
    return {"instruction sets", State::warning, finding + "; no AVX2: updates are slower", "A newer CPU"};
  }
  if (!__builtin_cpu_supports("avx512bw")) {
    return {"instruction sets", State::warning,
            finding + "; no AVX-512: the reference trainer multiplies bf16 matrices as fp32", "A CPU with AVX-512"};
  }
#endif
  return {"instruction sets", State::good, finding, ""};
}

}  // namespace

std::vector<DoctorLine> examine(const std::vector<std::string>& nvme_paths, const AcceleratorFacts& accelerators) {
  std::vector<DoctorLine> lines;
  const offload::Topology topology = offload::discover_topology();
  const std::string unavailable = io::io_uring_unavailable_reason();
  lines.push_back(examine_io_uring(unavailable));
  lines.push_back(examine_memlock(topology, unavailable.empty()));
  for (const std::string& path : nvme_paths) examine_path(path, lines);
  lines.push_back(examine_huge_pages(topology));
  lines.push_back(examine_numa(topology));
  lines.push_back(examine_memory(topology));
  lines.push_back(examine_cpus(topology));
  lines.push_back(examine_instructions());
  for (DoctorLine& line : accelerator_lines(accelerators)) lines.push_back(std::move(line));
  for (const std::string& note : topology.notes)
    lines.push_back({"note", State::warning, note, "See that /proc and /sys are mounted"});
  return lines;
}

}  // namespace ballast::cli
