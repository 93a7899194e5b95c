// Streaming states on the virtual clock.
// SPDX-License-Identifier: Apache-2.0
#include <ballast/base/check.h>
#include <ballast/planner/rates.h>
#include <ballast/planner/streamed_step.h>
#include <ballast/simulate/scaling.h>

#include <algorithm>
#include <cmath>

#include "require.h"

namespace ballast::planner {

using simulate::Index;

namespace {

constexpr Index kChunksPerUnit = 4, kSlots = 16, kSteps = 5;
constexpr std::uint64_t kAtOnce = 1'000'000'000'000'000;  // bytes per second of lanes that are not looked at

// The lane moves `moved` bytes for each of the `modelled` that its tasks count.
std::uint64_t lane_rate(double bytes_per_second, double modelled, double moved) {
  if (moved == 0) return kAtOnce;
  return static_cast<std::uint64_t>(std::clamp(bytes_per_second * modelled / moved, 1.0, 1e15));
}

}  // namespace

StreamedPrediction simulate_streamed_step(const StreamedStep& step) {
  require_positive(step.parameters, "the number of parameters");
  require_not_negative(step.compute_seconds, "compute");
  require_not_negative(step.nvme_read_per_parameter, "bytes read per parameter");
  require_not_negative(step.nvme_written_per_parameter, "bytes written per parameter");
  if (step.nvme_read_per_parameter > 0) require_positive(step.read_bytes_per_second, "the rate of reading");
  if (step.nvme_written_per_parameter > 0) require_positive(step.write_bytes_per_second, "the rate of writing");
  if (step.units < 1 || step.units > 1000) throw ConfigError("a streamed step has from 1 to 1000 units");
  if (!(step.parameters <= 1e15) || !(step.compute_seconds <= 1e6)) throw ConfigError("a step beyond any machine");
  const double read = step.nvme_read_per_parameter * step.parameters;
  const double written = step.nvme_written_per_parameter * step.parameters;
  const double nvme = nvme_seconds(read, written, step.read_bytes_per_second, step.write_bytes_per_second, step.duplex);

  const auto timing = step.overlapped ? simulate::Timing::eager : simulate::Timing::after_backward;
  simulate::Shape shape;
  shape.units = step.units;
  shape.chunks_per_unit = kChunksPerUnit;
  shape.parameters = schedule::Tier::host;
  shape.stored_gradients = !step.overlapped;
  simulate::Plan plan = simulate::make_plan(shape, timing);
  const double chunks = static_cast<double>(plan.chunks.size());
  const double modelled = std::max({read, written, chunks});
  for (schedule::Chunk& chunk : plan.chunks) {
    chunk.parameter_bytes = chunk.gradient_bytes = 1;
    chunk.optimizer_bytes = static_cast<std::uint64_t>(std::llround(modelled / chunks));
  }
  schedule::Limits& limits = plan.limits;
  limits.fetch_slots = limits.update_slots = limits.gradient_slots = kSlots;
  limits.entries = 16 * step.units + 64;
  limits.jobs = 32 * kChunksPerUnit * step.units + 64;
  plan.run_ahead = 1000;
  plan.timed = true;
  simulate::expect_default_pass(plan, 1);
  plan.slab_bytes += 2 * kChunksPerUnit;
  simulate::ProgramWriter writer(plan);
  for (Index s = 0; s < kSteps; ++s) writer.step(1, true);
  writer.settle();
  // Each unit computes forward, and later backward, which takes twice that.
  const auto forward_ns = static_cast<std::uint64_t>(step.compute_seconds * 1e9 / (3.0 * step.units));
  std::uint64_t computes = 0;
  for (simulate::Operation& operation : plan.program) {
    if (operation.verb != simulate::Verb::compute) continue;
    const bool backward = computes++ % (2 * std::uint64_t{step.units}) >= step.units;
    operation.work_ns = backward ? 2 * forward_ns : forward_ns;
  }

  simulate::HardwareModel hardware;
  hardware.copy_in = hardware.copy_out = hardware.cpu = {kAtOnce, 0};
  // Two independent lanes; or one whose directions take turns, both faster by the duplex factor.
  hardware.one_drive = step.duplex < 2;
  const double gain = hardware.one_drive ? step.duplex : 1;
  hardware.read = {lane_rate(gain * step.read_bytes_per_second, modelled, read), 0};
  hardware.write = {lane_rate(gain * step.write_bytes_per_second, modelled, written), 0};
  const simulate::RankSimulation run = simulate::simulate_rank(plan, hardware, {});
  BALLAST_CHECK(run.failure.empty() && run.steps.size() == kSteps);
  return {static_cast<double>(run.steps[kSteps - 2].time_ns) * 1e-9, std::max(step.compute_seconds, nvme)};
}

}  // namespace ballast::planner
