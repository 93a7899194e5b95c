// One rank of up to 1024 on the virtual clock: volumes counted from what the schedule did against ZeRO's, and step
// times. Prints the tables. SPDX-License-Identifier: Apache-2.0
#include <ballast/simulate/scaling.h>
#include <gtest/gtest.h>

#include <cstdint>
#include <cstdio>

namespace ballast::simulate {
namespace {

// A drive of 6 GB/s, PCIe of 25 GB/s, an update of 60 GB/s; maths that take 1 ms for each 25 MB of parameters.
HardwareModel profile() {
  HardwareModel hardware;
  hardware.read = hardware.write = {6'000'000'000, 80'000};
  hardware.copy_in = hardware.copy_out = {25'000'000'000, 10'000};
  hardware.cpu = {60'000'000'000, 5'000};
  hardware.compute_bytes_per_second = 25'000'000'000;
  return hardware;
}

// A steady step: the last but one.
StepCount steady(const RankSimulation& run) { return run.steps[run.steps.size() - 2]; }

RankSimulation run_case(const ScalingCase& scaling, Index world_size) {
  CollectiveModel collectives;
  collectives.world_size = world_size;
  const Plan plan = scaling_plan(scaling, world_size);
  return simulate_rank(plan, profile(), collectives);
}

TEST(Scaling, VolumesPerRankAreThoseOfZeroLessWhatIsResident) {
  for (const Timing timing : {Timing::just_in_time, Timing::eager, Timing::after_backward}) {
    for (int stage = 0; stage <= 3; ++stage) {
      for (const Index world_size : {2u, 8u, 64u, 1024u}) {
        for (const Index spare : {0u, 3u}) {
          ScalingCase scaling;
          scaling.zero_stage = stage;
          scaling.timing = timing;
          scaling.spare_units = spare;
          const RankSimulation run = run_case(scaling, world_size);
          ASSERT_EQ(run.failure, "") << "stage " << stage << ", " << world_size << " ranks";
          const StepCount step = steady(run);
          const std::uint64_t unit = scaling.unit_elements / world_size * (world_size - 1);
          const std::uint64_t model = scaling.units * unit;
          if (stage == 0) {
            // Gradients are reduced to all: 2 psi, and nothing is gathered.
            EXPECT_EQ(step.reduced_elements, 2 * model);
            EXPECT_EQ(step.gathered_elements, 0u);
            continue;
          }
          EXPECT_EQ(step.reduced_elements, model);
          if (stage < 3) {
            EXPECT_EQ(step.gathered_elements, model);  // together 2 psi
            continue;
          }
          // 3 psi, less the units that forward leaves on the device for backward.
          EXPECT_LE(step.gathered_elements, 2 * model - unit);
          EXPECT_GE(step.gathered_elements, 2 * model - (spare + 2) * unit);
        }
      }
    }
  }
}

TEST(Scaling, OneRankNeedsNoLink) {
  const RankSimulation run = run_case({}, 1);
  ASSERT_EQ(run.failure, "");
  EXPECT_EQ(steady(run).link_bytes, 0u);
  // 14 bytes read and 12 written, less what forward leaves on the device.
  const std::uint64_t elements = 24 * std::uint64_t{12 * 1024 * 1024};
  EXPECT_LE(steady(run).drive_bytes, 26 * elements);
  EXPECT_GE(steady(run).drive_bytes, 24 * elements);
}

TEST(Scaling, CollectivesCostStepsAndBytes) {
  // One unit, and nothing else takes time: a gather of the only parameters, then a reduction.
  ScalingCase scaling;
  scaling.units = 1;
  scaling.steps = 3;
  scaling.zero_stage = 2;
  scaling.unit_elements = 1024;
  scaling.optimizer = schedule::Tier::host;
  HardwareModel hardware;
  for (LaneModel* lane : {&hardware.read, &hardware.write, &hardware.copy_in, &hardware.copy_out, &hardware.cpu}) {
    *lane = {1'000'000'000'000'000, 0};
  }
  hardware.compute_bytes_per_second = 1'000'000'000'000'000;
  CollectiveModel collectives;
  collectives.world_size = 8;
  collectives.link = {1'000'000'000, 1'000};  // 1 ns a byte, 1 us a step
  const Plan plan = scaling_plan(scaling, 8);
  const RankSimulation run = simulate_rank(plan, hardware, collectives);
  ASSERT_EQ(run.failure, "");
  // Seven steps each; 7/8 of 1024 elements of 2 and of 4 bytes; agreement: there and back over 8 ranks in 3 steps.
  EXPECT_EQ(steady(run).time_ns, 7'000u + 896 * 2 + 7'000 + 896 * 4 + 2 * 3 * 1'000);
}

TEST(Scaling, StepTimesOfOneTo1024Ranks) {
  for (const int stage : {3, 2}) {
    std::printf("stage %d, 302 M parameters, states on NVMe, just in time\n", stage);
    std::printf("%6s %12s %18s %18s %14s\n", "ranks", "step, ms", "link, MB a rank", "drive, MB a rank", "of bound");
    std::uint64_t before = ~std::uint64_t{0};
    for (Index world_size = 1; world_size <= 1024; world_size *= 2) {
      ScalingCase scaling;
      scaling.zero_stage = stage;
      scaling.spare_units = 3;
      const RankSimulation run = run_case(scaling, world_size);
      ASSERT_EQ(run.failure, "") << world_size << " ranks";
      const StepCount step = steady(run);
      std::printf("%6u %12.2f %18.1f %18.1f %14.2f\n", world_size, static_cast<double>(step.time_ns) / 1e6,
                  static_cast<double>(step.link_bytes) / 1e6, static_cast<double>(step.drive_bytes) / 1e6,
                  static_cast<double>(run.bound_ns) / static_cast<double>(run.time_ns));
      EXPECT_GE(run.time_ns, run.bound_ns);
      // More drives share the states: never slower by more than the ring's own steps.
      const std::uint64_t ring_ns =
          3 * std::uint64_t{scaling.units} * (world_size - 1) * CollectiveModel{}.link.latency_ns;
      EXPECT_LE(step.time_ns, before + before / 50 + ring_ns) << world_size << " ranks";
      before = step.time_ns;
    }
  }
}

}  // namespace
}  // namespace ballast::simulate
