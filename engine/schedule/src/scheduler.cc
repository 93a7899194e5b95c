// What the trainer asks of the scheduler: entries (uses of device memory), and whether a step's gradients count. See
// the header for the model and the argument why it never stalls. SPDX-License-Identifier: Apache-2.0
#include <ballast/base/check.h>
#include <ballast/schedule/scheduler.h>

#include <algorithm>

#include "scheduler_keys.h"

namespace ballast::schedule {

Scheduler::Scheduler(std::vector<Chunk> chunks, std::vector<Unit> units, const Limits& limits)
    : chunks_(std::move(chunks)),
      units_(std::move(units)),
      limits_(limits),
      chunk_states_(chunks_.size()),
      copies_(units_.size()),
      unit_entries_(units_.size()),
      // Each range that is somebody's, and what lies between two.
      ranges_(2 * (std::size_t{limits.entries} + units_.size()) + 4) {
  BALLAST_CHECK(chunks_.size() < (std::size_t{1} << kChunkBits));
  for (const Unit& unit : units_) BALLAST_CHECK(unit.stored_gradients || !unit.reduced);
  entries_.resize(limits.entries);
  entries_to_check_.reserve(limits.entries);
  jobs_.resize(limits.jobs);
  waits_.reserve(4 * std::size_t{limits.entries});
  unit_changed_.assign(units_.size(), 1);
  unit_committed_.assign(units_.size(), 0);
  gathers_.ring.resize(limits.entries + 1);
  reductions_.ring.resize(limits.entries + 1);
  for (Index i = limits.entries; i-- > 0;) free_entries_.push_back(i);
  for (Index i = limits.jobs; i-- > 0;) free_jobs_.push_back(i);
  const Index slots[3] = {limits.fetch_slots, limits.update_slots, limits.gradient_slots};
  for (std::size_t kind = 0; kind < 3; ++kind) {
    for (Index i = slots[kind]; i-- > 0;) pools_[kind].free.push_back(i);
  }
  const Index depths[5] = {limits.reads, limits.writes, limits.copies_in, limits.copies_out, limits.cpu_tasks};
  for (std::size_t i = 0; i < 5; ++i) {
    BALLAST_CHECK(depths[i] > 0);
    lanes_[i].depth = depths[i];
    lanes_[i].heap.reserve(limits.jobs);
    lanes_[i].place.assign(limits.jobs, kNone);
  }
}

// --- the trainer -----------------------------------------------------------------------------------------------------

bool Scheduler::room_for(Index unit) const {
  // An entry of parameters may bring an update and a fetch for each chunk; one of gradients an update, and later as
  // many gradient jobs and (once cancelled) updates again.
  return !free_entries_.empty() && free_jobs_.size() >= reserved_jobs_ + 3 * std::size_t{units_[unit].chunk_count};
}

void Scheduler::reserve_jobs(Entry& entry, Index count) {
  reserved_jobs_ += count - entry.reserved_jobs;
  entry.reserved_jobs = count;
}

Index Scheduler::append_parameters(Index unit, std::uint64_t device_offset, Form form, bool leased) {
  if (!room_for(unit)) return kNone;
  const Unit& u = units_[unit];
  // Several ranks: whether a gradient has been committed is not the same on all of them before the step is decided, so
  // updates after it that nobody has claimed are left to append_updates() then.
  const auto updates = [&](Index c) { return unclaimed(c) && !(u.reduced && chunk_states_[c].owed); };
  bool any_update = false, waits = false;
  for (Index c = u.first_chunk; c < u.first_chunk + u.chunk_count; ++c) {
    any_update |= updates(c) || (form == Form::update_expected && chunks_[c].trainable);
    waits |= chunk_states_[c].waiting_job != kNone;
  }
  if (waits && !leased && form != Form::fetch) return kNone;
  BALLAST_CHECK(!leased || nothing_expected());
  const Index id = append_entry(unit, device_offset, u.parameter_bytes, false, leased);
  Entry& entry = entries_[id];
  if (leased && waits) skip_waiting(unit, id);

  // Parameters that are still there, unchanged, at the same place are not brought again. (A copy in the list is newer
  // than every update that is queued: queueing one without an entry of its own forgets the copy.)
  Copy& copy = copies_[unit];
  const bool reuse = !any_update && copy.here && copy.offset == device_offset;
  if (reuse) {
    entry.source = copy.entry;
    if (copy.entry != kNone) ++entries_[copy.entry].dependents;
    copy.entry = id;
  } else {
    forget_copy(unit);
  }
  take_range(id);
  for (Index c = u.first_chunk; c < u.first_chunk + u.chunk_count; ++c) {
    ChunkState& state = chunk_states_[c];
    const bool on_device = chunks_[c].parameters == Tier::device;
    const bool can_wait = chunks_[c].trainable && state.waiting_job == kNone;
    const std::uint64_t key = entry.key << kChunkBits;
    if (!reuse) {
      if (updates(c) || (form == Form::update_expected && can_wait)) {
        ++entry.missing;
        append_update(c, id, false, updates(c) && state.owed, key);
      } else if (form == Form::update_after && can_wait && !on_device) {
        ++entry.missing;
        append_update(c, id, true, true, key);
        continue;
      } else if (!on_device || state.queue_head != kNone) {
        ++entry.missing;
        append_fetch(c, id);
      }
    }
    if (form == Form::update_after && can_wait) {
      append_update(c, kNone, false, true, key);
      jobs_[state.waiting_job].owner_key = entry.key;
    }
  }
  if (form == Form::update_after) {
    forget_copy(unit);
  } else if (!reuse && entry.bytes > 0) {
    copy = {true, id, device_offset, entry.bytes};
  }
  if (gather_needed(unit, form == Form::update_expected, reuse)) {
    entry.collective = Phase::waiting;
    entry.expects_update = form == Form::update_expected && !leased;
    entry.gathers_change = unit_changed_[unit] != 0;
    gathers_.push(id);
    unit_changed_[unit] = 0;
  }
  settle();
  return id;
}

// Known from the order of calls alone. Parameters that live on the device are gathered when they have changed.
bool Scheduler::gather_needed(Index unit, bool update_expected, bool reuse) const {
  if (!units_[unit].gathered) return false;
  return units_[unit].parameter_bytes > 0 ? !reuse : update_expected || unit_changed_[unit] != 0;
}

Index Scheduler::append_gradients(Index unit, std::uint64_t device_offset, bool eager_updates, bool leased) {
  if (!room_for(unit)) return kNone;
  const Unit& u = units_[unit];
  for (Index c = u.first_chunk; c < u.first_chunk + u.chunk_count && eager_updates && !leased; ++c) {
    if (chunk_states_[c].waiting_job != kNone) return kNone;
  }
  BALLAST_CHECK(!leased || nothing_expected());
  const Index id = append_entry(unit, device_offset, u.gradient_bytes, true, leased);
  Entry& entry = entries_[id];
  take_range(id);
  if (eager_updates) {
    forget_copy(unit);
    for (Index c = u.first_chunk; c < u.first_chunk + u.chunk_count; ++c) {
      if (!chunks_[c].trainable || chunk_states_[c].waiting_job != kNone) continue;
      append_update(c, kNone, false, true, entry.key << kChunkBits);
      const Index job = chunk_states_[c].waiting_job;
      if (job != kNone) jobs_[job].owner_key = entry.key;
    }
  }
  reserve_jobs(entry, 2 * u.chunk_count);
  settle();
  return id;
}

void Scheduler::lease(Index id) {
  BALLAST_CHECK(entry_alive(id) && !entries_[id].leased && !entries_[id].cancelled);
  Entry& entry = entries_[id];
  BALLAST_CHECK(entry.previous == kNone || entries_[entry.previous].leased || entries_[entry.previous].cancelled);
  entry.leased = true;
  hold(id);
  entry.expects_update = false;
  if (!entry.gradient && waiting_updates_.head != kNone) {
    skip_waiting(entry.unit, id);
    settle();
  }
}

// The trainer reads now what an update would write that still waits for it: in truth the update comes later.
void Scheduler::skip_waiting(Index unit, Index id) {
  const Entry& entry = entries_[id];
  const Unit& u = units_[unit];
  for (Index c = u.first_chunk; c < u.first_chunk + u.chunk_count; ++c) {
    const Index j = chunk_states_[c].waiting_job;
    if (j == kNone) continue;
    const std::uint64_t queued_with = jobs_[j].key >> kChunkBits;
    if (queued_with < entry.key || (queued_with == entry.key && !jobs_[j].gate_on_gradient)) skip_update(j);
  }
}

bool Scheduler::entry_ready(const Entry& entry) const {
  if (entry.gradient) return entry.range_free;
  if (entry.source != kNone) return entry_ready(entries_[entry.source]);
  if (entry.missing != 0) return false;
  if (entry.collective != Phase::unneeded) return entry.collective == Phase::done;
  if (!units_[entry.unit].gathered || entry.bytes > 0) return true;
  // Parameters that live on the device: an earlier entry of the unit may still be gathering them.
  for (Index i = entry.unit_previous; i != kNone; i = entries_[i].unit_previous) {
    const Entry& other = entries_[i];
    if (!other.gradient && other.collective != Phase::unneeded && other.collective != Phase::done) return false;
  }
  return true;
}

bool Scheduler::ready(Index entry) const {
  BALLAST_CHECK(entry_alive(entry));
  return entry_ready(entries_[entry]);
}

void Scheduler::release(Index id) {
  BALLAST_CHECK(entry_alive(id));
  Entry& entry = entries_[id];
  BALLAST_CHECK(entry.leased && !entry.released && !entry.committed);
  entry.released = true;
  if (entry.gradient) {
    // Given up: an update that waits for this gradient would hold its slot for nothing.
    const Unit& u = units_[entry.unit];
    for (Index c = u.first_chunk; c < u.first_chunk + u.chunk_count; ++c) {
      const Index j = chunk_states_[c].waiting_job;
      if (j != kNone && jobs_[j].gate_on_gradient) skip_update(j);
    }
  }
  end_entry_if_over(id);
  settle();
}

void Scheduler::commit_gradients(Index id, std::span<const bool> contributes, bool last, bool eager) {
  BALLAST_CHECK(entry_alive(id));
  Entry& entry = entries_[id];
  BALLAST_CHECK(entry.gradient && entry.leased && !entry.released && !entry.committed && entry.range_free);
  const Unit& u = units_[entry.unit];
  BALLAST_CHECK(contributes.size() == u.chunk_count);
  entry.committed = true;
  unit_committed_[entry.unit] = 1;
  BALLAST_CHECK(entry.collective == (u.reduced ? Phase::waiting : Phase::unneeded));
  reserve_jobs(entry, u.chunk_count);
  const bool at_once = !u.stored_gradients && last && eager;
  if (at_once) order_updates(id, contributes);
  for (Index i = 0; i < u.chunk_count; ++i) {
    const Index c = u.first_chunk + i;
    if (!chunks_[c].trainable) continue;
    ChunkState& state = chunk_states_[c];
    const Index waiting = state.waiting_job;
    // A chunk that contributed before and is absent now still needs its last contribution (of zeros) to be known as
    // last.
    if (!contributes[i] && !(last && state.contributed)) {
      if (last && waiting != kNone && jobs_[waiting].gate_on_gradient) skip_update(waiting);
      continue;
    }
    BALLAST_CHECK(!state.due && !state.owed);
    const Index j = append_job(JobKind::gradient, c, id, (entry.key << kChunkBits) + c);
    Job& job = jobs_[j];
    ++entry.missing;
    ++gradient_jobs_;
    job.first = !state.contributed;
    job.last = last;
    state.contributed = true;
    if (last && eager) {
      state.eager = true;
      state.owed = true;
      ++updates_due_;
      // An update that was queued after this gradient was opened is meant for a later one: what is expected in between
      // would be read before this update. (Dropped here, it is queued again in its place.)
      if (waiting != kNone && jobs_[waiting].gate_on_gradient && jobs_[waiting].key >> kChunkBits <= entry.key) {
        no_longer_waiting(state);
        state.update_job = waiting;
      } else if (waiting != kNone) {
        skip_update(waiting);
      }
    }
    BALLAST_CHECK(u.stored_gradients || (job.first && job.last && eager));
    const bool on_device = chunks_[c].gradients == Tier::device && u.stored_gradients;
    const bool on_nvme = gradient_on_nvme(c);
    job.copy = on_device ? Phase::unneeded : Phase::waiting;
    job.cpu = !on_device && !on_nvme && job.first && !job.last ? Phase::unneeded : Phase::waiting;
    if (on_nvme) {
      job.read = job.first ? Phase::unneeded : Phase::waiting;
      job.write = Phase::waiting;
    }
    if (!on_device && (on_nvme || !u.stored_gradients || !job.first)) want_slot(j, SlotKind::gradient);
    advance(j);
  }
  end_entry_if_over(id);
  settle();
  if (at_once) pass_waiting_updates(u);
}

void Scheduler::note_release_requested(Index id) {
  entries_[id].release_requested = true;
  let_go(id);
}

void Scheduler::note_commit_requested(Index id) {
  note_release_requested(id);
  if (!units_[entries_[id].unit].reduced) return;
  entries_[id].collective = Phase::waiting;
  reductions_.push(id);
}

// A gradient that is consumed at once holds its slot until the update is done, so updates must get their slots in the
// order in which gradients are committed. What was queued ahead in another order is dropped here, and queued again.
void Scheduler::order_updates(Index id, std::span<const bool> contributes) {
  const Entry& entry = entries_[id];
  const Unit& u = units_[entry.unit];
  bool in_order = true;
  std::uint64_t before = 0;
  for (Index i = 0; i < u.chunk_count && in_order; ++i) {
    const Index j = chunk_states_[u.first_chunk + i].waiting_job;
    if (!contributes[i] || !chunks_[u.first_chunk + i].trainable) continue;
    in_order = j != kNone && jobs_[j].key > before && jobs_[j].key >> kChunkBits <= entry.key;
    before = j == kNone ? 0 : jobs_[j].key;
  }
  for (Index c = u.first_chunk; c < u.first_chunk + u.chunk_count && !in_order; ++c) {
    if (chunk_states_[c].waiting_job != kNone) skip_update(chunk_states_[c].waiting_job);
  }
}

// ... and those of other units, where they would get a slot before this unit's, have to wait for their gradients first.
void Scheduler::pass_waiting_updates(const Unit& u) {
  std::uint64_t last_key = 0;
  for (Index c = u.first_chunk; c < u.first_chunk + u.chunk_count; ++c) {
    const Index j = chunk_states_[c].update_job;
    if (j != kNone && jobs_[j].slot_wanted) last_key = std::max(last_key, jobs_[j].key);
  }
  for (Index j = waiting_updates_.head; j != kNone && jobs_[j].key < last_key;) {
    const Index next = jobs_[j].next_held;
    if (jobs_[j].slot_kind == SlotKind::update) skip_update(j);
    j = next;
  }
  settle();
}

// --- decisions -------------------------------------------------------------------------------------------------------

void Scheduler::decide(bool update) {
  BALLAST_CHECK(!gradients_outstanding());
  bool stale = false;
  for (Index i = entry_head_; i != kNone; i = entries_[i].next) {
    Entry& entry = entries_[i];
    if (!entry.expects_update) continue;
    entry.expects_update = false;
    if (unit_committed_[entry.unit] != 0 && update) entry.gathers_change = true;  // what changes now, with the rest
    unit_committed_[entry.unit] = 0;
  }
  for (Index u = 0; u < units_.size(); ++u) {
    if (unit_committed_[u] != 0 && update) unit_changed_[u] = 1;
    unit_committed_[u] = 0;
  }
  for (Index c = 0; c < chunks_.size(); ++c) {
    ChunkState& state = chunk_states_[c];
    if (state.eager) {
      BALLAST_CHECK(update);                                              // the update is done or under way
      if (units_[chunks_[c].unit].reduced) forget_copy(chunks_[c].unit);  // of before or after it, as ranks differ
    } else {
      const bool becomes_due = state.contributed && update;
      if (becomes_due) {
        state.due = true;
        ++updates_due_;
      }
      const Index j = state.waiting_job;
      if (j != kNone && becomes_due && !jobs_[j].gate_on_gradient) {
        no_longer_waiting(state);
        state.update_job = j;
        jobs_[j].gate_open = true;
        advance(j);
      } else if (j != kNone) {
        skip_update(j);
      }
    }
    if (unclaimed(c)) {
      forget_copy(chunks_[c].unit);
      stale = true;
    }
    state.contributed = false;
    state.eager = false;
  }
  if (stale) {
    // Expected fetches of a unit that is about to change would bring stale parameters.
    for (Index i = entry_head_; i != kNone; i = entries_[i].next) {
      if (!entries_[i].gradient && expected(i) && unit_update_unclaimed(entries_[i].unit)) {
        cancel_expected();
        break;
      }
    }
  }
  settle();
}

bool Scheduler::queue_updates(Index unit) {
  if (!unit_update_unclaimed(unit)) return true;
  // Expected fetches of the unit would bring stale parameters, and updates that wait for the trainer may hold the slots
  // that these updates need before the trainer can go on.
  bool cancel = waiting_updates_.head != kNone;
  for (Index i = unit_entries_[unit].head; i != kNone && !cancel; i = entries_[i].unit_next) {
    cancel = !entries_[i].gradient && expected(i);
  }
  forget_copy(unit);
  if (cancel) cancel_expected();
  const Unit& u = units_[unit];
  if (free_jobs_.size() < std::size_t{reserved_jobs_} + u.chunk_count) return false;
  const std::uint64_t key = next_key_++ << kChunkBits;
  for (Index c = u.first_chunk; c < u.first_chunk + u.chunk_count; ++c) {
    if (unclaimed(c)) append_update(c, kNone, false, chunk_states_[c].owed, key);
  }
  settle();
  return true;
}

bool Scheduler::append_updates(Index unit) { return queue_updates(unit); }

bool Scheduler::append_eager_updates(Index unit) {
  // The commit kept room for this.
  for (Index i = unit_entries_[unit].head; i != kNone && !expected(i); i = entries_[i].unit_next) {
    if (entries_[i].committed) reserve_jobs(entries_[i], 0);
  }
  return queue_updates(unit);
}

bool Scheduler::unit_update_due(Index unit) const {
  const Unit& u = units_[unit];
  for (Index c = u.first_chunk; c < u.first_chunk + u.chunk_count; ++c) {
    if (update_due(c)) return true;
  }
  return false;
}

bool Scheduler::unit_update_unclaimed(Index unit) const {
  const Unit& u = units_[unit];
  for (Index c = u.first_chunk; c < u.first_chunk + u.chunk_count; ++c) {
    if (unclaimed(c)) return true;
  }
  return false;
}

bool Scheduler::unit_updates_coming(Index unit) const {
  const Unit& u = units_[unit];
  for (Index c = u.first_chunk; c < u.first_chunk + u.chunk_count; ++c) {
    const Index j = chunk_states_[c].update_job;
    if (!update_due(c)) continue;
    if (j == kNone) return false;
    const Job& job = jobs_[j];
    const bool asked_for = job.owner_key == 0 || job.gate_on_gradient ||
                           (job.entry != kNone && entries_[job.entry].leased && !entries_[job.entry].cancelled);
    if (!asked_for) return false;
  }
  return true;
}

bool Scheduler::unit_busy(Index unit) const {
  const Unit& u = units_[unit];
  for (Index c = u.first_chunk; c < u.first_chunk + u.chunk_count; ++c) {
    if (chunk_states_[c].queue_head != kNone || chunk_states_[c].gradient_head != kNone) return true;
  }
  return false;
}

}  // namespace ballast::schedule
