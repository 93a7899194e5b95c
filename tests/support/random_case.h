// A random model, trainer and precision by seed, and what a run of it gives.
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <string>
#include <vector>

#include "support/engine_support.h"

namespace ballast::testing {

constexpr int kCaseSteps = 4;

struct Case {
  std::vector<SyntheticUnit> model;
  SyntheticOptions options;
  Config::Precision precision;
  std::string type;
  bool clip = false;
};

inline Case make_case(std::uint64_t seed) {
  base::Random random(seed);
  Case c;
  const auto units = 2 + random.below(4);
  for (std::uint64_t u = 0; u < units; ++u) {
    SyntheticUnit unit{"unit/" + std::to_string(u), {}, true};
    const auto parameters = 1 + random.below(5);
    for (std::uint64_t p = 0; p < parameters; ++p) {
      ParameterSpec spec;
      spec.name = std::to_string(p);
      const std::uint64_t kind = random.below(8);
      if (kind == 0) spec.shape = {0, 3};
      if (kind > 1) spec.shape = {static_cast<std::int64_t>(1 + random.below(kind > 6 ? 60000 : 3000)), 3};
      spec.options.group = static_cast<int>(random.below(3));
      if (random.below(3) == 0) spec.options.dtype = static_cast<DataType>(random.below(3));
      spec.options.trainable = random.below(6) > 0;
      unit.parameters.push_back(spec);
    }
    unit.trainable = false;
    for (const ParameterSpec& spec : unit.parameters) unit.trainable |= spec.options.trainable;
    c.model.push_back(unit);
  }
  c.options.micro_batches = 1 + static_cast<int>(random.below(3));
  c.options.tied = c.model[0].trainable && random.below(2) == 0;
  c.precision.parameters = static_cast<DataType>(random.below(3));
  c.precision.gradients = random.below(3) == 0 ? DataType::bf16 : DataType::fp32;
  constexpr MomentType kMoments[] = {MomentType::bf16, MomentType::int8, MomentType::fp32};
  c.precision.moments = kMoments[random.below(3)];
  c.type = random.below(2) == 0 ? "adamw" : "adam";
  c.clip = random.below(3) == 0;
  if (random.below(2) == 0) {
    c.options.evaluate_before = [](int step) { return step % 2 == 1; };
  }
  if (random.below(2) == 0) {
    c.options.absent = [seed](int step, int micro, ParameterId id) {
      return base::mix(seed ^ static_cast<std::uint64_t>(step * 64 + micro * 16) ^ (id.unit * 5 + id.index)) % 5 == 0;
    };
    // absent() refuses frozen parameters: those of this model are left alone.
    const auto model = c.model;
    c.options.absent = [absent = c.options.absent, model](int step, int micro, ParameterId id) {
      return model[id.unit].parameters[id.index].options.trainable && absent(step, micro, id);
    };
  }
  return c;
}

struct Outcome {
  std::vector<double> losses;
  std::vector<float> values;
  std::vector<double> norms;
  std::int64_t parameters = 0;
};

inline Outcome run_case(const Case& c, Config config, const EngineEnvironment& environment) {
  config.precision = c.precision;
  config.optimizer.type = c.type;
  config.optimizer.learning_rate = 0.01;
  if (c.clip && config.optimizer.timing != Timing::eager) config.optimizer.clip_global_norm = 0.05;
  Engine engine(config, environment);
  SyntheticTrainer trainer(engine, c.model, c.options);
  engine.commit();
  trainer.initialize();
  Outcome outcome;
  for (int s = 0; s < kCaseSteps; ++s) {
    outcome.losses.push_back(trainer.step());
    outcome.norms.push_back(trainer.last_norm().value);
  }
  outcome.values = trainer.values();
  outcome.parameters = engine.report().parameters;
  return outcome;
}

inline std::uint64_t smallest_in(const std::string& text, const std::string& key) {
  const auto at = text.find("smallest " + key + ": ");
  return at == std::string::npos ? 0 : std::stoull(text.substr(at + key.size() + 11)) * 1024;
}

// The budgets of a configuration made as small as they go.
inline Config smallest(const Case& c, Config config) {
  for (std::string key : {"budget.host", "budget.device"}) {
    auto& bytes = key == "budget.host" ? config.budget.host_bytes : config.budget.device_bytes;
    const std::uint64_t ample = bytes;
    bytes = 1;
    try {
      run_case(c, config, {});
    } catch (const PlanError& error) {
      bytes = smallest_in(error.what(), key);
      if (bytes == 0) throw;
    }
    if (bytes == 1) bytes = ample;
  }
  return config;
}

}  // namespace ballast::testing
