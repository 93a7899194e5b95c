// The subcommands of `ballast`. Each adds its options to the parser and hands back what to run once they are parsed;
// that returns the exit status or throws.
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <ballast/engine/config.h>

#include <CLI/CLI.hpp>
#include <cstdint>
#include <functional>
#include <optional>
#include <string>
#include <utility>
#include <vector>

namespace ballast::cli {

using Run = std::function<int()>;

// A subcommand that can run.
struct Command {
  CLI::App* parser;
  Run run;
};

Command add_train(CLI::App& app);
Command add_plan(CLI::App& app);
Command add_tune(CLI::App& app);
Command add_doctor(CLI::App& app);
std::vector<Command> add_checkpoint(CLI::App& app);  // inspect, verify, export, import
Command add_bench_io(CLI::App& bench);
Command add_bench_adam(CLI::App& bench);
Command add_bench_step(CLI::App& bench);
Command add_bench_copy(CLI::App& bench);
Command add_bench_collective(CLI::App& bench);

// --engine and --set, which most subcommands take.
class EngineOptions {
 public:
  void add_to(CLI::App& parser, bool engine_required);
  // --explain, for the subcommands that say things without running anything: load() then prints what became of each
  // key of a DeepSpeed configuration.
  void add_explain(CLI::App& parser);
  // Throws ConfigError.
  Config load() const;
  const std::string& path() const { return path_; }

 private:
  std::string path_;
  std::vector<std::string> settings_;
  bool explain_ = false;
};

// Of a step, over all ranks and micro-batches. What is not given on the command line, a DeepSpeed configuration may
// say; otherwise 4 sequences per rank and micro-batch. Throws ConfigError where what that says contradicts itself.
struct BatchSizes {
  std::int64_t sequences = 0, micro_batches = 1;
};
BatchSizes batch_sizes(const Config& config, std::optional<std::int64_t> batch,
                       std::optional<std::int64_t> micro_batches, int ranks);

// Accepts 0 to 2^64 - 1 in digits (the parser itself would take what is larger for the largest).
CLI::Validator whole_number();

// A size such as "2GiB" given to an option. Throws ConfigError naming the option.
std::uint64_t size_option(const std::string& option, const std::string& text);

}  // namespace ballast::cli
