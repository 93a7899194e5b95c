// Plan: from budgets to places. Decides the chunk size, each state's tier, the slots and the two static memory maps, or
// refuses with the smallest budget that would do. Pure arithmetic: nothing is opened or allocated.
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <ballast/engine/config.h>
#include <ballast/schedule/device_map.h>

#include <cstdint>
#include <vector>

#include "layout.h"

namespace ballast::engine {

// One use of device memory in a pass, as seen or expected.
struct TraceOpening {
  std::uint32_t unit = 0;
  bool gradient = false;
  bool last = false;          // gradient: the unit's last contribution of the pass
  std::uint32_t open_at = 0;  // positions in the pass's events
  std::uint32_t close_at = 0;
};

struct ChunkPlacement {
  Tier parameters = Tier::nvme;
  Tier optimizer = Tier::nvme;
  Tier gradients = Tier::host;
  // Offsets in the region of the tier (host slab, device slab), where the state is not on NVMe.
  std::uint64_t parameter_offset = 0;
  std::uint64_t optimizer_offset = 0;
  std::uint64_t gradient_offset = 0;        // where the unit's gradients are stored
  std::uint64_t extent_bytes = 0;           // on NVMe: the parameter (where it is there), then the optimizer's states
  std::uint64_t gradient_extent_bytes = 0;  // on NVMe, apart from those: the sum of the step's gradients
  // Of the file: as much, or with durable steps all states, those that live elsewhere included. Where the extent above
  // begins in it.
  std::uint64_t stored_bytes = 0;
  std::uint64_t extent_begin_bytes = 0;
};

struct Plan {
  Layout layout;
  std::uint32_t world_size = 1, rank = 0;
  Partition partition;  // over all ranks, or over this rank's shard group: of units without a communicator of their own
  int zero_stage = 3;
  std::vector<ChunkPlacement> placement;  // per chunk
  std::vector<bool> stored_gradients;     // per unit
  // Per unit: where its whole parameters lie in the device slab, where they live there for good.
  std::vector<std::uint64_t> unit_parameter_offset;
  std::uint64_t granule = 0;
  std::uint64_t chunk_elements = 0;
  Timing timing = Timing::just_in_time;
  std::string placement_name;  // the three tiers; "auto: " before where they were chosen
  bool uses_nvme = false;      // has states there, or commits steps there
  bool nvme_gradients = false;
  bool durable = false;
  double resident_fraction = 0;

  std::uint32_t fetch_slots = 0, update_slots = 0, gradient_slots = 0;
  // An update slot holds what is on NVMe of a chunk: the states, then the gradient. A gradient slot holds a
  // contribution, or with gradients on NVMe the sum and behind it a contribution.
  std::uint64_t fetch_slot_bytes = 0, update_slot_bytes = 0, gradient_slot_bytes = 0;
  // With durable steps: for chunks on their way to a checkpoint.
  std::uint32_t copy_slots = 0;
  std::uint64_t copy_slot_bytes = 0;

  // Host slab, in this order: stored gradients, resident parameters, resident optimizer states, the kinds of
  // slots.
  std::uint64_t host_gradient_bytes = 0, host_parameter_bytes = 0, host_optimizer_bytes = 0;
  std::uint64_t staging_bytes = 0;  // after those: for states of the device on their way to a committed step
  std::uint64_t host_bytes = 0;     // of the whole slab
  // Device slab: parameters, optimizer states and gradients that live there for good, then the window of openings.
  std::uint64_t device_parameter_bytes = 0, device_optimizer_bytes = 0, device_gradient_bytes = 0;
  std::uint64_t device_window_bytes = 0;
  std::uint64_t device_bytes = 0;
};

struct PlanInputs {
  std::vector<TraceOpening> openings;  // of one training pass
  int micro_batches = 1;
  std::uint64_t alignment_bytes = 4096;  // of the NVMe paths; a power of two
  int world_size = 1;
  int rank = 0;
  bool device_updates_int8 = true;  // the device has an update of 8-bit moments, or the CPU reaches its memory
};

// Several ranks: every rank makes the same decisions, but for the shards that it stores. (Units with communicators of
// their own stand at the same places on all ranks, with the same shapes and as many members: every rank of the world
// issues the same sequence of collectives, by places, and so do the members of each communicator.) Throws PlanError
// where the budgets cannot work, ConfigError where the settings cannot.
Plan make_plan(const std::vector<UnitSpec>& units, const Config& config, const PlanInputs& inputs);

// The openings of a pass as the scheduler's map wants them. Units whose parameters live on the device take no place.
std::vector<schedule::Opening> device_openings(const Plan& plan, const std::vector<TraceOpening>& openings,
                                               std::uint64_t gradient_element_bytes);

}  // namespace ballast::engine
