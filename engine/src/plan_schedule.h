// From a plan to what the scheduler is given: the pass that is expected, chunks and units, limits. The engine and the
// planner both begin here, so that what is predicted is what is run. SPDX-License-Identifier: Apache-2.0
#pragma once

#include <ballast/engine/engine.h>
#include <ballast/schedule/scheduler.h>

#include <vector>

#include "plan.h"

namespace ballast::engine {

// The openings of a pass that makes these accesses. Units that are frozen as a whole have no gradients.
std::vector<TraceOpening> expected_openings(const std::vector<ExpectedAccess>& order,
                                            const std::vector<bool>& unit_trainable);

std::vector<schedule::Chunk> schedule_chunks(const Plan& plan, std::uint64_t gradient_element_bytes);
std::vector<schedule::Unit> schedule_units(const Plan& plan, std::uint64_t gradient_element_bytes);

schedule::Limits schedule_limits(const Plan& plan, const Config& config, const std::vector<TraceOpening>& openings);

}  // namespace ballast::engine
