// Putting programs together, and the traces of their passes.
// SPDX-License-Identifier: Apache-2.0
#include <ballast/base/check.h>
#include <ballast/schedule/device_map.h>
#include <ballast/simulate/plan.h>

#include <algorithm>

namespace ballast::simulate {

using schedule::Chunk;
using schedule::Unit;

std::vector<Access> record_pass(const std::vector<Operation>& program, std::size_t begin, std::size_t end) {
  std::vector<Access> accesses;
  std::vector<std::pair<Index, std::size_t>> open;  // (handle, access)
  std::uint32_t now = 0;
  for (std::size_t i = begin; i < end; ++i) {
    const Operation& operation = program[i];
    if (operation.verb == Verb::take_back) continue;  // is no part of the pass
    switch (operation.verb) {
      case Verb::open_parameters:
      case Verb::open_gradients:
        open.emplace_back(operation.handle, accesses.size());
        accesses.push_back({operation.unit, operation.verb == Verb::open_gradients, false, false, now, 0xFFFFFFFFu});
        break;
      case Verb::commit:
      case Verb::give_up:
      case Verb::release: {
        const auto at =
            std::find_if(open.begin(), open.end(), [&](const auto& o) { return o.first == operation.handle; });
        BALLAST_CHECK(at != open.end());
        accesses[at->second].close_at = now;
        accesses[at->second].given_up = operation.verb == Verb::give_up;
        open.erase(at);
        break;
      }
      default:
        break;
    }
    ++now;
  }
  for (const auto& [handle, access] : open) accesses[access].close_at = now;
  for (std::size_t i = 0; i < accesses.size(); ++i) {
    for (std::size_t k = 0; k < accesses.size() && accesses[i].gradient; ++k) {
      if (accesses[k].gradient && accesses[k].unit == accesses[i].unit && accesses[k].close_at > accesses[i].close_at) {
        accesses[i].partial = true;
      }
    }
  }
  return accesses;
}

std::vector<schedule::Opening> openings_of(const Plan& plan, const std::vector<Access>& pass) {
  std::vector<schedule::Opening> openings;
  for (const Access& a : pass) {
    const Unit& u = plan.units[a.unit];
    openings.push_back({a.unit, a.gradient, a.gradient ? u.gradient_bytes : u.parameter_bytes, a.open_at, a.close_at});
  }
  return openings;
}

bool same_accesses(const std::vector<Access>& a, const std::vector<Access>& b) {
  return std::equal(a.begin(), a.end(), b.begin(), b.end(), [](const Access& x, const Access& y) {
    return x.unit == y.unit && x.gradient == y.gradient && x.partial == y.partial && x.given_up == y.given_up &&
           x.open_at == y.open_at && x.close_at == y.close_at;
  });
}

PassTrace compile_pass(const Plan& plan, std::vector<Access> accesses) {
  PassTrace trace;
  trace.accesses = std::move(accesses);
  const schedule::DeviceMap map = schedule::compile_device_map(openings_of(plan, trace.accesses), plan.slab_bytes);
  trace.known = map.fits && !trace.accesses.empty();
  trace.offsets = map.offsets;
  const std::size_t count = trace.accesses.size();
  trace.first_parameters.assign(count, 0);
  trace.carries_update.assign(count, 0);
  trace.queues_update.assign(count, 0);
  trace.forward_end = count;
  std::vector<Index> commits(plan.units.size(), 0);
  std::vector<std::size_t> last_parameters(plan.units.size(), count), gradient_of(count, count);
  for (const Access& a : trace.accesses) commits[a.unit] += a.gradient ? 1 : 0;
  for (std::size_t i = 0; i < count; ++i) {
    const Access& a = trace.accesses[i];
    if (a.gradient) {
      const bool last = !a.partial && !(plan.ranks > 1 && a.given_up);
      trace.forward_end = std::min(trace.forward_end, i);
      trace.queues_update[i] = last;
      if (last && commits[a.unit] == 1 && last_parameters[a.unit] < count) gradient_of[last_parameters[a.unit]] = i;
    } else {
      trace.first_parameters[i] = last_parameters[a.unit] == count;
      last_parameters[a.unit] = i;
    }
  }
  if (plan.timing != Timing::eager) return trace;
  // A unit's update slots are held from its parameters (or, queued with it, from its gradient's opening) until its
  // gradient has come; parameters that bring their update with them must find slots beside what is held.
  std::vector<std::pair<std::uint32_t, Index>> held;  // (until, chunks)
  for (std::size_t i = 0; i < count; ++i) {
    const Access& a = trace.accesses[i];
    std::erase_if(held, [&](const auto& h) { return h.first <= a.open_at; });
    if (a.gradient && trace.queues_update[i] != 0) held.emplace_back(a.close_at, plan.units[a.unit].chunk_count);
    if (gradient_of[i] == count) continue;
    Index chunks = plan.units[a.unit].chunk_count;
    for (const auto& h : held) chunks += h.second;
    if (chunks > plan.limits.update_slots) continue;
    held.emplace_back(trace.accesses[gradient_of[i]].close_at, plan.units[a.unit].chunk_count);
    trace.carries_update[i] = 1;
    trace.queues_update[gradient_of[i]] = 0;
    trace.forward_end = std::min(trace.forward_end, i);
  }
  return trace;
}

std::uint64_t smallest_slab(const Plan& plan, const std::vector<Access>& pass) {
  return schedule::compile_device_map(openings_of(plan, pass), 0).smallest_bytes;
}

Index ProgramWriter::open_parameters(Index unit) {
  plan_.handles.push_back(unit);
  const auto handle = static_cast<Index>(plan_.handles.size() - 1);
  add({Verb::open_parameters, unit, handle});
  return handle;
}

Index ProgramWriter::open_gradients(Index unit) {
  plan_.handles.push_back(unit);
  const auto handle = static_cast<Index>(plan_.handles.size() - 1);
  add({Verb::open_gradients, unit, handle});
  return handle;
}

void ProgramWriter::release(Index handle) { add({Verb::release, plan_.handles[handle], handle}); }

void ProgramWriter::commit(Index handle, bool last, std::uint32_t mask) {
  add({Verb::commit, plan_.handles[handle], handle, 0, mask, last});
}

void ProgramWriter::give_up(Index handle) { add({Verb::give_up, plan_.handles[handle], handle}); }

void ProgramWriter::forward(Index unit) {
  const Index parameters = open_parameters(unit);
  compute(unit);
  release(parameters);
}

void ProgramWriter::backward(Index unit, bool last, std::uint32_t mask) {
  const Index parameters = open_parameters(unit);
  const Index gradients = open_gradients(unit);
  compute(unit);
  commit(gradients, last, mask);
  release(parameters);
}

void ProgramWriter::training_pass(bool last, std::uint32_t mask) {
  begin_pass(false);
  const auto units = static_cast<Index>(plan_.units.size());
  for (Index u = 0; u < units; ++u) forward(u);
  for (Index u = units; u-- > 0;) backward(u, last, mask);
  end_pass();
}

void ProgramWriter::evaluation_pass() {
  begin_pass(true);
  for (Index u = 0; u < plan_.units.size(); ++u) forward(u);
  end_pass();
}

void ProgramWriter::step(Index passes, bool update, std::uint32_t mask) {
  begin_step(passes);
  for (Index p = 0; p < passes; ++p) training_pass(p + 1 == passes, mask);
  decide(update);
}

Plan make_plan(const Shape& shape, Timing timing) {
  Plan plan;
  plan.timing = timing;
  plan.ranks = shape.ranks;
  const bool several = shape.ranks > 1;
  const Index cells = shape.chunks_per_unit * (several && !shape.whole ? shape.ranks : 1);
  for (Index u = 0; u < shape.units; ++u) {
    Unit unit;
    unit.first_chunk = static_cast<Index>(plan.chunks.size());
    unit.chunk_count = shape.chunks_per_unit;
    unit.parameter_bytes = shape.parameters == schedule::Tier::device ? 0 : cells;
    unit.gradient_bytes = cells;
    unit.gathered = several && !shape.whole;
    unit.reduced = several;
    unit.stored_gradients = shape.stored_gradients;
    for (Index c = 0; c < shape.chunks_per_unit; ++c) {
      Chunk chunk;
      chunk.unit = u;
      chunk.parameters = shape.parameters;
      chunk.optimizer = shape.optimizer;
      chunk.gradients = shape.gradients;
      chunk.parameter_bytes = 2;
      chunk.optimizer_bytes = 10;
      chunk.gradient_bytes = 4;
      plan.chunks.push_back(chunk);
    }
    plan.units.push_back(unit);
  }
  return plan;
}

void share_among(Plan& plan, Index unit, Index ranks) {
  if (plan.unit_ranks.empty()) plan.unit_ranks.assign(plan.units.size(), plan.ranks);
  plan.unit_ranks[unit] = ranks;
  Unit& u = plan.units[unit];
  u.gathered = u.gathered && ranks > 1;
  if (u.parameter_bytes > 0) u.parameter_bytes = u.chunk_count * shards_of(plan, unit);
  if (u.gradient_bytes > 0) u.gradient_bytes = u.chunk_count * shards_of(plan, unit);
}

void expect_default_pass(Plan& plan, Index passes) {
  Plan usual = plan;
  usual.program.clear();
  usual.handles.clear();
  ProgramWriter writer(usual);
  writer.training_pass(true);
  plan.expected = record_pass(usual.program, 1, usual.program.size() - 1);
  plan.expected_passes = passes;
  plan.slab_bytes = smallest_slab(plan, plan.expected);
}

}  // namespace ballast::simulate
