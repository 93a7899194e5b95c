// What a training run of this engine will cost, before anything is bought or started: the engine's own plan (the one
// that commit() makes: memory to the byte) and its own schedule on the virtual clock (bytes per step, step time).
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <ballast/engine/config.h>
#include <ballast/engine/engine.h>
#include <ballast/planner/hardware.h>

#include <array>
#include <cstdint>
#include <string>
#include <vector>

namespace ballast::planner {

struct RunUnit {
  std::string name;
  std::vector<ParameterSpec> parameters;
};

// A model and the pass that its trainer makes over it.
struct RunModel {
  std::vector<RunUnit> units;
  std::vector<ExpectedAccess> order;  // of one pass, as handed to Engine::expect_order
  // Flop of this rank's maths in each access of the pass, as many as `order`; empty: none is known and none takes time.
  std::vector<double> access_flops;
  // Parameters of the unit without a gradient in each access, as many lists as `order`; empty: all have one.
  std::vector<std::vector<std::uint32_t>> access_absent;
  int micro_batches = 1;  // of a step
  bool vertical = false;  // all of them in one pass; otherwise a pass each
  double tokens = 0;      // of a step, over all ranks
};

struct RunOptions {
  int world_size = 1;
  // Of the NVMe paths: what commit() finds there. A drive that takes direct I/O in 512 or 4096 bytes has 4096.
  std::uint64_t alignment_bytes = 4096;
};

struct TierSizes {
  std::uint64_t device = 0, host = 0, nvme = 0;
};

// Per rank (rank 0's), unless it says otherwise. Bytes.
struct RunPlan {
  std::int64_t parameters = 0;  // of the whole model
  std::string placement, timing;
  int zero_stage = 3;
  std::uint64_t chunk_elements = 0;
  double resident_fraction = 0;
  TierSizes parameter_bytes, optimizer_bytes, gradient_bytes;  // where each state lives
  std::uint64_t nvme_stored_bytes = 0;                         // on the drives, second slots of durable steps included
  std::vector<MemoryRange> device_memory, host_memory;         // the static maps, by name
  std::uint64_t peak_device_bytes = 0, peak_host_bytes = 0;
  std::uint64_t budget_device_bytes = 0, budget_host_bytes = 0;
  // The least that works with the other budget as given; 0: that one is too small whatever this one is.
  std::uint64_t smallest_device_bytes = 0, smallest_host_bytes = 0;

  struct {
    std::uint64_t nvme_read = 0, nvme_written = 0, host_to_device = 0, device_to_host = 0, collective = 0, memory = 0;
  } bytes_per_step;  // of a steady step
  double flops_per_step = 0;
  StepBound bound;
  double step_seconds = 0;
  double tokens_per_second = 0;     // of all ranks
  double share_of_peak = 0;         // 0: no flop known
  double nvme_written_per_day = 0;  // of a node
  double endurance_days = 0;        // until the node's drives have had what they are rated for; 0: not known
  double chunks_merged = 1;         // on the virtual clock, where a model has too many to step one by one
  double ranks_on_node = 1, nodes = 1;
};

// Throws PlanError where the budgets cannot work (its text ends with the smallest that would), ConfigError for settings
// that mean nothing together, CheckError where the schedule stalls, which would be a bug. Pure: nothing is opened.
RunPlan plan_run(const RunModel& model, const Config& config, const HardwareProfile& hardware,
                 const RunOptions& options = {});

// The same model and engine with one thing changed.
struct Change {
  std::string what;  // "twice the host memory"
  double gain = 1;   // tokens per second over those of the plan as it is
  double step_seconds = 0;
};
// Tries them all, best first: twice the host budget, twice the device budget, twice the drives, 8-bit and bf16 moments,
// twice the micro-batches (with their tokens). Changes that cannot be planned are left out.
std::vector<Change> try_changes(const RunModel& model, const Config& config, const HardwareProfile& hardware,
                                const RunOptions& options, const RunPlan& plan);

// The same model, engine and machine with more tokens in each micro-batch.
struct CurvePoint {
  double tokens = 0;  // of a step, over all ranks
  double step_seconds = 0, tokens_per_second = 0;
  std::string limited_by;  // the lane whose bound is the largest
};
std::vector<CurvePoint> tokens_curve(const RunModel& model, const Config& config, const HardwareProfile& hardware,
                                     const RunOptions& options, const std::vector<double>& factors);

}  // namespace ballast::planner
