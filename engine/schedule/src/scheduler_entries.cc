// The scheduler's entries: who may use which bytes of the device and when, what still lies there, and how what is
// expected is given back.
// SPDX-License-Identifier: Apache-2.0
#include <ballast/base/check.h>
#include <ballast/schedule/scheduler.h>

#include <algorithm>

#include "scheduler_keys.h"

namespace ballast::schedule {

Index Scheduler::append_entry(Index unit, std::uint64_t offset, std::uint64_t bytes, bool gradient, bool leased) {
  const Index id = free_entries_.back();
  free_entries_.pop_back();
  Entry& entry = entries_[id];
  entry = Entry{};
  entry.alive = true;
  entry.gradient = gradient;
  entry.leased = leased;
  entry.unit = unit;
  entry.offset = offset;
  entry.bytes = bytes;
  entry.key = next_key_++;
  entry.previous = entry_tail_;
  (entry_tail_ == kNone ? entry_head_ : entries_[entry_tail_].next) = id;
  entry_tail_ = id;
  List& list = unit_entries_[unit];
  entry.unit_previous = list.tail;
  (list.tail == kNone ? list.head : entries_[list.tail].unit_next) = id;
  list.tail = id;
  if (leased) hold(id);
  ++entry_count_;
  return id;
}

// Leases come in program order, and so this list is.
void Scheduler::hold(Index id) {
  Entry& entry = entries_[id];
  entry.held = true;
  entry.held_previous = held_.tail;
  (held_.tail == kNone ? held_.head : entries_[held_.tail].held_next) = id;
  held_.tail = id;
}

void Scheduler::let_go(Index id) {
  Entry& entry = entries_[id];
  if (!entry.held) return;
  entry.held = false;
  (entry.held_previous == kNone ? held_.head : entries_[entry.held_previous].held_next) = entry.held_next;
  (entry.held_next == kNone ? held_.tail : entries_[entry.held_next].held_previous) = entry.held_previous;
}

void Scheduler::Collectives::remove(Index entry) {
  if (count > 0 && at(count - 1) == entry) {  // what is expected is cancelled from the end
    --count;
    return;
  }
  Index kept = 0;
  const Index before = count;
  for (Index i = 0; i < before; ++i) {
    const Index each = at(i);
    if (each != entry) ring[(head + kept++) % ring.size()] = each;
  }
  count = kept;
}

void Scheduler::cancel_entry(Index id) {
  Entry& entry = entries_[id];
  entry.cancelled = true;
  if (entry.collective == Phase::waiting) {
    BALLAST_CHECK(!entry.gradient);
    gathers_.remove(id);
    entry.collective = Phase::unneeded;
    if (entry.gathers_change) unit_changed_[entry.unit] = 1;
  }
  if (copies_[entry.unit].entry == id) forget_copy(entry.unit);
  end_entry_if_over(id);
}

// Whether this expected entry may have begun to gather, here or on a rank that is ahead or behind: from what is the
// same on all of them. Earlier entries that still stand in its way hold it up everywhere.
bool Scheduler::may_be_gathering(Index id) const {
  const Entry& entry = entries_[id];
  if (entry.collective == Phase::unneeded) return false;
  if (entry.bytes > 0) {
    // Those that the trainer holds; and expected ones, of which the last on any byte are what this one waits for.
    for (Index i = held_.head; i != kNone; i = entries_[i].held_next) {
      if (overlap(entry.offset, entry.bytes, entries_[i].offset, entries_[i].bytes)) return false;
    }
    if (entry.source != kNone && expected(entry.source)) return false;
    for (Index w = entry.first_wait; w != kNone; w = waits_[w].next_of_waiter) {
      if (expected(waits_[w].blocker)) return false;
    }
  }
  for (Index i = entry.unit_previous; i != kNone && entry.bytes == 0; i = entries_[i].unit_previous) {
    const Entry& other = entries_[i];
    if (!other.gradient && !other.cancelled && !other.release_requested) return false;
  }
  const Unit& u = units_[entry.unit];
  for (Index c = u.first_chunk; c < u.first_chunk + u.chunk_count; ++c) {
    // Held up everywhere until the decision. (One that waits for a gradient brings its chunk before that.)
    const Index j = chunk_states_[c].waiting_job;
    if (j != kNone && jobs_[j].entry == id && !jobs_[j].gate_on_gradient) return false;
  }
  return true;
}

void Scheduler::cancel_expected() {
  ++cancellations_;
  // What may be gathering already goes on as if the trainer had opened and released it.
  std::uint64_t carried_key = 0;
  for (Index id = entry_head_; id != kNone; id = entries_[id].next) {
    if (!expected(id) || entries_[id].gradient || entries_[id].collective == Phase::unneeded) continue;
    if (!may_be_gathering(id)) break;  // gathers go in order
    carried_key = entries_[id].key;
    entries_[id].carried = true;
  }
  for (Index id = entry_tail_; id != kNone && !entries_[id].leased;) {
    const Index previous = entries_[id].previous;
    if (!entries_[id].leased && !entries_[id].cancelled && !entries_[id].carried) {
      const std::uint64_t key = entries_[id].key;
      const Unit& u = units_[entries_[id].unit];
      for (Index c = u.first_chunk; c < u.first_chunk + u.chunk_count; ++c) {
        for (Index job = chunk_states_[c].queue_head; job != kNone;) {
          const Index next_job = jobs_[job].next_same_chunk;
          if (jobs_[job].owner_key == key) cancel_job(job);
          job = next_job;
        }
      }
      cancel_entry(id);
    }
    id = previous;
  }
  for (Index id = entry_head_; id != kNone && carried_key != 0;) {
    const Index next = entries_[id].next;
    if (entries_[id].carried && !entries_[id].leased) {
      entries_[id].leased = entries_[id].release_requested = entries_[id].released = true;
      end_entry_if_over(id);
    }
    id = next;
  }
  // Updates that wait for the trainer hold slots that what comes now may need.
  while (waiting_updates_.head != kNone) skip_update(waiting_updates_.head);
  settle();
}

void Scheduler::end_entry_if_over(Index id) {
  Entry& entry = entries_[id];
  if (!entry.alive || entry.in_flight != 0) return;
  const bool collected = entry.collective == Phase::unneeded || entry.collective == Phase::done;
  const bool over = entry.cancelled || (entry.committed && entry.missing == 0 && collected) ||
                    (entry.released && (entry.gradient || entry_ready(entry)));
  if (!over) return;
  entry.alive = false;
  reserve_jobs(entry, 0);
  (entry.previous == kNone ? entry_head_ : entries_[entry.previous].next) = entry.next;
  (entry.next == kNone ? entry_tail_ : entries_[entry.next].previous) = entry.previous;
  List& list = unit_entries_[entry.unit];
  (entry.unit_previous == kNone ? list.head : entries_[entry.unit_previous].unit_next) = entry.unit_next;
  (entry.unit_next == kNone ? list.tail : entries_[entry.unit_next].unit_previous) = entry.unit_previous;
  let_go(id);
  --entry_count_;
  if (copies_[entry.unit].entry == id) copies_[entry.unit].entry = kNone;
  free_entries_.push_back(id);
  if (entry.source != kNone) entries_[entry.source].dependents += entry.dependents - 1;
  for (Index i = entry.unit_next; entry.dependents != 0; i = entries_[i].unit_next) {
    if (entries_[i].source != id) continue;
    --entry.dependents;
    entries_[i].source = entry.source;
    entries_[i].range_free = entry.source == kNone;
    check_later(i);
  }
  leave_range(id);
  const Unit& u = units_[entry.unit];
  for (Index c = u.first_chunk; !entry.gradient && c < u.first_chunk + u.chunk_count; ++c) {
    // Updates of parameters that live on the device waited for their readers.
    if (chunks_[c].parameters == Tier::device && chunk_states_[c].queue_head != kNone) {
      advance(chunk_states_[c].queue_head);
    }
  }
}

void Scheduler::check_later(Index id) {
  if (entries_[id].to_check) return;
  entries_[id].to_check = true;
  entries_to_check_.push_back(id);
}

// What every call ends with: entries and slots given out until nothing changes.
void Scheduler::settle() {
  for (bool again = true; again;) {
    while (!entries_to_check_.empty()) {
      const Index id = entries_to_check_.back();
      entries_to_check_.pop_back();
      entries_[id].to_check = false;
      end_entry_if_over(id);
    }
    again = false;
    for (SlotKind kind : {SlotKind::fetch, SlotKind::update, SlotKind::gradient}) again |= serve_slots(kind);
    again |= !entries_to_check_.empty();
  }
}

Index Scheduler::overlapping(std::uint64_t offset, std::uint64_t bytes, Index except, bool leased_only) const {
  if (bytes == 0) return kNone;
  for (Index i = leased_only ? held_.head : entry_head_; i != kNone;) {
    const Entry& entry = entries_[i];
    if (i != except && entry.bytes != 0 && overlap(offset, bytes, entry.offset, entry.bytes)) return i;
    i = leased_only ? entry.held_next : entry.next;
  }
  return kNone;
}

bool Scheduler::copy_offset(Index unit, std::uint64_t* offset) const {
  if (!copies_[unit].here || unit_update_unclaimed(unit)) return false;
  *offset = copies_[unit].offset;
  return true;
}

}  // namespace ballast::schedule
