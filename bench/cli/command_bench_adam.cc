// ballast bench adam: the optimizer's update over memory, against the memory's own speed.
// SPDX-License-Identifier: Apache-2.0
#include <ballast/offload/topology.h>

#include <memory>
#include <nlohmann/json.hpp>

#include "bench_adam.h"
#include "command.h"
#include "display.h"
#include "output_file.h"

namespace ballast::cli {
namespace {

struct Options {
  EngineOptions engine;
  std::int64_t parameters = std::int64_t{64} << 20;
  int threads = 0;
  std::string moments;
  std::string json;
};

int run(const Options& options) {
  const Config config = options.engine.load();
  OutputFile json_file(options.json);
  const int threads = options.threads > 0
                          ? options.threads
                          : config.threads.value_or(offload::default_thread_count(offload::discover_topology()));
  MomentType moments = config.precision.moments;
  for (const MomentType type : {MomentType::fp32, MomentType::bf16, MomentType::int8}) {
    if (options.moments == to_string(type)) moments = type;
  }
  const AdamBenchResult result = run_adam_bench(static_cast<std::uint64_t>(options.parameters), threads, moments);
  print_table({{"moments", std::string(to_string(moments))},
               {"update, one pass over split state",
                count_text(result.parameters_per_second) + " parameters/s, " + rate_text(result.bytes_per_second)},
               {"rewriting the same bytes", rate_text(result.rewrite_bytes_per_second)},
               {"update in three passes", count_text(result.three_pass_parameters_per_second) + " parameters/s"},
               {"threads", std::to_string(result.threads)},
               {"instruction set", result.instruction_set}});
  if (json_file.wanted()) {
    nlohmann::ordered_json out;
    out["moments"] = to_string(moments);
    out["parameters_per_second"] = result.parameters_per_second;
    out["bytes_per_second"] = result.bytes_per_second;
    out["rewrite_bytes_per_second"] = result.rewrite_bytes_per_second;
    out["three_pass_parameters_per_second"] = result.three_pass_parameters_per_second;
    out["threads"] = result.threads;
    out["instruction_set"] = result.instruction_set;
    json_file.publish(out.dump(2) + "\n");
  }
  return 0;
}

}  // namespace

Command add_bench_adam(CLI::App& bench) {
  auto options = std::make_shared<Options>();
  CLI::App* parser = bench.add_subcommand("adam", "Speed of the optimizer update in memory");
  options->engine.add_to(*parser, false);
  parser->add_option("--parameters", options->parameters, "How many; their states must exceed the last-level cache")
      ->type_name("N")
      ->check(CLI::Range(std::int64_t{1} << 10, std::int64_t{1} << 34))
      ->capture_default_str();
  parser->add_option("--threads", options->threads, "Threads (threads of the configuration)")
      ->type_name("N")
      ->check(CLI::Range(1, 1024));
  parser->add_option("--moments", options->moments, "Type of the moments (precision.moments of the configuration)")
      ->type_name("T")
      ->check(CLI::IsMember({"fp32", "bf16", "int8"}));
  parser->add_option("--json", options->json, "Write the figures to FILE")->type_name("FILE");
  return {parser, [options] { return run(*options); }};
}

}  // namespace ballast::cli
