// What the scheduler is given.
// SPDX-License-Identifier: Apache-2.0
#include "plan_schedule.h"

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <utility>

namespace ballast::engine {

namespace {

schedule::Tier to_schedule(Tier tier) {
  switch (tier) {
    case Tier::device:
      return schedule::Tier::device;
    case Tier::host:
      return schedule::Tier::host;
    case Tier::nvme:
      break;
  }
  return schedule::Tier::nvme;
}

}  // namespace

std::vector<TraceOpening> expected_openings(const std::vector<ExpectedAccess>& order,
                                            const std::vector<bool>& unit_trainable) {
  std::vector<TraceOpening> openings;
  std::vector<std::size_t> last(unit_trainable.size(), SIZE_MAX);
  std::vector<std::pair<std::size_t, std::size_t>> ends;  // (access, opening): what ends after that access
  std::uint32_t event = 0;
  for (std::size_t i = 0; i < order.size(); ++i) {
    const ExpectedAccess& access = order[i];
    const std::size_t end = i + static_cast<std::size_t>(std::max(access.open_through, 0));
    if (access.parameters) {
      ends.emplace_back(end, openings.size());
      openings.push_back({access.unit.index, false, false, event++, 0});
    }
    if (access.gradient && unit_trainable[access.unit.index]) {
      ends.emplace_back(end, openings.size());
      last[access.unit.index] = openings.size();
      openings.push_back({access.unit.index, true, false, event++, 0});
    }
    // Gradients are committed before the parameters they were opened beside are released: last opened, first closed.
    for (std::size_t k = ends.size(); k-- > 0;) {
      if (ends[k].first <= i || i + 1 == order.size()) {
        openings[ends[k].second].close_at = event++;
        ends.erase(ends.begin() + static_cast<std::ptrdiff_t>(k));
      }
    }
  }
  for (std::size_t i : last) {
    if (i != SIZE_MAX) openings[i].last = true;
  }
  return openings;
}

std::vector<schedule::Chunk> schedule_chunks(const Plan& plan, std::uint64_t gradient_bytes) {
  std::vector<schedule::Chunk> chunks;
  for (std::size_t c = 0; c < plan.layout.chunks.size(); ++c) {
    const ChunkLayout& chunk = plan.layout.chunks[c];
    schedule::Chunk s;
    s.unit = chunk.unit;
    s.parameters = to_schedule(plan.placement[c].parameters);
    s.optimizer = to_schedule(plan.placement[c].optimizer);
    s.gradients = to_schedule(plan.placement[c].gradients);
    s.trainable = chunk.trainable;
    s.parameter_bytes = chunk.parameter_bytes;
    s.optimizer_bytes = chunk.optimizer_bytes();
    s.gradient_bytes = chunk.trainable ? chunk.elements * gradient_bytes : 0;
    chunks.push_back(s);
  }
  return chunks;
}

std::vector<schedule::Unit> schedule_units(const Plan& plan, std::uint64_t gradient_bytes) {
  std::vector<schedule::Unit> units;
  for (std::size_t u = 0; u < plan.layout.units.size(); ++u) {
    const UnitLayout& unit = plan.layout.units[u];
    const bool on_device = unit.chunk_count > 0 && plan.placement[unit.first_chunk].parameters == Tier::device;
    schedule::Unit s;
    s.first_chunk = unit.first_chunk;
    s.chunk_count = unit.chunk_count;
    s.parameter_bytes = on_device ? 0 : unit.device_bytes;
    s.gradient_bytes = unit.gradient_elements * gradient_bytes;
    s.stored_gradients = plan.stored_gradients[u];
    s.gathered = unit.partition.world_size > 1 && plan.zero_stage > 0 && unit.chunk_count > 0;
    s.reduced = plan.world_size > 1 && unit.gradient_elements > 0;
    units.push_back(s);
  }
  return units;
}

schedule::Limits schedule_limits(const Plan& plan, const Config& config, const std::vector<TraceOpening>& openings) {
  schedule::Limits limits;
  limits.fetch_slots = plan.fetch_slots;
  limits.update_slots = plan.update_slots;
  limits.gradient_slots = plan.gradient_slots;
  // Enough transfers under way to keep the drive's queue full twice over, whatever the size of a chunk.
  const std::uint64_t queue_bytes = 2 * config.nvme.block_bytes * config.nvme.queue_depth;
  const auto transfers = [&](std::uint64_t bytes) {
    return static_cast<schedule::Index>(std::clamp<std::uint64_t>(bytes == 0 ? 0 : queue_bytes / bytes, 8, 128));
  };
  limits.reads = std::max(transfers(plan.fetch_slot_bytes), transfers(plan.update_slot_bytes));
  limits.writes = transfers(plan.update_slot_bytes);
  std::uint64_t jobs = 0;
  std::uint64_t most_chunks = 0;
  for (const TraceOpening& opening : openings) jobs += plan.layout.units[opening.unit].chunk_count;
  for (const UnitLayout& unit : plan.layout.units) most_chunks = std::max<std::uint64_t>(most_chunks, unit.chunk_count);
  limits.entries = static_cast<schedule::Index>(2 * openings.size() + 64);
  limits.jobs = static_cast<schedule::Index>(3 * jobs + 6 * most_chunks + 64);
  if (plan.world_size > 1) {
    // What is appended ahead is counted there, and the tables have room for it.
    limits.entries += static_cast<schedule::Index>(openings.size());
    limits.jobs += static_cast<schedule::Index>(3 * jobs);
  }
  return limits;
}

}  // namespace ballast::engine
