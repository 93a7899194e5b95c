// Depth first, with copies of the whole model to go back to. States are told apart by a 64-bit hash of their words:
// among a few million states two different ones share a hash with a chance below 10^-6.
// SPDX-License-Identifier: Apache-2.0
#include <ballast/base/random.h>
#include <ballast/simulate/explorer.h>

#include <algorithm>
#include <memory>
#include <unordered_set>
#include <vector>

namespace ballast::simulate {

namespace {

std::uint64_t hash(const std::vector<std::uint32_t>& words) {
  std::uint64_t value = words.size();
  for (const std::uint32_t word : words) value = base::mix(value ^ word) + 0x2545F4914F6CDD1Du * value;
  return value;
}

std::string event_name(const ModelTrainer& model, std::size_t event) {
  static const char* const kTasks[] = {"read", "write", "copy in", "copy out", "update", "accumulate"};
  schedule::Action action;
  if (event >= model.events()) return "what is expected is taken back";
  if (!model.task_of(event, action)) return "compute unit " + std::to_string(model.computing_unit());
  return std::string(kTasks[static_cast<int>(action.task)]) + " chunk " + std::to_string(action.chunk);
}

}  // namespace

Exploration explore(const Plan& plan, const ExplorerOptions& options) {
  Exploration result;
  std::unordered_set<std::uint64_t> seen;
  std::vector<std::uint32_t> words;
  struct Level {
    std::unique_ptr<ModelTrainer> model;
    std::size_t event = 0;  // next one to complete
  };
  std::vector<Level> stack;
  stack.push_back({std::make_unique<ModelTrainer>(plan), 0});
  std::vector<std::unique_ptr<ModelTrainer>> spare;
  const auto fail = [&](const std::string& what, const ModelTrainer& model) {
    result.failure = what + "\n" + model.describe() + "order of completions:";
    for (std::size_t i = 0; i + 1 < stack.size(); ++i) {
      result.failure += "\n  " + event_name(*stack[i].model, stack[i].event - 1);
    }
  };
  while (!stack.empty()) {
    Level& level = stack.back();
    if (level.event == 0) {
      ModelTrainer& model = *level.model;
      result.reliefs = std::max(result.reliefs, model.reliefs());
      if (model.done()) {
        ++result.ends;
        model.finish();
      }
      if (!model.error().empty()) return fail(model.error(), model), result;
      if (model.stalled() || (model.reliefs() != 0 && !options.allow_relief)) return fail("stall", model), result;
      words.clear();
      model.serialize(words);
      if (!seen.insert(hash(words)).second) {
        spare.push_back(std::move(level.model));
        stack.pop_back();
        continue;
      }
      ++result.states;
      if (result.states >= options.states_max) return result;
    }
    const bool may_disturb = level.model->disturbances() < options.disturbances && !level.model->done();
    if (level.event >= level.model->events() + (may_disturb ? 1 : 0)) {
      spare.push_back(std::move(level.model));
      stack.pop_back();
      continue;
    }
    ++result.transitions;
    const std::size_t event = level.event++;
    std::unique_ptr<ModelTrainer> next;
    if (spare.empty()) {
      next = std::make_unique<ModelTrainer>(*level.model);
    } else {
      next = std::move(spare.back());
      spare.pop_back();
      *next = *level.model;
    }
    if (event < next->events()) {
      next->complete(event);
    } else {
      next->disturb();
    }
    stack.push_back({std::move(next), 0});
  }
  result.complete = true;
  return result;
}

}  // namespace ballast::simulate
