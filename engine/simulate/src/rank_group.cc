// All ranks of a run; every order of their events, or one at random.
// SPDX-License-Identifier: Apache-2.0
#include <ballast/base/random.h>
#include <ballast/simulate/rank_group.h>

#include <algorithm>
#include <array>
#include <memory>
#include <unordered_set>

namespace ballast::simulate {

namespace {

using Event = RankTrainer::Event;

std::uint64_t hash(const std::vector<std::uint32_t>& words) {
  std::uint64_t value = words.size();
  for (const std::uint32_t word : words) value = base::mix(value ^ word) + 0x2545F4914F6CDD1Du * value;
  return value;
}

struct Step {
  Index rank = 0;
  Event event;
};

class RankExplorer {
 public:
  RankExplorer(const Plan& plan, const RankExplorerOptions& options) : plan_(plan), options_(options) {}

  RankExploration run() {
    visit(std::make_unique<RankGroup>(plan_, options_.ranks));
    while (depth_ != 0 && result_.failure.empty() && result_.states < options_.states_max) {
      Level& level = stack_[depth_ - 1];
      if (level.next == level.steps.size()) {
        spare_.push_back(std::move(level.group));
        --depth_;
        continue;
      }
      const std::size_t at = level.next++;
      ++result_.transitions;
      visit(std::move(level.children[at]));
    }
    result_.complete = depth_ == 0 && result_.failure.empty();
    result_.rank_states.assign(rank_states_.begin(), rank_states_.end());
    std::sort(result_.rank_states.begin(), result_.rank_states.end());
    return std::move(result_);
  }

 private:
  struct Level {
    std::unique_ptr<RankGroup> group;
    std::vector<Step> steps;
    std::vector<std::unique_ptr<RankGroup>> children;  // of each step, until it is visited
    std::size_t next = 0;
  };

  void fail(const std::string& what, const RankGroup& group) {
    result_.failure = plan_.text + "\n" + what + "\n" + group.describe() + "order of events:";
    for (std::size_t i = 0; i < depth_; ++i) {
      const Level& level = stack_[i];
      const Step& step = level.steps[level.next - 1];
      result_.failure += "\n  rank " + std::to_string(step.rank) + ": " + level.group->rank(step.rank).name(step.event);
    }
  }

  bool seen(const RankGroup& group) {
    words_.resize(group.ranks());
    for (Index r = 0; r < group.ranks(); ++r) {
      words_[r].clear();
      group.rank(r).serialize(words_[r]);
      if (options_.keep_rank_states) rank_states_.insert(hash(words_[r]));
      group.exchange().serialize(r, words_[r]);
    }
    // Of two ranks each sees the other alike.
    if (options_.reduced && group.ranks() == 2 && words_[1] < words_[0]) std::swap(words_[0], words_[1]);
    std::uint64_t value = 0;
    for (const auto& words : words_) value = base::mix(value) + hash(words);
    return !states_.insert(value).second;
  }

  // The steps of one rank and where they lead.
  void expand(const RankGroup& group, Index rank, Level& level) {
    group.rank(rank).events(group.exchange(), events_);
    for (const Event& event : events_) {
      std::unique_ptr<RankGroup> child;
      if (spare_.empty()) {
        child = std::make_unique<RankGroup>(group);
      } else {
        child = std::move(spare_.back());
        spare_.pop_back();
        *child = group;
      }
      if (child->rank(rank).happen(event, child->exchange())) {
        level.steps.push_back({rank, event});
        level.children.push_back(std::move(child));
      } else {
        spare_.push_back(std::move(child));
      }
    }
  }

  void visit(std::unique_ptr<RankGroup> group) {
    std::string error = group->error();
    if (error.empty() && group->done()) {
      ++result_.ends;
      result_.collectives =
          group->exchange().collectives(schedule::Task::gather) + group->exchange().collectives(schedule::Task::reduce);
      error = group->finish();
    }
    if (!error.empty()) return fail(error, *group);
    if (seen(*group)) return spare_.push_back(std::move(group));
    ++result_.states;
    if (depth_ == stack_.size()) stack_.emplace_back();
    Level& level = stack_[depth_];
    level.steps.clear();
    level.children.clear();
    level.next = 0;
    for (Index r = 0; r < group->ranks() && options_.reduced && level.steps.empty(); ++r) {
      if (!group->rank(r).waits_for_others(group->exchange())) expand(*group, r, level);
    }
    if (level.steps.empty()) {
      for (Index r = 0; r < group->ranks(); ++r) expand(*group, r, level);
    }
    if (level.steps.empty()) {
      if (!group->done()) fail("stall", *group);
      return;
    }
    level.group = std::move(group);
    ++depth_;
  }

  const Plan& plan_;
  const RankExplorerOptions& options_;
  RankExploration result_;
  std::unordered_set<std::uint64_t> states_, rank_states_;
  std::vector<Level> stack_;  // of which depth_ are in use
  std::size_t depth_ = 0;
  std::vector<std::unique_ptr<RankGroup>> spare_;
  std::vector<std::vector<std::uint32_t>> words_;
  std::vector<Event> events_;
};

}  // namespace

RankGroup::RankGroup(const Plan& plan, const RankOptions& options) : exchange_(plan.ranks, false, plan.unit_ranks) {
  trainers_.reserve(plan.ranks);
  for (Index r = 0; r < plan.ranks; ++r) trainers_.emplace_back(plan, r, options);
  for (RankTrainer& trainer : trainers_) trainer.begin(exchange_);
}

bool RankGroup::done() const {
  return std::all_of(trainers_.begin(), trainers_.end(), [](const RankTrainer& t) { return t.done(); });
}

std::string RankGroup::error() const {
  for (std::size_t r = 0; r < trainers_.size(); ++r) {
    if (!trainers_[r].error().empty()) return "rank " + std::to_string(r) + ": " + trainers_[r].error();
  }
  return {};
}

std::string RankGroup::finish() {
  for (RankTrainer& trainer : trainers_) trainer.finish();
  const std::string wrong = error();
  return wrong.empty() ? exchange_.unmatched() : wrong;
}

std::string RankGroup::describe() const {
  std::string text;
  for (const RankTrainer& trainer : trainers_) text += trainer.describe();
  return text;
}

void RankGroup::check_always(bool on) {
  for (RankTrainer& trainer : trainers_) trainer.check_always(on);
}

RankExploration explore_ranks(const Plan& plan, const RankExplorerOptions& options) {
  return RankExplorer(plan, options).run();
}

RankRun run_ranks(const Plan& plan, std::uint64_t seed) {
  base::Random random(base::mix(seed + 0x5EED));
  RankOptions options;
  options.free_trainer = random.below(4) != 0;
  options.free_starts = random.below(3) == 0;
  RankGroup group(plan, options);
  // How readily each kind of event of each rank happens, in eighths.
  std::vector<std::array<std::uint32_t, 6>> readiness(plan.ranks);
  for (auto& of_rank : readiness) {
    const bool slow = random.below(4) == 0;
    for (std::uint32_t& each : of_rank) {
      each = slow ? 1 : static_cast<std::uint32_t>(1 + random.below(8));
    }
  }
  RankRun result;
  std::vector<Step> steps;
  std::vector<Event> events;
  while (group.error().empty() && !group.done()) {
    steps.clear();
    for (Index r = 0; r < plan.ranks; ++r) {
      group.rank(r).events(group.exchange(), events);
      for (const Event& event : events) steps.push_back({r, event});
    }
    bool happened = false;
    while (!happened && !steps.empty()) {
      const std::size_t at = random.below(steps.size());
      const Step step = steps[at];
      const auto kind = static_cast<std::size_t>(step.event.kind);
      if (steps.size() > 1 && random.below(8) >= readiness[step.rank][kind]) continue;
      happened = group.rank(step.rank).happen(step.event, group.exchange());
      steps.erase(steps.begin() + static_cast<std::ptrdiff_t>(at));
    }
    if (!happened) break;
  }
  std::string error = group.error();
  if (error.empty()) error = group.done() ? group.finish() : "stall";
  if (!error.empty()) result.failure = plan.text + "\n" + error + "\n" + group.describe();
  for (Index r = 0; r < plan.ranks; ++r) {
    result.tasks += group.rank(r).tasks_started();
    result.deviations += group.rank(r).deviations();
  }
  result.collectives =
      group.exchange().collectives(schedule::Task::gather) + group.exchange().collectives(schedule::Task::reduce);
  return result;
}

}  // namespace ballast::simulate
