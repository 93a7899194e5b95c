// One rank of many on the virtual clock: its own schedule over a shard of every unit, with collectives costed as steps
// and bytes. All ranks do the same, so one stands for all. SPDX-License-Identifier: Apache-2.0
#pragma once

#include <ballast/simulate/simulator.h>

#include <cstdint>
#include <string>
#include <vector>

namespace ballast::simulate {

// Ring all-gather and reduce-scatter: world_size - 1 steps, in each of which a rank sends and receives one shard.
struct CollectiveModel {
  Index world_size = 1;
  LaneModel link{25'000'000'000, 5'000};  // each way, of one rank; latency of one step
};

struct StepCount {
  std::uint64_t time_ns = 0;  // from decision to decision
  // Elements that this rank received from others; counted as the schedule's actions end.
  std::uint64_t gathered_elements = 0, reduced_elements = 0;
  std::uint64_t link_bytes = 0;
  std::uint64_t drive_bytes = 0;  // read and written
  std::uint64_t drive_read_bytes = 0, copied_in_bytes = 0, copied_out_bytes = 0;
  std::uint64_t cpu_bytes = 0;  // of memory that updates and sums touch
};

struct RankSimulation {
  std::string failure;  // empty: none
  std::vector<StepCount> steps;
  StepCount rest;  // from the last decision to the end
  std::uint64_t time_ns = 0;
  std::uint64_t bound_ns = 0;  // the busiest resource over the whole run
  std::uint64_t tasks = 0;
};

// A model of equal units, trained for `steps` steps at a ZeRO stage. Elements of a unit divide by the world size.
struct ScalingCase {
  Index units = 24;
  std::uint64_t unit_elements = 12 * 1024 * 1024;
  int zero_stage = 3;
  Timing timing = Timing::just_in_time;
  Index micro_batches = 1;
  Index steps = 6;
  Index spare_units = 1;  // device memory beyond the least that works
  schedule::Tier optimizer = schedule::Tier::nvme;
};

// The plan of one rank: chunks hold 1/world_size of each unit (all of it at stage 0). In the model one other rank
// stands for all the others.
Plan scaling_plan(const ScalingCase& scaling, Index world_size);

RankSimulation simulate_rank(const Plan& plan, const HardwareModel& hardware, const CollectiveModel& collectives);

}  // namespace ballast::simulate
