// From budgets to places.
// SPDX-License-Identifier: Apache-2.0
#include "plan.h"

#include <ballast/base/check.h>
#include <ballast/base/error.h>
#include <ballast/base/size.h>
#include <ballast/kernels/reduce.h>

#include <algorithm>
#include <array>
#include <map>
#include <string>

namespace ballast::engine {

using base::format_size;
using base::kKiB;
using base::round_up;

namespace {

constexpr std::uint64_t kPage = 4096;
// Chunk sizes tried, in elements, largest first. A chunk of 1 Mi elements is one read of 12 MiB.
constexpr std::array<std::uint64_t, 7> kChunkElements = {1u << 20, 1u << 19, 1u << 18, 1u << 17,
                                                         1u << 16, 1u << 15, 1u << 14};
// Slots that keep a drive busy: fewer make the next smaller chunk size worth trying.
constexpr std::uint64_t kComfortableUpdateSlots = 8;
constexpr std::uint64_t kComfortableFetchSlots = 4;
// Of a checkpoint's chunks that no update reads: some are read while others are written.
constexpr std::uint64_t kCopySlots = 4;

std::string kib(std::uint64_t bytes) { return std::to_string(base::ceil_div(bytes, kKiB)) + " KiB"; }

// What one choice of chunk size and tiers needs on the host.
struct Needs {
  std::uint64_t fixed_bytes = 0;  // stored gradients and resident states
  std::uint64_t fetch_slot_bytes = 0, update_slot_bytes = 0, gradient_slot_bytes = 0;
  std::uint64_t copy_slot_bytes = 0;
  std::uint64_t fetch_chunks = 0, update_chunks = 0;
  std::uint64_t largest_unit_chunks = 0;  // of trainable chunks
  std::uint64_t minimum() const {
    return fixed_bytes + fetch_slot_bytes + update_slot_bytes + gradient_slot_bytes + copy_slot_bytes;
  }
};

class Planner {
 public:
  Planner(const std::vector<UnitSpec>& units, const Config& config, const PlanInputs& inputs)
      : units_(units), config_(config), inputs_(inputs), gradient_bytes_(element_bytes(config.precision.gradients)) {
    plan_.granule = std::max<std::uint64_t>(kernels::kSumBlock, inputs.alignment_bytes / 2);
    BALLAST_CHECK((plan_.granule & (plan_.granule - 1)) == 0);
    plan_.zero_stage = config.zero_stage;
    plan_.durable = config.durability.every_steps > 0;
    plan_.world_size = static_cast<std::uint32_t>(inputs.world_size);
    plan_.rank = static_cast<std::uint32_t>(inputs.rank);
    const auto group = static_cast<std::uint32_t>(config.communication.shard_group_size);
    const std::uint32_t shards = group == 0 || config.zero_stage == 0 ? plan_.world_size : group;
    if (plan_.world_size % shards != 0) {
      throw ConfigError("communication.shard_group_size is " + std::to_string(shards) + ", which does not divide " +
                        std::to_string(plan_.world_size) + " ranks");
    }
    plan_.partition = {shards, plan_.rank % shards, config.zero_stage == 0};
    if (!config.placement.automatic && config.placement.optimizer == Tier::device && !optimizer_may_be_on_device()) {
      throw ConfigError(
          "precision.moments \"int8\" with placement.optimizer \"device\": the update on a GPU has no 8-bit moments; "
          "place the optimizer on \"host\" or \"nvme\", or use \"fp32\" or \"bf16\" moments");
    }
    choose_timing();
  }

  Plan run() {
    set_layout(kChunkElements.front());
    choose_stored_gradients();
    if (config_.placement.automatic) {
      choose_automatically();
      plan_.placement_name = "auto: parameters " + tiers_text(&ChunkPlacement::parameters) + ", gradients " +
                             tiers_text(&ChunkPlacement::gradients) + ", optimizer " +
                             tiers_text(&ChunkPlacement::optimizer);
    } else {
      const auto& p = config_.placement;
      set_tiers(p.parameters, p.gradients, p.optimizer);
      plan_.placement_name = "parameters " + std::string(to_string(keeps_parameters() ? Tier::device : p.parameters)) +
                             ", gradients " + std::string(to_string(p.gradients)) + ", optimizer " +
                             std::string(to_string(p.optimizer));
      const std::uint64_t smallest = find_chunk_size([&] { set_tiers(p.parameters, p.gradients, p.optimizer); });
      plan_device();  // of the chunks that were chosen: what 8-bit moments take depends on them a little
      if (smallest > 0) refuse_host_budget(smallest);
    }
    share_out_host();
    finish();
    return std::move(plan_);
  }

 private:
  bool optimizer_may_be_on_device() const {
    return config_.precision.moments != MomentType::int8 || inputs_.device_updates_int8;
  }

  void choose_timing() {
    const bool needs_norm =
        config_.optimizer.clip_global_norm.has_value() || config_.loss_scale.kind == Config::LossScale::Kind::dynamic;
    plan_.timing = config_.optimizer.timing;
    if (plan_.timing == Timing::automatic) plan_.timing = needs_norm ? Timing::just_in_time : Timing::eager;
  }

  void set_layout(std::uint64_t chunk_elements) {
    plan_.chunk_elements = round_up(chunk_elements, plan_.granule);
    plan_.layout = make_layout(units_, config_.precision, plan_.chunk_elements, plan_.granule, plan_.partition);
    plan_.placement.assign(plan_.layout.chunks.size(), {});
  }

  // Eager updates consume a gradient as it comes, unless it is the sum of several contributions.
  void choose_stored_gradients() {
    plan_.stored_gradients.assign(units_.size(), true);
    // Several ranks: a slot that is held until an update comes could make one rank wait for another in a circle.
    if (plan_.timing != Timing::eager || inputs_.micro_batches > 1 || inputs_.world_size > 1) return;
    std::vector<int> commits(units_.size(), 0);
    for (const TraceOpening& opening : inputs_.openings) commits[opening.unit] += opening.gradient;
    for (std::size_t u = 0; u < units_.size(); ++u) plan_.stored_gradients[u] = commits[u] > 1;
  }

  // Below stage 3 every rank keeps all parameters on its device.
  bool keeps_parameters() const { return inputs_.world_size > 1 && plan_.zero_stage < 3; }

  bool stored(const ChunkLayout& chunk) const { return plan_.stored_gradients[chunk.unit]; }

  void set_tiers(Tier parameters, Tier gradients, Tier optimizer) {
    if (gradients == Tier::device) plan_.stored_gradients.assign(units_.size(), true);
    for (std::size_t c = 0; c < plan_.layout.chunks.size(); ++c) {
      plan_.placement[c].parameters = keeps_parameters() ? Tier::device : parameters;
      plan_.placement[c].optimizer = optimizer;
      plan_.placement[c].gradients = gradients;
    }
  }

  std::uint64_t gradient_extent_bytes(std::size_t c) const {
    const ChunkLayout& chunk = plan_.layout.chunks[c];
    const bool there = plan_.placement[c].gradients == Tier::nvme && chunk.trainable && stored(chunk);
    return there ? chunk.elements * gradient_bytes_ : 0;
  }

  std::uint64_t extent_bytes(std::size_t c) const {
    const ChunkLayout& chunk = plan_.layout.chunks[c];
    return (plan_.placement[c].parameters == Tier::nvme ? chunk.parameter_bytes : 0) +
           (plan_.placement[c].optimizer == Tier::nvme ? chunk.optimizer_bytes() : 0);
  }

  // What lives on the device passes through here on its way to a committed step.
  std::uint64_t staging_bytes() const {
    std::uint64_t most = 0;
    for (std::size_t c = 0; plan_.durable && c < plan_.layout.chunks.size(); ++c) {
      const ChunkLayout& chunk = plan_.layout.chunks[c];
      const ChunkPlacement& place = plan_.placement[c];
      if (place.parameters != Tier::device && place.optimizer != Tier::device) continue;
      most = std::max(most, chunk.parameter_bytes + chunk.optimizer_bytes());
    }
    return round_up(most, std::max(kPage, inputs_.alignment_bytes));
  }

  Needs needs() const {
    Needs n;
    for (const UnitLayout& unit : plan_.layout.units) {
      std::uint64_t trainable = 0;
      for (std::uint32_t c = unit.first_chunk; c < unit.first_chunk + unit.chunk_count; ++c) {
        const ChunkLayout& chunk = plan_.layout.chunks[c];
        const ChunkPlacement& place = plan_.placement[c];
        const std::uint64_t gradient = chunk.trainable ? chunk.elements * gradient_bytes_ : 0;
        trainable += chunk.trainable;
        const std::uint64_t nvme_gradient = gradient_extent_bytes(c);
        if (place.gradients == Tier::host && stored(chunk)) n.fixed_bytes += gradient;
        if (place.gradients != Tier::device) {
          n.gradient_slot_bytes = std::max(n.gradient_slot_bytes, gradient + nvme_gradient);
        }
        if (place.parameters == Tier::host) n.fixed_bytes += chunk.parameter_bytes;
        if (place.optimizer == Tier::host) n.fixed_bytes += chunk.optimizer_bytes();
        if (place.parameters == Tier::nvme) {
          ++n.fetch_chunks;
          n.fetch_slot_bytes = std::max(n.fetch_slot_bytes, chunk.parameter_bytes);
        }
        if (plan_.durable) {
          n.copy_slot_bytes = std::max(n.copy_slot_bytes, chunk.parameter_bytes + chunk.optimizer_bytes());
        }
        if (extent_bytes(c) + nvme_gradient > 0) {
          // Frozen chunks pass through an update slot only while they are initialised.
          ++n.update_chunks;
          n.update_slot_bytes = std::max(n.update_slot_bytes, extent_bytes(c) + nvme_gradient);
        }
      }
      n.largest_unit_chunks = std::max(n.largest_unit_chunks, trainable);
    }
    n.fetch_slot_bytes = round_up(n.fetch_slot_bytes, std::max(kPage, inputs_.alignment_bytes));
    n.update_slot_bytes = round_up(n.update_slot_bytes, std::max(kPage, inputs_.alignment_bytes));
    n.gradient_slot_bytes = round_up(n.gradient_slot_bytes, std::max(kPage, inputs_.alignment_bytes));
    n.copy_slot_bytes = round_up(n.copy_slot_bytes, std::max(kPage, inputs_.alignment_bytes));
    n.fixed_bytes = round_up(n.fixed_bytes, kPage) + staging_bytes();
    return n;
  }

  // The largest chunk size that leaves a comfortable number of slots; else the largest that fits at all. Where none
  // does, returns the least that budget.host would have to be; otherwise 0.
  template <class SetTiers>
  std::uint64_t find_chunk_size(const SetTiers& apply_tiers) {
    std::uint64_t fits = 0;
    std::uint64_t smallest = UINT64_MAX;
    for (std::uint64_t elements : kChunkElements) {
      if (round_up(elements, plan_.granule) != elements) break;
      // Smaller chunks of a model this large would be more than can be named.
      if (elements != kChunkElements.front() && plan_.layout.chunks.size() > (std::size_t{1} << 22)) break;
      set_layout(elements);
      apply_tiers();
      const Needs n = needs();
      smallest = std::min(smallest, n.minimum());
      if (n.minimum() > config_.budget.host_bytes) continue;
      if (fits == 0) fits = elements;
      const std::uint64_t comfortable = n.fixed_bytes + n.gradient_slot_bytes * 2 + n.copy_slot_bytes * kCopySlots +
                                        n.update_slot_bytes * std::min(n.update_chunks, kComfortableUpdateSlots) +
                                        n.fetch_slot_bytes * std::min(n.fetch_chunks, kComfortableFetchSlots);
      if (comfortable <= config_.budget.host_bytes) return 0;
      fits = elements;
    }
    if (fits == 0) return smallest;
    set_layout(fits);
    apply_tiers();
    return 0;
  }

  [[noreturn]] void refuse_host_budget(std::uint64_t smallest) const {
    throw PlanError("budget.host is " + format_size(config_.budget.host_bytes) + ", but " + describe_needs() +
                    " need more; smallest budget.host: " + kib(smallest));
  }

  std::string describe_needs() const {
    const Needs n = needs();
    return format_size(n.fixed_bytes) + " of gradients and resident states and one slot each of " +
           format_size(n.update_slot_bytes) + " (update), " + format_size(n.fetch_slot_bytes) + " (fetch) and " +
           format_size(n.gradient_slot_bytes) + " (gradient)" +
           (n.copy_slot_bytes > 0 ? " and " + format_size(n.copy_slot_bytes) + " for checkpoints" : std::string());
  }

  // --- device -------------------------------------------------------------------------------------------------------

  bool parameters_on_device(const UnitLayout& unit) const {
    return unit.chunk_count > 0 && plan_.placement[unit.first_chunk].parameters == Tier::device;
  }

  std::uint64_t device_static_bytes() const {
    std::uint64_t bytes = 0;
    for (const UnitLayout& unit : plan_.layout.units) bytes += parameters_on_device(unit) ? unit.device_bytes : 0;
    for (std::size_t c = 0; c < plan_.layout.chunks.size(); ++c) {
      const ChunkLayout& chunk = plan_.layout.chunks[c];
      const ChunkPlacement& place = plan_.placement[c];
      if (place.optimizer == Tier::device) bytes += chunk.optimizer_bytes();
      if (place.gradients == Tier::device && chunk.trainable) bytes += chunk.elements * gradient_bytes_;
    }
    return bytes;
  }

  // Throws PlanError where the openings do not fit beside what lives on the device for good.
  void plan_device() {
    const std::vector<schedule::Opening> openings = device_openings(plan_, inputs_.openings, gradient_bytes_);
    const std::uint64_t fixed = device_static_bytes();
    const std::uint64_t smallest = schedule::compile_device_map(openings, 0).smallest_bytes;
    if (fixed + smallest > config_.budget.device_bytes) {
      throw PlanError(
          "budget.device is " + format_size(config_.budget.device_bytes) + ", but " + format_size(fixed) +
          " of states that live there and " + format_size(smallest) +
          " for the units that are open at once need more; smallest budget.device: " + kib(fixed + smallest));
    }
    // Beyond all parameters and the gradients of three units more memory changes nothing.
    std::uint64_t useful = 0;
    std::uint64_t largest_gradient = 0;
    std::vector<bool> counted(units_.size(), false);
    for (const schedule::Opening& opening : openings) {
      if (opening.gradient) {
        largest_gradient = std::max(largest_gradient, opening.bytes);
      } else if (!counted[opening.unit]) {
        counted[opening.unit] = true;
        useful += opening.bytes;
      }
    }
    useful = std::max(useful + 3 * largest_gradient, smallest);
    plan_.device_window_bytes = std::min(useful, config_.budget.device_bytes - fixed);
    plan_.device_window_bytes = std::max(smallest, plan_.device_window_bytes / kPage * kPage);
  }

  // --- automatic placement ------------------------------------------------------------------------------------------

  bool device_fits() {
    try {
      plan_device();
      return true;
    } catch (const PlanError&) {
      return false;
    }
  }

  // "nvme", or "30 % host, 70 % nvme", by elements.
  std::string tiers_text(Tier ChunkPlacement::*state) const {
    std::map<Tier, std::uint64_t> elements;
    std::uint64_t all = 0;
    for (std::size_t c = 0; c < plan_.placement.size(); ++c) {
      elements[plan_.placement[c].*state] += plan_.layout.chunks[c].elements;
      all += plan_.layout.chunks[c].elements;
    }
    std::string text;
    for (const auto& [tier, count] : elements) {
      if (elements.size() == 1) return std::string(to_string(tier));
      text += (text.empty() ? "" : " and ") +
              std::to_string((100 * count + all / 2) / std::max<std::uint64_t>(all, 1)) + " % " +
              std::string(to_string(tier));
    }
    return text.empty() ? "nowhere" : text;
  }

  void choose_automatically() {
    const auto stored_before = plan_.stored_gradients;
    if (optimizer_may_be_on_device()) {
      set_tiers(Tier::device, Tier::device, Tier::device);
      if (device_fits() && needs().minimum() <= config_.budget.host_bytes) return;
      plan_.stored_gradients = stored_before;
    }
    set_tiers(Tier::host, Tier::host, Tier::host);
    plan_device();
    if (needs().minimum() <= config_.budget.host_bytes) return;
    // Gradients leave host memory last: on NVMe they cost their bytes each way once more.
    const std::uint64_t with_gradients = find_chunk_size([&] { set_tiers(Tier::nvme, Tier::host, Tier::nvme); });
    if (with_gradients > 0) {
      const std::uint64_t without = find_chunk_size([&] { set_tiers(Tier::nvme, Tier::nvme, Tier::nvme); });
      if (without > 0) refuse_host_budget(std::min(with_gradients, without));
    }
    // What a comfortable number of slots leaves holds a fixed part of the states: parameters first (6 bytes of traffic
    // saved per 2 held), then optimizer states (2 per 1), spread evenly over the chunks.
    const Needs n = needs();
    const std::uint64_t slots = comfortable_slot_bytes(n);
    if (n.fixed_bytes + slots >= config_.budget.host_bytes) return;
    std::uint64_t left = config_.budget.host_bytes - n.fixed_bytes - slots;
    if (!keeps_parameters()) {
      left -= make_resident(
          left, [&](std::size_t c) { return plan_.layout.chunks[c].parameter_bytes; },
          [&](std::size_t c) { plan_.placement[c].parameters = Tier::host; });
    }
    make_resident(
        left, [&](std::size_t c) { return plan_.layout.chunks[c].optimizer_bytes(); },
        [&](std::size_t c) { plan_.placement[c].optimizer = Tier::host; });
  }

  std::uint64_t comfortable_slot_bytes(const Needs& n) const {
    const std::uint64_t per_unit = plan_.timing == Timing::eager ? 2 * n.largest_unit_chunks : 0;
    return n.update_slot_bytes * std::min(n.update_chunks, std::max<std::uint64_t>(24, per_unit)) +
           n.fetch_slot_bytes * std::min<std::uint64_t>(n.fetch_chunks, 24) + n.gradient_slot_bytes * 4 +
           n.copy_slot_bytes * kCopySlots + kPage;
  }

  template <class Bytes, class Take>
  std::uint64_t make_resident(std::uint64_t left, const Bytes& bytes_of, const Take& take) {
    const std::size_t chunks = plan_.layout.chunks.size();
    std::uint64_t total = 0;
    for (std::size_t c = 0; c < chunks; ++c) total += bytes_of(c);
    if (total == 0) return 0;
    // The running share of what is resident follows the share that fits.
    unsigned __int128 seen = 0;
    std::uint64_t held = 0;
    for (std::size_t c = 0; c < chunks; ++c) {
      const std::uint64_t bytes = bytes_of(c);
      seen += bytes;
      const auto target = static_cast<std::uint64_t>(seen * std::min(left, total) / total);
      if (bytes > 0 && held + bytes <= target) {
        held += bytes;
        take(c);
      }
    }
    return held;
  }

  // --- host ---------------------------------------------------------------------------------------------------------

  void share_out_host() {
    const Needs n = needs();
    if (n.minimum() > config_.budget.host_bytes) refuse_host_budget(n.minimum());
    plan_.fetch_slot_bytes = n.fetch_slot_bytes;
    plan_.update_slot_bytes = n.update_slot_bytes;
    plan_.gradient_slot_bytes = n.gradient_slot_bytes;
    plan_.copy_slot_bytes = n.copy_slot_bytes;
    std::uint64_t left = config_.budget.host_bytes - n.minimum();
    std::uint64_t fetch = n.fetch_chunks > 0 ? 1 : 0;
    std::uint64_t update = n.update_chunks > 0 ? 1 : 0;
    std::uint64_t gradient = n.gradient_slot_bytes > 0 ? 1 : 0;
    std::uint64_t copy = n.copy_slot_bytes > 0 ? 1 : 0;
    const auto grow = [&](std::uint64_t& count, std::uint64_t most, std::uint64_t bytes, std::uint64_t share) {
      if (bytes == 0 || count >= most) return;
      const std::uint64_t more = std::min(most - count, share / bytes);
      count += more;
      left -= more * bytes;
    };
    // A second slot of each kind first, then enough for a short queue, then a share each; the rest goes to updates,
    // which can read that far ahead of the global norm.
    grow(update, std::min<std::uint64_t>(n.update_chunks, 2), n.update_slot_bytes, left);
    grow(fetch, std::min<std::uint64_t>(n.fetch_chunks, 2), n.fetch_slot_bytes, left);
    grow(gradient, 2, n.gradient_slot_bytes, left);
    grow(update, std::min<std::uint64_t>(n.update_chunks, 4), n.update_slot_bytes, left);
    grow(copy, kCopySlots, n.copy_slot_bytes, left);
    grow(fetch, std::min<std::uint64_t>(n.fetch_chunks, 64), n.fetch_slot_bytes, left / 10);
    grow(gradient, 16, n.gradient_slot_bytes, left / 10);
    grow(update, n.update_chunks, n.update_slot_bytes, left);
    grow(fetch, n.fetch_chunks, n.fetch_slot_bytes, left / 2);
    plan_.fetch_slots = static_cast<std::uint32_t>(fetch);
    plan_.update_slots = static_cast<std::uint32_t>(update);
    plan_.gradient_slots = static_cast<std::uint32_t>(gradient);
    plan_.copy_slots = static_cast<std::uint32_t>(copy);
  }

  void finish() {
    Plan& p = plan_;
    std::uint64_t traffic = 0;
    std::uint64_t saved = 0;
    for (const UnitLayout& unit : p.layout.units) {
      p.unit_parameter_offset.push_back(p.device_parameter_bytes);
      if (parameters_on_device(unit)) p.device_parameter_bytes += unit.device_bytes;
    }
    for (std::size_t c = 0; c < p.layout.chunks.size(); ++c) {
      const ChunkLayout& chunk = p.layout.chunks[c];
      ChunkPlacement& place = p.placement[c];
      place.extent_bytes = extent_bytes(c);
      place.stored_bytes = place.extent_bytes;
      if (p.durable) {
        place.stored_bytes = chunk.parameter_bytes + chunk.optimizer_bytes();
        place.extent_begin_bytes = place.parameters == Tier::nvme ? 0 : chunk.parameter_bytes;
      }
      place.gradient_extent_bytes = gradient_extent_bytes(c);
      p.nvme_gradients |= place.gradient_extent_bytes > 0;
      p.uses_nvme |= place.stored_bytes + place.gradient_extent_bytes > 0;
      const auto put = [](std::uint64_t& region, std::uint64_t bytes) {
        const std::uint64_t at = region;
        region += bytes;
        return at;
      };
      if (place.parameters == Tier::host) {
        place.parameter_offset = put(p.host_parameter_bytes, chunk.parameter_bytes);
      } else if (place.parameters == Tier::device) {
        place.parameter_offset = p.unit_parameter_offset[chunk.unit] + chunk.device_offset;
      }
      if (place.optimizer != Tier::nvme) {
        place.optimizer_offset = put(place.optimizer == Tier::host ? p.host_optimizer_bytes : p.device_optimizer_bytes,
                                     chunk.optimizer_bytes());
      }
      if (chunk.trainable && stored(chunk) && place.gradients != Tier::nvme) {
        place.gradient_offset = put(place.gradients == Tier::host ? p.host_gradient_bytes : p.device_gradient_bytes,
                                    chunk.elements * gradient_bytes_);
      }
      // Parameters are read twice and written once a step, the optimizer's states once each.
      const std::uint64_t parameter_traffic = 3 * chunk.parameter_bytes;
      const std::uint64_t optimizer_traffic = 2 * chunk.optimizer_bytes();
      traffic += parameter_traffic + optimizer_traffic;
      if (place.parameters != Tier::nvme) saved += parameter_traffic;
      if (place.optimizer != Tier::nvme) saved += optimizer_traffic;
    }
    p.resident_fraction = traffic == 0 ? 1.0 : static_cast<double>(saved) / static_cast<double>(traffic);
    p.staging_bytes = staging_bytes();
    p.host_bytes = round_up(p.host_gradient_bytes + p.host_parameter_bytes + p.host_optimizer_bytes, kPage) +
                   p.staging_bytes + p.fetch_slots * p.fetch_slot_bytes + p.update_slots * p.update_slot_bytes +
                   p.gradient_slots * p.gradient_slot_bytes + p.copy_slots * p.copy_slot_bytes;
    p.device_bytes =
        p.device_parameter_bytes + p.device_optimizer_bytes + p.device_gradient_bytes + p.device_window_bytes;
    BALLAST_CHECK(p.host_bytes <= config_.budget.host_bytes);
    BALLAST_CHECK(p.device_bytes <= config_.budget.device_bytes);
  }

  const std::vector<UnitSpec>& units_;
  const Config& config_;
  const PlanInputs& inputs_;
  std::uint64_t gradient_bytes_;
  Plan plan_;
};

}  // namespace

std::vector<schedule::Opening> device_openings(const Plan& plan, const std::vector<TraceOpening>& openings,
                                               std::uint64_t gradient_element_bytes) {
  std::vector<schedule::Opening> result;
  result.reserve(openings.size());
  for (const TraceOpening& opening : openings) {
    const UnitLayout& unit = plan.layout.units[opening.unit];
    const bool on_device = unit.chunk_count > 0 && plan.placement[unit.first_chunk].parameters == Tier::device;
    const std::uint64_t bytes = opening.gradient ? unit.gradient_elements * gradient_element_bytes
                                : on_device      ? 0
                                                 : unit.device_bytes;
    result.push_back({opening.unit, opening.gradient, bytes, opening.open_at, opening.close_at});
  }
  return result;
}

Plan make_plan(const std::vector<UnitSpec>& units, const Config& config, const PlanInputs& inputs) {
  return Planner(units, config, inputs).run();
}

}  // namespace ballast::engine
