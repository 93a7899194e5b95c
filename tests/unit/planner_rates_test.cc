// Time in closed form against the readings of ZeRO-Infinity and of data sheets; and the streamed step on the virtual
// clock against its bound. SPDX-License-Identifier: Apache-2.0
#include <ballast/base/error.h>
#include <ballast/planner/rates.h>
#include <ballast/planner/streamed_step.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>

namespace ballast::planner {
namespace {

TEST(PlannerRates, EfficiencyIsWhatZeroInfinityReadsOffItsFigure) {
  const double peak = 70e12;
  const IntensityCase states{.moved = Moved::optimizer_states, .batch = 2, .sequence = 1024};
  EXPECT_NEAR(efficiency(arithmetic_intensity(states), 1.5e12, peak), 0.916, 0.001);
  EXPECT_NEAR(required_bandwidth(0.9, arithmetic_intensity(states), peak), 1.23e12, 0.01e12);
  const IntensityCase activations{.moved = Moved::activations, .hidden = 2048};
  EXPECT_NEAR(efficiency(arithmetic_intensity(activations), 2e9, peak), 0.584, 0.001);
  const IntensityCase parameters{.batch = 1, .sequence = 1024};
  EXPECT_NEAR(efficiency(arithmetic_intensity(parameters), 70e9, peak), 0.506, 0.001);
  EXPECT_EQ(overlapped_efficiency(arithmetic_intensity(parameters), 70e9, peak), 1);
  EXPECT_DOUBLE_EQ(efficiency(1024, required_bandwidth(0.7, 1024, peak), peak), 0.7);
}

TEST(PlannerRates, DrivesTakeTurnsUnlessTheyAreMeasuredDuplex) {
  EXPECT_DOUBLE_EQ(nvme_seconds(14e9, 12e9, 7e9, 4e9), 5);
  EXPECT_DOUBLE_EQ(nvme_seconds(14e9, 12e9, 7e9, 4e9, 2), 3);
  EXPECT_DOUBLE_EQ(nvme_seconds(14e9, 12e9, 7e9, 4e9, 1.25), 4);
  EXPECT_EQ(nvme_seconds(0, 0, 0, 0), 0);
  EXPECT_THROW(nvme_seconds(1, 1, 1, 1, 0.5), ConfigError);
  EXPECT_THROW(nvme_seconds(1, 0, 0, 1), ConfigError);
}

// Gen4 as nvbandwidth shows it: 26 GB/s one way, 18.6 each when both run.
TEST(PlannerRates, ABoundIsTheLongestLaneAndCopiesSlowEachOtherWhereMeasured) {
  StepWork work{.flops = 60e12, .host_to_device = 26e9, .device_to_host = 26e9, .nvme_read = 1e9, .memory = 26e9};
  StepRates rates{.flops = 100e12,
                  .host_to_device = 26e9,
                  .device_to_host = 26e9,
                  .nvme_read = 5e9,
                  .nvme_write = 5e9,
                  .memory = 100e9,
                  .copies_duplex = 2 * 18.6 / 26};
  const StepBound bound = step_bound(work, rates);
  EXPECT_DOUBLE_EQ(bound.compute, 0.6);
  EXPECT_DOUBLE_EQ(bound.host_to_device, 1);
  EXPECT_NEAR(bound.copies, 26 / 18.6, 1e-12);
  EXPECT_EQ(bound.collective, 0);
  EXPECT_EQ(bound.largest(), bound.copies);
  EXPECT_EQ(bound.limiting(), "copies");
  work.nvme_written = 100e9;
  EXPECT_EQ(step_bound(work, rates).limiting(), "nvme");
}

TEST(PlannerRates, LinksCarryWhatTheirDataSheetsSay) {
  EXPECT_NEAR(pcie_rate(16e9, 16, 128.0 / 130), 31.5e9, 0.05e9);
  EXPECT_NEAR(pcie_rate(64e9, 16, 242.0 / 256), 121e9, 0.1e9);
  EXPECT_NEAR(pcie_measured_rate(3, 16), 12e9, 0.1e9);
  EXPECT_THROW(pcie_measured_rate(7, 16), ConfigError);
  EXPECT_NEAR(memory_rate(4800e6, 16), 614.4e9, 1);
  EXPECT_NEAR(memory_rate(3200e6, 16), 409.6e9, 1);
  EXPECT_EQ(network_rate(800e9, 1), 100e9);
}

TEST(PlannerRates, EnduranceIsRatedBytesOverBytesWritten) {
  // A consumer drive of 4 TB rated for 2400 TB; 10 billion parameters.
  EXPECT_NEAR(endurance_steps(2400e12, 18 * 10e9), 13.3e3, 50);
  EXPECT_NEAR(endurance_steps(2400e12, 12 * 10e9), 20e3, 1);
  EXPECT_NEAR(endurance_steps(2400e12, 6.03125 * 10e9), 39.8e3, 50);
  EXPECT_DOUBLE_EQ(endurance_days(86400e9, 1e9, 2), 2);
  EXPECT_DOUBLE_EQ(flash_life_bytes(30000, 50, 1e12), 1.5e18);
}

TEST(PlannerRates, ComputeAndGenerationFollowTheirCounts) {
  EXPECT_EQ(step_flops(1e9, 1000), 8e12);
  EXPECT_EQ(step_flops(1e9, 1000, kFlopsPerParameterToken), 6e12);
  EXPECT_NEAR(share_of_peak(13.99e9, 1349, 6, 165.2e12), 0.685, 0.001);
  EXPECT_NEAR(streamed_tokens_per_second(70.6e9, 96, 52e9), 35.4, 0.1);
  EXPECT_DOUBLE_EQ(cpu_adam_seconds(1e9, 28, 112e9), 0.25);
}

TEST(StreamedStep, IsNeverFasterThanItsBoundAndNearItWhereOneLaneDominates) {
  for (const double compute : {0.1, 2.0, 8.0, 100.0}) {
    for (const double duplex : {1.0, 1.5, 2.0}) {
      const StreamedPrediction run = simulate_streamed_step({.parameters = 1e9,
                                                             .compute_seconds = compute,
                                                             .nvme_read_per_parameter = 14,
                                                             .nvme_written_per_parameter = 12,
                                                             .read_bytes_per_second = 7e9,
                                                             .write_bytes_per_second = 4e9,
                                                             .duplex = duplex});
      EXPECT_DOUBLE_EQ(run.bound_seconds, std::max(compute, nvme_seconds(14e9, 12e9, 7e9, 4e9, duplex)));
      EXPECT_GE(run.step_seconds, 0.999 * run.bound_seconds) << compute << " s of compute, duplex " << duplex;
      if (compute > 1 && compute < 50) continue;
      EXPECT_LE(run.step_seconds, 1.1 * run.bound_seconds) << compute << " s of compute, duplex " << duplex;
    }
  }
}

TEST(StreamedStep, UpdatesAfterBackwardAddUp) {
  StreamedStep step{.parameters = 1e9,
                    .compute_seconds = 5,
                    .nvme_read_per_parameter = 16,
                    .nvme_written_per_parameter = 16,
                    .read_bytes_per_second = 25e9,
                    .write_bytes_per_second = 25e9,
                    .overlapped = false};
  EXPECT_NEAR(simulate_streamed_step(step).step_seconds, 5 + 1.28, 0.05);
  step.compute_seconds = 0;
  EXPECT_NEAR(simulate_streamed_step(step).step_seconds, 1.28, 0.05);
  step.nvme_written_per_parameter = 0;
  EXPECT_NEAR(simulate_streamed_step(step).step_seconds, 0.64, 0.03);
}

TEST(StreamedStep, SenselessStepsAreRefused) {
  EXPECT_THROW(simulate_streamed_step({}), ConfigError);
  EXPECT_THROW(simulate_streamed_step({.parameters = 1e9, .nvme_read_per_parameter = 1}), ConfigError);
  EXPECT_THROW(simulate_streamed_step({.parameters = 1e9, .compute_seconds = std::nan("")}), ConfigError);
  EXPECT_THROW(simulate_streamed_step({.parameters = 1e9, .units = 0}), ConfigError);
}

}  // namespace
}  // namespace ballast::planner
