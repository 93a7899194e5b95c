// Memory in closed form against what the papers and DeepSpeed's documentation print.
// SPDX-License-Identifier: Apache-2.0
#include <ballast/base/error.h>
#include <ballast/planner/memory.h>
#include <ballast/planner/traffic.h>
#include <gtest/gtest.h>

#include <cmath>

namespace ballast::planner {
namespace {

constexpr double kGB = 1e9, kGiB = 0x1p30, kTiB = 0x1p40;

// ZeRO, table 1, gigabytes of a 7.5 B model.
TEST(PlannerMemory, StatesPerDeviceAreThoseOfZerosTableOne) {
  struct Cell {
    int stage;
    double ranks, gigabytes;
  };
  for (const Cell& cell : {Cell{1, 4, 52.5}, Cell{1, 16, 35.6}, Cell{1, 256, 30.4}, Cell{2, 64, 16.6},
                           Cell{2, 1024, 15.1}, Cell{3, 4, 30}, Cell{3, 1, 120}, Cell{0, 64, 120}}) {
    EXPECT_NEAR(model_state_bytes(7.5e9, cell.stage, cell.ranks) / kGB, cell.gigabytes, 0.051)
        << "stage " << cell.stage << ", " << cell.ranks << " ranks";
  }
}

TEST(PlannerMemory, NothingIsSharedByOneRankAndAStageIsNeverLargerThanTheOneBefore) {
  for (int stage = 0; stage <= 3; ++stage) EXPECT_EQ(model_state_bytes(1e9, stage, 1), 16e9);
  for (int stage = 1; stage <= 3; ++stage)
    EXPECT_LT(model_state_bytes(1e9, stage, 8), model_state_bytes(1e9, stage - 1, 8));
}

TEST(PlannerMemory, AnOffloadedModelLiesWhereZeroOffloadAndZeroInfinityPutIt) {
  const TierBytes offload = tier_bytes(OffloadPlacement::optimizer_in_host, 1e9, 4);
  EXPECT_EQ(offload.device, 2e9);
  EXPECT_EQ(offload.host, 14e9 / 4);
  EXPECT_EQ(offload.nvme, 0);
  const TierBytes host = tier_bytes(OffloadPlacement::all_in_host, 1e9, 1, 3, 1e8);
  EXPECT_EQ(host.device, 4e8);
  EXPECT_EQ(host.host, 18e9);
  const TierBytes split = tier_bytes(OffloadPlacement::parameters_host_rest_nvme, 1e9, 2);
  EXPECT_EQ(split.host, 1e9);
  EXPECT_EQ(split.nvme, 8e9);
  EXPECT_EQ(tier_bytes(OffloadPlacement::all_on_nvme, 1e9, 2).nvme, 9e9);
  EXPECT_EQ(tier_bytes(OffloadPlacement::none, 1e9, 4, 3, 1e8).device, 4e9 + 4e8);
  EXPECT_EQ(tier_bytes(OffloadPlacement::partitioned_in_host, 1e9, 4).host, 4e9);
}

TEST(PlannerMemory, SplitMasterStatesTakeTwelveBytesAndLessWithNarrowMoments) {
  EXPECT_EQ(split_master_bytes(4, true), 12);
  EXPECT_EQ(split_master_bytes(4, false), 10);
  EXPECT_EQ(split_master_bytes(2, true), 8);
  EXPECT_NEAR(split_master_bytes(kInt8MomentBytes, true), 6.03, 0.005);
}

// One DGX-2: 28 TB of NVMe and 20 bytes; 1.5 TB of host memory; 32 GB per GPU with and without sharing.
TEST(PlannerMemory, CapacityIsMemoryOverBytesPerParameter) {
  EXPECT_DOUBLE_EQ(largest_model(28e12, 20), 1.4e12);
  EXPECT_DOUBLE_EQ(largest_model(1.5e12, 20), 75e9);
  EXPECT_NEAR(largest_model_on_devices(32e9, 2, 16), 11.1e9, 0.05e9);
  EXPECT_DOUBLE_EQ(largest_model_on_devices(32e9, 0, 64, 16), 32e9);
}

// The t5-3b example of DeepSpeed's documentation: 2851 M parameters, 32 M in the largest layer, 8 GPUs.
TEST(PlannerMemory, DeepSpeedsEstimatesAreTheDocumentedOnes) {
  DeepSpeedCase input{.parameters = 2851e6, .largest_layer = 32e6, .gpus_per_node = 8, .stage = 2};
  EXPECT_NEAR(deepspeed_estimate(input).device_bytes / kGiB, 15.93, 0.01);
  input.offload_optimizer = true;
  EXPECT_NEAR(deepspeed_estimate(input).device_bytes / kGiB, 5.31, 0.01);
  EXPECT_NEAR(deepspeed_estimate(input).host_bytes / kGiB, 127.45, 0.02);
  input.stage = 3;
  EXPECT_NEAR(deepspeed_estimate(input).host_bytes / kGiB, 63.72, 0.02);
  input.offload_optimizer = false;
  EXPECT_NEAR(deepspeed_estimate(input).device_bytes / kGiB, 6.10, 0.02);
}

// ZeRO-Infinity, figure 2a: a row of every column.
TEST(PlannerMemory, TransformersAreAsLargeAsInZeroInfinitysFigure) {
  const TransformerShape trillion{128, 25600, 256};
  EXPECT_NEAR(transformer_parameters(trillion) / 1e12, 1.01, 0.005);
  EXPECT_NEAR(transformer_state_bytes(trillion) / kTiB, 18.31, 0.01);
  EXPECT_NEAR(checkpoint_bytes(trillion, {32, 1024, 1}) / kTiB, 0.20, 0.006);
  EXPECT_NEAR(activation_bytes(trillion, {32, 1024, 1}) / kTiB, 7.13, 0.01);
  EXPECT_NEAR(model_state_working_bytes(trillion) / kGiB, 9.77, 0.01);
  EXPECT_DOUBLE_EQ(model_state_working_bytes(trillion, 4), model_state_working_bytes(trillion) / 4);
  EXPECT_NEAR(2 * activation_working_elements(trillion, {2, 1024, 1}) / kGiB, 3.56, 0.01);
}

TEST(PlannerMemory, SenselessInputsAreRefused) {
  EXPECT_THROW(model_state_bytes(1e9, 4, 8), ConfigError);
  EXPECT_THROW(model_state_bytes(1e9, -1, 8), ConfigError);
  EXPECT_THROW(model_state_bytes(1e9, 3, 0), ConfigError);
  EXPECT_THROW(model_state_bytes(std::nan(""), 3, 8), ConfigError);
  EXPECT_THROW(largest_model(1e9, 0), ConfigError);
  EXPECT_THROW(deepspeed_estimate({.parameters = 1, .stage = 1}), ConfigError);
  EXPECT_THROW(deepspeed_estimate({.parameters = 1, .stage = 3, .offload_parameters = true}), ConfigError);
  EXPECT_THROW(transformer_parameters({0, 1024, 16}), ConfigError);
}

}  // namespace
}  // namespace ballast::planner
