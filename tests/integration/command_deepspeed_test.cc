// `ballast train` with a DeepSpeed configuration, and with learning-rate schedules.
// SPDX-License-Identifier: Apache-2.0
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cmath>
#include <filesystem>
#include <nlohmann/json.hpp>
#include <sstream>

#include "command_runner.h"

namespace ballast::testing {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;
using ::testing::IsEmpty;
using ::testing::Not;
using Arguments = std::vector<std::string>;
using Json = nlohmann::json;

constexpr double kPi = 3.14159265358979323846;

class DeepSpeedTraining : public ::testing::Test {
 protected:
  Arguments train(const std::string& engine, const Arguments& more = {}) const {
    Arguments all = {"train",
                     "--model",
                     source_path("configs/models/gpt-tiny.json"),
                     "--engine",
                     engine,
                     "--data",
                     data_,
                     "--sequence",
                     "16",
                     "--set",
                     "nvme.paths=" + scratch_.path() + "/states"};
    all.insert(all.end(), more.begin(), more.end());
    return all;
  }
  Json figures(const CommandResult& result) const {
    EXPECT_EQ(result.status, 0) << result.error;
    Json json = Json::parse(read_file(scratch_.path() + "/out.json"), nullptr, false);
    EXPECT_FALSE(json.is_discarded());
    std::filesystem::remove(scratch_.path() + "/out.json");
    return json;
  }
  Json run(const std::string& engine, Arguments more) const {
    more.insert(more.end(), {"--json", scratch_.path() + "/out.json"});
    return figures(run_command(train(engine, more)));
  }
  std::string write_config(const std::string& text) { return scratch_.write("engine.json", text); }

  ScratchFolder scratch_;
  std::string data_ = [&] {
    std::string text;
    for (int i = 0; i < 400; ++i) text += "line " + std::to_string(i * 7919) + " of the text\n";
    return scratch_.write("text", text);
  }();
  const std::string published_ = source_path("tests/data/deepspeed/gpt_tiny_nvme.json");
};

TEST_F(DeepSpeedTraining, APublishedConfigurationTrainsAsItIs) {
  const CommandResult result =
      run_command(train(published_, {"--steps", "6", "--json", scratch_.path() + "/out.json"}));
  EXPECT_THAT(result.error,
              AllOf(HasSubstr("ballast: warning: "), HasSubstr("mean nothing here"), HasSubstr("steps_per_print"),
                    HasSubstr("zero_optimization.offload_param.max_in_cpu"), Not(HasSubstr("gradient_clipping"))));
  EXPECT_EQ(result.error.find("mean nothing here"), result.error.rfind("mean nothing here")) << "told once";
  const Json json = figures(result);
  EXPECT_EQ(json["batch"], 8);
  EXPECT_EQ(json["micro_batches"], 2);
  EXPECT_EQ(json["zero_stage"], 3);
  EXPECT_EQ(json["placement"], "parameters nvme, gradients host, optimizer nvme");
  EXPECT_GT(json["bytes_per_step"]["nvme_read"].get<double>(), 10 * json["parameters"].get<double>());
  // WarmupCosineLR of 1e-3: before its first iteration, two of warm-up, then half a cosine over four to a tenth.
  std::vector<double> expected = {0, 0, 1e-3 / 2};
  for (int i = 2; i < 5; ++i) expected.push_back(1e-3 * (0.1 + 0.9 * (1 + std::cos(kPi * (i - 2 + 1) / 4)) / 2));
  ASSERT_EQ(json["learning_rates"].size(), expected.size());
  for (std::size_t i = 0; i < expected.size(); ++i)
    EXPECT_NEAR(json["learning_rates"][i].get<double>(), expected[i], 1e-17) << "step " << i;
  EXPECT_LT(json["losses"][5].get<double>(), json["losses"][0].get<double>());
}

TEST_F(DeepSpeedTraining, ItsNumbersAreThoseOfTheConfigurationOfOursThatItBecomes) {
  const Json theirs = run(published_, {"--steps", "4"});
  Json configuration = theirs["configuration"];
  configuration["nvme"]["paths"] = {scratch_.path() + "/states"};
  const Json ours = run(write_config(configuration.dump()), {"--steps", "4", "--batch", "8", "--micro-batches", "2"});
  EXPECT_EQ(ours["losses"], theirs["losses"]);
  EXPECT_EQ(ours["grad_norms"], theirs["grad_norms"]);
}

TEST_F(DeepSpeedTraining, FlagsWinOverItsBatchAndContradictionsAreRefused) {
  const Json json = run(published_, {"--steps", "1", "--batch", "6", "--micro-batches", "3"});
  EXPECT_EQ(json["batch"], 6);
  EXPECT_EQ(json["micro_batches"], 3);
  const std::string wrong = write_config(
      R"({"train_batch_size": 64, "train_micro_batch_size_per_gpu": 2, "gradient_accumulation_steps": 4,
          "zero_optimization": {"stage": 2}})");
  const CommandResult result = run_command(train(wrong, {"--steps", "1"}));
  EXPECT_EQ(result.status, 2);
  EXPECT_THAT(result.error, AllOf(HasSubstr("train_batch_size 64 is not train_micro_batch_size_per_gpu 2 x "
                                            "gradient_accumulation_steps 4 x ranks 1 = 8"),
                                  HasSubstr("--micro-batches")));
  EXPECT_EQ(run(wrong, {"--steps", "1", "--batch", "2", "--micro-batches", "2"})["batch"], 2);
}

TEST_F(DeepSpeedTraining, WhatCannotBeHonouredEndsWithStatusTwo) {
  const CommandResult result = run_command(train(source_path("tests/data/deepspeed/refused_zeropp.json")));
  EXPECT_EQ(result.status, 2);
  EXPECT_THAT(result.error, HasSubstr("zero_quantized_weights cannot be honoured"));
}

TEST_F(DeepSpeedTraining, ExplainPrintsWhatEachKeyBecame) {
  for (const Arguments& command :
       {Arguments{"doctor"}, {"plan", "--model", source_path("configs/models/gpt-tiny.json")}}) {
    Arguments all = command;
    all.insert(all.end(), {"--engine", published_, "--explain"});
    const CommandResult result = run_command(all);
    EXPECT_EQ(result.status, 0) << result.error;
    EXPECT_THAT(result.output,
                AllOf(HasSubstr("zero_optimization.stage"), HasSubstr("-> zero_stage 3"),
                      HasSubstr("-> nvme.queue_depth 8"), HasSubstr("- nothing: host memory is always")));
  }
}

TEST_F(DeepSpeedTraining, APlanIsOfTheBatchThatTheFileSays) {
  const Json json = figures(run_command({"plan", "--model", source_path("configs/models/gpt-tiny.json"), "--engine",
                                         published_, "--json", scratch_.path() + "/out.json"}));
  EXPECT_EQ(json["batch"], 8);
  EXPECT_EQ(json["micro_batches"], 2);
}

TEST_F(DeepSpeedTraining, AnAutoScheduleEndsWithTheRun) {
  const std::string engine = write_config(
      R"({"bf16": {"enabled": "auto"}, "optimizer": {"type": "AdamW", "params": {"lr": 4e-4}},
          "scheduler": {"type": "WarmupDecayLR",
                        "params": {"total_num_steps": "auto", "warmup_num_steps": 2, "warmup_type": "linear"}}})");
  const Json json = run(engine, {"--steps", "6", "--batch", "1"});
  EXPECT_EQ(json["configuration"]["learning_rate_schedule"]["total_num_steps"], 6);
  // Linear from iteration 2 down to what would be 0 at iteration 6; a step has the rate of the iteration before it.
  const std::vector<double> expected = {0, 0, 2e-4, 4e-4, 3e-4, 2e-4};
  for (std::size_t i = 0; i < expected.size(); ++i)
    EXPECT_NEAR(json["learning_rates"][i].get<double>(), expected[i], 1e-17) << "step " << i;
}

TEST_F(DeepSpeedTraining, ASchedulesRatesAndLossesAreTheSameAfterAResume) {
  const std::string engine = source_path("configs/engine/nvme.json");
  const Arguments schedule = {"--batch",
                              "2",
                              "--set",
                              "durability=step",
                              "--set",
                              R"(learning_rate_schedule={"type": "WarmupCosineLR", "warmup_num_steps": 3,
                                                        "total_num_steps": 8})"};
  const auto with = [&](const std::string& steps, const Arguments& more) {
    Arguments all = schedule;
    all.insert(all.end(), {"--steps", steps});
    all.insert(all.end(), more.begin(), more.end());
    return all;
  };
  const std::string log = scratch_.path() + "/log";
  const Json whole = run(engine, with("8", {"--log", log}));
  run(engine, with("5", {"--overwrite"}));
  const Json rest = run(engine, with("8", {"--resume"}));
  ASSERT_EQ(rest["first_step"], 5);
  for (std::size_t i = 0; i < 3; ++i) {
    EXPECT_EQ(rest["learning_rates"][i], whole["learning_rates"][5 + i]);
    EXPECT_EQ(rest["losses"][i], whole["losses"][5 + i]);
  }
  EXPECT_NE(whole["learning_rates"][4], whole["learning_rates"][5]);
  std::istringstream lines(read_file(log));
  std::size_t step = 0;
  for (std::string line; std::getline(lines, line); ++step)
    EXPECT_EQ(Json::parse(line)["learning_rate"], whole["learning_rates"][step]);
  EXPECT_EQ(step, 8u);
  const CommandResult other =
      run_command(train(engine, with("8", {"--resume", "--set", "learning_rate_schedule.warmup_num_steps=4"})));
  EXPECT_EQ(other.status, 2);
  EXPECT_THAT(other.error, HasSubstr("learning_rate_schedule.warmup_num_steps (3 there, 4 here)"));
}

TEST_F(DeepSpeedTraining, AScheduleThatStaysAtOneRateTrainsAsThatRate) {
  const std::string engine = source_path("configs/engine/host.json");
  const Json constant = run(engine, {"--steps", "3", "--batch", "1", "--set", "optimizer.learning_rate=0.002"});
  const Json schedule =
      run(engine, {"--steps", "3", "--batch", "1", "--set",
                   R"(learning_rate_schedule={"type": "WarmupLR", "warmup_min_lr": 0.002, "warmup_max_lr": 0.002})"});
  EXPECT_EQ(schedule["losses"], constant["losses"]);
  const Json flag = run(engine, {"--steps", "3", "--batch", "1", "--learning-rate", "0.002", "--set",
                                 R"(learning_rate_schedule={"type": "WarmupLR"})"});
  EXPECT_EQ(flag["losses"], constant["losses"]) << "--learning-rate is constant, and wins";
}

}  // namespace
}  // namespace ballast::testing
