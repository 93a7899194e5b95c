// Which entry may write its range of the device, and when: it waits for the earlier entries that had a part of the
// range last. The map knows only the last on each byte. What lies beneath that one has ended before it, or is what it
// waits for itself.
// SPDX-License-Identifier: Apache-2.0
#include <ballast/base/check.h>
#include <ballast/schedule/scheduler.h>

#include "scheduler_keys.h"

namespace ballast::schedule {

// Of an entry that is the last in program order.
void Scheduler::take_range(Index id) {
  Entry& entry = entries_[id];
  if (entry.bytes == 0) {
    entry.range_free = true;
    return;
  }
  if (ranges_stale_ || !ranges_.room()) paint_ranges();
  ranges_.take(entry.offset, entry.offset + entry.bytes, {entry.key, id, entry.gradient ? kNone : entry.unit},
               [&](const RangeMap::Owner& before) {
                 if (before.unit != kNone && (entry.gradient || before.unit != entry.unit)) {
                   const Copy& copy = copies_[before.unit];
                   if (copy.here && overlap(entry.offset, entry.bytes, copy.offset, copy.bytes))
                     forget_copy(before.unit);
                 }
                 // An entry whose bytes this one uses is no obstacle.
                 if (before.entry == kNone || entry.source != kNone) return;
                 Entry& blocker = entries_[before.entry];
                 if (!blocker.alive || blocker.key != before.key || blocker.waiter_key == entry.key) return;
                 blocker.waiter_key = entry.key;
                 add_wait(id, before.entry);
               });
  if (entry.source == kNone && entry.first_wait == kNone) range_is_free(id);
}

// The map anew, without the last entry, which is about to take its range.
void Scheduler::paint_ranges() {
  ranges_.clear();
  ranges_stale_ = false;
  const auto nothing = [](const RangeMap::Owner&) {};
  for (Index i = entry_head_; i != entry_tail_; i = entries_[i].next) {
    const Entry& e = entries_[i];
    if (e.bytes > 0) ranges_.take(e.offset, e.offset + e.bytes, {e.key, i, e.gradient ? kNone : e.unit}, nothing);
  }
  for (Index u = 0; u < units_.size(); ++u) {
    const Copy& copy = copies_[u];
    if (copy.here && copy.entry == kNone) ranges_.take(copy.offset, copy.offset + copy.bytes, {0, kNone, u}, nothing);
  }
}

// Copies into the range may start.
void Scheduler::range_is_free(Index id) {
  Entry& entry = entries_[id];
  entry.range_free = true;
  if (entry.gradient || entry.missing == 0) return;
  const Unit& u = units_[entry.unit];
  for (Index c = u.first_chunk; c < u.first_chunk + u.chunk_count; ++c) {
    for (Index j = chunk_states_[c].queue_head; j != kNone;) {
      const Index next = jobs_[j].next_same_chunk;
      if (jobs_[j].entry == id) advance(j);
      j = next;
    }
  }
}

// The entry has ended.
void Scheduler::leave_range(Index id) {
  const Entry& entry = entries_[id];
  if (!entry.range_free) {
    // Before the range was its own: whoever waits for it waits for those that it waited for.
    ranges_stale_ = true;
    const auto wait_too = [&](Index waiter, Index blocker) {
      const Entry& w = entries_[waiter];
      const Entry& b = entries_[blocker];
      if (!overlap(w.offset, w.bytes, b.offset, b.bytes)) return;
      for (Index i = w.first_wait; i != kNone; i = waits_[i].next_of_waiter) {
        if (waits_[i].blocker == blocker) return;
      }
      add_wait(waiter, blocker);
    };
    for (Index i = entry.first_waiter; i != kNone; i = waits_[i].next_of_blocker) {
      const Index waiter = waits_[i].waiter;
      if (entry.source != kNone) wait_too(waiter, entry.source);
      for (Index k = entry.first_wait; k != kNone; k = waits_[k].next_of_waiter) wait_too(waiter, waits_[k].blocker);
    }
  }
  while (entry.first_wait != kNone) remove_wait(entry.first_wait);
  while (entry.first_waiter != kNone) {
    const Index waiter = waits_[entry.first_waiter].waiter;
    remove_wait(entry.first_waiter);
    if (entries_[waiter].first_wait == kNone) range_is_free(waiter);
  }
}

void Scheduler::add_wait(Index waiter, Index blocker) {
  Index id = free_wait_;
  if (id == kNone) {
    id = static_cast<Index>(waits_.size());
    waits_.emplace_back();
  } else {
    free_wait_ = waits_[id].next_of_waiter;
  }
  Index& of_waiter = entries_[waiter].first_wait;
  Index& of_blocker = entries_[blocker].first_waiter;
  waits_[id] = {waiter, blocker, kNone, of_waiter, kNone, of_blocker};
  if (of_waiter != kNone) waits_[of_waiter].previous_of_waiter = id;
  if (of_blocker != kNone) waits_[of_blocker].previous_of_blocker = id;
  of_waiter = of_blocker = id;
}

void Scheduler::remove_wait(Index id) {
  const Wait wait = waits_[id];
  (wait.previous_of_waiter == kNone ? entries_[wait.waiter].first_wait
                                    : waits_[wait.previous_of_waiter].next_of_waiter) = wait.next_of_waiter;
  if (wait.next_of_waiter != kNone) waits_[wait.next_of_waiter].previous_of_waiter = wait.previous_of_waiter;
  (wait.previous_of_blocker == kNone ? entries_[wait.blocker].first_waiter
                                     : waits_[wait.previous_of_blocker].next_of_blocker) = wait.next_of_blocker;
  if (wait.next_of_blocker != kNone) waits_[wait.next_of_blocker].previous_of_blocker = wait.previous_of_blocker;
  waits_[id] = Wait{};
  waits_[id].next_of_waiter = free_wait_;
  free_wait_ = id;
}

}  // namespace ballast::schedule
