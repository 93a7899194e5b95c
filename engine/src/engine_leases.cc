// Leases: opening units on the device, releasing them, committing gradients; and what that does on a stream.
// SPDX-License-Identifier: Apache-2.0
#include <ballast/base/check.h>
#include <ballast/base/size.h>

#include <algorithm>
#include <cstring>

#include "engine_implementation.h"

namespace ballast {

using engine::ChunkLayout;
using engine::ParameterLayout;
using engine::Segment;
using engine::UnitLayout;
using schedule::kNone;

// --- lease records ---------------------------------------------------------------------------------------------------

std::uint64_t EngineImplementation::new_lease(std::uint32_t unit, bool gradient, schedule::Index entry,
                                              offload::Stream* stream) {
  if (free_leases_.empty()) {
    free_leases_.push_back(static_cast<std::uint32_t>(leases_.size()));
    leases_.emplace_back();
  }
  const std::uint32_t index = free_leases_.back();
  free_leases_.pop_back();
  Lease& lease = leases_[index];
  const std::uint32_t generation = lease.generation + 1;
  std::vector<std::uint8_t> absent = std::move(lease.absent);
  absent.clear();
  lease = Lease{};
  lease.absent = std::move(absent);
  lease.alive = true;
  lease.gradient = gradient;
  lease.generation = generation;
  lease.index = index;
  lease.unit = unit;
  lease.entry = entry;
  lease.stream = stream;
  lease.pass = pass_.serial;
  return (std::uint64_t{generation} << 32) | index;
}

EngineImplementation::Lease& EngineImplementation::lease_of(std::uint64_t id) {
  Lease& lease = leases_[static_cast<std::uint32_t>(id)];
  BALLAST_CHECK(lease.alive && lease.generation == id >> 32);
  return lease;
}

void EngineImplementation::end_lease(Lease& lease) {
  lease.ended = true;
  if (lease.gated) return;  // its gate is still queued on its stream, and ends it
  lease.alive = false;
  free_leases_.push_back(lease.index);
}

void EngineImplementation::pass_gate(Lease& lease) {
  lease.gated = false;
  if (lease.gate_watched) executor_->wake();
  if (lease.ended) end_lease(lease);
}

// A lease may end on another stream than it was opened on: not before that one has let it through.
void EngineImplementation::wait_for_gate(Lock& lock, Lease& lease) {
  if (!lease.gated) return;
  lease.gate_watched = true;
  executor_->wait_on_stream(lock, [&] { return !lease.gated; });
}

offload::Stream& EngineImplementation::stream_of(const Stream& stream) {
  if (stream.stream_ == nullptr) throw UsageError("an empty stream; take one from Engine::stream()");
  return *static_cast<offload::Stream*>(stream.stream_);
}

// --- opening ---------------------------------------------------------------------------------------------------------

// A place beside everything the caller holds; beside everything else too, where there is one.
std::uint64_t EngineImplementation::place_on_demand(std::uint32_t unit, bool gradient) {
  schedule::Scheduler& scheduler = executor_->scheduler();
  const UnitLayout& layout = plan_.layout.units[unit];
  const bool on_device = layout.chunk_count > 0 && plan_.placement[layout.first_chunk].parameters == Tier::device;
  const std::uint64_t bytes = gradient    ? layout.gradient_elements * element_bytes(config_.precision.gradients)
                              : on_device ? 0
                                          : layout.device_bytes;
  const std::uint64_t window = plan_.device_window_bytes;
  std::uint64_t copy = 0;
  if (bytes == 0) return 0;
  if (!gradient && scheduler.copy_offset(unit, &copy)) return copy;
  for (bool held_only : {false, true}) {
    if (!held_only && several_ranks()) continue;  // what has ended by now differs between them
    // Parameters from the bottom, gradients from the top, as in the compiled map.
    std::uint64_t at = gradient ? window - std::min(window, bytes) : 0;
    while (at + bytes <= window) {
      const schedule::Index other = scheduler.overlapping(at, bytes, kNone, held_only);
      if (other == kNone) return at;
      if (!gradient) {
        at = scheduler.device_offset(other) + scheduler.entry_bytes(other);
      } else if (scheduler.device_offset(other) < bytes) {
        break;
      } else {
        at = scheduler.device_offset(other) - bytes;
      }
    }
  }
  throw PlanError("unit " + layout.name + " needs " + base::format_size(bytes) + " of device memory for its " +
                  (gradient ? "gradients" : "parameters") +
                  " beside what is held now, and the window of open units is " + base::format_size(window) +
                  "; release units earlier or raise budget.device");
}

schedule::Index EngineImplementation::open(Lock& lock, std::uint32_t unit, bool gradient) {
  executor_->check(lock);
  schedule::Scheduler& scheduler = executor_->scheduler();
  sync_expected();
  if (following_) {
    // The next opening of the trace, or a later one where some were left out.
    const auto& openings = trace_->openings;
    std::size_t at = position_;
    while (at < openings.size() && (openings[at].unit != unit || openings[at].gradient != gradient)) ++at;
    if (at == openings.size()) {
      drop_expected();
      following_ = false;
    } else if (at != position_) {
      position_ = at;
      drop_expected();
    }
  }
  std::uint64_t offset = 0;
  bool on_demand = !following_;
  const engine::Trace* trace = following_ ? trace_ : nullptr;
  const std::size_t index = position_;
  if (following_) {
    ++position_;
    offset = trace_->offsets[index];
    // A caller that opens this before it has committed what the trace closes first: more updates would wait for
    // gradients than there are slots, and its stream for these parameters before it comes to those gradients.
    if (!gradient && plan_.timing == Timing::eager && last_pass_of_step() && trace_->carries_update[index] &&
        queued_chunks_ + plan_.layout.units[unit].chunk_count > plan_.update_slots) {
      drop_expected();
    }
    const bool expected =
        !expected_.empty() && expected_.front().pass == pass_.serial && expected_.front().index == index;
    const schedule::Index entry = expected ? expected_.front().entry : kNone;
    if (!expected && !expected_.empty()) drop_expected();
    const std::uint64_t bytes = scheduler.opening_bytes(unit, gradient);
    // What the caller still holds where this should go, against the trace, must not be waited for.
    const schedule::Index held = scheduler.overlapping(offset, bytes, entry, true);
    std::uint64_t copy = 0;
    const bool shared =
        held != kNone && !gradient && scheduler.entry_unit(held) == unit &&
        (expected ? scheduler.range_assured(entry) : scheduler.copy_offset(unit, &copy) && copy == offset);
    if (held != kNone && !shared) {
      drop_expected();
      on_demand = true;
    } else if (expected) {
      expected_.pop_front();
      scheduler.lease(entry);
      note_update_queued(unit, gradient, trace, index);
      ++prefetched_;
      top_up(lock);
      return entry;
    } else {
      ahead_pass_ = pass_.serial;
      ahead_index_ = position_;
    }
  }
  if (on_demand) offset = place_on_demand(unit, gradient);
  schedule::Index entry = kNone;
  const auto try_append = [&] {
    entry = append(unit, gradient, offset, trace, index, false, last_pass_of_step(), true);
    return entry != kNone;
  };
  if (!try_append()) {
    if (!several_ranks()) drop_expected();
    executor_->wait(lock, try_append);
  }
  note_update_queued(unit, gradient, trace, index);
  sync_expected();
  top_up(lock);
  return entry;
}

ParameterLease EngineImplementation::acquire(UnitId unit, Stream stream) {
  require_initialized();
  unit_layout(unit);
  offload::Stream& on = stream_of(stream);
  if (!pass_.active) throw UsageError("Engine::acquire outside a pass; Step::begin_pass or Engine::begin_pass first");
  Lock lock(executor_->mutex());
  if (units_[unit.index].updated_eagerly && (pass_.options.kind == Pass::train || (several_ranks() && step_.active))) {
    throw UsageError(
        "unit " + plan_.layout.units[unit.index].name +
        " has been updated in this step already (optimizer.timing eager); acquire it before its last gradient is "
        "committed, or evaluate after Step::update");
  }
  ++acquires_;
  note_asked(Asked::acquire, unit.index);
  const schedule::Index entry = open(lock, unit.index, false);
  units_[unit.index].opened = true;
  const std::uint64_t id = new_lease(unit.index, false, entry, &on);
  lease_of(id).opening = recorder_.open(unit.index, false);
  const bool ready = executor_->scheduler().ready(entry);
  lease_of(id).gated = !ready;
  executor_->wake();
  lock.unlock();
  if (!ready) on.call({&EngineImplementation::on_gate, this, id});
  ParameterLease lease;
  lease.engine_ = this;
  lease.id_ = id;
  return lease;
}

// Whatever the timing: with eager updates a later contribution would be lost.
std::string EngineImplementation::second_commit_text(std::uint32_t unit) const {
  return "unit " + plan_.layout.units[unit].name +
         " has had its last gradient of this pass; where it is used more than once, the contributions before the last "
         "are committed with commit_partial";
}

GradientLease EngineImplementation::gradients(UnitId unit, Stream stream) {
  require_initialized();
  unit_layout(unit);
  offload::Stream& on = stream_of(stream);
  if (!pass_.active || pass_.options.kind != Pass::train) throw UsageError("Engine::gradients outside a training pass");
  UnitState& state = units_[unit.index];
  if (!state.trainable)
    throw UsageError("unit " + plan_.layout.units[unit.index].name + " is frozen and takes no gradients");
  Lock lock(executor_->mutex());
  if (state.updated_eagerly) {
    throw UsageError(
        "unit " + plan_.layout.units[unit.index].name +
        " has had its last gradient of this step; contributions before it are committed with commit_partial");
  }
  if (state.last_commit_pass == pass_.serial) throw UsageError(second_commit_text(unit.index));
  note_asked(Asked::gradients, unit.index);
  // The gradient of the step before is consumed by its update; it must not be overwritten before. The stream waits for
  // that; what no open lease has asked for is asked for here.
  // (Several ranks: whether the update is done by now differs between them, whether it has been asked for does not.)
  if (several_ranks() ? !state.opened : !executor_->scheduler().unit_updates_coming(unit.index))
    force_updates(lock, unit.index);
  const schedule::Index entry = open(lock, unit.index, true);
  const std::uint64_t id = new_lease(unit.index, true, entry, &on);
  lease_of(id).opening = recorder_.open(unit.index, true);
  const schedule::Scheduler& scheduler = executor_->scheduler();
  const bool ready = scheduler.ready(entry) && !scheduler.unit_update_due(unit.index);
  lease_of(id).gated = !ready;
  std::byte* const scratch = executor_->window() + scheduler.device_offset(entry);
  executor_->wake();
  lock.unlock();
  if (!ready) on.call({&EngineImplementation::on_gate, this, id});
  // What lies between a unit's gradients counts as zero.
  const std::uint64_t bytes = element_bytes(config_.precision.gradients);
  for (const engine::Gap& gap : plan_.layout.units[unit.index].gradient_gaps) {
    on.fill_zero(scratch + gap.begin * bytes, gap.count * bytes);
  }
  GradientLease lease;
  lease.engine_ = this;
  lease.id_ = id;
  return lease;
}

// On a stream: holds it until the entry is ready.
void EngineImplementation::on_gate(void* self, std::uint64_t id) {
  auto& engine = *static_cast<EngineImplementation*>(self);
  Lock lock(engine.executor_->mutex());
  Lease& lease = engine.lease_of(id);
  const schedule::Scheduler& scheduler = engine.executor_->scheduler();
  const auto open = [&] {
    return scheduler.ready(lease.entry) && !(lease.gradient && scheduler.unit_update_due(lease.unit));
  };
  engine.executor_->wait_on_stream(lock, open);
  engine.pass_gate(lease);
}

// On a stream other than the lease's: holds it until that one has let the lease through.
void EngineImplementation::on_other_gate(void* self, std::uint64_t id) {
  auto& engine = *static_cast<EngineImplementation*>(self);
  Lock lock(engine.executor_->mutex());
  engine.wait_for_gate(lock, engine.lease_of(id));
}

// --- what a lease shows ----------------------------------------------------------------------------------------------

Tensor EngineImplementation::parameter_tensor(std::uint64_t id, ParameterId parameter) {
  const ParameterLayout& layout = parameter_layout(parameter);
  const Lock lock(executor_->mutex());
  const Lease& lease = lease_of(id);
  if (parameter.unit != lease.unit)
    throw UsageError("parameter " + layout.name + " belongs to another unit than this lease");
  std::byte* base = executor_->unit_parameters(lease.unit);
  if (base == nullptr) base = executor_->window() + executor_->scheduler().device_offset(lease.entry);
  return {base + layout.device_offset, layout.dtype, layout.shape, static_cast<std::int64_t>(layout.elements)};
}

Tensor EngineImplementation::gradient_tensor(std::uint64_t id, ParameterId parameter) {
  const ParameterLayout& layout = parameter_layout(parameter);
  const Lock lock(executor_->mutex());
  const Lease& lease = lease_of(id);
  if (parameter.unit != lease.unit)
    throw UsageError("parameter " + layout.name + " belongs to another unit than this lease");
  if (!layout.trainable) throw UsageError("parameter " + layout.name + " is frozen and takes no gradient");
  std::byte* const scratch = executor_->window() + executor_->scheduler().device_offset(lease.entry);
  return {scratch + layout.begin * element_bytes(config_.precision.gradients), config_.precision.gradients,
          layout.shape, static_cast<std::int64_t>(layout.elements)};
}

void EngineImplementation::wait_parameters(std::uint64_t id) {
  Lock lock(executor_->mutex());
  const Lease& lease = lease_of(id);
  executor_->wait(lock, [&] { return executor_->scheduler().ready(lease.entry); });
}

// --- ending a lease --------------------------------------------------------------------------------------------------

void EngineImplementation::release_parameters(std::uint64_t id, Stream* stream) {
  if (forked()) return;
  offload::Stream* on = nullptr;
  {
    const Lock lock(executor_->mutex());
    Lease& lease = lease_of(id);
    on = stream != nullptr ? &stream_of(*stream) : lease.stream;
    executor_->scheduler().note_release_requested(lease.entry);
    if (lease.gradient) forget_update_queued(lease.unit);
    if (lease.pass == pass_.serial) recorder_.close(lease.opening);
  }
  on->notify({&EngineImplementation::on_release, this, id});
}

void EngineImplementation::discard_gradients(std::uint64_t id) { release_parameters(id, nullptr); }

void EngineImplementation::on_release(void* self, std::uint64_t id) {
  auto& engine = *static_cast<EngineImplementation*>(self);
  Lock lock(engine.executor_->mutex());
  Lease& lease = engine.lease_of(id);
  engine.wait_for_gate(lock, lease);
  if (!engine.executor_->failed(lock)) engine.executor_->scheduler().release(lease.entry);
  engine.end_lease(lease);
  engine.executor_->wake();
}

void EngineImplementation::mark_absent(std::uint64_t id, ParameterId parameter) {
  const ParameterLayout& layout = parameter_layout(parameter);
  const Lock lock(executor_->mutex());
  Lease& lease = lease_of(id);
  if (parameter.unit != lease.unit)
    throw UsageError("parameter " + layout.name + " belongs to another unit than this lease");
  if (!layout.trainable) throw UsageError("parameter " + layout.name + " is frozen and takes no gradient");
  lease.absent.resize(plan_.layout.units[lease.unit].parameters.size(), 0);
  lease.absent[parameter.index] = 1;
}

void EngineImplementation::commit_gradients(std::uint64_t id, Stream stream, bool partial) {
  offload::Stream& on = stream_of(stream);
  std::byte* scratch = nullptr;
  bool other_stream = false;
  {
    Lock lock(executor_->mutex());
    Lease& lease = lease_of(id);
    scratch = executor_->window() + executor_->scheduler().device_offset(lease.entry);
    other_stream = lease.gated && lease.stream != &on;
    UnitState& state = units_[lease.unit];
    if (!pass_.active || lease.pass != pass_.serial || state.last_commit_pass == pass_.serial) {
      const std::uint32_t unit = lease.unit;
      const bool over = !pass_.active || lease.pass != pass_.serial;
      lock.unlock();
      discard_gradients(id);
      throw UsageError(over ? "gradients of unit " + plan_.layout.units[unit].name +
                                  " are committed after the pass that they were opened in; commit before it ends"
                            : second_commit_text(unit));
    }
    if (!plan_.stored_gradients[lease.unit] && (partial || !last_pass_of_step())) {
      const std::string& name = plan_.layout.units[lease.unit].name;
      lock.unlock();
      discard_gradients(id);
      throw UsageError(
          "unit " + name +
          " contributes more than once in this step; with optimizer.timing eager, memory for its sum is planned at "
          "commit: declare the order with Engine::expect_order before it");
    }
    const auto& parameters = plan_.layout.units[lease.unit].parameters;
    bool all_requested = true;
    for (std::size_t p = 0; p < parameters.size(); ++p) {
      if (lease.absent.empty() || !lease.absent[p]) state.requested[p] = 1;
      all_requested = all_requested && (!parameters[p].trainable || state.requested[p] != 0);
    }
    if (several_ranks() && plan_.timing == Timing::eager && !partial && last_pass_of_step() && !all_requested) {
      const std::string& name = plan_.layout.units[lease.unit].name;
      lock.unlock();
      discard_gradients(id);
      throw UsageError("unit " + name +
                       " has a parameter without a gradient; with several ranks and optimizer.timing eager the ranks "
                       "cannot agree on that in time: use just_in_time or after_backward");
    }
    // The first update of this step may come with this gradient.
    if (plan_.timing == Timing::eager && !partial && last_pass_of_step()) {
      finish_commit(lock);
      if (!std::exchange(updates_begun_, true)) {
        // A step that is not committed may still be updating; what follows is told apart from it.
        if (plan_.durable) executor_->wait(lock, [&] { return executor_->updates_written(lock); });
        executor_->resident_chunks().begin_step();
        if (commits_step(steps_updated_ + 1)) committer_->expect();
      }
    }
    lease.committed = true;
    lease.partial = partial;
    lease.last = !partial && last_pass_of_step();
    state.partial_open = partial;
    if (!partial) state.last_commit_pass = pass_.serial;
    note_asked(partial ? Asked::commit_partial : Asked::commit, lease.unit);
    if (lease.last && plan_.timing == Timing::eager) state.updated_eagerly = true;
    executor_->scheduler().note_commit_requested(lease.entry);
    if (lease.last) forget_update_queued(lease.unit);
    if (lease.pass == pass_.serial) recorder_.close(lease.opening, !partial);
    ++commits_pending_;
  }
  // Absent parameters add nothing; their scratch holds anything. Only this thread changes the list.
  const std::vector<std::uint8_t>& absent = lease_of(id).absent;
  if (!absent.empty()) {
    if (other_stream) on.call({&EngineImplementation::on_other_gate, this, id});
    const UnitLayout& unit = plan_.layout.units[lease_of(id).unit];
    const std::uint64_t bytes = element_bytes(config_.precision.gradients);
    for (std::size_t p = 0; p < unit.parameters.size(); ++p) {
      if (absent[p]) on.fill_zero(scratch + unit.parameters[p].begin * bytes, unit.parameters[p].elements * bytes);
    }
  }
  on.notify({&EngineImplementation::on_commit, this, id});
}

void EngineImplementation::on_commit(void* self, std::uint64_t id) {
  static_cast<EngineImplementation*>(self)->committed(id);
}

// On a stream, after the work that wrote the gradients.
void EngineImplementation::committed(std::uint64_t id) {
  Lock lock(executor_->mutex());
  Lease& lease = lease_of(id);
  wait_for_gate(lock, lease);
  const UnitLayout& unit = plan_.layout.units[lease.unit];
  UnitState& state = units_[lease.unit];
  schedule::Scheduler& scheduler = executor_->scheduler();
  if (!executor_->failed(lock)) {
    for (std::size_t p = 0; p < unit.parameters.size(); ++p) {
      if (unit.parameters[p].trainable && (lease.absent.empty() || !lease.absent[p])) state.present[p] = 1;
    }
    for (std::uint32_t i = 0; i < unit.chunk_count; ++i) {
      const ChunkLayout& chunk = plan_.layout.chunks[unit.first_chunk + i];
      bool contributes = chunk.trainable && several_ranks();  // another rank may have a gradient where this has none
      for (std::uint32_t s = chunk.first_segment; s < chunk.first_segment + chunk.segment_count && !contributes; ++s) {
        const std::uint32_t p = plan_.layout.segments[s].parameter;
        contributes = chunk.trainable && (lease.absent.empty() || !lease.absent[p]);
      }
      state.contributes[i] = contributes;
      if (contributes) chunk_contributed_[unit.first_chunk + i] = 1;
    }
    const bool eager = lease.last && plan_.timing == Timing::eager;
    if (eager) prepare_update(lease.unit, 1.0 / gradient_divisor(rank_divisor(lease.unit)));
    scheduler.commit_gradients(lease.entry, {state.contributes.get(), unit.chunk_count}, lease.last, eager);
    if (eager && !several_ranks()) {  // several ranks: in update(), where all of them are at the same point
      const bool queued = scheduler.append_eager_updates(lease.unit);
      BALLAST_CHECK(queued);
    }
  }
  --commits_pending_;
  end_lease(lease);
  executor_->wake();
}

}  // namespace ballast
