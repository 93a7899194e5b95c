// How ranks divide a machine: its cores, its quota, its NUMA nodes.
// SPDX-License-Identifier: Apache-2.0
#include <ballast/base/error.h>
#include <ballast/offload/cpu_pool.h>
#include <ballast/offload/machine_share.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sched.h>

#include <atomic>
#include <numeric>
#include <set>
#include <thread>

namespace ballast::offload {
namespace {

using ::testing::ElementsAre;
using ::testing::IsEmpty;

std::vector<int> range(int begin, int end) {
  std::vector<int> cpus(static_cast<std::size_t>(end - begin));
  std::iota(cpus.begin(), cpus.end(), begin);
  return cpus;
}

// A machine of `nodes` NUMA nodes with `each` CPUs, numbered in turn as hyper-threads are.
Topology machine(int nodes, int each) {
  Topology topology;
  topology.cpus = range(0, nodes * each);
  topology.cpus_allowed = topology.cpus_online = nodes * each;
  for (int n = 0; n < nodes; ++n) {
    NumaNode node{n, 1 << 30, {}};
    for (int i = 0; i < each; ++i) node.cpus.push_back(i * nodes + n);
    topology.nodes.push_back(node);
  }
  return topology;
}

std::vector<MachineShare> shares(const Topology& topology, const std::vector<std::string>& texts) {
  std::vector<MachineShare> all;
  for (std::size_t rank = 0; rank < texts.size(); ++rank) all.push_back(machine_share(topology, texts, rank));
  return all;
}

TEST(MachineShare, RanksOfOneMaskDivideItsCoresAndNodes) {
  const Topology topology = machine(2, 8);
  const std::vector<std::string> texts(4, "node 0-15");
  std::multiset<int> used;
  for (const MachineShare& share : shares(topology, texts)) {
    EXPECT_EQ(share.ranks, 4);
    EXPECT_EQ(share.threads, 4);
    EXPECT_EQ(share.cpus.size(), 4u);
    EXPECT_GE(share.numa_node, 0);
    for (const int cpu : share.cpus) {
      EXPECT_EQ(cpu % 2, share.numa_node);
      used.insert(cpu);
    }
  }
  for (int cpu = 0; cpu < 16; ++cpu) EXPECT_EQ(used.count(cpu), 1u);
  EXPECT_EQ(machine_share(topology, texts, 0).numa_node, 0);
  EXPECT_EQ(machine_share(topology, texts, 3).numa_node, 1);
}

TEST(MachineShare, FourRanksOnEightCpusHaveTwoThreadsEach) {
  for (const MachineShare& share : shares(machine(1, 8), std::vector<std::string>(4, "node 0-7"))) {
    EXPECT_EQ(share.threads, 2);
    EXPECT_THAT(share.cpus, IsEmpty());  // one node: the system spreads them as well
    EXPECT_EQ(share.numa_node, -1);
  }
}

TEST(MachineShare, MoreRanksThanCpusHaveOneThreadEach) {
  for (const MachineShare& share : shares(machine(1, 2), std::vector<std::string>(11, "node 0-1")))
    EXPECT_EQ(share.threads, 1);
}

TEST(MachineShare, WhatALauncherHasPinnedIsNotDividedAgain) {
  const auto all = shares(machine(2, 4), {"node 0,2", "node 4,6", "node 1,3", "node 5,7"});
  for (const MachineShare& share : all) {
    EXPECT_EQ(share.threads, 2);
    EXPECT_THAT(share.cpus, IsEmpty());
  }
  EXPECT_EQ(all[0].numa_node, 0);
  EXPECT_EQ(all[3].numa_node, 1);
}

TEST(MachineShare, MasksThatOverlapCountByThoseWhoShareThem) {
  const auto all = shares(machine(1, 8), {"node 0-7", "node 0-3"});
  EXPECT_EQ(all[0].threads, 6);  // four shared by two, and four
  EXPECT_EQ(all[1].threads, 2);
}

TEST(MachineShare, RanksOnOtherMachinesTakeNothing) {
  const auto all = shares(machine(1, 4), {"a 0-3", "b 0-3", "a 0-3", "a.b 0-3"});
  EXPECT_EQ(all[0].ranks, 2);
  EXPECT_EQ(all[0].threads, 2);
  EXPECT_EQ(all[1].ranks, 1);
  EXPECT_EQ(all[1].threads, 4);
}

TEST(MachineShare, AQuotaIsDividedByTheRanks) {
  Topology topology = machine(1, 64);
  topology.cpu_quota = 7.5;
  for (const MachineShare& share : shares(topology, std::vector<std::string>(4, "node 0-63")))
    EXPECT_EQ(share.threads, 2);
  EXPECT_EQ(machine_share(topology, std::vector<std::string>(1, "node 0-63"), 0).threads, 8);
}

TEST(MachineShare, OfARankAloneIsTheDefault) {
  const Topology topology = discover_topology();
  const std::string text = machine_text(topology);
  const MachineShare share = machine_share(topology, {&text, 1}, 0);
  EXPECT_EQ(share.ranks, 1);
  EXPECT_EQ(share.threads, default_thread_count(topology));
  EXPECT_THAT(share.cpus, IsEmpty());
}

TEST(MachineShare, TextsThatMeanNothingAreRefused) {
  for (const std::string text : {"", "node", "node 1-", "node x", "node 3,,4", "node 1;2", "node 99999999999"})
    EXPECT_THROW(machine_share(machine(1, 2), {&text, 1}, 0), CommunicationError) << text;
}

TEST(MachineShare, AThreadStaysWhereItIsKept) {
  const std::vector<int> allowed = discover_topology().cpus;
  std::thread([&] {
    const int last = allowed.back();
    ASSERT_TRUE(keep_thread_on({&last, 1}));
    EXPECT_THAT(discover_topology().cpus, ElementsAre(last));
    const int absent = 1 << 18;
    EXPECT_FALSE(keep_thread_on({&absent, 1}));
    EXPECT_TRUE(keep_thread_on({}));
    EXPECT_THAT(discover_topology().cpus, ElementsAre(last));
  }).join();
  EXPECT_EQ(discover_topology().cpus, allowed);
}

TEST(MachineShare, APoolThatIsKeptOnACpuRunsThere) {
  const std::vector<int> allowed = discover_topology().cpus;
  if (allowed.size() < 2) GTEST_SKIP() << "one CPU alone cannot tell";
  const auto pool = make_tbb_pool(2, {allowed.back()});
  std::atomic<int> elsewhere{0}, others{0};
  const std::thread::id caller = std::this_thread::get_id();
  for (int round = 0; round < 200 && others == 0; ++round) {
    parallel_for(*pool, 64, 1, [&](std::size_t, std::size_t) {
      if (std::this_thread::get_id() == caller) {
        std::this_thread::yield();
        return;
      }
      ++others;
      if (::sched_getcpu() != allowed.back()) ++elsewhere;
    });
  }
  EXPECT_GT(others, 0);
  EXPECT_EQ(elsewhere, 0);
}

}  // namespace
}  // namespace ballast::offload
