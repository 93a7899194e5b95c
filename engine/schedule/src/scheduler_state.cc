// The scheduler's state as invariants to verify, as words to compare, and as text to read. For tests and for the report
// of a stall; nothing here decides anything.
// SPDX-License-Identifier: Apache-2.0
#include <ballast/schedule/scheduler.h>

#include <algorithm>

#include "scheduler_keys.h"

namespace ballast::schedule {

namespace {

std::string name(const char* what, std::uint64_t number) { return std::string(what) + ' ' + std::to_string(number); }

const char* const kJobNames[] = {"fetch", "update", "gradient"};
const char* const kLaneNames[] = {"read", "write", "copy in", "copy out", "cpu"};
const char* const kSlotNames[] = {"none", "fetch", "update", "gradient"};
const char kPhaseLetters[] = {'-', 'w', 'r', 'R', 'd'};  // unneeded, waiting, ready, running, done

}  // namespace

std::string Scheduler::check() const {
  // Entries: a list in program order, with counts that match their jobs.
  std::vector<bool> entry_seen(entries_.size(), false);
  Index entries = 0, reserved = 0, waits = 0, waiters = 0;
  List held;
  std::vector<List> by_unit(units_.size());
  std::uint64_t key = 0;
  for (Index i = entry_head_, before = kNone; i != kNone; before = i, i = entries_[i].next) {
    const Entry& e = entries_[i];
    const auto at = [&] { return name("entry", i); };
    if (!e.alive || entry_seen[i] || e.previous != before) return at() + ": broken list";
    if (e.key <= key) return at() + ": out of program order";
    if (e.next == kNone && entry_tail_ != i) return at() + ": the tail is another";
    if (before != kNone && e.leased && !entries_[before].leased && !entries_[before].cancelled) {
      return at() + ": leased before an earlier one";
    }
    entry_seen[i] = true;
    key = e.key;
    ++entries;
    reserved += e.reserved_jobs;
    if (e.source != kNone) {
      const Entry& s = entries_[e.source];
      if (!entry_seen[e.source] || s.unit != e.unit || s.offset != e.offset || s.gradient)
        return at() + ": wrong source";
      if (s.cancelled && !e.cancelled) return at() + ": its source is cancelled";
    }
    if (e.range_free == (e.first_wait != kNone || e.source != kNone)) return at() + ": neither blocked nor free";
    if (e.first_wait != kNone && e.source != kNone) return at() + ": waits for what it uses";
    for (Index w = e.first_wait; w != kNone; w = waits_[w].next_of_waiter) {
      const Entry& b = entries_[waits_[w].blocker];
      if (waits_[w].waiter != i || !entry_seen[waits_[w].blocker] || !overlap(e.offset, e.bytes, b.offset, b.bytes))
        return at() + ": waits for the wrong entry";
      ++waits;
    }
    for (Index w = e.first_waiter; w != kNone; w = waits_[w].next_of_blocker) {
      if (waits_[w].blocker != i) return at() + ": another's waiter";
      ++waiters;
    }
    Index dependents = 0;
    for (Index d = e.next; d != kNone; d = entries_[d].next) dependents += entries_[d].source == i ? 1 : 0;
    if (dependents != e.dependents) return at() + ": dependents do not add up";
    if (!e.range_free && e.in_flight != 0) return at() + ": its range is touched before it is free";
    for (Index o = entry_head_; o != i && e.range_free && e.bytes > 0; o = entries_[o].next) {
      if (overlap(e.offset, e.bytes, entries_[o].offset, entries_[o].bytes))
        return at() + ": shares memory with " + name("entry", o);
    }
    List& list = by_unit[e.unit];
    if (e.unit_previous != list.tail) return at() + ": broken list of its unit";
    if (list.head == kNone) list.head = i;
    list.tail = i;
    if (e.held != (e.leased && !e.release_requested)) return at() + ": held or not";
    if (!e.held) continue;
    if (e.held_previous != held.tail) return at() + ": broken list of those held";
    held.tail = i;
    if (held.head == kNone) held.head = i;
  }
  if (entries != entry_count_ || entries + free_entries_.size() != entries_.size()) return "entries do not add up";
  for (const Index i : free_entries_) {
    if (entries_[i].alive) return name("entry", i) + ": alive and free";
  }
  if (waits != waiters) return "waits do not add up";
  if (held.head != held_.head || held.tail != held_.tail) return "the list of held entries has other ends";
  for (Index u = 0; u < units_.size(); ++u) {
    const List& list = unit_entries_[u];
    if (list.head != by_unit[u].head || list.tail != by_unit[u].tail)
      return name("entries of unit", u) + ": other ends";
    if (list.tail != kNone && entries_[list.tail].unit_next != kNone) return name("entries of unit", u) + ": no end";
  }
  // The map: the last live entry on each byte.
  std::string wrong;
  ranges_.for_each([&](std::uint64_t begin, std::uint64_t, const RangeMap::Owner& owner) {
    const bool live = owner.entry != kNone && entries_[owner.entry].alive && entries_[owner.entry].key == owner.key;
    Index last = kNone;
    for (Index i = entry_head_; i != kNone; i = entries_[i].next) {
      if (overlap(begin, 1, entries_[i].offset, entries_[i].bytes)) last = i;
    }
    if (!ranges_stale_ && last != (live ? owner.entry : kNone)) wrong = name("range at", begin) + ": another's";
  });
  if (!wrong.empty()) return wrong;
  if (reserved != reserved_jobs_) return "reserved jobs do not add up";
  if (reserved_jobs_ > free_jobs_.size()) return "more jobs are reserved than are free";

  // Jobs, by the queues of their chunks.
  std::vector<bool> job_seen(jobs_.size(), false);
  std::vector<Index> missing(entries_.size(), 0), copying(entries_.size(), 0);
  std::array<std::vector<bool>, 3> slot_used = {std::vector<bool>(limits_.fetch_slots),
                                                std::vector<bool>(limits_.update_slots),
                                                std::vector<bool>(limits_.gradient_slots)};
  const auto use_slot = [&](SlotKind kind, Index slot) {
    auto& used = slot_used[static_cast<std::size_t>(kind) - 1];
    if (slot >= used.size() || used[slot]) return false;
    used[slot] = true;
    return true;
  };
  Index jobs = 0, gradient_jobs = 0, waiting = 0, wanted[4] = {};
  std::array<Index, 5> running_tasks = {}, ready_tasks = {};
  for (Index c = 0; c < chunks_.size(); ++c) {
    const ChunkState& state = chunk_states_[c];
    const auto of = [&] { return name("chunk", c); };
    Index pending_updates = 0;
    if (state.gradient_slot != kNone && !use_slot(SlotKind::gradient, state.gradient_slot)) {
      return of() + ": its gradient slot has two owners";
    }
    for (const bool gradient : {false, true}) {
      const Index head = gradient ? state.gradient_head : state.queue_head;
      const Index tail = gradient ? state.gradient_tail : state.queue_tail;
      if ((head == kNone) != (tail == kNone)) return of() + ": queue with one end";
      std::uint64_t order = 0;
      for (Index j = head; j != kNone; j = jobs_[j].next_same_chunk) {
        const Job& job = jobs_[j];
        const auto at = [&] { return name(kJobNames[static_cast<int>(job.kind)], j) + " of " + of(); };
        if (!job.alive || job_seen[j] || job.chunk != c) return at() + ": broken queue";
        job_seen[j] = true;
        if ((job.kind == JobKind::gradient) != gradient) return at() + ": in the wrong queue";
        if (job.head != (j == head)) return at() + ": wrong head";
        if (job.next_same_chunk == kNone && tail != j) return at() + ": the tail is another";
        if (!gradient && job.key < order) return at() + ": out of program order";
        order = job.key;
        ++jobs;
        gradient_jobs += gradient ? 1 : 0;
        if (job.slot != kNone && (job.slot_wanted || !use_slot(job.slot_kind, job.slot))) {
          return at() + ": its slot has two owners";
        }
        if (job.slot_wanted) ++wanted[static_cast<int>(job.slot_kind)];
        if (job.entry != kNone) {
          if (!entries_[job.entry].alive) return at() + ": its entry is gone";
          if (!job.cancelled) ++missing[job.entry];
          if (job.copy == Phase::running || (gradient && job.cpu == Phase::running)) ++copying[job.entry];
        }
        const Phase phases[6] = {
            job.read, job.write, gradient ? Phase::unneeded : job.copy, gradient ? job.copy : Phase::unneeded,
            job.cpu,  job.load};
        bool any_left = false;
        for (std::size_t p = 0; p < 6; ++p) {
          const std::size_t l = p == 5 ? 0 : p;  // the lane
          running_tasks[l] += phases[p] == Phase::running ? 1 : 0;
          ready_tasks[l] += phases[p] == Phase::ready ? 1 : 0;
          const bool begun = phases[p] == Phase::running || phases[p] == Phase::done || phases[p] == Phase::ready;
          if (begun && (!job.head || job.slot_wanted)) return at() + ": " + kLaneNames[l] + " without slot or turn";
          any_left |= phases[p] != Phase::unneeded && phases[p] != Phase::done;
        }
        if (!any_left && job.head && !job.slot_wanted) return at() + ": over, and still alive";
        if (job.kind == JobKind::update && !job.cancelled && job.cpu != Phase::done) {
          ++pending_updates;
          if (j != state.update_job && j != state.waiting_job) return at() + ": update that nobody counts on";
          if (j == state.waiting_job && job.gate_open) return at() + ": waits with its gate open";
          if (j == state.update_job && !state.due && !state.owed) return at() + ": nothing is due";
          const bool loads = job.load != Phase::unneeded && job.load != Phase::waiting;
          if ((job.cpu == Phase::running || loads) && !job.gate_open) return at() + ": runs with its gate closed";
          if (job.cpu == Phase::running && job.load != Phase::unneeded && job.load != Phase::done)
            return at() + ": runs before its gradient is there";
        }
      }
    }
    const Index claimed = (state.update_job != kNone ? 1 : 0) + (state.waiting_job != kNone ? 1 : 0);
    if (pending_updates != claimed) return of() + ": updates do not add up";
    if (state.gradient_here && !state.owed) return of() + ": a gradient nobody waits for";
    waiting += state.waiting_job != kNone ? 1 : 0;
  }
  std::uint64_t waiting_key = 0;
  for (Index j = waiting_updates_.head, before = kNone; j != kNone; before = j, j = jobs_[j].next_held) {
    const Job& job = jobs_[j];
    if (!job_seen[j] || chunk_states_[job.chunk].waiting_job != j || job.previous_held != before ||
        job.key < waiting_key || waiting == 0)
      return "the list of waiting updates is broken";
    if (job.next_held == kNone && waiting_updates_.tail != j) return "waiting updates: the tail is another";
    waiting_key = job.key;
    --waiting;
  }
  if (waiting != 0) return "waiting updates do not add up";
  if (jobs != jobs_alive_ || jobs + free_jobs_.size() != jobs_.size()) return "jobs do not add up";
  if (gradient_jobs != gradient_jobs_) return "gradient jobs do not add up";
  for (Index i = entry_head_; i != kNone; i = entries_[i].next) {
    const Entry& e = entries_[i];
    if (!e.cancelled && e.missing != missing[i]) return name("entry", i) + ": missing chunks do not add up";
    if (e.in_flight != copying[i] + (e.collective == Phase::running ? 1 : 0))
      return name("entry", i) + ": copies do not add up";
    const bool collected = e.collective == Phase::unneeded || e.collective == Phase::done;
    if (e.committed && e.missing == 0 && e.in_flight == 0 && collected)
      return name("entry", i) + ": over, and still alive";
  }

  // Slots: each has one owner; their queues hold what wants one, in order.
  for (std::size_t kind = 0; kind < 3; ++kind) {
    const auto at = [&] { return std::string("slots of kind ") + kSlotNames[kind + 1]; };
    for (const Index slot : pools_[kind].free) {
      if (!use_slot(static_cast<SlotKind>(kind + 1), slot)) return at() + ": a free one has an owner";
    }
    if (std::count(slot_used[kind].begin(), slot_used[kind].end(), false) != 0) return at() + ": one is lost";
    Index count = 0, before = kNone;
    std::uint64_t order = 0;
    for (Index j = pools_[kind].waiting_head; j != kNone; j = jobs_[j].next_waiting) {
      const Job& job = jobs_[j];
      if (!job_seen[j] || !job.slot_wanted || job.slot_kind != static_cast<SlotKind>(kind + 1)) {
        return at() + ": broken queue";
      }
      if (kind != 2 && job.key < order) return at() + ": queue out of program order";
      order = job.key;
      if (++count > jobs) return at() + ": endless queue";
      if (job.next_waiting == kNone && pools_[kind].waiting_tail != j) return at() + ": the tail is another";
      if (job.previous_waiting != before) return at() + ": queue broken backwards";
      before = j;
    }
    if (count != wanted[kind + 1]) return at() + ": queue does not add up";
    if (!pools_[kind].free.empty() && count != 0 && jobs_[pools_[kind].waiting_head].head)
      return at() + ": one is withheld";
  }

  // Lanes.
  Index in_flight = 0;
  for (std::size_t l = 0; l < lanes_.size(); ++l) {
    const Lane& ln = lanes_[l];
    const auto at = [&] { return std::string("lane ") + kLaneNames[l]; };
    if (ln.in_flight > ln.depth) return at() + ": deeper than its limit";
    if (ln.in_flight != running_tasks[l]) return at() + ": tasks in flight do not add up";
    if (ln.heap.size() != ready_tasks[l]) return at() + ": ready tasks do not add up";
    if (!std::is_heap(ln.heap.begin(), ln.heap.end(), kLater)) return at() + ": not a heap";
    for (const auto& [order, j] : ln.heap) {
      if (!jobs_[j].alive || jobs_[j].key != order) return at() + ": stale task";
      if (ln.heap[ln.place[j]].second != j) return at() + ": task out of place";
    }
    in_flight += ln.in_flight;
  }
  // Collectives: each waiting or running one is in its queue, in program order; only the first may run.
  Index collectives = 0;
  for (Index i = entry_head_; i != kNone; i = entries_[i].next) {
    const Entry& e = entries_[i];
    collectives += e.collective == Phase::waiting || e.collective == Phase::running ? 1 : 0;
    in_flight += e.collective == Phase::running ? 1 : 0;
    if (e.collective == Phase::running && (e.gradient ? reductions_ : gathers_).at(0) != i)
      return name("entry", i) + ": its collective is out of turn";
    if (e.collective == Phase::running && !e.gradient && (e.missing != 0 || !e.range_free))
      return name("entry", i) + ": gathered before its own chunks are there";
  }
  if (collectives != gathers_.count + reductions_.count) return "collectives do not add up";
  std::uint64_t before_key = 0;
  for (Index i = 0; i < gathers_.count; ++i) {
    const Entry& e = entries_[gathers_.at(i)];
    if (!e.alive || e.gradient || e.cancelled || e.key <= before_key) return "gathers are out of order";
    before_key = e.key;
  }
  if (in_flight != in_flight_) return "tasks in flight do not add up";

  // Copies that may be used again: none over another.
  for (Index a = 0; a < copies_.size(); ++a) {
    const Copy& copy = copies_[a];
    if (!copy.here) continue;
    const auto at = [&] { return name("copy of unit", a); };
    if (copy.entry != kNone) {
      const Entry& e = entries_[copy.entry];
      if (!e.alive || e.cancelled || e.gradient || e.unit != a || e.offset != copy.offset) return at() + ": stale";
    }
    for (Index b = 0; b < a; ++b) {
      if (copies_[b].here && overlap(copy.offset, copy.bytes, copies_[b].offset, copies_[b].bytes))
        return at() + ": overwritten";
    }
    bool ours = true;
    ranges_.for_each([&](std::uint64_t begin, std::uint64_t end, const RangeMap::Owner& owner) {
      ours &= owner.unit == a || !overlap(copy.offset, copy.bytes, begin, end - begin);
    });
    if (!ranges_stale_ && !ours) return at() + ": not known in the map";
  }
  return {};
}

void Scheduler::in_use(std::vector<std::pair<SlotKind, Index>>& slots, std::vector<Index>& jobs) const {
  slots.clear();
  jobs.clear();
  for (const ChunkState& state : chunk_states_) {
    for (const Index head : {state.queue_head, state.gradient_head}) {
      for (Index j = head; j != kNone; j = jobs_[j].next_same_chunk) {
        jobs.push_back(j);
        if (jobs_[j].slot != kNone) slots.emplace_back(jobs_[j].slot_kind, jobs_[j].slot);
      }
    }
  }
  for (const ChunkState& state : chunk_states_) {
    if (state.gradient_slot != kNone) slots.emplace_back(SlotKind::gradient, state.gradient_slot);
  }
}

void Scheduler::serialize(std::vector<std::uint32_t>& out) const {
  const auto flag = [](bool value, int bit) { return static_cast<std::uint32_t>(value) << bit; };
  // Ranks: entries by their place in the list, jobs by the order of their keys among entries and jobs.
  std::vector<std::uint32_t> entry_rank(entries_.size(), kNone), job_rank(jobs_.size(), kNone);
  std::vector<std::pair<std::uint64_t, Index>> order;  // (key, job or kNone)
  std::uint32_t rank = 0;
  for (Index i = entry_head_; i != kNone; i = entries_[i].next) {
    entry_rank[i] = rank++;
    order.emplace_back(entries_[i].key << kChunkBits, kNone);
  }
  const auto rank_of = [&](Index entry) { return entry == kNone ? 0xFFu : entry_rank[entry]; };
  for (Index j = 0; j < jobs_.size(); ++j) {
    if (jobs_[j].alive) order.emplace_back(jobs_[j].key, j);
  }
  std::sort(order.begin(), order.end(), [&](const auto& a, const auto& b) {
    if (a.first != b.first) return a.first < b.first;
    // Equal keys: entries first, then by kind, then by turn (a fetch and an update, or two updates, of one entry).
    const auto place = [&](Index j) { return j == kNone ? 0 : 1 + 4 * static_cast<int>(jobs_[j].kind); };
    if (place(a.second) != place(b.second)) return place(a.second) < place(b.second);
    return a.second != kNone && b.second != kNone && jobs_[a.second].head && !jobs_[b.second].head;
  });
  for (std::size_t i = 0; i < order.size(); ++i) {
    if (order[i].second != kNone) job_rank[order[i].second] = static_cast<std::uint32_t>(i);
  }
  const auto rank_of_job = [&](Index job) { return job == kNone ? 0xFFFFu : job_rank[job]; };

  out.push_back(entry_count_ | jobs_alive_ << 8 | reserved_jobs_ << 20);
  for (Index i = entry_head_; i != kNone; i = entries_[i].next) {
    const Entry& e = entries_[i];
    out.push_back(e.unit | flag(e.gradient, 16) | flag(e.leased, 17) | flag(e.release_requested, 18) |
                  flag(e.released, 19) | flag(e.cancelled, 20) | flag(e.committed, 21) | flag(e.range_free, 22) |
                  static_cast<std::uint32_t>(e.collective) << 23 | flag(e.carried, 26) | flag(e.expects_update, 27) |
                  flag(e.gathers_change, 28));
    out.push_back(rank_of(e.source) | e.missing << 8 | e.in_flight << 16 | e.reserved_jobs << 24);
    out.push_back(static_cast<std::uint32_t>(e.offset));
  }
  for (const ChunkState& state : chunk_states_) {
    out.push_back(rank_of_job(state.update_job) | rank_of_job(state.waiting_job) << 16);
    out.push_back(flag(state.contributed, 0) | flag(state.eager, 1) | flag(state.owed, 2) |
                  flag(state.gradient_here, 3) | flag(state.due, 4) | flag(state.gradient_slot != kNone, 5));
    for (const Index head : {state.queue_head, state.gradient_head}) {
      for (Index j = head; j != kNone; j = jobs_[j].next_same_chunk) {
        const Job& job = jobs_[j];
        Index owner = kNone;
        for (Index i = entry_head_; i != kNone && job.owner_key != 0; i = entries_[i].next) {
          if (entries_[i].key == job.owner_key) owner = i;
        }
        out.push_back(job_rank[j] | rank_of(job.entry) << 16 | rank_of(owner) << 24);
        out.push_back(static_cast<std::uint32_t>(job.kind) | flag(job.cancelled, 2) | flag(job.slot_wanted, 3) |
                      flag(job.gate_open, 4) | flag(job.gate_on_gradient, 5) | flag(job.copy_first, 6) |
                      flag(job.first, 7) | flag(job.last, 8) | flag(job.slot != kNone, 9) |
                      static_cast<std::uint32_t>(job.slot_kind) << 10 | static_cast<std::uint32_t>(job.read) << 12 |
                      static_cast<std::uint32_t>(job.copy) << 15 | static_cast<std::uint32_t>(job.cpu) << 18 |
                      static_cast<std::uint32_t>(job.write) << 21 | flag(job.head, 24) |
                      static_cast<std::uint32_t>(job.load) << 25);
      }
      out.push_back(0xFFFFFFFFu);
    }
  }
  for (const SlotPool& slots : pools_) {
    for (Index j = slots.waiting_head; j != kNone; j = jobs_[j].next_waiting) out.push_back(job_rank[j]);
    out.push_back(0xFFFFFFFFu);
  }
  for (Index i = 0; i < reductions_.count; ++i) out.push_back(entry_rank[reductions_.at(i)]);
  for (Index unit = 0; unit < units_.size(); ++unit) {
    if (units_[unit].gathered || units_[unit].reduced)
      out.push_back(flag(unit_changed_[unit] != 0, 0) | flag(unit_committed_[unit] != 0, 1));
    const Copy& copy = copies_[unit];
    if (!copy.here) continue;
    out.push_back(unit | rank_of(copy.entry) << 16);
    out.push_back(static_cast<std::uint32_t>(copy.offset));
  }
}

std::string Scheduler::describe() const {
  std::string text;
  text += "entries, in program order:\n";
  for (Index i = entry_head_; i != kNone; i = entries_[i].next) {
    const Entry& e = entries_[i];
    text += "  " + name(e.gradient ? "gradients of unit" : "parameters of unit", e.unit) + ", entry " +
            std::to_string(i) + ", bytes " + std::to_string(e.offset) + " to " + std::to_string(e.offset + e.bytes);
    text += e.cancelled ? ", cancelled" : e.leased ? ", leased" : ", expected";
    if (e.release_requested) text += ", release requested";
    if (e.released) text += ", released";
    if (e.committed) text += ", committed";
    if (!e.range_free) text += ", waits for its range";
    if (e.source != kNone) text += ", shares the bytes of entry " + std::to_string(e.source);
    if (e.missing != 0) text += ", " + std::to_string(e.missing) + " chunks to come";
    if (e.collective == Phase::waiting) text += e.gradient ? ", to be reduced" : ", to be gathered";
    if (e.collective == Phase::running) text += e.gradient ? ", being reduced" : ", being gathered";
    if (e.in_flight != 0) text += ", " + std::to_string(e.in_flight) + " copies in flight";
    text += '\n';
  }
  text += "jobs (read, read of the gradient, copy, cpu, write: - unneeded, w waiting, r ready, R running, d done):\n";
  for (Index c = 0; c < chunks_.size(); ++c) {
    const ChunkState& state = chunk_states_[c];
    for (const Index head : {state.queue_head, state.gradient_head}) {
      for (Index j = head; j != kNone; j = jobs_[j].next_same_chunk) {
        const Job& job = jobs_[j];
        text += "  " + name("chunk", c) + ' ' + kJobNames[static_cast<int>(job.kind)] + ' ' + std::to_string(j) + ": ";
        for (const Phase p : {job.read, job.load, job.copy, job.cpu, job.write})
          text += kPhaseLetters[static_cast<int>(p)];
        if (job.entry != kNone) text += ", for entry " + std::to_string(job.entry);
        if (job.slot != kNone) {
          text += std::string(", ") + kSlotNames[static_cast<int>(job.slot_kind)] + " slot " + std::to_string(job.slot);
        }
        if (job.slot_wanted) text += std::string(", wants a slot: ") + kSlotNames[static_cast<int>(job.slot_kind)];
        if (!job.head) text += ", behind an earlier job";
        if (job.cancelled) text += ", cancelled";
        if (job.kind == JobKind::update && job.cpu != Phase::done && !job.gate_open) {
          text += job.gate_on_gradient ? ", waits for the gradient" : ", waits for the decision";
        }
        text += '\n';
      }
    }
    if (state.due || state.owed) text += "  " + name("chunk", c) + (state.due ? ": update due\n" : ": update owed\n");
    if (state.gradient_slot != kNone) {
      text += "  " + name("chunk", c) + ": its gradient is in slot " + std::to_string(state.gradient_slot) + '\n';
    }
  }
  text += "free slots:";
  for (std::size_t kind = 0; kind < 3; ++kind) {
    text += std::string(kind == 0 ? " " : ", ") + kSlotNames[kind + 1] + ' ' + std::to_string(pools_[kind].free.size());
  }
  text += "; in flight:";
  for (std::size_t l = 0; l < lanes_.size(); ++l) {
    text += std::string(l == 0 ? " " : ", ") + kLaneNames[l] + ' ' + std::to_string(lanes_[l].in_flight);
  }
  text += "; free entries " + std::to_string(free_entries_.size()) + ", jobs " + std::to_string(free_jobs_.size()) +
          " (" + std::to_string(reserved_jobs_) + " reserved)\n";
  return text;
}

}  // namespace ballast::schedule
