// The scheduler's jobs: one chunk's way through its tasks, with the queues of chunks, slots and lanes.
// SPDX-License-Identifier: Apache-2.0
#include <ballast/base/check.h>
#include <ballast/schedule/scheduler.h>

#include <algorithm>

#include "scheduler_keys.h"

namespace ballast::schedule {

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
  }
  advance(j);
}

void Scheduler::append_update(Index chunk, Index entry, bool copy_first, bool gate_on_gradient, std::uint64_t key) {
  ChunkState& state = chunk_states_[chunk];
  const bool claims = unclaimed(chunk) && gate_on_gradient == state.owed;
  const Index j = append_job(JobKind::update, chunk, entry, key + chunk);
  Job& job = jobs_[j];
  if (claims) {
    state.update_job = j;
    job.gate_open = gate_on_gradient ? state.gradient_here : true;
  } else {
    BALLAST_CHECK(state.waiting_job == kNone);
    state.waiting_job = j;
    List& list = waiting_updates_;
    job.previous_held = list.tail;
    (list.tail == kNone ? list.head : jobs_[list.tail].next_held) = j;
    list.tail = j;
  }
  job.copy_first = copy_first;
  job.gate_on_gradient = gate_on_gradient;
  job.cpu = Phase::waiting;
  if (entry != kNone && chunks_[chunk].parameters != Tier::device) job.copy = Phase::waiting;
  const bool states_on_nvme = chunks_[chunk].parameters == Tier::nvme || chunks_[chunk].optimizer == Tier::nvme;
  if (states_on_nvme) job.read = job.write = Phase::waiting;
  if (gradient_on_nvme(chunk)) job.load = Phase::waiting;
  if (states_on_nvme || gradient_on_nvme(chunk)) want_slot(j, SlotKind::update);
  advance(j);
}

// Before its waiting_job gets another place or ends.
void Scheduler::no_longer_waiting(ChunkState& state) {
  Job& job = jobs_[state.waiting_job];
  List& list = waiting_updates_;
  (job.previous_held == kNone ? list.head : jobs_[job.previous_held].next_held) = job.next_held;
  (job.next_held == kNone ? list.tail : jobs_[job.next_held].previous_held) = job.previous_held;
  job.previous_held = job.next_held = kNone;
  state.waiting_job = kNone;
}

void Scheduler::want_slot(Index j, SlotKind kind) {
  Job& job = jobs_[j];
  job.slot_kind = kind;
  job.slot_wanted = true;
  SlotPool& slots = pool(kind);
  job.previous_waiting = slots.waiting_tail;
  (slots.waiting_head == kNone ? slots.waiting_head : jobs_[slots.waiting_tail].next_waiting) = j;
  slots.waiting_tail = j;
}

void Scheduler::leave_slot_queue(Index j) {
  Job& job = jobs_[j];
  if (!job.slot_wanted) return;
  SlotPool& slots = pool(job.slot_kind);
  (job.previous_waiting == kNone ? slots.waiting_head : jobs_[job.previous_waiting].next_waiting) = job.next_waiting;
  (job.next_waiting == kNone ? slots.waiting_tail : jobs_[job.next_waiting].previous_waiting) = job.previous_waiting;
  job.previous_waiting = job.next_waiting = kNone;
  job.slot_wanted = false;
  job.slot_kind = SlotKind::none;
}

// Gives slots out, strictly in order. Returns whether it gave any.
bool Scheduler::serve_slots(SlotKind kind) {
  SlotPool& slots = pool(kind);
  bool any = false;
  while (!slots.free.empty() && slots.waiting_head != kNone && jobs_[slots.waiting_head].head) {
    const Index j = slots.waiting_head;
    Job& job = jobs_[j];
    slots.waiting_head = job.next_waiting;
    (slots.waiting_head == kNone ? slots.waiting_tail : jobs_[slots.waiting_head].previous_waiting) = kNone;
    job.next_waiting = kNone;
    job.slot_wanted = false;
    job.slot = slots.free.back();
    slots.free.pop_back();
    any = true;
    advance(j);
  }
  return any;
}

Scheduler::Phase& Scheduler::phase(Job& job, Task task) {
  switch (task) {
    case Task::read:
      return job.read;
    case Task::read_gradient:
      return job.load;
    case Task::write:
      return job.write;
    case Task::copy_in:
    case Task::copy_out:
      return job.copy;
    case Task::update:
    case Task::accumulate:
      break;
    case Task::gather:
    case Task::reduce:
      BALLAST_CHECK(false);
  }
  return job.cpu;
}

void Scheduler::push(Task task, Index j) {
  phase(jobs_[j], task) = Phase::ready;
  lane(task).push(jobs_[j].key, j);
}

void Scheduler::Lane::put(std::size_t at, const std::pair<std::uint64_t, Index>& item) {
  heap[at] = item;
  place[item.second] = static_cast<Index>(at);
}

void Scheduler::Lane::push(std::uint64_t key, Index job) {
  const std::pair<std::uint64_t, Index> item(key, job);
  heap.push_back(item);
  std::size_t at = heap.size() - 1;
  for (; at > 0 && item < heap[(at - 1) / 2]; at = (at - 1) / 2) put(at, heap[(at - 1) / 2]);
  put(at, item);
}

// The last item takes the place, and goes up or down from there.
void Scheduler::Lane::remove(Index removed) {
  const std::pair<std::uint64_t, Index> item = heap.back();
  heap.pop_back();
  std::size_t at = removed;
  if (at == heap.size()) return;
  for (; at > 0 && item < heap[(at - 1) / 2]; at = (at - 1) / 2) put(at, heap[(at - 1) / 2]);
  for (std::size_t child = 2 * at + 1; child < heap.size(); child = 2 * at + 1) {
    if (child + 1 < heap.size() && heap[child + 1] < heap[child]) ++child;
    if (!(heap[child] < item)) break;
    put(at, heap[child]);
    at = child;
  }
  put(at, item);
}

void Scheduler::unpush(Task task, Index j) {
  Phase& p = phase(jobs_[j], task);
  if (p == Phase::ready) {
    lane(task).remove(lane(task).place[j]);
  }
  if (p == Phase::ready || p == Phase::waiting) p = Phase::unneeded;
}

bool Scheduler::running(const Job& job) const {
  return job.read == Phase::running || job.load == Phase::running || job.copy == Phase::running ||
         job.cpu == Phase::running || job.write == Phase::running;
}

bool Scheduler::held_by_trainer(const Job& job) const {
  // Parameters that live on the device are read in place: an update waits for earlier readers.
  const Chunk& chunk = chunks_[job.chunk];
  if (chunk.parameters != Tier::device) return false;
  for (Index i = unit_entries_[chunk.unit].head;
       i != kNone && !expected(i) && (entries_[i].key << kChunkBits) <= job.key; i = entries_[i].unit_next) {
    if (!entries_[i].gradient && i != job.entry && entries_[i].leased) return true;
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
      if (job.load == Phase::waiting && here && job.gate_open) push(Task::read_gradient, j);
      if (job.cpu == Phase::waiting && here && job.gate_open && settled(job.load) &&
          (!job.copy_first || settled(job.copy)) && !held_by_trainer(job)) {
        push(Task::update, j);
      }
      if (job.write == Phase::waiting && job.cpu == Phase::done) push(Task::write, j);
      break;
    case JobKind::gradient:
      if (job.entry != kNone && !settled(entries_[job.entry].collective)) break;
      if (job.copy == Phase::waiting) push(Task::copy_out, j);
      if (job.cpu == Phase::waiting && here && settled(job.copy)) push(Task::accumulate, j);
      if (job.write == Phase::waiting && job.cpu == Phase::done) push(Task::write, j);
      break;
  }
  if (settled(job.read) && settled(job.load) && settled(job.copy) && settled(job.cpu) && settled(job.write)) {
    finish_job(j);
  }
}

// The update will not happen: what waits for the parameters gets them as they are.
void Scheduler::skip_update(Index j) {
  Job& job = jobs_[j];
  ChunkState& state = chunk_states_[job.chunk];
  BALLAST_CHECK(job.kind == JobKind::update && state.waiting_job == j);
  if (job.entry == kNone) {
    cancel_job(j);
    return;
  }
  no_longer_waiting(state);
  job.kind = JobKind::fetch;
  job.cpu = Phase::unneeded;
  job.load = Phase::unneeded;
  job.write = Phase::unneeded;
  if (chunks_[job.chunk].parameters != Tier::nvme) {
    // Only the optimizer states were to be read. (Otherwise it keeps its place in the queue for update slots: a later
    // place in the one for fetch slots could be behind a job that waits for this one's range.)
    unpush(Task::read, j);
    leave_slot_queue(j);
  }
  advance(j);
}

void Scheduler::cancel_job(Index j) {
  Job& job = jobs_[j];
  if (job.cancelled) return;
  ChunkState& state = chunk_states_[job.chunk];
  job.owner_key = 0;
  const bool begun = job.cpu == Phase::running || job.cpu == Phase::done;
  const bool committed = job.gate_on_gradient && state.update_job == j;
  if (job.kind == JobKind::gradient || (job.kind == JobKind::update && (begun || committed))) {
    // Carried through, but brings nothing to its entry any more.
    unpush(Task::copy_in, j);
    if (job.copy != Phase::running) job.entry = kNone;
    advance(j);
    return;
  }
  if (state.update_job == j) state.update_job = kNone;
  if (state.waiting_job == j) no_longer_waiting(state);
  job.cancelled = true;
  if (job.copy != Phase::running) job.entry = kNone;
  unpush(Task::read, j);
  unpush(Task::read_gradient, j);
  unpush(copy_task(job), j);
  unpush(cpu_task(job), j);
  unpush(Task::write, j);
  leave_slot_queue(j);
  advance(j);
}

// The job's chunk is where its entry wants it.
void Scheduler::arrive(Index j) {
  Job& job = jobs_[j];
  if (job.entry == kNone) return;
  const Index entry = job.entry;
  job.entry = kNone;
  BALLAST_CHECK(entries_[entry].missing > 0);
  if (--entries_[entry].missing != 0) return;
  check_later(entry);
  for (Index i = entries_[entry].unit_next; i != kNone && entries_[entry].dependents != 0; i = entries_[i].unit_next) {
    if (entries_[i].source != kNone && entries_[i].released) check_later(i);
  }
}

void Scheduler::finish_job(Index j) {
  Job& job = jobs_[j];
  const bool gradient = job.kind == JobKind::gradient;
  ChunkState& state = chunk_states_[job.chunk];
  BALLAST_CHECK(state.update_job != j && state.waiting_job != j);
  job.alive = false;
  --jobs_alive_;
  if (gradient) --gradient_jobs_;
  Index& head = gradient ? state.gradient_head : state.queue_head;
  Index& tail = gradient ? state.gradient_tail : state.queue_tail;
  Index next = kNone;
  if (job.head) {
    head = next = job.next_same_chunk;
    if (head == kNone) tail = kNone;
  } else {
    // Cancelled in the middle of its chunk's queue.
    Index i = head;
    while (jobs_[i].next_same_chunk != j) i = jobs_[i].next_same_chunk;
    jobs_[i].next_same_chunk = job.next_same_chunk;
    if (tail == j) tail = i;
  }
  if (!job.cancelled) arrive(j);
  if (job.slot != kNone) pool(job.slot_kind).free.push_back(job.slot);
  job = Job{};
  free_jobs_.push_back(j);
  if (next != kNone) {
    jobs_[next].head = true;
    advance(next);
  }
}

}  // namespace ballast::schedule
