// The trainer's program, step by step: what its host does at once, what its device work waits for.
// SPDX-License-Identifier: Apache-2.0
#include <ballast/base/check.h>
#include <ballast/simulate/model_trainer.h>

#include <algorithm>

namespace ballast::simulate {

using schedule::Action;
using schedule::Form;

ModelTrainer::ModelTrainer(const Plan& plan)
    : plan_(&plan), scheduler_(plan.chunks, plan.units, plan.limits), world_(plan), passes_(plan.expected_passes) {
  handles_.resize(plan.handles.size());
  traces_[0] = compile_pass(plan, plan.expected);
  ahead_pass_ = 1;
  pump();
}

void ModelTrainer::complete(std::size_t event) {
  if (event < world_.in_flight().size()) {
    const Action action = world_.in_flight()[event].action;
    world_.finish(event);
    scheduler_.finished(action);
  } else {
    BALLAST_CHECK(computing_);
    world_.finish_compute(computing_unit_, compute_parameters_, compute_gradients_, compute_reads_, compute_writes_);
    computing_ = false;
    ++device_at_;
  }
  pump();
  if (stalled() && error().empty()) {
    // What an engine does when everything stands still: it takes back what is expected, and goes on without.
    ++reliefs_;
    deviated_ = true;
    scheduler_.cancel_expected();
    pump();
  }
}

void ModelTrainer::disturb() {
  ++disturbances_;
  drop_expected();
  pump();
}

bool ModelTrainer::task_of(std::size_t event, Action& action) const {
  if (event >= world_.in_flight().size()) return false;
  action = world_.in_flight()[event].action;
  return true;
}

void ModelTrainer::pump() {
  std::array<Action, 16> actions;
  for (bool again = true; again && error().empty();) {
    again = queue_updates();
    again |= host_step();
    again |= device_step();
    again |= look_ahead();
    const std::size_t count = scheduler_.next(actions);
    for (std::size_t i = 0; i < count; ++i) world_.start(actions[i]);
    tasks_started_ += count;
    again |= count != 0;
  }
  if (check_always_ && error().empty()) {
    std::string broken = scheduler_.check();
    if (!broken.empty()) world_.fail(std::move(broken));
  }
}

// --- the host --------------------------------------------------------------------------------------------------------

bool ModelTrainer::host_step() {
  bool any = false;
  if (device_at_ == plan_->program.size() && !closed_) {
    closed_ = true;
    drop_expected();
    return true;
  }
  while (host_at_ < plan_->program.size() && host_at_ <= device_at_ + plan_->run_ahead && error().empty()) {
    const Operation& operation = plan_->program[host_at_];
    note_cancellations();
    switch (operation.verb) {
      case Verb::begin_step:
        if (operation.count != passes_) {
          drop_expected();
          passes_ = operation.count;
        }
        in_step_ = true;
        break;
      case Verb::begin_pass:
        begin_pass(operation.flag);
        break;
      case Verb::end_pass:
        end_pass();
        break;
      case Verb::open_parameters:
      case Verb::open_gradients:
        if (!open(operation)) return any;
        break;
      case Verb::compute:
        break;
      case Verb::commit:
      case Verb::give_up:
      case Verb::release:
        scheduler_.note_release_requested(handles_[operation.handle].entry);
        break;
      case Verb::take_back:
        drop_expected();
        break;
      case Verb::decide:
      case Verb::settle:
        if (device_at_ != host_at_ || !host_barrier(operation)) return any;
        ++device_at_;
        break;
    }
    ++host_at_;
    any = true;
  }
  return any;
}

bool ModelTrainer::host_barrier(const Operation& operation) {
  if (operation.verb == Verb::decide) {
    if (scheduler_.gradients_outstanding()) return false;
    world_.decide(operation.flag);
    ++decisions_;
    scheduler_.decide(operation.flag);
    in_step_ = false;
    pass_ = kNone;
    if (plan_->timing == Timing::after_backward) update_unit_ = 0;
    return true;
  }
  if (!settling_) {
    settling_ = true;
    drop_expected();
    update_unit_ = 0;
    queue_updates();
  }
  if (update_unit_ != kNone) return false;
  for (Index u = 0; u < plan_->units.size(); ++u) {
    if (scheduler_.unit_update_due(u)) return false;
  }
  settling_ = false;
  return true;
}

bool ModelTrainer::queue_updates() {
  if (update_unit_ == kNone) return false;
  bool any = false;
  while (update_unit_ < plan_->units.size() && scheduler_.append_updates(update_unit_)) {
    ++update_unit_;
    any = true;
  }
  if (update_unit_ == plan_->units.size()) update_unit_ = kNone;
  return any;
}

void ModelTrainer::begin_pass(bool evaluation) {
  if (evaluation) {
    drop_expected();  // training was expected
    ahead_pass_ = 0;
    ahead_access_ = 0;
  } else {
    pass_ = pass_ == kNone ? 0 : pass_ + 1;
    for (Expected& e : expected_) --e.pass;
    if (ahead_pass_ == 0) ahead_access_ = 0;
    if (ahead_pass_ != 0) --ahead_pass_;
  }
  in_pass_ = true;
  evaluating_ = evaluation;
  deviated_ = false;
  cursor_ = 0;
  pass_begin_ = host_at_ + 1;
}

void ModelTrainer::end_pass() {
  if (!expected_.empty() && expected_.front().pass == 0) note_deviation();
  std::vector<Access> accesses = record_pass(plan_->program, pass_begin_, host_at_);
  PassTrace& trace = traces_[evaluating_ ? 1 : 0];
  if (!same_accesses(accesses, trace.accesses)) {
    drop_expected();
    trace = compile_pass(*plan_, std::move(accesses));
  }
  in_pass_ = false;
  evaluating_ = false;
  deviated_ = false;
  if (ahead_pass_ == 0) {
    ahead_pass_ = 1;
    ahead_access_ = 0;
  }
}

bool ModelTrainer::open(const Operation& operation) {
  const bool gradient = operation.verb == Verb::open_gradients;
  const PassTrace& trace = running_trace();
  if (gradient && !scheduler_.unit_updates_coming(operation.unit)) {
    // Pending updates run before the unit's next gradient; no parameter opening of this pass has asked for this one.
    drop_expected();
    if (!scheduler_.append_updates(operation.unit)) return false;
  }
  Index entry = kNone;
  if (!deviated_ && trace.known && cursor_ < trace.accesses.size() && trace.accesses[cursor_].unit == operation.unit &&
      trace.accesses[cursor_].gradient == gradient) {
    const schedule::Unit& u = plan_->units[operation.unit];
    const std::uint64_t bytes = gradient ? u.gradient_bytes : u.parameter_bytes;
    const bool appended = !expected_.empty();
    if (scheduler_.overlapping(trace.offsets[cursor_], bytes, appended ? expected_.front().entry : kNone, true) ==
        kNone) {
      if (appended) {
        entry = expected_.front().entry;
        BALLAST_CHECK(expected_.front().pass == 0 && expected_.front().access == cursor_);
        scheduler_.lease(entry);
        expected_.erase(expected_.begin());
      } else {
        entry = append(trace, cursor_, 0, true);
        if (entry == kNone) {
          drop_expected();  // updates that wait for the trainer may fill the tables
          return false;
        }
        ahead_pass_ = 0;
        ahead_access_ = cursor_ + 1;
      }
    }
  }
  if (entry == kNone) {
    note_deviation();
    entry = append_on_demand(operation);
    if (entry == kNone) return false;
  }
  ++cursor_;
  handles_[operation.handle] = {entry, operation.unit, gradient};
  return true;
}

Index ModelTrainer::append_on_demand(const Operation& operation) {
  const bool gradient = operation.verb == Verb::open_gradients;
  const schedule::Unit& u = plan_->units[operation.unit];
  std::uint64_t offset = 0;
  if (!find_place(operation.unit, gradient, gradient ? u.gradient_bytes : u.parameter_bytes, offset)) {
    world_.fail("no place on the device for unit " + std::to_string(operation.unit));
    return kNone;
  }
  return gradient ? scheduler_.append_gradients(operation.unit, offset, false, true)
                  : scheduler_.append_parameters(operation.unit, offset, Form::fetch, true);
}

bool ModelTrainer::find_place(Index unit, bool gradient, std::uint64_t bytes, std::uint64_t& offset) const {
  for (const PassTrace& trace : traces_) {
    for (std::size_t i = 0; trace.known && i < trace.accesses.size(); ++i) {
      if (trace.accesses[i].unit != unit || trace.accesses[i].gradient != gradient) continue;
      offset = trace.offsets[i];
      if (scheduler_.overlapping(offset, bytes, kNone, true) == kNone) return true;
    }
  }
  for (offset = 0; offset + bytes <= plan_->slab_bytes;) {
    const Index entry = scheduler_.overlapping(offset, bytes, kNone, true);
    if (entry == kNone) return true;
    offset = scheduler_.device_offset(entry) + scheduler_.entry_bytes(entry);
  }
  return false;
}

// --- the device ------------------------------------------------------------------------------------------------------

bool ModelTrainer::ready_to_compute(Index unit, Index& parameters, Index& gradients) const {
  parameters = gradients = kNone;
  for (const Index h : device_open_) {
    if (handles_[h].unit != unit) continue;
    if (!scheduler_.ready(handles_[h].entry)) return false;
    (handles_[h].gradient ? gradients : parameters) = handles_[h].entry;
  }
  return gradients == kNone || !scheduler_.unit_update_due(unit);
}

bool ModelTrainer::device_step() {
  bool any = false;
  while (device_at_ < host_at_ && !computing_ && error().empty()) {
    const Operation& operation = plan_->program[device_at_];
    const Index entry = operation.handle == kNone ? kNone : handles_[operation.handle].entry;
    switch (operation.verb) {
      case Verb::open_parameters:
      case Verb::open_gradients:
        device_open_.push_back(operation.handle);
        break;
      case Verb::compute: {
        Index parameters = kNone, gradients = kNone;
        if (!ready_to_compute(operation.unit, parameters, gradients)) return any;
        computing_ = true;
        computing_unit_ = operation.unit;
        compute_reads_ = parameters != kNone;
        compute_writes_ = gradients != kNone;
        compute_parameters_ = compute_reads_ ? scheduler_.device_offset(parameters) : 0;
        compute_gradients_ = compute_writes_ ? scheduler_.device_offset(gradients) : 0;
        world_.start_compute(computing_unit_, compute_parameters_, compute_gradients_, compute_reads_, compute_writes_);
        return true;
      }
      case Verb::commit: {
        Index parameters = kNone, gradients = kNone;
        if (!ready_to_compute(operation.unit, parameters, gradients)) return any;
        const schedule::Unit& u = plan_->units[operation.unit];
        std::array<bool, 32> contributes{};
        for (Index i = 0; i < u.chunk_count; ++i) contributes[i] = (operation.mask >> i & 1) != 0;
        const bool eager = plan_->timing == Timing::eager;
        world_.commit(operation.unit, scheduler_.device_offset(entry), {contributes.data(), u.chunk_count},
                      operation.flag, eager);
        scheduler_.commit_gradients(entry, {contributes.data(), u.chunk_count}, operation.flag, eager);
        if (eager && operation.flag) BALLAST_CHECK(scheduler_.append_eager_updates(operation.unit));
        std::erase(device_open_, operation.handle);
        break;
      }
      case Verb::give_up:
      case Verb::release:
        scheduler_.release(entry);
        std::erase(device_open_, operation.handle);
        break;
      default:
        break;
    }
    ++device_at_;
    any = true;
  }
  return any;
}

}  // namespace ballast::simulate
