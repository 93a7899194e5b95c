// A plan on a virtual clock: the same scheduler and trainer, with a finish time for every task from a model of the
// hardware. Whole nanoseconds and a seeded generator: the same seed gives the same run, bit for bit, on every machine.
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <ballast/simulate/model_trainer.h>

#include <array>
#include <cstdint>
#include <string>
#include <vector>

namespace ballast::simulate {

// A lane serves its tasks one after another at its rate; each then takes the latency on top, beside others.
struct LaneModel {
  std::uint64_t bytes_per_second = 1'000'000'000;
  std::uint64_t latency_ns = 0;
};

struct HardwareModel {
  LaneModel read, write, copy_in, copy_out, cpu;
  bool one_drive = true;                                   // reads and writes share the drive's time
  std::uint64_t compute_bytes_per_second = 1'000'000'000;  // parameters that the trainer's maths passes over
  std::uint64_t jitter_ns = 0;                             // added to each latency, drawn evenly from [0, jitter_ns]
};

enum class Resource : std::uint8_t { drive_read, drive_write, copy_in, copy_out, cpu, compute };
constexpr int kResourceCount = 6;

struct Simulation {
  std::string failure;  // empty: none
  std::uint64_t time_ns = 0;
  std::vector<std::uint64_t> step_ns;                   // of each step, from decision to decision
  std::array<std::uint64_t, kResourceCount> busy_ns{};  // work, over the whole run
  std::array<std::uint64_t, kResourceCount> bytes{};
  std::uint64_t bound_ns = 0;  // the busiest resource (reads and writes together on one drive)
  std::uint64_t tasks = 0;
  std::uint64_t trace_hash = 0;  // of every start and finish with its time
  std::uint32_t reliefs = 0, deviations = 0;
};

// Runs a plan to its end, or to its first failure (a stall, a broken invariant, a wrong byte).
Simulation simulate(const Plan& plan, const HardwareModel& hardware, std::uint64_t seed, bool check_always = true);

// Hardware drawn from a seed, for property tests: rates and latencies that differ a thousandfold.
HardwareModel random_hardware(std::uint64_t seed);

}  // namespace ballast::simulate
