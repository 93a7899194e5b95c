// What the trainer's host calls, as the engine serves it with several ranks: each call in stages, between which it
// waits. SPDX-License-Identifier: Apache-2.0
#include <ballast/base/check.h>
#include <ballast/simulate/rank_trainer.h>

#include <algorithm>

namespace ballast::simulate {

using schedule::Form;

RankTrainer::RankTrainer(const Plan& plan, Index rank, const RankOptions& options)
    : plan_(&plan),
      rank_(rank),
      options_(options),
      scheduler_(plan.chunks, plan.units, plan.limits),
      world_(plan),
      next_trace_(0),
      passes_(plan.expected_passes) {
  handles_.resize(plan.handles.size());
  opened_.resize(plan.units.size());
  update_queued_.resize(plan.units.size());
  entry_turns_.resize(plan.limits.entries);
  traces_[0] = std::make_shared<PassTrace>(compile_pass(plan, plan.expected));
  traces_[1] = std::make_shared<PassTrace>();
  if (!traces_[0]->known) next_trace_ = kNone;
}

// One call, or as much of it as can be done without waiting; then what is expected is appended, likewise.
bool RankTrainer::host_step(Exchange& exchange) {
  if (closed_) return false;
  bool any = false;
  if (!topping_up_) {
    if (host_at_ == plan_->program.size()) {
      drop_expected();
      closed_ = true;
      return true;
    }
    if (host_at_ > device_at_ + plan_->run_ahead) return false;
    for (bool over = false; !over && error().empty();) {
      const Index stage = stage_, unit = unit_at_;
      over = call(plan_->program[host_at_], exchange);
      if (!over && stage_ == stage && unit_at_ == unit) return any;
      any = true;
    }
    stage_ = unit_at_ = 0;
    ++host_at_;
    if (!topping_up_ || !error().empty()) return any;
  }
  const std::uint64_t turn = turn_;
  topping_up_ = !top_up();
  return any || !topping_up_ || turn_ != turn;
}

// True: the call is over.
bool RankTrainer::call(const Operation& operation, Exchange& exchange) {
  switch (operation.verb) {
    case Verb::begin_step:
      if (operation.count != passes_) {
        drop_expected();
        passes_ = operation.count;
      }
      in_step_ = true;
      covered_ = 0;
      topping_up_ = true;
      return true;
    case Verb::begin_pass:
      begin_pass(operation.flag);
      return true;
    case Verb::end_pass:
      end_pass();
      return true;
    case Verb::open_parameters:
    case Verb::open_gradients:
      return open(operation);
    case Verb::compute:
      return true;
    case Verb::commit:
      scheduler_.note_commit_requested(handles_[operation.handle].entry);
      if (operation.flag) forget_update_queued(operation.unit);
      return true;
    case Verb::give_up:
      forget_update_queued(operation.unit);
      [[fallthrough]];
    case Verb::release:
      scheduler_.note_release_requested(handles_[operation.handle].entry);
      return true;
    case Verb::decide:
      return decide(operation, exchange);
    case Verb::settle:
      return settle();
    case Verb::take_back:
      drop_expected();
      return true;
  }
  return true;
}

// --- steps and passes ------------------------------------------------------------------------------------------------

bool RankTrainer::decide(const Operation& operation, Exchange& exchange) {
  switch (stage_) {
    case 0:
      if (device_at_ != host_at_ || scheduler_.gradients_outstanding()) return false;
      stage_ = 1;
      if (operation.flag || operation.agrees) {
        exchange.arrive(rank_);
        agreeing_ = true;
        agreed_ = false;
      }
      return false;
    case 1:
      if (agreeing_ && !agreed_) return false;
      agreeing_ = false;
      world_.decide(operation.flag);
      ++decisions_;
      scheduler_.decide(operation.flag);
      in_step_ = false;
      std::fill(opened_.begin(), opened_.end(), 0);
      if (!operation.flag || plan_->timing == Timing::after_backward) drop_expected();
      stage_ = 2;
      return false;
    case 2:
      if (operation.flag && plan_->timing != Timing::just_in_time) {
        if (unit_at_ < plan_->units.size()) {
          if (scheduler_.append_updates(unit_at_)) ++unit_at_;
          return false;
        }
        if (plan_->timing == Timing::after_backward && !scheduler_.idle()) return false;
      }
      topping_up_ = true;
      return true;
    default:
      BALLAST_CHECK(false);
  }
  return true;
}

bool RankTrainer::settle() {
  if (stage_ == 0) {
    if (commits_pending()) return false;
    stage_ = 10;
    return false;
  }
  if (unit_at_ < plan_->units.size()) {
    if (stage_ == 10 && !scheduler_.unit_update_due(unit_at_)) {
      ++unit_at_;
      return false;
    }
    if (stage_ == 10) stage_ = 11;
    if (!force_updates(unit_at_)) return false;
    ++unit_at_;
    stage_ = 10;
    return false;
  }
  if (stage_ == 10) {
    drop_expected();
    stage_ = 20;
    return false;
  }
  if (commits_pending() || !scheduler_.idle()) return false;
  topping_up_ = true;
  return true;
}

// Stages from 11. True: over.
bool RankTrainer::force_updates(Index unit) {
  if (stage_ == 11) {
    drop_expected();
    stage_ = 12;
    return false;
  }
  if (stage_ == 12) {
    if (!scheduler_.append_updates(unit)) return false;
    sync_expected();
    stage_ = 13;
    return false;
  }
  return !scheduler_.unit_update_due(unit);
}

void RankTrainer::begin_pass(bool evaluation) {
  const Index kind = evaluation ? 1 : 0;
  const Index trace = traces_[kind]->known ? kind : kNone;
  if (trace != next_trace_) drop_expected();
  trace_ = trace;
  following_ = trace != kNone;
  in_pass_ = true;
  evaluating_ = evaluation;
  ++serial_;
  position_ = 0;
  pass_begin_ = host_at_ + 1;
  if (expected_.empty()) {
    ahead_pass_ = serial_;
    ahead_access_ = 0;
  }
  next_trace_ = !evaluation ? trace : traces_[0]->known ? 0 : kNone;
  topping_up_ = true;
}

void RankTrainer::end_pass() {
  std::vector<Access> accesses = record_pass(plan_->program, pass_begin_, host_at_);
  in_pass_ = false;
  if (!evaluating_) ++covered_;
  std::shared_ptr<const PassTrace>& trace = traces_[evaluating_ ? 1 : 0];
  const bool kept = trace_ != kNone && following_ && position_ == traces_[trace_]->accesses.size();
  if (!same_accesses(accesses, trace->accesses)) {
    drop_expected();
    trace = std::make_shared<PassTrace>(compile_pass(*plan_, std::move(accesses)));
  } else if (!kept) {
    drop_expected();
  }
  following_ = false;
  for (Index u = 0; u < plan_->units.size() && queued_chunks_ != 0; ++u) forget_update_queued(u);
  evaluating_ = false;
  next_trace_ = traces_[0]->known ? 0 : kNone;
  if (expected_.empty()) {
    ahead_pass_ = serial_ + 1;
    ahead_access_ = 0;
  }
  topping_up_ = true;
}

// --- what is expected ------------------------------------------------------------------------------------------------

void RankTrainer::drop_expected() {
  scheduler_.cancel_expected();
  sync_expected();
  for (Index u = 0; u < plan_->units.size() && queued_chunks_ != 0; ++u) forget_update_queued(u);
}

void RankTrainer::note_update_queued(const Operation& operation) {
  if (plan_->timing != Timing::eager || opening_.trace == kNone || !last_pass_of_step()) return;
  const PassTrace& trace = *traces_[opening_.trace];
  const bool gradient = operation.verb == Verb::open_gradients;
  if ((gradient ? trace.queues_update : trace.carries_update)[opening_.access] == 0) return;
  if (update_queued_[operation.unit] != 0) return;
  update_queued_[operation.unit] = 1;
  queued_chunks_ += plan_->units[operation.unit].chunk_count;
}

void RankTrainer::forget_update_queued(Index unit) {
  if (update_queued_[unit] == 0) return;
  update_queued_[unit] = 0;
  queued_chunks_ -= plan_->units[unit].chunk_count;
}

void RankTrainer::sync_expected() {
  if (scheduler_.cancellations() == cancellations_) return;
  cancellations_ = scheduler_.cancellations();
  expected_.clear();
  ahead_pass_ = in_pass_ ? serial_ : serial_ + 1;
  ahead_access_ = in_pass_ ? position_ : 0;
}

Index RankTrainer::append(const Operation& what, std::uint64_t offset, Index trace, std::size_t access, bool next_step,
                          bool last_pass, bool leased) {
  const bool eager = plan_->timing == Timing::eager && trace != kNone && last_pass;
  Index entry = kNone;
  if (what.verb == Verb::open_gradients) {
    entry = scheduler_.append_gradients(what.unit, offset, eager && traces_[trace]->queues_update[access] != 0, leased);
  } else {
    Form form = Form::fetch;
    if (eager && traces_[trace]->carries_update[access] != 0) form = Form::update_after;
    if (plan_->timing == Timing::just_in_time && trace != kNone && next_step && in_step_ &&
        traces_[trace]->first_parameters[access] != 0) {
      form = Form::update_expected;
    }
    entry = scheduler_.append_parameters(what.unit, offset, form, leased);
  }
  if (entry != kNone) entry_turns_[entry] = ++turn_;
  return entry;
}

// Appends what is expected, as far as what is counted and what is decided allow. False: the tables have no room yet.
bool RankTrainer::top_up() {
  sync_expected();
  while (expected_.size() < plan_->expected.size()) {
    Index trace = kNone;
    bool next_step = false, last_pass = false;
    if (in_pass_ && ahead_pass_ == serial_) {
      if (!following_) return true;
      trace = trace_;
      last_pass = last_pass_of_step();
      if (ahead_access_ == traces_[trace]->accesses.size()) {
        ahead_pass_ = serial_ + 1;
        ahead_access_ = 0;
        continue;
      }
    } else {
      trace = next_trace_;
      if (trace == kNone || ahead_access_ >= traces_[trace]->accesses.size()) return true;
      const bool training = in_pass_ && !evaluating_;
      if (in_step_) {
        if (in_pass_ && !training) return true;
        const Index covered = covered_ + (training ? 1 : 0);
        next_step = covered >= passes_;
        last_pass = !next_step && covered + 1 >= passes_;
        if (next_step && plan_->timing != Timing::just_in_time) return true;
        if (next_step && ahead_access_ >= traces_[trace]->forward_end) return true;
      } else {
        next_step = true;
      }
      if (next_step) last_pass = passes_ <= 1;
    }
    const Access& access = traces_[trace]->accesses[ahead_access_];
    const Operation what{access.gradient ? Verb::open_gradients : Verb::open_parameters, access.unit};
    const Index entry =
        append(what, traces_[trace]->offsets[ahead_access_], trace, ahead_access_, next_step, last_pass, false);
    if (entry == kNone) return scheduler_.room_for(access.unit);
    expected_.push_back({entry, ahead_pass_, ahead_access_});
    ++ahead_access_;
  }
  return true;
}

// --- opening ---------------------------------------------------------------------------------------------------------

bool RankTrainer::open(const Operation& operation) {
  const bool gradient = operation.verb == Verb::open_gradients;
  if (stage_ == 0) stage_ = gradient && opened_[operation.unit] == 0 ? 11 : 20;
  if (stage_ < 20) {
    if (force_updates(operation.unit)) stage_ = 20;
    return false;
  }
  Index entry = kNone;
  if (stage_ == 20) {
    if (!choose_opening(operation, entry)) return false;
    stage_ = 21;
  }
  if (entry == kNone) {
    entry = append(operation, opening_.offset, opening_.trace, opening_.access, false, last_pass_of_step(), true);
    if (entry == kNone) return false;
    sync_expected();
  }
  handles_[operation.handle] = {entry, operation.unit, gradient, entry_turns_[entry]};
  note_update_queued(operation);
  open_handles_.push_back(operation.handle);
  if (!gradient) opened_[operation.unit] = 1;
  topping_up_ = true;
  return true;
}

// The expected entry, or where to append one. False: there is no place.
bool RankTrainer::choose_opening(const Operation& operation, Index& entry) {
  const bool gradient = operation.verb == Verb::open_gradients;
  const Index unit = operation.unit;
  sync_expected();
  if (following_) {
    const auto& accesses = traces_[trace_]->accesses;
    std::size_t at = position_;
    while (at < accesses.size() && (accesses[at].unit != unit || accesses[at].gradient != gradient)) ++at;
    if (at == accesses.size()) {
      drop_expected();
      following_ = false;
      ++deviations_;
    } else if (at != position_) {
      position_ = at;
      drop_expected();
      ++deviations_;
    }
  }
  bool on_demand = !following_;
  opening_ = {0, following_ ? trace_ : kNone, position_};
  if (following_) {
    ++position_;
    opening_.offset = traces_[trace_]->offsets[opening_.access];
    if (!gradient && plan_->timing == Timing::eager && last_pass_of_step() &&
        traces_[trace_]->carries_update[opening_.access] != 0 &&
        queued_chunks_ + plan_->units[unit].chunk_count > plan_->limits.update_slots) {
      drop_expected();
    }
    const bool expected =
        !expected_.empty() && expected_.front().pass == serial_ && expected_.front().access == opening_.access;
    const Index front = expected ? expected_.front().entry : kNone;
    if (!expected && !expected_.empty()) drop_expected();
    const std::uint64_t bytes = scheduler_.opening_bytes(unit, gradient);
    const Index held = scheduler_.overlapping(opening_.offset, bytes, front, true);
    std::uint64_t copy = 0;
    const bool shared =
        held != kNone && !gradient && scheduler_.entry_unit(held) == unit &&
        (expected ? scheduler_.range_assured(front) : scheduler_.copy_offset(unit, &copy) && copy == opening_.offset);
    if (held != kNone && !shared) {
      drop_expected();
      on_demand = true;
    } else if (expected) {
      expected_.erase(expected_.begin());
      scheduler_.lease(front);
      entry = front;
      return true;
    } else {
      ahead_pass_ = serial_;
      ahead_access_ = position_;
    }
  }
  return !on_demand || find_place(operation, opening_.offset);
}

bool RankTrainer::find_place(const Operation& operation, std::uint64_t& offset) {
  const bool gradient = operation.verb == Verb::open_gradients;
  const std::uint64_t bytes = scheduler_.opening_bytes(operation.unit, gradient);
  offset = 0;
  if (bytes == 0 || (!gradient && scheduler_.copy_offset(operation.unit, &offset))) return true;
  std::uint64_t at = gradient ? plan_->slab_bytes - std::min(plan_->slab_bytes, bytes) : 0;
  while (at + bytes <= plan_->slab_bytes) {
    const Index other = scheduler_.overlapping(at, bytes, kNone, true);
    if (other == kNone) {
      offset = at;
      return true;
    }
    const std::uint64_t begin = scheduler_.device_offset(other);
    if (gradient && begin < bytes) break;
    at = gradient ? begin - bytes : begin + scheduler_.entry_bytes(other);
  }
  world_.fail("no place on the device for unit " + std::to_string(operation.unit));
  return false;
}

}  // namespace ballast::simulate
