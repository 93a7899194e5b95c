// The limits that control groups put on this process.
// SPDX-License-Identifier: Apache-2.0
#include <algorithm>
#include <charconv>
#include <sstream>

#include "system_files.h"

namespace ballast::offload {
namespace {

// "No limit" in version 1 is the largest page count, in bytes; nothing real comes near.
constexpr std::uint64_t kNoLimitBytes = std::uint64_t{1} << 60;

struct Mount {
  std::string root;  // the part of the hierarchy that is mounted
  std::string point;
  bool version2 = false;
  std::vector<std::string> controllers;  // version 1
};

std::vector<std::string> split(const std::string& text, char separator) {
  std::vector<std::string> parts;
  std::string part;
  std::istringstream stream(text);
  while (std::getline(stream, part, separator)) parts.push_back(part);
  return parts;
}

bool has(const std::vector<std::string>& list, const std::string& word) {
  return std::find(list.begin(), list.end(), word) != list.end();
}

// /proc/self/mountinfo: id parent device root point options [fields] - type source options.
std::vector<Mount> read_mounts(const std::string& root) {
  std::vector<Mount> mounts;
  const auto text = read_system_file(root + "/proc/self/mountinfo");
  if (!text) return mounts;
  for (const std::string& line : split(*text, '\n')) {
    const auto fields = split(line, ' ');
    const auto dash = std::find(fields.begin(), fields.end(), "-");
    if (dash == fields.end() || dash - fields.begin() < 6 || fields.end() - dash < 4) continue;
    const std::string& type = dash[1];
    if (type != "cgroup" && type != "cgroup2") continue;
    Mount mount;
    mount.root = fields[3];
    mount.point = fields[4];
    mount.version2 = type == "cgroup2";
    if (!mount.version2) mount.controllers = split(dash[3], ',');
    mounts.push_back(std::move(mount));
  }
  return mounts;
}

// The places such mounts have when mountinfo says nothing.
std::vector<Mount> usual_mounts() {
  return {{"/", "/sys/fs/cgroup", true, {}},
          {"/", "/sys/fs/cgroup/memory", false, {"memory"}},
          {"/", "/sys/fs/cgroup/cpu", false, {"cpu"}},
          {"/", "/sys/fs/cgroup/cpu,cpuacct", false, {"cpu"}}};
}

// The folders from the process's group up to the mount point, as seen below `root`.
std::vector<std::string> levels(const std::string& root, const Mount& mount, std::string group) {
  // Inside a namespace the group may be shown relative to a part that is not mounted here.
  if (group.find("..") != std::string::npos) group = "/";
  if (mount.root != "/") {
    if (group == mount.root) {
      group = "/";
    } else if (group.rfind(mount.root + "/", 0) == 0) {
      group = group.substr(mount.root.size());
    } else {
      group = "/";
    }
  }
  std::vector<std::string> folders;
  while (!group.empty() && group != "/") {
    folders.push_back(root + mount.point + group);
    group.resize(group.rfind('/') == std::string::npos ? 0 : group.rfind('/'));
  }
  folders.push_back(root + mount.point);
  return folders;
}

struct MemoryStatistics {
  std::uint64_t droppable_bytes = 0;          // file cache that the kernel drops before it refuses memory
  std::uint64_t limit_bytes = kNoLimitBytes;  // version 1: over all levels, those not mounted here included
};

MemoryStatistics read_memory_statistics(const std::string& folder, bool version2) {
  MemoryStatistics statistics;
  const std::string prefix = version2 ? "" : "total_";
  for (const std::string& line : split(read_system_file(folder + "/memory.stat").value_or(""), '\n')) {
    const auto fields = split(line, ' ');
    if (fields.size() != 2) continue;
    std::uint64_t value = 0;
    const auto result = std::from_chars(fields[1].data(), fields[1].data() + fields[1].size(), value);
    if (result.ec != std::errc()) continue;
    if (fields[0] == prefix + "inactive_file" || fields[0] == prefix + "active_file")
      statistics.droppable_bytes += value;
    if (!version2 && fields[0] == "hierarchical_memory_limit") statistics.limit_bytes = value;
  }
  return statistics;
}

std::uint64_t left(const CgroupLimits& limits) {
  if (limits.memory_limit_bytes == 0) return UINT64_MAX;
  return limits.memory_limit_bytes > limits.memory_used_bytes ? limits.memory_limit_bytes - limits.memory_used_bytes
                                                              : 0;
}

void consider_memory(const std::string& folder, bool version2, CgroupLimits& limits) {
  const MemoryStatistics statistics = read_memory_statistics(folder, version2);
  std::uint64_t limit = std::min(kNoLimitBytes, statistics.limit_bytes);
  for (const char* name : {version2 ? "/memory.max" : "/memory.limit_in_bytes", version2 ? "/memory.high" : ""}) {
    if (*name != '\0') limit = std::min(limit, read_system_number(folder + name).value_or(kNoLimitBytes));
  }
  if (limit >= kNoLimitBytes) return;
  CgroupLimits level;
  level.memory_limit_bytes = limit;
  const std::uint64_t used =
      read_system_number(folder + (version2 ? "/memory.current" : "/memory.usage_in_bytes")).value_or(0);
  const std::uint64_t droppable = statistics.droppable_bytes;
  level.memory_used_bytes = used > droppable ? used - droppable : 0;
  // A limit of zero is a limit too, but zero means none in the result.
  if (level.memory_limit_bytes == 0) level.memory_limit_bytes = level.memory_used_bytes = 1;
  if (left(level) < left(limits)) {
    limits.memory_limit_bytes = level.memory_limit_bytes;
    limits.memory_used_bytes = level.memory_used_bytes;
  }
}

void consider_cpu(const std::string& folder, bool version2, CgroupLimits& limits) {
  double quota = 0;
  double period = 0;
  if (version2) {
    const auto text = read_system_file(folder + "/cpu.max");
    if (!text || text->rfind("max", 0) == 0) return;
    std::istringstream stream(*text);
    if (!(stream >> quota >> period)) return;
  } else {
    const auto quota_us = read_system_number(folder + "/cpu.cfs_quota_us");  // -1, no number, where there is none
    const auto period_us = read_system_number(folder + "/cpu.cfs_period_us");
    if (!quota_us || !period_us) return;
    quota = static_cast<double>(*quota_us);
    period = static_cast<double>(*period_us);
  }
  if (!(quota > 0) || !(period > 0)) return;
  const double cpus = quota / period;
  if (limits.cpu_quota == 0 || cpus < limits.cpu_quota) limits.cpu_quota = cpus;
}

}  // namespace

CgroupLimits read_cgroup_limits(const std::string& root, std::vector<std::string>& notes) {
  CgroupLimits limits;
  const auto groups = read_system_file(root + "/proc/self/cgroup");
  if (!groups) {
    notes.push_back("control group limits are not known: " + root + "/proc/self/cgroup cannot be read");
    return limits;
  }
  std::vector<Mount> mounts = read_mounts(root);
  if (mounts.empty()) mounts = usual_mounts();
  for (const std::string& line : split(*groups, '\n')) {
    // hierarchy:controllers:path; the path may hold colons.
    const std::size_t first = line.find(':');
    const std::size_t second = first == std::string::npos ? first : line.find(':', first + 1);
    if (second == std::string::npos) continue;
    const auto controllers = split(line.substr(first + 1, second - first - 1), ',');
    const std::string group = line.substr(second + 1);
    for (const Mount& mount : mounts) {
      const bool version2 = controllers.empty();
      if (version2 != mount.version2) continue;
      const bool memory = version2 || (has(controllers, "memory") && has(mount.controllers, "memory"));
      const bool cpu = version2 || (has(controllers, "cpu") && has(mount.controllers, "cpu"));
      if (!memory && !cpu) continue;
      for (const std::string& folder : levels(root, mount, group)) {
        if (memory) consider_memory(folder, version2, limits);
        if (cpu) consider_cpu(folder, version2, limits);
      }
    }
  }
  return limits;
}

}  // namespace ballast::offload
