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
  for (std::size_t i = begin; i < end; ++i) {
    const Operation& operation = program[i];
    const auto now = static_cast<std::uint32_t>(i - begin);
    switch (operation.verb) {
      case Verb::open_parameters:
      case Verb::open_gradients:
        open.emplace_back(operation.handle, accesses.size());
        accesses.push_back({operation.unit, operation.verb == Verb::open_gradients, false, now, 0xFFFFFFFFu});
        break;
      case Verb::commit:
      case Verb::give_up:
      case Verb::release: {
        const auto at =
            std::find_if(open.begin(), open.end(), [&](const auto& o) { return o.first == operation.handle; });
        BALLAST_CHECK(at != open.end());
        accesses[at->second].close_at = now;
        open.erase(at);
        break;
      }
      default:
        break;
    }
  }
  for (const auto& [handle, access] : open) accesses[access].close_at = static_cast<std::uint32_t>(end - begin);
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
  for (Index u = 0; u < shape.units; ++u) {
    Unit unit;
    unit.first_chunk = static_cast<Index>(plan.chunks.size());
    unit.chunk_count = shape.chunks_per_unit;
    unit.parameter_bytes = shape.parameters == schedule::Tier::device ? 0 : shape.chunks_per_unit;
    unit.gradient_bytes = shape.chunks_per_unit;
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
