// What happens around one rank's trainer: its device's work, tasks that start and end, agreements; and its state as
// words and text. SPDX-License-Identifier: Apache-2.0
#include <ballast/base/check.h>
#include <ballast/simulate/rank_trainer.h>

#include <algorithm>
#include <array>
#include <memory>
#include <span>

namespace ballast::simulate {

using schedule::Action;
using schedule::Task;

namespace {

bool ends_lease(Verb verb) { return verb == Verb::commit || verb == Verb::give_up || verb == Verb::release; }

}  // namespace

void RankTrainer::events(const Exchange& exchange, std::vector<Event>& out) const {
  out.clear();
  for (std::size_t i = 0; i < world_.in_flight().size(); ++i) {
    const Action& action = task(i);
    if (action.chunk != kNone || exchange.may_finish(rank_, action.task)) out.push_back({EventKind::task, i});
  }
  if (computing_) out.push_back({EventKind::compute, 0});
  if (agreeing_ && !agreed_ && exchange.may_pass(rank_)) out.push_back({EventKind::agreement, 0});
  if (options_.free_trainer && !closed_) out.push_back({EventKind::host, 0});
  if (options_.free_trainer && device_at_ < host_at_ && ends_lease(plan_->program[device_at_].verb))
    out.push_back({EventKind::device, 0});
  if (options_.free_starts) out.push_back({EventKind::start, 0});
}

bool RankTrainer::waits_for_others(const Exchange& exchange) const {
  for (const ModelWorld::Flight& flight : world_.in_flight()) {
    if (flight.action.chunk == kNone && !exchange.may_finish(rank_, flight.action.task)) return true;
  }
  return agreeing_ && !agreed_ && !exchange.may_pass(rank_);
}

bool RankTrainer::happen(const Event& event, Exchange& exchange) {
  progress_ = false;
  switch (event.kind) {
    case EventKind::task: {
      const Action action = task(event.index);
      if (action.chunk == kNone) {
        std::vector<const std::vector<Content>*> brought;
        exchange.collect(rank_, action.task, brought);
        world_.finish_collective(event.index, brought);
        exchange.finish(rank_, action.task);
      } else {
        world_.finish(event.index);
      }
      scheduler_.finished(action);
      progress_ = true;
      break;
    }
    case EventKind::compute:
      world_.finish_compute(computing_unit_, compute_parameters_, compute_gradients_, compute_reads_, compute_writes_);
      computing_ = false;
      ++device_at_;
      progress_ = true;
      break;
    case EventKind::agreement:
      exchange.pass(rank_);
      agreed_ = true;
      progress_ = true;
      break;
    case EventKind::host:
      progress_ = host_step(exchange);
      break;
    case EventKind::device:
      progress_ = device_step();
      break;
    case EventKind::start:
      progress_ = start(exchange);
      break;
  }
  if (progress_) advance(exchange);
  return progress_;
}

// Everything that is not an event of its own.
void RankTrainer::advance(Exchange& exchange) {
  for (bool again = true; again && error().empty();) {
    again = device_gates();
    if (!options_.free_trainer) {
      again |= host_step(exchange);
      again |= device_step();
    }
    if (!options_.free_starts) again |= start(exchange);
  }
  if (check_always_ && error().empty()) {
    std::string broken = scheduler_.check();
    if (!broken.empty()) world_.fail(std::move(broken));
  }
}

bool RankTrainer::commits_pending() const {
  for (std::size_t i = device_at_; i < host_at_; ++i) {
    if (plan_->program[i].verb == Verb::commit) return true;
  }
  return false;
}

// Openings hold the device up until they are ready; maths begin.
bool RankTrainer::device_gates() {
  bool any = false;
  while (device_at_ < host_at_ && !computing_ && error().empty()) {
    const Operation& operation = plan_->program[device_at_];
    if (ends_lease(operation.verb)) return any;
    if (operation.verb == Verb::open_parameters || operation.verb == Verb::open_gradients) {
      const Handle& handle = handles_[operation.handle];
      if (!scheduler_.ready(handle.entry) || (handle.gradient && scheduler_.unit_update_due(handle.unit))) return any;
      device_open_.push_back(operation.handle);
    } else if (operation.verb == Verb::compute) {
      compute_reads_ = compute_writes_ = false;
      for (const Index h : device_open_) {
        if (handles_[h].unit != operation.unit) continue;
        (handles_[h].gradient ? compute_writes_ : compute_reads_) = true;
        (handles_[h].gradient ? compute_gradients_ : compute_parameters_) = scheduler_.device_offset(handles_[h].entry);
      }
      computing_ = true;
      computing_unit_ = operation.unit;
      world_.start_compute(computing_unit_, compute_parameters_, compute_gradients_, compute_reads_, compute_writes_);
      return true;
    }
    ++device_at_;
    any = true;
  }
  return any;
}

// The next end of a lease.
bool RankTrainer::device_step() {
  if (device_at_ >= host_at_ || computing_ || !error().empty()) return false;
  const Operation& operation = plan_->program[device_at_];
  if (!ends_lease(operation.verb)) return false;
  const Index entry = handles_[operation.handle].entry;
  if (operation.verb == Verb::commit) {
    const schedule::Unit& u = plan_->units[operation.unit];
    const auto contributes = std::make_unique<bool[]>(u.chunk_count);
    const auto* given = operation.contribution == kNone ? nullptr : &plan_->contributions[operation.contribution];
    for (Index i = 0; i < u.chunk_count; ++i)
      contributes[i] = plan_->chunks[u.first_chunk + i].trainable && (given == nullptr || (*given)[i] != 0);
    const std::span<const bool> all(contributes.get(), u.chunk_count);
    const bool eager = plan_->timing == Timing::eager;
    world_.commit(operation.unit, scheduler_.device_offset(entry), all, operation.flag, eager && operation.flag);
    scheduler_.commit_gradients(entry, all, operation.flag, eager && operation.flag);
  } else {
    scheduler_.release(entry);
  }
  std::erase(device_open_, operation.handle);
  std::erase(open_handles_, operation.handle);
  ++device_at_;
  return true;
}

bool RankTrainer::start(Exchange& exchange) {
  std::array<Action, 16> actions;
  const std::size_t count = scheduler_.next(actions);
  for (std::size_t i = 0; i < count; ++i) {
    const Action& action = actions[i];
    if (action.task == Task::gather) check_readers(action);
    if (action.chunk != kNone) {
      world_.start(action);
      continue;
    }
    std::string differs = exchange.start(rank_, action, world_.start_collective(action));
    if (!differs.empty()) world_.fail(std::move(differs));
  }
  tasks_started_ += count;
  return count != 0;
}

// Nothing may be gathered over what an earlier opening still reads.
void RankTrainer::check_readers(const Action& gather) {
  const std::uint64_t bytes = plan_->units[gather.unit].parameter_bytes;
  for (const Index h : open_handles_) {
    const Handle& handle = handles_[h];
    if (handle.turn >= entry_turns_[gather.entry]) continue;
    const std::uint64_t begin = scheduler_.device_offset(handle.entry);
    const std::uint64_t length = scheduler_.entry_bytes(handle.entry);
    const bool same_bytes = bytes == 0 ? handle.unit == gather.unit && !handle.gradient
                                       : begin < gather.device_offset + bytes && gather.device_offset < begin + length;
    if (!same_bytes) continue;
    world_.fail("unit " + std::to_string(gather.unit) + " is gathered over what an earlier opening of unit " +
                std::to_string(handle.unit) + " reads");
  }
}

void RankTrainer::serialize(std::vector<std::uint32_t>& out) const {
  scheduler_.serialize(out);
  std::vector<std::pair<schedule::SlotKind, Index>> slots;
  std::vector<Index> jobs;
  scheduler_.in_use(slots, jobs);
  world_.serialize(out, slots, jobs);
  const auto flag = [](bool value, int bit) { return static_cast<std::uint32_t>(value) << bit; };
  out.push_back(static_cast<std::uint32_t>(host_at_ | device_at_ << 16));
  out.push_back(stage_ | unit_at_ << 8 | (trace_ & 0xFu) << 16 | (next_trace_ & 0xFu) << 20 |
                flag(scheduler_.cancellations() != cancellations_, 24));
  out.push_back(static_cast<std::uint32_t>(opening_.offset) | static_cast<std::uint32_t>(opening_.access) << 16 |
                flag(opening_.trace != kNone, 31));
  out.push_back(static_cast<std::uint32_t>(position_) | static_cast<std::uint32_t>(ahead_access_) << 8 |
                ((ahead_pass_ - serial_) & 0xFFu) << 16 | passes_ << 24 | covered_ << 28);
  out.push_back(flag(in_step_, 0) | flag(in_pass_, 1) | flag(evaluating_, 2) | flag(following_, 3) |
                flag(topping_up_, 4) | flag(closed_, 5) | flag(agreeing_, 6) | flag(agreed_, 7) | flag(computing_, 8));
  for (const Expected& e : expected_) {
    out.push_back(((e.pass - serial_) & 0xFFFFu) | static_cast<std::uint32_t>(e.access) << 16);
  }
  out.push_back(0xFFFFFFFFu);
  std::uint32_t opened = 0;
  for (std::size_t u = 0; u < opened_.size(); ++u) opened |= static_cast<std::uint32_t>(opened_[u] != 0) << (u % 32);
  out.push_back(opened);
  std::uint32_t queued = 0;
  for (std::size_t u = 0; u < opened_.size(); ++u)
    queued |= static_cast<std::uint32_t>(update_queued_[u] != 0) << (u % 32);
  out.push_back(queued);
}

std::string RankTrainer::name(const Event& event) const {
  static const char* const kTasks[] = {"read",   "write",      "copy in", "copy out",
                                       "update", "accumulate", "gather",  "reduction"};
  switch (event.kind) {
    case EventKind::task: {
      const Action& action = task(event.index);
      return std::string(kTasks[static_cast<int>(action.task)]) +
             (action.chunk == kNone ? " of unit " + std::to_string(action.unit)
                                    : " of chunk " + std::to_string(action.chunk)) +
             " ends";
    }
    case EventKind::compute:
      return "maths of unit " + std::to_string(computing_unit_) + " end";
    case EventKind::agreement:
      return "agreement";
    case EventKind::host:
      return topping_up_ ? "the host appends what is expected" : "host call " + std::to_string(host_at_);
    case EventKind::device:
      return "end of a lease, call " + std::to_string(device_at_);
    case EventKind::start:
      break;
  }
  return "tasks start";
}

std::string RankTrainer::describe() const {
  static const char* const kVerbs[] = {"begin step",     "begin pass", "end pass", "open parameters",
                                       "open gradients", "compute",    "commit",   "give up",
                                       "release",        "decide",     "settle",   "take back"};
  std::string text = "rank " + std::to_string(rank_) + ": call " + std::to_string(device_at_) + " of " +
                     std::to_string(plan_->program.size()) + " on the device, " + std::to_string(host_at_) +
                     " on the host";
  for (const std::size_t at : {device_at_, host_at_}) {
    if (at >= plan_->program.size()) continue;
    const Operation& operation = plan_->program[at];
    text += std::string("; ") + kVerbs[static_cast<int>(operation.verb)];
    if (operation.unit != kNone) text += " of unit " + std::to_string(operation.unit);
  }
  return text + "; stage " + std::to_string(stage_) + ", expected " + std::to_string(expected_.size()) +
         (topping_up_ ? ", appending" : "") + (agreeing_ ? ", agreeing\n" : "\n") + scheduler_.describe();
}

}  // namespace ballast::simulate
