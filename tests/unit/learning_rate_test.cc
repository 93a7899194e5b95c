// Learning-rate schedules against the closed formulas of DeepSpeed (runtime/lr_schedules.py), written out here anew:
// its iteration i, counted from 0, is the one after i + 1 updates, since it is stepped after each.
// SPDX-License-Identifier: Apache-2.0
#include <ballast/base/error.h>
#include <ballast/engine/config.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cmath>

namespace ballast {
namespace {

using testing::HasSubstr;

constexpr double kPi = 3.14159265358979323846;

Config config_of(const std::string& schedule) {
  return Config::from_json(R"({"optimizer": {"learning_rate": 0.002}, "learning_rate_schedule": )" + schedule + "}");
}
std::string refusal(const std::string& schedule) {
  try {
    config_of(schedule);
  } catch (const ConfigError& error) {
    return error.what();
  }
  return "accepted";
}
// Of iteration i.
double rate(const Config& config, int i) { return config.learning_rate(static_cast<std::uint64_t>(i + 1)); }
void expect_near(double value, double expected, const std::string& what) {
  EXPECT_NEAR(value, expected, 1e-15 + 1e-13 * std::abs(expected)) << what;
}

TEST(LearningRate, ConstantIsTheOptimizersOwn) {
  for (const std::uint64_t updates : {0, 1, 1000}) EXPECT_EQ(config_of(R"("constant")").learning_rate(updates), 0.002);
}

TEST(LearningRate, WarmupLrRisesLinearlyAndStays) {
  const Config config = config_of(
      R"({"type": "WarmupLR", "warmup_type": "linear", "warmup_min_lr": 0.001, "warmup_max_lr": 0.005,
          "warmup_num_steps": 8})");
  EXPECT_EQ(config.learning_rate(0), 0.001) << "before the first iteration";
  for (int i = 0; i < 8; ++i) expect_near(rate(config, i), 0.001 + 0.004 * i / 8, "iteration " + std::to_string(i));
  for (int i : {8, 9, 1000}) EXPECT_DOUBLE_EQ(rate(config, i), 0.005);
}

TEST(LearningRate, WarmupLrRisesByTheLogarithmUnlessTold) {
  const Config config = config_of(R"({"type": "WarmupLR", "warmup_num_steps": 100})");
  EXPECT_EQ(config.learning_rate(0), 0);
  for (int i = 0; i < 100; ++i)
    expect_near(rate(config, i), 0.002 * std::log(i + 1) / std::log(100), "iteration " + std::to_string(i));
  EXPECT_DOUBLE_EQ(rate(config, 100), 0.002) << "optimizer.learning_rate where warmup_max_lr is not given";
}

TEST(LearningRate, WarmupDecayLrFallsLinearlyToItsMinimum) {
  const Config config = config_of(
      R"({"type": "WarmupDecayLR", "warmup_type": "linear", "warmup_min_lr": 0.0005, "warmup_num_steps": 4,
          "total_num_steps": 20})");
  for (int i = 0; i < 4; ++i) expect_near(rate(config, i), 0.0005 + 0.0015 * i / 4, "iteration " + std::to_string(i));
  for (int i = 4; i <= 20; ++i)
    expect_near(rate(config, i), 0.0005 + 0.0015 * (20 - i) / 16, "iteration " + std::to_string(i));
  EXPECT_DOUBLE_EQ(rate(config, 21), 0.0005);
  EXPECT_DOUBLE_EQ(rate(config, 900), 0.0005);
}

TEST(LearningRate, WarmupCosineLrFollowsHalfACosine) {
  const Config config = config_of(
      R"({"type": "WarmupCosineLR", "warmup_type": "linear", "warmup_min_ratio": 0.1, "cos_min_ratio": 0.2,
          "warmup_num_steps": 5, "total_num_steps": 25})");
  EXPECT_EQ(config.learning_rate(0), 0) << "before the first iteration";
  for (int i = 0; i < 5; ++i)
    expect_near(rate(config, i), 0.002 * (0.1 + 0.9 * i / 5), "iteration " + std::to_string(i));
  for (int i = 5; i < 25; ++i)
    expect_near(rate(config, i), 0.002 * (0.2 + 0.8 * (1 + std::cos(kPi * (i - 5 + 1) / 20)) / 2),
                "iteration " + std::to_string(i));
  expect_near(rate(config, 24), 0.002 * 0.2, "the last iteration");
}

TEST(LearningRate, AWarmupOfLessThanTwoStepsIsOneOfTwo) {
  const Config config = config_of(R"({"type": "WarmupLR", "warmup_num_steps": 0})");
  EXPECT_EQ(rate(config, 0), 0);
  EXPECT_DOUBLE_EQ(rate(config, 1), 0.002);
}

TEST(LearningRate, WhatIsMissingOrSenselessIsRefused) {
  EXPECT_THAT(refusal(R"({"warmup_num_steps": 3})"), HasSubstr("learning_rate_schedule.type is missing"));
  EXPECT_THAT(refusal(R"("cosine")"), HasSubstr("must be \"constant\" or an object"));
  EXPECT_THAT(refusal(R"({"type": "Cosine"})"), HasSubstr("\"WarmupCosineLR\""));
  EXPECT_THAT(refusal(R"({"type": "WarmupLR", "warmup_type": "square"})"), HasSubstr("\"linear\""));
  EXPECT_THAT(refusal(R"({"type": "WarmupLR", "warmup_min_lr": -1})"), HasSubstr("warmup_min_lr"));
  EXPECT_THAT(refusal(R"({"type": "WarmupLR", "total_num_steps": 9})"), HasSubstr("has no meaning with the type"));
  EXPECT_THAT(refusal(R"({"type": "WarmupCosineLR", "warmup_max_lr": 1})"), HasSubstr("has no meaning with the type"));
  EXPECT_THAT(refusal(R"({"type": "WarmupCosineLR", "warmup_num_steps": 9, "total_num_steps": 9})"),
              HasSubstr("leaves WarmupCosineLR no step"));
  EXPECT_THAT(refusal(R"({"type": "WarmupLR", "warmup_num_step": 9})"), HasSubstr("warmup_num_steps"));
  EXPECT_THROW((void)config_of(R"({"type": "WarmupDecayLR"})").learning_rate(0), ConfigError);
}

TEST(LearningRate, SchedulesAreWrittenBackTheSame) {
  for (const char* text : {R"({"type": "WarmupLR", "warmup_max_lr": 0.1, "warmup_num_steps": 7})",
                           R"({"type": "WarmupDecayLR", "warmup_min_lr": 0.1, "total_num_steps": 70})",
                           R"({"type": "WarmupCosineLR", "warmup_type": "linear", "cos_min_ratio": 0.5})"}) {
    const Config config = config_of(text);
    EXPECT_EQ(Config::from_json(config.to_json()).to_json(), config.to_json());
    EXPECT_THAT(config.to_json(), HasSubstr("Warmup"));
  }
  const Config set = Config::from_json(
      "{}", "configuration",
      {{"learning_rate_schedule.type", "WarmupLR"}, {"learning_rate_schedule.warmup_num_steps", "5"}});
  EXPECT_EQ(set.learning_rate_schedule.warmup_num_steps, 5u);
}

}  // namespace
}  // namespace ballast
