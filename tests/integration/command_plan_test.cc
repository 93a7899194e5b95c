// What `ballast plan` says beforehand against what `ballast train` then reports; its refusals and its JSON.
// SPDX-License-Identifier: Apache-2.0
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <nlohmann/json.hpp>

#include "command_runner.h"

namespace ballast::testing {
namespace {

using ::testing::EndsWith;
using ::testing::HasSubstr;
using ::testing::IsEmpty;
using Arguments = std::vector<std::string>;
using Json = nlohmann::json;

class Planning : public ::testing::Test {
 protected:
  Json figures(Arguments arguments) const {
    const std::string path = scratch_.path() + "/out.json";
    arguments.insert(arguments.end(), {"--json", path});
    const CommandResult result = run_command(arguments);
    EXPECT_EQ(result.status, 0) << result.error;
    EXPECT_THAT(result.error, IsEmpty());
    return Json::parse(read_file(path), nullptr, false);
  }
  static Arguments plan(const std::string& model, const std::string& engine, const Arguments& more = {}) {
    Arguments all = {"plan", "--model", source_path("configs/models/" + model + ".json"), "--engine",
                     source_path("configs/engine/" + engine + ".json")};
    all.insert(all.end(), more.begin(), more.end());
    return all;
  }
  // Both with the same options.
  void compare(const std::string& engine, Arguments more) const {
    more.insert(more.end(), {"--sequence", "16", "--set", "nvme.paths=" + scratch_.path() + "/states"});
    const Json planned = figures(plan("gpt-tiny", engine, more));
    Arguments train = plan("gpt-tiny", engine, more);
    train.front() = "train";
    train.insert(train.end(), {"--data", data_, "--steps", "5", "--overwrite"});
    const Json trained = figures(train);
    EXPECT_EQ(planned["bytes_per_step"], trained["bytes_per_step"]);
    for (const char* memory : {"device", "host"})
      EXPECT_EQ(planned["peak_bytes"][memory], trained["peak_bytes"][memory]) << memory;
    for (const char* key : {"parameters", "placement", "timing", "nvme_stored_bytes", "budget_bytes", "zero_stage"})
      EXPECT_EQ(planned[key], trained[key]) << key;
    EXPECT_NEAR(planned["resident_fraction"].get<double>(), trained["resident_fraction"].get<double>(), 1e-12);
  }

  ScratchFolder scratch_;
  std::string data_ = [&] {
    std::string text;
    for (int i = 0; i < 400; ++i) text += "line " + std::to_string(i * 7919) + " of the text\n";
    return scratch_.write("text", text);
  }();
};

TEST_F(Planning, BytesAndMemoryAreThoseThatTrainingReports) {
  compare("nvme", {"--set", "optimizer.timing=just_in_time"});
  compare("nvme", {"--set", "optimizer.timing=eager", "--set", "optimizer.clip_global_norm=null"});
  compare("nvme", {"--set", "optimizer.timing=after_backward"});
}

TEST_F(Planning, SoTheyAreWithMicroBatchesInBothOrders) {
  compare("nvme", {"--micro-batches", "5", "--batch", "5"});
  compare("nvme", {"--micro-batches", "3", "--batch", "3", "--order", "vertical"});
}

TEST_F(Planning, SoTheyAreInTightBudgetsAndWithDurableSteps) {
  compare("auto", {"--set", "budget.host=1MiB", "--set", "budget.device=4MiB"});
  compare("auto", {"--set", "budget.host=12MiB", "--set", "budget.device=4MiB"});
  compare("nvme", {"--set", "durability=step"});
}

TEST_F(Planning, ATrillionParametersOnAThousandRanksArePlanned) {
  const Json json =
      figures(plan("gpt-1t", "auto",
                   {"--ranks", "1024", "--hardware", source_path("configs/hardware/dgx-h100.json"), "--set",
                    "budget.device=80GiB", "--set", "budget.host=250GiB", "--sequence", "2048"}));
  EXPECT_NEAR(json["parameters"].get<double>(), 1.008e12, 0.001e12);
  EXPECT_EQ(json["world_size"], 1024);
  // 12 bytes of states and 4 of gradients a parameter, shared by all ranks.
  double held = 0;
  for (const char* state : {"parameters", "optimizer", "gradients"}) {
    for (const char* tier : {"device", "host", "nvme"}) held += json["state_bytes"][state][tier].get<double>();
  }
  EXPECT_NEAR(held, 16 * json["parameters"].get<double>() / 1024, 0.01 * held);
  double largest = 0;
  for (const auto& [lane, seconds] : json["bound_seconds"].items()) largest = std::max(largest, seconds.get<double>());
  EXPECT_GE(json["step_seconds"].get<double>(), largest);
  EXPECT_GT(json["tokens_per_second"].get<double>(), 0);
}

TEST_F(Planning, APlanThatCannotFitEndsWithTheSmallestBudget) {
  const CommandResult host = run_command(plan("gpt-tiny", "nvme", {"--set", "budget.host=64KiB"}));
  EXPECT_EQ(host.status, 2);
  ASSERT_EQ(host.error_lines().size(), 1u);
  EXPECT_THAT(host.error_lines()[0], HasSubstr("smallest budget.host: "));
  EXPECT_THAT(host.error_lines()[0], EndsWith(" KiB"));
  const std::string line = host.error_lines()[0];
  const std::string smallest = line.substr(line.rfind(": ") + 2, line.size() - line.rfind(": ") - 6);
  EXPECT_EQ(run_command(plan("gpt-tiny", "nvme", {"--set", "budget.host=" + smallest + "KiB"})).status, 0);
  const CommandResult device = run_command(plan("gpt-tiny", "nvme", {"--set", "budget.device=64KiB"}));
  EXPECT_EQ(device.status, 2);
  EXPECT_THAT(device.error, HasSubstr("smallest budget.device: "));
}

TEST_F(Planning, WhatMeansNothingIsRefusedInOneLine) {
  const auto refused = [](const Arguments& arguments, const std::string& why) {
    const CommandResult result = run_command(arguments);
    EXPECT_EQ(result.status, 2) << result.output;
    EXPECT_EQ(result.error_lines().size(), 1u) << result.error;
    EXPECT_THAT(result.error, HasSubstr(why));
  };
  refused(plan("gpt-tiny", "nvme", {"--ranks", "3", "--batch", "4"}), "does not divide");
  refused(plan("gpt-tiny", "nvme", {"--ranks", "0"}), "--ranks");
  refused(plan("gpt-tiny", "nvme", {"--ranks", "2"}), "network");
  refused(plan("gpt-tiny", "nvme", {"--hardware", "/nowhere/h.json"}), "/nowhere/h.json");
  refused(plan("gpt-tiny", "nvme", {"--hardware", source_path("configs/models/gpt-tiny.json")}), "unknown key");
  refused(plan("gpt-tiny", "nvme", {"--sequence", "100000"}), "context");
}

TEST_F(Planning, TheTableTellsWhatLimitsAndWhatWouldHelp) {
  const CommandResult result = run_command(plan("gpt-tiny", "nvme"));
  EXPECT_EQ(result.status, 0);
  for (const char* part : {"limited by", "% of the step", "twice the NVMe drives", "tokens a step", "smallest",
                           "rated endurance", "assumed: give --hardware"})
    EXPECT_THAT(result.output, HasSubstr(part));
}

}  // namespace
}  // namespace ballast::testing
