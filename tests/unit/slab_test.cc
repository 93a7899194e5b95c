// The host slab: which pages it gets, what it refuses and with which numbers, and how ranges are handed out.
// SPDX-License-Identifier: Apache-2.0
#include "ballast/offload/slab.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sys/mman.h>
#include <sys/resource.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstdio>
#include <fstream>
#include <memory>
#include <sstream>
#include <string>

#include "ballast/base/error.h"
#include "ballast/base/size.h"
#include "ballast/offload/topology.h"
#include "mapped_memory.h"
#include "support/sanitizers.h"

namespace ballast::offload {
namespace {

using base::kGiB;
using base::kMiB;
using test::kSanitized;
using testing::HasSubstr;

// With reserved huge pages, which the kernel counts apart.
std::uint64_t resident_bytes() {
  std::ifstream file("/proc/self/status");
  std::uint64_t bytes = 0;
  for (std::string line; std::getline(file, line);) {
    if (!line.starts_with("VmRSS:") && !line.starts_with("HugetlbPages:")) continue;
    bytes += std::stoull(line.substr(line.find(':') + 1)) << 10;
  }
  return bytes;
}

// "VmFlags:" of the mapping that holds an address.
std::string flags_of(const void* address) {
  std::ifstream file("/proc/self/smaps");
  std::string line;
  bool inside = false;
  while (std::getline(file, line)) {
    unsigned long long from = 0;
    unsigned long long to = 0;
    if (std::sscanf(line.c_str(), "%llx-%llx ", &from, &to) == 2) {
      inside = from <= reinterpret_cast<std::uintptr_t>(address) && reinterpret_cast<std::uintptr_t>(address) < to;
    }
    if (inside && line.rfind("VmFlags:", 0) == 0) return line;
  }
  return "";
}

std::string joined(const std::vector<std::string>& notes) {
  std::string text;
  for (const std::string& note : notes) text += note + "\n";
  return text;
}

TEST(HostSlab, IsZeroedWritableAlignedAndExactlyAsLargeAsAsked) {
  for (const std::uint64_t bytes : {std::uint64_t{1}, std::uint64_t{4096}, 2 * kMiB - 1, 2 * kMiB, 9 * kMiB + 4096}) {
    const HostSlab slab({.bytes = bytes});
    ASSERT_EQ(slab.memory().size(), bytes);
    EXPECT_EQ(reinterpret_cast<std::uintptr_t>(slab.memory().data()) % (2 * kMiB), 0u);
    EXPECT_TRUE(std::all_of(slab.memory().begin(), slab.memory().end(), [](std::byte b) { return b == std::byte{0}; }));
    slab.memory().front() = slab.memory().back() = std::byte{1};
    EXPECT_TRUE(slab.page_kind() == kReservedHugePages || slab.page_kind() == kTransparentHugePages ||
                slab.page_kind() == kPlainPages)
        << slab.page_kind();
    if (slab.page_kind() == kPlainPages) {
      EXPECT_FALSE(slab.notes().empty()) << "small pages without a reason";
    }
  }
}

TEST(HostSlab, OfNoBytesIsEmpty) {
  HostSlab slab({.bytes = 0});
  EXPECT_TRUE(slab.memory().empty());
  EXPECT_THROW(slab.take("any", 1, 1), PlanError);
}

TEST(HostSlab, IsNotInheritedNorDumped) {
  const HostSlab slab({.bytes = 4 * kMiB});
  const std::string flags = flags_of(slab.memory().data());
  if (flags.empty()) GTEST_SKIP() << "/proc/self/smaps has no VmFlags here";
  EXPECT_THAT(flags, HasSubstr(" dc"));  // do not copy on fork
  EXPECT_THAT(flags, HasSubstr(" dd"));  // do not dump
}

// The child's memory may have taken the slab's place: giving back the slab there must not take that away.
TEST(HostSlab, InAForkedChildItGivesNothingBack) {
  auto slab = std::make_unique<HostSlab>(HostSlabOptions{.bytes = 4 * kMiB});
  void* const place = slab->memory().data();
  const pid_t child = fork();
  ASSERT_GE(child, 0);
  if (child == 0) {
    alarm(20);  // ends a child that hangs
    auto* const own = static_cast<volatile char*>(
        mmap(place, 4096, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_FIXED_NOREPLACE, -1, 0));
    if (own == MAP_FAILED) _exit(2);
    *own = 1;
    slab.reset();
    _exit(*own == 1 ? 0 : 3);
  }
  int status = 0;
  ASSERT_EQ(waitpid(child, &status, 0), child);
  if (WIFEXITED(status) && WEXITSTATUS(status) == 2) GTEST_SKIP() << "a sanitizer's own memory took the slab's place";
  EXPECT_TRUE(WIFEXITED(status) && WEXITSTATUS(status) == 0) << "status " << status;
}

TEST(HostSlab, GrowsTheResidentSetByThePlannedBytesAndGivesThemBack) {
  const std::uint64_t bytes = 5 * 77 * kMiB;
  const std::uint64_t before = resident_bytes();
  {
    const HostSlab slab({.bytes = bytes});
    const std::uint64_t growth = resident_bytes() - before;
    EXPECT_GE(growth, bytes * 95 / 100);
    EXPECT_LE(growth, bytes * 105 / 100);
  }
  EXPECT_LE(resident_bytes(), before + bytes / 20);
}

TEST(HostSlab, UnpopulatedTakesNoMemoryUntilTouched) {
  const std::uint64_t before = resident_bytes();
  const HostSlab slab({.bytes = 128 * kMiB, .populate = false});
  if (slab.page_kind() == kReservedHugePages) GTEST_SKIP() << "reserved huge pages are backed at once";
  EXPECT_LE(resident_bytes(), before + 8 * kMiB);
}

TEST(HostSlab, HandsOutAlignedRangesInOrderAndRefusesWhatDoesNotFit) {
  HostSlab slab({.bytes = kMiB});
  EXPECT_EQ(slab.take("a", 100, 1), slab.memory().data());
  EXPECT_EQ(slab.take("b", 4096, 4096), slab.memory().data() + 4096);
  EXPECT_EQ(slab.take("empty", 0, 64), slab.memory().data() + 8192);
  EXPECT_EQ(slab.taken_bytes(), 8192u);
  try {
    slab.take("gradients", kMiB, 4096);
    FAIL() << "nothing was thrown";
  } catch (const PlanError& error) {
    EXPECT_THAT(error.what(), HasSubstr("\"gradients\" of 1048576 bytes"));
    EXPECT_THAT(error.what(), HasSubstr("slab of 1048576 bytes"));
    EXPECT_THAT(error.what(), HasSubstr("8192 are taken"));
  }
  EXPECT_THROW(slab.take("wraps", UINT64_MAX - 100, 4096), PlanError);
  EXPECT_EQ(slab.taken_bytes(), 8192u);
  EXPECT_EQ(slab.take("rest", kMiB - 8192, 4096), slab.memory().data() + 8192);
  ASSERT_EQ(slab.ranges().size(), 4u);
  EXPECT_EQ(slab.ranges()[1].name, "b");
  EXPECT_EQ(slab.ranges()[1].offset_bytes, 4096u);
  EXPECT_EQ(slab.ranges()[1].bytes, 4096u);
}

TEST(HostSlab, MoreThanIsFreeIsRefusedWithTheNumbers) {
  const std::uint64_t bytes = discover_topology().memory_bytes + kGiB;
  try {
    const HostSlab slab({.bytes = bytes});
    FAIL() << "nothing was thrown";
  } catch (const PlanError& error) {
    EXPECT_THAT(error.what(), HasSubstr(std::to_string(bytes) + " bytes"));
    EXPECT_THAT(error.what(), HasSubstr("are free"));
  }
  EXPECT_THROW(HostSlab({.bytes = UINT64_MAX}), PlanError);
  EXPECT_THROW(HostSlab({.bytes = std::uint64_t{1} << 47}), PlanError);
}

TEST(HostSlab, TheRefusalNamesTheCgroupLimit) {
  Topology topology;
  topology.memory_bytes = 64 * kGiB;
  topology.memory_available_bytes = 60 * kGiB;
  topology.cgroup_limit_bytes = kGiB;
  topology.cgroup_used_bytes = 24 * kMiB;
  EXPECT_EQ(takeable_bytes(topology), 984 * kMiB);
  check_free_memory("host memory", 984 * kMiB, topology);
  EXPECT_THROW(check_free_memory("host memory", 984 * kMiB + 1, topology), PlanError);
  try {
    check_free_memory("host memory", 5 * kGiB, topology);
    FAIL() << "nothing was thrown";
  } catch (const PlanError& error) {
    EXPECT_THAT(error.what(), HasSubstr("host memory of 5368709120 bytes"));
    EXPECT_THAT(error.what(), HasSubstr("cgroup allows 1073741824 bytes"));
    EXPECT_THAT(error.what(), HasSubstr("uses 24"));
  }
}

TEST(HostSlab, ANodeThatIsNotThereIsANote) {
  const HostSlab slab({.bytes = 4 * kMiB, .numa_node = 999});
  EXPECT_THAT(joined(slab.notes()), HasSubstr("NUMA node 999"));
  EXPECT_EQ(slab.memory().size(), 4 * kMiB);
}

TEST(HostSlab, BindingToANodeOfThisMachineIsUsable) {
  const Topology topology = discover_topology();
  const HostSlab slab({.bytes = 4 * kMiB, .numa_node = topology.nodes.front().os_index});
  std::fill(slab.memory().begin(), slab.memory().end(), std::byte{3});
  EXPECT_EQ(slab.memory().back(), std::byte{3});
}

TEST(HostSlab, WorksUnderASmallLockedMemoryLimit) {
  rlimit before{};
  ASSERT_EQ(getrlimit(RLIMIT_MEMLOCK, &before), 0);
  rlimit small = before;
  small.rlim_cur = std::min<rlim_t>(64 * 1024, before.rlim_max);
  ASSERT_EQ(setrlimit(RLIMIT_MEMLOCK, &small), 0);
  EXPECT_EQ(discover_topology().memlock_limit_bytes, small.rlim_cur);
  EXPECT_NO_THROW({ HostSlab slab({.bytes = 64 * kMiB}); });
  ASSERT_EQ(setrlimit(RLIMIT_MEMLOCK, &before), 0);
}

TEST(HostSlab, AnAddressSpaceLimitIsAPlanErrorThatSaysSo) {
  if (kSanitized) GTEST_SKIP() << "sanitizers need the address space";
  rlimit before{};
  ASSERT_EQ(getrlimit(RLIMIT_AS, &before), 0);
  rlimit small = before;
  small.rlim_cur = 512 * kMiB;
  ASSERT_EQ(setrlimit(RLIMIT_AS, &small), 0);
  std::string text;
  try {
    const HostSlab slab({.bytes = kGiB, .populate = false});
  } catch (const PlanError& error) {
    text = error.what();
  }
  ASSERT_EQ(setrlimit(RLIMIT_AS, &before), 0);
  EXPECT_THAT(text, HasSubstr("ulimit -v"));
}

TEST(HostSlab, AnInterruptWhileItIsFilledLeavesNothingMapped) {
  const auto mapped_pages = [] {
    std::ifstream status("/proc/self/statm");
    std::uint64_t pages = 0;
    status >> pages;
    return pages;
  };
  const std::uint64_t before = mapped_pages();
  int calls = 0;
  const auto third = [&] {
    if (++calls == 3) throw std::runtime_error("interrupted");
  };
  EXPECT_THROW(HostSlab({.bytes = 256 * kMiB, .check_interrupt = third}), std::runtime_error);
  EXPECT_EQ(calls, 3);
  EXPECT_LT(mapped_pages(), before + (64 * kMiB >> 12));
}

TEST(MappedMemory, HugePagesThatAreNotReallyThereFallBackWithANote) {
  Topology topology = discover_topology();
  if (topology.huge_pages_free >= 16) GTEST_SKIP() << "this machine has reserved huge pages";
  topology.huge_page_bytes = 2 * kMiB;
  topology.huge_pages_free = 1000;  // as when another process was faster
  std::vector<std::string> notes;
  const MappedMemory memory = map_memory({"host memory", 32 * kMiB, -1, true}, topology, notes);
  EXPECT_NE(memory.page_kind, kReservedHugePages);
  EXPECT_THAT(joined(notes), HasSubstr("reserved huge pages are not used"));
  unmap_memory(memory);
}

TEST(MappedMemory, TooFewReservedHugePagesAreANoteWithBothNumbers) {
  Topology topology = discover_topology();
  topology.huge_page_bytes = 2 * kMiB;
  topology.huge_pages_free = 3;
  std::vector<std::string> notes;
  const MappedMemory memory = map_memory({"host memory", 32 * kMiB, -1, true}, topology, notes);
  EXPECT_THAT(joined(notes), HasSubstr("16 of 2 MiB are needed, 3 are free"));
  unmap_memory(memory);
}

TEST(MappedMemory, WithoutTransparentHugePagesItIsPlainAndSaysWhy) {
  Topology topology = discover_topology();
  topology.huge_pages_free = 0;
  topology.transparent_huge_pages = false;
  std::vector<std::string> notes;
  const MappedMemory memory = map_memory({"host memory", 8 * kMiB, -1, true}, topology, notes);
  EXPECT_EQ(memory.page_kind, kPlainPages);
  EXPECT_THAT(joined(notes), HasSubstr("transparent_hugepage/enabled"));
  unmap_memory(memory);
}

TEST(MappedMemory, ReservedHugePagesAreUsedWhereTheyAre) {
  const Topology topology = discover_topology();
  if (topology.huge_page_bytes != 2 * kMiB || topology.huge_pages_free < 4) {
    GTEST_SKIP() << "no reserved 2 MiB pages here (sysctl vm.nr_hugepages)";
  }
  const HostSlab slab({.bytes = 5 * kMiB});
  EXPECT_EQ(slab.page_kind(), kReservedHugePages);
  EXPECT_EQ(slab.memory().size(), 5 * kMiB);
  std::fill(slab.memory().begin(), slab.memory().end(), std::byte{1});
  EXPECT_EQ(discover_topology().huge_pages_free, topology.huge_pages_free - 3);
}

TEST(MappedMemory, PopulatingOnOldKernelsBacksEveryPageAndReportsWhatCannotBe) {
  const std::uint64_t bytes = 5 * kMiB;
  void* const memory = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  ASSERT_NE(memory, MAP_FAILED);
  EXPECT_EQ(populate_by_reading(static_cast<std::byte*>(memory), bytes), 0);
  std::vector<unsigned char> present((bytes + 4095) / 4096, 0);
  ASSERT_EQ(mincore(memory, bytes, present.data()), 0);
  EXPECT_TRUE(std::all_of(present.begin(), present.end(), [](unsigned char page) { return (page & 1) != 0; }));
  ASSERT_EQ(mprotect(memory, bytes, PROT_NONE), 0);
  EXPECT_EQ(populate_by_reading(static_cast<std::byte*>(memory), bytes), EFAULT);
  ASSERT_EQ(munmap(memory, bytes), 0);
}

}  // namespace
}  // namespace ballast::offload
