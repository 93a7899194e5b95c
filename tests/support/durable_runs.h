// Whole runs of the synthetic trainer for tests of durable steps and checkpoints.
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <string>
#include <vector>

#include "engine_support.h"

namespace ballast::testing {

inline Config durable_config(const std::string& directory, Tier tier, Timing timing) {
  Config config = plain_config(directory, tier, timing);
  config.durability.every_steps = 1;
  return config;
}

struct Outcome {
  std::vector<double> losses;
  std::vector<float> values, moments;
  std::vector<std::uint64_t> counts;
  std::uint64_t resumed_at = UINT64_MAX;
  std::string resumed_from;
};

struct Course {
  int steps = 4;
  CommitOptions options;
  std::string save_to;
  SyntheticOptions synthetic;
  EngineEnvironment environment;
};

inline Outcome run(const Config& config, const std::vector<SyntheticUnit>& model, const Course& course) {
  Engine engine(config, course.environment);
  SyntheticTrainer trainer(engine, model, course.synthetic);
  engine.commit(course.options);
  Outcome result;
  if (trainer.resume()) {
    result.resumed_at = static_cast<std::uint64_t>(trainer.next_step());
    result.resumed_from = engine.resumed()->path;
  } else {
    trainer.initialize();
  }
  while (trainer.next_step() < course.steps) result.losses.push_back(trainer.step());
  if (!course.save_to.empty()) engine.save_checkpoint(course.save_to);
  engine.settle();
  result.values = trainer.values();
  for (std::uint32_t u = 0; u < model.size(); ++u) {
    for (std::uint32_t p = 0; p < model[u].parameters.size(); ++p) {
      const ParameterId id{trainer.ids()[u].index, p};
      result.counts.push_back(engine.step_count(id));
      const ParameterSpec& parameter = model[u].parameters[p];
      if (!model[u].trainable) continue;
      std::size_t elements = 1;
      for (const std::int64_t d : parameter.shape) elements *= static_cast<std::size_t>(d);
      std::vector<float> exp_avg(elements), exp_avg_sq(elements);
      engine.read_moments(id, 0, exp_avg, exp_avg_sq);
      for (const std::vector<float>* each : {&exp_avg, &exp_avg_sq}) {
        result.moments.insert(result.moments.end(), each->begin(), each->end());
      }
    }
  }
  return result;
}

}  // namespace ballast::testing
