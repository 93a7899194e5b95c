// How the model trainer looks ahead along the trace, and its state as words and text.
// SPDX-License-Identifier: Apache-2.0
#include <ballast/base/check.h>
#include <ballast/simulate/model_trainer.h>

#include <algorithm>

namespace ballast::simulate {

using schedule::Form;

Index ModelTrainer::append(const PassTrace& trace, Index access, Index pass, bool leased) {
  const Access& a = trace.accesses[access];
  const std::uint64_t offset = trace.offsets[access];
  const bool training = !evaluating_ || pass != 0;
  // Passes are counted from the beginning of the running step, or of the next one between steps.
  const Index place = pass_ == kNone ? pass - 1 : pass_ + pass;
  const bool undecided = training && place / passes_ != 0;
  const Index place_in_step = training ? place % passes_ : 0;
  if (a.gradient) {
    const bool eager_updates =
        training && plan_->timing == Timing::eager && place_in_step + 1 == passes_ && trace.queues_update[access] != 0;
    return scheduler_.append_gradients(a.unit, offset, eager_updates, leased);
  }
  Form form = Form::fetch;
  if (plan_->timing == Timing::just_in_time && undecided && place_in_step == 0 && trace.first_parameters[access] != 0) {
    form = Form::update_expected;
  } else if (training && plan_->timing == Timing::eager && place_in_step + 1 == passes_ &&
             trace.carries_update[access] != 0) {
    form = Form::update_after;
  }
  return scheduler_.append_parameters(a.unit, offset, form, leased);
}

// Appends what is expected, as far as the tables take it and at most one step ahead.
bool ModelTrainer::look_ahead() {
  note_cancellations();
  if (!plan_->look_ahead || deviated_ || settling_ || closed_ || update_unit_ != kNone) return false;
  bool any = false;
  while (true) {
    if (ahead_pass_ == 0 && (!in_pass_ || ahead_access_ >= running_trace().accesses.size())) {
      if (in_pass_ && !running_trace().known) return any;
      ahead_pass_ = 1;
      ahead_access_ = 0;
    }
    const PassTrace& trace = ahead_pass_ == 0 ? running_trace() : traces_[0];
    if (!trace.known) return any;
    if (ahead_access_ >= trace.accesses.size()) {
      ++ahead_pass_;
      ahead_access_ = 0;
    }
    const bool training = !evaluating_ || ahead_pass_ != 0;
    const Index place = pass_ == kNone ? ahead_pass_ - 1 : pass_ + ahead_pass_;
    if (training && place / passes_ != 0 && plan_->timing == Timing::after_backward) return any;
    if (ahead_pass_ > passes_ || (ahead_pass_ == passes_ && in_pass_ && ahead_access_ >= cursor_)) return any;
    const Index entry = append(trace, ahead_access_, ahead_pass_, false);
    if (entry == kNone) return any;
    expected_.push_back({entry, ahead_pass_, ahead_access_});
    ++ahead_access_;
    any = true;
  }
}

void ModelTrainer::drop_expected() {
  scheduler_.cancel_expected();
  note_cancellations();
  expected_.clear();
  ahead_pass_ = in_pass_ ? 0 : 1;
  ahead_access_ = in_pass_ ? cursor_ : 0;
}

void ModelTrainer::note_cancellations() {
  if (scheduler_.cancellations() == cancellations_) return;
  cancellations_ = scheduler_.cancellations();
  expected_.clear();
  ahead_pass_ = in_pass_ ? 0 : 1;
  ahead_access_ = in_pass_ ? cursor_ : 0;
}

void ModelTrainer::note_deviation() {
  if (!deviated_) ++deviations_;
  deviated_ = true;
  drop_expected();
}

void ModelTrainer::serialize(std::vector<std::uint32_t>& out) const {
  scheduler_.serialize(out);
  std::vector<std::pair<schedule::SlotKind, Index>> slots;
  std::vector<Index> jobs;
  scheduler_.in_use(slots, jobs);
  world_.serialize(out, slots, jobs);
  const auto flag = [](bool value, int bit) { return static_cast<std::uint32_t>(value) << bit; };
  out.push_back(static_cast<std::uint32_t>(host_at_ | device_at_ << 16));
  out.push_back(static_cast<std::uint32_t>(expected_.size()) | ahead_pass_ << 8 | ahead_access_ << 16);
  out.push_back(cursor_ | flag(in_pass_, 16) | flag(evaluating_, 17) | flag(deviated_, 18) | flag(in_step_, 19) |
                flag(computing_, 20) | flag(settling_, 21) | flag(closed_, 31) | (pass_ & 0xFu) << 22 |
                (passes_ & 0xFu) << 26);
  out.push_back((update_unit_ & 0xFFFFu) | disturbances_ << 16);
}

std::string ModelTrainer::describe() const {
  std::string text = plan_->text + "\noperation " + std::to_string(device_at_) + " of " +
                     std::to_string(plan_->program.size()) + " on the device, " + std::to_string(host_at_) +
                     " on the host";
  if (device_at_ < plan_->program.size()) {
    const Operation& operation = plan_->program[device_at_];
    static const char* const kVerbs[] = {"begin step",     "begin pass", "end pass", "open parameters",
                                         "open gradients", "compute",    "commit",   "give up",
                                         "release",        "decide",     "settle"};
    text += std::string("; waits to ") + kVerbs[static_cast<int>(operation.verb)];
    if (operation.unit != kNone) text += ", unit " + std::to_string(operation.unit);
  }
  text += "; expected " + std::to_string(expected_.size()) + (deviated_ ? "; off the trace\n" : "\n");
  return text + scheduler_.describe();
}

}  // namespace ballast::simulate
