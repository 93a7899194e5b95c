// Plans drawn from a seed: units, chunks, tiers, slots, timings, micro-batches, and trainers that leave the trace.
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <ballast/simulate/plan.h>

#include <cstdint>

namespace ballast::simulate {

struct RandomPlanOptions {
  bool deviations = true;  // skipped units, other orders, given-up gradients, evaluation passes, leases held longer
  Index ranks = 1;         // several: what is expected is taken back at random points, too
  bool groups = false;     // some units are shared by fewer ranks
};

Plan random_plan(std::uint64_t seed, const RandomPlanOptions& options = {});

}  // namespace ballast::simulate
