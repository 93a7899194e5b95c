// From an engine's plan to the simulator's.
// SPDX-License-Identifier: Apache-2.0
#include "step_model.h"

#include <ballast/base/check.h>
#include <ballast/base/size.h>

#include <algorithm>
#include <map>
#include <numeric>
#include <tuple>

#include "plan_schedule.h"

namespace ballast::planner {

using simulate::Index;
using simulate::Operation;
using simulate::Verb;

namespace {

// Chunks beyond so many are merged: the model names each in 16 bits, once for each of two ranks.
constexpr std::uint64_t kChunksMost = 12'000;
// Places on the device that the model holds apart.
constexpr std::uint64_t kCellsMost = std::uint64_t{1} << 24;

// Chunks of a unit that lie alike become one. Bytes stay; slots become as many fewer.
// `place` tells where each has gone.
std::uint64_t merge_chunks(std::vector<schedule::Chunk>& chunks, std::vector<schedule::Unit>& units,
                           std::vector<Index>& place) {
  const std::uint64_t most = base::ceil_div(chunks.size(), kChunksMost);
  place.resize(chunks.size());
  std::iota(place.begin(), place.end(), Index{0});
  if (most <= 1) return 1;
  std::vector<schedule::Chunk> merged;
  for (schedule::Unit& unit : units) {
    const auto first = static_cast<Index>(merged.size());
    using Likeness = std::tuple<schedule::Tier, schedule::Tier, schedule::Tier, bool>;
    std::map<Likeness, std::pair<std::size_t, std::uint64_t>> open;  // the last of each kind, and what is in it
    for (Index c = unit.first_chunk; c < unit.first_chunk + unit.chunk_count; ++c) {
      const schedule::Chunk& chunk = chunks[c];
      const Likeness likeness{chunk.parameters, chunk.optimizer, chunk.gradients, chunk.trainable};
      const auto found = open.find(likeness);
      if (found == open.end() || found->second.second == most) {
        open[likeness] = {merged.size(), 1};
        place[c] = static_cast<Index>(merged.size());
        merged.push_back(chunk);
        continue;
      }
      schedule::Chunk& into = merged[found->second.first];
      place[c] = static_cast<Index>(found->second.first);
      into.parameter_bytes += chunk.parameter_bytes;
      into.optimizer_bytes += chunk.optimizer_bytes;
      into.gradient_bytes += chunk.gradient_bytes;
      ++found->second.second;
    }
    unit.first_chunk = first;
    unit.chunk_count = static_cast<Index>(merged.size()) - first;
  }
  chunks = std::move(merged);
  return most;
}

// Device memory in cells: as exact as the sizes of the units allow, but at least one for each chunk that lies there.
class Cells {
 public:
  Cells(const std::vector<schedule::Unit>& units, Index ranks, std::uint64_t window_bytes) : ranks_(ranks) {
    std::uint64_t common = 0;
    for (const schedule::Unit& unit : units)
      common = std::gcd(std::gcd(common, unit.parameter_bytes), unit.gradient_bytes);
    common_ = std::max<std::uint64_t>(common, 1);
    for (const schedule::Unit& unit : units) {
      for (const std::uint64_t bytes : {unit.parameter_bytes, unit.gradient_bytes}) {
        if (bytes > 0) each_ = std::max(each_, base::ceil_div(least(unit), bytes / common_));
      }
    }
    while (window_bytes / common_ * each_ / coarse_ > kCellsMost) coarse_ *= 2;
  }
  std::uint64_t window(std::uint64_t bytes) const {
    return static_cast<std::uint64_t>(static_cast<unsigned __int128>(bytes) * each_ / common_ / coarse_);
  }
  std::uint64_t of(const schedule::Unit& unit, std::uint64_t bytes) const {
    return bytes == 0 ? 0 : std::max(least(unit), base::ceil_div(bytes / common_ * each_, coarse_));
  }

 private:
  std::uint64_t least(const schedule::Unit& unit) const { return std::uint64_t{unit.chunk_count} * ranks_; }

  Index ranks_;
  std::uint64_t common_ = 1;             // bytes
  std::uint64_t each_ = 1, coarse_ = 1;  // cells in so many bytes: each / coarse
};

simulate::Timing timing_of(Timing timing) {
  return timing == Timing::eager            ? simulate::Timing::eager
         : timing == Timing::after_backward ? simulate::Timing::after_backward
                                            : simulate::Timing::just_in_time;
}

// A pass: every access opens, computes and ends as the trainer does it.
void write_pass(simulate::Plan& plan, const RunModel& model, const std::vector<bool>& trainable,
                const std::vector<std::uint64_t>& access_ns, const std::vector<Index>& contributions, bool last_pass) {
  simulate::ProgramWriter writer(plan);
  const std::vector<ExpectedAccess>& order = model.order;
  std::vector<std::size_t> last(model.units.size(), SIZE_MAX);
  for (std::size_t i = 0; i < order.size(); ++i) {
    if (order[i].gradient) last[order[i].unit.index] = i;
  }
  struct Open {
    std::size_t end, access;
    Index handle;
    bool gradient;
  };
  std::vector<Open> open;
  writer.begin_pass(false);
  for (std::size_t i = 0; i < order.size(); ++i) {
    const ExpectedAccess& access = order[i];
    const Index unit = access.unit.index;
    const std::size_t end = i + static_cast<std::size_t>(std::max(access.open_through, 0));
    const bool gradient = access.gradient && trainable[unit];
    if (access.parameters) open.push_back({end, i, writer.open_parameters(unit), false});
    if (gradient) open.push_back({end, i, writer.open_gradients(unit), true});
    // Parameters that stay open are worked with in the accesses that follow.
    if (gradient || (access.parameters && access.open_through == 0)) {
      writer.compute(unit);
      plan.program.back().work_ns = access_ns.empty() ? 0 : access_ns[i];
    }
    for (std::size_t k = open.size(); k-- > 0;) {
      if (open[k].end > i && i + 1 < order.size()) continue;
      if (open[k].gradient) {
        writer.commit(open[k].handle, last_pass && last[order[open[k].access].unit.index] == open[k].access);
        plan.program.back().contribution = contributions[open[k].access];
      } else {
        writer.release(open[k].handle);
      }
      open.erase(open.begin() + static_cast<std::ptrdiff_t>(k));
    }
  }
  writer.end_pass();
}

// One rank: a chunk all of whose parameters are absent has no gradient to move, and neither has mere padding. Several:
// every chunk has, since another rank's may be there.
std::vector<Index> note_contributions(const engine::Plan& plan, const RunModel& model, const std::vector<Index>& place,
                                      simulate::Plan& to) {
  std::vector<Index> contributions(model.order.size(), simulate::kNone);
  if (plan.world_size > 1) return contributions;
  std::map<std::pair<Index, std::vector<std::uint32_t>>, Index> known;
  for (std::size_t i = 0; i < model.order.size(); ++i) {
    if (!model.order[i].gradient) continue;
    const Index unit = model.order[i].unit.index;
    const std::vector<std::uint32_t> absent =
        model.access_absent.empty() ? std::vector<std::uint32_t>{} : model.access_absent[i];
    const auto [found, added] = known.try_emplace({unit, absent}, static_cast<Index>(to.contributions.size()));
    contributions[i] = found->second;
    if (!added) continue;
    const engine::UnitLayout& layout = plan.layout.units[unit];
    std::vector<std::uint8_t>& of = to.contributions.emplace_back(to.units[unit].chunk_count, std::uint8_t{0});
    for (std::uint32_t c = layout.first_chunk; c < layout.first_chunk + layout.chunk_count; ++c) {
      const engine::ChunkLayout& chunk = plan.layout.chunks[c];
      for (std::uint32_t s = chunk.first_segment; s < chunk.first_segment + chunk.segment_count; ++s) {
        const std::uint32_t parameter = plan.layout.segments[s].parameter;
        if (std::find(absent.begin(), absent.end(), parameter) == absent.end())
          of[place[c] - to.units[unit].first_chunk] = 1;
      }
    }
  }
  return contributions;
}

}  // namespace

StepModel step_model(const engine::Plan& plan, const Config& config, const RunModel& model,
                     const std::vector<engine::TraceOpening>& openings, const std::vector<std::uint64_t>& access_ns,
                     std::uint32_t passes, std::uint32_t steps) {
  const std::uint64_t gradient_bytes = element_bytes(config.precision.gradients);
  StepModel result;
  simulate::Plan& to = result.plan;
  to.chunks = engine::schedule_chunks(plan, gradient_bytes);
  to.units = engine::schedule_units(plan, gradient_bytes);
  to.limits = engine::schedule_limits(plan, config, openings);
  std::vector<Index> place;
  result.merged = merge_chunks(to.chunks, to.units, place);
  for (Index* count : {&to.limits.fetch_slots, &to.limits.update_slots, &to.limits.gradient_slots}) {
    if (*count > 0) *count = std::max<Index>(*count / static_cast<Index>(result.merged), std::min<Index>(*count, 2));
  }
  to.ranks = plan.world_size > 1 ? 2 : 1;  // one other stands for all the others
  result.world_size = plan.partition.all_shards ? plan.world_size : plan.partition.world_size;
  const Cells cells(to.units, to.ranks, plan.device_window_bytes);
  std::vector<bool> trainable;
  for (schedule::Unit& unit : to.units) {
    trainable.push_back(unit.gradient_bytes > 0);
    const std::uint64_t parameters = cells.of(unit, unit.parameter_bytes);
    unit.gradient_bytes = cells.of(unit, unit.gradient_bytes);
    unit.parameter_bytes = parameters;
  }
  to.timing = timing_of(plan.timing);
  to.run_ahead = 1'000'000;
  to.timed = true;
  to.expected_passes = passes;

  const std::vector<Index> contributions = note_contributions(plan, model, place, to);
  simulate::Plan pass = to;
  write_pass(pass, model, trainable, access_ns, contributions, true);
  to.expected = simulate::record_pass(pass.program, 1, pass.program.size() - 1);
  to.slab_bytes = std::max(simulate::smallest_slab(to, to.expected), cells.window(plan.device_window_bytes));

  simulate::ProgramWriter writer(to);
  for (std::uint32_t s = 0; s < steps; ++s) {
    writer.begin_step(passes);
    for (std::uint32_t p = 0; p < passes; ++p)
      write_pass(to, model, trainable, access_ns, contributions, p + 1 == passes);
    writer.decide(true);
  }
  writer.settle();
  return result;
}

}  // namespace ballast::planner
