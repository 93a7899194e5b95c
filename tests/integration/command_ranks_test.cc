// The command under mpirun: one training run over ranks, whatever the stage; refusals before anything starts.
// SPDX-License-Identifier: Apache-2.0
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <chrono>
#include <csignal>
#include <cstdlib>
#include <filesystem>
#include <nlohmann/json.hpp>
#include <thread>
#include <utility>

#include "command_runner.h"
#include "gpt/trainer.h"
#include "support/on_ranks.h"
#include "support/sanitizers.h"

namespace ballast {
namespace {

using ::testing::HasSubstr;
using ::testing::Not;
using testing::read_file;
using testing::run_program;
using testing::ScratchFolder;
using testing::source_path;

class CommandRanks : public ::testing::Test {
 protected:
  void SetUp() override {
    if (std::system("mpirun --version > /dev/null 2>&1") != 0) GTEST_SKIP() << "no mpirun here";
    text_ = scratch_.write("text", [] {
      std::string text;
      for (int i = 0; i < 2000; ++i) text += "line " + std::to_string(i * 37 % 101) + " of a text to learn\n";
      return text;
    }());
    model_ = scratch_.write("model.json",
                            R"({"type": "gpt", "layers": 2, "width": 64, "heads": 4, "context": 64,
                                "vocabulary": 256, "tie_embeddings": true})");
  }
  // Arguments of mpirun, up to the command's own.
  static std::vector<std::string> world(int ranks) {
    return {"mpirun", "--allow-run-as-root", "--oversubscribe", "-n", std::to_string(ranks), BALLAST_COMMAND};
  }
  std::vector<std::string> train(int ranks, const std::vector<std::string>& more) {
    std::vector<std::string> arguments = ranks == 0 ? std::vector<std::string>{BALLAST_COMMAND} : world(ranks);
    for (const std::string& each :
         {std::string("train"), std::string("--model"), model_, std::string("--engine"),
          source_path("configs/engine/nvme.json"), std::string("--data"), text_, std::string("--steps"),
          std::string("4"), std::string("--sequence"), std::string("32"), std::string("--set"),
          "nvme.paths=" + scratch_.path() + "/run", std::string("--set"), std::string("budget.host=64MiB"),
          std::string("--set"), std::string("budget.device=64MiB"), std::string("--set"),
          std::string("communication.timeout_seconds=30")})
      arguments.push_back(each);
    arguments.insert(arguments.end(), more.begin(), more.end());
    return arguments;
  }
  nlohmann::json trained(int ranks, std::vector<std::string> more) {
    const std::string json = scratch_.path() + "/out.json";
    more.insert(more.end(), {"--json", json});
    const auto result = run_program(train(ranks, more), {"OMP_NUM_THREADS=1"});
    EXPECT_EQ(result.status, 0) << result.error;
    last_output_ = result.output;
    return nlohmann::json::parse(read_file(json));
  }

  const ScratchFolder scratch_;
  std::string text_, model_, last_output_;
};

TEST_F(CommandRanks, TrainTheSameAtEveryStageAndOnceInTheOutput) {
  const auto one = trained(0, {"--batch", "6"})["losses"].get<std::vector<double>>();
  for (const int ranks : {2, 3}) {
    std::vector<double> first;
    for (const std::string stage : {"0", "1", "2", "3"}) {
      const nlohmann::json out = trained(ranks, {"--batch", "6", "--set", "zero_stage=" + stage});
      EXPECT_EQ(out["world_size"], ranks);
      EXPECT_EQ(out["zero_stage"].dump(), stage);
      const auto losses = out["losses"].get<std::vector<double>>();
      if (first.empty()) first = losses;
      EXPECT_EQ(losses, first) << "stage " << stage;
      for (std::size_t i = 0; i < one.size(); ++i) EXPECT_NEAR(losses[i], one[i], 5e-4 * one[i]);
      const std::size_t table = last_output_.find("loss, nats per byte");
      EXPECT_NE(table, std::string::npos);
      EXPECT_EQ(last_output_.find("loss, nats per byte", table + 1), std::string::npos) << last_output_;
      EXPECT_GT(out["bytes_per_step"]["collective"], 0);
    }
  }
}

TEST_F(CommandRanks, TheFirstWritesTheReportAndSaysOnceWhatLimited) {
  const std::string report = scratch_.path() + "/report.html";
  const nlohmann::json out = trained(2, {"--batch", "4", "--report", report});
  const std::string sentence = out["limit"]["sentence"];
  const std::size_t at = last_output_.find(sentence);
  ASSERT_NE(at, std::string::npos) << last_output_;
  EXPECT_EQ(last_output_.find(" % of a step (", at + sentence.size()), std::string::npos);
  EXPECT_GT(out["limit"]["busy_seconds"]["collective"], 0);
  const std::string page = read_file(report);
  const std::size_t data = page.find("id=\"data\">") + std::string("id=\"data\">").size();
  const auto parsed = nlohmann::json::parse(page.substr(data, page.find("</script>", data) - data), nullptr, false);
  ASSERT_FALSE(parsed.is_discarded());
  EXPECT_EQ(parsed["figures"], out);
  EXPECT_EQ(scratch_.entries(), (std::vector<std::string>{"model.json", "out.json", "report.html", "text"}));
}

// Losses of ranks that are threads of this process, for what the command was given.
std::vector<double> losses_of_threads(int ranks, std::int64_t batch, const Config& config, const std::string& model,
                                      const std::string& text) {
  constexpr int kSteps = 4;
  const auto data = gpt::TokenData::open(text);
  std::vector<double> losses;
  testing::on_ranks(ranks, [&](int rank, const std::shared_ptr<Communicator>& communicator) {
    EngineEnvironment environment;
    environment.communicator = communicator;
    Engine engine(config, environment);
    gpt::TrainSettings settings;
    settings.batch = batch;
    settings.sequence = 32;
    settings.world_size = ranks;
    settings.rank = rank;
    settings.threads = 1;
    gpt::GptTrainer trainer(engine, gpt::GptShape::from_file(model), settings, data);
    engine.commit();
    engine.initialize(trainer.fill());
    for (std::uint64_t step = 0; step < kSteps; ++step) {
      double loss = trainer.step(step).loss;
      communicator->all_reduce_sum({&loss, 1});
      if (rank == 0) losses.push_back(loss / ranks);
    }
  });
  return losses;
}

TEST_F(CommandRanks, GiveTheBitsOfRanksThatAreThreads) {
  struct World {
    int ranks;
    std::int64_t batch;
    const char* type;
  };
  for (const auto& [ranks, batch, type] :
       {World{2, 6, "bf16"}, World{3, 6, "fp32"}, World{4, 8, "bf16"}, World{7, 14, "bf16"}}) {
    if (test::kSanitized && ranks > 3) continue;  // slow there; the memory they touch is that of three
    const std::string precision = std::string("precision.parameters=") + type;
    const auto processes =
        trained(ranks, {"--batch", std::to_string(batch), "--set", precision})["losses"].get<std::vector<double>>();
    for (const char* stage : {"0", "1", "2", "3"}) {
      SCOPED_TRACE(std::to_string(ranks) + " ranks, stage " + stage);
      Config config = Config::from_file(source_path("configs/engine/nvme.json"), {{"zero_stage", stage},
                                                                                  {"device", "host"},
                                                                                  {"precision.parameters", type},
                                                                                  {"budget.host", "64MiB"},
                                                                                  {"budget.device", "64MiB"}});
      config.nvme.paths = {scratch_.path() + "/threads"};
      EXPECT_EQ(losses_of_threads(ranks, batch, config, model_, text_), processes);
    }
  }
}

TEST_F(CommandRanks, RefuseABatchThatDoesNotDivideAndAWorldThatWouldFallApart) {
  const auto batch = run_program(train(2, {"--batch", "3"}));
  EXPECT_EQ(batch.status, 2);
  EXPECT_THAT(batch.error, HasSubstr("--batch 3 does not divide"));
  const auto apart = run_program(train(2, {"--set", "communication.backend=single"}));
  EXPECT_EQ(apart.status, 2);
  EXPECT_THAT(apart.error, HasSubstr("each would train alone"));
}

TEST_F(CommandRanks, ThatSrunStartedWithoutPmiWouldEachTrainAlone) {
  const auto result = run_program(train(0, {}), {"SLURM_STEP_NUM_TASKS=2", "SLURM_NTASKS=2", "SLURM_PROCID=0",
                                                 "SLURM_LOCALID=0", "SLURM_NODEID=0", "SLURM_STEP_TASKS_PER_NODE=2"});
  EXPECT_EQ(result.status, 2);
  EXPECT_EQ(result.error_lines().size(), 1u) << result.error;
  EXPECT_THAT(result.error, HasSubstr("srun started 2 ranks"));
  EXPECT_THAT(result.error, HasSubstr("srun --mpi=pmix"));
  EXPECT_THAT(result.error, HasSubstr("mpirun within the allocation"));
}

TEST_F(CommandRanks, ThatWereGivenDifferentConfigurationsSayWhichDiffersInWhat) {
  std::vector<std::string> arguments = train(1, {});
  const std::vector<std::string> mine(arguments.begin() + 5, arguments.end());
  arguments.push_back(":");
  arguments.insert(arguments.end(), {"-n", "1"});
  arguments.insert(arguments.end(), mine.begin(), mine.end());
  arguments.insert(arguments.end(), {"--set", "optimizer.weight_decay=0.25"});
  const auto result = run_program(arguments);
  EXPECT_NE(result.status, 0);
  EXPECT_THAT(result.error, HasSubstr("optimizer"));
  EXPECT_THAT(result.error, HasSubstr("0.25"));
}

TEST_F(CommandRanks, EndWithTwoWhereOneOfThemRefusesWhoeverEndsFirst) {
  for (const bool first_refuses : {true, false}) {
    const std::vector<std::string> all = train(1, {});
    const std::vector<std::string> mine(all.begin() + 5, all.end());
    std::vector<std::string> arguments(all.begin(), all.begin() + 5);
    for (const bool refuses : {first_refuses, !first_refuses}) {
      if (arguments.size() > 5) arguments.insert(arguments.end(), {":", "-n", "1"});
      arguments.insert(arguments.end(), mine.begin(), mine.end());
      if (refuses) arguments.insert(arguments.end(), {"--batch", "3"});
    }
    const auto result = run_program(arguments);
    EXPECT_EQ(result.status, 2) << result.error;
    EXPECT_THAT(result.error, HasSubstr("--batch 3 does not divide"));
  }
  // All refuse: some hear of it from others before they see it themselves.
  const auto result = run_program(train(4, {"--batch", "4", "--set", "budget.device=4KiB"}));
  EXPECT_EQ(result.status, 2) << result.error;
  EXPECT_THAT(result.error, HasSubstr("smallest budget.device: "));
}

// Processes, but for those that are gone and not yet missed, with that entry in their environment.
int processes_marked(const std::string& mark) {
  int count = 0;
  for (const auto& entry : std::filesystem::directory_iterator("/proc")) {
    const std::string path = entry.path().string();
    if (path.find_first_not_of("0123456789", 6) != std::string::npos) continue;
    count += read_file(path + "/environ").find(mark) != std::string::npos;  // a zombie has none
  }
  return count;
}

TEST_F(CommandRanks, LeaveNoProcessBehindHoweverTheirLauncherEndsAndStartAgainAtOnce) {
  const std::string mark = "BALLAST_TEST_MARK=" + scratch_.path();
  for (const int signal : {SIGINT, SIGTERM, SIGKILL}) {
    SCOPED_TRACE("signal " + std::to_string(signal));
    const auto ended = run_program(train(2, {"--steps", "1000000"}), {"OMP_NUM_THREADS=1", mark}, 2500, signal);
    EXPECT_NE(ended.status, 0);
    int left = 0;
    for (int looks = 0; looks < 200 && (left = processes_marked(mark)) > 0; ++looks)
      std::this_thread::sleep_for(std::chrono::milliseconds(100));
    EXPECT_EQ(left, 0);
    EXPECT_EQ(trained(2, {})["world_size"], 2);
  }
}

TEST_F(CommandRanks, MeasureStepsAgainstRawTransfersOfAllRanksAtOnce) {
  const std::string json = scratch_.path() + "/step.json";
  std::vector<std::string> arguments = world(2);
  arguments.insert(arguments.end(), {"bench", "step", "--model", source_path("configs/models/gpt-10m.json"), "--engine",
                                     source_path("configs/engine/nvme.json"), "--steps", "12", "--set",
                                     "nvme.paths=" + scratch_.path() + "/run", "--set",
                                     "communication.timeout_seconds=30", "--json", json});
  const auto result = run_program(arguments);
  ASSERT_EQ(result.status, 0) << result.error;
  EXPECT_THAT(result.output, HasSubstr("raw mixed rate of all ranks"));
  EXPECT_THAT(result.output, HasSubstr("fastest and slowest rank"));
  const auto out = nlohmann::json::parse(read_file(json));
  EXPECT_EQ(out["world_size"], 2);
  for (const char* const key : {"rank_step_seconds", "rank_nvme_seconds"}) {
    const auto& seconds = out[key];
    ASSERT_EQ(seconds["each"].size(), 2u) << key;
    const double a = seconds["each"][0], b = seconds["each"][1];
    EXPECT_GT(std::min(a, b), 0);
    EXPECT_EQ(seconds["min"], std::min(a, b));
    EXPECT_EQ(seconds["max"], std::max(a, b));
  }
  // What a step moves, over the rate of all ranks together, against the step of the slowest.
  ASSERT_EQ(out["efficiency_pairs"].size(), 2u);
  for (const auto& pair : out["efficiency_pairs"]) EXPECT_GT(pair.get<double>(), 0);
}

TEST_F(CommandRanks, MeasureCollectivesWithTheBandwidthOfABus) {
  const std::string json = scratch_.path() + "/collective.json";
  std::vector<std::string> arguments = world(2);
  arguments.insert(arguments.end(), {"bench", "collective", "--smallest", "64KiB", "--largest", "1MiB", "--iterations",
                                     "3", "--json", json});
  const auto result = run_program(arguments);
  EXPECT_EQ(result.status, 0) << result.error;
  const auto out = nlohmann::json::parse(read_file(json));
  EXPECT_EQ(out["world_size"], 2);
  EXPECT_EQ(out["results"].size(), 9u);
  for (const auto& each : out["results"]) {
    const double factor = each["operation"] == "all_reduce" ? 1.0 : 0.5;
    EXPECT_NEAR(each["bus_bytes_per_second"].get<double>(), factor * each["algorithm_bytes_per_second"].get<double>(),
                1);
    EXPECT_GT(each["bus_bytes_per_second"], 0);
  }
}

}  // namespace
}  // namespace ballast
