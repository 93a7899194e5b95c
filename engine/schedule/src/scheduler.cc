// The scheduler's state machine. See the header for the model and the argument why it never stalls.
// SPDX-License-Identifier: Apache-2.0
#include <ballast/base/check.h>
#include <ballast/schedule/scheduler.h>

#include <algorithm>

namespace ballast::schedule {

namespace {

bool overlap(std::uint64_t a, std::uint64_t a_bytes, std::uint64_t b, std::uint64_t b_bytes) {
  return a < b + b_bytes && b < a + a_bytes;
}

// Smallest first, for the standard heap functions (which keep the largest in front).
constexpr auto kLater = [](const auto& a, const auto& b) { return a > b; };

// Keys of jobs: their entry's place, then the chunk.
constexpr int kChunkBits = 24;

}  // namespace

Scheduler::Scheduler(std::vector<Chunk> chunks, std::vector<Unit> units, const Limits& limits)
    : chunks_(std::move(chunks)), units_(std::move(units)), limits_(limits), chunk_states_(chunks_.size()) {
  BALLAST_CHECK(chunks_.size() < (std::size_t{1} << kChunkBits));
  entries_.resize(limits.entries);
  jobs_.resize(limits.jobs);
  copies_.reserve(units_.size());
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
  }
}

// --- entries ---------------------------------------------------------------------------------------------------------

bool Scheduler::room_for(Index unit) const {
  // An entry may bring an update and a fetch for each chunk.
  return !free_entries_.empty() && free_jobs_.size() >= 2 * std::size_t{units_[unit].chunk_count};
}

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
  ++entry_count_;
  return id;
}

Index Scheduler::append_parameters(Index unit, std::uint64_t device_offset, Form form, bool leased) {
  if (!room_for(unit)) return kNone;
  const Unit& u = units_[unit];
  bool any_update = form == Form::update_expected && u.chunk_count > 0;
  for (Index c = u.first_chunk; c < u.first_chunk + u.chunk_count; ++c) {
    any_update |= chunk_states_[c].due || update_waits(c) || chunk_states_[c].open_job != kNone;
  }
  const Index id = append_entry(unit, device_offset, u.parameter_bytes, false, leased);
  Entry& entry = entries_[id];

  // Parameters that are still there, unchanged, at the same place need no job.
  const auto copy = std::find_if(copies_.begin(), copies_.end(), [&](const Copy& c) { return c.unit == unit; });
  const bool reuse = form == Form::fetch && !any_update && copy != copies_.end() && copy->offset == device_offset;
  if (reuse) {
    entry.source = copy->entry;
    entry.range_free = true;
    copy->entry = id;
  } else {
    forget_copy(unit);
    if (entry.bytes > 0) forget_overlapping_copies(device_offset, entry.bytes);
    for (Index c = u.first_chunk; c < u.first_chunk + u.chunk_count; ++c) {
      ChunkState& state = chunk_states_[c];
      const bool on_device = chunks_[c].parameters == Tier::device;
      const bool can_update = chunks_[c].trainable && !update_waits(c);
      if ((state.due && state.open_job == kNone) || (form == Form::update_expected && can_update)) {
        ++entry.missing;
        append_update(c, id, false, false, entry.key << kChunkBits);
      } else if (form == Form::update_after && can_update && !on_device) {
        ++entry.missing;
        append_update(c, id, true, true, entry.key << kChunkBits);
      } else {
        if (!on_device || state.queue_head != kNone) {
          ++entry.missing;
          append_fetch(c, id);
        }
        if (form == Form::update_after && can_update) {
          jobs_[append_update(c, kNone, false, true, entry.key << kChunkBits)].owner_key = entry.key;
        }
      }
    }
    if (entry.bytes > 0 && form != Form::update_after) copies_.push_back({unit, id, device_offset, entry.bytes});
  }
  refresh_ranges();
  return id;
}

Index Scheduler::append_gradients(Index unit, std::uint64_t device_offset, bool eager_updates, bool leased) {
  if (!room_for(unit)) return kNone;
  const Unit& u = units_[unit];
  const Index id = append_entry(unit, device_offset, u.gradient_bytes, true, leased);
  if (u.gradient_bytes > 0) forget_overlapping_copies(device_offset, u.gradient_bytes);
  if (eager_updates) {
    forget_copy(unit);
    for (Index c = u.first_chunk; c < u.first_chunk + u.chunk_count; ++c) {
      if (!chunks_[c].trainable || update_waits(c)) continue;
      jobs_[append_update(c, kNone, false, true, entries_[id].key << kChunkBits)].owner_key = entries_[id].key;
    }
  }
  refresh_ranges();
  return id;
}

void Scheduler::lease(Index entry) {
  BALLAST_CHECK(entry_alive(entry) && !entries_[entry].leased && !entries_[entry].cancelled);
  entries_[entry].leased = true;
}

bool Scheduler::entry_ready(const Entry& entry) const {
  if (entry.gradient) return entry.range_free;
  if (entry.source != kNone) return entry_ready(entries_[entry.source]);
  return entry.missing == 0;
}

bool Scheduler::ready(Index entry) const {
  BALLAST_CHECK(entry_alive(entry));
  return entry_ready(entries_[entry]);
}

void Scheduler::release(Index id) {
  BALLAST_CHECK(entry_alive(id));
  Entry& entry = entries_[id];
  BALLAST_CHECK(entry.leased && !entry.released);
  entry.released = true;
  if (entry.gradient && !entry.committed) {
    // Given up: updates that waited for this gradient have nothing to wait for.
    const Unit& u = units_[entry.unit];
    for (Index c = u.first_chunk; c < u.first_chunk + u.chunk_count; ++c) {
      const ChunkState& state = chunk_states_[c];
      if (update_waits(c) && jobs_[state.waiting_job].gate_on_gradient && !state.contributed) {
        skip_update(state.waiting_job);
      }
    }
  }
  end_entry_if_over(id);
}

void Scheduler::commit_gradients(Index id, std::span<const bool> contributes, bool last, bool eager) {
  BALLAST_CHECK(entry_alive(id));
  Entry& entry = entries_[id];
  BALLAST_CHECK(entry.gradient && entry.leased && !entry.committed && entry.range_free);
  const Unit& u = units_[entry.unit];
  BALLAST_CHECK(contributes.size() == u.chunk_count);
  BALLAST_CHECK(free_jobs_.size() >= u.chunk_count);
  entry.committed = true;
  for (Index i = 0; i < u.chunk_count; ++i) {
    const Index c = u.first_chunk + i;
    if (!chunks_[c].trainable) continue;
    ChunkState& state = chunk_states_[c];
    // A chunk that contributed before and is absent now still needs its last contribution (of zeros) to be known as
    // last.
    if (!contributes[i] && !(last && state.contributed)) {
      if (last && update_waits(c) && jobs_[state.waiting_job].gate_on_gradient) skip_update(state.waiting_job);
      continue;
    }
    BALLAST_CHECK(!state.due);
    const Index j = append_job(JobKind::gradient, c, id, (entry.key << kChunkBits) + c);
    Job& job = jobs_[j];
    ++entry.missing;
    ++gradient_jobs_;
    job.first = !state.contributed;
    job.last = last;
    state.contributed = true;
    if (last && eager) state.eager = true;
    BALLAST_CHECK(u.stored_gradients || (job.first && job.last && eager));
    const bool on_device = chunks_[c].gradients == Tier::device && u.stored_gradients;
    job.copy = on_device ? Phase::unneeded : Phase::waiting;
    job.cpu = !on_device && job.first && !job.last ? Phase::unneeded : Phase::waiting;
    if (!on_device && (!u.stored_gradients || !job.first)) want_slot(j, SlotKind::gradient);
    advance(j);
  }
  serve_slots(SlotKind::gradient);
  end_entry_if_over(id);
}

void Scheduler::cancel_entry(Index id) {
  Entry& entry = entries_[id];
  entry.cancelled = true;
  for (Copy& copy : copies_) {
    if (copy.entry == id) {
      forget_copy(copy.unit);
      break;
    }
  }
  end_entry_if_over(id);
}

void Scheduler::cancel_expected() {
  ++cancellations_;
  for (Index id = entry_tail_; id != kNone;) {
    const Index previous = entries_[id].previous;
    if (!entries_[id].leased && !entries_[id].cancelled) {
      const std::uint64_t key = entries_[id].key;
      for (Index j = 0; j < jobs_.size(); ++j) {
        if (jobs_[j].alive && jobs_[j].owner_key == key) cancel_job(j);
      }
      cancel_entry(id);
    }
    id = previous;
  }
  // Updates that wait for a gradient or a decision hold slots that what comes now may need.
  for (Index c = 0; c < chunks_.size(); ++c) {
    if (update_waits(c) && !chunk_states_[c].eager) skip_update(chunk_states_[c].waiting_job);
  }
  for (SlotKind kind : {SlotKind::fetch, SlotKind::update, SlotKind::gradient}) serve_slots(kind);
  refresh_ranges();
}

void Scheduler::end_entry_if_over(Index id) {
  Entry& entry = entries_[id];
  if (!entry.alive || entry.in_flight != 0) return;
  const bool over = entry.cancelled || (entry.released && (entry.gradient || entry_ready(entry))) ||
                    (entry.committed && entry.missing == 0);
  if (!over || (entry.gradient && entry.committed && entry.missing != 0)) return;
  entry.alive = false;
  (entry.previous == kNone ? entry_head_ : entries_[entry.previous].next) = entry.next;
  (entry.next == kNone ? entry_tail_ : entries_[entry.next].previous) = entry.previous;
  --entry_count_;
  for (Index i = entry.next; i != kNone; i = entries_[i].next) {
    if (entries_[i].source == id) entries_[i].source = entry.source;
  }
  for (Copy& copy : copies_) {
    if (copy.entry == id) copy.entry = kNone;
  }
  const Index unit = entry.unit;
  const bool in_place = !entry.gradient && entry.bytes == 0;
  free_entries_.push_back(id);
  refresh_ranges();
  if (in_place) {
    // Updates of parameters that live on the device waited for their readers.
    for (Index c = units_[unit].first_chunk; c < units_[unit].first_chunk + units_[unit].chunk_count; ++c) {
      if (chunk_states_[c].queue_head != kNone) advance(chunk_states_[c].queue_head);
    }
  }
}

void Scheduler::refresh_ranges() {
  for (Index i = entry_head_; i != kNone; i = entries_[i].next) {
    Entry& entry = entries_[i];
    if (entry.range_free) continue;
    bool free = true;
    for (Index e = entry_head_; free && e != i && entry.bytes > 0; e = entries_[e].next) {
      free = !overlap(entry.offset, entry.bytes, entries_[e].offset, entries_[e].bytes);
    }
    if (!free) continue;
    entry.range_free = true;
    if (entry.gradient || entry.missing == 0) continue;
    const Unit& u = units_[entry.unit];
    for (Index c = u.first_chunk; c < u.first_chunk + u.chunk_count; ++c) {
      for (Index j = chunk_states_[c].queue_head; j != kNone; j = jobs_[j].next_same_chunk) {
        if (jobs_[j].entry == i) advance(j);
      }
    }
  }
}

Index Scheduler::overlapping(std::uint64_t offset, std::uint64_t bytes, Index except, bool leased_only) const {
  if (bytes == 0) return kNone;
  for (Index i = entry_head_; i != kNone; i = entries_[i].next) {
    const Entry& entry = entries_[i];
    if (i == except || entry.bytes == 0 || (leased_only && (!entry.leased || entry.release_requested))) continue;
    if (overlap(offset, bytes, entry.offset, entry.bytes)) return i;
  }
  return kNone;
}

bool Scheduler::copy_offset(Index unit, std::uint64_t* offset) const {
  const auto copy = std::find_if(copies_.begin(), copies_.end(), [&](const Copy& c) { return c.unit == unit; });
  if (copy == copies_.end()) return false;
  *offset = copy->offset;
  return true;
}

void Scheduler::forget_copy(Index unit) {
  std::erase_if(copies_, [&](const Copy& copy) { return copy.unit == unit; });
}

void Scheduler::forget_overlapping_copies(std::uint64_t offset, std::uint64_t bytes) {
  std::erase_if(copies_, [&](const Copy& copy) { return overlap(offset, bytes, copy.offset, copy.bytes); });
}

// --- jobs ------------------------------------------------------------------------------------------------------------

Index Scheduler::append_job(JobKind kind, Index chunk, Index entry, std::uint64_t key) {
  BALLAST_CHECK(!free_jobs_.empty());
  const Index id = free_jobs_.back();
  free_jobs_.pop_back();
  Job& job = jobs_[id];
  job = Job{};
  job.kind = kind;
  job.alive = true;
  job.chunk = chunk;
  job.entry = entry;
  job.owner_key = entry == kNone ? 0 : entries_[entry].key;
  job.key = key;
  ++jobs_alive_;
  ChunkState& state = chunk_states_[chunk];
  const bool gradient = kind == JobKind::gradient;
  Index& head = gradient ? state.gradient_head : state.queue_head;
  Index& tail = gradient ? state.gradient_tail : state.queue_tail;
  (head == kNone ? head : jobs_[tail].next_same_chunk) = id;
  tail = id;
  job.head = head == id;
  return id;
}

void Scheduler::append_fetch(Index chunk, Index entry) {
  const Index j = append_job(JobKind::fetch, chunk, entry, (entries_[entry].key << kChunkBits) + chunk);
  Job& job = jobs_[j];
  if (chunks_[chunk].parameters != Tier::device) job.copy = Phase::waiting;
  if (chunks_[chunk].parameters == Tier::nvme) {
    job.read = Phase::waiting;
    want_slot(j, SlotKind::fetch);
    serve_slots(SlotKind::fetch);
  }
  advance(j);
}

Index Scheduler::append_update(Index chunk, Index entry, bool copy_first, bool gate_on_gradient, std::uint64_t key) {
  ChunkState& state = chunk_states_[chunk];
  BALLAST_CHECK(!update_waits(chunk));
  const Index j = append_job(JobKind::update, chunk, entry, key + chunk);
  Job& job = jobs_[j];
  job.copy_first = copy_first;
  job.gate_on_gradient = gate_on_gradient;
  // What is due or has come may belong to an earlier job; then this one is for the next.
  job.gate_open = state.open_job == kNone && (gate_on_gradient ? state.gradient_here : state.due);
  (job.gate_open ? state.open_job : state.waiting_job) = j;
  job.cpu = Phase::waiting;
  if (entry != kNone && chunks_[chunk].parameters != Tier::device) job.copy = Phase::waiting;
  if (chunks_[chunk].parameters == Tier::nvme || chunks_[chunk].optimizer == Tier::nvme) {
    job.read = Phase::waiting;
    job.write = Phase::waiting;
    want_slot(j, SlotKind::update);
    serve_slots(SlotKind::update);
  }
  advance(j);
  return j;
}

// Expected fetches of a unit that is about to change would bring stale parameters.
void Scheduler::cancel_stale(Index unit) {
  forget_copy(unit);
  for (Index i = entry_head_; i != kNone; i = entries_[i].next) {
    if (entries_[i].unit == unit && !entries_[i].gradient && !entries_[i].leased && !entries_[i].cancelled) {
      cancel_expected();
      return;
    }
  }
}

bool Scheduler::append_updates(Index unit) {
  const Unit& u = units_[unit];
  if (free_jobs_.size() < u.chunk_count) return false;
  cancel_stale(unit);
  const std::uint64_t key = next_key_++ << kChunkBits;
  for (Index c = u.first_chunk; c < u.first_chunk + u.chunk_count; ++c) {
    if (!chunk_states_[c].due || chunk_states_[c].open_job != kNone) continue;
    append_update(c, kNone, false, false, key);
  }
  return true;
}

bool Scheduler::append_eager_updates(Index unit) {
  const Unit& u = units_[unit];
  if (free_jobs_.size() < u.chunk_count) return false;
  std::uint64_t key = 0;
  for (Index c = u.first_chunk; c < u.first_chunk + u.chunk_count; ++c) {
    const ChunkState& state = chunk_states_[c];
    if (!state.eager || !state.contributed || state.gradient_here || update_waits(c)) continue;
    if (key == 0) {
      cancel_stale(unit);
      key = next_key_++ << kChunkBits;
    }
    append_update(c, kNone, false, true, key);
  }
  return true;
}

void Scheduler::want_slot(Index j, SlotKind kind) {
  Job& job = jobs_[j];
  job.slot_kind = kind;
  job.slot_wanted = true;
  SlotPool& slots = pool(kind);
  (slots.waiting_head == kNone ? slots.waiting_head : jobs_[slots.waiting_tail].next_waiting) = j;
  slots.waiting_tail = j;
}

void Scheduler::serve_slots(SlotKind kind) {
  SlotPool& slots = pool(kind);
  while (!slots.free.empty() && slots.waiting_head != kNone && jobs_[slots.waiting_head].head) {
    const Index j = slots.waiting_head;
    Job& job = jobs_[j];
    slots.waiting_head = job.next_waiting;
    if (slots.waiting_head == kNone) slots.waiting_tail = kNone;
    job.next_waiting = kNone;
    job.slot_wanted = false;
    job.slot = slots.free.back();
    slots.free.pop_back();
    advance(j);
  }
}

void Scheduler::free_slot(SlotKind kind, Index slot) {
  pool(kind).free.push_back(slot);
  serve_slots(kind);
}

Scheduler::Phase& Scheduler::phase(Job& job, Task task) {
  switch (task) {
    case Task::read:
      return job.read;
    case Task::write:
      return job.write;
    case Task::copy_in:
    case Task::copy_out:
      return job.copy;
    case Task::update:
    case Task::accumulate:
      break;
  }
  return job.cpu;
}

void Scheduler::push(Task task, Index j) {
  phase(jobs_[j], task) = Phase::ready;
  auto& heap = lane(task).heap;
  heap.emplace_back(jobs_[j].key, j);
  std::push_heap(heap.begin(), heap.end(), kLater);
}

void Scheduler::unpush(Task task, Index j) {
  Phase& p = phase(jobs_[j], task);
  if (p == Phase::ready) {
    auto& heap = lane(task).heap;
    std::erase_if(heap, [&](const auto& item) { return item.second == j; });
    std::make_heap(heap.begin(), heap.end(), kLater);
  }
  if (p == Phase::ready || p == Phase::waiting) p = Phase::unneeded;
}

bool Scheduler::running(const Job& job) const {
  return job.read == Phase::running || job.copy == Phase::running || job.cpu == Phase::running ||
         job.write == Phase::running;
}

bool Scheduler::held_by_trainer(const Job& job) const {
  // Parameters that live on the device are read in place: an update waits for earlier readers.
  const Chunk& chunk = chunks_[job.chunk];
  if (chunk.parameters != Tier::device) return false;
  for (Index i = entry_head_; i != kNone && (entries_[i].key << kChunkBits) <= job.key; i = entries_[i].next) {
    const Entry& entry = entries_[i];
    if (entry.unit == chunk.unit && !entry.gradient && i != job.entry && entry.leased) return true;
  }
  return false;
}

void Scheduler::advance(Index j) {
  Job& job = jobs_[j];
  if (!job.alive) return;
  if (job.cancelled) {
    if (!running(job)) finish_job(j);
    return;
  }
  if (!job.head || job.slot_wanted) return;
  const auto settled = [](Phase p) { return p == Phase::unneeded || p == Phase::done; };
  const bool range_free = job.entry != kNone && entries_[job.entry].range_free;
  if (job.read == Phase::waiting) push(Task::read, j);
  const bool here = settled(job.read);
  switch (job.kind) {
    case JobKind::fetch:
      if (job.copy == Phase::waiting && here && range_free) push(Task::copy_in, j);
      break;
    case JobKind::update:
      if (job.copy == Phase::waiting && range_free && (job.copy_first ? here : job.cpu == Phase::done)) {
        push(Task::copy_in, j);
      }
      if (job.cpu == Phase::waiting && here && job.gate_open && (!job.copy_first || settled(job.copy)) &&
          !held_by_trainer(job)) {
        push(Task::update, j);
      }
      if (job.write == Phase::waiting && job.cpu == Phase::done) push(Task::write, j);
      break;
    case JobKind::gradient:
      if (job.copy == Phase::waiting) push(Task::copy_out, j);
      if (job.cpu == Phase::waiting && settled(job.copy)) push(Task::accumulate, j);
      break;
  }
  if (settled(job.read) && settled(job.copy) && settled(job.cpu) && settled(job.write)) finish_job(j);
}

void Scheduler::open_gate(Index j) {
  ChunkState& state = chunk_states_[jobs_[j].chunk];
  BALLAST_CHECK(state.waiting_job == j && state.open_job == kNone);
  state.waiting_job = kNone;
  state.open_job = j;
  jobs_[j].gate_open = true;
  advance(j);
}

// The update will not happen: what waits for the parameters gets them as they are.
void Scheduler::skip_update(Index j) {
  Job& job = jobs_[j];
  BALLAST_CHECK(job.kind == JobKind::update && !job.gate_open);
  chunk_states_[job.chunk].waiting_job = kNone;
  if (job.entry == kNone) {
    cancel_job(j);
    return;
  }
  job.kind = JobKind::fetch;
  job.cpu = Phase::unneeded;
  job.write = Phase::unneeded;
  if (job.read == Phase::waiting && chunks_[job.chunk].parameters != Tier::nvme) job.read = Phase::unneeded;
  advance(j);
}

void Scheduler::cancel_job(Index j) {
  Job& job = jobs_[j];
  if (job.cancelled) return;
  ChunkState& state = chunk_states_[job.chunk];
  const bool carried_through = job.kind == JobKind::update && (job.cpu == Phase::running || job.cpu == Phase::done ||
                                                               (job.gate_on_gradient && state.eager));
  job.owner_key = 0;
  if (carried_through || job.kind == JobKind::gradient) {
    unpush(Task::copy_in, j);
    if (job.copy != Phase::running) job.entry = kNone;
    advance(j);
    return;
  }
  if (state.waiting_job == j) state.waiting_job = kNone;
  if (state.open_job == j) state.open_job = kNone;
  job.cancelled = true;
  if (job.copy != Phase::running) job.entry = kNone;
  unpush(Task::read, j);
  unpush(copy_task(job), j);
  unpush(cpu_task(job), j);
  unpush(Task::write, j);
  if (job.slot_wanted) {
    // Out of the queue of its slot kind.
    SlotPool& slots = pool(job.slot_kind);
    Index previous = kNone;
    for (Index i = slots.waiting_head; i != j; i = jobs_[i].next_waiting) previous = i;
    (previous == kNone ? slots.waiting_head : jobs_[previous].next_waiting) = job.next_waiting;
    if (slots.waiting_tail == j) slots.waiting_tail = previous;
    job.next_waiting = kNone;
    job.slot_wanted = false;
    job.slot_kind = SlotKind::none;
  }
  advance(j);
}

// The job's chunk is where its entry wants it.
void Scheduler::arrive(Index j) {
  Job& job = jobs_[j];
  if (job.entry == kNone) return;
  const Index entry = job.entry;
  job.entry = kNone;
  BALLAST_CHECK(entries_[entry].missing > 0);
  --entries_[entry].missing;
  end_entry_if_over(entry);
}

void Scheduler::finish_job(Index j) {
  Job& job = jobs_[j];
  const bool gradient = job.kind == JobKind::gradient;
  ChunkState& state = chunk_states_[job.chunk];
  job.alive = false;
  --jobs_alive_;
  if (gradient) --gradient_jobs_;
  if (state.waiting_job == j) state.waiting_job = kNone;
  if (state.open_job == j) state.open_job = kNone;
  Index next = kNone;
  if (job.head) {
    Index& head = gradient ? state.gradient_head : state.queue_head;
    Index& tail = gradient ? state.gradient_tail : state.queue_tail;
    head = next = job.next_same_chunk;
    if (head == kNone) tail = kNone;
  } else {
    // Cancelled in the middle of its chunk's queue.
    Index i = gradient ? state.gradient_head : state.queue_head;
    while (jobs_[i].next_same_chunk != j) i = jobs_[i].next_same_chunk;
    jobs_[i].next_same_chunk = job.next_same_chunk;
    if (state.queue_tail == j) state.queue_tail = i;
    if (state.gradient_tail == j) state.gradient_tail = i;
  }
  const SlotKind kind = job.slot_kind;
  const Index slot = job.slot;
  if (!job.cancelled) arrive(j);
  job = Job{};
  free_jobs_.push_back(j);
  if (next != kNone) {
    jobs_[next].head = true;
    for (SlotKind k : {SlotKind::fetch, SlotKind::update, SlotKind::gradient}) serve_slots(k);
    advance(next);
  }
  if (slot != kNone) free_slot(kind, slot);
}

// --- decisions and the world -----------------------------------------------------------------------------------------

void Scheduler::decide(bool update) {
  Index stale = kNone;
  for (Index c = 0; c < chunks_.size(); ++c) {
    ChunkState& state = chunk_states_[c];
    if (state.eager) {
      BALLAST_CHECK(update);  // the update is done or under way
    } else {
      const bool becomes_due = state.contributed && update;
      if (becomes_due) state.due = true;
      if (update_waits(c)) {
        if (becomes_due && !jobs_[state.waiting_job].gate_on_gradient) {
          open_gate(state.waiting_job);
        } else {
          skip_update(state.waiting_job);
        }
      } else if (becomes_due) {
        stale = chunks_[c].unit;
        forget_copy(stale);
      }
    }
    state.contributed = false;
    state.eager = false;
  }
  if (stale == kNone) return;
  for (Index i = entry_head_; i != kNone; i = entries_[i].next) {
    const Entry& entry = entries_[i];
    if (!entry.gradient && !entry.leased && !entry.cancelled && unit_update_unclaimed(entry.unit)) {
      cancel_expected();
      return;
    }
  }
}

std::size_t Scheduler::next(std::span<Action> out) {
  std::size_t count = 0;
  for (std::size_t l = 0; l < lanes_.size(); ++l) {
    Lane& ln = lanes_[l];
    while (ln.in_flight < ln.depth && !ln.heap.empty() && count < out.size()) {
      std::pop_heap(ln.heap.begin(), ln.heap.end(), kLater);
      const Index j = ln.heap.back().second;
      ln.heap.pop_back();
      Job& job = jobs_[j];
      const Task task = l == 4 ? cpu_task(job) : static_cast<Task>(l);
      BALLAST_CHECK(job.alive && phase(job, task) == Phase::ready);
      phase(job, task) = Phase::running;
      ++ln.in_flight;
      ++in_flight_;
      Action& action = out[count++];
      action = Action{};
      action.task = task;
      action.job_kind = job.kind;
      action.job = j;
      action.chunk = job.chunk;
      action.unit = chunks_[job.chunk].unit;
      action.slot_kind = job.slot_kind;
      action.slot = job.slot;
      action.first = job.first;
      action.last = job.last;
      if (job.entry != kNone) {
        action.device_offset = entries_[job.entry].offset;
        if (task == Task::copy_in || job.kind == JobKind::gradient) ++entries_[job.entry].in_flight;
        action.urgent = entries_[job.entry].leased;
      }
      if (task == Task::update) action.gradient_slot = chunk_states_[job.chunk].gradient_slot;
      if (task == Task::write) {
        action.urgent = job.next_same_chunk != kNone || pool(SlotKind::update).waiting_head != kNone;
      }
    }
  }
  return count;
}

void Scheduler::finished(const Action& action) {
  const Index j = action.job;
  Job& job = jobs_[j];
  BALLAST_CHECK(job.alive && phase(job, action.task) == Phase::running);
  phase(job, action.task) = Phase::done;
  --lane(action.task).in_flight;
  --in_flight_;
  ChunkState& state = chunk_states_[job.chunk];
  switch (action.task) {
    case Task::read:
    case Task::write:
      break;
    case Task::copy_in:
      if (job.entry != kNone) {
        --entries_[job.entry].in_flight;
        if (job.cancelled || entries_[job.entry].cancelled) {
          const Index entry = job.entry;
          job.entry = kNone;
          end_entry_if_over(entry);
        } else {
          arrive(j);
        }
      }
      break;
    case Task::copy_out:
      --entries_[job.entry].in_flight;
      arrive(j);
      break;
    case Task::update: {
      state.due = false;
      state.gradient_here = false;
      ++state.updates;
      state.open_job = kNone;
      if (job.copy == Phase::unneeded) arrive(j);
      if (state.gradient_slot != kNone) {
        const Index slot = state.gradient_slot;
        state.gradient_slot = kNone;
        free_slot(SlotKind::gradient, slot);
      }
      break;
    }
    case Task::accumulate: {
      if (job.entry != kNone) {
        --entries_[job.entry].in_flight;
        arrive(j);  // read from the device in place
      }
      if (!units_[chunks_[job.chunk].unit].stored_gradients) {
        // The slot stays with the chunk until the update has consumed the gradient.
        BALLAST_CHECK(state.gradient_slot == kNone);
        state.gradient_slot = job.slot;
        job.slot = kNone;
      }
      if (job.last && state.eager) {
        state.gradient_here = true;
        if (update_waits(action.chunk) && jobs_[state.waiting_job].gate_on_gradient) open_gate(state.waiting_job);
      }
      break;
    }
  }
  advance(j);
}

bool Scheduler::unit_update_due(Index unit) const {
  const Unit& u = units_[unit];
  for (Index c = u.first_chunk; c < u.first_chunk + u.chunk_count; ++c) {
    if (chunk_states_[c].due) return true;
  }
  return false;
}

// Due, and no job will do it.
bool Scheduler::unit_update_unclaimed(Index unit) const {
  const Unit& u = units_[unit];
  for (Index c = u.first_chunk; c < u.first_chunk + u.chunk_count; ++c) {
    if (chunk_states_[c].due && chunk_states_[c].open_job == kNone) return true;
  }
  return false;
}

bool Scheduler::unit_busy(Index unit) const {
  const Unit& u = units_[unit];
  for (Index c = u.first_chunk; c < u.first_chunk + u.chunk_count; ++c) {
    if (chunk_states_[c].queue_head != kNone || chunk_states_[c].gradient_head != kNone) return true;
  }
  return false;
}

}  // namespace ballast::schedule
