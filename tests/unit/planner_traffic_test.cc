// Traffic in closed form against the volumes of ZeRO and the tables of bytes per parameter.
// SPDX-License-Identifier: Apache-2.0
#include <ballast/base/error.h>
#include <ballast/planner/traffic.h>
#include <gtest/gtest.h>

#include <string>

namespace ballast::planner {
namespace {

TEST(PlannerTraffic, CollectivesMoveTwoOrThreeElementsPerParameter) {
  for (int stage = 0; stage <= 2; ++stage) EXPECT_EQ(collective_elements({.stage = stage}), 2);
  EXPECT_EQ(collective_elements({.stage = 3}), 3);
  EXPECT_DOUBLE_EQ(collective_elements({.stage = 3, .ranks = 4}), 3 * 0.75);
  EXPECT_EQ(collective_elements({.stage = 3, .ranks = 1}), 0);
}

TEST(PlannerTraffic, MicroBatchesInTurnGatherEachTimeAndLayerByLayerOnce) {
  EXPECT_EQ(collective_elements({.stage = 3, .micro_batches = 4}), 2 * 4 + 1);
  EXPECT_EQ(collective_elements({.stage = 3, .micro_batches = 4, .reduce_each_micro_batch = true}), 3 * 4);
  EXPECT_EQ(collective_elements({.stage = 3, .micro_batches = 4, .vertical = true}), 3);
}

TEST(PlannerTraffic, NvmeBytesAreThoseOfTheTableOfLayouts) {
  struct Row {
    const char* name;
    double read, written;
  };
  for (const Row& row :
       {Row{"a-dram-params", 16, 16}, Row{"a-all", 20, 18}, Row{"a-all-recompute", 22, 18}, Row{"mlp", 12, 12},
        Row{"b-fused", 14, 12}, Row{"b-unfused", 16, 12}, Row{"b-hi-dram", 10, 10}, Row{"bf16mv-fused", 10, 8},
        Row{"bf16mv-hi-dram", 6, 6}, Row{"c-fused", 8.03125, 6.03125}, Row{"c-hi-dram", 4.03125, 4.03125},
        Row{"d-sr", 6.03125, 4.03125}, Row{"d-sr-hi-dram", 2.03125, 2.03125}}) {
    const NvmeBytes bytes = nvme_bytes(nvme_layout(row.name));
    EXPECT_DOUBLE_EQ(bytes.read, row.read) << row.name;
    EXPECT_DOUBLE_EQ(bytes.written, row.written) << row.name;
  }
  EXPECT_THROW(nvme_layout("e-fused"), ConfigError);
  EXPECT_THROW(nvme_layout(""), ConfigError);
}

TEST(PlannerTraffic, LinksCarryWhatTheTableOfPlacementsSays) {
  const LinkBytes offload = link_bytes(LinkPlacement::zero_offload, 1);
  EXPECT_EQ(offload.host_to_device, 2);
  EXPECT_EQ(offload.device_to_host, 2);
  EXPECT_EQ(offload.network, 0);
  EXPECT_EQ(link_bytes(LinkPlacement::zero_offload, kManyRanks).network, 4);
  const LinkBytes host = link_bytes(LinkPlacement::all_in_host, 2, true);
  EXPECT_EQ(host.host_to_device, 3);
  EXPECT_EQ(host.network, 3);
  EXPECT_EQ(host.nvme_read, 0);
  EXPECT_EQ(link_bytes(LinkPlacement::all_on_nvme, 2, true).nvme_read, 11);
  EXPECT_EQ(link_bytes(LinkPlacement::parameters_host_rest_nvme, 4).nvme_written, 4);
  EXPECT_EQ(link_bytes(LinkPlacement::split_master_on_nvme, 1).nvme_read, 14);
}

TEST(PlannerTraffic, OneCpuAdamStepTouchesTheBytesOfItsLayout) {
  EXPECT_EQ(adam_bytes(adam_layout("fp32")), 28);
  EXPECT_EQ(adam_bytes(adam_layout("fp32-grad32")), 30);
  EXPECT_EQ(adam_bytes(adam_layout("hilo")), 26);
  EXPECT_EQ(adam_bytes(adam_layout("hilo-bf16")), 18);
  EXPECT_EQ(adam_bytes(adam_layout("hilo-8bit")), 14.0625);
  EXPECT_THROW(adam_layout("sgd"), ConfigError);
}

TEST(PlannerTraffic, OnlyAFixedPartInHostMemorySavesTraffic) {
  EXPECT_EQ(uncached_share(0.25), 0.75);
  EXPECT_EQ(uncached_share(0.25, false), 1);
  EXPECT_EQ(uncached_share(1, false), 0);
  EXPECT_THROW(uncached_share(1.5), ConfigError);
}

TEST(PlannerTraffic, FewerBytesGainTheirRatioAndMoreWhereComputeHidesThem) {
  EXPECT_DOUBLE_EQ(storage_bound_speed_up(20.0 / 32), 1.6);
  EXPECT_DOUBLE_EQ(largest_speed_up(20.0 / 32), 2.6);
  EXPECT_DOUBLE_EQ(largest_speed_up(1), 2);
}

}  // namespace
}  // namespace ballast::planner
