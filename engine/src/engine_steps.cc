// Steps and passes: what is declared, what is expected next, when updates are decided.
// SPDX-License-Identifier: Apache-2.0
#include <ballast/base/check.h>
#include <ballast/base/random.h>

#include <algorithm>
#include <bit>
#include <cmath>

#include "engine_implementation.h"

namespace ballast {

using engine::Trace;
using engine::UnitLayout;

// --- steps -----------------------------------------------------------------------------------------------------------

Step EngineImplementation::begin_step(StepOptions options) {
  require_initialized();
  if (step_.active) throw UsageError("the step before has neither been updated nor discarded");
  if (pass_.active) throw UsageError("a pass is still open");
  if (options.micro_batches < 1)
    throw UsageError("micro_batches is " + std::to_string(options.micro_batches) + "; at least 1");
  const auto check_rate = [](double value, const char* what) {
    if (!std::isfinite(static_cast<float>(value)) || value < 0)
      throw UsageError(std::string(what) + " is " + std::to_string(value) + "; finite and not negative");
  };
  if (options.learning_rate) check_rate(*options.learning_rate, "learning_rate");
  for (const GroupRate& rate : options.group_rates) {
    check_rate(rate.learning_rate, "learning_rate");
    if (rate.weight_decay) check_rate(*rate.weight_decay, "weight_decay");
    if (!has_group(rate.group)) {
      throw UsageError("group_rates name group " + std::to_string(rate.group) + ", which no parameter is in");
    }
  }
  if (plan_.timing == Timing::eager && options.micro_batches > 1 && expected_micro_batches_ == 1) {
    for (std::size_t u = 0; u < units_.size(); ++u) {
      if (units_[u].trainable && !plan_.stored_gradients[u]) {
        throw UsageError(
            "with optimizer.timing eager, memory for sums over micro-batches is planned at commit: declare " +
            std::to_string(options.micro_batches) + " micro-batches with Engine::expect_order before it");
      }
    }
  }
  Lock lock(executor_->mutex());
  executor_->check(lock);
  if (options.micro_batches != expected_step_micro_batches_) {
    // What has been appended ahead took the last pass of the step for another one.
    drop_expected();
    expected_step_micro_batches_ = options.micro_batches;
  }
  step_ = RunningStep{};
  step_.active = true;
  step_.options = std::move(options);
  for (UnitState& unit : units_) {
    unit.updated_eagerly = false;
    std::fill(unit.present.begin(), unit.present.end(), 0);
    std::fill(unit.requested.begin(), unit.requested.end(), 0);
  }
  std::fill(chunk_contributed_.begin(), chunk_contributed_.end(), 0);
  updates_begun_ = false;
  const auto bits = [](double value) { return std::bit_cast<std::uint64_t>(value); };
  note_asked(Asked::begin_step, static_cast<std::uint64_t>(step_.options.micro_batches));
  if (several_ranks()) {
    std::uint64_t rates = step_.options.learning_rate ? base::mix(bits(*step_.options.learning_rate) + 1) : 0;
    for (const GroupRate& rate : step_.options.group_rates) {
      rates = base::mix(rates + static_cast<std::uint64_t>(rate.group));
      rates = base::mix(rates + bits(rate.learning_rate));
      if (rate.weight_decay) rates = base::mix(rates + bits(*rate.weight_decay) + 1);
    }
    asked_fingerprint_ = base::mix(asked_fingerprint_ + rates);
  }
  top_up(lock);
  executor_->wake();
  Step step;
  step.engine_ = this;
  return step;
}

bool EngineImplementation::has_group(int group) const {
  for (const engine::UnitLayout& unit : plan_.layout.units) {
    for (const engine::ParameterLayout& parameter : unit.parameters) {
      if (parameter.group == group) return true;
    }
  }
  return false;
}

double EngineImplementation::learning_rate(int group) const {
  for (const GroupRate& rate : step_.options.group_rates) {
    if (rate.group == group) return rate.learning_rate;
  }
  return step_.options.learning_rate ? *step_.options.learning_rate : config_.learning_rate(steps_updated_);
}

double EngineImplementation::weight_decay(int group) const {
  for (const GroupRate& rate : step_.options.group_rates) {
    if (rate.group == group && rate.weight_decay) return *rate.weight_decay;
  }
  return config_.optimizer.weight_decay;
}

// In the running step; what a unit without any still waits for is of an earlier one.
bool EngineImplementation::contributed_to(std::uint32_t unit) const {
  const UnitState& state = units_[unit];
  const auto begin = chunk_contributed_.begin() + plan_.layout.units[unit].first_chunk;
  const auto is_set = [](std::uint8_t each) { return each != 0; };
  return std::any_of(state.present.begin(), state.present.end(), is_set) ||
         std::any_of(begin, begin + plan_.layout.units[unit].chunk_count, is_set);
}

// The scalars of the unit's next update. Counts follow updates, not attempts.
void EngineImplementation::prepare_update(std::uint32_t unit, double gradient_scale) {
  engine::UnitUpdate& update = executor_->updates()[unit];
  const UnitLayout& layout = plan_.layout.units[unit];
  UnitState& state = units_[unit];
  for (std::size_t p = 0; p < layout.parameters.size(); ++p) {
    update.present[p] = state.present[p];
    if (!state.present[p]) continue;
    const int group = layout.parameters[p].group;
    const kernels::AdamHyperparameters hyperparameters{learning_rate(group),    config_.optimizer.beta1,
                                                       config_.optimizer.beta2, config_.optimizer.epsilon,
                                                       weight_decay(group),     config_.optimizer.type == "adamw"};
    update.scalars[p] = kernels::adam_scalars(hyperparameters, ++state.step_counts[p], gradient_scale);
  }
}

void EngineImplementation::update(std::span<const std::byte> user_bytes) {
  if (!step_.active) throw UsageError("no step is running");
  if (!step_.finished_backward) throw UsageError("Step::update before Step::finish_backward");
  if (!step_.norm.finite) {
    const std::string& name = step_.norm.non_finite_parameter;
    throw UsageError("gradients are not finite (first in " + (name.empty() ? "another engine" : name) +
                     "); discard this step");
  }
  Lock lock(executor_->mutex());
  executor_->check(lock);
  note_asked(Asked::update);
  finish_commit(lock);
  schedule::Scheduler& scheduler = executor_->scheduler();
  if (plan_.timing != Timing::eager) {
    executor_->resident_chunks().begin_step();
    for (std::uint32_t u = 0; u < units_.size(); ++u) {
      // Also where no gradient has come at all: with several ranks its update runs all the same, and changes nothing.
      if (contributed_to(u)) prepare_update(u, step_.norm.clip_factor / gradient_divisor(rank_divisor(u)));
    }
  }
  scheduler.decide(true);
  step_.decided = true;
  step_.active = false;
  ++steps_updated_;
  executor_->note_steps(steps_updated_);
  loss_scaler_.good_step();
  for (UnitState& unit : units_) {
    unit.opened = false;
    unit.decided = std::any_of(unit.present.begin(), unit.present.end(), [](std::uint8_t p) { return p != 0; });
  }
  last_user_bytes_.assign(user_bytes.begin(), user_bytes.end());
  if (commits_step(steps_updated_)) request_commit(last_user_bytes_);
  if (plan_.timing == Timing::eager && several_ranks()) {
    for (std::uint32_t u = 0; u < units_.size(); ++u) {
      executor_->wait(lock, [&] { return scheduler.append_updates(u); });
    }
  }
  if (plan_.timing == Timing::after_backward) {
    drop_expected();
    for (std::uint32_t u = 0; u < units_.size(); ++u) {
      executor_->wait(lock, [&] { return scheduler.append_updates(u); });
    }
    executor_->wait(lock, [&] { return scheduler.idle(); });
  }
  top_up(lock);
  executor_->wake();
  lock.unlock();
  watch_save();
}

void EngineImplementation::discard() {
  if (!step_.active) throw UsageError("no step is running");
  if (pass_.active) throw UsageError("Step::discard while a pass is open; end it first");
  if (plan_.timing == Timing::eager) {
    throw UsageError(
        "with optimizer.timing eager the step has been applied as its gradients came and cannot be discarded; "
        "use just_in_time or after_backward");
  }
  const bool overflow = step_.finished_backward && !step_.norm.finite;
  abandon_step();
  if (overflow) loss_scaler_.overflow();
}

// Also from destructors: a step that was neither updated nor discarded, perhaps because of an exception.
void EngineImplementation::abandon_step() noexcept {
  if (forked()) return;
  if (!step_.active) return;
  try {
    note_asked(Asked::discard);
    step_.active = false;
    pass_.active = false;
    for (const auto& stream : streams_) {
      try {
        stream->synchronize();
      } catch (...) {
        // The trainer's own failure; it has been or will be seen where it waits.
      }
    }
    Lock lock(executor_->mutex());
    schedule::Scheduler& scheduler = executor_->scheduler();
    executor_->wait(lock, [&] { return commits_pending_ == 0 && !scheduler.gradients_outstanding(); });
    for (UnitState& unit : units_) {
      unit.partial_open = false;
      if (!unit.updated_eagerly) continue;
      throw UsageError(
          "a step with optimizer.timing eager was left after some of its updates had been made; it is half "
          "applied, and only a committed state can go on");
    }
    ++steps_discarded_;
    for (UnitState& unit : units_) unit.opened = false;
    scheduler.decide(false);
    drop_expected();
    top_up(lock);
    executor_->wake();
  } catch (...) {
    executor_->fail(std::current_exception());
  }
}

// --- passes ----------------------------------------------------------------------------------------------------------

PassScope EngineImplementation::begin_pass(PassOptions options, bool within_step) {
  require_initialized();
  if (pass_.active) throw UsageError("a pass is still open; end it before the next");
  if (options.kind == Pass::train && !within_step)
    throw UsageError("a training pass belongs to a step: Step::begin_pass");
  if (within_step && !step_.active) throw UsageError("this step is over");
  if (!within_step && step_.active) throw UsageError("a step is running: Step::begin_pass");
  if (options.micro_batches < 1)
    throw UsageError("micro_batches is " + std::to_string(options.micro_batches) + "; at least 1");
  if (options.kind == Pass::train && step_.finished_backward)
    throw UsageError("a training pass after Step::finish_backward");
  if (options.kind == Pass::train && options.micro_batches > step_.options.micro_batches - step_.covered) {
    throw UsageError("the step declared " + std::to_string(step_.options.micro_batches) +
                     " micro-batches; its passes would cover " +
                     std::to_string(std::int64_t{step_.covered} + options.micro_batches));
  }
  Lock lock(executor_->mutex());
  executor_->check(lock);
  const auto found = traces_.find({options.kind, options.key});
  Trace* const trace = found == traces_.end() || found->second.offsets.empty() ? nullptr : &found->second;
  if (trace != next_trace_) drop_expected();
  trace_ = trace;
  following_ = trace != nullptr;
  pass_.active = true;
  pass_.within_step = within_step;
  pass_.options = options;
  ++pass_.serial;
  note_asked(options.kind == Pass::train ? Asked::begin_pass : Asked::begin_evaluation,
             options.key << 12 | static_cast<std::uint64_t>(std::min(options.micro_batches, 4095)));
  position_ = 0;
  if (expected_.empty()) {
    ahead_pass_ = pass_.serial;
    ahead_index_ = 0;
  }
  if (options.kind == Pass::train) {
    next_trace_ = trace;
    last_train_ = {options.kind, options.key};
  } else {
    const auto train = traces_.find(last_train_);
    next_trace_ = train == traces_.end() || train->second.offsets.empty() ? nullptr : &train->second;
  }
  recorder_.begin();
  top_up(lock);
  executor_->wake();
  PassScope scope;
  scope.engine_ = this;
  scope.serial_ = pass_.serial;
  return scope;
}

void EngineImplementation::end_pass(std::uint64_t serial) {
  if (forked() || serial != pass_.serial) return;
  if (!pass_.active) return;
  Lock lock(executor_->mutex());
  const std::vector<engine::TraceOpening>& seen = recorder_.end();
  pass_.active = false;
  if (pass_.options.kind == Pass::train) step_.covered += pass_.options.micro_batches;
  const bool kept = trace_ != nullptr && following_ && position_ == trace_->openings.size();
  Trace& trace = traces_[{pass_.options.kind, pass_.options.key}];
  if (!engine::same_openings(seen, trace.openings)) {
    drop_expected();
    if (!trace.openings.empty()) ++repairs_;
    const std::vector<std::uint64_t> before = trace.offsets;
    trace.openings = seen;
    trace.offsets.clear();
    if (!engine::compile_trace(plan_, element_bytes(config_.precision.gradients), trace)) trace.offsets.clear();
    if (trace.offsets != before) ++layout_generation_;
  } else if (!kept) {
    drop_expected();
  }
  following_ = false;
  for (std::uint32_t u = 0; u < units_.size() && queued_chunks_ != 0; ++u) forget_update_queued(u);
  const auto next = traces_.find(last_train_);
  next_trace_ = next == traces_.end() || next->second.offsets.empty() ? nullptr : &next->second;
  if (expected_.empty()) {
    ahead_pass_ = pass_.serial + 1;
    ahead_index_ = 0;
  }
  top_up(lock);
  executor_->wake();
}

bool EngineImplementation::last_pass_of_step() const {
  return step_.active && pass_.options.kind == Pass::train &&
         step_.covered + pass_.options.micro_batches == step_.options.micro_batches;
}

// --- what is expected ------------------------------------------------------------------------------------------------

void EngineImplementation::drop_expected() {
  executor_->scheduler().cancel_expected();
  sync_expected();
  for (std::uint32_t u = 0; u < units_.size() && queued_chunks_ != 0; ++u) forget_update_queued(u);
}

// Eager: an opening whose update waits for its gradient holds slots until the trainer commits that.
void EngineImplementation::note_update_queued(std::uint32_t unit, bool gradient, const Trace* trace,
                                              std::size_t index) {
  if (plan_.timing != Timing::eager || trace == nullptr || !last_pass_of_step()) return;
  if ((gradient ? trace->queues_update : trace->carries_update)[index] == 0 || units_[unit].update_queued) return;
  units_[unit].update_queued = true;
  queued_chunks_ += plan_.layout.units[unit].chunk_count;
}

void EngineImplementation::forget_update_queued(std::uint32_t unit) {
  if (!units_[unit].update_queued) return;
  units_[unit].update_queued = false;
  queued_chunks_ -= plan_.layout.units[unit].chunk_count;
}

// The scheduler ends expected entries by itself where they would bring stale parameters.
void EngineImplementation::sync_expected() {
  if (executor_->scheduler().cancellations() == cancellations_seen_) return;
  cancellations_seen_ = executor_->scheduler().cancellations();
  expected_.clear();
  ahead_pass_ = pass_.active ? pass_.serial : pass_.serial + 1;
  ahead_index_ = pass_.active ? position_ : 0;
}

schedule::Index EngineImplementation::append(std::uint32_t unit, bool gradient, std::uint64_t offset,
                                             const Trace* trace, std::size_t index, bool next_step, bool last_pass,
                                             bool leased) {
  schedule::Scheduler& scheduler = executor_->scheduler();
  const bool eager = plan_.timing == Timing::eager && trace != nullptr && last_pass;
  if (gradient) return scheduler.append_gradients(unit, offset, eager && trace->queues_update[index], leased);
  schedule::Form form = schedule::Form::fetch;
  if (eager && trace->carries_update[index]) form = schedule::Form::update_after;
  if (plan_.timing == Timing::just_in_time && trace != nullptr && next_step && step_.active && !step_.decided &&
      trace->first_parameters[index]) {
    form = schedule::Form::update_expected;
  }
  return scheduler.append_parameters(unit, offset, form, leased);
}

// Appends entries for what the trainer is expected to open, as far ahead as memory, tables and what is decided allow.
void EngineImplementation::top_up(Lock& lock) {
  sync_expected();
  while (expected_.size() < most_expected_) {
    const Trace* trace = nullptr;
    bool next_step = false;
    bool last_pass = false;
    if (pass_.active && ahead_pass_ == pass_.serial) {
      if (!following_) return;
      trace = trace_;
      last_pass = last_pass_of_step();
      if (ahead_index_ == trace->openings.size()) {
        ahead_pass_ = pass_.serial + 1;
        ahead_index_ = 0;
        continue;
      }
    } else {
      trace = next_trace_;
      if (trace == nullptr || ahead_index_ >= trace->openings.size()) return;
      const bool training = pass_.active && pass_.options.kind == Pass::train;
      if (step_.active) {
        if (pass_.active && !training) return;  // an evaluation within a step: what follows is not known
        const int covered = step_.covered + (training ? pass_.options.micro_batches : 0);
        next_step = covered >= step_.options.micro_batches;
        last_pass = !next_step && next_micro_batches() >= step_.options.micro_batches - covered;
        // With several ranks what is appended must not depend on when a gradient has come.
        if (next_step && plan_.timing == Timing::eager && several_ranks()) return;
        if (next_step && (plan_.timing == Timing::after_backward || ahead_index_ >= trace->forward_end)) return;
      } else {
        next_step = true;
      }
      if (next_step) last_pass = next_micro_batches() >= expected_step_micro_batches_;
    }
    const engine::TraceOpening& opening = trace->openings[ahead_index_];
    const schedule::Index entry = append(opening.unit, opening.gradient, trace->offsets[ahead_index_], trace,
                                         ahead_index_, next_step, last_pass, false);
    if (entry == schedule::kNone) {
      if (!several_ranks() || executor_->scheduler().room_for(opening.unit)) return;
      executor_->wait(lock, [&] { return executor_->scheduler().room_for(opening.unit); });
      continue;
    }
    expected_.push_back({entry, ahead_pass_, ahead_index_});
    ++ahead_index_;
  }
}

void EngineImplementation::force_updates(Lock& lock, std::uint32_t unit) {
  schedule::Scheduler& scheduler = executor_->scheduler();
  drop_expected();
  executor_->wait(lock, [&] { return scheduler.append_updates(unit); });
  sync_expected();
  executor_->wait(lock, [&] { return !scheduler.unit_update_due(unit); });
}

void EngineImplementation::settle() {
  settle_updates();
  if (!step_.active && !pass_.active) finish_checkpoint();
}

void EngineImplementation::settle_updates() {
  require_initialized();
  Lock lock(executor_->mutex());
  executor_->wait(lock, [&] { return commits_pending_ == 0; });
  for (std::uint32_t u = 0; u < units_.size(); ++u) {
    if (executor_->scheduler().unit_update_due(u)) force_updates(lock, u);
  }
  drop_expected();
  executor_->wait(lock, [&] { return commits_pending_ == 0 && executor_->scheduler().idle(); });
  finish_commit(lock);
  top_up(lock);
  executor_->wake();
}

}  // namespace ballast
