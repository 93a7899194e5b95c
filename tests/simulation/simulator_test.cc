// The virtual clock: agreement with arithmetic by hand, the bound, and that a seed means one run.
// SPDX-License-Identifier: Apache-2.0
#include <ballast/simulate/random_plan.h>
#include <ballast/simulate/simulator.h>
#include <gtest/gtest.h>

#include <cstdint>
#include <set>
#include <string>

namespace ballast::simulate {
namespace {

// One byte of parameters takes 1 us on every lane, without latency.
HardwareModel simple_hardware() {
  HardwareModel hardware;
  for (LaneModel* lane : {&hardware.read, &hardware.write, &hardware.copy_in, &hardware.copy_out, &hardware.cpu}) {
    *lane = {1'000'000, 0};
  }
  hardware.compute_bytes_per_second = 1'000'000;
  return hardware;
}

constexpr std::uint64_t kUs = 1'000;

Plan forward_only(Index units) {
  Shape shape;
  shape.units = units;
  Plan plan = make_plan(shape, Timing::just_in_time);  // 2 bytes of parameters for each chunk
  expect_default_pass(plan, 1);
  ProgramWriter(plan).evaluation_pass();
  return plan;
}

TEST(Simulator, AgreesWithArithmeticByHandForOneUnit) {
  const Plan plan = forward_only(1);
  const Simulation run = simulate(plan, simple_hardware(), 0);
  ASSERT_EQ(run.failure, "");
  EXPECT_EQ(run.time_ns, (2 + 2 + 2) * kUs);  // read, copy, compute: nothing to overlap
  EXPECT_EQ(run.tasks, 2u);
  EXPECT_EQ(run.bound_ns, 2 * kUs);
}

TEST(Simulator, OverlapsUnitsThatFollowEachOther) {
  Plan plan = forward_only(3);
  plan.slab_bytes = 8;
  plan.run_ahead = 100;
  const Simulation run = simulate(plan, simple_hardware(), 0);
  ASSERT_EQ(run.failure, "");
  EXPECT_EQ(run.time_ns, (3 * 2 + 2 + 2) * kUs);  // three reads in turn, then the last copy and its maths
}

// Ten units, a read and the maths of each 20 ms: 220 ms where what comes next is read meanwhile, 400 ms where not.
TEST(Simulator, ReadsAheadHideBehindMaths) {
  HardwareModel hardware = simple_hardware();
  hardware.read.bytes_per_second = hardware.compute_bytes_per_second = 100;  // 2 bytes a unit
  hardware.copy_in.bytes_per_second = 1'000'000'000;
  constexpr std::uint64_t kMs = 1'000'000;
  Plan plan = forward_only(10);
  plan.slab_bytes = 40;
  plan.run_ahead = 100;
  const Simulation ahead = simulate(plan, hardware, 0);
  ASSERT_EQ(ahead.failure, "");
  EXPECT_NEAR(static_cast<double>(ahead.time_ns), 220.0 * kMs, 1.0 * kMs);
  Plan alone = plan;
  alone.slab_bytes = 2;  // room for one unit
  alone.run_ahead = 1;
  const Simulation serial = simulate(alone, hardware, 0);
  ASSERT_EQ(serial.failure, "");
  EXPECT_GE(serial.time_ns, 400 * kMs);
}

TEST(Simulator, AddsTheLatencyOfEachTask) {
  const Plan plan = forward_only(1);
  HardwareModel hardware = simple_hardware();
  hardware.read.latency_ns = 70;
  hardware.copy_in.latency_ns = 5;
  const Simulation run = simulate(plan, hardware, 0);
  EXPECT_EQ(run.time_ns, 6 * kUs + 75);
}

// 24 units, everything on NVMe, one drive.
Plan training(Timing timing, Index slots) {
  Shape shape;
  shape.units = 24;
  shape.chunks_per_unit = 2;
  Plan plan = make_plan(shape, timing);
  plan.limits.fetch_slots = slots;
  plan.limits.update_slots = slots;
  plan.limits.gradient_slots = slots;
  plan.limits.entries = 200;
  plan.limits.jobs = 1000;
  plan.run_ahead = 1000;
  expect_default_pass(plan, 1);
  plan.slab_bytes = 4 * plan.slab_bytes;
  ProgramWriter writer(plan);
  for (int s = 0; s < 6; ++s) writer.step(1, true);
  writer.settle();
  return plan;
}

TEST(Simulator, MovesTheBytesThatTheTimingPromises) {
  // Per byte pair of parameters: 12 read and written for the update; 2 more for backward, but for the units that
  // forward leaves on the device; eager reads 2 for forward and 12 with backward.
  for (const Timing timing : {Timing::just_in_time, Timing::eager}) {
    const Plan plan = training(timing, 8);
    const Simulation run = simulate(plan, simple_hardware(), 0);
    ASSERT_EQ(run.failure, "");
    const std::uint64_t chunks = 48, steps = 6;
    const auto read = run.bytes[static_cast<int>(Resource::drive_read)];
    EXPECT_EQ(run.bytes[static_cast<int>(Resource::drive_write)], steps * chunks * 12);
    EXPECT_LE(read, steps * chunks * 14 + chunks * 2);
    EXPECT_GE(read, steps * chunks * 12);
    EXPECT_EQ(run.reliefs, 0u);
    EXPECT_EQ(run.deviations, 0u);
  }
}

TEST(Simulator, KeepsTheDriveBusyWhenItIsTheSlowestPart) {
  // Everything else is twenty times as fast: what is left of the time is the filling of the pipeline.
  for (const Timing timing : {Timing::just_in_time, Timing::eager}) {
    HardwareModel hardware = simple_hardware();
    for (LaneModel* lane : {&hardware.copy_in, &hardware.copy_out, &hardware.cpu}) lane->bytes_per_second = 20'000'000;
    hardware.compute_bytes_per_second = 20'000'000;
    const Simulation run = simulate(training(timing, 8), hardware, 0);
    ASSERT_EQ(run.failure, "");
    EXPECT_GE(run.time_ns, run.bound_ns);
    EXPECT_LE(run.time_ns, run.bound_ns + run.bound_ns / 20) << "timing " << static_cast<int>(timing);
  }
}

TEST(Simulator, HidesAllTrafficBehindMathsThatTakeLonger) {
  for (const Timing timing : {Timing::just_in_time, Timing::eager}) {
    HardwareModel hardware = simple_hardware();
    hardware.compute_bytes_per_second = 20'000;
    const Simulation run = simulate(training(timing, 8), hardware, 0);
    ASSERT_EQ(run.failure, "");
    EXPECT_EQ(run.bound_ns, run.busy_ns[static_cast<int>(Resource::compute)]);
    EXPECT_LE(run.time_ns, run.bound_ns + run.bound_ns / 20) << "timing " << static_cast<int>(timing);
  }
}

TEST(Simulator, GivesTheSameRunForTheSameSeedAndAnotherForAnother) {
  const Plan plan = training(Timing::just_in_time, 2);
  HardwareModel hardware = simple_hardware();
  hardware.jitter_ns = 5'000;
  std::set<std::uint64_t> hashes;
  for (std::uint64_t seed = 0; seed < 20; ++seed) {
    const Simulation a = simulate(plan, hardware, seed);
    const Simulation b = simulate(plan, hardware, seed);
    ASSERT_EQ(a.failure, "");
    EXPECT_EQ(a.trace_hash, b.trace_hash);
    EXPECT_EQ(a.time_ns, b.time_ns);
    EXPECT_EQ(a.step_ns, b.step_ns);
    hashes.insert(a.trace_hash);
  }
  EXPECT_EQ(hashes.size(), 20u);
}

TEST(Simulator, ReportsEachStep) {
  const Simulation run = simulate(training(Timing::just_in_time, 4), simple_hardware(), 0);
  ASSERT_EQ(run.step_ns.size(), 6u);
  std::uint64_t total = 0;
  for (const std::uint64_t step : run.step_ns) total += step;
  EXPECT_LE(total, run.time_ns);              // the rest is the last step's updates
  EXPECT_EQ(run.step_ns[3], run.step_ns[4]);  // steady
}

TEST(Simulator, StopsAtAPlanThatCannotGoOn) {
  Plan plan = training(Timing::just_in_time, 4);
  plan.slab_bytes = 3;  // a unit's parameters and its gradients do not fit together
  plan.expected.clear();
  EXPECT_NE(simulate(plan, simple_hardware(), 0).failure.find("no place on the device"), std::string::npos);
}

}  // namespace
}  // namespace ballast::simulate
