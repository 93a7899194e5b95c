// What a process may use: control groups, memory, huge pages and devices from fabricated trees; affinity and odd
// topologies on the real system.
// SPDX-License-Identifier: Apache-2.0
#include "ballast/offload/topology.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sched.h>
#include <stdlib.h>
#include <sys/prctl.h>
#include <unistd.h>

#include <cstdio>
#include <filesystem>
#include <fstream>
#include <string>

#include "ballast/base/size.h"
#include "ballast/offload/slab.h"
#include "system_files.h"

namespace ballast::offload {
namespace {

namespace fs = std::filesystem;
using base::kGiB;
using base::kMiB;
using testing::HasSubstr;

class FabricatedTree : public testing::Test {
 protected:
  void SetUp() override {
    std::string pattern = (fs::temp_directory_path() / "ballast-tree-XXXXXX").string();
    ASSERT_NE(mkdtemp(pattern.data()), nullptr);
    root_ = pattern;
  }
  void TearDown() override { fs::remove_all(root_); }

  void put(const std::string& path, const std::string& text) {
    fs::create_directories(fs::path(root_ + path).parent_path());
    std::ofstream(root_ + path) << text;
  }
  CgroupLimits limits() {
    notes_.clear();
    return read_cgroup_limits(root_, notes_);
  }

  std::string root_;
  std::vector<std::string> notes_;
};

constexpr const char* kVersion2Mount = "30 25 0:26 / /sys/fs/cgroup rw shared:4 - cgroup2 cgroup2 rw,nsdelegate\n";

TEST_F(FabricatedTree, Version2LimitsAreRead) {
  put("/proc/self/cgroup", "0::/job/step\n");
  put("/proc/self/mountinfo", kVersion2Mount);
  put("/sys/fs/cgroup/job/step/memory.max", "1073741824\n");
  put("/sys/fs/cgroup/job/step/memory.current", "209715200\n");
  put("/sys/fs/cgroup/job/step/memory.stat", "anon 1\ninactive_file 52428800\nactive_file 52428800\n");
  put("/sys/fs/cgroup/job/step/cpu.max", "150000 100000\n");
  const CgroupLimits found = limits();
  EXPECT_EQ(found.memory_limit_bytes, kGiB);
  EXPECT_EQ(found.memory_used_bytes, 100 * kMiB);  // file cache can be dropped
  EXPECT_DOUBLE_EQ(found.cpu_quota, 1.5);
  EXPECT_TRUE(notes_.empty());
}

TEST_F(FabricatedTree, TheLevelThatLeavesTheLeastCounts) {
  put("/proc/self/cgroup", "0::/pod/container\n");
  put("/proc/self/mountinfo", kVersion2Mount);
  put("/sys/fs/cgroup/pod/container/memory.max", "1073741824\n");
  put("/sys/fs/cgroup/pod/container/memory.current", "0\n");
  put("/sys/fs/cgroup/pod/container/cpu.max", "max 100000\n");
  put("/sys/fs/cgroup/pod/memory.max", "4294967296\n");
  put("/sys/fs/cgroup/pod/memory.current", "4187593113\n");  // neighbours leave 102 MiB
  put("/sys/fs/cgroup/pod/cpu.max", "300000 100000\n");
  const CgroupLimits found = limits();
  EXPECT_EQ(found.memory_limit_bytes, 4 * kGiB);
  EXPECT_EQ(found.memory_used_bytes, 4187593113u);
  EXPECT_DOUBLE_EQ(found.cpu_quota, 3);
}

TEST_F(FabricatedTree, AThrottlingLimitCountsToo) {
  put("/proc/self/cgroup", "0::/slice\n");
  put("/proc/self/mountinfo", kVersion2Mount);
  put("/sys/fs/cgroup/slice/memory.max", "max\n");
  put("/sys/fs/cgroup/slice/memory.high", "536870912\n");
  EXPECT_EQ(limits().memory_limit_bytes, 512 * kMiB);
}

TEST_F(FabricatedTree, NoLimitIsNone) {
  put("/proc/self/cgroup", "0::/\n4:memory:/\n");
  put("/proc/self/mountinfo",
      std::string(kVersion2Mount) + "35 31 0:32 / /sys/fs/cgroup/memory rw - cgroup cgroup rw,memory\n");
  put("/sys/fs/cgroup/memory.max", "max\n");
  put("/sys/fs/cgroup/cpu.max", "max 100000\n");
  put("/sys/fs/cgroup/memory/memory.limit_in_bytes", "9223372036854771712\n");
  const CgroupLimits found = limits();
  EXPECT_EQ(found.memory_limit_bytes, 0u);
  EXPECT_EQ(found.cpu_quota, 0);
}

TEST_F(FabricatedTree, Version1LimitsAreReadPerController) {
  put("/proc/self/cgroup", "9:cpu,cpuacct:/a/b\n4:memory:/m/n\n0::/\n");
  put("/proc/self/mountinfo",
      "32 31 0:29 / /sys/fs/cgroup/cpu,cpuacct rw - cgroup cgroup rw,cpu,cpuacct\n"
      "35 31 0:32 / /sys/fs/cgroup/memory rw,relatime - cgroup cgroup rw,memory\n");
  put("/sys/fs/cgroup/cpu,cpuacct/a/b/cpu.cfs_quota_us", "-1\n");
  put("/sys/fs/cgroup/cpu,cpuacct/a/b/cpu.cfs_period_us", "100000\n");
  put("/sys/fs/cgroup/cpu,cpuacct/a/cpu.cfs_quota_us", "50000\n");
  put("/sys/fs/cgroup/cpu,cpuacct/a/cpu.cfs_period_us", "100000\n");
  put("/sys/fs/cgroup/memory/m/n/memory.limit_in_bytes", "2147483648\n");
  put("/sys/fs/cgroup/memory/m/n/memory.usage_in_bytes", "1048576\n");
  put("/sys/fs/cgroup/memory/m/memory.limit_in_bytes", "1073741824\n");
  put("/sys/fs/cgroup/memory/m/memory.usage_in_bytes", "3145728\n");
  put("/sys/fs/cgroup/memory/m/memory.stat", "inactive_file 0\ntotal_inactive_file 1048576\ntotal_active_file 0\n");
  const CgroupLimits found = limits();
  EXPECT_DOUBLE_EQ(found.cpu_quota, 0.5);
  EXPECT_EQ(found.memory_limit_bytes, kGiB);
  EXPECT_EQ(found.memory_used_bytes, 2 * kMiB);
}

// A container without a name space of its own: the group's path is the host's, the mount begins at it.
TEST_F(FabricatedTree, AMountThatBeginsInsideTheHierarchyIsFollowed) {
  put("/proc/self/cgroup", "4:memory:/docker/0123/child\n");
  put("/proc/self/mountinfo", "35 31 0:32 /docker/0123 /sys/fs/cgroup/memory ro - cgroup cgroup rw,memory\n");
  put("/sys/fs/cgroup/memory/child/memory.limit_in_bytes", "9223372036854771712\n");
  put("/sys/fs/cgroup/memory/memory.limit_in_bytes", "268435456\n");
  EXPECT_EQ(limits().memory_limit_bytes, 256 * kMiB);
  // Limits above the mount show only here.
  put("/sys/fs/cgroup/memory/child/memory.stat", "hierarchical_memory_limit 134217728\n");
  EXPECT_EQ(limits().memory_limit_bytes, 128 * kMiB);
}

TEST_F(FabricatedTree, AGroupOutsideTheNameSpaceMeansTheMountPoint) {
  put("/proc/self/cgroup", "0::/../other\n");
  put("/proc/self/mountinfo", kVersion2Mount);
  put("/sys/fs/cgroup/memory.max", "1048576\n");
  EXPECT_EQ(limits().memory_limit_bytes, kMiB);
}

TEST_F(FabricatedTree, UsualPlacesStandInForMissingMounts) {
  put("/proc/self/cgroup", "4:memory:/x:y\n2:cpu,cpuacct:/\n");
  put("/sys/fs/cgroup/memory/x:y/memory.limit_in_bytes", "1048576\n");
  put("/sys/fs/cgroup/cpu,cpuacct/cpu.cfs_quota_us", "200000\n");
  put("/sys/fs/cgroup/cpu,cpuacct/cpu.cfs_period_us", "100000\n");
  const CgroupLimits found = limits();
  EXPECT_EQ(found.memory_limit_bytes, kMiB);
  EXPECT_DOUBLE_EQ(found.cpu_quota, 2);
}

TEST_F(FabricatedTree, NothingToReadIsANote) {
  EXPECT_EQ(limits().memory_limit_bytes, 0u);
  ASSERT_EQ(notes_.size(), 1u);
  EXPECT_THAT(notes_[0], HasSubstr("/proc/self/cgroup cannot be read"));
}

TEST_F(FabricatedTree, NonsenseIsNoLimit) {
  put("/proc/self/cgroup", "\n::\n0\n0:\nmemory\n0::/g\n:::::\n");
  put("/proc/self/mountinfo", std::string("1 2 3\n- - -\n\n") + kVersion2Mount);
  put("/sys/fs/cgroup/g/memory.max", "lots\n");
  put("/sys/fs/cgroup/g/cpu.max", "0 0\n");
  put("/sys/fs/cgroup/memory.max", "-1\n");
  put("/sys/fs/cgroup/cpu.max", "\n");
  const CgroupLimits found = limits();
  EXPECT_EQ(found.memory_limit_bytes, 0u);
  EXPECT_EQ(found.cpu_quota, 0);
}

TEST_F(FabricatedTree, ALimitOfZeroLeavesNothing) {
  put("/proc/self/cgroup", "0::/\n");
  put("/proc/self/mountinfo", kVersion2Mount);
  put("/sys/fs/cgroup/memory.max", "0\n");
  const CgroupLimits found = limits();
  Topology topology;
  topology.memory_available_bytes = kGiB;
  topology.cgroup_limit_bytes = found.memory_limit_bytes;
  topology.cgroup_used_bytes = found.memory_used_bytes;
  EXPECT_EQ(free_memory_bytes(topology), 0u);
}

TEST_F(FabricatedTree, MemoryIsReadAndMissingLinesAreNotes) {
  put("/proc/meminfo",
      "MemTotal:       1048576 kB\nMemFree: 10 kB\nMemAvailable:    524288 kB\nHugepagesize:       2048 kB\n");
  const MemoryInfo info = read_memory_info(root_, notes_);
  EXPECT_EQ(info.total_bytes, kGiB);
  EXPECT_EQ(info.available_bytes, 512 * kMiB);
  EXPECT_EQ(info.huge_page_bytes, 2 * kMiB);
  EXPECT_TRUE(notes_.empty());
  put("/proc/meminfo", "MemTotal: 1024 kB\nMemFree: 100 kB\nCached: 28 kB\n");
  EXPECT_EQ(read_memory_info(root_, notes_).available_bytes, 128u * 1024);
  EXPECT_EQ(notes_.size(), 1u);
  put("/proc/meminfo", "garbage");
  EXPECT_EQ(read_memory_info(root_, notes_).total_bytes, 0u);
}

TEST_F(FabricatedTree, HugePagesThatArePromisedAreNotFree) {
  put("/sys/kernel/mm/hugepages/hugepages-2048kB/free_hugepages", "100\n");
  put("/sys/kernel/mm/hugepages/hugepages-2048kB/resv_hugepages", "30\n");
  put("/sys/kernel/mm/transparent_hugepage/enabled", "always [madvise] never\n");
  HugePageInfo info = read_huge_page_info(root_, kGiB);
  EXPECT_EQ(info.page_bytes, 2 * kMiB);
  EXPECT_EQ(info.pages_free, 70u);
  EXPECT_TRUE(info.transparent);
  put("/sys/kernel/mm/transparent_hugepage/enabled", "always madvise [never]\n");
  put("/sys/kernel/mm/hugepages/hugepages-2048kB/resv_hugepages", "300\n");
  info = read_huge_page_info(root_, kGiB);
  EXPECT_EQ(info.pages_free, 0u);
  EXPECT_FALSE(info.transparent);
}

TEST_F(FabricatedTree, WithoutHugePagesOrWithAnotherDefaultSize) {
  EXPECT_EQ(read_huge_page_info(root_, 0).page_bytes, 0u);
  put("/sys/kernel/mm/hugepages/hugepages-524288kB/free_hugepages", "2\n");
  const HugePageInfo info = read_huge_page_info(root_, 512 * kMiB);
  EXPECT_EQ(info.page_bytes, 512 * kMiB);
  EXPECT_EQ(info.pages_free, 2u);
}

TEST_F(FabricatedTree, TheNodeOfADriveIsThatOfItsController) {
  const std::string drive = "/sys/devices/pci0000:00/0000:00:04.0/nvme/nvme0/nvme0n1";
  put("/sys/devices/pci0000:00/0000:00:04.0/numa_node", "1\n");
  put(drive + "/nvme0n1p1/partition", "1\n");
  put("/sys/devices/virtual/block/dm-0/dm/name", "x\n");
  put("/sys/devices/virtual/block/loop0/size", "0\n");
  fs::create_directories(root_ + "/sys/dev/block");
  fs::create_directory_symlink(root_ + drive, root_ + "/sys/dev/block/259:0");
  fs::create_directory_symlink(root_ + drive + "/nvme0n1p1", root_ + "/sys/dev/block/259:1");
  fs::create_directory_symlink(root_ + "/sys/devices/virtual/block/dm-0", root_ + "/sys/dev/block/253:0");
  fs::create_directory_symlink(root_ + "/sys/devices/virtual/block/loop0", root_ + "/sys/dev/block/7:0");
  fs::create_directories(root_ + "/sys/devices/virtual/block/dm-0/slaves");
  fs::create_directory_symlink(root_ + drive + "/nvme0n1p1",
                               root_ + "/sys/devices/virtual/block/dm-0/slaves/nvme0n1p1");
  EXPECT_EQ(read_block_device_node(root_, 259, 0), 1);
  EXPECT_EQ(read_block_device_node(root_, 259, 1), 1);
  EXPECT_EQ(read_block_device_node(root_, 253, 0), 1);
  EXPECT_EQ(read_block_device_node(root_, 7, 0), -1);
  EXPECT_EQ(read_block_device_node(root_, 8, 0), -1);
  // Two drives on different nodes are near neither.
  const std::string other = "/sys/devices/pci0000:80/0000:80:04.0/nvme/nvme1/nvme1n1";
  put("/sys/devices/pci0000:80/0000:80:04.0/numa_node", "0\n");
  put(other + "/size", "0\n");
  fs::create_directory_symlink(root_ + other, root_ + "/sys/devices/virtual/block/dm-0/slaves/nvme1n1");
  EXPECT_EQ(read_block_device_node(root_, 253, 0), -1);
  put("/sys/devices/pci0000:00/0000:00:04.0/numa_node", "-1\n");
  EXPECT_EQ(read_block_device_node(root_, 259, 0), -1);
}

TEST(ThreadCount, IsTheSmallerOfAffinityAndQuotaSharedByTheRanks) {
  Topology topology;
  topology.cpus_allowed = 64;
  const auto with_quota = [&](double quota) {
    topology.cpu_quota = quota;
    return default_thread_count(topology);
  };
  EXPECT_EQ(with_quota(0), 64);
  EXPECT_EQ(with_quota(0.5), 1);
  EXPECT_EQ(with_quota(1.5), 2);
  EXPECT_EQ(with_quota(3), 3);
  EXPECT_EQ(with_quota(1000), 64);
  topology.cpu_quota = 0;
  topology.cpus_allowed = 8;
  EXPECT_EQ(default_thread_count(topology, 4), 2);
  EXPECT_EQ(default_thread_count(topology, 3), 2);
  EXPECT_EQ(default_thread_count(topology, 100), 1);
  EXPECT_EQ(default_thread_count(topology, 0), 8);
  topology.cpus_allowed = 0;
  EXPECT_EQ(default_thread_count(topology), 1);
}

TEST(FreeMemory, IsWhatMachineAndCgroupBothLeave) {
  Topology topology;
  topology.memory_available_bytes = 10 * kGiB;
  EXPECT_EQ(free_memory_bytes(topology), 10 * kGiB);
  topology.cgroup_limit_bytes = 4 * kGiB;
  topology.cgroup_used_bytes = kGiB;
  EXPECT_EQ(free_memory_bytes(topology), 3 * kGiB);
  topology.cgroup_used_bytes = 5 * kGiB;
  EXPECT_EQ(free_memory_bytes(topology), 0u);
  topology.memory_available_bytes = kMiB;
  topology.cgroup_used_bytes = 0;
  EXPECT_EQ(free_memory_bytes(topology), kMiB);
}

void expect_usable(const Topology& topology) {
  EXPECT_GE(topology.cpus_online, 1);
  EXPECT_GE(topology.cpus_allowed, 1);
  EXPECT_GE(default_thread_count(topology), 1);
  EXPECT_GT(topology.memory_bytes, 0u);
  EXPECT_GT(free_memory_bytes(topology), 0u);
  ASSERT_FALSE(topology.nodes.empty());
  cpu_set_t mask;
  ASSERT_EQ(sched_getaffinity(0, sizeof(mask), &mask), 0);
  for (const NumaNode& node : topology.nodes) {
    EXPECT_GE(node.os_index, 0);
    EXPECT_GT(node.memory_bytes, 0u);
    for (const int cpu : node.cpus) {
      ASSERT_GE(cpu, 0);
      ASSERT_LT(cpu, CPU_SETSIZE);
      EXPECT_TRUE(CPU_ISSET(cpu, &mask)) << cpu;
    }
  }
}

TEST(Discovery, DescribesThisMachine) {
  const Topology topology = discover_topology();
  expect_usable(topology);
  EXPECT_LE(topology.memory_available_bytes, topology.memory_bytes);
  EXPECT_GT(topology.memlock_limit_bytes, 0u);
}

TEST(Discovery, APathThatIsNotThereHasNoNode) {
  EXPECT_EQ(numa_node_of_path("/nonexistent/place"), -1);
  EXPECT_GE(numa_node_of_path("/"), -1);
}

TEST(Discovery, TransparentHugePagesSwitchedOffForTheProcessAreSeen) {
  if (!discover_topology().transparent_huge_pages) GTEST_SKIP() << "transparent huge pages are off on this machine";
  ASSERT_EQ(prctl(PR_SET_THP_DISABLE, 1, 0, 0, 0), 0);
  const Topology topology = discover_topology();
  ASSERT_EQ(prctl(PR_SET_THP_DISABLE, 0, 0, 0, 0), 0);
  EXPECT_FALSE(topology.transparent_huge_pages);
}

TEST(Discovery, FollowsTheAffinityMask) {
  cpu_set_t before;
  ASSERT_EQ(sched_getaffinity(0, sizeof(before), &before), 0);
  int last = CPU_SETSIZE - 1;
  while (!CPU_ISSET(last, &before)) --last;
  cpu_set_t one;
  CPU_ZERO(&one);
  CPU_SET(last, &one);
  ASSERT_EQ(sched_setaffinity(0, sizeof(one), &one), 0);
  const Topology topology = discover_topology();
  EXPECT_EQ(topology.cpus_allowed, 1);
  EXPECT_EQ(default_thread_count(topology), 1);
  expect_usable(topology);
  ASSERT_EQ(sched_setaffinity(0, sizeof(before), &before), 0);
}

// Odd topologies, handed to hwloc through its environment: usable, with a note, and a slab bound by them still works.
class OddTopology : public testing::Test {
 protected:
  void TearDown() override {
    for (const char* name : {"HWLOC_SYNTHETIC", "HWLOC_XMLFILE", "HWLOC_THISSYSTEM"}) unsetenv(name);
  }
  static void check() {
    const Topology topology = discover_topology();
    expect_usable(topology);
    for (const NumaNode& node : topology.nodes) {
      const HostSlab slab({.bytes = 2 * kMiB, .numa_node = node.os_index});
      slab.memory().front() = std::byte{1};
    }
  }
  static std::string notes() {
    std::string text;
    for (const std::string& note : discover_topology().notes) text += note + "\n";
    return text;
  }
};

TEST_F(OddTopology, SyntheticMachinesWork) {
  for (const char* description : {"pu:1", "numa:2 core:4 pu:2", "numa:3 pu:1", "pack:2 numa:1 pu:3",
                                  "numa:2(memory=0) pu:2", "numa:1(memory=1048576) pu:64"}) {
    SCOPED_TRACE(description);
    ASSERT_EQ(setenv("HWLOC_SYNTHETIC", description, 1), 0);
    check();
    EXPECT_THAT(notes(), HasSubstr("not this machine's"));
  }
}

TEST_F(OddTopology, ATopologyThatClaimsToBeThisSystemIsOnlyANote) {
  ASSERT_EQ(setenv("HWLOC_SYNTHETIC", "numa:4 pu:2", 1), 0);
  ASSERT_EQ(setenv("HWLOC_THISSYSTEM", "1", 1), 0);
  check();
}

TEST_F(OddTopology, BrokenDescriptionsWork) {
  ASSERT_EQ(setenv("HWLOC_SYNTHETIC", "this is: no topology", 1), 0);
  check();
  unsetenv("HWLOC_SYNTHETIC");
  ASSERT_EQ(setenv("HWLOC_XMLFILE", "/nonexistent/topology.xml", 1), 0);
  check();
  const fs::path file = fs::temp_directory_path() / ("ballast-broken-" + std::to_string(getpid()) + ".xml");
  std::ofstream(file) << "<?xml version=\"1.0\"?><topology version=\"2.0\"><object type=\"Machine\" os_index=";
  ASSERT_EQ(setenv("HWLOC_XMLFILE", file.c_str(), 1), 0);
  check();
  fs::remove(file);
}

// Three nodes, uneven, one without memory.
TEST_F(OddTopology, ANodeWithoutMemoryIsLeftOutWithANote) {
  const fs::path file = fs::temp_directory_path() / ("ballast-uneven-" + std::to_string(getpid()) + ".xml");
  int id = 1;
  // CPUs and nodes as masks; hwloc writes them in hexadecimal.
  const auto object = [&id](const char* type, int index, unsigned cpus, unsigned nodes) {
    char text[400];
    std::snprintf(text, sizeof(text),
                  "<object type=\"%s\" os_index=\"%d\" cpuset=\"0x%08x\" complete_cpuset=\"0x%08x\" nodeset=\"0x%08x\" "
                  "complete_nodeset=\"0x%08x\" gp_index=\"%d\"",
                  type, index, cpus, cpus, nodes, nodes, id++);
    return std::string(text);
  };
  std::string xml = "<?xml version=\"1.0\" encoding=\"UTF-8\"?>\n<topology version=\"2.0\">" +
                    object("Machine", 0, 15, 7) + " allowed_cpuset=\"0x0000000f\" allowed_nodeset=\"0x00000007\">";
  const unsigned cpus_of[] = {3, 4, 8};
  const char* const memory_of[] = {"1073741824", "0", "2147483648"};
  for (int node = 0; node < 3; ++node) {
    const unsigned cpus = cpus_of[node];
    const unsigned nodes = 1u << node;
    xml += object("Package", node, cpus, nodes) + ">" + object("NUMANode", node, cpus, nodes) + " local_memory=\"" +
           memory_of[node] + "\"/>";
    for (int cpu = 0; cpu < 4; ++cpu) {
      if ((cpus >> cpu & 1) != 0) xml += object("PU", cpu, 1u << cpu, nodes) + "/>";
    }
    xml += "</object>";
  }
  std::ofstream(file) << xml << "</object></topology>";
  ASSERT_EQ(setenv("HWLOC_XMLFILE", file.c_str(), 1), 0);
  check();
  const Topology topology = discover_topology();
  ASSERT_EQ(topology.nodes.size(), 2u);
  EXPECT_EQ(topology.nodes[0].os_index, 0);
  EXPECT_EQ(topology.nodes[1].os_index, 2);
  EXPECT_THAT(notes(), HasSubstr("NUMA node 1 has no memory"));
  fs::remove(file);
}

}  // namespace
}  // namespace ballast::offload
