// A run's cost against the bounds that the engine promises (bytes per parameter and step), ZeRO's volumes, and itself.
// SPDX-License-Identifier: Apache-2.0
#include <ballast/base/error.h>
#include <ballast/planner/run_plan.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <string>

namespace ballast::planner {
namespace {

constexpr std::uint64_t kMiB = std::uint64_t{1} << 20;
constexpr int kUnits = 24;
constexpr std::int64_t kUnitElements = 12 * 512 * 512;
constexpr double kParameters = kUnits * static_cast<double>(kUnitElements);

RunModel uniform(int micro_batches = 1, std::int64_t elements = kUnitElements) {
  RunModel model;
  for (int u = 0; u < kUnits; ++u) model.units.push_back({"u" + std::to_string(u), {{"w", {elements}}}});
  for (std::uint32_t u = 0; u < kUnits; ++u) model.order.push_back({.unit = {u}});
  for (std::uint32_t u = kUnits; u-- > 0;) model.order.push_back({.unit = {u}, .gradient = true});
  for (const ExpectedAccess& access : model.order) model.access_flops.push_back(access.gradient ? 2e9 : 1e9);
  model.micro_batches = micro_batches;
  model.tokens = 512;
  return model;
}

Config config_with(Tier states, Tier gradients, Timing timing) {
  Config config;
  config.placement = {.automatic = false, .parameters = states, .gradients = gradients, .optimizer = states};
  config.optimizer.timing = timing;
  config.optimizer.clip_global_norm.reset();
  return config;
}

HardwareProfile machine() {
  HardwareProfile hardware = two_core_profile();
  hardware.devices = 8;
  hardware.network = 25e9;
  return hardware;
}

// "14 read + 12 written, just in time and eager", less the 2 bytes of units that stay open from forward to backward.
TEST(RunPlan, WithEverythingOnNvmeAStepReadsFourteenBytesAndWritesTwelve) {
  for (const Timing timing : {Timing::just_in_time, Timing::eager}) {
    Config config = config_with(Tier::nvme, Tier::host, timing);
    config.budget.device_bytes = plan_run(uniform(), config, machine()).smallest_device_bytes;
    const RunPlan plan = plan_run(uniform(), config, machine());
    EXPECT_NEAR(static_cast<double>(plan.bytes_per_step.nvme_written), 12 * kParameters, 0.001 * kParameters);
    EXPECT_LE(static_cast<double>(plan.bytes_per_step.nvme_read), 14.001 * kParameters);
    EXPECT_GE(static_cast<double>(plan.bytes_per_step.nvme_read), (14 - 2 * 2.0 / kUnits) * kParameters - 1);
    EXPECT_EQ(static_cast<double>(plan.bytes_per_step.device_to_host), 4 * kParameters);
    EXPECT_GE(static_cast<double>(plan.nvme_stored_bytes), 12 * kParameters);
    EXPECT_GE(plan.step_seconds, 0.999 * plan.bound.largest());
    EXPECT_DOUBLE_EQ(plan.flops_per_step, kUnits * 3e9);
  }
}

TEST(RunPlan, WhatIsInHostMemoryMovesNothingToNvme) {
  const RunPlan plan = plan_run(uniform(), config_with(Tier::host, Tier::host, Timing::just_in_time), machine());
  EXPECT_EQ(plan.bytes_per_step.nvme_read + plan.bytes_per_step.nvme_written, 0u);
  EXPECT_EQ(plan.nvme_stored_bytes, 0u);
  EXPECT_EQ(static_cast<double>(plan.parameter_bytes.host), 2 * kParameters);
  EXPECT_EQ(static_cast<double>(plan.optimizer_bytes.host), 10 * kParameters);
  EXPECT_EQ(static_cast<double>(plan.gradient_bytes.host), 4 * kParameters);
}

// Elements of 2 bytes are gathered, gradients of 4 reduced: ZeRO's 3 psi at stage 3, 2 psi below, times (N - 1) / N.
TEST(RunPlan, CollectivesAreThoseOfZero) {
  for (const int ranks : {2, 8, 64}) {
    Config config = config_with(Tier::host, Tier::host, Timing::just_in_time);
    config.budget.device_bytes = plan_run(uniform(), config, machine(), {.world_size = ranks}).smallest_device_bytes;
    const double whole = kParameters * (ranks - 1) / ranks;
    const RunPlan three = plan_run(uniform(), config, machine(), {.world_size = ranks});
    EXPECT_LE(static_cast<double>(three.bytes_per_step.collective), (4 + 2 + 2) * whole);
    EXPECT_GE(static_cast<double>(three.bytes_per_step.collective), (4 + 2 + 2 * (1 - 2.0 / kUnits)) * whole - 1);
    config.budget.device_bytes = 512 * kMiB;
    for (const int stage : {1, 2}) {
      config.zero_stage = stage;
      const RunPlan plan = plan_run(uniform(), config, machine(), {.world_size = ranks});
      EXPECT_EQ(static_cast<double>(plan.bytes_per_step.collective), (4 + 2) * whole) << "stage " << stage;
    }
    config.zero_stage = 0;
    EXPECT_EQ(
        static_cast<double>(plan_run(uniform(), config, machine(), {.world_size = ranks}).bytes_per_step.collective),
        2 * 4 * whole);
  }
}

TEST(RunPlan, MoreMicroBatchesBringTheirGradientsAndNoMoreWrites) {
  const Config config = config_with(Tier::nvme, Tier::host, Timing::just_in_time);
  for (const int micro_batches : {2, 3, 4, 9, 30, 100}) {
    const RunPlan plan = plan_run(uniform(micro_batches), config, machine());
    EXPECT_EQ(static_cast<double>(plan.bytes_per_step.device_to_host), micro_batches * 4 * kParameters);
    EXPECT_EQ(static_cast<double>(plan.bytes_per_step.nvme_written), 12 * kParameters);
    EXPECT_DOUBLE_EQ(plan.flops_per_step, micro_batches * kUnits * 3e9);
    EXPECT_GE(plan.step_seconds, 0.999 * plan.bound.largest());
    if (micro_batches < 30) continue;
    EXPECT_LE(plan.step_seconds, 1.1 * plan.bound.compute) << micro_batches;
  }
}

TEST(RunPlan, TheSmallestBudgetsWorkAndLessDoesNot) {
  for (const bool automatic : {true, false}) {
    Config config = config_with(Tier::nvme, Tier::host, Timing::just_in_time);
    config.placement.automatic = automatic;
    config.budget.device_bytes = 256 * kMiB;  // not for the states
    const RunPlan plan = plan_run(uniform(), config, machine());
    Config host = config, device = config;
    host.budget.host_bytes = plan.smallest_host_bytes;
    device.budget.device_bytes = plan.smallest_device_bytes;
    EXPECT_LE(plan_run(uniform(), host, machine()).peak_host_bytes, plan.smallest_host_bytes);
    EXPECT_LE(plan_run(uniform(), device, machine()).peak_device_bytes, plan.smallest_device_bytes);
    host.budget.host_bytes -= 1024;
    device.budget.device_bytes -= 1024;
    EXPECT_THROW(plan_run(uniform(), host, machine()), PlanError);
    EXPECT_THROW(plan_run(uniform(), device, machine()), PlanError);
  }
}

TEST(RunPlan, TheMemoryMapsAddUpToThePeaks) {
  Config config = config_with(Tier::nvme, Tier::host, Timing::just_in_time);
  config.durability.every_steps = 1;
  const RunPlan plan = plan_run(uniform(), config, machine());
  std::uint64_t host = 0, device = 0;
  for (const MemoryRange& range : plan.host_memory) host += range.bytes;
  for (const MemoryRange& range : plan.device_memory) device += range.bytes;
  EXPECT_EQ(device, plan.peak_device_bytes);
  EXPECT_LE(host, plan.peak_host_bytes);
  EXPECT_GE(host + 4096, plan.peak_host_bytes);
  EXPECT_GE(static_cast<double>(plan.nvme_stored_bytes), 2 * 12 * kParameters) << "two slots";
}

// More chunks than are stepped one by one: the bytes stay what they are.
TEST(RunPlan, AModelOfVeryManyChunksIsSteppedInLargerOnes) {
  Config config = config_with(Tier::nvme, Tier::nvme, Timing::just_in_time);
  const std::int64_t elements = std::int64_t{1} << 30;
  config.budget.device_bytes = std::uint64_t{64} << 30;
  const RunPlan plan = plan_run(uniform(1, elements), config, machine());
  EXPECT_GT(plan.chunks_merged, 1);
  EXPECT_EQ(plan.bytes_per_step.nvme_written, (12 + 4) * kUnits * static_cast<std::uint64_t>(elements));
  EXPECT_GE(plan.step_seconds, 0.999 * plan.bound.largest());
}

TEST(RunPlan, AFasterLaneShortensTheStepThatItLimits) {
  const Config config = config_with(Tier::nvme, Tier::host, Timing::just_in_time);
  const RunModel model = uniform();
  const RunPlan plan = plan_run(model, config, machine());
  ASSERT_EQ(plan.bound.limiting(), "nvme");
  const std::vector<Change> changes = try_changes(model, config, machine(), {}, plan);
  ASSERT_FALSE(changes.empty());
  EXPECT_TRUE(std::is_sorted(changes.begin(), changes.end(), [](auto& a, auto& b) { return a.gain > b.gain; }));
  const auto drives =
      std::find_if(changes.begin(), changes.end(), [](auto& c) { return c.what == "twice the NVMe drives"; });
  const auto compute =
      std::find_if(changes.begin(), changes.end(), [](auto& c) { return c.what == "twice the compute"; });
  ASSERT_TRUE(drives != changes.end() && compute != changes.end());
  EXPECT_GT(drives->gain, 1.5);
  EXPECT_LT(compute->gain, 1.2);
}

TEST(RunPlan, MoreTokensTurnAStepFromStorageToCompute) {
  const auto curve =
      tokens_curve(uniform(), config_with(Tier::nvme, Tier::host, Timing::just_in_time), machine(), {}, {1, 4, 100});
  ASSERT_EQ(curve.size(), 3u);
  EXPECT_EQ(curve.front().limited_by, "nvme");
  EXPECT_EQ(curve.back().limited_by, "compute");
  EXPECT_GT(curve.back().tokens_per_second, curve.front().tokens_per_second);
}

TEST(RunPlan, DrivesWearByWhatAllRanksOfANodeWrite) {
  HardwareProfile hardware = machine();
  hardware.nvme_endurance = 1e15;
  const Config config = config_with(Tier::nvme, Tier::host, Timing::just_in_time);
  const RunPlan plan = plan_run(uniform(), config, hardware, {.world_size = 8});
  const double written = 8 * static_cast<double>(plan.bytes_per_step.nvme_written);
  EXPECT_NEAR(plan.nvme_written_per_day, written / plan.step_seconds * 86400, 1e-6 * plan.nvme_written_per_day);
  EXPECT_NEAR(plan.endurance_days, 1e15 / plan.nvme_written_per_day, 1e-6 * plan.endurance_days);
}

TEST(RunPlan, WhatMeansNothingIsRefused) {
  const Config config = config_with(Tier::nvme, Tier::host, Timing::just_in_time);
  HardwareProfile no_drives = machine();
  no_drives.nvme_read = no_drives.nvme_write = 0;
  EXPECT_THROW(plan_run(uniform(), config, no_drives), ConfigError);
  EXPECT_THROW(plan_run({}, config, machine()), ConfigError);
  RunModel wrong = uniform();
  wrong.order.push_back({.unit = {kUnits}});
  wrong.access_flops.push_back(0);
  EXPECT_THROW(plan_run(wrong, config, machine()), ConfigError);
  RunModel uneven = uniform();
  uneven.access_flops.pop_back();
  EXPECT_THROW(plan_run(uneven, config, machine()), ConfigError);
  EXPECT_THROW(plan_run(uniform(), config, machine(), {.world_size = 0}), ConfigError);
}

}  // namespace
}  // namespace ballast::planner
