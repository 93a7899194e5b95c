// A run that goes on registers its model anew: in another order, with other parameters frozen, or another model.
// SPDX-License-Identifier: Apache-2.0
#include <ballast/base/error.h>
#include <ballast/engine/checkpoint.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <filesystem>
#include <map>

#include "support/durable_runs.h"

// GCC 12 takes the strings of temporaries that are handed on for uninitialised.
#if defined(__GNUC__) && !defined(__clang__)
#pragma GCC diagnostic ignored "-Wmaybe-uninitialized"
#endif

namespace ballast::testing {
namespace {

using ::testing::AllOf;
using ::testing::ElementsAre;
using ::testing::HasSubstr;

using Model = std::vector<std::pair<std::string, std::vector<ParameterSpec>>>;

// What is known of a parameter, by "unit/name".
struct Known {
  std::vector<float> values, exp_avg, exp_avg_sq;
  std::uint64_t count = 0;
  friend bool operator==(const Known&, const Known&) = default;
};
using States = std::map<std::string, Known>;

ParameterSpec parameter(const std::string& name, bool trainable = true) {
  return {name, {40, 3}, {.trainable = trainable}};
}

class ResumeNames : public ::testing::TestWithParam<bool> {
 protected:
  bool durable() const { return GetParam(); }  // goes on in place; else from a checkpoint

  // Gradients and values follow from names, so that only what is matched wrongly can differ.
  States train(const Model& model, int steps, bool resumes, double weight_decay = 0.1) {
    Config config = plain_config(path_, Tier::nvme, Timing::just_in_time);
    config.optimizer.weight_decay = weight_decay;
    config.durability.every_steps = durable() ? 1 : 0;
    EngineEnvironment environment;
    environment.log = [&](LogLevel level, std::string_view text) {
      if (level == LogLevel::warning) warnings_.emplace_back(text);
    };
    Engine engine(config, environment);
    std::vector<UnitId> ids;
    for (const auto& [name, parameters] : model) ids.push_back(engine.add_unit(name, parameters));
    CommitOptions options;
    if (resumes) options.existing = ExistingRun::resume;
    if (resumes && !durable()) options.checkpoints = path_ + "/saves";
    engine.commit(options);
    EXPECT_EQ(engine.resumed().has_value(), resumes);
    const auto key = [&](ParameterId id) { return model[id.unit].first + "/" + model[id.unit].second[id.index].name; };
    const auto seed = [&](ParameterId id) {
      return static_cast<float>(std::hash<std::string>()(key(id)) % 97) * 0.01F;
    };
    if (!resumes) {
      engine.initialize([&](ParameterId id, std::int64_t first, std::span<float> values) {
        for (std::size_t i = 0; i < values.size(); ++i) {
          values[i] = seed(id) + 0.003F * static_cast<float>(first + static_cast<std::int64_t>(i));
        }
      });
    }
    for (int s = 0; s < steps; ++s) {
      auto step = engine.begin_step();
      {
        auto pass = step.begin_pass();
        for (std::size_t u = 0; u < model.size(); ++u) {
          const auto& parameters = model[u].second;
          if (std::none_of(parameters.begin(), parameters.end(), [](const auto& p) { return p.options.trainable; })) {
            engine.acquire(ids[u], engine.stream()).release();
            continue;
          }
          contribute(engine, ids[u], parameters, [&](std::uint32_t p) { return seed({ids[u].index, p}) - 0.4F; });
        }
      }
      step.finish_backward();
      step.update();
    }
    engine.settle();
    if (!durable()) engine.save_checkpoint(path_ + "/saves/step-" + std::to_string(++saved_));
    States states;
    for (std::uint32_t u = 0; u < model.size(); ++u) {
      for (std::uint32_t p = 0; p < model[u].second.size(); ++p) {
        Known& known = states[key({u, p})];
        known.values.resize(120);
        engine.read({u, p}, 0, known.values);
        known.count = engine.step_count({u, p});
        if (!model[u].second[p].options.trainable) continue;
        known.exp_avg.resize(120);
        known.exp_avg_sq.resize(120);
        engine.read_moments({u, p}, 0, known.exp_avg, known.exp_avg_sq);
      }
    }
    return states;
  }
  std::string refusal(const Model& model) {
    return text_of<ConfigError>([&] { train(model, 0, true); });
  }
  void forget() {
    std::filesystem::remove_all(path_);
    std::filesystem::create_directory(path_);
    saved_ = 0;
  }

  const Watchdog watchdog_{200};
  const TemporaryDirectory directory_;
  const std::string path_ = directory_.path() + "/run";
  std::vector<std::string> warnings_;
  int saved_ = 10;
};
INSTANTIATE_TEST_SUITE_P(Places, ResumeNames, ::testing::Bool(),
                         [](const auto& durable) { return durable.param ? "committed_step" : "checkpoint"; });

TEST_P(ResumeNames, StatesGoToTheParametersOfTheirNamesWhateverTheOrder) {
  const Model model = {
      {"u", {parameter("a"), parameter("b"), parameter("c")}}, {"v", {parameter("a")}}, {"w", {parameter("a")}}};
  const Model other = {
      {"w", {parameter("a")}}, {"u", {parameter("c"), parameter("a"), parameter("b")}}, {"v", {parameter("a")}}};
  const States whole = train(model, 5, false);
  forget();
  const States before = train(model, 3, false);
  EXPECT_EQ(train(other, 0, true), before);
  EXPECT_EQ(train(other, 2, true), whole);
  EXPECT_EQ(train(model, 0, true), whole);
  EXPECT_TRUE(warnings_.empty()) << warnings_.front();
}

TEST_P(ResumeNames, NamesThatAreMissingOrUnknownAreListedAndNothingIsLost) {
  const Model model = {{"u", {parameter("a"), parameter("b"), parameter("c")}}, {"v", {parameter("a")}}};
  const States before = train(model, 2, false);
  EXPECT_THAT(refusal({{"u", {parameter("a"), parameter("x"), parameter("c")}}, {"v", {parameter("a")}}}),
              AllOf(HasSubstr("it has u/b, which are not here"), HasSubstr("it does not have u/x")));
  EXPECT_THAT(
      refusal({{"u", {parameter("a"), parameter("b"), parameter("c"), parameter("d")}}, {"v", {parameter("a")}}}),
      HasSubstr("it does not have u/d"));
  EXPECT_THAT(refusal({{"u", {parameter("a"), parameter("c")}}, {"v", {parameter("a")}}}),
              HasSubstr("it has u/b, which are not here"));
  EXPECT_THAT(refusal({{"v", {parameter("a")}}}), HasSubstr("it has u/a, u/b, u/c, which are not here"));
  Model shape = model;
  shape[0].second[1].shape = {3, 40};
  EXPECT_THAT(refusal(shape), HasSubstr("in unit u: b [40, 3] bf16, group 0 there, b [3, 40] bf16, group 0 here"));
  EXPECT_EQ(train(model, 0, true), before);
}

TEST_P(ResumeNames, WhatIsFrozenKeepsItsBitsAndWhatIsTrainedAnewBeginsAtOne) {
  const auto model = [](bool a, bool b, bool c, bool d) {
    return Model{{"u", {parameter("a", a), parameter("b", b)}}, {"v", {parameter("c", c), parameter("d", d)}}};
  };
  // Half of them, all but one, all.
  for (const Model& each :
       {model(true, false, false, true), model(false, false, false, true), model(false, false, false, false)}) {
    forget();
    const States before = train(each, 0, false);
    forget();
    const States after = train(each, 4, false);
    for (const auto& [unit, parameters] : each) {
      for (const ParameterSpec& p : parameters) {
        const std::string key = unit + "/" + p.name;
        EXPECT_EQ(after.at(key).values == before.at(key).values, !p.options.trainable) << key;
        EXPECT_EQ(after.at(key).count, p.options.trainable ? 4U : 0U) << key;
      }
    }
    EXPECT_EQ(train(each, 0, true), after);
  }
  // At the fifth step one is trained anew and another is frozen; c goes on as if nothing had been.
  forget();
  const States before = train(model(true, true, true, false), 4, false);
  warnings_.clear();
  const States after = train(model(true, false, true, true), 2, true);
  EXPECT_THAT(warnings_, ElementsAre(AllOf(HasSubstr("trained now, from moments and step counts of zero: v/d"),
                                           HasSubstr("frozen now: u/b"))));
  EXPECT_EQ(after.at("u/b").values, before.at("u/b").values);
  EXPECT_EQ(after.at("u/b").count, 0U);
  EXPECT_EQ(after.at("v/d").count, 2U);
  EXPECT_NE(after.at("v/d").values, before.at("v/d").values);
  EXPECT_EQ(after.at("v/c").count, 6U);
  forget();
  EXPECT_EQ(train(model(true, true, true, true), 6, false).at("v/c"), after.at("v/c"));
}

}  // namespace
}  // namespace ballast::testing
