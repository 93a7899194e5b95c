// What the command refuses: one clear line, the right status, nothing left behind.
// SPDX-License-Identifier: Apache-2.0
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <filesystem>

#include "command_runner.h"

namespace ballast::testing {
namespace {

using ::testing::AllOf;
using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::IsEmpty;
using ::testing::StartsWith;
using Arguments = std::vector<std::string>;

class Refusals : public ::testing::Test {
 protected:
  // A command line that works, in scratch space, with more behind it.
  Arguments train(const Arguments& more) const {
    Arguments all = {"train",
                     "--model",
                     source_path("configs/models/gpt-tiny.json"),
                     "--engine",
                     source_path("configs/engine/nvme.json"),
                     "--data",
                     data_,
                     "--steps",
                     "2",
                     "--sequence",
                     "16",
                     "--batch",
                     "1",
                     "--set",
                     "nvme.paths=" + scratch_.path() + "/states"};
    all.insert(all.end(), more.begin(), more.end());
    return all;
  }
  // Runs it and expects the status, one line with all those words, and nothing new in the scratch folder.
  void refused(const Arguments& arguments, int status, const std::vector<std::string>& words) const {
    const auto before = scratch_.entries();
    const CommandResult result = run_command(arguments);
    std::string line;
    for (const std::string& argument : arguments) line += argument + " ";
    SCOPED_TRACE(line + "\n" + result.error);
    EXPECT_EQ(result.status, status);
    ASSERT_EQ(result.error_lines().size(), 1u);
    EXPECT_THAT(result.error, StartsWith("ballast: "));
    for (const std::string& word : words) EXPECT_THAT(result.error, HasSubstr(word));
    EXPECT_EQ(scratch_.entries(), before);
  }

  ScratchFolder scratch_;
  std::string data_ = scratch_.write("text", std::string(5000, 'x') + "the end");
};

TEST_F(Refusals, UsageThatMeansNothing) {
  refused({}, 2, {"subcommand", "--help"});
  refused({"nonsense"}, 2, {"nonsense"});
  refused({"train"}, 2, {"--model"});
  refused({"bench"}, 2, {"subcommand"});
  refused({"bench", "nonsense"}, 2, {"nonsense"});
  refused({"plan"}, 2, {"--model is required"});
  refused({"tune"}, 2, {"--nvme is required"});
  refused(train({"--stepps", "3"}), 2, {"--stepps"});
  refused(train({"stray"}), 2, {"stray"});
  refused({"bench", "io", "--queue-depth", "0"}, 2, {"--queue-depth"});
  refused({"bench", "io", "--size", "256"}, 2, {"--size", "unit"});
  refused({"bench", "io", "--size", "-1GiB"}, 2, {"--size"});
  refused({"bench", "io", "--backend", "mmap"}, 2, {"backend", "io_uring"});
  refused({"bench", "adam", "--parameters", "0"}, 2, {"--parameters"});
}

TEST_F(Refusals, NumbersOutsideTheirRange) {
  for (const char* option : {"--batch", "--micro-batches", "--every"})
    for (const char* value : {"0", "-3", "1.5", "many", "99999999999999999999", ""})
      refused(train({option, value}), 2, {option});
  refused({"train", "--steps", "-3"}, 2, {"--steps"});
  refused(train({"--order", "diagonal"}), 2, {"--order", "vertical"});
  for (const char* value : {"-1", "nan", "inf", "fast"})
    refused(train({"--learning-rate", value}), 2, {"learning-rate"});
  for (const char* value : {"-1", "18446744073709551616", "1.5", "1e3", "", "many"})
    refused(train({"--seed", value}), 2, {"--seed"});
  refused(train({"--micro-batches", "3"}), 2, {"batch"});
  for (const char* value : {"0", "4294967296", "4294967297"})
    refused({"bench", "step", "--model", source_path("configs/models/gpt-tiny.json"), "--engine",
             source_path("configs/engine/host.json"), "--micro-batches", value},
            2, {"--micro-batches"});
}

TEST_F(Refusals, ConfigurationsThatMeanNothing) {
  const auto with = [&](const std::string& text) {
    return Arguments{"train",
                     "--model",
                     source_path("configs/models/gpt-tiny.json"),
                     "--engine",
                     scratch_.write("engine.json", text),
                     "--data",
                     data_};
  };
  refused(with("{\"zero_stage\": 3,"), 2, {"engine.json:1:", "not JSON"});
  refused(with("{\"budgett\": {\"host\": \"1GiB\"}}"), 2, {"budgett", "\"budget\""});
  refused(with("{\"budget\": {\"host\": 1024}}"), 2, {"budget.host", "1024 of what?"});
  refused(with(""), 2, {"engine.json"});
  refused({"train", "--model", source_path("configs/models/gpt-tiny.json"), "--engine", scratch_.path() + "/absent",
           "--data", data_},
          2, {"absent", "No such file"});
  refused(
      {"train", "--model", source_path("configs/models/gpt-tiny.json"), "--engine", scratch_.path(), "--data", data_},
      2, {scratch_.path()});
}

TEST_F(Refusals, SettingsThatMeanNothing) {
  refused(train({"--set", "budget.host=-5"}), 2, {"budget.host=-5"});
  refused(train({"--set", "optimizer.betas=[0.9,1.5]"}), 2, {"optimizer.betas"});
  refused(train({"--set", "optimizer.timing=eager"}), 2, {"optimizer.timing", "clip_global_norm"});
  refused(train({"--set", "durability=always"}), 2, {"durability", "step"});
  refused(train({"--set", "device=cuda"}), 2, {"cuda"});
  refused(train({"--set", "budgets.host=1GiB"}), 2, {"budget.host"});
  refused(train({"--set", "threads"}), 2, {"--set threads", "KEY=VALUE"});
  refused(train({"--every", "5"}), 2, {"--checkpoint"});
  refused(train({"--resume", "--overwrite"}), 2, {"--resume", "--overwrite"});
}

TEST_F(Refusals, ModelsThatMeanNothing) {
  const auto with = [&](const std::string& text) {
    Arguments arguments = train({});
    arguments[2] = scratch_.write("model.json", text);
    return arguments;
  };
  const std::string shape = R"("heads": 4, "context": 64, "vocabulary": 256)";
  refused(with(R"({"type": "gpt", "layers": -1, "width": 64, )" + shape + "}"), 2, {"model.json", "layers"});
  refused(with(R"({"type": "gpt", "layers": 1, "width": 0, )" + shape + "}"), 2, {"model.json", "width"});
  refused(with(R"({"type": "gpt", "layers": 1, "width": 66, )" + shape + "}"), 2, {"heads"});
  refused(with(R"({"type": "gpt", "layers": 99999999999, "width": 99999999999, )" + shape + "}"), 2, {"model.json"});
  refused(with(R"({"type": "bert", "layers": 1, "width": 64, )" + shape + "}"), 2, {"type"});
  refused(with(R"({"type": "gpt", "layers": 1, "width": 64, "head": 1, )" + shape + "}"), 2, {"head"});
  refused(with("{"), 2, {"model.json"});
}

TEST_F(Refusals, BatchesWhoseActivationsTheMemoryDoesNotHold) {
  Arguments arguments = train({});
  arguments[2] = source_path("configs/models/gpt-175b.json");
  arguments[10] = "2048";
  arguments[12] = "1048576";
  refused(arguments, 2, {"activations", "free", "--batch"});
  arguments = train({"--micro-batches", "134217728"});
  arguments[12] = "134217728";
  refused(arguments, 2, {"batches", "free", "--batch"});
}

TEST_F(Refusals, TextsThatCannotBeTrainedOn) {
  const auto with = [&](const std::string& path) {
    Arguments arguments = train({});
    arguments[6] = path;
    return arguments;
  };
  refused(with(scratch_.path() + "/absent"), 2, {"absent"});
  refused(with(scratch_.path()), 2, {scratch_.path()});
  refused(with(scratch_.write("empty", "")), 2, {"empty"});
  refused(with(scratch_.write("short", "short")), 2, {"short"});
}

TEST_F(Refusals, OutputsThatCannotBeWrittenBeforeAnythingIsTrained) {
  for (const char* option : {"--json", "--log", "--trace", "--report"}) {
    refused(train({option, scratch_.path() + "/absent/out"}), 2, {scratch_.path() + "/absent/out"});
    refused(train({option, scratch_.path()}), 2, {scratch_.path()});
    refused(train({option, "/proc/out"}), 2, {"/proc/out"});
  }
  const std::string file = scratch_.write("file", "x");
  for (const char* more : {"--overwrite", "--resume"}) {
    refused(train({more, "--checkpoint", file}), 2, {"--checkpoint", file, "no folder"});
    refused(train({more, "--checkpoint", file + "/a/b"}), 2, {"--checkpoint", file, "no folder"});
    refused(train({more, "--checkpoint", ""}), 2, {"--checkpoint"});
  }
  EXPECT_EQ(read_file(file), "x");
}

TEST_F(Refusals, OutputsThatWouldOverwriteOneAnotherOrWhatIsRead) {
  const std::string one = scratch_.path() + "/one";
  refused(train({"--json", one, "--trace", one}), 2, {"--trace", "--json"});
  refused(train({"--json", one, "--report", one}), 2, {"--report", "--json"});
  refused(train({"--json", one, "--log", scratch_.path() + "/./one"}), 2, {"--log", "--json"});
  refused(train({"--json", scratch_.path() + "/states"}), 2, {"--json", "nvme.paths"});
  std::filesystem::create_symlink("text", scratch_.path() + "/link");
  std::filesystem::create_hard_link(data_, scratch_.path() + "/second name");
  const std::string before = read_file(data_);
  for (const char* option : {"--json", "--log", "--trace", "--report"})
    for (const char* name : {"/text", "/link", "/second name"})
      refused(train({option, scratch_.path() + name}), 2, {option, "--data"});
  EXPECT_EQ(read_file(data_), before);
  Arguments arguments = train({"--json", scratch_.write("model.json", read_file(train({})[2]))});
  arguments[2] = scratch_.path() + "/model.json";
  refused(arguments, 2, {"--json", "--model"});
  EXPECT_EQ(run_command(train({"--json", "/dev/null", "--log", "/dev/null", "--trace", "/dev/null"})).status, 0);
}

TEST_F(Refusals, PathsThatHoldNoStates) {
  const std::string deep = "/" + std::string(300, 'x');
  std::filesystem::create_directories(scratch_.path() + "/taken/ballast-rank0.chunks");
  for (const std::string& path : {std::string("/proc"), std::string("/proc/nope"), data_, data_ + "/below",
                                  scratch_.path() + deep, scratch_.path() + "/taken"}) {
    refused(train({"--set", "nvme.paths=" + path}), 2, {path});
    refused(train({"--set", "nvme.paths=" + scratch_.path() + "/new/a," + path}), 2, {path});
  }
  for (const std::string& path : {std::string("/proc/nope"), data_, data_ + "/below"})
    refused({"bench", "io", "--path", path, "--size", "1MiB"}, 2, {path});
  // Where no state goes to NVMe the path does not matter.
  EXPECT_EQ(run_command(train({"--set", "placement=auto", "--set", "nvme.paths=/proc/nope"})).status, 0);
}

TEST_F(Refusals, BudgetsThatCannotWorkNameTheSmallestThatDoes) {
  refused(train({"--set", "budget.host=4KiB"}), 2, {"smallest budget.host: "});
  refused(train({"--set", "budget.device=4KiB"}), 2, {"smallest budget.device: "});
}

TEST(CommandHelp, EverySubcommandExplainsItself) {
  for (const Arguments& arguments : std::vector<Arguments>{{"--help"},
                                                           {"train", "--help"},
                                                           {"bench", "--help"},
                                                           {"bench", "io", "--help"},
                                                           {"bench", "adam", "--help"},
                                                           {"doctor", "--help"}}) {
    const CommandResult result = run_command(arguments);
    EXPECT_EQ(result.status, 0);
    EXPECT_THAT(result.error, IsEmpty());
    EXPECT_THAT(result.output, HasSubstr("--help"));
  }
  EXPECT_THAT(run_command({"--version"}).output, StartsWith("0."));
}

}  // namespace
}  // namespace ballast::testing
