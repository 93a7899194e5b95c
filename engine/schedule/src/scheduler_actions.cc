// What the scheduler wants of the world: the actions to start next, in the order of their keys, and what the end of
// each lets begin. SPDX-License-Identifier: Apache-2.0
#include <ballast/base/check.h>
#include <ballast/schedule/scheduler.h>

#include <algorithm>

#include "scheduler_keys.h"

namespace ballast::schedule {

std::size_t Scheduler::next(std::span<Action> out) {
  std::size_t count = 0;
  for (Collectives* queue : {&gathers_, &reductions_}) {
    if (queue->count == 0 || count == out.size()) continue;
    const Index id = queue->at(0);
    if (!collective_may_start(id)) continue;
    Entry& entry = entries_[id];
    entry.collective = Phase::running;
    ++entry.in_flight;
    ++in_flight_;
    Action& action = out[count++];
    action = Action{};
    action.task = queue == &gathers_ ? Task::gather : Task::reduce;
    action.job_kind = queue == &gathers_ ? JobKind::fetch : JobKind::gradient;
    action.entry = id;
    action.unit = entry.unit;
    action.device_offset = entry.offset;
    action.urgent = entry.leased;
  }
  for (std::size_t l = 0; l < lanes_.size(); ++l) {
    Lane& ln = lanes_[l];
    while (ln.in_flight < ln.depth && !ln.heap.empty() && count < out.size()) {
      const Index j = ln.heap.front().second;
      ln.remove(0);
      Job& job = jobs_[j];
      const Task task = l == 4                               ? cpu_task(job)
                        : l == 0 && job.load == Phase::ready ? Task::read_gradient
                                                             : static_cast<Task>(l);
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
        if (task == Task::copy_in || task == Task::copy_out || task == Task::accumulate)
          ++entries_[job.entry].in_flight;
        action.urgent = entries_[job.entry].leased;
      }
      if (task == Task::update) action.gradient_slot = chunk_states_[job.chunk].gradient_slot;
      if (task == Task::write) {
        // The trainer waits for a gradient's last one.
        action.urgent = job.next_same_chunk != kNone || pool(job.slot_kind).waiting_head != kNone ||
                        (job.kind == JobKind::gradient && job.last);
      }
    }
  }
  return count;
}

bool Scheduler::collective_may_start(Index id) const {
  const Entry& entry = entries_[id];
  if (entry.collective != Phase::waiting) return false;
  if (entry.gradient) return entry.committed;
  if (entry.missing != 0 || !entry.range_free) return false;
  // Parameters that live on the device are read in place: earlier readers first.
  for (Index i = entry.unit_previous; i != kNone && entry.bytes == 0; i = entries_[i].unit_previous) {
    if (!entries_[i].gradient && !entries_[i].cancelled) return false;
  }
  return true;
}

void Scheduler::finished(const Action& action) {
  if (action.task == Task::gather || action.task == Task::reduce) {
    Collectives& queue = action.task == Task::gather ? gathers_ : reductions_;
    Entry& entry = entries_[action.entry];
    BALLAST_CHECK(queue.at(0) == action.entry && entry.collective == Phase::running);
    queue.pop();
    entry.collective = Phase::done;
    --entry.in_flight;
    --in_flight_;
    const Unit& u = units_[entry.unit];
    for (Index c = u.first_chunk; c < u.first_chunk + u.chunk_count && entry.gradient; ++c) {
      if (chunk_states_[c].gradient_head != kNone) advance(chunk_states_[c].gradient_head);
    }
    check_later(action.entry);
    for (Index i = entry.unit_next; i != kNone && !entry.gradient; i = entries_[i].unit_next) {
      if (!entries_[i].gradient && entries_[i].released) check_later(i);
    }
    settle();
    return;
  }
  const Index j = action.job;
  Job& job = jobs_[j];
  BALLAST_CHECK(job.alive && phase(job, action.task) == Phase::running);
  phase(job, action.task) = Phase::done;
  --lane(action.task).in_flight;
  --in_flight_;
  ChunkState& state = chunk_states_[job.chunk];
  switch (action.task) {
    case Task::read:
    case Task::read_gradient:
      break;
    case Task::write:
      if (job.kind == JobKind::gradient) gradient_is_here(job);
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
      BALLAST_CHECK(state.update_job == j);
      state.update_job = kNone;
      --updates_due_;
      state.due = false;
      state.owed = false;
      state.gradient_here = false;
      ++state.updates;
      if (job.copy == Phase::unneeded) arrive(j);
      if (state.gradient_slot != kNone) {
        pool(SlotKind::gradient).free.push_back(state.gradient_slot);
        state.gradient_slot = kNone;
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
      if (!gradient_on_nvme(job.chunk)) gradient_is_here(job);
      break;
    }
    case Task::gather:
    case Task::reduce:
      BALLAST_CHECK(false);
  }
  advance(j);
  settle();
}

// A contribution is where the update will look for it.
void Scheduler::gradient_is_here(const Job& job) {
  ChunkState& state = chunk_states_[job.chunk];
  if (!job.last || !state.owed) return;
  state.gradient_here = true;
  if (state.update_job == kNone) return;
  jobs_[state.update_job].gate_open = true;
  advance(state.update_job);
}

}  // namespace ballast::schedule
