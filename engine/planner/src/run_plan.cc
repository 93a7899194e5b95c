// A run's cost: the engine's plan, stepped on the virtual clock.
// SPDX-License-Identifier: Apache-2.0
#include <ballast/base/error.h>
#include <ballast/planner/run_plan.h>
#include <ballast/simulate/scaling.h>

#include <algorithm>
#include <charconv>
#include <cmath>
#include <numeric>
#include <optional>

#include "plan.h"
#include "plan_schedule.h"
#include "require.h"
#include "step_model.h"

namespace ballast::planner {

namespace {

constexpr std::uint32_t kSteps = 5;
// Passes of a step that are stepped through; more go on as the last of these do. Fewer where a pass has many chunks.
constexpr std::uint64_t kPassesLeast = 3, kPassesMost = 24, kChunksPerStepMost = 60'000;
constexpr std::uint64_t kAtOnce = 1'000'000'000'000'000;
constexpr std::uint64_t kTaskNs = 5'000;  // to hand a copy or an update over, and its end back

struct Request {
  std::vector<engine::UnitSpec> units;
  engine::PlanInputs inputs;
};

Request request_of(const RunModel& model, const Config& config, const RunOptions& options) {
  if (model.units.empty()) throw ConfigError("a model without units has nothing to plan");
  if (model.micro_batches < 1) throw ConfigError("a step has at least one micro-batch");
  if (options.world_size < 1) throw ConfigError("a run has at least one rank");
  if (!model.access_flops.empty() && model.access_flops.size() != model.order.size())
    throw ConfigError("each access of the pass has its flop, or none has");
  if (!model.access_absent.empty() && model.access_absent.size() != model.order.size())
    throw ConfigError("each access of the pass has its list of absent parameters, or none has");
  Request request;
  std::vector<bool> trainable;
  for (const RunUnit& unit : model.units) {
    request.units.push_back({unit.name, unit.parameters});
    trainable.push_back(std::any_of(unit.parameters.begin(), unit.parameters.end(),
                                    [](const ParameterSpec& parameter) { return parameter.options.trainable; }));
  }
  for (const ExpectedAccess& access : model.order) {
    if (access.unit.index >= model.units.size()) throw ConfigError("the pass names a unit that the model has not");
  }
  request.inputs.openings = engine::expected_openings(model.order, trainable);
  request.inputs.micro_batches = model.micro_batches;
  request.inputs.alignment_bytes = std::max<std::uint64_t>(options.alignment_bytes, 4096);
  request.inputs.device_updates_int8 = config.device != "cuda";
  request.inputs.world_size = options.world_size;
  return request;
}

// "... smallest budget.host: 1234 KiB" at the end of a refusal.
std::optional<std::uint64_t> smallest_named(const std::string& refusal, const std::string& budget) {
  const std::string before = "smallest budget." + budget + ": ";
  const std::size_t at = refusal.rfind(before);
  if (at == refusal.npos) return std::nullopt;
  std::uint64_t kibibytes = 0;
  const char* const begin = refusal.data() + at + before.size();
  if (std::from_chars(begin, refusal.data() + refusal.size(), kibibytes).ec != std::errc()) return std::nullopt;
  return kibibytes * 1024;
}

std::uint64_t smallest_budget(const Request& request, Config config, const std::string& name) {
  std::uint64_t& budget = name == "host" ? config.budget.host_bytes : config.budget.device_bytes;
  budget = 1;
  try {
    engine::make_plan(request.units, config, request.inputs);
    return 1;
  } catch (const PlanError& refusal) {
    return smallest_named(refusal.what(), name).value_or(0);
  }
}

double sum_of(const std::vector<double>& values) { return std::accumulate(values.begin(), values.end(), 0.0); }

// What a step does, as a difference of whole runs: nothing that is under way at a step's end is lost or counted twice.
struct Measured {
  double step_seconds = 0;
  double nvme_read = 0, nvme_written = 0, host_to_device = 0, device_to_host = 0, collective = 0, memory = 0;
};

Measured combine(const Measured& a, double times, const Measured& b, double more) {
  const auto add = [&](double Measured::*member) { return times * a.*member + more * b.*member; };
  return {add(&Measured::step_seconds),   add(&Measured::nvme_read),      add(&Measured::nvme_written),
          add(&Measured::host_to_device), add(&Measured::device_to_host), add(&Measured::collective),
          add(&Measured::memory)};
}

std::uint64_t lane_rate(double bytes_per_second) {
  return bytes_per_second <= 0 ? kAtOnce : static_cast<std::uint64_t>(std::clamp(bytes_per_second, 1.0, 1e15));
}

class Stepper {
 public:
  Stepper(const engine::Plan& plan, const Config& config, const RunModel& model, const RankRates& rates,
          const std::vector<engine::TraceOpening>& openings)
      : plan_(plan), config_(config), model_(model), openings_(openings) {
    const StepRates& step = rates.step;
    hardware_.one_drive = step.nvme_duplex < 2;
    const double gain = hardware_.one_drive ? step.nvme_duplex : 1;
    const auto nanoseconds = [](double seconds) { return static_cast<std::uint64_t>(std::llround(seconds * 1e9)); };
    hardware_.read = {lane_rate(gain * step.nvme_read), nanoseconds(rates.nvme_latency)};
    hardware_.write = {lane_rate(gain * step.nvme_write), nanoseconds(rates.nvme_latency)};
    // As if the other way were always busy, where one slows the other.
    hardware_.copy_in = {lane_rate(step.host_to_device * step.copies_duplex / 2), kTaskNs};
    hardware_.copy_out = {lane_rate(step.device_to_host * step.copies_duplex / 2), kTaskNs};
    hardware_.cpu = {lane_rate(step.memory), kTaskNs};
    link_ = {lane_rate(step.network), nanoseconds(rates.network_latency)};
    access_ns_.reserve(model.access_flops.size());
    for (const double flops : model.access_flops) access_ns_.push_back(nanoseconds(seconds_of(flops, step.flops)));
  }

  Measured step() {
    const auto passes = static_cast<std::uint32_t>(model_.vertical ? 1 : model_.micro_batches);
    const std::uint64_t chunks = std::max<std::uint64_t>(plan_.layout.chunks.size(), 1);
    const auto stepped = static_cast<std::uint32_t>(std::clamp(kChunksPerStepMost / chunks, kPassesLeast, kPassesMost));
    if (passes <= stepped) return steady(passes);
    const Measured most = steady(stepped), fewer = steady(stepped - 1);
    const double more = passes - stepped;
    return combine(most, 1 + more, fewer, -more);
  }
  double merged() const { return static_cast<double>(merged_); }

 private:
  Measured run(std::uint32_t passes, std::uint32_t steps) {
    const StepModel step = step_model(plan_, config_, model_, openings_, access_ns_, passes, steps);
    merged_ = step.merged;
    const simulate::RankSimulation run =
        simulate::simulate_rank(step.plan, hardware_, {.world_size = step.world_size, .link = link_});
    if (!run.failure.empty() || run.steps.size() != steps)
      throw Error("the schedule does not run through on the virtual clock: " + run.failure.substr(0, 200));
    Measured total;
    const auto add = [&](const simulate::StepCount& of) {
      total.nvme_read += static_cast<double>(of.drive_read_bytes);
      total.nvme_written += static_cast<double>(of.drive_bytes - of.drive_read_bytes);
      total.host_to_device += static_cast<double>(of.copied_in_bytes);
      total.device_to_host += static_cast<double>(of.copied_out_bytes);
      total.collective += static_cast<double>(of.link_bytes);
      total.memory += static_cast<double>(of.cpu_bytes);
    };
    for (const simulate::StepCount& of : run.steps) add(of);
    add(run.rest);
    const auto seconds = [&](std::size_t s) { return static_cast<double>(run.steps[s].time_ns) * 1e-9; };
    total.step_seconds = (seconds(steps - 3) + seconds(steps - 2)) / 2;
    return total;
  }

  Measured steady(std::uint32_t passes) {
    const Measured whole = run(passes, kSteps), shorter = run(passes, kSteps - 1);
    Measured step = combine(whole, 1, shorter, -1);
    step.step_seconds = whole.step_seconds;
    step.collective += replica_bytes(passes);
    return step;
  }

  // Shard groups: what the ranks that hold the same shards exchange of each gradient, besides.
  double replica_bytes(std::uint32_t passes) const {
    const double groups = plan_.partition.all_shards
                              ? 1
                              : static_cast<double>(plan_.world_size) / static_cast<double>(plan_.partition.world_size);
    if (groups <= 1) return 0;
    double bytes = 0;
    for (const engine::TraceOpening& opening : openings_) {
      if (!opening.gradient) continue;
      for (const engine::Section& section : plan_.layout.units[opening.unit].sections) {
        if (section.trainable) bytes += static_cast<double>(section.shard_elements);
      }
    }
    return passes * bytes * static_cast<double>(element_bytes(config_.precision.gradients)) * 2 * (groups - 1) / groups;
  }

  const engine::Plan& plan_;
  const Config& config_;
  const RunModel& model_;
  const std::vector<engine::TraceOpening>& openings_;
  simulate::HardwareModel hardware_;
  simulate::LaneModel link_;
  std::vector<std::uint64_t> access_ns_;
  std::uint64_t merged_ = 1;
};

void describe_memory(const engine::Plan& plan, const Config& config, std::uint64_t alignment_bytes, RunPlan& run) {
  run.parameters = static_cast<std::int64_t>(plan.layout.parameters);
  run.placement = plan.placement_name;
  run.timing = std::string(to_string(plan.timing));
  run.zero_stage = plan.zero_stage;
  run.chunk_elements = plan.chunk_elements;
  run.resident_fraction = plan.resident_fraction;
  run.peak_device_bytes = plan.device_bytes;
  run.peak_host_bytes = plan.host_bytes;
  run.budget_device_bytes = config.budget.device_bytes;
  run.budget_host_bytes = config.budget.host_bytes;
  const std::uint64_t gradient_bytes = element_bytes(config.precision.gradients);
  const auto put = [](TierSizes& sizes, Tier tier, std::uint64_t bytes) {
    (tier == Tier::device ? sizes.device : tier == Tier::host ? sizes.host : sizes.nvme) += bytes;
  };
  for (std::size_t c = 0; c < plan.layout.chunks.size(); ++c) {
    const engine::ChunkLayout& chunk = plan.layout.chunks[c];
    const engine::ChunkPlacement& place = plan.placement[c];
    if (place.parameters != Tier::device) put(run.parameter_bytes, place.parameters, chunk.parameter_bytes);
    put(run.optimizer_bytes, place.optimizer, chunk.optimizer_bytes());
    if (chunk.trainable && plan.stored_gradients[chunk.unit])
      put(run.gradient_bytes, place.gradients, chunk.elements * gradient_bytes);
    run.nvme_stored_bytes += place.stored_bytes * (plan.durable ? 2 : 1) + place.gradient_extent_bytes;
  }
  // Each path's file opens with its header.
  if (plan.uses_nvme) run.nvme_stored_bytes += config.nvme.paths.size() * alignment_bytes;
  run.parameter_bytes.device = plan.device_parameter_bytes;  // whole, where a rank keeps them there
  const auto add = [](std::vector<MemoryRange>& ranges, const char* name, std::uint64_t bytes) {
    if (bytes > 0) ranges.push_back({name, bytes});
  };
  add(run.device_memory, "parameters", plan.device_parameter_bytes);
  add(run.device_memory, "optimizer states", plan.device_optimizer_bytes);
  add(run.device_memory, "gradients", plan.device_gradient_bytes);
  add(run.device_memory, "window of open units", plan.device_window_bytes);
  add(run.host_memory, "gradients", plan.host_gradient_bytes);
  add(run.host_memory, "resident parameters", plan.host_parameter_bytes);
  add(run.host_memory, "resident optimizer states", plan.host_optimizer_bytes);
  add(run.host_memory, "staging for committed steps", plan.staging_bytes);
  add(run.host_memory, "fetch slots", plan.fetch_slots * plan.fetch_slot_bytes);
  add(run.host_memory, "update slots", plan.update_slots * plan.update_slot_bytes);
  add(run.host_memory, "gradient slots", plan.gradient_slots * plan.gradient_slot_bytes);
  add(run.host_memory, "copies for checkpoints", plan.copy_slots * plan.copy_slot_bytes);
}

RunPlan evaluate(const Request& request, const RunModel& model, const Config& config, const HardwareProfile& hardware,
                 const RunOptions& options) {
  const engine::Plan plan = engine::make_plan(request.units, config, request.inputs);
  RunPlan run;
  describe_memory(plan, config, request.inputs.alignment_bytes, run);
  const RankRates rates = rank_rates(hardware, options.world_size);
  run.ranks_on_node = rates.ranks_on_node;
  run.nodes = rates.nodes;
  if (plan.uses_nvme && hardware.nvme_read == 0) {
    throw ConfigError(hardware.name + " has no NVMe drives (\"nvme_read\"), and this plan keeps " +
                      std::to_string(run.nvme_stored_bytes) + " bytes a rank there; place the states elsewhere");
  }
  Stepper stepper(plan, config, model, rates, request.inputs.openings);
  const Measured step = stepper.step();
  const auto bytes = [](double value) { return static_cast<std::uint64_t>(std::llround(std::max(value, 0.0))); };
  run.bytes_per_step = {bytes(step.nvme_read),      bytes(step.nvme_written), bytes(step.host_to_device),
                        bytes(step.device_to_host), bytes(step.collective),   bytes(step.memory)};
  run.chunks_merged = stepper.merged();
  run.flops_per_step = sum_of(model.access_flops) * (model.vertical ? 1 : model.micro_batches);
  run.bound = step_bound({.flops = run.flops_per_step,
                          .host_to_device = step.host_to_device,
                          .device_to_host = step.device_to_host,
                          .nvme_read = step.nvme_read,
                          .nvme_written = step.nvme_written,
                          .memory = step.memory,
                          .network = step.collective},
                         rates.step);
  // Passes that were not stepped through may be bound by another lane than those that were.
  run.step_seconds = std::max(step.step_seconds, run.bound.largest());
  if (run.step_seconds > 0) {
    run.tokens_per_second = model.tokens / run.step_seconds;
    const double peak = hardware.peak > 0 ? hardware.peak : hardware.compute;
    run.share_of_peak = run.flops_per_step / run.step_seconds / peak;
    const double written = step.nvme_written * run.ranks_on_node;
    run.nvme_written_per_day = written / run.step_seconds * 86400;
    if (written > 0 && hardware.nvme_endurance > 0)
      run.endurance_days = endurance_days(hardware.nvme_endurance, written, run.step_seconds);
  }
  return run;
}

}  // namespace

RunPlan plan_run(const RunModel& model, const Config& config, const HardwareProfile& hardware,
                 const RunOptions& options) {
  const Request request = request_of(model, config, options);
  RunPlan run = evaluate(request, model, config, hardware, options);
  run.smallest_host_bytes = smallest_budget(request, config, "host");
  run.smallest_device_bytes = smallest_budget(request, config, "device");
  return run;
}

std::vector<Change> try_changes(const RunModel& model, const Config& config, const HardwareProfile& hardware,
                                const RunOptions& options, const RunPlan& plan) {
  std::vector<Change> changes;
  const auto attempt = [&](const std::string& what, const RunModel& with_model, const Config& with_config,
                           const HardwareProfile& with_hardware) {
    try {
      const RunPlan changed =
          evaluate(request_of(with_model, with_config, options), with_model, with_config, with_hardware, options);
      if (changed.step_seconds <= 0 || plan.step_seconds <= 0) return;
      const double work = with_model.tokens > 0 && model.tokens > 0 ? with_model.tokens / model.tokens : 1;
      changes.push_back({what, work * plan.step_seconds / changed.step_seconds, changed.step_seconds});
    } catch (const Error&) {
      // A change that cannot be planned is none to recommend.
    }
  };
  Config more_host = config;
  more_host.budget.host_bytes *= 2;
  attempt("twice budget.host", model, more_host, hardware);
  Config more_device = config;
  more_device.budget.device_bytes *= 2;
  attempt("twice budget.device", model, more_device, hardware);
  if (plan.bytes_per_step.nvme_read + plan.bytes_per_step.nvme_written > 0) {
    HardwareProfile drives = hardware;
    for (double* rate : {&drives.nvme_read, &drives.nvme_write, &drives.nvme_capacity, &drives.nvme_endurance})
      *rate *= 2;
    attempt("twice the NVMe drives", model, config, drives);
  }
  for (const char* moments : {"int8", "bf16"}) {
    try {
      const Config narrow = Config::from_json(config.to_json(), "configuration", {{"precision.moments", moments}});
      if (narrow.precision.moments != config.precision.moments)
        attempt("precision.moments " + std::string(moments), model, narrow, hardware);
    } catch (const ConfigError&) {
      // This build has no such moments.
    }
  }
  if (!model.vertical) {
    RunModel more = model;
    more.micro_batches *= 2;
    more.tokens *= 2;
    attempt("twice the micro-batches", more, config, hardware);
  }
  HardwareProfile faster = hardware;
  faster.compute *= 2;
  if (plan.flops_per_step > 0) attempt("twice the compute", model, config, faster);
  std::stable_sort(changes.begin(), changes.end(), [](const Change& a, const Change& b) { return a.gain > b.gain; });
  return changes;
}

std::vector<CurvePoint> tokens_curve(const RunModel& model, const Config& config, const HardwareProfile& hardware,
                                     const RunOptions& options, const std::vector<double>& factors) {
  std::vector<CurvePoint> points;
  const Request request = request_of(model, config, options);
  for (const double factor : factors) {
    require_positive(factor, "a factor of the curve");
    RunModel scaled = model;
    scaled.tokens *= factor;
    for (double& flops : scaled.access_flops) flops *= factor;
    const RunPlan run = evaluate(request, scaled, config, hardware, options);
    points.push_back({scaled.tokens, run.step_seconds, run.tokens_per_second, std::string(run.bound.limiting())});
  }
  return points;
}

}  // namespace ballast::planner
