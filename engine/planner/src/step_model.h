// An engine's plan as the simulator steps it.
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <ballast/planner/run_plan.h>
#include <ballast/simulate/scaling.h>

#include <vector>

#include "plan.h"

namespace ballast::planner {

struct StepModel {
  simulate::Plan plan;
  simulate::Index world_size = 1;  // that share a unit
  std::uint64_t merged = 1;        // chunks of the engine's in one of the model's, at most
};

// `passes` of each step, `steps` steps; the maths take access_ns (one per access of the order).
StepModel step_model(const engine::Plan& plan, const Config& config, const RunModel& model,
                     const std::vector<engine::TraceOpening>& openings, const std::vector<std::uint64_t>& access_ns,
                     std::uint32_t passes, std::uint32_t steps);

}  // namespace ballast::planner
