// What `ballast train` and `ballast bench` do and write.
// SPDX-License-Identifier: Apache-2.0
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <csignal>
#include <filesystem>
#include <nlohmann/json.hpp>
#include <set>
#include <sstream>

#include "command_runner.h"

namespace ballast::testing {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::IsEmpty;
using ::testing::Not;
using Arguments = std::vector<std::string>;
using Json = nlohmann::json;

class Training : public ::testing::Test {
 protected:
  Arguments train(const std::string& engine, const Arguments& more = {}, const std::string& batch = "1") const {
    Arguments all = {"train",
                     "--model",
                     source_path("configs/models/gpt-tiny.json"),
                     "--engine",
                     source_path("configs/engine/" + engine + ".json"),
                     "--data",
                     data_,
                     "--sequence",
                     "16",
                     "--batch",
                     batch,
                     "--set",
                     "nvme.paths=" + scratch_.path() + "/states"};
    all.insert(all.end(), more.begin(), more.end());
    return all;
  }
  // Runs it, expects success and silence on standard error, and returns what it wrote with --json.
  Json figures(const std::string& engine, Arguments more, const std::string& batch = "1") const {
    const std::string path = scratch_.path() + "/out.json";
    more.insert(more.end(), {"--json", path});
    const CommandResult result = run_command(train(engine, more, batch));
    EXPECT_EQ(result.status, 0) << result.error;
    EXPECT_THAT(result.error, IsEmpty());
    Json json = Json::parse(read_file(path), nullptr, false);
    EXPECT_FALSE(json.is_discarded());
    std::filesystem::remove(path);
    return json;
  }

  ScratchFolder scratch_;
  std::string data_ = [&] {
    std::string text;
    for (int i = 0; i < 400; ++i) text += "line " + std::to_string(i * 7919) + " of the text\n";
    return scratch_.write("text", text);
  }();
};

TEST_F(Training, WritesEveryFigureOfTheContract) {
  const Json json = figures("nvme", {"--steps", "4", "--micro-batches", "2", "--order", "vertical"}, "6");
  for (const char* key : {"parameters",
                          "world_size",
                          "first_step",
                          "losses",
                          "grad_norms",
                          "step_seconds",
                          "tokens_per_second",
                          "bytes_per_step",
                          "resident_fraction",
                          "peak_bytes",
                          "budget_bytes",
                          "bound_seconds",
                          "efficiency",
                          "io_backend",
                          "device",
                          "timing",
                          "placement",
                          "threads",
                          "zero_stage",
                          "resumed_from"})
    EXPECT_TRUE(json.contains(key)) << key;
  EXPECT_EQ(json["losses"].size(), 4u);
  EXPECT_EQ(json["grad_norms"].size(), 4u);
  EXPECT_EQ(json["step_seconds"].size(), 4u);
  EXPECT_EQ(json["first_step"], 0);
  EXPECT_EQ(json["world_size"], 1);
  EXPECT_EQ(json["resident_fraction"], 0.0);
  EXPECT_TRUE(json["resumed_from"].is_null());
  EXPECT_THAT(json["io_backend"], ::testing::AnyOf("io_uring", "threads"));
  for (const char* key : {"nvme_read", "nvme_written", "host_to_device", "device_to_host", "collective"})
    EXPECT_TRUE(json["bytes_per_step"].contains(key)) << key;
  const double parameters = json["parameters"];
  EXPECT_GT(json["bytes_per_step"]["nvme_read"].get<double>(), 10 * parameters);
  EXPECT_GT(json["bytes_per_step"]["nvme_written"].get<double>(), 8 * parameters);
  EXPECT_GT(json["bound_seconds"]["nvme"].get<double>(), 0);
  EXPECT_GT(json["efficiency"].get<double>(), 0);
  EXPECT_LE(json["peak_bytes"]["device"], json["budget_bytes"]["device"]);
  EXPECT_LE(json["peak_bytes"]["host"], json["budget_bytes"]["host"]);
  EXPECT_GT(json["peak_bytes"]["resident_set"].get<double>(), 1 << 20);
}

TEST_F(Training, LossesAreTheSameBitsWhereverTheStatesLive) {
  const Json nvme = figures("nvme", {"--steps", "3"});
  EXPECT_EQ(figures("in-memory", {"--steps", "3"})["losses"], nvme["losses"]);
  EXPECT_EQ(figures("host", {"--steps", "3"})["losses"], nvme["losses"]);
  const Json automatic = figures("auto", {"--steps", "3"});
  EXPECT_EQ(automatic["losses"], nvme["losses"]);
  EXPECT_EQ(automatic["placement"], "auto: parameters device, gradients device, optimizer device");
  EXPECT_NE(figures("host", {"--steps", "3", "--seed", "5"})["losses"], nvme["losses"]);
  EXPECT_EQ(figures("host", {"--steps", "2"})["bytes_per_step"]["nvme_read"], 0);
}

TEST_F(Training, AppendsWholeLinesToTheLogAndCutsATornOne) {
  const std::string log = scratch_.write("log", "{\"step\":7}\n{\"step\":8,\"lo");
  const Json json = figures("host", {"--steps", "3", "--log", log});
  std::istringstream lines(read_file(log));
  std::vector<Json> parsed;
  for (std::string line; std::getline(lines, line);) parsed.push_back(Json::parse(line));
  ASSERT_EQ(parsed.size(), 4u);
  EXPECT_EQ(parsed[0]["step"], 7);
  for (std::size_t i = 0; i < 3; ++i) {
    EXPECT_EQ(parsed[i + 1]["step"], i);
    EXPECT_EQ(parsed[i + 1]["loss"], json["losses"][i]);
    EXPECT_EQ(parsed[i + 1]["grad_norm"], json["grad_norms"][i]);
    EXPECT_EQ(parsed[i + 1]["seconds"], json["step_seconds"][i]);
  }
}

TEST_F(Training, LeavesOnlyWhatWasAskedFor) {
  const std::string trace = scratch_.path() + "/trace.json";
  EXPECT_EQ(
      run_command(train("nvme", {"--steps", "1", "--trace", trace, "--json", scratch_.path() + "/out.json"})).status,
      0);
  EXPECT_FALSE(Json::parse(read_file(trace), nullptr, false).is_discarded());
  std::set<std::string> left;
  for (const std::string& name : scratch_.entries()) left.insert(name);
  left.erase("states");  // the folder may stay; its files may not
  EXPECT_THAT(left, ElementsAre("out.json", "text", "trace.json"));
  if (std::filesystem::exists(scratch_.path() + "/states")) {
    EXPECT_TRUE(std::filesystem::is_empty(scratch_.path() + "/states"));
  }
}

TEST_F(Training, SaysThatThereIsNothingToResumeFrom) {
  const CommandResult result = run_command(train("host", {"--steps", "1", "--resume"}));
  EXPECT_EQ(result.status, 0) << result.error;
  EXPECT_THAT(result.output, HasSubstr("nothing to resume from: starting at step 0"));
}

TEST_F(Training, GoesOnFromTheCommittedStepAndFromACheckpoint) {
  const std::string json = scratch_.path() + "/out.json", saves = scratch_.path() + "/saves";
  const auto out = [&](const Arguments& more) {
    Arguments arguments = {"--json", json};
    arguments.insert(arguments.end(), more.begin(), more.end());
    const CommandResult result = run_command(train("nvme", arguments));
    EXPECT_EQ(result.status, 0) << result.error;
    return nlohmann::json::parse(read_file(json));
  };
  const std::vector<double> all = out({"--steps", "6"})["losses"];
  const auto first = out({"--steps", "4", "--set", "durability=step", "--checkpoint", saves, "--every", "3"});
  EXPECT_EQ(first["losses"].get<std::vector<double>>(), std::vector<double>(all.begin(), all.begin() + 4));
  EXPECT_TRUE(first["resumed_from"].is_null());
  const CommandResult refused = run_command(train("nvme", {"--steps", "6"}));
  EXPECT_EQ(refused.status, 2);
  EXPECT_THAT(refused.error, AllOf(HasSubstr("holds a committed run, step 4"), HasSubstr("--resume")));
  const auto next = out({"--steps", "6", "--set", "durability=step", "--resume"});
  EXPECT_EQ(next["first_step"], 4);
  EXPECT_EQ(next["resumed_from"]["step"], 4);
  EXPECT_EQ(next["losses"].get<std::vector<double>>(), std::vector<double>(all.begin() + 4, all.end()));
  const auto over = out({"--steps", "1", "--overwrite"});
  EXPECT_EQ(over["losses"].get<std::vector<double>>(), std::vector<double>(all.begin(), all.begin() + 1));
  for (const char* folder : {"/step-3", "/step-4"}) EXPECT_TRUE(std::filesystem::exists(saves + folder)) << folder;
  // What lies beside it is of another course of the run.
  for (const char* end : {"/step-3", "/step-3/"}) {
    const CommandResult mixed = run_command(train("nvme", {"--steps", "6", "--resume", "--checkpoint", saves + end}));
    EXPECT_EQ(mixed.status, 2);
    EXPECT_THAT(mixed.error, AllOf(HasSubstr(saves + end), HasSubstr("step-4"), HasSubstr("a folder of its own")));
  }
  std::filesystem::remove_all(saves + "/step-4");
  const auto from_save = out({"--steps", "6", "--resume", "--checkpoint", saves + "/step-3"});
  EXPECT_EQ(from_save["first_step"], 3);
  EXPECT_EQ(from_save["losses"].get<std::vector<double>>(), std::vector<double>(all.begin() + 3, all.end()));
  EXPECT_TRUE(std::filesystem::exists(saves + "/step-6"));  // beside the one it went on from
  // Also where the committed step is later than that one.
  const Arguments durable = {"--steps", "7", "--set", "durability=step", "--overwrite"};
  ASSERT_EQ(run_command(train("nvme", durable)).status, 0);
  const auto committed =
      out({"--steps", "8", "--set", "durability=step", "--resume", "--checkpoint", saves + "/step-6"});
  EXPECT_EQ(committed["first_step"], 7);
  EXPECT_FALSE(std::filesystem::exists(saves + "/step-6/step-8"));
  EXPECT_TRUE(std::filesystem::exists(saves + "/step-8"));
}

TEST_F(Training, AResumeMakesUpForTheCheckpointThatAnInterruptionTook) {
  const std::string saves = scratch_.path() + "/saves";
  const auto again = [&](const std::string& steps, const std::vector<std::string>& expected) {
    const CommandResult result = run_command(train(
        "nvme", {"--steps", steps, "--set", "durability=step", "--resume", "--checkpoint", saves, "--every", "2"}));
    EXPECT_EQ(result.status, 0) << result.error;
    std::set<std::string> names;
    for (const auto& entry : std::filesystem::directory_iterator(saves)) names.insert(entry.path().filename());
    EXPECT_EQ(names, std::set<std::string>(expected.begin(), expected.end()));
  };
  again("4", {"step-2", "step-4"});
  std::filesystem::rename(saves + "/step-4", saves + "/step-4.new");
  again("4", {"step-2", "step-4"});  // with no step left to make
  std::filesystem::rename(saves + "/step-4", saves + "/step-4.new");
  again("5", {"step-2", "step-4", "step-5"});
  std::filesystem::create_directory(saves + "/step-2.new");  // killed while an old one was removed
  again("5", {"step-2", "step-4", "step-5"});
}

TEST_F(Training, ARunThatGoesOnOtherwiseSaysWhatDiffers) {
  const auto go_on = [&](const std::string& steps, const Arguments& more) {
    Arguments arguments = {"--steps", steps, "--set", "durability=step", "--resume"};
    arguments.insert(arguments.end(), more.begin(), more.end());
    const CommandResult result = run_command(train("nvme", arguments, "2"));
    EXPECT_EQ(result.status, 0) << result.error;
    return result.error;
  };
  EXPECT_THAT(go_on("1", {}), IsEmpty());
  EXPECT_THAT(go_on("2", {}), IsEmpty());
  EXPECT_THAT(go_on("3", {"--micro-batches", "2"}), HasSubstr("micro-batches (1 before, 2 now)"));
  EXPECT_THAT(go_on("4", {"--micro-batches", "2", "--learning-rate", "0.25"}), HasSubstr("learning rate ("));
  const std::string kept = read_file(data_);
  scratch_.write("text", kept + "more");
  EXPECT_THAT(go_on("5", {"--micro-batches", "2", "--learning-rate", "0.25"}),
              AllOf(HasSubstr("the data, now " + data_), Not(HasSubstr("learning rate"))));
}

TEST_F(Training, NeverSavesBesideTheCheckpointsOfAnotherRun) {
  const std::string saves = scratch_.path() + "/saves";
  const auto to = [&](const std::string& steps, const Arguments& more = {}) {
    Arguments arguments = {"--steps", steps, "--checkpoint", saves};
    arguments.insert(arguments.end(), more.begin(), more.end());
    return run_command(train("host", arguments));
  };
  EXPECT_EQ(to("4").status, 0);
  const CommandResult refused = to("2");
  EXPECT_EQ(refused.status, 2);
  ASSERT_EQ(refused.error_lines().size(), 1u);
  EXPECT_THAT(refused.error,
              AllOf(HasSubstr(saves), HasSubstr("step 4"), HasSubstr("--resume"), HasSubstr("--overwrite")));
  EXPECT_TRUE(std::filesystem::exists(saves + "/step-4"));
  std::filesystem::create_directory(saves + "/step-4/step-1");
  for (const Arguments& more : {Arguments{}, Arguments{"--overwrite"}}) {
    Arguments arguments = {"--steps", "5", "--checkpoint", saves + "/step-4"};
    arguments.insert(arguments.end(), more.begin(), more.end());
    const CommandResult itself = run_command(train("host", arguments));
    EXPECT_EQ(itself.status, 2);
    EXPECT_THAT(itself.error, HasSubstr("name the folder around it"));
    EXPECT_TRUE(std::filesystem::exists(saves + "/step-4/step-1"));
  }
  EXPECT_EQ(to("2", {"--overwrite"}).status, 0);
  EXPECT_FALSE(std::filesystem::exists(saves + "/step-4"));
  EXPECT_TRUE(std::filesystem::exists(saves + "/step-2"));
}

TEST_F(Training, EndsWithATableForPeople) {
  const CommandResult result = run_command(train("nvme", {"--steps", "3"}));
  EXPECT_EQ(result.status, 0) << result.error;
  for (const char* row : {"loss", "->", "tokens/s", "bytes per parameter", "efficiency", "peak host memory",
                          "peak device memory", " of "})
    EXPECT_THAT(result.output, HasSubstr(row));
  EXPECT_THAT(result.output, Not(HasSubstr("\r")));
  EXPECT_THAT(result.output, Not(HasSubstr("nan")));
}

TEST_F(Training, AnInterruptEndsItBetweenStepsAndLeavesNothing) {
  const std::string json = scratch_.path() + "/out.json";
  CommandResult result;
  // A slow machine may not have come to its first step yet.
  for (const int stop_after_ms : {3000, 10'000, 30'000}) {
    result = run_command(train("nvme", {"--steps", "1000000", "--json", json}), {}, stop_after_ms, SIGINT);
    if (result.error != "ballast: interrupted\n") break;
  }
  EXPECT_EQ(result.status, 128 + SIGINT) << result.error;
  ASSERT_EQ(result.error_lines().size(), 1u);
  EXPECT_THAT(result.error, HasSubstr("interrupted after step"));
  EXPECT_FALSE(std::filesystem::exists(json));
  for (const std::string& name : scratch_.entries()) EXPECT_THAT(name, Not(HasSubstr("partial")));
  if (std::filesystem::exists(scratch_.path() + "/states")) {
    EXPECT_TRUE(std::filesystem::is_empty(scratch_.path() + "/states"));
  }
}

// Whatever it is doing: starting, filling parameters in, measuring rates, training.
TEST_F(Training, ASignalAtAnyMomentLeavesNothing) {
  const std::string out = scratch_.path() + "/out";
  const std::string engine = source_path("configs/engine/nvme.json");
  const std::string model = source_path("configs/models/gpt-10m.json");
  const std::string states = "nvme.paths=" + out + "/states";
  const std::vector<Arguments> commands = {
      {"train",   "--model", model,        "--engine", engine,     "--data", data_,
       "--steps", "1000000", "--sequence", "16",       "--batch",  "1",      "--set",
       states,    "--json",  out + "/j",   "--trace",  out + "/t", "--log",  out + "/l"},
      {"bench", "step", "--model", model, "--engine", engine, "--steps", "1000000", "--set", states, "--json",
       out + "/j", "--trace", out + "/t"},
      {"bench", "io", "--path", out + "/states/deeper", "--size", "16GiB", "--block-size", "4KiB", "--queue-depth", "1",
       "--json", out + "/j"},
      {"bench", "adam", "--parameters", "33554432", "--json", out + "/j"}};
  for (const Arguments& command : commands) {
    for (const auto& [after_ms, signal] : {std::pair(4, SIGTERM), std::pair(25, SIGINT), std::pair(60, SIGHUP),
                                           std::pair(150, SIGTERM), std::pair(350, SIGINT), std::pair(700, SIGTERM)}) {
      SCOPED_TRACE(command[0] + " " + command[1] + " after " + std::to_string(after_ms) + " ms");
      std::filesystem::create_directory(out);
      const CommandResult result = run_command(command, {}, after_ms, signal);
      EXPECT_EQ(result.status, 128 + signal) << result.error;
      EXPECT_LE(result.error_lines().size(), 1u) << result.error;
      std::vector<std::string> left;
      for (const auto& entry : std::filesystem::recursive_directory_iterator(out)) left.push_back(entry.path());
      std::erase(left, out + "/l");  // lines of steps that were done
      EXPECT_THAT(left, IsEmpty());
      std::filesystem::remove_all(out);
    }
  }
}

TEST_F(Training, AFullStandardOutputIsAnError) {
  if (!std::filesystem::exists("/dev/full")) GTEST_SKIP() << "there is no /dev/full here";
  const CommandResult result = run_command(train("host", {"--steps", "1", "--json", "/dev/full"}));
  EXPECT_EQ(result.status, 1);
  EXPECT_EQ(result.error_lines().size(), 1u) << result.error;
  EXPECT_THAT(result.error, HasSubstr("/dev/full"));
}

TEST_F(Training, BenchIoMovesWhatWasAskedAndRemovesItsFile) {
  const std::string json = scratch_.path() + "/io.json";
  const std::string states = scratch_.path() + "/a/b";
  const CommandResult result = run_command({"bench", "io", "--path", states, "--size", "9000KiB", "--block-size",
                                            "64KiB", "--queue-depth", "4", "--json", json});
  ASSERT_EQ(result.status, 0) << result.error;
  EXPECT_THAT(result.output, HasSubstr("note: 9000KiB is no whole number of blocks"));
  EXPECT_FALSE(std::filesystem::exists(scratch_.path() + "/a"));
  const Json figures = Json::parse(read_file(json));
  for (const char* key : {"read_bytes_per_second", "write_bytes_per_second", "mixed_bytes_per_second"})
    EXPECT_GT(figures[key].get<double>(), 0) << key;
  EXPECT_GE(figures["cpu_seconds_per_gigabyte"]["read"].get<double>(), 0);
  EXPECT_GE(figures["cpu_seconds_per_gigabyte"]["write"].get<double>(), 0);
  EXPECT_EQ(figures["size"], 9000 / 64 * 64 * 1024);
  EXPECT_EQ(figures["block_size"], 65536);
  EXPECT_EQ(figures["queue_depth"], 4);
  EXPECT_THAT(figures["io_backend"], ::testing::AnyOf("io_uring", "threads"));
}

TEST_F(Training, BenchStepTouchesNoRunAndNoCheckpointOfOthersAndLeavesNothing) {
  const std::string states = scratch_.path() + "/states", saves = scratch_.path() + "/saves";
  ASSERT_EQ(run_command(train("nvme", {"--steps", "2", "--set", "durability=step", "--checkpoint", saves})).status, 0);
  const auto files = [&] {
    std::set<std::string> names;
    for (const std::string& folder : {states, saves}) {
      for (const auto& entry : std::filesystem::recursive_directory_iterator(folder)) names.insert(entry.path());
    }
    return names;
  };
  const std::set<std::string> before = files();
  const std::string json = scratch_.path() + "/out.json";
  const auto bench = [&](const Arguments& more) {
    Arguments all = {"bench",    "step",
                     "--model",  source_path("configs/models/gpt-tiny.json"),
                     "--engine", source_path("configs/engine/nvme.json"),
                     "--steps",  "6",
                     "--set",    "nvme.paths=" + states,
                     "--json",   json};
    all.insert(all.end(), more.begin(), more.end());
    return run_command(all);
  };
  // A killed one's remains are replaced.
  std::filesystem::create_directories(saves + "/ballast-bench-step/step-7");
  for (int turn = 0; turn < 2; ++turn) {
    const CommandResult result = bench({"--set", "durability=step", "--checkpoint", saves});
    EXPECT_EQ(result.status, 0) << result.error;
    EXPECT_GT(Json::parse(read_file(json))["checkpoint"]["bytes"].get<double>(), 0);
    EXPECT_EQ(files(), before);
  }
  EXPECT_EQ(bench({"--set", R"(durability={"every": 3})"}).status, 0);
  EXPECT_EQ(files(), before);
  EXPECT_TRUE(Json::parse(read_file(json))["tokens_per_second"].is_null());
  const CommandResult refused = bench({});  // it would write where the run lies
  EXPECT_EQ(refused.status, 2);
  EXPECT_THAT(refused.error, HasSubstr("holds a committed run"));
}

TEST_F(Training, BenchAdamAndDoctorWriteTheirFigures) {
  const std::string json = scratch_.path() + "/out.json";
  ASSERT_EQ(run_command({"bench", "adam", "--parameters", "1048576", "--threads", "1", "--json", json}).status, 0);
  Json figures = Json::parse(read_file(json));
  for (const char* key :
       {"parameters_per_second", "bytes_per_second", "rewrite_bytes_per_second", "three_pass_parameters_per_second"})
    EXPECT_GT(figures[key].get<double>(), 0) << key;
  EXPECT_EQ(figures["threads"], 1);
  EXPECT_FALSE(figures["instruction_set"].get<std::string>().empty());

  const CommandResult doctor = run_command({"doctor", "--set", "nvme.paths=" + scratch_.path(), "--json", json});
  ASSERT_EQ(doctor.status, 0) << doctor.error;
  EXPECT_THAT(doctor.output, HasSubstr("io_uring"));
  figures = Json::parse(read_file(json));
  EXPECT_GT(figures["lines"].size(), 3u);
}

}  // namespace
}  // namespace ballast::testing
